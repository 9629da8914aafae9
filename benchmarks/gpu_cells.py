"""What scripts of cells share: a cell is measured once, in a command of its own, and its result is a file."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from panoply.checkpoint import write_atomically
from panoply.errors import PanoplyError
from panoply.files import BadFile, read_json

RESULTS = Path("results/bench-gpu")
Measure = Callable[[str, bool, int, int], dict[str, Any]]
"""Called with the cell, whether it is only tried, and how many steps are timed, after how many that are not."""


def now() -> float:
    """Seconds, when the GPU has done all that it was asked for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def kept(place: Path) -> dict[str, Any] | None:
    """A cell's result; None where there is none, or no whole one."""
    try:
        return read_json(place, dict)
    except BadFile:
        return None


def write(place: Path, found: dict[str, Any]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(place, json.dumps(found, indent=1) + "\n")


def command(
    about: str | None,
    prefix: str,
    cells: Sequence[str],
    steps: int,
    measure: Measure,
    arguments: Sequence[str] | None = None,
) -> None:
    """Measure the cells that are named and have no result yet; `about` is the script's docstring."""
    parser = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    parser.add_argument("cells", nargs="+", choices=[*cells, "all"])
    parser.add_argument("--tiny", action="store_true", help="try it on a CPU; nothing is kept")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    if not (chosen.tiny or torch.cuda.is_available()):
        print("There is no CUDA device here, so nothing is measured; --tiny tries the script on a CPU.")
        return
    for cell in cells if "all" in chosen.cells else chosen.cells:
        place = chosen.results / f"{prefix}-{cell}.json"
        if not chosen.tiny and kept(place) is not None:
            print(f"{place} is there.")
            continue
        try:
            found = measure(cell, chosen.tiny, chosen.steps, 1 if chosen.tiny else 2)
        except PanoplyError as problem:  # a library that is not installed
            parser.exit(2, f"{cell}: {problem}\n")
        print(json.dumps({k: v for k, v in found.items() if k != "steps"}))
        if not chosen.tiny:
            write(place, found)
