"""What docs/performance.md says of control, written from results/bench-control alone."""
# ruff: noqa: E501 (sentences of the page)

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.control import EPISODES, PAIRS, Pair

HEAD = "## Control on a CPU"
Facts = dict[str, Any]


def section(folder: Path) -> str:
    """The whole section, or nothing where nothing has been measured."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    speed = {name: kept for name in PAIRS if (kept := _speed(found, name))}
    if not speed:
        return ""
    some = next(c for c in found.values() if "cores" in c)
    dates = ", ".join(sorted({c["date"] for c in found.values()}))
    load = max((c["load"] for name, c in found.items() if ".speed-" in name and "load" in c), default=None)
    busy = "" if load is None else f", at a load of at most {load:.1f}, their own included"
    parts = [
        f"""{HEAD}

{some["cores"]} cores, one thread a side, torch {some["torch"]}, {dates}. Panoply beside Stable-Baselines3 2.9 and d3rlpy 2.8: the same
Gymnasium environments, networks, batches and epochs. Medians of steps a second (of the environment; for IQL of the optimiser),
sides taking turns{busy}; imports, evaluation and checkpoints are not counted. The *floor* is what the environment alone and the
matrix products alone (at the rate of a large one) would take; the share says how much of Panoply's time that is.
""",
        _table(
            [
                "the same work",
                "the other",
                "its steps/s",
                "Panoply's",
                "times",
                "by CPU time",
                "promised",
                "share of the floor",
            ],
            [_row(PAIRS[name], found, name, kept) for name, kept in speed.items()],
        ),
        _missed(speed),
        _returns(found),
        _compiled(found, speed),
        _worlds(found),
        """A cell is a command of its own; one that has a result is skipped.

```
make bench-control                                            # all cells, then this page (needs the extra `bench`)
python -m benchmarks.control --only ppo-cartpole --again      # some of them, once more
python -m benchmarks.control --cell ppo-cartpole panoply speed 0
```
""",
    ]
    return "\n".join(part for part in parts if part)


def _cells(found: Facts, name: str, side: str, kind: str) -> list[Facts]:
    return [c for key, c in found.items() if key.startswith(f"{name}.{side}.{kind}-")]


def _speed(found: Facts, name: str) -> dict[str, Facts]:
    """Medians of both sides, where both have been timed."""
    kept = {}
    for side in ("other", "panoply"):
        cells = _cells(found, name, side, "speed")
        if not cells:
            return {}
        per = {of: statistics.median(c[of] / c["steps"] for c in cells) for of in ("seconds", "cpu_seconds")}
        kept[side] = {**per, "runs": len(cells)}
    return kept


def _row(pair: Pair, found: Facts, name: str, kept: dict[str, Facts]) -> list[str]:
    other, ours = kept["other"], kept["panoply"]
    (floor, *_) = _cells(found, name, "floor", "speed") or [None]
    share = "–"
    if floor is not None:
        rate = max(c["flops_per_second"] for c in found.values() if "flops_per_second" in c)
        learning = 1 - pair.warmup / floor["steps"]
        least = floor["environment_seconds"] / floor["steps"] + learning * pair.flops / rate
        share = f"{least / ours['seconds']:.0%}"
    return [
        pair.title, pair.other, f"{1 / other['seconds']:,.0f}", f"{1 / ours['seconds']:,.0f}",
        f"**{other['seconds'] / ours['seconds']:.2f}**", f"{other['cpu_seconds'] / ours['cpu_seconds']:.2f}", f"{pair.promise:g}", share,
    ]  # fmt: skip


def _missed(speed: dict[str, dict[str, Facts]]) -> str:
    """Which promises were not kept."""
    times = {name: kept["other"]["seconds"] / kept["panoply"]["seconds"] for name, kept in speed.items()}
    missed = [
        f"{PAIRS[name].title.split(':')[0]} ({ratio:.2f} times instead of {PAIRS[name].promise:g})"
        for name, ratio in times.items()
        if ratio < PAIRS[name].promise
    ]
    return f"Less than was promised: {'; '.join(missed)}.\n" if missed else ""


def _returns(found: Facts) -> str:
    rows = []
    for name, pair in PAIRS.items():
        sides = [_cells(found, name, side, "return") for side in ("other", "panoply")]
        if all(sides):
            said = [", ".join(f"{c['return']:.0f}" for c in cells) for cells in sides]
            rows.append([pair.title.split(":")[0], f"{sides[0][0]['steps']:,}", pair.other, *said])
    if not rows:
        return ""
    text = f"The return both reach at equal steps, a number a seed: the mean of {EPISODES} greedy episodes from the same starts.\n\n"
    return text + _table(["", "after steps", "the other", "its returns", "Panoply's"], rows)


def _compiled(found: Facts, speed: dict[str, dict[str, Facts]]) -> str:
    (cell, *_) = _cells(found, "ppo-cartpole", "compiled", "speed") or [None]
    if cell is None or "ppo-cartpole" not in speed:
        return ""
    each, kept = cell["seconds"] / cell["steps"], speed["ppo-cartpole"]
    won = kept["other"]["seconds"] - each
    text = (
        f"With `torch.compile` on its policy, SB3 takes {each / kept['panoply']['seconds']:.2f} times Panoply's time for a step of the first row, after "
        f"{cell['compile_seconds']:.0f} s of compilation"
    )
    if won > 0:
        return (
            text
            + f", which it has earned back after {cell['compile_seconds'] / won:,.0f} steps. Panoply compiles nothing.\n"
        )
    return (
        text
        + ", which it does not earn back: the compiled one is no faster here. Panoply compiles nothing.\n"
    )


def _worlds(found: Facts) -> str:
    cell = found.get("worlds")
    if cell is None:
        return ""
    sizes = list(next(iter(cell["rates"].values())))
    rows = [[name, *(f"{rates[size]:,.0f}" for size in sizes)] for name, rates in cell["rates"].items()]
    text = """### The batched worlds

Another thing, and not comparable with the table above: steps a second of Panoply's own worlds, which are NumPy operations on many
environments at once. Actions were made beforehand and no policy acts, on one thread.

"""
    return text + _table(["environments side by side", *(f"{int(size):,}" for size in sizes)], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"
