"""Fibration Policy Optimization: a budget for every level that a ratio moves on, and the trust region it comes from."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.evidence.claims import Identity, Learns, Shows
from panoply.experience import Experience, Table
from panoply.methods.base.grpo import CONTROL as GRPO_CONTROL
from panoply.methods.base.grpo import TINY as GRPO_TINY
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.seeds import torch_rng
from panoply.slots.surrogate.ratios import STAYS, log_likelihood, needs_against, ratio_stats, stays_at_one
from panoply.slots.update.optimisers import adam

LEVELS = ("domain", "group", "episode")
"""What decisions belong to, from the coarsest to the finest."""


def _gated_levels(*budgets: float | None) -> dict[str, float]:
    """The levels that have a budget, from the coarsest to the finest."""
    return {level: budget for level, budget in zip(LEVELS, budgets, strict=True) if budget is not None}


def _budgets(held: Any) -> dict[str, float]:
    return _gated_levels(held.domain, held.group, held.episode)


def _equation(held: Any) -> str:
    steps, before = [], ""
    for level, budget in _budgets(held).items():
        here = f"b_{level}"
        steps.append(f"clip({here}{before}, ±{budget:g})")
        before = f" − {here}"
    token = f"clip(l{before}, ±{held.token:g})"
    if held.residual == "gated":
        steps, token = [steps[0]], f"clip(l − gated b_episode, ±{held.token:g})"
    back = f",  beyond a bound back with slope {held.restore:g}" if held.restore else ""
    return f"G·A,  log G = {' + '.join([*steps, token])},  l = log ρ, b = its mean{back}"


def _inert(held: Any, method: Any) -> list[Finding]:
    if stays_at_one(held.against, method):
        return [(name, STAYS) for name in (*LEVELS, "token", "residual", "restore")]
    return [("restore", "residual=gated has no slope back")] if held.residual == "gated" else []


def _impossible(held: Any, method: Any, world: Any) -> list[Finding]:
    if held.domain is not None and "domain" not in world.keys:
        return [("domain", f"it needs several kinds of problem, as mixed has, and {world.name} has one")]
    return []


def _gate(x: Tensor, budget: float, advantage: Tensor, restore: float) -> Tensor:
    """x inside of ±budget; beyond it flat, or with a slope by which x comes back, whatever the advantage's sign."""
    held = x.clamp(-budget, budget)
    return held - restore * advantage.sign() * (x - held).abs() if restore else held


@part(
    "surrogate",
    equation=_equation,
    idle="advantage",
    needs=lambda held: needs_against(held) | {f"whole:{level}" for level in _budgets(held)},
    inert=_inert,
    impossible=_impossible,
    bounds={**dict.fromkeys((*LEVELS, "token", "weight"), "above 0"), "restore": "at least 0"},
)
def fibred(
    batch: Batch,
    *,
    token: float = 0.2,
    episode: float = 0.2,
    group: float | None = None,
    domain: float | None = None,
    restore: float = 0.0,
    residual: Literal["free", "gated"] = "free",
    against: str = "behaviour",
    weight: float | Part = 1.0,
) -> Values:
    """A ratio in pieces, each with a budget of its own: how far all of an episode has moved, and each token beside it.

    The mean b of an episode's log-ratios is bounded, and so is what a token has beyond it, l − b; both together are
    the gated log-ratio. A group and a domain are further levels: each has the mean of all its tokens, and is gated by
    what it has beyond the next coarser one. Inside of all bounds the pieces add up to l, so that at ratio 1 value and
    gradient are the plain ratio's. Nothing is pessimistic: a bound holds whichever sign A has. Gradients go through the
    means, so a mini-batch holds episodes, groups, or with `domain` whole domains, and is not split below that.

    token, episode, group, domain: budgets, in log-ratios; `none` is no such level
    restore: the slope beyond a bound of a mean, which is flat with 0: then nothing pulls back an episode that has moved
             too far. It goes against an advantage that pushes farther out, and with one that pulls back
    residual: what a token is compared with: the mean as it is (`free`), or, as in an unofficial port, the bounded one
              (`gated`), which lets through the token's gate what the mean's has held. With further levels the port
              takes the coarsest one alone, the mean of finer ones that are bounded first: no identity at ratio 1
    """
    advantage, log_ratio = batch["advantage"], batch.log_ratio(against)
    budgets = _gated_levels(domain, group, episode)
    stats: dict[str, Tensor] = {}

    def mean_of(level: str, x: Tensor) -> Tensor:
        segments = batch.by(level)
        return segments.rows(segments.mean(x))

    def note(level: str, x: Tensor, budget: float) -> None:
        stats[f"gate_{level}"] = (x.detach().abs() > budget) & (advantage != 0)

    if residual == "gated":
        base, parent = log_ratio, log_ratio
        for level, budget in reversed(budgets.items()):
            mean = mean_of(level, base)
            note(level, mean, budget)
            base = mean.clamp(-budget, budget)
            parent = base if level == "episode" else parent
        gated = base
    else:
        gated, parent = torch.zeros_like(log_ratio), torch.zeros_like(log_ratio)
        for level, budget in budgets.items():
            mean = mean_of(level, log_ratio)
            note(level, mean - parent, budget)
            gated = gated + _gate(mean - parent, budget, advantage, restore)
            parent = mean
            stats[f"drift_{level}"] = mean.detach().abs()
    note("token", log_ratio - parent, token)
    gated = gated + (log_ratio - parent).clamp(-token, token)
    return gated.exp() * advantage, {**ratio_stats(batch, against), **stats}


