"""Reinforcement learning from human feedback, as a recipe."""

from __future__ import annotations

from panoply.recipes import Recipe, Stage
from panoply.registry import recipe


@recipe("rlhf@1", world="strings")
def rlhf() -> Recipe:
    """RLHF (InstructGPT, arXiv 2203.02155): imitate, learn a reward from preferences, optimise it with PPO.

    PPO starts from the imitator, earns what the reward model says less β·log π/π_imitator on every token, and is
    measured by the world's own verifier, which it never sees.
    """
    reward = {"reward": "minus_kl", "reward.reward.name": "model", "reward.beta": 0.02}
    return Recipe(
        (
            Stage("imitate", "sft", options={"steps": 100}),
            Stage("judge", "reward-model", {"data": "preferences"}, {"model": "@imitate"}),
            Stage(
                "optimise",
                "ppo",
                {"models.reward_model.folder": "@judge", **reward},
                {"model": "@imitate", "reference": "@imitate"},
            ),
        )
    )
