"""Simple Preference Optimization."""

from __future__ import annotations

from panoply.methods.base.dpo import TINY as DPO_TINY
from panoply.methods.base.dpo import dpo
from panoply.regimes import Dataset
from panoply.registry import Published, method
from panoply.slots.data.teacher import teacher_pairs
from panoply.slots.loss.pairs import logistic
from panoply.slots.schedule.schedules import cosine
from panoply.slots.update.optimisers import adam

TINY = {"update.schedule": "constant", **DPO_TINY, "data.batch": 64, "update.lr": 3e-5}


PUBLISHED: Published = {
    "princeton-nlp/SimPO, training_configs/llama-3-8b-base-simpo.yaml": {
        "data.batch": 128,
        "losses.logistic.beta": 2.0,
        "losses.logistic.gamma": 1.0,
        "update": "adam",
        "update.lr": 6e-7,
        "update.schedule": "cosine",
        "update.schedule.warmup": 0.1,
    },
    "arXiv 2405.14734, eq. 6": {"losses.logistic.per_token": True, "losses.logistic.to": None},
}


@method("simpo@1", base="dpo", presets={"tiny": TINY}, published=PUBLISHED)
def simpo() -> Dataset:
    """Simple Preference Optimization (arXiv 2405.14734).

    −log σ(β·(mean log π(chosen) − mean log π(rejected)) − γ): the score is the one that decoding maximises, the mean
    log-probability of a token, so there is no reference and no gain from length; the chosen side must lead by γ.
    Nothing but the learning rate holds the policy near its start. Numbers as for Llama-3-Base.
    """
    return dpo().but(
        data=teacher_pairs(batch=128),
        losses=(logistic(beta=2.0, gamma=1.0, to=None, per_token=True),),
        update=adam(lr=6e-7, schedule=cosine(warmup=0.1)),
    )
