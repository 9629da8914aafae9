"""GRPO-TCR: token mean, clip-higher and reward shaping for agents with tools."""

from __future__ import annotations

import torch
from torch import Tensor

from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience
from panoply.methods.base.grpo import TINY as GRPO_TINY
from panoply.methods.base.grpo import grpo
from panoply.parts import part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.reduce.averages import token_mean
from panoply.slots.reward.shaping import overlong
from panoply.slots.sample.groups import groups
from panoply.slots.surrogate.ratios import clip
from panoply.slots.update.optimisers import adam


@part(
    "reward",
    equation="{right} if success, else min({most}, {wrong} + {bonus}·{name})",
    needs=lambda held: frozenset({"world:verify", "signal:success", f"signal:{held.name}"}),
    impossible=lambda held, method: (
        [] if held.wrong <= held.most < held.right else [("most", "it lies between wrong and right")]
    ),
    bounds=dict.fromkeys(("right", "wrong", "bonus", "most"), "any number"),
)
def attempts(
    experience: Experience,
    *,
    right: float = 1.0,
    wrong: float = -1.0,
    bonus: float = 0.1,
    most: float = -0.6,
    name: str = "calls",
) -> Tensor:
    """A verdict in which a wrong answer that called a tool loses a little less, on the last decision.

    Four calls earn all there is to earn by calling, `most`; a right answer earns nothing by it.
    """
    episodes = experience.by("episode")
    tried = episodes.sum(experience[f"signal:{name}"].float())
    succeeded = episodes.sum(experience["signal:success"].float()) > 0
    earned = torch.where(succeeded, torch.full_like(tried, right), (wrong + bonus * tried).clamp(max=most))
    return episodes.rows(earned) * episodes.is_last()


PLAIN = "grpo-tcr:reduce=sequence_mean,surrogate.high=0.2,reward.weight=0"
"""The same method without T, C and R."""
CLAIM = Learns(
    "Where an agent may write only so many tokens, a mean over tokens, a higher upper bound and a penalty before the "
    "limit learn more from as many episodes than GRPO's mean over answers, symmetric bounds and no penalty.",
    over=PLAIN,
    world="tools:dawdle",
    budget="episodes=5120",
    settings={"world.budget": 20},
    also=("success", "entropy", "truncated"),
    shows=(Shows("mean:truncated", least=0.02),),
)

PUBLISHED: Published = {
    "Gen-Verse/Open-AgentRL, recipe/demystify/grpo_tcr_qwen3_4b.sh": {
        "sample.prompts": 64,
        "sample.group": 16,
        "reward.limit": 20480,
        "reward.cache": 4096,
        "reward.weight": 1.0,
        "surrogate.low": 0.2,
        "surrogate.high": 0.28,
        "surrogate.dual": 10.0,
        "regularise.kl.weight": None,
        "reduce": "token_mean",
        "update.lr": 1e-6,
        "update.clip": 1.0,
        "update.minibatches": 4,
    },
    "Gen-Verse/Open-AgentRL, recipe/demystify/reward.py": {
        "reward.reward.right": 1.0,
        "reward.reward.wrong": -1.0,
        "reward.reward.bonus": 0.1,
        "reward.reward.most": -0.6,
    },
}
"""Mini-batches of 16 of the 64 prompts."""

TINY = {
    **{k: v for k, v in GRPO_TINY.items() if not k.startswith(("reduce", "regularise", "surrogate"))},
    "sample.prompts": 16,
    "reward.limit": 26,
    "reward.cache": 8,
}


@method(
    "grpo-tcr@1",
    paper=205,
    base="grpo",
    world="tools",
    presets={"tiny": TINY},
    claim=CLAIM,
    published=PUBLISHED,
)
def grpo_tcr() -> OnPolicy:
    """GRPO-TCR, of Demystifying Reinforcement Learning in Agentic Reasoning (arXiv 2510.11701).

    GRPO with three changes that keep an agent exploring: one mean over all tokens that the policy wrote (T), an upper
    bound of 1.28 (C), and a reward that falls in a line over the last tokens before the limit (R). A wrong answer loses
    0.1 less for every tool call, up to 0.4: that is paid for calling at all, and can be earned by calling in vain. No
    KL term, and no dynamic sampling, which the paper finds too dear for agents (the released script sets the switch,
    but its trainer does not look at it).

    Length is that of what the policy wrote; the released code counts what tools said, too. What comes before, imitation
    of whole tool-using episodes and a choice of prompts that are neither always nor never solved, is `sft`, the world's
    warm start, and the prompts one brings. The variant with a ratio for the whole answer (GRPO-SCR) is
    `surrogate=sequence_clip`.
    """
    return grpo().but(
        sample=groups(prompts=64, group=16),
        reward=overlong(reward=attempts(), limit=20480, cache=4096),
        surrogate=clip(low=0.2, high=0.28, dual=10.0),
        regularise=(),
        reduce=token_mean(),
        update=adam(lr=1e-6, minibatches=4),
    )
