"""Direct Preference Optimization."""

from __future__ import annotations

from panoply.regimes import Dataset
from panoply.registry import Published, method
from panoply.slots.data.teacher import teacher_pairs
from panoply.slots.loss.pairs import logistic
from panoply.slots.reduce.averages import token_mean
from panoply.slots.schedule.schedules import constant
from panoply.slots.update.optimisers import rmsprop

TINY = {
    "update": "adam",
    "update.lr": 3e-5,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "run.steps": 150,
}


PUBLISHED: Published = {
    "arXiv 2305.18290, appendix B": {
        "data.batch": 64,
        "losses.logistic.beta": 0.1,
        "update": "rmsprop",
        "update.lr": 1e-6,
        "update.schedule.warmup": 150,
    },
    "eric-mitchell/direct-preference-optimization, config/config.yaml": {"update.clip": 10.0},
    "torch.optim.RMSprop, as that code calls it": {"update.decay": 0.99, "update.epsilon": 1e-8},
}


@method("dpo@1", presets={"tiny": TINY}, published=PUBLISHED)
def dpo() -> Dataset:
    """Direct Preference Optimization (arXiv 2305.18290).

    The policy itself is the reward model: β·log π/π_ref. Its pairwise likelihood is raised on given preferences,
    which maximises reward under a KL constraint to the reference without sampling. The paper's optimiser is
    RMSprop.
    """
    return Dataset(
        data=teacher_pairs(batch=64),
        losses=(logistic(beta=0.1),),
        reduce=token_mean(),
        update=rmsprop(lr=1e-6, epsilon=1e-8, clip=10.0, schedule=constant(warmup=150)),
    )