@part(
    "surrogate",
    equation="(1 + clip(ρ − 1, ±B))·A,  B = {budget}·T − Σ |ρ − 1| of the episode's other tokens, at least 0",
    idle="advantage",
    needs=lambda held: needs_against(held) | {"whole:episode"},
    inert=lambda held, method: [("budget", STAYS)] if stays_at_one(held.against, method) else [],
    bounds={"budget": "above 0", "weight": "above 0"},
)
def budgeted(
    batch: Batch, *, budget: float = 0.2, against: str = "behaviour", weight: float | Part = 1.0
) -> Values:
    """APC-Obj: a token moves only as far as its episode's other tokens have left of a common budget (arXiv 2603.08239).

    Σ |ρ − 1| ≤ T·budget is a trust region of total variation, and this is its exact form without a constraint: inside
    of the region nothing is bounded, and outside the gated ratios lie in it, so both have the same best policy. The
    budget that is left is differentiated, too: where one token is held, the others are drawn back to make room for it.

    budget: the mean of |ρ − 1| that an episode may have
    """
    advantage, off = batch["advantage"], batch.log_ratio(against).exp() - 1
    episodes, size = batch.by("episode"), off.abs()
    left = (episodes.rows(episodes.count * budget - episodes.sum(size)) + size).clamp(min=0)
    held = size > left
    gated = 1 + torch.where(held, off.sign() * left, off)
    return gated * advantage, {
        **ratio_stats(batch, against),
        "gate_budget": (held & (advantage != 0)).detach(),
    }


# ------------------------------------------------------------------ what is true of them exactly


