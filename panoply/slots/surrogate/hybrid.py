"""A surrogate of groups in which some answers are a teacher's."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.experience import TEACHER
from panoply.parts import Finding, Part, part
from panoply.slots.surrogate.ratios import clip

_CLIP = clip()
SHAPES = {
    "probability": "p",
    "shaped": "p/(p + γ)",
    "mixture": "2p/(p_old + ½(p_old + u))",
}


def _equation(held: Any) -> str:
    shape = SHAPES[held.shape].replace("γ", f"{held.gamma:g}").replace("u", f"{held.guess:g}")
    focus = f"·(1 − sg(p))^{held.focus:g}" if held.focus else ""
    return f"own: {held.own.equation()}; teacher: {shape}·A{focus},  p = π(a|s)"


def _needs(held: Any) -> frozenset[str]:
    return frozenset({"logp@old"} if held.shape == "mixture" else ())


def _impossible(held: Any, method: Any) -> list[Finding]:
    info = held.own.info
    if info.slot != "surrogate" or info.unit != "decision" or info.prepare or info.stream != "own":
        return [("own", "it is not a surrogate of single decisions")]
    return []


def _inert(held: Any, method: Any) -> list[Finding]:
    found = [("own.weight", "the surrogate's own weight is what counts")]
    if all("stream:imitation" not in other.info.gives for _, other in method.parts()):
        return [
            *found,
            *((name, "no part brings a teacher's answers") for name in ("shape", "gamma", "guess", "focus")),
        ]
    absent = {"gamma": ("shaped", "γ"), "guess": ("mixture", "guess at the teacher")}
    return [
        *found,
        *((n, f"shape={held.shape} has no {w}") for n, (s, w) in absent.items() if held.shape != s),
    ]


@part(
    "surrogate",
    equation=_equation,
    stream="joint",
    idle="advantage",
    needs=_needs,
    inert=_inert,
    impossible=_impossible,
    bounds={"gamma": "above 0", "guess": "above 0 to 1", "focus": "at least 0", "weight": "above 0"},
)
def hybrid(
    batch: Batch,
    *,
    own: Part = _CLIP,
    shape: Literal["probability", "shaped", "mixture"] = "shaped",
    gamma: float = 0.1,
    guess: float = 1.0,
    focus: float = 0.0,
    weight: float | Part = 1.0,
) -> Values:
    """Own rows by another surrogate, a teacher's by a bounded function of p; one count divides both (stream `joint`).

    Nobody knows with which probability the teacher took a decision, so there is no ratio to clip. Its rows have NaN for
    `logp`: they are picked out by index and never masked, since 0·NaN is NaN, in the value and in the gradient.

    own     the surrogate of the policy's own rows
    shape   what stands for the ratio on the teacher's: `probability` p; `shaped` p/(p + γ), whose gradient is largest
            for unlikely tokens (LUFFY, arXiv 2504.14945); `mixture`, p over the mean of the old policy and of a
            guess at the teacher (RL-PLUS, arXiv 2508.00222), at most 4/`guess`
    guess   in `mixture`: the teacher is taken for the mean of the old policy and of one that knows nothing, which gives
            every decision this probability; a uniform one gives 1/|V|
    focus   power of 1 − p, by which an advantage counts the more the less likely the policy finds the decision
    """
    logp = batch.now["logp"]
    taught = batch["source"] == TEACHER if "source" in batch else torch.zeros_like(logp, dtype=torch.bool)
    value, stats = torch.zeros_like(logp), {}
    mine, theirs = (~taught).nonzero().flatten(), taught.nonzero().flatten()
    if len(mine):
        found, told = own(batch.of_stream("own"))
        value = value.index_copy(0, mine, found.to(value.dtype))
        stats = {name: _spread(column, mine, len(taught)) for name, column in told.items()}
    if len(theirs):
        p = logp[theirs].exp()
        if shape == "mixture":
            before = batch["logp@old"][theirs].exp()
            factor = 2 * p / (before + (before + guess) / 2)
        else:
            factor = p if shape == "probability" else p / (p + gamma)
        worth = (
            batch["advantage"][theirs] * (1 - p.detach()).clamp(min=0) ** focus
        )  # p may be rounded to above 1
        value = value.index_copy(0, theirs, (factor * worth).to(value.dtype))
        stats["teacher_p"] = p.detach()
    return value, stats


def _spread(column: Tensor, rows: Tensor, size: int) -> Tensor:
    """A gate is a column of all rows; the teacher's are never cut."""
    return column.new_zeros(size).index_copy(0, rows, column) if column.dtype == torch.bool else column
