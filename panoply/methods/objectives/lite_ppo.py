"""Lite PPO: the mean of the group, the deviation of the batch, and one mean over tokens."""

from __future__ import annotations

from panoply.evidence.claims import Learns, Shows
from panoply.methods.base.grpo import grpo
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import token_mean
from panoply.slots.sample.groups import groups

TINY = {
    "sample.prompts": 16,
    "surrogate.high": 0.28,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "run.steps": 150,
}
CONTROL = {
    "sample.prompts": 4,
    "update.lr": 1e-3,
    "update.clip": 0.5,
    "update.epochs": 8,
    "update.minibatches": 4,
    "run.steps": 60,
    "run.evaluate_every": 10,
}


CLAIM = Learns(
    "Where nearly every prompt is easy, so that most groups are all right or have one answer wrong, dividing by the "
    "deviation of the batch learns more from as many answers than dividing by each group's own, which blows that one "
    "answer up.",
    race="skew",
    also=("success", "mean:gradient_norm", "mean:degenerate_groups"),
    shows=(Shows("mean:degenerate_groups", least=0.5),),
)


PUBLISHED: Published = {
    "arXiv 2508.08221": {
        "credit.baseline": "mean",
        "credit.scale": "batch_std",
        "reduce": "token_mean",
        "regularise.kl.weight": None,
    },
    "alibaba/ROLL, docs_roll/docs/User Guides/Algorithms/LitePPO.md": {
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
        "update.epochs": 1,
    },
    "alibaba/ROLL, roll/utils/functionals.py": {
        "credit.epsilon": 1e-6,
    },
}
"""ROLL's page also has settings that belong to all of its PPO: a KL term of 0.001, advantages that are whitened once
more and clipped at 2. The paper's Lite PPO has none of them, nor has this."""


@method(
    "lite-ppo@1",
    paper=67,
    base="grpo",
    presets={"tiny": TINY, "control": CONTROL},
    claim=CLAIM,
    published=PUBLISHED,
)
def lite_ppo() -> OnPolicy:
    """Lite PPO (arXiv 2508.08221). A = (R − mean_group(R)) / (std_batch(R) + ε), and one mean over all tokens.

    What is left of many tricks when each is tried alone. The group's mean is kept, since it says how hard a prompt is;
    the group's deviation is not: where 15 of 16 answers are right it is small, and makes one slip as loud as a prompt
    half solved. The batch's is that of all returns as they are, not of the differences. What is surprising: its
    advantages shrink when a batch holds prompts that are easier and harder than before, whatever the policy does in
    them (metric `reward_std`).

    Each side can be chosen: `credit.baseline` mean (the group's), batch_mean or none, `credit.scale` std (the group's),
    batch_std or none, `reduce` token_mean or sequence_mean, `surrogate.high`, and `select=overlong_filter`. What the
    paper advises, its thresholds retold from memory: batch_std, or none, where rewards of a group are nearly alike; a
    higher `surrogate.high` for aligned models, up to 0.32 for small ones and about 0.28 for 8B; token_mean for base
    models, while sequence_mean may suit aligned ones; overlong_filter for answers of up to about 8,000 tokens.
    """
    return grpo().but(
        sample=groups(prompts=128, group=8),
        credit=group(baseline="mean", scale="batch_std", epsilon=1e-6),
        regularise=(),
        reduce=token_mean(),
    )
