"""LMRL-Gym: worlds of several turns with logs, the baselines that learn from them, and one table of all."""

from __future__ import annotations

from panoply.regimes import Dataset
from panoply.registry import method
from panoply.slots.data.log import log
from panoply.slots.loss.token_values import implicit_q, returned_q
from panoply.slots.model.token_values import token_values
from panoply.slots.reduce.averages import token_mean
from panoply.slots.update.optimisers import adam

TINY = {
    "update.lr": 2e-3,
    "losses.implicit_q.target": "ema:0.1",
    "run.steps": 200,
}


TAGS = ("data=scores", "feedback=environment", "reward=environment", "optimisation=value", "source=given", "granularity=token")


@method("ilql@1", world="maze", presets={"tiny": TINY}, tags=TAGS)
def ilql() -> Dataset:
    """ILQL."""
    return Dataset(
        data=log(),
        losses=(implicit_q(),),
        reduce=token_mean(),
        update=adam(lr=1e-4, beta2=0.95, clip=0.0),
        models=(token_values(),),
    )


@method("mc-returns@1", world="maze", presets={"tiny": {"update.lr": 2e-3, "run.steps": 150}}, tags=TAGS)
def mc_returns() -> Dataset:
    """MC."""
    return ilql().but(losses=(returned_q(),), models=(token_values(heads=1, v=False),))
