"""D3S: fewer rollouts and fewer tokens, those that say most, and more of them as training goes on."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience, Segments
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, Part, part, show_value
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.seeds import torch_rng
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import token_mean
from panoply.slots.schedule.schedules import at, ramp

_GROUP, _ROWS, _TOKENS = group(), ramp(first=0.25, last=1.0), ramp(first=0.2, last=1.0)


def most_varied(values: Tensor, size: int) -> Tensor:
    """Marks the `size` of some values whose variance is largest: the u largest and size − u smallest, for the best u.

    No other choice has more: moving one value away from the mean of the others never lessens the variance. All u are
    tried at once with running sums; of two that are as good, the one with more large values is taken.
    """
    number = len(values)
    order = values.argsort(stable=True)
    x = values[order].double()
    x = x - x.mean()
    sums = [torch.cat([x.new_zeros(1), power.cumsum(0)]) for power in (x, x**2)]
    u = torch.arange(size + 1, device=values.device)
    total, squares = (s[size - u] + s[number] - s[number - u] for s in sums)
    variance = squares / size - (total / size) ** 2
    best = int((variance >= variance.max() - 1e-12 * (x**2).max()).nonzero().max())
    kept = torch.zeros(number, dtype=torch.bool, device=values.device)
    kept[order[: size - best]] = True
    kept[order[number - best :]] = True
    return kept


def share_of(number: int, share: float) -> int:
    """So much of a number, at least one."""
    return min(number, max(1, round(share * number)))


def _equation(held: Any) -> str:
    rows, tokens = (x.equation() if isinstance(x, Part) else show_value(x) for x in (held.rows, held.tokens))
    which = "by lot" if held.by == "lot" else "with the largest Var(A)"
    what = "by lot" if held.by == "lot" else "by |A|·H"
    return f"{held.credit.equation()}; {rows} of each {held.among} {which}, of that {tokens} of the tokens {what}"


def _impossible(held: Any, method: Any) -> list[Finding]:
    if held.credit.info.slot != "credit":
        return [("credit", "it gives no advantages")]
    shares = {name: [at(getattr(held, name), step, 3) for step in range(3)] for name in ("rows", "tokens")}
    return [
        (name, f"a share is above 0 and at most 1, and this comes to {worst:g}")
        for name, found in shares.items()
        for worst in found
        if not 0 < worst <= 1
    ][:1]


@part(
    "credit",
    equation=_equation,
    needs={"engine:entropy"},
    impossible=_impossible,
    bounds={"rows": "above 0 to 1", "tokens": "above 0 to 1"},
)
def down_sampled(
    experience: Experience,
    *,
    credit: Part = _GROUP,
    rows: float | Part = _ROWS,
    tokens: float | Part = _TOKENS,
    among: Literal["batch", "group"] = "batch",
    by: Literal["variance", "lot"] = "variance",
) -> dict[str, Tensor]:
    """Another credit, of which only some episodes learn, and of these only some decisions (D3S).

    Advantages are those among all episodes, and stay as they are: normalising them again would undo what was chosen.
    Of the episodes those are kept whose advantages vary most, of *their* decisions, all together, those with the
    largest |A|·H, H being the entropy that each was drawn with. What is not kept has no gradient and is not counted.

    rows     the share of episodes that learn, a number or a schedule
    tokens   the share of their decisions that learn, a number or a schedule
    among    episodes are chosen out of the whole batch, or out of each group as many
    by       `lot` takes episodes and decisions at random, for a comparison: as many, but not those
    """
    found = credit(experience)
    columns: dict[str, Tensor] = found if isinstance(found, dict) else {"advantage": found}
    advantage, learns = columns["advantage"], experience.stream("own")
    if "train" in columns:
        learns = learns & columns["train"].bool()
    episodes = experience.by("episode")
    lots = torch_rng("down-sampled", int(episodes.keys.min())) if by == "lot" else None
    kept = learns & episodes.rows(_episodes(experience, advantage, at(rows, 0, 1), among, lots))
    return {**columns, "train": _decisions(experience, advantage, kept, at(tokens, 0, 1), lots)}


def _episodes(
    experience: Experience, advantage: Tensor, share: float, among: str, lots: torch.Generator | None
) -> Tensor:
    """Marks the episodes that learn."""
    episodes = experience.by("episode")
    value = episodes.mean(advantage.double())
    if lots is not None:
        value = torch.rand(len(value), generator=lots, dtype=torch.float64).to(value.device)
    together = Segments(
        episodes.first(experience["group"]) if among == "group" else torch.zeros_like(episodes.keys)
    )
    kept = torch.zeros(len(value), dtype=torch.bool, device=value.device)
    for one in range(len(together)):
        mine = (together.index == one).nonzero().flatten()
        size = share_of(len(mine), share)
        kept[mine] = _largest(value[mine], size) if lots is not None else most_varied(value[mine], size)
    return kept


def _largest(values: Tensor, size: int) -> Tensor:
    kept = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    kept[values.argsort(descending=True, stable=True)[:size]] = True
    return kept


def _decisions(
    experience: Experience, advantage: Tensor, among: Tensor, share: float, lots: torch.Generator | None
) -> Tensor:
    """Marks, of some decisions, those that learn; among equals those of earlier episodes, and the earlier of one."""
    chosen = among.nonzero().flatten()
    if "position" in experience:
        chosen = chosen[experience["position"][chosen].argsort(stable=True)]
    chosen = chosen[experience["episode"][chosen].argsort(stable=True)]
    score = (advantage[chosen].abs() * experience["entropy"][chosen]).double()
    if lots is not None:
        score = torch.rand(len(score), generator=lots, dtype=torch.float64).to(score.device)
    marks = torch.zeros_like(among)
    marks[chosen[_largest(score, share_of(len(chosen), share))]] = True
    return marks


CLAIM = Learns(
    "From as many answers, learning from those alone whose advantages vary most, and of them from the tokens with the "
    "largest |A|·H, more of both as training goes on, gets further than GRPO, which learns from all.",
    race="frontier",
    also=("success", "mean:trained", "mean:gradient_norm", "total_decisions"),
    shows=(Shows("mean:degenerate_groups", least=0.2),),
)
PUBLISHED: Published = {
    "arXiv 2509.22115": {
        "credit.credit.baseline": "mean",
        "credit.credit.scale": "std",
        "credit.among": "batch",
        "credit.by": "variance",
        "reduce": "token_mean",
    },
}
"""The rules. Where the schedules begin and end was not found in what could be read: a quarter of the episodes and a
fifth of their tokens at first, all of both at the end, are reconstructed; sizes and rates are GRPO's."""


