"""Random policy valuation: fit the values of the uniform policy, and sample by their softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.evidence.claims import Learns, Shows
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import group
from panoply.slots.credit.returns import in_time
from panoply.slots.reduce.averages import token_mean
from panoply.slots.sample.groups import groups
from panoply.slots.surrogate.ratios import STAYS, ratio_stats, stays_at_one
from panoply.slots.update.optimisers import adam
from panoply.tables import Segments


def _needs(held: Any) -> frozenset[str]:
    if held.against == "behaviour":
        return frozenset()
    found = {f"logp@{held.against}"}
    if held.bootstrap:
        found |= {"mean_logp", f"mean_logp@{held.against}", "whole:episode"}
    return frozenset(found)


def _impossible(held: Any, method: Any) -> list[Finding]:
    if not held.bootstrap:
        return []
    if held.against == "behaviour":
        return [("against", "what was recorded while sampling is of one token, and V′ is a mean over all")]
    sample = method.sample.settings()
    cuts = [
        name for name, all in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)) if sample.get(name, all) != all
    ]
    return (
        [("", f"V′ is a mean over the whole vocabulary, of which sample.{cuts[0]} leaves a part")]
        if cuts
        else []
    )


def _inert(held: Any, method: Any) -> list[Finding]:
    return [("bootstrap", f"V′ is 0: {STAYS}")] if stays_at_one(held.against, method) else []


def _equation(held: Any) -> str:
    rho, share = ("" if factor == 1 else f"{factor:g}·" for factor in (held.rho, held.bootstrap))
    after = ",  V′ = mean of Q over the vocabulary at the next token" if held.bootstrap else ""
    return (
        f"−(Q − sg(A{f' + {share}V′' if held.bootstrap else ''}))²,  Q = {rho}log π/π_{held.against}{after}"
    )


@part(
    "surrogate",
    equation=_equation,
    needs=_needs,
    inert=_inert,
    impossible=_impossible,
    bounds={"rho": "above 0", "bootstrap": "at least 0", "weight": "above 0"},
)
def uniform_value(
    batch: Batch,
    *,
    rho: float = 1.0,
    bootstrap: float = 1.0,
    against: str = "old",
    weight: float | Part = 1.0,
) -> Values:
    """Regress ρ·log π/π_old on the reward and on the uniform policy's value of what comes next (arXiv 2509.24981).

    Q_t = ρ·l_t descends (Q_t − sg(A + V′_t))², where V′_t is ρ·l at the next token of the episode, averaged over the
    whole vocabulary, each token alike, whatever its probability; 0 after the last. The reward stands on every token.

    rho         the temperature of the softmax over values that the policy is
    bootstrap   how much of V′ counts; 0 regresses on the reward alone
    against     whose log-probabilities values are relative to
    """
    q = rho * batch.log_ratio(against)
    after = torch.zeros_like(q.detach())
    if bootstrap:
        after = _following(batch, rho * (batch.now["mean_logp"].detach() - batch[f"mean_logp@{against}"]))
    target = batch["advantage"].to(q.dtype) + bootstrap * after
    return -((q - target) ** 2), {**ratio_stats(batch, against), "q": q.detach(), "next_value": after}


def _following(batch: Batch, value: Tensor) -> Tensor:
    """Of each decision the value at the next one of its episode, whatever the order of rows."""
    order, after = in_time(batch.experience), torch.zeros_like(value)
    after[order] = Segments(batch["episode"][order]).following(value[order], torch.zeros_like(value))
    return after


CLAIM = Learns(
    "Where many answers are right, ROVER finds more different ones in 32 tries than GRPO after as many episodes, and "
    "its success is at most a tenth less.",
    race="coverage",
    reworded="asked after 6,400 episodes before, when GRPO had lost none of the answers it began with",
    metric="distinct@32",
    keeps={"success": 0.1},
    also=("success", "pass@32", "entropy"),
    shows=(Shows("success", least=0.3),),
    waives={"problems": "what differs are the 32 answers to each of the numbers held out"},
)


TINY = {
    "sample.prompts": 16,
    "sample.temperature": 1.0,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "run.steps": 150,
}
PUBLISHED: Published = {
    "released code, Math/scripts/deepscaler/train/rover_qwen3_8b.sh": {
        "sample.prompts": 128,
        "sample.group": 8,
        "sample.temperature": 0.6,
        "regularise.kl.weight": None,
        "update.lr": 1e-6,
        "update.epochs": 1,
        "update.minibatches": 4,
    },
    "released code, Math/verl/trainer/config/actor/dp_actor.yaml": {
        "surrogate.rho": 1.0,
        "surrogate.bootstrap": 1.0,
    },
    "released code, Countdown/verl/trainer/ppo/core_algos.py": {
        "credit.baseline": "mean",
        "credit.scale": "none",
        "reduce": "token_mean",
    },
    "released code, Countdown/scripts/train_rover.sh": {"update.clip": 1.0},
}
"""The script for maths divides rewards by their deviation as well: credit.scale=std. Countdown has groups of 5."""


@method("rover@1", paper=203, base="grpo", presets={"tiny": TINY}, claim=CLAIM, published=PUBLISHED)
def rover() -> OnPolicy:
    """ROVER, Random Policy Valuation (arXiv 2509.24981): values of the uniform policy in the place of a better policy.

    Where transitions are certain, a state is reached in one way alone and a reward of 0 or 1 comes at the end, as in
    text, Q of the policy that acts at random is above 0 just where a right answer lies ahead: acting greedily on it is
    optimal, and its softmax keeps every right branch. Graded rewards, or chance in the world, break that. The values
    are the model's own: Q = ρ·log π/π_old, regressed on A + V′, where V′ is the mean of Q over the whole vocabulary at
    the next token. There is no clip, no KL term and no critic.

    What was proven is not quite what is done: the reward, centred in its group, stands on every token and not on the
    last alone. And while π = π_old, Q and V′ are 0 and the gradient is REINFORCE's, times 2ρ: only from the second
    mini-batch on does it differ, so there are four. Groups that all succeed or all fail are pulled, too, towards V′.
    Not here are a clip and an error of whole answers, which the released code has and leaves off.
    """
    return grpo().but(
        sample=groups(prompts=128, group=8, temperature=0.6),
        credit=group(baseline="mean", scale="none"),
        surrogate=uniform_value(rho=1.0),
        regularise=(),
        reduce=token_mean(),
        update=adam(lr=1e-6, minibatches=4),
    )
