"""A fork that stands for a new Python is told from one by nothing that tests look at."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import pytest
import tiny

TOLD = """
import os, sys
print(__name__, sys.argv[1:], os.getcwd(), os.environ.get("COLOUR"), sys.stdin.read(), flush=True)
print("aside", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("start", [subprocess.Popen, forks.Popen])
def test_words_streams_and_code(start: Any, tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(TOLD)
    pipe, env = subprocess.PIPE, tiny.environment(COLOUR="red")
    for words in (["-c", TOLD, "a b"], ["told.py", "a b"], ["-m", "told", "a b"]):
        process = start(
            [sys.executable, *words], cwd=tmp_path, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        out, err = process.communicate("asked")
        assert (out, err) == (f"__main__ ['a b'] {tmp_path} red asked\n", "aside\n")
        assert process.returncode == 3


@pytest.mark.parametrize("start", [subprocess.Popen, forks.Popen])
def test_an_error_a_kill_and_an_interrupt(start: Any) -> None:
    failed = start([sys.executable, "-c", "1 / 0"], stderr=subprocess.PIPE, text=True)
    _, said = failed.communicate()
    assert failed.returncode == 1
    assert said.endswith("ZeroDivisionError: division by zero\n")
    code = "import time\nprint('here', flush=True)\ntime.sleep(60)"
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        process = start(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout.readline() == "here\n"
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(30) == -number
        process.stdout.close()
