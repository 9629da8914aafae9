"""How many programs a second each sandbox runs.

    python benchmarks/sandbox.py                  every sandbox that starts here
    python benchmarks/sandbox.py --only monty,namespaces --workers 2 --programs 512
    python benchmarks/sandbox.py --step 20        how much longer a step of training takes with programs of monty

A program is a short function with three calls of it, as the world `program` grades them; 128 are asked for at a time.
Results go to results/sandbox.json. Aims on two idle cores: 150 a second with namespaces, 1,000 with monty; and a step
of GRPO in which programs run under monty takes at most 1.5 times as long as the same without the time they take.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from panoply import training
from panoply.sandbox import Program, Result, Sandbox, Unavailable
from panoply.sandbox.choice import KINDS
from panoply.sandbox.contract import cores, named
from panoply.sandbox.monty import Monty
from panoply.sandbox.verdicts import Calls

CODE = "def f(n):\n    total = 0\n    for i in range(n):\n        total += i % {}\n    return total\n"
STEP = 128
AIMS = {"namespaces": 150, "landlock": 150, "monty": 1000}
RESULTS = Path(__file__).resolve().parents[1] / "results" / "sandbox.json"


def measure(box: Sandbox, programs: int) -> dict[str, Any]:
    """Graded programs a second, and how many were right, which all must be."""
    calls = [Calls(CODE.format(2 + n % 7), "f", [[5], [10], [20]]) for n in range(programs)]
    expected = [[sum(i % (2 + n % 7) for i in range(m)) for m in (5, 10, 20)] for n in range(programs)]
    box.run_many([one.program for one in calls[:STEP]])  # workers start
    began, right = time.perf_counter(), 0
    for first in range(0, programs, STEP):
        some = calls[first : first + STEP]
        results = box.run_many([one.program for one in some])
        right += sum(
            all(one.verdicts(result, wanted))
            for one, result, wanted in zip(some, results, expected[first:], strict=False)
        )
    seconds = time.perf_counter() - began
    return {"a second": round(programs / seconds, 1), "right": right, "programs": programs}


def step_with_programs(steps: int) -> dict[str, float]:
    """Seconds of a step of GRPO on `program:python` with and without the time in which monty runs programs.

    The first fifth of the steps is left out, in which code is compiled.
    """
    inside = [0.0]
    plain = Monty.run_many

    def timed(box: Monty, programs: Sequence[Program]) -> list[Result]:
        began = time.perf_counter()
        found = plain(box, programs)
        inside[-1] += time.perf_counter() - began
        return found

    Monty.run_many = timed  # type: ignore[assignment, method-assign]
    ends = []
    options: dict[str, Any] = {
        "steps": steps,
        "evaluate_every": 0,
        "threads": 1,
        "settings": {"run.held_out": 8, "world.sandbox": "monty"},
    }
    with tempfile.TemporaryDirectory() as folder:
        for _ in training.steps("grpo", "program:python", run=Path(folder) / "run", **options):
            ends.append(time.perf_counter())
            inside.append(0.0)
    Monty.run_many = plain  # type: ignore[method-assign]
    first = steps // 5
    took = (ends[-1] - ends[first - 1]) / (steps - first)
    ran = sum(inside[first:steps]) / (steps - first)
    return {"seconds": round(took, 4), "of programs": round(ran, 4), "times": round(took / (took - ran), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--programs", type=int, default=4 * STEP)
    parser.add_argument("--step", type=int, default=0, metavar="STEPS", help="time steps of training instead")
    chosen = parser.parse_args()
    if chosen.step:
        measured = step_with_programs(chosen.step)
        print(f"a step takes {measured['times']} times as long with programs as without, aim at most 1.5")
        known = json.loads(RESULTS.read_text())
        RESULTS.write_text(json.dumps({**known, "step of grpo under monty": measured}, indent=1) + "\n")
        return
    found: dict[str, Any] = {}
    for name in chosen.only.split(","):
        try:
            box = KINDS[name].make(workers=chosen.workers)
        except Unavailable as reason:
            print(f"{name:12} is not here: {reason}")
            continue
        found[name] = {"sandbox": named(box), **measure(box, chosen.programs)}
        aim = f", aim {AIMS[name]}" if name in AIMS else ""
        print(f"{name:12} {found[name]['a second']:8} programs a second{aim}")
        box.close()
    about = {"cores": cores(), "load": os.getloadavg()[0], "machine": platform.machine()}
    known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    made = {**known, **about, "workers": chosen.workers or cores(), "found": found}
    RESULTS.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
