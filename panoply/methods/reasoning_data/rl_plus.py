"""RL-PLUS: a teacher's answer in every group, weighed as if it came from a mixture."""

from __future__ import annotations

from panoply.evidence.claims import Learns, Shows
from panoply.methods.base.grpo import grpo
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import constant
from panoply.slots.regularise.terms import entropy
from panoply.slots.sample.taught import taught
from panoply.slots.surrogate.hybrid import hybrid
from panoply.slots.surrogate.ratios import ratio
from panoply.slots.update.optimisers import adam

TINY = {
    "sample.prompts": 16,
    "reduce.length": 32,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "update.minibatches": 1,
    "run.steps": 150,
}

CLAIM = Learns(
    "Where no group has a right answer and GRPO learns nothing, a teacher's answer in every group teaches what the "
    "policy could not find, from as many decisions.",
    race="wall",
    also=("success", "pass@16", "total_decisions", "teacher_p"),
    shows=(Shows("mean:degenerate_groups", least=0.9),),
)

PUBLISHED: Published = {
    "YihongDong/RL-PLUS, rl_plus/verl/verl/recipe/rlplus_core_alg.py": {
        "surrogate.shape": "mixture",
        "surrogate.guess": 1.0,
        "surrogate.focus": 0.5,
    },
    "YihongDong/RL-PLUS, exp_scripts/train_RL-PLUS.sh": {
        "sample.prompts": 128,
        "sample.group": 8,
        "sample.answers": 1,
        "sample.when": "always",
        "sample.temperature": 1.0,
        "credit.baseline": "mean",
        "credit.scale": "none",
        "surrogate.own": "ratio",
        "regularise.entropy.weight": 0.001,
        "regularise.kl.weight": None,
        "reduce": "constant",
        "reduce.length": 8192,
        "update.lr": 1e-6,
        "update.minibatches": 2,
    },
    "YihongDong/RL-PLUS, rl_plus/verl/verl/recipe/config/rlplus_ppo_trainer.yaml": {
        "update.clip": 1.0,
        "update.epochs": 1,
    },
}


@method(
    "rl-plus@1",
    paper=210,
    base="grpo",
    presets={"tiny": TINY},
    claim=CLAIM,
    published=PUBLISHED,
    tags=("teachers",),
)
def rl_plus() -> OnPolicy:
    """RL-PLUS (arXiv 2508.00222). Own rows: ρ·A; a teacher's: 2p/(p_old + ½(p_old + 1))·A·(1 − p)^½; one count for all.

    Groups of eight have one answer of a teacher's. Nobody knows how likely the teacher found it: that is guessed as the
    mean of the old policy's probability and of 1, and p is taken over the mean of the old policy and of that guess.
    This ratio is at most 4 and never explodes. An advantage counts the more the less likely the policy finds the token,
    by (1 − p)^½ without a gradient, so that what it knows already is not repeated.

    What is surprising: nothing is clipped, not the own rows either. The teacher is in every group, and falls silent by
    itself where all own answers are right, since the advantage is against the mean of all eight.

    The paper takes what knows nothing for a uniform policy, its code for 1 on every token, and so does this
    (`surrogate.guess`; 1/|V| is the paper's). The code averages the entropy bonus over tokens; here it is averaged as
    the rest is, over episodes with a constant length.
    """
    return grpo().but(
        sample=taught(prompts=128, group=8, answers=1, when="always"),
        credit=group(baseline="mean", scale="none"),
        surrogate=hybrid(own=ratio(), shape="mixture", focus=0.5),
        regularise=(entropy(weight=0.001),),
        reduce=constant(length=8192),
        update=adam(lr=1e-6, minibatches=2),
    )
