"""Information Gain-based Policy Optimization."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience, Segments
from panoply.methods.base.grpo import TINY, grpo
from panoply.parts import Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.anchors import standing, turns_to_go
from panoply.slots.credit.returns import place, to_go
from panoply.slots.regularise.terms import kl
from panoply.slots.sample.groups import groups


def _final(experience: Experience) -> Tensor:
    """Marks, of all turns, the last of each episode."""
    turns = experience.by("turn")
    number = turns.first(experience["turn"])
    episodes = Segments(turns.first(experience["episode"]))
    return number == episodes.rows(episodes.max(number))


@part(
    "reward",
    equation=lambda held: (
        f"{'Δ log p' if held.form == 'log' else 'Δp'}(gold answer) of a turn, {held.name} in the last one"
    ),
    needs={"answer_likelihood", "world:conclusion"},
)
def information_gain(
    experience: Experience, *, name: str = "success", form: Literal["difference", "log"] = "difference"
) -> Tensor:
    """What a turn adds to the policy's belief in the right answer; the last turn earns the outcome instead.

    The belief p (column `answer_likelihood`) is the geometric mean of the probabilities of the gold answer's tokens,
    were it to be given at the start of a turn. No gradient goes through it.
    """
    turns, episodes = experience.by("turn"), experience.by("episode")
    episode, number = turns.first(episodes.index), turns.first(experience["turn"])
    belief = turns.first(experience["answer_likelihood"])
    belief = belief.log() if form == "log" else belief
    table = belief.new_zeros(len(episodes), int(number.max()) + 2)
    table[episode, number] = belief
    outcome = episodes.sum(experience[f"signal:{name}"])
    earned = torch.where(_final(experience), outcome[episode], table[episode, number + 1] - belief)
    end = experience["position"] == turns.rows(turns.max(experience["position"]))
    return turns.rows(earned) * end


def _equation(held: Part) -> str:
    s = held.settings()
    if s["normalise"] == "position":
        return f"A = G − mean_group G at the same place,  G_t = Σ_k≥t {s['gamma']:g}^(k−t)·r_k"
    apart = ", gains and outcomes apart" if s["normalise"] == "separate" else ""
    return f"A = Σ_k≥t {s['gamma']:g}^(k−t)·z_k,  z = (r − mean_group r) / std over all turns{apart}"


@part("credit", equation=_equation, bounds={"gamma": "from 0 to 1", "epsilon": "from 0 to 1"})
def turn_returns(
    experience: Experience,
    *,
    gamma: float = 1.0,
    normalise: Literal["joint", "separate", "position"] = "joint",
    epsilon: float = 1e-6,
) -> Tensor:
    """A turn's advantage is what it and the later turns earned, in deviations from all turns of the group.

    `separate` standardises the last turns' outcomes apart from the gains, which otherwise, being many, set the scale.
    `position` is the released code: the undivided return from a decision on, less the group's mean at the same place of
    the episode. (There observations count as places too; here only decisions do.)
    """
    reward = experience["reward"]
    turns = experience.by("turn")
    if normalise == "position":
        returns, at = to_go(experience, reward, gamma), place(experience)
        groups = experience.by("group")
        return standing(returns, Segments(groups.index * (int(at.max()) + 1) + at), "none", 0.0)
    peers = 2 * turns.first(experience.by("group").index)
    if normalise == "separate":
        peers = peers + _final(experience)
    z = standing(turns.sum(reward), Segments(peers), "std", epsilon)
    return turns.rows(turns_to_go(experience, z, gamma))


CLAIM = Learns(
    "Where success is so rare that most groups are all wrong, paying turns for what they add to the belief in the "
    "right answer learns more from as many episodes than paying for the outcome alone.",
    race="rare",
    also=("success", "degenerate_groups"),
    shows=(Shows("mean:degenerate_groups", least=0.3),),
    reworded="it failed where half of the questions need no look-up, and was undecided where all do: the start "
    "succeeds one time in six there, and outcomes alone teach enough. Here it is one time in a hundred.",
)


PUBLISHED: Published = {
    "GuoqingWang1/IGPO, policy_optimization.sh": {
        "sample.prompts": 32,
        "sample.group": 16,
        "sample.temperature": 1.0,
        "regularise.kl.weight": 0.001,
        "update.lr": 1e-6,
        "update.minibatches": 1,
    },
    "arXiv 2510.14967, §3": {"reward.form": "difference", "credit.gamma": 1.0, "credit.normalise": "joint"},
}


@method(
    "igpo@1",
    paper=103,
    base="grpo",
    world="tools",
    presets={"tiny": {**TINY, "sample.prompts": 16}},
    claim=CLAIM,
    published=PUBLISHED,
    tags=("granularity=turn",),
)
def igpo() -> OnPolicy:
    """Information Gain-based Policy Optimization (arXiv 2510.14967).

    After every turn the policy is asked how likely it finds the right answer now. The increase is the turn's reward, so
    that a useful call is paid even where the episode fails; the last turn earns the outcome. Rewards are standardised
    over all turns of the group and summed from each turn on; with γ = 1 early turns are paid for what later ones find.
    """
    return grpo().but(
        sample=groups(prompts=32, group=16),
        reward=information_gain(),
        credit=turn_returns(),
        regularise=(kl(weight=0.001, estimator="k3"),),
    )
