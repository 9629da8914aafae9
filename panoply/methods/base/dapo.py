"""Decoupled clip and dynamic sampling."""

from __future__ import annotations

from panoply.methods.base.grpo import grpo
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.reduce.averages import token_mean
from panoply.slots.reward.shaping import overlong, verdict
from panoply.slots.sample.dynamic import dynamic
from panoply.slots.schedule.schedules import constant
from panoply.slots.surrogate.ratios import clip
from panoply.slots.update.optimisers import adam

TINY = {
    "update.weight_decay": 0.0,
    "sample.prompts": 16,
    "sample.group": 8,
    "sample.rounds": 4,
    "reward.limit": 24,
    "reward.cache": 4,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "update.minibatches": 1,
    "run.steps": 150,
}


PUBLISHED: Published = {
    "arXiv 2503.14476, §4.1": {
        "sample.prompts": 512,
        "sample.group": 16,
        "reward.limit": 20480,
        "reward.cache": 4096,
        "surrogate.low": 0.2,
        "surrogate.high": 0.28,
        "update.lr": 1e-6,
        "update.schedule.warmup": 20,
        "update.minibatches": 16,
    },
    "arXiv 2503.14476, §2.3 and eq. 12": {
        "regularise.kl.weight": None,
        "reduce": "token_mean",
        "reward.reward.right": 1.0,
        "reward.reward.wrong": -1.0,
    },
    "volcengine/verl, recipe/dapo/run_dapo_qwen2.5_32b.sh": {
        "sample.rounds": 10,
        "sample.temperature": 1.0,
        "sample.top_p": 1.0,
        "update.weight_decay": 0.1,
        "update.clip": 1.0,
    },
}


@method("dapo@1", base="grpo", presets={"tiny": TINY}, published=PUBLISHED)
def dapo() -> OnPolicy:
    """DAPO (arXiv 2503.14476).

    GRPO with four changes: an upper bound of 1.28 lets rare tokens grow (clip-higher), every token weighs the same
    whatever its answer's length, prompts that all answers get right or wrong are replaced by others before learning,
    and answers near the length limit lose up to 1. There is no KL term.
    """
    return grpo().but(
        sample=dynamic(prompts=512, group=16),
        reward=overlong(reward=verdict(), limit=20480, cache=4096),
        surrogate=clip(low=0.2, high=0.28),
        regularise=(),
        reduce=token_mean(),
        update=adam(lr=1e-6, weight_decay=0.1, schedule=constant(warmup=20), minibatches=16),
    )
