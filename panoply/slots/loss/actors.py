"""Losses of policies on transitions: what critics think of what a policy does."""

from __future__ import annotations

from typing import Any, Literal

import torch

from panoply.batch import Values
from panoply.parts import Finding, Part, part
from panoply.slots.loss.bellman import wanted
from panoply.transitions import ActorCritic, Transitions


@part(
    "loss",
    equation=lambda held: (
        "−Q_1(s, π(s))" if held.alpha is None else f"−{held.alpha:g}/|Q|·Q_1(s, π(s)) + (π(s) − a)²"
    ),
    unit="transition",
    needs={"network:q", "policy:bounded", "world:continuous actions"},
    bounds={"every": "at least 1", "alpha": "above 0"},
)
def best_action(
    learned: ActorCritic,
    rows: Transitions,
    *,
    every: int = 1,
    alpha: float | None = None,
    update: Part | None = None,
) -> Values:
    """The deterministic policy gradient (arXiv 1509.02971), in one update of `every` (TD3's delay).

    alpha: weight of the value, in units of its mean size, against staying near the data (TD3+BC, arXiv 2106.06860).
    """
    action = learned.act(rows.observation)
    worth = learned.networks["q"].first(rows.observation, action)
    if alpha is None:
        return -worth, {}
    away = (action - rows.action).square().mean(-1)
    return away - alpha / worth.detach().abs().mean() * worth, {"distance": away.detach()}


@part(
    "loss",
    equation="−min(exp({beta}·(min_j Q′_j(s,a) − V(s))), {most})·log π(a|s)",
    unit="transition",
    needs={"target:q", "network:q", "network:v"},
    bounds={"beta": "at least 0", "most": "above 0"},
)
def advantage_weighted(
    learned: ActorCritic,
    rows: Transitions,
    *,
    beta: float = 3.0,
    most: float = 100.0,
    schedule: Part | None = None,
    update: Part | None = None,
) -> Values:
    """Imitate what was done, the more the better it was than V, by the critics' word (arXiv 2110.06169).

    schedule: of the policy's rate of learning, where it is not that of the other losses
    """
    with torch.no_grad():
        gain = wanted(learned, rows) - learned.baseline(rows)
        weight = (beta * gain).exp().clamp(max=most)
    logp = learned.logp(rows)
    return -weight * logp, {"advantage": gain, "weight": weight}


def _weight_equation(held: Any) -> str:
    form = {
        "exp": f"min(exp(A/{held.beta:g}), {held.most:g})",
        "softmax": f"n·softmax_batch(A/{held.beta:g})",
        "binary": "1(A > 0)",
    }
    return f"−{form[held.form]}·log π(a|s),  A = min_j Q_j(s,a) − {held.over}_b min_j Q_j(s,b), b ~ π"


def _weight_inert(held: Any, method: Any, world: Any) -> list[Finding]:
    found = [("most", f"form={held.form} has no limit")] if held.form != "exp" else []
    if hasattr(getattr(world, "action", None), "n"):
        found.append(("samples", f"the actions of {world.name} can be counted, and all are weighed"))
    elif held.samples == 1:
        found.append(("over", "the mean of one sample is its largest"))
    return [*found, ("beta", "form=binary has no temperature")] if held.form == "binary" else found


@part(
    "loss",
    equation=_weight_equation,
    unit="transition",
    needs={"network:q", "policy:noisy"},
    inert=_weight_inert,
    bounds={"beta": "above 0", "most": "above 0", "samples": "at least 1"},
)
def critic_weighted(
    learned: ActorCritic,
    rows: Transitions,
    *,
    form: Literal["exp", "softmax", "binary"] = "exp",
    beta: float = 1.0,
    most: float = 20.0,
    over: Literal["mean", "max"] = "mean",
    samples: int = 4,
    update: Part | None = None,
) -> Values:
    """Imitate what was done, the more the better the critics find it than what the policy would do there.

    There is no V beside the critics: it is their mean over the policy's own actions. AWAC (arXiv 2006.09359) and CRR
    (arXiv 2006.15134) differ in how an advantage A becomes a weight.

    form      `exp` of A/β, at most `most`; `softmax` of A/β over the batch, times its rows; `binary`: 1 where A > 0
    over      what an action is compared with, the `mean` of the policy's own or their `max`
    samples   how many of them are drawn in each state; where actions can be counted, all are weighed instead
    """
    with torch.no_grad():
        critics = learned.networks["q"]
        own = learned.worth(critics, rows.observation, samples, rows.legal, best=over == "max")
        gain = critics.least(rows.observation, learned.taken(rows)) - own
        if form == "binary":
            weight = (gain > 0).to(gain.dtype)
        elif form == "softmax":
            weight = len(gain) * (gain / beta).softmax(0)
        else:
            weight = (gain / beta).exp().clamp(max=most)
    return -weight * learned.logp(rows), {"advantage": gain, "weight": weight}


@part(
    "loss",
    equation="−min(exp(A/{beta}), {most})·log π(a|s),  A = R_λ − V(s), normalised",
    unit="transition",
    needs={"column:advantage"},
    bounds={"beta": "above 0", "most": "above 0"},
)
def return_weighted(
    learned: ActorCritic,
    rows: Transitions,
    *,
    beta: float = 1.0,
    most: float = 20.0,
    update: Part | None = None,
) -> Values:
    """Imitate what was done, the more the better it went from there (arXiv 1910.00177)."""
    weight = (rows["advantage"] / beta).exp().clamp(max=most)
    return -weight * learned.logp(rows), {"weight": weight}
