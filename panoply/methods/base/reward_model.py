"""A reward model from preferences."""

from __future__ import annotations

from panoply.regimes import Dataset
from panoply.registry import Published, method
from panoply.slots.data.teacher import teacher_pairs
from panoply.slots.loss.values import bradley_terry
from panoply.slots.reduce.averages import token_mean
from panoply.slots.schedule.schedules import cosine
from panoply.slots.update.optimisers import adam

TINY = {
    "update.schedule": "linear",
    "update.lr": 1e-3,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "run.steps": 150,
}


PUBLISHED: Published = {
    "arXiv 2203.02155, appendix C.2": {
        "data.batch": 64,
        "update.lr": 9e-6,
        "update.schedule": "cosine",
        "update.schedule.end": 0.1,
    },
}


@method("reward-model@1", presets={"tiny": TINY}, published=PUBLISHED)
def reward_model() -> Dataset:
    """A Bradley–Terry reward model (InstructGPT, arXiv 2203.02155). −log σ(r_chosen − r_rejected).

    The policy's own decoder with one number in place of its vocabulary, read after the last token. What is measured
    held out is how often it orders a pair right; the run's model is a sequence classifier that transformers opens.
    """
    return Dataset(
        data=teacher_pairs(batch=64),
        losses=(bradley_terry(),),
        reduce=token_mean(),
        update=adam(lr=9e-6, schedule=cosine(end=0.1)),
    )
