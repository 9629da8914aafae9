"""How many programs a second each sandbox runs.

    python benchmarks/sandbox.py                  every sandbox that starts here
    python benchmarks/sandbox.py --only monty,namespaces --workers 2 --programs 512

A program is a short function with three calls of it, as the world `program` grades them; 128 are asked for at a time.
Results go to results/sandbox.json. Aims on two idle cores: 150 a second with namespaces, 1,000 with monty.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from panoply.sandbox import Sandbox, Unavailable
from panoply.sandbox.choice import KINDS
from panoply.sandbox.contract import cores, named
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--programs", type=int, default=4 * STEP)
    chosen = parser.parse_args()
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
    RESULTS.write_text(
        json.dumps({**about, "workers": chosen.workers or cores(), "found": found}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
