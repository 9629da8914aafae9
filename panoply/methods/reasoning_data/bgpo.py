"""BGPO: a ratio of likelihoods that a masked-diffusion model has no numbers for, bounded by a sum over masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.costs import Lengths, Tokens
from panoply.evidence.claims import Identity
from panoply.experience import OPEN, Column, Experience, Ragged, Table
from panoply.methods.base.grpo import TINY as GRPO_TINY
from panoply.methods.base.grpo import grpo
from panoply.methods.base.sft import sft
from panoply.parts import Finding, Part, part
from panoply.regimes import Dataset, OnPolicy
from panoply.registry import Published, method
from panoply.seeds import torch_rng
from panoply.slots.reduce.averages import token_mean
from panoply.slots.sample.groups import LIMITS
from panoply.slots.surrogate.ratios import STAYS, stays_at_one
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.rollout.text import Collector

Masks = Literal["some", "all"]
Order = Literal["sure", "random"]

# ------------------------------------------------------------------ answers with masks


def masked(experience: Experience, hole: int, draws: int, masks: Masks, *names: object) -> Experience:
    """Every answer so many times, each time with other tokens of it masked: what is masked is what is decided.

    Of an answer of L tokens k are masked, k from 1 to L all alike and any k of them, or with `all` all of them. Prompts
    never are. An answer's draws are segments of its episode, each in a context row of its own with the masks in it, so
    that whoever is asked, now or earlier, is asked about the same; column `share` is L/k, the 1/t of the bound. What
    the answer earned stands on its last row, once.
    """
    episodes = experience.by("episode")
    grid = episodes.grid()
    length = episodes.count[:, None, None]
    rng = torch_rng("masks", *names)
    order = torch.rand(len(grid), draws, grid.shape[1], generator=rng)
    order = order.masked_fill((grid < 0)[:, None], 2.0).argsort(-1).argsort(-1)
    many = 1 + (torch.rand(len(grid), draws, 1, generator=rng) * length).long().clamp(max=length - 1)
    many = length.expand_as(many) if masks == "all" else many
    of, draw, place = (order < many).nonzero(as_tuple=True)
    rows = grid[of, place]
    bare = experience.without("logp", "entropy", "temperature")
    decisions = bare.decisions.take(rows)
    last = torch.ones_like(of, dtype=torch.bool)
    last[:-1] = of[1:] != of[:-1]
    columns: dict[str, Column] = {
        "context": of * draws + draw,
        "segment": draw,
        "share": (length / many)[of, draw, 0],
        "end": torch.where(last, episodes.last(experience["end"])[of], OPEN),
    }
    for name in (n for n in bare.decisions if n.startswith("signal:")):
        columns[name] = torch.where(last, episodes.sum(experience[name])[of], 0.0)
    whole, at = experience.context.ragged("tokens"), episodes.first(experience["context"])
    texts = [whole[int(row)].tolist() for row in at.tolist() for _ in range(draws)]
    for row, position in zip(
        (of * draws + draw).tolist(), experience["position"][rows].tolist(), strict=True
    ):
        texts[row][position] = hole
    context = experience.context.take(at.repeat_interleave(draws)).plus({"tokens": Ragged.from_lists(texts)})
    return Experience(decisions.plus(columns), context)


def _cost(held: Any, of: Lengths) -> Tokens:
    answers = held.prompts * held.group
    return answers * of.answer, answers * held.draws * (of.prompt + of.context)


def _drawn_inert(held: Any, method: Any) -> list[Finding]:
    return [("draws", "with all tokens masked every draw is the same")] if held.masks == "all" else []


@part(
    "sample",
    equation=lambda held: (
        f"{held.prompts} prompts × {held.group} answers, filled in {held.at_once} at a time; "
        + ("all of each masked, once" if held.masks == "all" else f"{held.draws} random masks of each")
    ),
    needs={"world:masks", "world:verify"},
    gives={"column:segment", "column:share"},
    bounds={
        **{name: LIMITS[name] for name in ("prompts", "group", "temperature")},
        "draws": "at least 1",
        "at_once": "at least 1",
        "block": "at least 0",
    },
    inert=_drawn_inert,
    cost=_cost,
)
def denoised(
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    draws: int = 16,
    masks: Masks = "some",
    at_once: int = 1,
    block: int = 0,
    order: Order = "sure",
    temperature: float = 1.0,
) -> Experience:
    """Answers of a masked-diffusion model, and of each of them masks by which its likelihood is estimated.

    draws     masks of each answer (n_t)
    masks     `some`, at random; or `all` tokens at once, as if they were independent (diffu-GRPO, with bare prompts)
    at_once   tokens that are filled in together
    block     tokens of a block: blocks are filled in from the left; 0 means one block
    order     within a block the `sure` places first, whose drawn token is likeliest, or any (`random`)
    """
    engine: Any = collect.engine
    with engine.by(at_once, block, order):
        found = collect.episodes(collect.tasks(prompts), group, temperature=temperature)
    seen = (collect.seed, collect.state["episodes"])
    return masked(found, collect.policy.mask, 1 if masks == "all" else draws, masks, *seen)  # type: ignore[attr-defined]


# ------------------------------------------------------------------ what is ascended


def differences(batch: Batch, unit: Literal["segment", "episode"]) -> tuple[Tensor, Tensor]:
    """d = (L/k)·Σ log π/π_old over masked tokens, of each draw or the mean of an answer's draws, and the advantage."""
    gap = (batch.now["logp"] - batch["logp@old"]) * batch["share"]
    keys = batch.by(unit)
    d = keys.sum(gap)
    if unit == "episode":
        draws = batch.by("segment")
        d = d / keys.sum(torch.where(draws.is_last(), 1.0, 0.0).to(d))
    return d, keys.first(batch["advantage"])


