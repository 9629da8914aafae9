"""Adaptive Advantage-Guided Policy Regularization."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from panoply.batch import Values
from panoply.evidence.claims import Ranks
from panoply.methods.base.td3_plus_bc import td3_plus_bc
from panoply.parts import Part, part
from panoply.policies.behaviour import code_kl
from panoply.regimes import Offline
from panoply.registry import Published, method
from panoply.slots.loss.bellman import smooth_next, smooth_q, smooth_target
from panoply.slots.network.critics import behaviour, q, v
from panoply.slots.update.optimisers import adam
from panoply.transitions import ActorCritic, Transitions


@part(
    "loss",
    equation="(V(s) − min(y, r + γ·min_j Q_j(s′,a′)))², y and a′ those of the critics",
    unit="transition",
    learns=("v",),
    needs={"target:q", "target:policy", "network:q", "network:v", "policy:bounded"},
    bounds={"noise": "at least 0", "clip": "at least 0"},
)
def policy_v(
    learned: ActorCritic,
    rows: Transitions,
    *,
    noise: float = 0.2,
    clip: float = 0.5,
    update: Part | None = None,
) -> Values:
    """V of the policy, not of the data: towards the lesser of the critics' target and of what they say themselves."""
    with torch.no_grad():
        action = smooth_next(learned, rows, noise, clip)
        now = rows.target(learned.networks["q"].least(rows.next_observation, action))
        target = torch.minimum(smooth_target(learned, rows, noise, clip), now)
    value = learned.networks["v"](rows.observation)
    return (value - target).square(), {"v": value.detach()}


def _gain(learned: ActorCritic, rows: Transitions, action: Tensor) -> Tensor:
    """A = Q_1(s, action) − V(s)."""
    gain: Tensor = learned.networks["q"].first(rows.observation, action) - learned.networks["v"](
        rows.observation
    )
    return gain


@part(
    "loss",
    equation="{weight}·1(A(s,a) > 0)·(â − a)² + ½·KL(q(z|s,a) ‖ N(0,1))",
    unit="transition",
    learns=("behaviour",),
    needs={"network:behaviour", "network:q", "network:v"},
    bounds={"weight": "at least 0"},
)
def better_behaviour(
    learned: ActorCritic, rows: Transitions, *, weight: float = 1.0, update: Part | None = None
) -> Values:
    """Model what was done where it was better than V; codes are kept near the prior everywhere."""
    model, taken = learned.networks["behaviour"], learned.taken(rows)
    with torch.no_grad():
        better = _gain(learned, rows, taken) > 0
    mean, log_std = model.encode(rows.observation, taken)
    made = model.decode(rows.observation, mean + log_std.exp() * learned.noise(*mean.shape))
    away = (made - taken).square().mean(-1)
    return weight * (better * away) + 0.5 * code_kl(mean, log_std), {"better": better.float()}


def _guide(held: Any) -> frozenset[str]:
    needed = {"network:q", "network:v", "policy:bounded", "world:continuous actions"}
    return frozenset(needed | ({"network:behaviour"} if held.guide == "better" else set()))


@part(
    "loss",
    equation=lambda held: (
        f"−{held.alpha:g}/|Q|·Q_1(s, π(s)) + {held.weight:g}·1(A > 0)·(π(s) − a*)², a* = "
        + ("a" if held.guide == "data" else "the better of a and p(a|s,z), z ~ q(z|s,π(s))")
    ),
    unit="transition",
    needs=_guide,
    bounds={"every": "at least 1", "alpha": "above 0", "weight": "at least 0"},
)
def guided_action(
    learned: ActorCritic,
    rows: Transitions,
    *,
    guide: Literal["better", "data"] = "better",
    every: int = 2,
    alpha: float = 2.5,
    weight: float = 1.0,
    update: Part | None = None,
) -> Values:
    """TD3+BC's loss that stays near the better of what was done and what the behaviour model would do, if it is good.

    guide   `data` knows what was done alone: TD3+BC that imitates where the advantage is above 0
    No gradient goes through the guide (in the released code one goes through the behaviour model).
    """
    action = learned.act(rows.observation)
    worth = learned.networks["q"].first(rows.observation, action)
    with torch.no_grad():
        towards = learned.taken(rows)
        gain = _gain(learned, rows, towards)
        good = gain > 0
        stats = {}
        if guide == "better":
            model = learned.networks["behaviour"]
            made = model.near(rows.observation, action, learned.noise(len(rows), model.code))
            other = _gain(learned, rows, made)
            towards = torch.where((other >= gain)[:, None], made, towards)
            good = good | (other >= 0)
            stats = {"guided": (other >= gain).float()}
        scale = alpha / worth.abs().mean()
    away = (action - towards).square().mean(-1)
    stats |= {"distance": away.detach(), "imitated": good.float()}
    return weight * (good * away) - scale * worth, stats


MINE = "a2pr=a2pr:networks.behaviour.hidden=64,64"
MASKED = "masked=a2pr:losses.guided_action.guide=data,losses.better_behaviour=none,networks.behaviour=none"
SMALL = {
    "policy.hidden": (64, 64),
    "replay.batch": 64,
    "replay.gamma": 0.95,
    "targets.tau": 0.05,
    "run.held_out": 100,
}
CLAIM = Ranks(
    "Where four fifths of the data are random, imitating only what is better than V, and of two candidates the "
    "better, earns more than imitating all of it (TD3+BC), and no less than imitating what was done where it was good.",
    order=(MINE, MASKED, "td3+bc"),
    margins=(25.0, 0.0),
    world="logged:pendulum-mixed",
    budget="steps=5",
    metric="held_out_greedy",
    tuned_by="area:held_out_greedy",
    settings=SMALL,
    tune={"update.lr": (3e-4, 1e-3, 3e-3)},
    best=-150.0,
    also=("distance",),
    reworded="after eight steps imitating what was good was done learning, and after five it is not.",
)


PUBLISHED: Published = {
    "released code, A2PR.py": {
        "losses.guided_action.alpha": 2.5,
        "losses.guided_action.every": 2,
        "losses.guided_action.weight": 1.0,
        "losses.better_behaviour.weight": 1.0,
        "losses.better_behaviour.update.lr": 0.001,
        "losses.smooth_q.noise": 0.2,
        "losses.smooth_q.clip": 0.5,
        "update.lr": 0.0003,
        "replay.gamma": 0.99,
        "targets.tau": 0.005,
        "networks.behaviour.hidden": (750, 750),
    },
    "released code, utils/config.py": {
        "replay.batch": 256,
        "control:policy.normalise": True,
    },
}
"""The config's ω is 0.5, that of the class 1."""


@method(
    "a2pr@1",
    paper=40,
    base="td3+bc",
    world="logged:pendulum-mixed",
    claim=CLAIM,
    published=PUBLISHED,
)
def a2pr() -> Offline:
    """Adaptive Advantage-Guided Policy Regularization (arXiv 2405.19909): TD3+BC that chooses whom to imitate.

    In each state the policy stays near whichever the critics value more, the action in the data or that of a
    behaviour model fitted to good actions, and only where that is better than V. V is the policy's own value.
    """
    return td3_plus_bc().but(
        networks=(q(count=2), v(), behaviour()),
        losses=(
            smooth_q(noise=0.2, clip=0.5),
            policy_v(),
            better_behaviour(update=adam(lr=1e-3, clip=0.0)),
            guided_action(),
        ),
    )
