"""Pairs: the credit of one method with the surrogate of another, all of them in one comparison, as a table.

python -m panoply.evidence.pairs measure   compares them (minutes on 16 cores), keeps the numbers, writes the page
python -m panoply.evidence.pairs           writes docs/pairs.md from results/pairs.json
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from panoply.checkpoint import write_atomically
from panoply.errors import PanoplyError
from panoply.evidence.catalogue import table
from panoply.evidence.races import find
from panoply.files import is_file, read_json

CREDITS = {
    "grpo": "R − mean of the group, in deviations of the group",
    "rloo": "R − mean of the others in the group",
    "lite-ppo": "R − mean of the group, in deviations of the batch",
    "reinforce++": "R in deviations of the batch",
    "red-drop": "R − mean of the group, without wrong answers beyond the right ones",
    "dcpo": "as grpo, and steered towards an entropy",
}
"""Rows: methods whose credit is taken."""
SURROGATES = {
    "reinforce": "A·log π: no ratio, nothing bounds",
    "grpo": "PPO's clip of every token's ratio",
    "cispo": "the clipped ratio as a weight",
    "gspo": "one ratio for an answer",
    "bapo": "bounds that move until both signs weigh alike",
    "rec": "A·log π where the ratio is in bounds",
    "rover": "the ratio's log as a value, averaged over the vocabulary",
}
"""Columns: methods whose surrogate is taken."""
WORLD, BUDGET, SEEDS = "chain:frontier", "episodes=7680", 3
SETTINGS = dict(find("stale").settings)
"""Answers up to twenty steps old at a high rate, as in the race `stale`: at ratios of 1 surrogates hardly differ."""
RESULT, PAGE = Path("results") / "pairs.json", Path("docs") / "pairs.md"


class Arm(TypedDict):
    """One pair: what it borrows, and its area under the held-out curve by world and seed."""

    settings: dict[str, Any]
    areas: dict[str, dict[str, float]]


class Result(TypedDict):
    """What is kept of the comparison."""

    command: str
    date: str
    versions: dict[str, Any]
    arms: list[Arm]
    failed: dict[str, str]


def arms() -> list[str]:
    """Every pair as `panoply compare` takes it."""
    return [f"grpo+credit={credit}+surrogate={surrogate}" for credit in CREDITS for surrogate in SURROGATES]


def command() -> str:
    """The comparison as a command line."""
    sets = [word for path, value in SETTINGS.items() for word in ("--set", f"{path}={value}")]
    words = ["--world", WORLD, "--budget", BUDGET, "--seeds", str(SEEDS), "--metric", "area", *sets]
    return shlex.join(["panoply", "compare", *arms(), *words])


def measure(result: Path = RESULT) -> None:
    """Compare all pairs and keep their numbers."""
    from panoply.evidence.compare import compare

    asked: dict[str, Any] = {
        "world": WORLD,
        "budget": BUDGET,
        "seeds": SEEDS,
        "metric": "area",
        "settings": SETTINGS,
    }
    found = compare(*arms(), **asked, command=command()).to_json()
    kept = {
        name: found[name]
        for name in ("kind", "command", "date", "versions", "worlds", "budget", "seeds", "failed")
    }
    pairs = [{name: arm[name] for name in ("label", "settings", "areas", "scores")} for arm in found["arms"]]
    write_atomically(result, json.dumps({**kept, "arms": pairs}, indent=1, ensure_ascii=False) + "\n")


# ------------------------------------------------------------------ the page

HEAD = """# Pairs

