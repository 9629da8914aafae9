"""Random policy valuation: fit the values of the uniform policy, and sample by their softmax."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.evidence.claims import Ahead
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


# ------------------------------------------------------------------ the claim: trees in which everything is known

ACTIONS, DEPTH, RIGHT = 4, 5, 8
DRAWS, SUCCESS = 64, 0.9
STEPS, BATCH, RATES = 2000, (16, 8), (1.0, 3.0, 10.0)
Array = NDArray[np.float64]


def uniform_values(reward: Array) -> list[Array]:
    """Q of the uniform policy in a tree with these leaves, [states, actions] for each depth, the root first."""
    found: list[Array] = []
    while len(reward) > 1:
        found.append(reward.reshape(-1, ACTIONS))
        reward = found[-1].mean(1)
    return found[::-1]


def _policy(logits: Array) -> Array:
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    chance: Array = raised / raised.sum(-1, keepdims=True)
    return chance


def leaves(logits: list[Array]) -> Array:
    """How likely each leaf is, if actions are drawn by a softmax in every state."""
    chance = np.ones(1)
    for table in logits:
        chance = (chance[:, None] * _policy(table)).ravel()
    return chance


def found_in(chance: Array, reward: Array, draws: int = DRAWS) -> float:
    """How many different rewarded leaves so many draws find on average."""
    return float((reward * (1 - (1 - chance) ** draws)).sum())


def softmax_of_values(reward: Array) -> Array:
    """Leaves under the softmax of the uniform policy's values, at the temperature with just the success asked for."""
    values, low, high = uniform_values(reward), 1e-6, 10.0
    for _ in range(60):
        rho = (low * high) ** 0.5
        enough = leaves([table / rho for table in values]) @ reward >= SUCCESS
        low, high = (rho, high) if enough else (low, rho)
    return leaves([table / low for table in values])


def slopes(logits: list[Array], pull: Array) -> list[Array]:
    """The gradient of Σ pull·log π over leaves, `pull` being held still."""
    found = []
    for table in logits:
        taken = pull.reshape(*table.shape, -1).sum(2)
        found.append(taken - _policy(table) * taken.sum(1, keepdims=True))
    return found


def pulls(chance: Array, reward: Array, dice: np.random.Generator | None) -> Array:
    """How each leaf is pulled: its chance times its advantage, or with dice as GRPO estimates that from groups."""
    if dice is None:
        return chance * (reward - chance @ reward)
    drawn = dice.choice(len(reward), BATCH, p=chance / chance.sum())
    earned = reward[drawn]
    advantage = (earned - earned.mean(1, keepdims=True)) / (earned.std(1, ddof=1, keepdims=True) + 1e-4)
    summed: Array = np.zeros(len(reward))
    np.add.at(summed, drawn, advantage / drawn.size)
    return summed


def climbed(reward: Array, rate: float, dice: np.random.Generator | None) -> Array:
    """Leaves under a policy that policy gradient, exact or with dice, has brought from uniform to that success."""
    logits = [np.zeros((ACTIONS**depth, ACTIONS)) for depth in range(DEPTH)]
    for _ in range(STEPS):
        chance = leaves(logits)
        if chance @ reward >= SUCCESS:
            break
        steps = slopes(logits, pulls(chance, reward, dice))
        logits = [table + rate * step for table, step in zip(logits, steps, strict=True)]
    return leaves(logits)


def covered(seed: int) -> dict[str, float]:
    """What 64 draws find: softmax of values, less the best of policy gradients, exact and sampled, at three rates."""
    dice = np.random.default_rng(seed)
    reward = np.zeros(ACTIONS**DEPTH)
    reward[dice.choice(len(reward), RIGHT, replace=False)] = 1.0
    greedy = leaves([table * 1e9 for table in uniform_values(reward)]) @ reward
    valued = softmax_of_values(reward)
    exact = [climbed(reward, 30 * rate, None) for rate in RATES]
    sampled = [climbed(reward, rate, np.random.default_rng([seed, int(rate)])) for rate in RATES]
    most = {
        name: max(found_in(c, reward) for c in some)
        for name, some in (("exact", exact), ("sampled", sampled))
    }
    return {
        "ahead": found_in(valued, reward) - max(most.values()),
        "softmax of values": found_in(valued, reward),
        "exact policy gradient": most["exact"],
        "sampled groups": most["sampled"],
        "greedy success": float(greedy),
        "least success": float(min(chance @ reward for chance in (valued, *exact, *sampled))),
    }


CLAIM = Ahead(
    "In random trees of 1,024 leaves, 8 of them right, a softmax over the uniform policy's exact values finds more of "
    "these in 64 draws than policy gradient does, exact or of sampled groups, where all succeed nine times in ten.",
    covered,
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