@method("d3s@1", paper=43, base="grpo", claim=CLAIM, published=PUBLISHED)
def d3s() -> OnPolicy:
    """Dynamic Dual-Level Down-Sampling, D³S (arXiv 2509.22115). Ŝ = argmax Var(A_S), T = top K % of Ŝ by |A|·H.

    GRPO divides by each group's deviation, so that the bound on its gradient is the same whatever was earned, and most
    answers and tokens only dilute it. Here advantages are made of all answers; then the subset of the batch whose
    advantages vary most learns, and of it the tokens that matter and were uncertain. Both shares grow in a line,
    because what says most is soon learned by heart.

    What is surprising: the best subset of n answers is found exactly by sorting, since it is always some of the largest
    and some of the smallest advantages. Groups whose answers earned the same have advantage 0 and drop out by
    themselves. The loss is divided by the tokens kept; Adam divides by the gradient's size anyway, so that larger
    gradients alone gain nothing here, and only other directions do. H is that of the policy before the step's first
    update, by which tokens were drawn, also for the later ones of several mini-batches.

    `credit.among=group` chooses inside each group (D³S-I), `credit.rows=0.25` and `credit.tokens=0.2` hold the shares
    (D²S), `credit.tokens=1` leaves the tokens (D¹S).
    """
    return grpo().but(credit=down_sampled(), reduce=token_mean())