def _sampled(seed: int) -> tuple[Experience, Tensor]:
    """Decisions of two domains of two groups of two episodes of three tokens, with any advantages, and their `logp`."""
    rng = torch_rng("fibred", seed)
    rows = torch.arange(24)
    logp = -torch.rand(24, generator=rng, dtype=torch.float64) - 0.1
    keys = {"domain": rows // 12, "group": rows // 6, "episode": rows // 3, "context": rows // 3}
    advantage = torch.randn(24, generator=rng, dtype=torch.float64)
    table = Table({**keys, "action": rows, "logp": logp, "advantage": advantage})
    return Experience(table, Table({"row": torch.arange(8)})), logp.clone().requires_grad_()


def first_order_gap(seed: int) -> dict[str, float]:
    """How far the slope of four levels, where the policy has not moved, is from REINFORCE's."""
    made, logp = _sampled(seed)
    batch = Batch(made, {"logp": logp})
    slopes = [
        torch.autograd.grad(surrogate(batch)[0].sum(), logp, retain_graph=True)[0]
        for surrogate in (fibred(group=0.15, domain=0.1), log_likelihood())
    ]
    return {"gap": float((slopes[0] - slopes[1]).abs().max() / slopes[1].abs().max())}


def trust_region_gap(seed: int) -> dict[str, float]:
    """By how much APC-Obj misses the optimum inside of the trust region, or finds more anywhere else.

    Of one episode that is max Σ ρA with Σ |ρ − 1| ≤ T·δ and ρ ≥ 0. Its best uses the budget on the largest gains: up
    without an end, down as far as 0.
    """
    made, _ = _sampled(seed)
    made = made.take(made["episode"] == 0)
    budget, advantage = 0.5, made["advantage"]
    rng = torch_rng("trust region", seed)

    def value(ratio: Tensor) -> float:
        now = Batch(made, {"logp": made["logp"] + ratio.clamp(min=1e-8).log()})
        return float(budgeted(budget=budget)(now)[0].sum())

    left, best = budget * len(made), torch.ones_like(advantage)
    for at in advantage.abs().argsort(descending=True).tolist():
        step = left if advantage[at] > 0 else min(left, 1.0)
        best[at] += step * float(advantage[at].sign())
        left -= step
    most = float((best * advantage).sum())
    tried = max(value(4 * torch.rand(len(made), generator=rng, dtype=torch.float64)) for _ in range(400))
    return {"gap": max(abs(value(best) - most), tried - most)}


# ------------------------------------------------------------------ methods

_BARRED = ("surrogate.high", "reduce", "regularise.kl")
TINY = {
    **{path: value for path, value in GRPO_TINY.items() if path not in _BARRED},
    "sample.prompts": 16,
    "update.minibatches": 4,
}
CONTROL = {path: value for path, value in GRPO_CONTROL.items() if path not in _BARRED}
PORT = "an unofficial port, package fiberpo"
PUBLISHED: Published = {
    f"{PORT}, fiber_po.py": {
        "surrogate.token": 0.2,
        "surrogate.episode": 0.2,
        "reduce": "sequence_mean",
    },
    "arXiv 2603.08239, abstract": {"regularise.kl.weight": None},
}


@method(
    "fiberpo@1",
    paper=73,
    base="grpo",
    presets={"tiny": TINY, "control": CONTROL},
    claim=Learns(
        "With answers of a policy up to twenty steps old at a rate of 1.5e-3, budgets for episodes and for tokens "
        "learn more than GRPO's clip of tokens.",
        race="stale",
        method="fiberpo:update.minibatches=1",
        shows=(Shows("mean:ratio_off", least=0.05),),
        also=("success", "mean:entropy", "mean:ratio_off"),
    ),
    published=PUBLISHED,
)
def fiberpo() -> OnPolicy:
    """FiberPO (arXiv 2603.08239): log G = clip(b, ±δ) + clip(log ρ − b, ±ε), b the episode's mean log-ratio.

    A clip of tokens lets an episode drift by many small steps, and one of sequences (GSPO) says nothing of its tokens.
    Here both have a budget, and the pieces add up to the ratio where neither is used up. It is a gate and not a
    minimum: it holds for both signs of A. What is surprising: where b is beyond its bound, the whole episode has no
    gradient along b any more, and only moves of tokens against each other are left (`surrogate.restore` gives it a
    slope back). Tokens are compared with the mean as it is; the one port that was found takes the bounded mean
    (`surrogate.residual=gated`). The form of the gates is reconstructed, and the budgets are the port's.
    """
    return grpo().but(surrogate=fibred(), regularise=(), update=adam(lr=1e-6, minibatches=4))


@method(
    "fiberpo-domain@1",
    paper=73,
    base="fiberpo",
    world="mixed",
    presets={"tiny": {**TINY, "update.minibatches": 1, "update.epochs": 4}},
    claim=Identity(
        "Where the policy has not moved, the gradient through budgets of domain, group, episode and token is that of "
        "REINFORCE.",
        first_order_gap,
        within=1e-9,
    ),
    published={
        f"{PORT}, domain": {
            "surrogate.domain": 0.1,
            "surrogate.group": 0.15,
            "surrogate.episode": 0.2,
            "surrogate.token": 0.2,
            "reduce": "sequence_mean",
        }
    },
)
def fiberpo_domain() -> OnPolicy:
    """FiberPO-Domain (arXiv 2603.08239): the same with four levels, for worlds of several kinds of problem.

    One domain that drifts, because its rewards are larger or its answers longer, uses up its own budget and nobody
    else's. A mini-batch holds whole domains, so there are no more of them than domains, and no smaller passes.
    """
    return fiberpo().but(
        surrogate=fibred(domain=0.1, group=0.15), update=adam(lr=1e-6, epochs=4, minibatches=1)
    )


@method(
    "apc-obj@1",
    paper=73,
    base="fiberpo",
    claim=Identity(
        "The best that APC-Obj finds without a constraint is the best inside of the trust region of total variation.",
        trust_region_gap,
        within=1e-6,
    ),
    published={"arXiv 2603.08239, eq. 3": {"surrogate": "budgeted"}},
)
def apc_obj() -> OnPolicy:
    """Aggregational Policy Censoring (arXiv 2603.08239): the trust region of total variation as a gate of ratios.

    Clipping and trust regions are two forms of one problem: a token is held at what the others of its episode have left
    of a budget of T·δ. What is surprising: a token that no clip would touch is held when the others have moved far. The
    equation is exact, through a port that cites it; its budget is chosen here.
    """
    return fiberpo().but(surrogate=budgeted())
