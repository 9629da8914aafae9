"""Group-relative REINFORCE off policy: bounds (REC), penalties (OPMD, AsymRE) and shaped data (RED)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from panoply.batch import Batch
from panoply.evidence import races
from panoply.evidence.claims import Identity, Learns, Shows
from panoply.experience import Experience, Segments, Table
from panoply.methods.base.grpo import CONTROL as GRPO_CONTROL
from panoply.methods.base.grpo import TINY as GRPO_TINY
from panoply.methods.base.grpo import grpo
from panoply.parts import part
from panoply.regimes import OnPolicy
from panoply.registry import method
from panoply.seeds import numpy_rng, torch_rng
from panoply.slots.credit.groups import episode_returns
from panoply.slots.reduce.averages import token_mean
from panoply.slots.regularise.terms import likelihood, squared_log_ratio
from panoply.slots.sample.groups import groups
from panoply.slots.surrogate.masks import masked_likelihood
from panoply.slots.update.optimisers import adam

# ------------------------------------------------------------------ credit


def _surplus(negative: Tensor, peers: Segments, first: int) -> Tensor:
    """Of each group's negative episodes those beyond its positive ones, drawn by lot."""
    lots = torch.from_numpy(numpy_rng("balance", first).random(len(negative)))
    found = negative.cpu().nonzero()[:, 0]
    found = found[lots[found].argsort()]
    index = peers.index.cpu()
    found = found[index[found].argsort(stable=True)]
    at, counts = index[found], index[found].bincount(minlength=len(peers))
    place = torch.arange(len(found)) - (counts.cumsum(0) - counts)[at]
    many = place >= (peers.count.cpu() - counts)[at]
    surplus = torch.zeros(len(negative), dtype=torch.bool)
    surplus[found[many]] = True
    return surplus.to(negative.device)


@part(
    "credit",
    equation=lambda held: (
        "A = "
        + ("(R − mean(R)) / (std(R) + ε)" if held.scale == "std" else "R − mean(R)")
        + (" of the group, without negatives beyond its positives" if held.drop else " of the group")
    ),
    bounds={"epsilon": "from 0 to 1"},
    inert=lambda held, method: (
        [] if held.scale == "std" else [("epsilon", "nothing is divided (scale=none)")]
    ),
)
def relative(
    experience: Experience,
    *,
    drop: bool = False,
    scale: Literal["none", "std"] = "none",
    epsilon: float = 1e-6,
) -> Tensor:
    """An episode's return against the mean of its group; a group of one episode has the baseline 0.

    drop: whether negative episodes (below the mean) are left out by lot until a group has as many positive ones
          (RED-Drop). The mean is that of those kept; dropped ones have A = 0 and still count where A is averaged
    scale: by what it is divided, nothing or the group's deviation (GRPO's)
    """
    returns, peers = episode_returns(experience)
    even = peers.constant(returns)
    negative = (returns < peers.rows(peers.mean(returns))) & ~peers.rows(even)
    first = int(experience.by("episode").keys[0])
    kept = ~_surplus(negative, peers, first) if drop else torch.ones_like(negative)
    count = peers.sum(kept.to(returns.dtype))
    mean = peers.sum(returns * kept) / count
    centred = (returns - peers.rows(mean)) * kept
    if scale == "std":
        centred = centred / (peers.rows((peers.sum(centred**2) / count).sqrt()) + epsilon)
    centred = centred.masked_fill(peers.rows(even), 0.0)
    alone = peers.rows(peers.count == 1)
    return experience.by("episode").rows(torch.where(alone, returns, centred))


# ------------------------------------------------------------------ where it comes from


def pairwise(logp: Tensor, then: Tensor, returns: Tensor, tau: float) -> Tensor:
    """(1/K²)·Σ_{i<j} (Δ_i − Δ_j)²/(1 + τ)²,  Δ = R − τ·(log π − log π_t): 0 where π solves max E R − τ·KL(π‖π_t)."""
    delta = returns - tau * (logp - then)
    gaps = (delta[:, None] - delta[None]).triu(1)
    return (gaps**2).sum() / (len(delta) * (1 + tau)) ** 2


