"""Supervised fine-tuning."""

from __future__ import annotations

from panoply.regimes import Dataset
from panoply.registry import method
from panoply.slots.data.teacher import demonstrations
from panoply.slots.loss.imitation import nll
from panoply.slots.reduce.averages import token_mean
from panoply.slots.schedule.schedules import linear
from panoply.slots.update.optimisers import adam

TINY = {
    "update.lr": 2e-3,
    "update.beta2": 0.95,
    "update.schedule.warmup": 50,
    "update.schedule.start": 0.7,
    "run.steps": 1000,
}


@method("sft@1", presets={"tiny": TINY})
def sft() -> Dataset:
    """Supervised fine-tuning: imitation by maximum likelihood, on the decisions alone (prompts do not learn)."""
    return Dataset(
        data=demonstrations(batch=128),
        losses=(nll(),),
        reduce=token_mean(),
        update=adam(lr=2e-5, schedule=linear()),
    )
