"""Behaviour cloning."""

from __future__ import annotations

from panoply.regimes import Dataset
from panoply.registry import Published, method
from panoply.slots.data.logged import logged
from panoply.slots.loss.imitation import nll
from panoply.slots.reduce.averages import token_mean
from panoply.slots.update.optimisers import adam

CONTROL = {
    "policy.hidden": (256, 256),
    "policy.activation": "relu",
    "policy.head": "bounded",
    "run.steps": 20,
    "run.evaluate_every": 5,
    "run.checkpoint_every": 5,
}


PUBLISHED: Published = {
    "d3rlpy 2.8": {
        "update.lr": 0.001,
        "control:policy.hidden": (256, 256),
        "control:policy.activation": "relu",
    },
}


@method(
    "bc@1",
    base="sft",
    presets={"control": CONTROL},
    world="logged:pendulum-expert",
    published=PUBLISHED,
)
def bc() -> Dataset:
    """Behaviour cloning (Pomerleau 1988): supervised fine-tuning on logged actions, good and bad alike.

    A step of the run is one pass over the data.
    """
    return Dataset(
        data=logged(),
        losses=(nll(),),
        reduce=token_mean(),
        update=adam(lr=1e-3, clip=0.0, minibatches=80),
    )
