"""A technical survey of reinforcement learning for language models, as an order of the works that are here."""

from __future__ import annotations

from panoply.evidence.claims import Ranks, Shows
from panoply.recipes import Recipe, Stage
from panoply.registry import having, recipe, survey
from panoply.tags import AXES

PAIRS = {"data": "preferences", "data.pairs": 500, "data.answers": "start"}
HELD = {"regularise": "kl", "regularise.kl.weight": 0.04}
"""GRPO's own KL term, which its preset for small worlds leaves out."""


@recipe("grpo-from-preferences@1", world="strings")
def grpo_from_preferences() -> Recipe:
    """GRPO on a reward model of 500 pairs: the starting policy's own answers, ordered by the world's annotators.

    RLHF without imitation and without a critic, so that what differs from GRPO with a verifier is the reward alone.
    """
    return Recipe(
        (
            Stage("judge", "reward-model", PAIRS, {"steps": 40}),
            Stage(
                "optimise", "grpo", {"models.reward_model.folder": "@judge", "reward.name": "model", **HELD}
            ),
        )
    )


def _spelled(settings: dict[str, object]) -> str:
    return ",".join(f"{path}={value}" for path, value in settings.items())


CLAIM = Ranks(
    "Two-digit addition at equal steps: GRPO with a program that checks sums solves more than GRPO with a reward model "
    "of 500 pairs, a fifth of which are wrong, and that one no less than DPO on as many such pairs.",
    (f"verifier=grpo:{_spelled(HELD)}", "reward model=grpo-from-preferences", f"dpo=dpo:{_spelled(PAIRS)}"),
    "add",
    "optimise.steps=40",
    metric="success",
    settings={"world.noise": 0.2},
    margins=(0.0, 0.05),
    also=("area", "world:kl", "total_episodes", "seconds"),
    shows=(Shows("success", most=0.9),),
)


@survey("rl4llm-survey@1", paper=101, claim=CLAIM)
def rl4llm_survey() -> dict[str, tuple[str, ...]]:
    """A technical survey of RL for language models (arXiv 2507.04136): works by what the reward is, by who gives
    feedback, and by how the policy is moved.

    The three axes are tags of every method and recipe, so they can be crossed: `panoply list --tag reward=rule --tag
    optimisation=critic`. A work stands wherever it belongs, with the settings it is registered with; GRPO on a reward
    model is another row than GRPO. The axes are the survey's; what stands below them follows from what works are here.
    The survey compares numbers of different papers, which is no evidence for an order of methods. The claim is its one
    table for a small task: the same model and steps, three rewards.
    """
    axes = [axis for key in ("reward", "feedback", "optimisation") for axis in AXES if axis.key == key]
    return {
        f"{axis.key}={answer}: {meaning}": having(f"{axis.key}={answer}")
        for axis in axes
        if axis.survey == "rl4llm-survey"
        for answer, meaning in axis.answers.items()
    }
