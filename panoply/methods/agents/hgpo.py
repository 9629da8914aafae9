"""Hierarchy-of-Groups Policy Optimization."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from panoply.evidence.claims import Ahead, Learns, Shows
from panoply.experience import Experience, Segments, Table
from panoply.methods.agents.gigpo import gigpo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method, protocol
from panoply.seeds import torch_rng
from panoply.slots.credit.anchors import anchors_of, of_group, standing, turns_to_go


def nested(experience: Experience, most: int) -> list[tuple[Segments, Tensor]]:
    """For k = 0 … `most`: the turns of a group that share their state and the k states before it, and which turns have
    that many before them. An early turn has fewer such groups, and none is padded: padding would match falsely."""
    turns = experience.by("turn")
    number, episode = (turns.first(experience[name]) for name in ("turn", "episode"))
    here = anchors_of(experience)
    found = [(here, torch.ones_like(number, dtype=torch.bool))]
    for k in range(1, most + 1):
        shared, _ = found[-1]
        there = number >= k
        before = torch.roll(shared.index, 1)
        assert bool((episode == torch.roll(episode, 1))[there].all()), "turns of an episode lie side by side"
        alone = -1 - torch.arange(len(number))
        found.append((Segments(torch.where(there, before * len(here) + here.index, alone)), there))
    return found


def _equation(held: Part) -> str:
    s = held.settings()
    over = " / std" if s["scale"] == "std" else ""
    longer = "k + 2" if s["weights"] == "released" else "k + 1"
    return (
        f"A = Σ_k w_k·(R_t − mean R_t after the same k states){over}, k = 0 … {s['history']}, "
        f"w_k ∝ ({longer})^{s['alpha']:g},  R_t = Σ_j≥t {s['gamma']:g}^(j−t)·r_j"
    )


def _inert(held: Any, method: Any, world: Any) -> list[Finding]:
    found = [("epsilon", "nothing is divided when scale is none")] if held.scale == "none" else []
    one = getattr(world, "turn_cap", 0) == 1
    if (held.history == 0 or one) and not held.base:
        found += [(name, "there is one group a turn") for name in ("alpha", "weights", "ties")]
    elif (held.history == 0 or one) and held.weights == "paper":
        found += [("alpha", "there is one group a turn, and 1^α is 1")]
    if one:
        found += [(name, f"episodes of {world.name} have one turn") for name in ("gamma", "history")]
    return found


@part(
    "credit",
    equation=_equation,
    inert=_inert,
    bounds={
        "history": "from 0 to 64",
        "alpha": "from 0 to 100",
        "gamma": "from 0 to 1",
        "epsilon": "from 0 to 1",
    },
)
def histories(
    experience: Experience,
    *,
    history: int = 2,
    alpha: float = 1.0,
    gamma: float = 0.95,
    scale: Literal["std", "none"] = "std",
    weights: Literal["paper", "released"] = "paper",
    ties: Literal["kept", "dropped"] = "kept",
    base: bool = False,
    epsilon: float = 1e-6,
) -> Tensor:
    """A turn's return against those of nested groups of turns, the more alike the history the larger the weight.

    Group k has the turns of the same task that were taken in the same state after the same k states. A group of one
    says nothing and is left out of the mean; a turn without any other has advantage 0. Deviations are of the
    population. With history=0 this is GiGPO's credit for steps.

    history   K, the states before a turn's own that are looked at; as many as its prompt shows
    alpha     0: all groups weigh the same
    weights   (k + 1)^α, or, as in the released code, (k + 2)^α
    ties      whether a difference of exactly 0 counts, or, as in the released code, is left out like a missing group
    base      whether the episode's return against its group's is one more item, of weight 1
    """
    turns = experience.by("turn")
    returns = turns_to_go(experience, turns.sum(experience["reward"]), gamma)
    first = 2 if weights == "released" else 1
    items = []
    for k, (peers, there) in enumerate(nested(experience, history)):
        found = standing(returns, peers, scale, epsilon, correction=0)
        items.append((float(k + first) ** alpha, found, there & (peers.rows(peers.count) > 1)))
    if base:
        whole = of_group(experience, scale, "turn", "return", epsilon)
        items.append((1.0, whole, torch.ones_like(whole, dtype=torch.bool)))
    total, mass = torch.zeros_like(returns), torch.zeros_like(returns)
    for weight, advantage, usable in items:
        counts = usable & (advantage != 0) if ties == "dropped" else usable
        total, mass = total + weight * advantage * counts, mass + weight * counts
    return turns.rows(total / mass.clamp(min=1e-12))


# ------------------------------------------------------------------ a corridor whose states look alike

PLACES, CLONES, CORRIDORS, NOISE = 5, 8, 200, 0.5


def worth(gamma: float) -> Tensor:
    """Q[t, before, here, action] of the corridor under a policy that tosses a coin, exactly."""
    table = torch.zeros(PLACES, 2, 2, 2, dtype=torch.float64)
    after = torch.zeros(2, 2, dtype=torch.float64)
    for t in reversed(range(PLACES)):
        for before in range(2):
            for here in range(2):
                for action in range(2):
                    paid = float(t > 0 and action == before)
                    table[t, before, here, action] = paid + gamma * after[here, action]
        after = table[t].mean(-1)
    return table


def corridor(seed: int) -> tuple[Experience, Tensor]:
    """Clones that walk down corridors, and the exact Q of what could have been done in each turn, [turns, 2].

    In every place one looks for a sign or does not, and sees it, or not, in the next; what is done pays 1 where it
    agrees with what was seen one place *before* the one where one stands, and a little noise. A place looks the same
    whatever was seen before it.
    """
    generator = torch_rng("corridor", seed)
    episodes = CORRIDORS * CLONES
    action = torch.randint(2, (episodes, PLACES), generator=generator)
    here = torch.cat([torch.zeros(episodes, 1, dtype=torch.long), action[:, :-1]], 1)
    before = torch.cat([torch.zeros(episodes, 1, dtype=torch.long), here[:, :-1]], 1)
    place = torch.arange(PLACES).expand(episodes, PLACES)
    paid = ((action == before) & (place > 0)).double()
    paid = paid + NOISE * torch.randn(episodes, PLACES, generator=generator, dtype=torch.float64)
    walk = torch.arange(episodes)[:, None].expand(episodes, PLACES)
    columns = {"episode": walk, "group": walk // CLONES, "task": walk // CLONES, "turn": place, "action": action,
               "state": 2 * place + here, "reward": paid, "context": walk, "position": place}  # fmt: skip
    rows = Experience(Table({name: column.flatten() for name, column in columns.items()}), Table({}))
    q = worth(GAMMA)[place.flatten(), before.flatten(), here.flatten()]
    return rows, q


GAMMA = 0.95


def squared_errors(seed: int, history: int = 2) -> dict[str, float]:
    """Of advantages by nested groups, by the state alone (GiGPO), and by the longest history alone: mean squares.

    The last may be the smallest for the wrong reason: a turn that is alone in its group has advantage 0 (`no credit`
    is the share of such turns), which is closer to the truth than a return with its noise, and teaches nothing.
    """
    rows, q = corridor(seed)
    exact = q.gather(1, rows["action"][:, None])[:, 0] - q.mean(1)
    returns = turns_to_go(rows, rows["reward"], GAMMA)
    longest, _ = nested(rows, history)[-1]
    found = {
        "nested": histories(history=history, gamma=GAMMA, scale="none")(rows),
        "state alone": histories(history=0, gamma=GAMMA, scale="none")(rows),
        "whole history alone": standing(returns, longest, "none", 0.0),
    }
    errors = {name: float((advantage - exact).square().mean()) for name, advantage in found.items()}
    alone = longest.rows(longest.count) == 1
    return {**errors, "no credit by the whole history alone": float(alone.double().mean())}


def less_error(seed: int) -> dict[str, float]:
    """By how much the squared error of nested groups is smaller than that of groups by the state alone."""
    found = squared_errors(seed)
    return {"ahead": found["state alone"] - found["nested"], **found}


@protocol(
    "hgpo-corridor@1",
    paper=53,
    claim=Ahead(
        "Where states look alike and what was seen before tells them apart, advantages by nested groups of histories "
        "are closer to the exact ones, by their squared error, than advantages by the state alone.",
        less_error,
    ),
)
def hgpo_corridor(*, seed: int = 0) -> dict[str, float]:
    """Squared errors of advantages on a corridor whose exact ones are known: by nested groups, by the state alone, and
    by whole histories alone (HGPO, arXiv 2602.22817).

    In every place one looks for a sign or does not; what is done pays where it agrees with what was seen one place
    before, and a place looks the same whatever was seen before it. Whole histories alone err least, because a turn
    without others is given 0 and not a noisy return; they leave more than half of the turns without credit.
    """
    return squared_errors(seed)


CLAIM = Learns(
    "Where prompts hide what is in hand and show the last two places, so that histories tell apart what looks alike, "
    "nested groups of histories learn more from as many episodes than groups by the state alone.",
    over="gigpo",
    world="keydoor:aliased",
    budget="episodes=3840",
    also=("success",),
    shows=(Shows("success", least=0.15, most=0.9),),
    reworded="it held of exact advantages on a corridor, which is the claim of hgpo-corridor now.",
)

PUBLISHED: Published = {
    "langfengQ/verl-agent, recipe/hgpo/run_qwen2.5_1.5b_alfworld_train.sh": {
        "sample.prompts": 16,
        "sample.group": 8,
        "reward.penalty": 0.1,
        "credit.history": 2,
        "credit.alpha": 1.0,
        "credit.gamma": 0.95,
        "credit.scale": "std",
        "credit.base": False,
        "regularise.kl.weight": 0.01,
        "regularise.kl.estimator": "k3",
        "update.lr": 1e-6,
    },
    "langfengQ/verl-agent, recipe/hgpo/core_hgpo.py": {"credit.epsilon": 1e-6},
    "arXiv 2602.22817": {"credit.weights": "paper", "credit.ties": "kept"},
}


@method(
    "hgpo@1",
    paper=53,
    base="gigpo",
    world="keydoor:aliased",
    claim=CLAIM,
    published=PUBLISHED,
    tags=("granularity=turn",),
)
def hgpo() -> OnPolicy:
    """Hierarchy-of-Groups Policy Optimization (arXiv 2602.22817).

    GiGPO compares turns that were taken in the same state. Where a prompt shows the last K states too, the same state
    after another history is another decision, and such a comparison is biased; comparing whole histories alone leaves
    few turns to compare. So a turn stands in nested groups, which share its state and the 0, 1, … K states before it,
    has an advantage in each, and their mean is weighted by (k + 1)^α. There is no term for whole episodes.

    States are the world's own, not prompts. In a world without aliases (`keydoor` as it is) histories that lead to one
    state are worth the same, and only the variance differs. For scores that are no successes the authors do not divide
    (credit.scale=none). The released code weighs a little otherwise and leaves out ties: credit.weights=released,
    credit.ties=dropped.

    On a small corridor whose exact advantages are known, nested groups have a smaller squared error than the state
    alone, as the authors argue (`hgpo-corridor`).
    """
    return gigpo().but(credit=histories())
