"""Mirror Descent Policy Optimization, on-policy and off-policy."""

from __future__ import annotations

from typing import Any, Literal

import torch

from panoply.batch import Batch, Values
from panoply.evidence.claims import Identity, Learns
from panoply.methods.base.ppo import TINY as PPO_TINY
from panoply.methods.base.ppo import ppo
from panoply.methods.base.sac import CONTROL as SAC_CONTROL
from panoply.methods.base.sac import PENDULUM as SAC_PENDULUM
from panoply.methods.base.sac import sac
from panoply.parts import Finding, Part, part
from panoply.policies.divergence import need, q_log
from panoply.regimes import OffPolicy, OnPolicy
from panoply.registry import Published, method
from panoply.slots.loss.soft import soft_policy, soft_q
from panoply.slots.loss.values import squared_value
from panoply.slots.model.values import critic
from panoply.slots.network.critics import q as q_networks
from panoply.slots.network.critics import temperature
from panoply.slots.schedule.schedules import inverse, linear
from panoply.slots.surrogate.ratios import ratio
from panoply.slots.targets.following import Pairs, polyak
from panoply.slots.update.optimisers import adam
from panoply.transitions import ActorCritic, Transitions

_ANNEALED = inverse()


def _mirror_needs(held: Any) -> frozenset[str]:
    if held.weight == 0:
        return frozenset()
    if held.divergence == "exact":
        return frozenset({need(held.q, held.to)})
    return frozenset() if held.to == "behaviour" else frozenset({f"logp@{held.to}"})


def _mirror_equation(held: Any) -> str:
    to = "π_k" if held.to in ("old", "behaviour") else f"π_{held.to[:3]}"
    whole = f"KL(π‖{to})" if held.q == 1 else f"E_π[ln_q π − ln_q {to}], q = {held.q:g}"
    return whole if held.divergence == "exact" else f"{whole}, sampled"


def _mirror_inert(held: Any, method: Any) -> list[Finding]:
    update = method.update.settings()
    if held.to == "reference" or update.get("epochs", 1) * update.get("minibatches", 1) > 1:
        return []
    reason = "its gradient is 0 at π_k, and with one update a step the policy never leaves it (raise update.epochs)"
    return [(name, reason) for name in ("weight", "divergence", "q", "to")]


def _mirror_impossible(held: Any, method: Any) -> list[Finding]:
    if held.divergence == "sampled" and held.to == "reference":
        return [
            ("to", "decisions were not drawn from it, so they cannot sample the divergence; set it to exact")
        ]
    return []


@part(
    "regularise",
    equation=_mirror_equation,
    needs=_mirror_needs,
    inert=_mirror_inert,
    impossible=_mirror_impossible,
    bounds={"q": "at least 1", "weight": "at least 0"},
)
def mirror(
    batch: Batch,
    *,
    weight: float | Part = _ANNEALED,
    divergence: Literal["exact", "sampled"] = "exact",
    q: float = 1.0,
    to: str = "old",
) -> Values:
    """The proximity term of mirror descent: KL(π‖π_k), new to old (TRPO's is old to new) (arXiv 2005.09814).

    weight: 1/t, by default with a t that is annealed
    divergence: `exact` compares whole distributions, vocabularies included; `sampled` is ρ·log ρ − ρ + 1 of the
                decisions that π_k took, which has the same expectation
    q: of Tsallis' logarithm; 1 is the logarithm, and other values weigh likely actions more
    to: π_k, `old`: the policy before the step's first update; or `reference`, which does not move
    """
    if divergence == "exact":
        value = batch.now[need(q, to)]
    elif q == 1:
        log_ratio = batch.log_ratio(to)
        value = log_ratio.exp() * (log_ratio - 1) + 1
    else:
        then = batch["logp" if to == "behaviour" else f"logp@{to}"]
        value = batch.log_ratio(to).exp() * (q_log(batch.now["logp"], q) - q_log(then, q))
    return value, {"mirror_divergence": value.detach()}


TINY = {
    **PPO_TINY,
    "update.epochs": 4,
    "update.minibatches": 1,
    "models.critic.update.epochs": 4,
}
CONTROL = {
    "sample": "rollout",
    "sample.envs": 1,
    "sample.length": 2048,
    "credit.gamma": 0.99,
    "models.critic.loss.clip": None,
    "run.steps": 500,
    "run.evaluate_every": 10,
}
"""Values are not clipped: returns of control are hundreds, and a clip is in their units."""
CARTPOLE = {
    **CONTROL,
    "sample.envs": 8,
    "sample.length": 32,
    "credit.gamma": 0.98,
    "credit.lam": 0.8,
    "update.lr": 1e-3,
    "models.critic.update.lr": 1e-3,
    "models.critic.update.epochs": 20,
    "models.critic.update.minibatches": 1,
    "run.steps": 400,
    "run.evaluate_every": 25,
}
"""The batches and rates of PPO's numbers for CartPole-v1 (RL Baselines3 Zoo's)."""


