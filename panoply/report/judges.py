"""Pictures of a reward model, and of a policy that learns from one: calibration, margins, groups, over-optimisation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from panoply.evaluation.intervals import wilson
from panoply.report.curves import Experiment, curve
from panoply.report.drawings import Drawing, around, show

OURS = frozenset({"success", "true", "reward", "wins"})
"""Rewards that are no stand-in for something else."""
DISTANCE = "kl_to_start"


def judge_drawings(result: Mapping[str, Any] | None) -> list[Drawing]:
    """Of what a run's `result.json` says of its reward model; none where it says nothing that can be drawn."""
    after = (result or {}).get("after")
    found = after.get("reliability") if isinstance(after, Mapping) else None
    if not isinstance(found, Mapping):
        return []
    try:
        return [_calibration(found), _margins(found), *_groups(found)]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return []


def _calibration(found: Mapping[str, Any]) -> Drawing:
    note = f"{int(found['pairs'])} held-out pairs, calibration error {_number(found['error']):.3f}"
    drawn = Drawing("calibration", note, "how sure: σ(|margin|)", "how often right", (0.5, 1.0), (0.0, 1.0))
    drawn.line((0.5, 1.0), (0.5, 1.0), "guide")
    bins = [(_number(b["said"]), _number(b["right"]), int(b["pairs"])) for b in found["calibration"]]
    most = max(pairs for *_, pairs in bins)
    drawn.line([said for said, _, _ in bins], [right for _, right, _ in bins], "l0")
    for said, right, pairs in bins:
        low, high = wilson(right, pairs)
        drawn.line((said, said), (low, high), "l0 thin")
        drawn.point(
            said, right, 2 + 4 * math.sqrt(pairs / most), f"{said:.3f} sure, {right:.3f} right, {pairs} pairs"
        )
    return drawn


def _margins(found: Mapping[str, Any]) -> Drawing:
    told = found["margins"]
    widest, counts = _number(told["widest"]), [int(n) for n in told["counts"]]
    note = f"mean {show(_number(told['mean']))}; pairs at the left of 0 are ordered wrongly"
    drawn = Drawing(
        "margins", note, "r(chosen) − r(rejected)", "pairs", (-widest, widest), (0.0, float(max(counts)))
    )
    width = 2 * widest / len(counts)
    for i, n in enumerate(counts):
        low = -widest + i * width
        look = "f0" if 2 * i >= len(counts) else "f1"
        drawn.bar(low, low + width, float(n), f"{show(low)} to {show(low + width)}: {n} pairs", look)
    return drawn


def _groups(found: Mapping[str, Any]) -> Iterator[Drawing]:
    for kind, groups in found["groups"].items():
        rows = [(str(name), _number(g["accuracy"]), int(g["pairs"])) for name, g in groups.items()]
        worst = min(rows, key=lambda row: row[1])
        note = f"lowest: {worst[0]}, {worst[1]:.3f} of {worst[2]} pairs"
        places = (0.0, float(len(rows)))
        drawn = Drawing(f"accuracy by {kind}", note, str(kind), "accuracy", places, (0.0, 1.0), named=True)
        drawn.line((0.0, len(rows)), (0.5, 0.5), "guide")
        for i, (name, accuracy, pairs) in enumerate(rows):
            low, high = wilson(accuracy, pairs)
            drawn.bar(i + 0.1, i + 0.9, accuracy, f"{name}: {accuracy:.3f} of {pairs} pairs")
            drawn.line((i + 0.5, i + 0.5), (low, high), "ink")
            drawn.name(
                i + 0.5, name if len(name) <= 60 // len(rows) else f"{name[: max(1, 60 // len(rows) - 1)]}…"
            )
        yield drawn


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


# ------------------------------------------------------------------ over-optimisation


def over_optimised(plan: Mapping[str, Any], experiment: Experiment) -> Drawing | None:
    """True worth against the proxy that is learned from, over KL to the start, as the run went (arXiv 2210.10760).

    For runs whose reward is a stand-in (a reward model's word, or a signal that can be hacked) in a world that knows
    the true worth. KL is the mean of log π/π_ref over decisions times their number in an answer; without a reference it
    is not known, and steps stand in its place. Points are means over stretches of steps, joined in their order.
    """
    proxy = proxy_of(plan)
    own = str(_inside(plan, "world", "id")).startswith("jsonl@")
    worths = ("true",) if own else ("true", "success")  # of own data, success is what the reward says
    rows = [[_with_distance(row) for row in each] for each in experiment.rows]
    known = {name for each in rows for row in each for name in row}
    true = next((name for name in worths if name in known and name != proxy), None)
    if proxy is None or true is None or proxy not in known:
        return None
    along = DISTANCE if DISTANCE in known else "step"
    with_kl = Experiment(experiment.label, experiment.runs, tuple(rows))
    curves = [curve(with_kl, name) for name in (along, true, proxy)]
    by_step = [dict(zip(c.x.tolist(), c.mean.tolist(), strict=True)) for c in curves]
    steps = sorted(set(by_step[0]) & set(by_step[1]) & set(by_step[2]))
    points = [
        three for step in steps if all(map(math.isfinite, three := [column[step] for column in by_step]))
    ]
    if len(points) < 2:
        return None
    kl, worth, said = (list(column) for column in zip(*_stretches(points), strict=True))
    best = max(range(len(worth)), key=worth.__getitem__)
    fell = f", {worth[-1]:.3f} in the end" if best < len(worth) - 1 else ", in the end"
    where, x = ("KL", "KL to the start, nats an answer")
    if along == "step":
        where, x = ("step", "step (without a reference KL is not known)")
    note = f"{true} is highest, {worth[best]:.3f}, at {where} {show(kl[best])}{fell}; {proxy} is dashed"
    drawn = Drawing(
        "over-optimisation", note, x, true, (min(0.0, *kl), 1.04 * max(kl) or 1.0), around(worth),
        proxy, around(said),
    )  # fmt: skip
    drawn.line(kl, said, "l1 dashed", right=True)
    drawn.line(kl, worth, "l0")
    drawn.point(kl[best], worth[best], 4, f"{true} {worth[best]:.3f} at {where} {show(kl[best])}")
    return drawn


def proxy_of(plan: Mapping[str, Any]) -> str | None:
    """The signal that a method earns in the place of something else: its reward part's, however deep it is wrapped."""
    held = _inside(plan, "method", "reward")
    while isinstance(held, Mapping):
        if isinstance(name := held.get("name"), str):
            return None if name in OURS else name
        held = held.get("reward")
    return None


def _inside(value: Any, *path: str) -> Any:
    """What lies there in a plan, whose shape may be that of another version."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _with_distance(row: Mapping[str, Any]) -> Mapping[str, Any]:
    apart, length = row.get("from_reference"), row.get("episode_length")
    if isinstance(apart, int | float) and isinstance(length, int | float):
        return {**row, DISTANCE: apart * length}
    return row


def _stretches(points: Sequence[Sequence[float]], most: int = 30) -> list[list[float]]:
    """Means over stretches of points that follow one another."""
    size = math.ceil(len(points) / most)
    pieces = [points[i : i + size] for i in range(0, len(points), size)]
    return [[sum(column) / len(piece) for column in zip(*piece, strict=True)] for piece in pieces]
