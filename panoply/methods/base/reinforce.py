"""REINFORCE."""

from __future__ import annotations

from panoply.regimes import OnPolicy
from panoply.registry import method
from panoply.slots.credit.moving import moving_baseline
from panoply.slots.reduce.averages import sequence_sum
from panoply.slots.reward.signals import signal
from panoply.slots.sample.groups import groups
from panoply.slots.surrogate.ratios import log_likelihood
from panoply.slots.update.optimisers import adam

TINY = {"update.lr": 3e-4, "update.beta2": 0.95, "update.schedule.warmup": 10, "run.steps": 150}
CONTROL = {"sample.prompts": 16, "update.lr": 5e-3, "run.steps": 200}


@method("reinforce@1", presets={"tiny": TINY, "control": CONTROL})
def reinforce() -> OnPolicy:
    """REINFORCE with a moving baseline (Williams 1992).

    The plain policy gradient: each episode's log-probability, weighted by what it earned above the recent average.
    """
    return OnPolicy(
        sample=groups(prompts=128, group=1),
        reward=signal(),
        credit=moving_baseline(decay=0.9),
        surrogate=log_likelihood(),
        reduce=sequence_sum(),
        update=adam(lr=1e-6),
    )