def gradient_gap(seed: int) -> dict[str, float]:
    """How far the pairwise loss's slope at π_t is from group REINFORCE's, 2τ/(1 + τ)² of it, answers by anybody."""
    rng = torch_rng("pairwise", seed)
    size, tau = 4, 0.5
    returns = torch.randperm(8, generator=rng)[:size].double() / 8
    logp = -torch.rand(size, generator=rng, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(pairwise(logp, logp.detach(), returns, tau), logp)
    keys = torch.arange(size)
    columns = {"episode": keys, "group": torch.zeros_like(keys), "reward": returns, "action": keys}
    rows = Experience(Table({**columns, "context": keys, "logp": logp.detach()}), Table({"row": keys}))
    rows = rows.with_columns(advantage=relative()(rows))
    value, _ = masked_likelihood(mask="none")(Batch(rows, {"logp": logp}))
    (plain,) = torch.autograd.grad(-value.mean(), logp)
    gap = (slope - 2 * tau / (1 + tau) ** 2 * plain).abs().max() / slope.abs().max()
    return {"gap": float(gap)}


# ------------------------------------------------------------------ the family

TINY = {
    path: value
    for path, value in GRPO_TINY.items()
    if path not in ("surrogate.high", "reduce", "regularise.kl")
}
CONTROL = {path: value for path, value in GRPO_CONTROL.items() if path not in ("reduce", "regularise.kl")}
TINY = {**TINY, "sample.prompts": 16}
PRESETS = {"tiny": TINY, "control": CONTROL}
_SHARED = {
    "sample.prompts": 96,
    "sample.group": 8,
    "sample.temperature": 1.0,
    "update.lr": 1e-6,
    "update.clip": 1.0,
    "credit.scale": "none",
    "reduce": "token_mean",
}
_YAML, _README = "released code, examples/rec_gsm8k/gsm8k.yaml", "released code, examples/rec_gsm8k/README.md"


def _stale(says: str) -> Learns:
    """A claim against group REINFORCE, whose data is up to twenty steps old."""
    race = races.find("stale")
    return Learns(
        says,
        over="group REINFORCE=rec:surrogate.mask=none",
        world=race.world,
        budget=race.budget,
        settings=race.settings,
        tune={},
        fixed=race.more["fixed"],
        shows=(Shows("success", most=0.05),),
        waives={
            "room": "that group REINFORCE falls to nothing is what the paper found, and what must be shown"
        },
        also=("success", "mean:entropy", "mean:ratio_off"),
    )


@method(
    "rec@1",
    paper=96,
    base="grpo",
    presets=PRESETS,
    claim=_stale(
        "With answers up to twenty steps old REC-OneSide-NoIS, which masks and does not weigh, learns more than group "
        "REINFORCE."
    ),
    published={_YAML: {**_SHARED, "surrogate.mask": "one_side", "surrogate.weigh": "none"},
               _README: {"surrogate.low": 0.2, "surrogate.high": 0.2, "surrogate.far_low": 0.6,
                         "surrogate.far_high": 2.0, "surrogate.temperature": 1.0}},
)  # fmt: skip
def rec() -> OnPolicy:
    """REC-OneSide-NoIS (arXiv 2509.24203): group REINFORCE off policy, with PPO's mask and without its ratio.

    A·log π where the ratio has not yet gone too far. Of max E R − τ·KL(π‖π_t) the solution makes R − τ·log π/π_t equal
    for all answers to a prompt, whoever gave them; the first gradient step of the squared differences is REINFORCE with
    the group's mean as baseline. So weights for importance are not needed, and the clip is a regulariser, which may be
    wide (`low=0.6`, `high=2`). Other members are settings: `mask=two_side`, `ring`, `episode` (with reduce
    sequence_mean and bounds 3e-4, 4e-4), `weigh=ratio`; group REINFORCE itself is `mask=none`, and Trinity's OPMD that
    with surrogate.weight 1/(1 + τ). The authors' policy acts up to 20 steps late: sample.by=behind:20.
    """
    return grpo().but(
        sample=groups(prompts=96, group=8),
        credit=relative(),
        surrogate=masked_likelihood(),
        regularise=(),
        reduce=token_mean(),
        update=adam(lr=1e-6),
    )


@method(
    "opmd@1",
    paper=96,
    base="rec",
    claim=Identity(
        "At the policy it starts from, the pairwise loss that OPMD is derived from has the gradient of group "
        "REINFORCE, whoever gave the answers.",
        gradient_gap,
        within=1e-9,
    ),
    published={
        _YAML: _SHARED,
        _README: {"surrogate.mask": "none", "regularise.squared_log_ratio.weight": 0.1},
    },
)
def opmd() -> OnPolicy:
    """OPMD as in Kimi k1.5 (arXiv 2501.12599; here as 2509.24203 has it): group REINFORCE and 0.1·(log π/π_old)².

    What holds it back is a penalty, and not a bound: a token that has moved far is pulled back. The baseline is the
    group's mean; the other one in circulation, log mean exp of its rewards, is not here.
    """
    return rec().but(surrogate=masked_likelihood(mask="none"), regularise=(squared_log_ratio(weight=0.1),))


@method(
    "asymre@1",
    paper=96,
    base="rec",
    claim=_stale("With answers up to twenty steps old AsymRE learns more than group REINFORCE."),
    published={_YAML: _SHARED, _README: {"surrogate.mask": "none", "regularise.likelihood.weight": 0.1}},
)
def asymre() -> OnPolicy:
    """AsymRE (Meta, arXiv 2506.20520; here as 2509.24203 has it): group REINFORCE and −0.1·log π of every answer.

    The same gradient as a baseline that is 0.1 below the group's mean: right answers are raised by more than wrong ones
    are lowered, which is what keeps learning from others' answers stable.
    """
    return rec().but(surrogate=masked_likelihood(mask="none"), regularise=(likelihood(weight=0.1),))


@method(
    "red-drop@1",
    paper=96,
    base="rec",
    claim=_stale("With answers up to twenty steps old RED-Drop learns more than group REINFORCE."),
    published={_YAML: _SHARED, _README: {"surrogate.mask": "none", "credit.drop": True}},
)
def red_drop() -> OnPolicy:
    """RED-Drop (arXiv 2509.24203): group REINFORCE on groups in which wrong answers are no more than right ones."""
    return rec().but(surrogate=masked_likelihood(mask="none"), credit=relative(drop=True))


@method(
    "red-weight@1",
    paper=96,
    base="rec",
    presets={**PRESETS, "control": {**CONTROL, "credit.scale": "std"}},
    claim=_stale("With answers up to twenty steps old RED-Weight learns more than group REINFORCE."),
    published={
        _YAML: _SHARED,
        _README: {"surrogate.mask": "none", "surrogate.weigh": "advantage", "surrogate.temperature": 1.0},
    },
)
def red_weight() -> OnPolicy:
    """RED-Weight (arXiv 2509.24203): group REINFORCE, each answer weighed with e^A: good ones count for more.

    e^A needs advantages of about 1: on control, where returns are in the tens, they are divided by their deviation.
    """
    return rec().but(surrogate=masked_likelihood(mask="none", weigh="advantage"))
