"""Losses of soft actor-critics: values that count entropy, the policy that climbs them, and conservative values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from panoply.batch import Values
from panoply.parts import Finding, Part, part
from panoply.transitions import ActorCritic, Transitions, squares


@part(
    "loss",
    equation="½·Σ_i (Q_i(s,a) − (r + γ·(min_j Q′_j(s′,a′) − α·log π(a′|s′))))², a′ ~ π",
    unit="transition",
    learns=("q",),
    needs={"target:q", "network:q", "network:temperature", "policy:squashed", "world:continuous actions"},
)
def soft_q(learned: ActorCritic, rows: Transitions, *, update: Part | None = None) -> Values:
    """Soft Bellman error (arXiv 1812.05905): what comes next is worth its value and its entropy."""
    error, stats = _drawn_squares(learned, rows, soft=True)
    return 0.5 * error, stats


def _drawn_squares(learned: ActorCritic, rows: Transitions, soft: bool, beta: Tensor | None = None) -> Values:
    """Σ_i (Q_i − y)², where y has the value of an action drawn at s′, and with `soft` its entropy."""
    with torch.no_grad():
        action, logp = learned.draw(rows.next_observation, beta)
        worth = learned.targets["q"].least(rows.next_observation, action)
        if soft:
            worth = worth - learned.networks["temperature"]() * logp
        target = rows.target(worth)
    values = learned.networks["q"](rows.observation, learned.taken(rows))
    return squares(values, target), {"q": values[0].detach(), "target": target}


def _fixed(held: Any, method: Any) -> list[Finding]:
    if any(n.settings().get("learned", True) for n in method.networks if n.info.name == "temperature"):
        return []
    return [("entropy", "the temperature is not learned (networks.temperature.learned)")]


@part(
    "loss",
    equation=lambda held: (
        "α·log π(a|s) − min_j Q_j(s,a) − log α·(log π(a|s) + H̄), a ~ π"
        + (f"; log π of the data for Q in the first {held.imitate} updates" if held.imitate else "")
    ),
    unit="transition",
    learns=("policy", "temperature"),
    needs={"network:q", "network:temperature", "policy:squashed", "world:continuous actions"},
    inert=_fixed,
    bounds={"imitate": "at least 0", "entropy": "any number"},
)
def soft_policy(
    learned: ActorCritic,
    rows: Transitions,
    *,
    entropy: float | None = None,
    imitate: int = 0,
    update: Part | None = None,
) -> Values:
    """Soft policy improvement, and a temperature that holds the entropy at H̄ (arXiv 1812.05905).

    entropy: H̄, of actions between −1 and 1; none means minus the number of their dimensions
    imitate: in so many first updates the policy climbs the likelihood of what was done, and not the critics, which know
             nothing yet (CQL's released code)
    """
    temperature = learned.networks["temperature"]
    action, logp = learned.draw(rows.observation)
    aim = -action.shape[-1] if entropy is None else entropy
    alpha = temperature()
    if learned.updates < imitate:
        value = alpha * logp - learned.logp(rows)
    else:
        value = alpha * logp - learned.networks["q"].least(rows.observation, action)
    if temperature.learned:
        value = value - temperature.log * (logp.detach() + aim)
    return value, {"entropy": -logp.detach(), "temperature": alpha}


# ------------------------------------------------------------------ conservative values

MOST_MULTIPLIED = 1e6


def _conservative_needs(held: Any) -> frozenset[str]:
    needed = {"target:q", "network:q", "network:temperature", "policy:squashed", "world:continuous actions"}
    return frozenset(needed if held.threshold is None else needed | {"network:multiplier"})


def _conservative_equation(held: Any) -> str:
    gap = "log Σ_b exp Q_i(s,b) − Q_i(s,a)"
    entropy = " − α·log π(a′|s′)" if held.soft else ""
    error = f"Σ_i (Q_i(s,a) − (r + γ·(min_j Q′_j(s′,a′){entropy})))²"
    if held.threshold is None:
        return f"{error} + {held.weight:g}·Σ_i ({gap})"
    return f"{error} + η·{held.weight:g}·Σ_i ({gap} − {held.threshold:g}), greatest in η"


@part(
    "loss",
    equation=_conservative_equation,
    unit="transition",
    learns=lambda held: ("q",) if held.threshold is None else ("q", "multiplier"),
    needs=_conservative_needs,
    bounds={"weight": "at least 0", "samples": "at least 1", "threshold": "any number"},
)
def conservative_q(
    learned: ActorCritic,
    rows: Transitions,
    *,
    weight: float = 5.0,
    samples: int = 10,
    soft: bool = False,
    threshold: float | None = None,
    update: Part | None = None,
) -> Values:
    """Conservative Q-learning, CQL(H) (arXiv 2006.04779): actions the data does not have are worth less.

    The sum over actions is estimated from `samples` uniform ones and as many of the policy at s and at s′, each
    weighted by 1 over its density. soft: whether entropy counts in the Bellman error too. The error is Σ(Q − y)², as in
    the released code, from which the usual weights come; the paper's equation has ½ before it, and so half the weight.

    threshold   hold each critic's gap at this by Lagrange's method: a learned η (network `multiplier`) grows while the
                gap is above it and shrinks while it is below
    """
    return conservative(learned, rows, weight, samples, soft, threshold)


def conservative(
    learned: ActorCritic,
    rows: Transitions,
    weight: float,
    samples: int,
    soft: bool,
    threshold: float | None,
    here: Tensor | None = None,
    there: Tensor | None = None,
) -> Values:
    """`conservative_q`; of a balanced policy, with the coefficients to act by at s and at s′."""
    error, stats = _drawn_squares(learned, rows, soft, there)
    gaps = _gaps(learned, rows, samples, here, there)
    gap = torch.stack(gaps).sum(0)
    stats = {**stats, "conservative_gap": gap.detach()}
    if threshold is None:
        return error + weight * gap, stats
    multiplier, over = learned.networks["multiplier"], weight * (gap - threshold * len(gaps))
    eta = multiplier.log.exp().clamp(max=MOST_MULTIPLIED)
    value = error + eta.detach() * over - eta * over.detach() / len(gaps)
    return value, {**stats, "multiplier": eta.detach()}


def _gaps(
    learned: ActorCritic, rows: Transitions, samples: int, here: Tensor | None, there: Tensor | None
) -> list[Tensor]:
    """log Σ_b exp Q_i(s,b) − Q_i(s,a) of each critic."""

    def drawn(observation: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor]:
        many = None if beta is None else beta.repeat_interleave(samples)
        return learned.draw(observation.repeat_interleave(samples, 0), many)

    with torch.no_grad():
        at_s, logp_s = drawn(rows.observation, here)
        at_next, logp_next = drawn(rows.next_observation, there)
        uniform = 2 * torch.rand(at_s.shape, generator=learned.generator).to(at_s.device) - 1
        flat = torch.full_like(logp_s, -at_s.shape[-1] * math.log(2))
        actions, logp = torch.cat([uniform, at_s, at_next]), torch.cat([flat, logp_s, logp_next])
        seen = rows.observation.repeat_interleave(samples, 0)
    everywhere = learned.networks["q"](seen.repeat(3, *(1,) * (seen.dim() - 1)), actions)
    data = learned.networks["q"](rows.observation, learned.taken(rows))
    weighted = [
        (q - logp).unflatten(0, (3, len(rows), samples)).transpose(0, 1).flatten(1) for q in everywhere
    ]
    return [of_all.logsumexp(-1) - of_data for of_all, of_data in zip(weighted, data, strict=True)]
