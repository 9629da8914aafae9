"""Shallow Q-iteration via reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from panoply.batch import Values
from panoply.evidence.claims import Ahead
from panoply.evidence.hardness import predicted
from panoply.experience import Experience, Segments
from panoply.parts import Finding, Part, part
from panoply.regimes import Offline
from panoply.registry import Published, method
from panoply.slots.replay.uniform import uniform
from panoply.slots.targets.following import polyak
from panoply.slots.update.optimisers import adam
from panoply.transitions import ActorCritic, Transitions

if TYPE_CHECKING:
    from panoply.policies.control import ControlPolicy
    from panoply.replay import Replay
    from panoply.rollout.control import ControlCollector
    from panoply.transitions import ActionNets

CONTROL = {
    "policy.activation": "relu",
    "update.lr": 1e-3,
    "run.evaluate_every": 10,
    "run.checkpoint_every": 10,
    "run.episodes_every": 10,
}
TABULAR = {**CONTROL, "policy.hidden": (), "update.lr": 0.03, "replay.updates": 300}
"""A table a turn."""
ANYTHING = 1e6
"""So many times as often as usual any action is taken: always."""


@part(
    "data",
    equation="the random ends, from turn t on, of {batch} episodes that begin greedily",
    needs={"world:step", "world:discrete actions", "world:time limit", "policy:staged", "policy:values"},
    gives={"episodes"},
    cost=lambda held, of: (held.batch * of.answer, held.batch * of.context),
    bounds={"batch": "at least 1"},
)
def random_suffixes(collect: ControlCollector, *, batch: int = 256) -> Experience:
    """Step t of a run freezes what was learned for turn t − 1, and takes any action from turn t on.

    Only those later steps learn: what followed them was random, so their returns are the random policy's. When every
    turn has had its step, the last one is repeated.
    """
    stages = collect.policy.model.stages
    assert stages is not None
    t = min(collect.version, stages.count - 1)
    if int(stages.frozen) < t:
        stages.freeze(t - 1)
    played = collect.episodes(
        collect.tasks(batch), temperature=lambda turn: torch.where(turn < t, 0.0, ANYTHING)
    )
    return played.with_columns(reward=played["signal:reward"], train=played["turn"] >= t)


@part(
    "network",
    equation="Q¹ … Q^{count}",
    gives={"network:rungs"},
    needs={"world:control"},
    bounds={"count": "at least 0"},
)
def rungs(policy: ControlPolicy, seed: int, *, count: int = 0) -> ActionNets:
    """What the policy's values are climbed to over: `count` nets of its widths, k − 1 of them for k."""
    from panoply.transitions import ActionNets

    return ActionNets.of(policy, count, seed)


def returns_to_go(learned: ActorCritic, replay: Replay, **_: object) -> dict[str, Tensor]:
    """What was earned from each step to its episode's end, and whether there was a step after it.

    The time limit is part of the problem: nothing beyond it counts.
    """
    rows, episode = replay.rows(torch.arange(len(replay))), replay.episodes()
    going = torch.ones_like(rows.reward)
    going[Segments(episode).is_last()] = 0.0
    return {"return": Segments(episode).to_go(rows.reward, replay.gamma), "going": going}


def _one_step(held: Any, method: Any) -> list[Finding]:
    steps = method.replay.settings().get("n_step", 1)
    return (
        [("update", f"a rung is one step above the next, and replay.n_step is {steps}")] if steps != 1 else []
    )


@part(
    "loss",
    equation="(Q¹(s,a) − Σ_i γ^i·r_i)² + Σ_j (Q^j+1(s,a) − (r + γ·max_a′ Q^j(s′,a′)))²",
    unit="transition",
    learns=("policy", "rungs"),
    needs={"network:rungs", "policy:values", "world:discrete actions"},
    annotate=returns_to_go,
    impossible=_one_step,
)
def climbing_q(learned: ActorCritic, rows: Transitions, *, update: Part | None = None) -> Values:
    """Q¹ is what acting at random earns; each rung above it acts greedily once more before that. The last is the
    policy's. With one rung there is no bootstrapping at all."""
    ladder: list[nn.Module] = [*learned.networks["rungs"].nets, learned.policy.model]
    targets = [rows["return"]]
    with torch.no_grad():
        for below in ladder[:-1]:
            targets.append(rows.target(rows["going"] * below(rows.next_observation).amax(-1)))
    taken = rows.action[:, None]
    values = [rung(rows.observation).gather(1, taken)[:, 0] for rung in ladder]
    errors = [(value - target).square() for value, target in zip(values, targets, strict=True)]
    return torch.stack(errors).mean(0), {"q": values[-1].detach(), "return_to_go": rows["return"]}


CLAIM = Ahead(
    "How many steps SQIRL needs ranks small MDPs as PPO finds them hard: a rank correlation above 0.6, and above those "
    "of the horizon and of the number of states.",
    predicted,
)


PUBLISHED: Published = {
    "released code, effective_horizon/sb3/algorithms/sqirl.py": {
        "update.lr": 0.0001,
        "update.clip": 10.0,
        "replay.batch": 256,
        "replay.gamma": 1.0,
        "replay.size": 1000000,
    },
}


@method(
    "sqirl@1",
    paper=174,
    presets={"control": CONTROL, "tabular": TABULAR},
    world="tabular",
    claim=CLAIM,
    published=PUBLISHED,
)
def sqirl(k: int = 1) -> Offline:
    """SQIRL (arXiv 2312.08369): explore at random, regress, act greedily in one more turn, and so on.

    For t = 0, 1, …: follow the policies frozen for the turns before t and act at random from t on; learn what acting at
    random earns, apply k − 1 steps of fitted Q-iteration, and freeze the greedy policy for turn t. It solves problems
    in which the greedy policy of so few steps is optimal, with samples exponential in the effective horizon only
    (`panoply.evaluation.effective_horizon`). A run has a step for every turn, which learns from its own batch alone;
    the released code keeps earlier ones too.
    """
    return Offline(
        data=random_suffixes(batch=256),
        replay=uniform(batch=256, gamma=1.0, updates=1000),
        networks=(rungs(count=k - 1),),
        losses=(climbing_q(),),
        targets=polyak(tau=1.0),
        update=adam(lr=1e-4, clip=10.0),
    )