Made from `results/pairs.json` by `make docs`; never by hand. A method is a value with slots, so the credit of one and
the surrogate of another make a third. Here every pair of {rows} credits and {columns} surrogates was trained alike: the
rest is `grpo`'s, on `{world}`, {budget} a run, {seeds} seeds. Answers are up to twenty steps old and the rate
is high ({settings}), for where every answer is new and learned from once, ratios are 1 and surrogates
hardly differ. Nothing was tuned for any pair: a low number says that the pair is bad at this rate, not at every one.
"""


def page(result: Mapping[str, Any] | None) -> str:
    """The table and what follows from it; without stored numbers, how they are measured."""
    budget = f"{int(BUDGET.partition('=')[2]):,} episodes"
    settings = ", ".join(f"`{path}={value}`" for path, value in SETTINGS.items())
    sizes = {"rows": len(CREDITS), "columns": len(SURROGATES), "seeds": SEEDS}
    head = HEAD.format(world=WORLD, settings=settings, budget=budget, **sizes)
    if result is None:
        return f"{head}\nIt has not been measured yet: `python -m panoply.evidence.pairs measure`.\n"
    cells, versions = areas(result), result["versions"]
    failed = [f"Not finished: {', '.join(result['failed'])}.\n"] if result["failed"] else []
    kinds = (("credit", CREDITS), ("surrogate", SURROGATES))
    legend = [(f"`{name}`", kind, what) for kind, some in kinds for name, what in some.items()]
    return "\n".join(
        [
            head,
            "Area under the held-out curve: its mean over seeds and, after ±, their deviation; the best is bold.\n",
            _matrix(cells),
            *failed,
            _shares(cells),
            table(("", "is the", ""), *legend),
            f"Measured on {result['date']} with panoply {versions['panoply']} and torch {versions['torch']}:\n",
            f"```text\n{result['command']}\n```\n",
        ]
    )


def _matrix(cells: Mapping[tuple[str, str], Sequence[float]]) -> str:
    """Credits down, surrogates across, and the means of both."""
    means = {pair: float(np.mean(found)) for pair, found in cells.items()}
    best = max(means, key=lambda pair: means[pair])
    rows = []
    for credit in CREDITS:
        across = [means[credit, s] for s in SURROGATES if (credit, s) in means]
        rows.append((f"`{credit}`", *(_cell(cells, (credit, s), best) for s in SURROGATES), _mean(across)))
    down = [_mean([means[c, s] for c in CREDITS if (c, s) in means]) for s in SURROGATES]
    names = (f"`{s}`" for s in SURROGATES)
    return table(("credit ↓ surrogate →", *names, "mean"), *rows, ("mean", *down, _mean([*means.values()])))


def areas(result: Mapping[str, Any]) -> dict[tuple[str, str], list[float]]:
    """The areas of each pair, by its credit and its surrogate."""
    found = {}
    for arm in result["arms"]:
        (by_seed,) = arm["areas"].values()
        if by_seed:
            found[arm["settings"]["credit"], arm["settings"]["surrogate"]] = list(by_seed.values())
    if not found:
        raise PanoplyError(f"{RESULT} has no pair that has finished.")
    return found


def shares(cells: Mapping[tuple[str, str], Sequence[float]]) -> tuple[float, float, float] | None:
    """How much of the variance between pairs is the credit's, the surrogate's, and the pair's; of a whole table."""
    if len(cells) < len(CREDITS) * len(SURROGATES):
        return None
    means = np.array([[np.mean(cells[credit, s]) for s in SURROGATES] for credit in CREDITS])
    centred = means - means.mean()
    rows, columns = centred.mean(1, keepdims=True), centred.mean(0, keepdims=True)
    whole = float((centred**2).sum()) or 1.0
    parts = (rows + 0 * centred, columns + 0 * centred, centred - rows - columns)
    credit, surrogate, pair = (float((part**2).sum()) / whole for part in parts)
    return credit, surrogate, pair


def _shares(cells: Mapping[tuple[str, str], Sequence[float]]) -> str:
    found = shares(cells)
    if found is None:
        return ""
    noise = float(np.mean([np.std(each, ddof=1) for each in cells.values() if len(each) > 1]))
    credit, surrogate, pair = (f"{100 * share:.0f} %" for share in found)
    return (
        f"Of the variance between pairs {credit} goes with the credit, {surrogate} with the surrogate, and {pair} with "
        f"neither alone: with the pair, and with chance. Between seeds of one pair the deviation is {noise:.3f} on "
        "average.\n"
    )


def _cell(
    cells: Mapping[tuple[str, str], Sequence[float]], pair: tuple[str, str], best: tuple[str, str]
) -> str:
    if pair not in cells:
        return "–"
    found = cells[pair]
    spread = f" ± {np.std(found, ddof=1):.3f}" if len(found) > 1 else ""
    number = f"{np.mean(found):.3f}"
    return f"**{number}**{spread}" if pair == best else number + spread


def _mean(numbers: Sequence[float]) -> str:
    return f"{np.mean(numbers):.3f}" if numbers else "–"


def write(result: Path = RESULT, to: Path = PAGE) -> None:
    write_atomically(to, page(read_json(result, Result) if is_file(result) else None))


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    elif sys.argv[1:]:
        raise SystemExit("python -m panoply.evidence.pairs [measure]")
    write()
