"""What a program gets and what comes of it, the same in every sandbox; and what costs a program its answer alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sandbox.boxes import NAMES, box
from sandbox.boxes import started as started_box

from panoply.errors import PanoplyError, Resumable
from panoply.sandbox import Limits, Program, Wanted, locked
from panoply.sandbox.choice import KINDS
from panoply.sandbox.workers import Crew, Worker

LINUX = ("namespaces", "landlock")


def sound_programs(number: int) -> list[str]:
    """Programs of the kinds that models write, in the part of the language that all sandboxes have."""
    draw = random.Random(7)
    found = []
    for n in range(number):
        a, b, items = draw.randint(2, 30), draw.randint(1, 12), [draw.randint(-20, 20) for _ in range(6)]
        found.append(
            (
                f"total = 0\nfor i in range({a}):\n    total += i * {b} % 7\nprint(total)",
                f"def f(n):\n    return 1 if n < 2 else f(n - 1) + f(n - 2)\nprint(f({b}))",
                f"words = {'abcdef'[: 1 + b % 6]!r}\nprint(''.join(reversed(words)), len(words), words.upper())",
                f"print(sorted({items}), max({items}), sum(x for x in {items} if x > 0))",
                f"d = {{}}\nfor x in {items}:\n    d[x % 3] = d.get(x % 3, 0) + x\nprint(sorted(d.items()))",
                f"def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\nprint(gcd({a * 6}, {b * 4}))",
                f"try:\n    print({items}[{b}])\nexcept IndexError:\n    print('none')",
                f"class P:\n    def __init__(self, x):\n        self.x = x\nprint([P(i).x for i in range({b})])",
                f"import math\nprint(math.sqrt({a}), math.floor({a} / {b}), {a} ** {b})",
                f"import json\nprint(json.dumps({{'a': {items}, 'b': {a / b!r}}}))",
                f"print(f'{{{a}:>5}}|{{{a / b!r}:.3f}}', {a} // -{b}, -{a} % {b})",
                f"raise ValueError('{a} is not {b}')",
                f"x = {items}\nprint(x[{b}] if len(x) > {b} else 1 / 0)",
            )[n % 13]
        )
    return found


def test_two_hundred_sound_programs_have_the_same_result_everywhere() -> None:
    codes = sound_programs(200)
    assert len(set(codes)) > 150
    outcomes = {}
    here = [name for name in NAMES if not isinstance(started_box(name), str)]
    assert len(here) > 1, "there is nothing to compare"
    for name in here:
        results = box(name).run_many([Program(code) for code in codes])
        outcomes[name] = [(r.exit, r.ended, r.said) for r in results]
    first, *others = here
    for name in others:
        assert outcomes[name] == outcomes[first], name
    assert sum(exit_ == 0 for exit_, _, _ in outcomes[first]) > 150


@pytest.mark.parametrize("name", LINUX)
def test_input_exit_codes_and_both_streams(name: str) -> None:
    held = box(name)
    read, open0, both, leave, word, late = held.run_many(
        [
            Program("a = input()\nb = input()\nprint(int(a) + int(b))", stdin="3\n4\n"),
            Program("print(len(open(0).read()))", stdin="x" * 200_000),
            Program("import sys\nprint('one')\nprint('two', file=sys.stderr)\nprint('three')"),
            Program("import sys\nsys.exit(3)"),
            Program("import sys\nsys.exit('no')"),
            Program("print('before', flush=True)\nwhile True: pass", limits=Limits(seconds=0.3)),
        ]
    )
    assert read.said == "7\n"
    assert open0.said == "200000\n"
    assert both.said == "one\ntwo\nthree\n"
    assert (leave.exit, leave.ended, leave.said) == (3, "", "")
    assert (word.exit, word.said) == (1, "no\n")
    assert (late.exit, late.ended, late.said) == (-9, "time", "before\n")
    assert read.ok
    assert not leave.ok
    assert not late.ok
    assert 0 < read.seconds < 2
    assert 2**20 < read.peak < 2**29


def test_files_are_there_and_can_be_written_and_are_gone_for_the_next() -> None:
    held = box("namespaces")
    count = "import os\nprint(sorted(os.listdir('.')))"
    given, after, wrote, last = held.run_many(
        [
            Program("print(open('data.txt').read(), end='')", files={"data.txt": "ä\n"}),
            Program(count),
            Program("open('out', 'w').write('x')\nprint(open('out').read())"),
            Program(count, files={"a": "", "b": ""}),
        ]
    )
    assert given.said == "ä\n"
    assert after.said == "[]\n"
    assert wrote.said == "x\n"
    assert last.said == "['a', 'b']\n"
    small = held.run("open('f', 'wb').write(bytes(300_000))", limits=Limits(disk=2**18))
    large = held.run("print(open('f', 'wb').write(bytes(1_500_000)))", limits=Limits(disk=2**21))
    assert small.said.startswith("OSError")
    assert large.said == "1500000\n"


def test_a_program_is_the_same_every_time() -> None:
    code = "import random\nprint(random.random(), hash('word'), sorted({'a', 'b'}), list({'x', 'y', 'z'}))"
    said = {box(name).run(code).said for name in LINUX for _ in range(2)}
    assert len(said) == 1


# ------------------------------------------------------------------ workers


def started(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """Workers that are started from here on."""
    found: list[Worker] = []
    make = Worker.__init__

    def noted(self: Worker, *given: object) -> None:
        make(self, *given)  # type: ignore[arg-type]
        found.append(self)

    monkeypatch.setattr(Worker, "__init__", noted)
    return found


def test_a_worker_serves_many_and_is_replaced_after_one_that_left_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = box("namespaces")
    assert isinstance(held, Crew)
    held.run("pass")
    new = started(monkeypatch)
    held.run_many([Program("print(1)", files={"given": "x"})] * 10)
    served = len(new)
    assert served <= 1  # the spare
    held.run_many([Program("open('left', 'w')"), Program("print(1)")])
    assert len(new) > served


def test_hung_programs_hold_up_nobody_else() -> None:
    box("landlock")  # or skipped
    crew = KINDS["landlock"].make(workers=2)
    programs = [Program("while True: pass", limits=Limits(seconds=0.3)), Program("print('sound')")] * 4
    results = crew.run_many(programs)
    assert [r.ended for r in results] == ["time", ""] * 4
    assert [r.said for r in results[1::2]] == ["sound\n"] * 4
    crew.close()
    assert crew.run("print('again')").said == "again\n"
    crew.close()


def test_a_worker_that_is_killed_costs_its_program_alone() -> None:
    box("landlock")  # or skipped
    crew = KINDS["landlock"].make(workers=1)
    assert isinstance(crew, Crew)
    crew.run("pass")
    for worker in crew._idle:
        os.killpg(worker._process.pid, signal.SIGKILL)
        worker._process.wait()
    assert [r.said for r in crew.run_many([Program("print(1)"), Program("print(2)")])] == ["1\n", "2\n"]
    crew.close()


def test_workers_die_with_a_host_that_is_killed(tmp_path: Path) -> None:
    """Both between programs and while one is busy."""
    code = (
        "import threading, time\nfrom panoply.sandbox import Limits\nfrom panoply.sandbox.choice import KINDS\n"
        "boxes = [KINDS[n].make(workers=1) for n in ('landlock', 'namespaces') if n in {names!r}]\n"
        "busy = threading.Thread(target=lambda: boxes[0].run('while True: pass', limits=Limits(seconds=300)))\n"
        "busy.start()\ntime.sleep(0.3)\n"
        "print('ready', flush=True)\ntime.sleep(100)\n"
    )
    names = [name for name in LINUX if not isinstance(box(name), str)]
    host = subprocess.Popen(
        [sys.executable, "-c", code.replace("{names!r}", repr(names))], stdout=subprocess.PIPE, text=True
    )
    assert host.stdout is not None
    assert host.stdout.readline() == "ready\n"
    below = descendants(host.pid)
    assert len(below) >= 2
    host.kill()
    host.wait()
    deadline = time.monotonic() + 10
    while (left := [pid for pid in below if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


@pytest.mark.parametrize("name", LINUX)
def test_workers_outlive_the_thread_that_started_them(name: str) -> None:
    crew = KINDS[name].make(workers=1) if isinstance(box(name), Crew) else None
    assert isinstance(crew, Crew)
    crew.close()
    beside = threading.Thread(target=crew.run, args=("print(1)",))
    beside.start()
    beside.join()
    time.sleep(0.1)
    (worker,) = crew._idle
    assert crew.run("print(2)").said == "2\n"
    assert crew._idle[0] is worker
    crew.close()
    deadline = time.monotonic() + 5
    while alive(worker._process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(worker._process.pid)


def test_a_sandbox_that_stops_working_ends_the_run_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    box("landlock")  # or skipped
    crew = KINDS["landlock"].make(workers=1)
    assert isinstance(crew, Crew)
    crew.close()
    monkeypatch.setattr(crew, "_command", lambda *_: ["/nowhere/python"])
    with pytest.raises(Resumable, match="The sandbox landlock works no longer: .*nowhere"):
        crew.run("print(1)")
    monkeypatch.setattr(
        crew, "_command", lambda *_: [sys.executable, "-S", "-c", "raise SystemExit('broken')"]
    )
    with pytest.raises(Resumable, match="its workers do not start \\(broken\\)"):
        crew.run("print(1)")


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("name", LINUX)
def test_a_fork_of_the_host_has_workers_of_its_own(name: str) -> None:
    held = box(name)
    assert held.run("print(1)").said == "1\n"
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, held.run("print(2)").said.encode() or b"nothing")
        held.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"2\n"
    assert held.run("print(3)").said == "3\n"
    os.close(read)
    os.close(write)


# ------------------------------------------------------------------ bad input


def test_names_of_files_are_plain() -> None:
    for name in ("", ".", "..", "a/b", "/etc/passwd", "../x", "a\0b", "x" * 300):
        with pytest.raises(PanoplyError, match="A file of a program has a plain name"):
            Program("", files={name: ""})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seconds": 0}, "up to 3600 seconds, not 0"),
        ({"seconds": float("nan")}, "up to 3600 seconds, not nan"),
        ({"memory": 2**20}, "at least 64 MiB of memory to start, not 1"),
        ({"output": 0}, "print up to 64 MiB"),
        ({"disk": 2**40}, "files of up to 1024 MiB"),
    ],
)
def test_limits_have_ranges(given: dict[str, float], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        Limits(**given)  # type: ignore[arg-type]


def test_what_a_sandbox_has_not_is_refused() -> None:
    with pytest.raises(PanoplyError, match="landlock has no files"):
        box("landlock").run("pass", files={"a": ""})
    with pytest.raises(PanoplyError, match="monty has neither files nor input"):
        box("monty").run("pass", stdin="x")
    assert Wanted("landlock").find().run_many([]) == []


def test_the_value_of_the_last_line_stays_in_monty() -> None:
    """It would be made an object of the host's, as large as the program likes."""
    from panoply.sandbox.monty import Monty

    fed: list[str] = []

    class Session:
        def __enter__(self) -> Session:
            return self

        def __exit__(self, *_: object) -> None: ...

        def feed_run(self, code: str, **_: object) -> None:
            fed.append(code)

    class Pool:
        def checkout(self, **_: object) -> Session:
            return Session()

    held = box("monty")
    assert isinstance(held, Monty)
    held._one(Pool(), Program("list(range(10**7))"))
    assert fed[0].splitlines()[-1] == "None"
    assert held.run("if True:\n    print(1)\n    2").said == "1\n"


def test_a_disk_of_ones_own_hides_nothing_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked, "__file__", "/usr/lib/panoply/sandbox/locked.py")
    monkeypatch.setattr(locked, "interpreter", lambda: "/usr/bin/python3")
    monkeypatch.setattr(locked, "listed", lambda: ["/usr/lib/python3"])
    monkeypatch.setattr(sys, "prefix", "/opt/environment")
    assert locked.folder() == "/tmp"
    monkeypatch.setattr(sys, "prefix", "/tmp/environment")
    assert locked.folder() == "/sandbox"
    command = locked._bubblewrap("bwrap", False, ())
    assert command[command.index("--dir") + 1] == "/sandbox"
    assert locked.environment(())["HOME"] == "/sandbox"
