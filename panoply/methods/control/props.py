"""Proximal robust on-policy sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from panoply.episodes import as_tensors, from_tensors
from panoply.evidence.claims import Ahead
from panoply.experience import OWN, REPLAY, Experience, distinct
from panoply.methods.base.ppo import CARTPOLE, CONTROL, ppo
from panoply.parts import Finding, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.seeds import torch_rng

if TYPE_CHECKING:
    from panoply.policies.control import ControlPolicy
    from panoply.rollout.control import ControlCollector

Push = Literal["clipped", "plain", "none"]
State = dict[str, Any]


# ------------------------------------------------------------------ what was collected before


def pack(experience: Experience) -> State:
    """Experience as named tensors, without observations that nobody refers to."""
    n = len(experience)
    used, place = distinct(torch.cat([experience["context"], experience["next"]]))
    decisions = experience.decisions.plus({"context": place[:n], "next": place[n:]})
    return as_tensors(Experience(decisions, experience.context.take(used)))


# ------------------------------------------------------------------ a policy that avoids what there is enough of


def push_loss(log_ratio: Tensor, kl: Tensor, epsilon: float, anchor: float) -> Tensor:
    """mean max(g, clip(g, 1−ε, 1+ε)) + λ·KL(π_θ‖π_φ), g = π_φ/π_θ: PPO's loss with an advantage of −1 everywhere.

    What was done becomes less likely, down to 1−ε times its probability under π_θ.
    """
    ratio = log_ratio.exp()
    return (torch.maximum(ratio, ratio.clamp(1 - epsilon, 1 + epsilon)) + anchor * kl).mean()


class Pushing(NamedTuple):
    """How a policy is pushed off: settings of `sample.robust`."""

    push: Push
    epsilon: float
    anchor: float
    limit: float
    lr: float
    epochs: int
    minibatches: int
    clip: float


ADAM = "adam:"
"""How what Adam remembers is named among what is kept."""


def pushed_off(
    target: ControlPolicy,
    done: Experience,
    how: Pushing,
    generator: torch.Generator,
    memory: State | None = None,
) -> ControlPolicy:
    """A copy of the target policy, pushed off the actions that were taken.

    memory: what Adam remembers of earlier rounds, and from now on of this one
    """
    acting = target.copy()
    acting.model.requires_grad_(True)
    weights = list(acting.model.parameters())
    if how.push == "plain":
        slopes = torch.autograd.grad(acting.score(done)["logp"].mean(), weights)
        with torch.no_grad():
            for weight, slope in zip(weights, slopes, strict=True):
                weight.sub_(slope, alpha=how.lr)
        return acting
    with torch.no_grad():
        before, distribution = target.score(done)["logp"], target.distribution(done)
    adam = torch.optim.Adam(weights, lr=how.lr)
    for name, kept in (memory or {}).items():
        number, _, key = name.removeprefix(ADAM).partition(":")
        weight = weights[int(number)]
        adam.state[weight][key] = kept.to(
            weight.device if kept.dim() else "cpu", copy=True
        )  # steps are counted here
    for rows in _mixed(len(done), how, generator):
        some = done.take(rows)
        log_ratio = acting.score(some)["logp"] - before[rows]
        moved = log_ratio.detach()
        if float((moved.exp() - 1 - moved).mean()) > how.limit:
            break
        kl = acting.head.divergence(distribution[rows], acting.distribution(some), 1.0)
        adam.zero_grad()
        push_loss(log_ratio, kl, how.epsilon, how.anchor).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, how.clip)
        adam.step()
    if memory is not None:
        for i, weight in enumerate(weights):
            memory |= {f"{ADAM}{i}:{key}": kept for key, kept in adam.state[weight].items()}
    return acting


def _mixed(count: int, how: Pushing, generator: torch.Generator) -> Iterator[Tensor]:
    for _ in range(how.epochs):
        yield from torch.randperm(count, generator=generator).chunk(how.minibatches)


# ------------------------------------------------------------------ the part


def _impossible(held: Any, method: Any) -> list[Finding]:
    even = held.length % held.rounds == 0
    return [] if even else [("rounds", f"the {held.length} steps of a batch are not a multiple of it")]


def _inert(held: Any, method: Any) -> list[Finding]:
    if held.push == "clipped":
        return []
    unused = ("epsilon", "anchor", "limit", "epochs", "minibatches", "clip")
    return [
        (name, f"push={held.push} has none") for name in (unused if held.push == "plain" else (*unused, "lr"))
    ]


@part(
    "sample",
    equation="{length} steps of {envs} environments, in {rounds} rounds that make up for what there is too much of; "
    "the last {batches} batches",
    needs={"world:step", "world:control"},
    state=dict,
    cost=lambda held, of: (held.envs * held.length, held.batches * held.envs * held.length),
    impossible=_impossible,
    inert=_inert,
    bounds={
        **dict.fromkeys(("envs", "length", "rounds", "batches", "epochs", "minibatches"), "at least 1"),
        **dict.fromkeys(("lr", "limit", "clip"), "above 0"),
        "epsilon": "from 0 to 1",
        "anchor": "at least 0",
    },
)
def robust(
    state: State,
    collect: ControlCollector,
    *,
    envs: int = 1,
    length: int = 2048,
    rounds: int = 16,
    batches: int = 2,
    push: Push = "clipped",
    epsilon: float = 0.3,
    anchor: float = 0.1,
    limit: float = 0.1,
    lr: float = 1e-3,
    epochs: int = 4,
    minibatches: int = 4,
    clip: float = 0.5,
) -> tuple[State, Experience]:
    """A batch in rounds, each by a policy pushed off what the last batches hold too much of; and those batches.

    The acting policy starts from the learning one in every round, but for what its optimiser remembers, which is kept
    over rounds and batches as in the released code. What comes out is as if that one had acted: `logp` is
    its own, of old batches as well, so nothing is weighted by importance. What the next round drops pushes nobody.

    push     `clipped` is PROPS; `plain` is ROS, one plain step down the log-likelihood; `none` acts as it learns
    epsilon  how much less likely than under the learning policy an action may become
    anchor   weight of KL(learning‖acting); without it a Gaussian widens without end
    limit    the KL, estimated by g − 1 − log g, beyond which pushing stops
    """
    target = collect.policy
    how = Pushing(push, epsilon, anchor, limit, lr, epochs, minibatches, clip)
    pool = from_tensors(state) if state else None
    memory = {name: kept for name, kept in state.items() if name.startswith(ADAM)}
    for _ in range(rounds):
        acting, number = target, 0
        if pool is not None:
            number = int(pool["round"].max()) + 1
            pool = pool.take(pool["round"] > number - batches * rounds)
            if push != "none" and len(pool):
                dice = torch_rng("push", collect.seed, collect.state["decisions"])
                acting = pushed_off(target, pool, how, dice, memory)
        with collect.acted_by(acting):
            new = collect.rollout(envs, length // rounds)
        new = new.with_columns(round=torch.full((len(new),), number))
        pool = Experience.cat([pool, new]) if pool is not None and len(pool) else new
    assert pool is not None
    old = pool["round"] <= int(pool["round"].max()) - rounds
    with torch.no_grad():
        logp = target.score(pool)["logp"].cpu()
    pool = pool.with_columns(logp=logp, source=torch.where(old, REPLAY, OWN))
    state = pack(pool)
    return {**state, **memory}, from_tensors(state)


# ------------------------------------------------------------------ how far data are from the policy

SIZES, ROUND, REPEATS = (128, 256, 512, 1024), 8, 4


def sampling_errors(seed: int, push: Push, lr: float) -> Tensor:
    """Errors of the first 128 to 1024 steps of a fixed random network in a grid of 5 × 5 cells."""
    from panoply.evaluation.sampling_error import tabular_error
    from panoply.policies.control import ControlPolicy
    from panoply.rollout.control import ControlCollector
    from panoply.worlds.control.grid import Grid

    world = Grid("open", size=5, counts=(0,), view="state", level=0, horizon=50)
    policy = ControlPolicy.fresh(world.observation, world.action, seed=seed)
    collect = ControlCollector(world, policy, seed)
    whole = robust(
        length=SIZES[-1], rounds=SIZES[-1] // ROUND, batches=1, push=push, lr=lr, epochs=4, minibatches=1
    )
    _, found = whole({}, collect)
    collect.close()
    with torch.no_grad():
        table = policy.model(torch.arange(world.cells)).softmax(-1)
    prefixes = [found.take(found["round"] < size // ROUND) for size in SIZES]
    return torch.tensor([tabular_error(p.looked_up("observation"), p["action"], table) for p in prefixes])


def less_error(seed: int) -> dict[str, float]:
    """By what share the error is smaller than that of the policy's own sampling: at the worst size, and at each."""
    kinds: dict[Push, float] = {"none": 1.0, "plain": 30.0, "clipped": 0.03}
    numbers = range(REPEATS * seed, REPEATS * (seed + 1))
    mean = {
        push: torch.stack([sampling_errors(n, push, lr) for n in numbers]).mean(0)
        for push, lr in kinds.items()
    }
    ours, plain = ((1 - mean[push] / mean["none"]).tolist() for push in ("clipped", "plain"))
    found = {f"at {size}": share for size, share in zip(SIZES, ours, strict=True)}
    return {"least reduction": min(ours), **found, "plain at 1024": plain[-1]}