CLAIM = Learns(
    "Ten gradient steps on each batch, held by the divergence alone, learn more from as much experience than one.",
    over="one step=mdpo:update.epochs=1",
    world="cartpole",
    budget="decisions=25600",
    best=500.0,
    settings={"run.held_out": 100},
    tune={"update.lr": (1e-3, 3e-3, 1e-2)},
    also=("success",),
)


PUBLISHED: Published = {
    "released code, mdpo_on/mdpo.py": {
        "models.critic.loss.clip": 0.2,
        "models.critic.update.lr": 0.0003,
        "models.critic.update.clip": 0.0,
        "update.lr": 0.0003,
        "update.epsilon": 1e-05,
        "update.clip": 0.5,
        "regularise.mirror.weight": "inverse",
    },
    "released code, mdpo_on/run_mujoco.py": {
        "credit.lam": 0.95,
        "models.critic.update.epochs": 5,
        "control:sample.length": 2048,
        "control:sample.envs": 1,
        "control:credit.gamma": 0.99,
    },
    "arXiv 2005.09814, appendix": {
        "update.epochs": 10,
        "update.schedule": "linear",
    },
}


@method(
    "mdpo@1",
    paper=113,
    base="ppo",
    presets={"tiny": TINY, "control": CONTROL, "cartpole": CARTPOLE},
    claim=CLAIM,
    published=PUBLISHED,
)
def mdpo() -> OnPolicy:
    """Mirror Descent Policy Optimization (arXiv 2005.09814). ρ·A − (1/t)·KL(π‖π_k), m steps, no clip.

    Each step of a run solves one step of mirror descent, whose solution is π_k·exp(t·A)/Z, by m = `update.epochs`
    gradient steps on the whole batch. The first of them is the plain policy gradient, the divergence being flat at
    π_k; it is the later ones that the proximity term holds. t falls in a line from 1.
    """
    return ppo().but(
        surrogate=ratio(),
        regularise=(mirror(),),
        update=adam(lr=3e-4, epsilon=1e-5, clip=0.5, epochs=10, schedule=linear()),
        models=(
            critic(
                loss=squared_value(clip=0.2),
                update=adam(lr=3e-4, epsilon=1e-5, clip=0.0, epochs=5, minibatches=16),
            ),
        ),
    )


# ------------------------------------------------------------------ off-policy


@part(
    "targets",
    equation="θ′ ← θ′ + {tau}·(θ − θ′),  π_k ← π after each {every} updates",
    bounds={"tau": "from 0 to 1", "every": "at least 1"},
)
def anchored(updates: int, pairs: Pairs, *, tau: float = 0.005, every: int = 1000) -> None:
    """Targets of critics follow slowly; that of the policy is the anchor π_k, which stays for m = `every` updates."""
    slow = {name: pair for name, pair in pairs.items() if name != "policy"}
    polyak(tau=tau)(updates, slow)
    polyak(tau=1.0, every=every)(updates, {"policy": pairs["policy"]} if "policy" in pairs else {})


def _below(held: Any, method: Any) -> list[Finding]:
    for network in method.networks:
        settings = network.settings()
        if network.info.name == "temperature" and not settings["learned"] and settings["start"] > held.c:
            return [("c", f"it is λ + 1/t, so at least λ, which is {settings['start']:g}")]
    return []


