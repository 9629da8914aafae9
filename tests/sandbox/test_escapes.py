"""Attacks on every sandbox that starts here (attacks.py): none gets out, and after each a sound program answers."""

from __future__ import annotations

import functools
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sandbox.attacks import ATTACKS, Attack
from sandbox.boxes import NAMES, box, started

from panoply.sandbox import Program, Result

SECRET = "the-secret-of-the-host"
SOUND = "import json, math\nprint(json.dumps([math.factorial(5), 1 + 1, sorted([3, 1, 2])]))"
ANSWER = "[120, 2, [1, 2, 3]]\n"


@dataclass
class Host:
    """Things of the host's that attacks are after."""

    folder: Path
    listener: socket.socket
    datagrams: socket.socket
    paths: list[socket.socket]
    victim: subprocess.Popen[bytes]

    def words(self) -> dict[str, object]:
        return {
            "secret": str(self.folder / "secret"),
            "outside": str(self.folder),
            "pid": self.victim.pid,
            "port": self.listener.getsockname()[1],
            "socket": str(self.folder / "s"),
            "abstract": f"panoply-test-{os.getpid()}",
        }


@functools.cache
def host() -> Host:
    folder = Path(tempfile.mkdtemp(prefix="sandbox-"))
    (folder / "secret").write_text(SECRET)
    os.environ["A_SECRET_OF_THE_HOST"] = SECRET
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagrams.bind(str(folder / "s.datagrams"))
    datagrams.setblocking(False)
    path, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    path.bind(str(folder / "s"))
    abstract.bind(f"\0panoply-test-{os.getpid()}")
    for one in (path, abstract):
        one.listen()
        one.setblocking(False)
    victim = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    return Host(folder, listener, datagrams, [path, abstract], victim)


@pytest.fixture(scope="module", autouse=True)
def _after() -> Iterator[None]:
    yield
    host().victim.kill()
    host().victim.wait()
    for one in (host().listener, host().datagrams, *host().paths):
        one.close()


def outcomes(name: str) -> dict[str, tuple[Result, Result]]:
    """Every attack and the sound program after it, in one go."""
    words = host().words()
    programs = [Program(a.code.format(**words), limits=a.limits) for a in ATTACKS.values()]
    results = box(name).run_many([p for attack in programs for p in (attack, Program(SOUND))])
    return dict(zip(ATTACKS, zip(results[::2], results[1::2], strict=True), strict=True))


def faults(name: str, attack: Attack, result: Result, after: Result) -> list[str]:
    """What is wrong about an attack's end, and about the sound program that came after it."""
    found = {
        "it got out": "ESCAPED" in result.said,
        "it saw a secret": SECRET in result.said,
        "it printed too much": len(result.said.encode())
        > attack.limits.output * 3,  # a byte may be shown by three
        "it ended otherwise": name != "monty" and result.ended not in attack.ended,
        "it did not say all": name != "monty" and attack.says not in result.said,
        "it took too long": result.ended == "time" and result.seconds > attack.limits.seconds + 2,
        "the next one suffered": (after.said, after.exit, after.ended) != (ANSWER, 0, ""),
    }
    return [what for what, is_so in found.items() if is_so]


@pytest.mark.parametrize("name", NAMES)
def test_no_attack_gets_out_and_the_host_is_as_it_was(name: str) -> None:
    """All in one test: workers start once, and the programs follow one another in them."""
    wrong = {
        attack: (found, result, after)
        for attack, (result, after) in outcomes(name).items()
        if (found := faults(name, ATTACKS[attack], result, after))
    }
    assert not wrong
    held = host()
    assert held.victim.poll() is None
    assert sorted(p.name for p in held.folder.iterdir()) == ["s", "s.datagrams", "secret"]
    assert (held.folder / "secret").read_text() == SECRET
    for listening in (held.listener, *held.paths):
        with pytest.raises(BlockingIOError):
            listening.accept()
    with pytest.raises(BlockingIOError):
        held.datagrams.recv(1)


def test_an_attack_that_gets_out_would_be_seen() -> None:
    sound, attack = Result(0, "", ANSWER, 0.1, 0), ATTACKS["busy"]
    seen = faults("landlock", attack, Result(0, "", f"ESCAPED {SECRET}", 9.0, 0), Result(1, "", "", 0.1, 0))
    assert seen == ["it got out", "it saw a secret", "it ended otherwise", "the next one suffered"]
    assert faults("landlock", attack, Result(-9, "time", "", 9.0, 0), sound) == ["it took too long"]
    assert faults("landlock", attack, Result(-9, "time", "", 0.4, 0), sound) == []
    assert len(ATTACKS) >= 51 or platform.machine() != "x86_64"


def test_at_least_one_sandbox_of_linux_starts_here() -> None:
    """A suite in which every sandbox is skipped would say nothing."""
    reasons = {name: held for name in NAMES if isinstance(held := started(name), str)}
    assert {"namespaces", "landlock"} - set(reasons), reasons
