"""Confined processes: whole answers in time or none, limits that bind, and no life beyond the parent's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from panoply.confined.limits import Limits
from panoply.confined.process import MOST_BYTES, Confined, Failed, TookTooLong, wait

T = TypeVar("T")
HANDLERS = """
import os, signal, socket, subprocess, sys, time

def echo(*arguments):
    return lambda question: {"said": question, "arguments": list(arguments)}

def protocol():
    links = {n: os.readlink(f"/proc/self/fd/{n}") for n in range(3, 16) if os.path.lexists(f"/proc/self/fd/{n}")}
    return next(n for n, link in links.items() if link.startswith("pipe"))

def partial():
    def half(question):
        os.write(protocol(), b'{"said": ')
        time.sleep(60)
    return half

def flood():
    def much(question):
        while True:
            os.write(protocol(), b"x" * 2**20)
    return much

def deaf():
    time.sleep(0.1)
    def never(question):
        time.sleep(60)
    return never

def greedy():
    return lambda gib: {"bytes": len(bytearray(int(gib * 2**30)))}

def writer():
    def write(path):
        with open(path, "wb") as file:
            for _ in range(2):
                file.write(b"x" * 2**20)
        return {"written": True}
    return write

def caller():
    def connect(port):
        with socket.create_connection(("127.0.0.1", port), timeout=2):
            return {"connected": True}
    return connect

def busy():
    def loop(file):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(file, "w") as out:
            out.write(f"{os.getpid()} {child.pid}")
        import re
        re.match(r"(a+)+$", "a" * 40 + "b")  # holds Python's lock for hours
    return loop
"""


@pytest.fixture(autouse=True)
def handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "handlers_for_tests.py").write_text(HANDLERS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def confined(name: str, *arguments: object, limits: Limits | None = None) -> Confined:
    return Confined(f"handlers_for_tests:{name}", arguments, limits)


def test_questions_answers_and_a_second_process_after_a_death() -> None:
    worker = confined("echo", 1, "two")
    large = {"text": "x" * 1_000_000}  # more than a pipe holds
    assert worker.ask(large, 10) == {"said": large, "arguments": [1, "two"]}
    worker.end()
    assert not worker.alive
    assert worker.ask("again", 10)["said"] == "again"


def test_part_of_a_line_is_no_answer_and_does_not_outlast_the_deadline() -> None:
    worker = confined("partial")
    worker.start()
    began = time.monotonic()
    with pytest.raises(TookTooLong, match=r"longer than 0\.3 s"):
        worker.ask("?", 0.3)
    assert time.monotonic() - began < 30
    assert not worker.alive


def test_a_question_nobody_reads_does_not_outlast_the_deadline_either() -> None:
    worker = confined("echo")
    worker.start()
    assert worker._process is not None
    os.kill(worker._process.pid, signal.SIGSTOP)
    with pytest.raises(TookTooLong):
        worker.ask("x" * 10_000_000, 0.3)


def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("panoply.confined.process.MOST_BYTES", 2**20)
    assert MOST_BYTES > 2**20
    with pytest.raises(Failed, match="its answer is longer than 1 MiB"):
        confined("flood").ask("?", 20)


def test_several_are_waited_for_at_once() -> None:
    workers = [confined("deaf") for _ in range(3)]
    for worker in workers:
        worker.start()
    began = time.monotonic()
    wait([worker.begin("?", 1.0) for worker in workers])
    assert time.monotonic() - began < 2.7


def test_memory_and_files_have_an_end(tmp_path: Path) -> None:
    small = Limits(memory=1 / 16, file=1 / 1024)
    worker = confined("greedy", limits=small)
    assert worker.ask(0.1, 10)["error"].startswith("MemoryError")
    assert "bytes" in worker.ask(0.01, 10)
    assert "bytes" in confined("greedy", limits=Limits(memory=0)).ask(0.1, 10)
    file = tmp_path / "large"
    assert "File too large" in confined("writer", limits=small).ask(str(file), 10)["error"]
    assert file.stat().st_size <= 2**20


def test_the_network_is_closed_unless_asked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert confined("caller", limits=Limits(network=True)).ask(port, 10) == {"connected": True}
        closed = confined("caller")
        answer = closed.ask(port, 10)
    if closed.not_limited:
        assert "network could not be closed" in closed.not_limited[0]
    else:
        assert "Network is unreachable" in answer["error"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_parent(tmp_path: Path, how: signal.Signals) -> None:
    """Not even a function that holds Python's lock, nor what it has started."""
    file = tmp_path / "pids"
    code = f"""
from panoply.confined.process import Confined
Confined("handlers_for_tests:busy").ask({str(file)!r}, 600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    pids = _eventually(lambda: [int(word) for word in file.read_text().split()] if file.exists() else [])
    assert len(pids) == 2
    parent.send_signal(how)
    parent.wait(10)
    assert _eventually(lambda: not any(map(_runs, pids)))


def _eventually(found: Callable[[], T], seconds: float = 10.0) -> T:
    end = time.monotonic() + seconds
    while not (result := found()) and time.monotonic() < end:
        time.sleep(0.02)
    return result


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