@part(
    "loss",
    equation=lambda held: (
        "{c}·{ln} π(a|s) + {q}(λ − {c})·{ln} π_k(a|s) − {worth}(s,a), a ~ π".format(
            c=f"{held.c:g}",
            ln="log" if held.q == 1 else f"ln_{held.q:g}",
            q="" if held.q == 1 else f"{held.q:g}·",
            worth="Q_1" if held.critic == "first" else "min_j Q_j",
        )
    ),
    unit="transition",
    needs={
        "network:q", "network:temperature", "target:policy", "policy:squashed", "world:continuous actions"
    },
    impossible=_below,
    bounds={"c": "at least 0", "q": "at least 1", "shrink": "at least 0"},
)  # fmt: skip
def mirror_policy(
    learned: ActorCritic,
    rows: Transitions,
    *,
    c: float = 1.0,
    q: float = 1.0,
    critic: Literal["first", "least"] = "first",
    shrink: float = 1e-3,
    update: Part | None = None,
) -> Values:
    """Soft policy improvement that stays near an anchor π_k (arXiv 2005.09814).

    c = λ with critic=least is SAC's.

    π_k is asked about the action that π draws now, and gradients go through that action too.

    c: λ + 1/t, where λ is the weight of entropy (networks.temperature.start)
    q: of Tsallis' logarithm; 1 is the logarithm. Of another the anchor's term counts q times, as in the released code
    critic: whose word is climbed, that of the first (the released code's) or of the most cautious one
    shrink: weight of mean² + log-deviation² of the normals before squashing
    """
    head: Any = learned.policy.head
    anchor = learned.targets["policy"]
    out = learned.policy.model(rows.observation)
    noise = learned.noise(len(rows), head.size)
    action, logp = head.draw(out, noise)
    mean, log_std = head.moments(out)
    then = anchor.head.density(anchor.model(rows.observation), mean + log_std.exp() * noise)
    entropy_weight = learned.networks["temperature"]()
    value = c * q_log(logp, q) + q * (entropy_weight - c) * q_log(then, q)
    critics = learned.networks["q"]
    judged = critics.first if critic == "first" else critics.least
    value = value - judged(rows.observation, action)
    if shrink:
        value = value + shrink * (mean.square() + log_std.square()).mean(-1)
    return value, {"entropy": -logp.detach(), "mirror_divergence": (logp - then).detach()}


def beside_sac(seed: int, rows: int = 256) -> dict[str, float]:
    """The largest differences of losses and of gradients between c = λ and SAC with a fixed temperature, relative."""
    from panoply.policies.control import ControlPolicy, PolicySpec
    from panoply.transitions import QNets, Temperature
    from panoply.worlds.control.world import Box

    acts = Box((2,), (-2.0, -1.0), (2.0, 1.0))
    spec = PolicySpec(hidden=(64, 64), squash=True, std="state")
    policy, anchor = (ControlPolicy.fresh(Box((3,)), acts, spec, seed=s) for s in (seed, seed + 1000))
    networks = {"q": QNets.of(policy, 2, seed), "temperature": Temperature(0.2, learned=False)}
    dice = torch.Generator().manual_seed(seed)
    seen = torch.randn(rows, 3, generator=dice)
    replayed = Transitions(seen, torch.zeros(rows, 2), torch.zeros(rows), torch.zeros(rows), seen)
    found = []
    for loss in (mirror_policy(c=0.2, critic="least", shrink=0.0), soft_policy()):
        learned = ActorCritic(policy, networks, {"policy": anchor}, torch.Generator().manual_seed(seed))
        value, _ = loss(learned, replayed)
        slopes = torch.autograd.grad(value.mean(), list(policy.model.parameters()))
        found.append((value.detach(), torch.cat([slope.flatten() for slope in slopes])))
    (loss_gap, gradient_gap) = (
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True)
    )
    return {"largest_gap": max(loss_gap, gradient_gap), "loss": loss_gap, "gradient": gradient_gap}


OFF_CLAIM = Identity(
    "With c = λ, and climbing the more cautious critic, the off-policy form is SAC: the same loss and the same "
    "gradient, whatever the anchor is.",
    beside_sac,
    within=1e-6,
)
PENDULUM = {**SAC_PENDULUM, "targets.every": 250}
"""A run of 10,000 steps has time for forty anchors, not for ten."""


OFF_PUBLISHED: Published = {
    "released code, mdpo_off/mdpo.py": {
        "losses.mirror_policy.critic": "first",
        "losses.mirror_policy.shrink": 0.001,
        "update.lr": 0.0003,
        "replay.batch": 256,
        "targets.tau": 0.005,
    },
    "released code, mdpo_off/run_mujoco.py": {
        "replay.size": 1000000,
        "replay.gamma": 0.99,
    },
    "arXiv 2005.09814, appendix": {
        "losses.mirror_policy.c": 1.0,
        "networks.temperature.start": 0.2,
        "networks.temperature.learned": False,
        "targets.every": 1000,
    },
}


@method(
    "mdpo-off@1",
    paper=113,
    base="sac",
    world="pendulum",
    presets={"control": SAC_CONTROL, "pendulum": PENDULUM},
    claim=OFF_CLAIM,
    published=OFF_PUBLISHED,
)
def mdpo_off() -> OffPolicy:
    """Off-policy Mirror Descent Policy Optimization (arXiv 2005.09814): SAC, held near an anchor π_k.

    −Q + λ·log π + (1/t)·(log π − log π_k), written with c = λ + 1/t; the anchor moves to the policy after every m
    updates. λ is fixed. Critics are SAC's, where the release has a network for V between them.
    """
    return sac().but(
        networks=(q_networks(count=2), temperature(start=0.2, learned=False)),
        losses=(soft_q(), mirror_policy(c=1.0)),
        targets=anchored(tau=0.005, every=1000),
    )