CLAIM = Ahead(
    "At every number of steps from 128 to 1024, data that a pushed-off policy collects are closer to what the fixed "
    "policy would do than as many data of its own.",
    less_error,
)


PUBLISHED: Published = {
    "arXiv 2311.08290, released code": {
        "sample.epsilon": 0.3,
        "sample.anchor": 0.1,
        "sample.limit": 0.1,
        "sample.lr": 0.001,
        "sample.epochs": 4,
        "sample.minibatches": 4,
        "sample.clip": 0.5,
        "sample.batches": 2,
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
        "credit.lam": 0.95,
        "control:credit.gamma": 0.99,
        "cartpole:sample.rounds": 8,
    },
}
"""Of the ranges that were swept: λ 0.1 to 0.3, δ 0.03 to 0.1. CartPole has 128 steps a batch there, in rounds of 16."""


@method("props@1", paper=20, base="ppo", world="cartpole", claim=CLAIM,
        presets={
            "control": {k: v for k, v in CONTROL.items() if k != "sample"},
            "cartpole": {k: v for k, v in CARTPOLE.items() if k != "sample"} | {"sample.rounds": 8},
        }, published=PUBLISHED)  # fmt: skip
def props() -> OnPolicy:
    """Proximal robust on-policy sampling (arXiv 2311.08290). φ ← argmin E_D max(g, clip(g)) + λ·KL, g = π_φ/π_θ.

    On-policy methods want data that look as if the policy had drawn them. Its own draws do so only in the long run; a
    behaviour policy that avoids what there is already too much of gets there sooner. PPO then learns from the last
    batches as if they were its own, with log-probabilities, values and advantages of the policy as it is now.
    """
    return ppo().but(sample=robust())
