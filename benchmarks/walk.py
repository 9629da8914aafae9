"""The walk of one step of training: which files and functions of Panoply a reader crosses who follows it.

    python -m benchmarks.walk                    # the three walks, as a table
    python -m benchmarks.walk --files grpo chain # one of them, file by file, in the order they are first entered

A step is what a loop does from its turn until it is made: collect, score, learn. What it repeats counts
once.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import panoply as pp
from panoply.progress import Progress

PACKAGE = str(Path(pp.__file__).parent)
WALKS = (("grpo", "chain"), ("sac", "pendulum"), ("dpo", "chain"))
SMALL = {"sac": {"sample.length": 32, "sample.random": 8, "replay.warmup": 8}}
TURN, MADE = ("loops/job.py", "steps"), ("loops/seat.py", "conclude")
"""What hands a loop its next step, and what looks at it once it is made. The walk is that of the second one."""


def walk(method: str, world: str) -> dict[str, list[str]]:
    """The functions of each file that one step calls, in the order they are first called."""
    found: dict[str, list[str]] = {}
    turns = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal turns
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        file = os.path.relpath(frame.f_code.co_filename, PACKAGE)
        name = frame.f_code.co_qualname
        at = (file, frame.f_code.co_name)
        turns += (at == TURN) + (at == MADE)
        if turns == 3 and at != TURN and not name.rpartition(".")[2].startswith("<"):
            functions = found.setdefault(file, [])
            if name not in functions:
                functions.append(name)

    quiet = {
        "threads": 1,
        "evaluate_every": 0,
        "episodes_every": 0,
        "held_out": 2,
        "device": "cpu",
        "steps": 4,
    }
    with tempfile.TemporaryDirectory() as folder:
        plan = pp.plan(method, world, settings=SMALL.get(method, {}), **{**quiet, "checkpoint_every": 1000})
        sys.setprofile(note)
        try:
            pp.train(plan, run=Path(folder) / "run", progress=Progress())
        finally:
            sys.setprofile(None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", nargs=2, metavar=("METHOD", "WORLD"), help="follow one walk file by file")
    chosen = parser.parse_args()
    if chosen.files:
        for file, functions in walk(*chosen.files).items():
            print(f"{file}: {', '.join(functions)}")
        return
    print(f"{'step of':24} files  functions")
    for method, world in WALKS:
        found = walk(method, world)
        print(f"{method + ' on ' + world:24} {len(found):5} {sum(map(len, found.values())):10}")


if __name__ == "__main__":
    main()