def _held(held: Any, method: Any) -> list[Finding]:
    return [("limit", STAYS)] if stays_at_one("old", method) else []


NEEDS = frozenset({"logp@old", "column:share", "column:segment"})


@part(
    "surrogate",
    equation="(1 + d)·A where A ≥ 0, e^d·A where A < 0, the mean over masks",
    unit="segment",
    idle="advantage",
    scores="policy",
    needs=NEEDS,
    inert=_held,
    bounds={"limit": "above 0", "weight": "above 0"},
)
def lower_bound(batch: Batch, *, limit: float | None = None, weight: float | Part = 1.0) -> Values:
    """A bound from below of e^{mean d}·A that is a mean over masks, so that each of them can be forgotten at once.

    It touches where d = 0, in value and gradient. limit: what d is bounded to where A < 0, since e^d may blow up.
    """
    d, advantage = differences(batch, "segment")
    risen = (d if limit is None else d.clamp(max=limit)).exp()
    value = torch.where(advantage >= 0, (1 + d) * advantage, risen * advantage)
    return value, {"elbo_gap": d.detach().abs(), "elbo_ratio_max/max": d.detach().exp()}


@part(
    "surrogate",
    equation="exp(mean d over masks)·A",
    unit="episode",
    idle="advantage",
    scores="policy",
    needs=NEEDS,
    bounds={"weight": "above 0"},
)
def elbo_ratio(batch: Batch, *, weight: float | Part = 1.0) -> Values:
    """What the bound stands for: the ratio of two estimated bounds of the likelihood (VRPO, on policy).

    All masks of an answer must be held in memory together, since it is not a sum over them.
    """
    d, advantage = differences(batch, "episode")
    return d.exp() * advantage, {"elbo_gap": d.detach().abs(), "elbo_ratio_max/max": d.detach().exp()}


# ------------------------------------------------------------------ imitation


@part(
    "data",
    equation="{batch} demonstrations a step, each with some of its tokens masked",
    needs={"world:masks", "world:teacher"},
    gives={"column:segment", "column:share"},
    bounds={"batch": "at least 1"},
)
def masked_demonstrations(collect: Collector, *, batch: int = 128) -> Experience:
    """Fresh tasks, each with one demonstration, of which from one to all tokens are masked."""
    found = collect.demonstrations(collect.tasks(batch))
    seen = (collect.seed, collect.state["episodes"])
    return masked(found, collect.policy.mask, 1, "some", *seen)  # type: ignore[attr-defined]


@part(
    "loss",
    equation="−(1/k)·Σ log π over k masked tokens",
    unit="segment",
    stream="imitation",
    scores="policy",
    needs={"column:segment"},
    bounds={"weight": "above 0"},
)
def denoising(batch: Batch, *, weight: float | Part = 1.0) -> Values:
    """What a masked-diffusion model is trained with: an estimate of the bound of −log p a token (arXiv 2502.09992)."""
    loss = -batch.by("segment").mean(batch.now["logp"])
    return loss, {"nll": loss.detach()}


@method("masked-sft@1", base="sft", world="digits")
def masked_sft() -> Dataset:
    """Imitation for masked-diffusion models (LLaDA, arXiv 2502.09992): masks in demonstrations are filled in."""
    return sft().but(data=masked_demonstrations(), losses=(denoising(),))


# ------------------------------------------------------------------ the work

