"""What scripts of cells share: a cell is measured once, in a command of its own, and its result is a file."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path("results/bench-gpu")
Measure = Callable[[str, bool, int, int], dict[str, Any]]
"""Called with the cell, whether it is only tried, and how many steps are timed, after how many that are not."""


def now() -> float:
    """Seconds, when the GPU has done all that it was asked for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def command(about: str | None, prefix: str, cells: Sequence[str], steps: int, measure: Measure) -> None:
    """Measure the cells that are named and have no result yet; `about` is the script's docstring."""
    parser = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    parser.add_argument("cells", nargs="+", choices=[*cells, "all"])
    parser.add_argument("--tiny", action="store_true", help="try it on a CPU; nothing is kept")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    for cell in cells if "all" in chosen.cells else chosen.cells:
        place = chosen.results / f"{prefix}-{cell}.json"
        if place.exists() and not chosen.tiny:
            print(f"{place} is there.")
            continue
        found = measure(cell, chosen.tiny, chosen.steps, 1 if chosen.tiny else 2)
        print(json.dumps({k: v for k, v in found.items() if k != "steps"}))
        if not chosen.tiny:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(json.dumps(found, indent=1) + "\n")
