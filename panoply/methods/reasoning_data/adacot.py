"""AdaCoT: when to think is learned by penalties, after a stage in which that decision is left out of the loss."""

from __future__ import annotations

import torch

from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience
from panoply.methods.base.ppo import TINY as PPO_TINY
from panoply.methods.base.ppo import ppo
from panoply.parts import part
from panoply.recipes import Recipe, Stage
from panoply.regimes import OnPolicy
from panoply.registry import Published, method, recipe
from panoply.slots.model.inside import ends_reasoning
from panoply.slots.reward.signals import blend


def decisions_to_think(experience: Experience, after: tuple[int, ...]) -> torch.Tensor:
    """The row in which each episode decides: its first, or the first behind the place where it says `after`."""
    episodes = experience.by("episode")
    row = torch.arange(len(experience))
    behind = (
        ends_reasoning(experience, list(after)) == 2
        if after
        else torch.ones(len(experience), dtype=torch.bool)
    )
    first = episodes.rows(episodes.min(torch.where(behind, row, len(experience))))
    return row == first


@part(
    "select",
    equation=lambda held: "without the decision to think" + (f", after {held.after}" if held.after else ""),
    bounds={"after": "at least 0"},
)
def but_the_decision(experience: Experience, *, after: tuple[int, ...] = ()) -> Experience:
    """Selective loss masking: the token that decides whether to think is in no sum and no count, nor in the critic's.

    It is the token behind what opens the block of thought, which closes the block at once or begins to think, and not
    what opens it. Its episode is credited as before.

    after   the tokens that open the block, by their ids; without any the first token of an answer decides
    """
    decides = decisions_to_think(experience, after)
    learns = ~decides & experience["train"] if "train" in experience else ~decides
    return experience.with_columns(train=learns)


SMALL_CRITIC = {"models.critic.update.epochs": 1}
"""Sees a batch once: what is compared is when a policy thinks, and most of the time went to the critic."""
TINY = {**PPO_TINY, **SMALL_CRITIC, "run.steps": 40}


MASKED_CLAIM = Learns(
    "On problems that reward thinking, PPO learns to think on all others too; with the decision left out of the loss "
    "it thinks less often on problems of one step, about as often as before.",
    over="ppo",
    world="modes",
    budget="episodes=3072",
    metric="world:thinks@1",
    lower=True,
    settings={"world.operations": (4, 6), **SMALL_CRITIC},
    tune={},
    fixed="how far a decision is carried along grows with the rate, so that both have the same: PPO's for small models",
    best=0.5,
    also=("success", "thought", "world:thinks@4", "total_decisions"),
    shows=(Shows("world:thinks@1", least=0.6),),
    waives={"room": "what is measured is how often it thinks, which begins at 0.5 and is to stay there"},
)


@method(
    "adacot-masked@1",
    paper=64,
    base="ppo",
    presets={"tiny": TINY},
    claim=MASKED_CLAIM,
    published={"arXiv 2505.11896, §3": {"select.but_the_decision": "but_the_decision"}},
)
def adacot_masked() -> OnPolicy:
    """The stage of AdaCoT (arXiv 2505.11896) on problems that all need thought: L = Σ over k ≠ k_dec of PPO's ℓ_k.

    Where every problem is solved by thinking, the token that opens or skips the thought would be driven to always, on
    problems of any kind. Left out of the loss it stays where imitation put it, while what follows is learned. The price
    is paid at once: half of the long problems are still answered without a thought, and mostly wrongly.
    """
    return ppo().but(select=(but_the_decision(),))


PUBLISHED: Published = {
    "arXiv 2505.11896, §4": {
        "reward": "blend",
        "reward.weights": (1.0, -0.3, -0.3, -1.0),
    },
}
"""Four pairs of the first two penalties are reported, (0.1, 0.3), (0.2, 0.3), (0.3, 0.3) and (0.3, 0.1), of which the
third is taken; its PPO's settings are not stated."""


@method("adacot-penalised@1", paper=64, base="ppo", presets={"tiny": TINY}, published=PUBLISHED)
def adacot_penalised() -> OnPolicy:
    """The last stage of AdaCoT (arXiv 2505.11896): R = R_base − α₁·missed − α₂·overused − γ·malformed.

    A prompt is labelled beforehand as one that needs thought or not; `missed` is an empty thought where it is needed,
    `overused` one where it is not. Labels are a rule's guess: α is small beside the reward, so that being right counts
    for more. α₂/α₁ moves how often it thinks; both are in `reward.weights`.
    """
    return ppo().but(
        reward=blend(names=("success", "missed", "overused", "malformed"), weights=(1.0, -0.3, -0.3, -1.0))
    )


CLAIM = Learns(
    "After as many steps, a stage on long problems with the decision masked and one on all with penalties thinks less "
    "often on problems of one step than PPO that is paid for success alone, and solves hardly fewer problems.",
    over="ppo=ppo:models.critic.update.epochs=1",
    world="modes",
    budget="steps=40",
    metric="world:thinks@1",
    lower=True,
    tune={},
    fixed="stages share PPO's settings for small models, and what is compared is what they are paid for",
    best=0.0,
    keeps={"success": 0.05},
    also=("success", "thought", "world:thinks@6"),
    shows=(Shows("world:thinks@1", least=0.3),),
    waives={"room": "what is measured is how often it thinks, which is not to rise"},
)


@recipe("adacot@1", paper=64, world="modes", claim=CLAIM)
def adacot() -> Recipe:
    """AdaCoT (arXiv 2505.11896): think only where it pays. PPO with a masked decision, then with penalties for it.

    A start that has imitated both ways to answer, with a thought and with an empty one, learns first where thought is
    always needed, with the decision out of the loss (`adacot-masked`), then on everything, where thinking too little
    and too much are fined (`adacot-penalised`). The penalties are a prior: which problems need thought is found out by
    reward, and sweeping `general.reward.weights` gives a front of success against thinking.

    What is surprising is how fast the choice is lost: forty steps on long problems, and short ones are thought about
    far more often. Look at how often it thinks by kind of problem (`world:thinks@K`), not at the mean. Imitation, and
    the model that labels prompts by rules, are not stages here: a world's start and its labels take their place.
    """
    return Recipe(
        (
            Stage("long", "adacot-masked", {"world.operations": (4, 6)}, {"steps": 20}),
            Stage("general", "adacot-penalised", options={"model": "@long", "steps": 20}),
        )
    )