TINY = {
    "sample.draws": 8,
    "sample.order": "random",
    **{name: value for name, value in GRPO_TINY.items() if name.startswith(("sample", "update", "run"))},
}
"""Places in any order: so a small model is sampled from, and evaluated, as it is. Sure ones first it errs less."""

PUBLISHED: Published = {
    "arXiv 2510.11683, the settings of training": {
        "sample.prompts": 16,
        "sample.group": 8,
        "sample.draws": 16,
        "update.lr": 5e-7,
        "update.minibatches": 1,
        "regularise": None,
    },
    "arXiv 2510.11683, the method": {
        "credit.baseline": "mean",
        "credit.scale": "std",
        "surrogate.limit": None,
    },
}
"""Off policy it is `update.minibatches=2`, for Sudoku `sample.draws=32`."""


def measure(seed: int) -> dict[str, float]:
    """On random differences and advantages: how far the bound lies above what it bounds, and, where they touch, how far
    apart the two are in value and gradient. All of it in float64."""
    rng = torch_rng("bgpo", seed)
    above = apart = 0.0
    for _ in range(100):
        draws = int(torch.randint(1, 33, (), generator=rng))
        d = torch.randn(draws, generator=rng, dtype=torch.float64) * 2
        for advantage in torch.randn(2, generator=rng, dtype=torch.float64):
            whole = d.mean().exp() * advantage
            above = max(above, float(_bound(d, advantage) - whole) / float(1 + whole.abs()))
        zero = torch.zeros(draws, dtype=torch.float64, requires_grad=True)
        pair = (_bound(zero, advantage), zero.mean().exp() * advantage)
        slopes = [torch.autograd.grad(value, zero)[0] for value in pair]
        apart = max(
            apart, float((pair[0] - pair[1]).detach().abs()), float((slopes[0] - slopes[1]).abs().max())
        )
    return {"violation": max(above, apart), "above": above, "apart at the old policy": apart}


def _bound(d: Tensor, advantage: Tensor) -> Tensor:
    """The mean over draws that `lower_bound` is."""
    rows = len(d)
    table: dict[str, Column] = {
        "episode": torch.zeros(rows, dtype=torch.long),
        "segment": torch.arange(rows),
        "action": torch.zeros(rows, dtype=torch.long),
        "share": torch.ones_like(d),
        "logp@old": torch.zeros_like(d),
        "advantage": advantage.expand(rows),
    }
    values, _ = lower_bound()(Batch(Experience(Table(table), Table({})), {"logp": d}))
    mean: Tensor = values.mean()
    return mean


CLAIM = Identity(
    "For any differences of log-likelihoods over masks and any advantage, the mean over masks that BGPO ascends is at "
    "most the ratio times the advantage that it stands for; at the old policy both have the same value and gradient.",
    measure,
    within=1e-9,
)


@method(
    "bgpo@1",
    paper=46,
    base="grpo",
    world="digits",
    presets={"tiny": TINY},
    claim=CLAIM,
    published=PUBLISHED,
)
def bgpo() -> OnPolicy:
    """Boundary-Guided Policy Optimization (arXiv 2510.11683): reinforcement for masked-diffusion language models.

    Such a model has no log-likelihood of an answer y, only a bound B = E ℓ, estimated by n masks:
    ℓ_j = (L/k)·Σ log p(y_i | the rest, x) over the k masked tokens. A ratio of likelihoods is then e^{B − B_old}, whose
    gradient needs the passes over all n masks in memory at once. With d_j = ℓ_j − ℓ_j^old BGPO ascends instead

        (1/n)·Σ_j g_j,   g_j = (1 + d_j)·A where A ≥ 0,   e^{d_j}·A where A < 0

    which lies below it (e^x ≥ 1 + x, and Jensen), is a sum, so that every pass is forgotten before the next, and has
    the same value and gradient at the old policy. More masks then cost time and no memory, for a less noisy gradient.

    Masks are drawn once and written down, so that both policies see the same ones; drawn anew, d would be noise. There
    is neither a clip nor a KL term. How many tokens are masked is drawn, 1 to L all alike, with weight L/k: with a rate
    t and weight 1/t, as the paper writes it, single draws explode as t → 0. `surrogate=elbo_ratio` is the ratio itself
    (VRPO), `sample.masks=all` the one pass of diffu-GRPO, here with whole prompts. Not there: answers that end before
    their last token.
    """
    return grpo().but(
        sample=denoised(prompts=16, group=8),
        surrogate=lower_bound(),
        regularise=(),
        reduce=token_mean(),
        update=adam(lr=5e-7),
    )
