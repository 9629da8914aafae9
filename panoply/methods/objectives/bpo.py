"""Bounded Policy Optimization, and its form for groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.evidence.claims import Learns, Shows
from panoply.methods.base.grpo import CONTROL as GRPO_CONTROL
from panoply.methods.base.grpo import TINY as GRPO_TINY
from panoply.methods.base.grpo import grpo
from panoply.methods.base.ppo import CARTPOLE as PPO_CARTPOLE
from panoply.methods.base.ppo import ppo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.gae import gae
from panoply.slots.credit.groups import episode_returns, group
from panoply.slots.loss.values import smooth_pinball, squared_value
from panoply.slots.model import values
from panoply.slots.reduce.averages import token_mean
from panoply.slots.regularise.terms import kl
from panoply.slots.sample.groups import groups
from panoply.slots.schedule.schedules import cosine
from panoply.slots.surrogate.ratios import needs_against, ratio_stats
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.loops.seat import Seat
    from panoply.slots.model.model import Model

BAND = {"low": "from 0 up to 1", "high": "at least 0", "temperature": "above 0"}


def _aim(above: Tensor, low: float, high: float) -> Tensor:
    """What a ratio is pulled to: 1 + high above the median, 1 − low below, and softly in between."""
    return 1 - low + (low + high) * torch.sigmoid(above)


def _pulled(batch: Batch, advantage: Tensor, aim: Tensor, low: float, high: float, against: str) -> Values:
    """−|A|·|ρ − aim|."""
    ratio = batch.log_ratio(against).exp()
    now = ratio.detach()
    stats = {"band_high": now > 1 + high, "band_low": now < 1 - low, "off_aim": (now - aim).abs()}
    return -advantage.abs() * (ratio - aim).abs(), {**ratio_stats(batch, against), **stats}


def _needs(held: Any) -> frozenset[str]:
    return needs_against(held) | {
        "column:target",
        "column:median" if held.centre == "median" else "column:value",
    }


def _gives_median(method: Any) -> bool:
    return any("column:median" in held.info.gives for _, held in method.parts())


def _equation(held: Any) -> str:
    middle = {"auto": "m", "median": "median Q", "value": "V"}[held.centre]
    edges = f"1 − {held.low:g} + {held.low + held.high:g}·σ((Q − {middle})/{held.temperature:g})"
    return f"−|A|·|ρ − ({edges})|" + (",  m = median Q, or V" if held.centre == "auto" else "")


def _inert(held: Any, method: Any) -> list[Finding]:
    found = []
    if held.centre == "auto" and not _gives_median(method):
        found.append(("centre", "nothing here gives a median of Q (models=bpo does), so V stands in for it"))
    if all(held.settings().get("update") is not None for held in method.models):
        found.append(
            ("at", "the critic learns on its own (models.NAME.update), so it stands still in a step")
        )
    return found


@part(
    "surrogate",
    equation=_equation,
    idle="advantage",
    needs=_needs,
    inert=_inert,
    bounds={**BAND, "weight": "above 0"},
)
def bounded_ratio(
    batch: Batch,
    *,
    low: float = 0.3,
    high: float = 0.3,
    temperature: float = 1e-3,
    centre: Literal["auto", "median", "value"] = "auto",
    at: Literal["now", "collection"] = "now",
    against: str = "behaviour",
    weight: float | Part = 1.0,
) -> Values:
    """Regress the ratio on the best that a band allows: 1 + ε above the median of Q, 1 − ε below (arXiv 2604.18578).

    Unlike a clipped ratio it is pulled back from outside of the band. The gradient has the same size however near the
    aim is, so ratios tremble about it by what one step moves them.

    low, high: how far the band goes below and above 1
    temperature: of Q − median, over which the aim goes from one edge to the other
    centre: what Q is compared with: its `median`, or its mean V(s) (`value`, which loses the guarantee); `auto` is
            the median where a critic gives one, else V
    at: whose word on median and V counts. `now`: that of the critic as it is in each mini-batch, so that A is Q − V of
        now, as in the released code, wherever the critic learns with the policy; `collection`: that of the critic
        when the batch was collected, and the column `advantage`
    """

    def judged(name: str) -> Tensor:
        return batch.now[name].detach() if at == "now" and name in batch.now else batch[name]

    middle = judged("median" if centre != "value" and "median" in batch else "value")
    aim = _aim((batch["target"] - middle) / temperature, low, high)
    live = at == "now" and "value" in batch.now
    advantage = batch["target"] - judged("value") if live else batch["advantage"]
    return _pulled(batch, advantage, aim, low, high, against)


_VALUE, _MEDIAN = squared_value(), smooth_pinball()


@part(
    "model",
    equation="V(s) and the median of Q(s, ·), two outputs of a network beside the policy",
    gives={"column:value", "column:median"},
    impossible=values.impossible,
    bounds={"warmup": "at least 0"},
    cost=lambda held: held.update,
)
def median_critic(
    seat: Seat, *, loss: Part = _VALUE, median: Part = _MEDIAN, update: Part | None = None, warmup: int = 0
) -> Model:
    """A critic with a second output: adds the columns `value` and `median`, and regresses both on `target`.

    median   what the second output descends
    update   how it learns, or `none`: with the policy, in one backward pass and one optimiser step
    warmup   steps in which it learns alone
    """
    return values.made(seat, (loss, median), update, warmup, ("value", "median"))


TINY = {
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.epochs": 2,
    "update.minibatches": 2,
    "models.median_critic.update.lr": 1e-3,
    "run.steps": 200,
}
CONTROL = {
    "sample": "rollout",
    "sample.envs": 1,
    "sample.length": 2048,
    "credit.gamma": 0.99,
    "update.lr": 3e-4,
    "update.epochs": 10,
    "update.minibatches": 32,
    "models.median_critic.update": None,
    "policy.hidden": (256, 256),
    "policy.activation": "relu",
    "run.steps": 500,
    "run.evaluate_every": 10,
}
"""The released code's for MuJoCo: critic and policy learn together."""
CARTPOLE = {
    **{k: v for k, v in PPO_CARTPOLE.items() if not k.startswith("models.")},
    "models.median_critic.update": None,
}
"""PPO's numbers for CartPole-v1 (RL Baselines3 Zoo's)."""
PUBLISHED: Published = {
    "released code, cfgs/algo/bpo/mujoco.yaml": {
        "surrogate.low": 0.3,
        "surrogate.high": 0.3,
        "surrogate.temperature": 1e-3,
        "credit.lam": 0.95,
        "update.clip": 1.0,
        "models.median_critic.loss.weight": 1.0,
        "models.median_critic.median.weight": 0.5,
        "control:sample.length": 2048,
        "control:sample.envs": 1,
        "control:credit.gamma": 0.99,
        "control:update.lr": 3e-4,
        "control:update.epochs": 10,
        "control:update.minibatches": 32,
        "control:policy.hidden": (256, 256),
        "control:policy.activation": "relu",
    },
    "released code, src/sb3/BPO.py": {
        "surrogate.at": "now",
        "surrogate.centre": "auto",
        "credit.normalise": False,
        "control:models.median_critic.update": None,
    },
}
"""½·error² with weight 1 is the code's 0.5·error². On language the authors have GBPO alone; the numbers are PPO's."""


CLAIM = Learns(
    "With forty passes over each batch fewer decisions end up outside of 1 ± 0.2 than under PPO's clip, and the return "
    "is no lower.",
    over="ppo",
    world="cartpole",
    budget="decisions=25600",
    metric="mean:end_ratio_off",
    lower=True,
    best=0.0,
    settings={
        "update.epochs": 40,
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
        "run.held_out": 100,
    },
    tune={},
    fixed="both sides have the numbers RL Baselines3 Zoo tuned PPO to: tuned for ratios the smallest steps would win",
    shows=(Shows("mean:end_ratio_off", least=0.05),),
    keeps={"success": 25.0},
    also=("mean:end_ratio_max", "area"),
)


@method(
    "bpo@1",
    paper=33,
    base="ppo",
    presets={"tiny": TINY, "control": CONTROL, "cartpole": CARTPOLE},
    claim=CLAIM,
    published=PUBLISHED,
)
def bpo() -> OnPolicy:
    """Bounded Policy Optimization (arXiv 2604.18578). −|A|·|ρ − (1 ± ε)|.

    Of all policies whose ratio stays within 1 ± ε the best one takes every action above the median of Q with 1 + ε and
    every one below with 1 − ε. PPO's clip goes by the sign of A instead, Q against its mean, and lets go of a ratio
    that has left the band; here the ratio is regressed on that optimum, by a critic that learns the median beside V.
    Where the critic learns with the policy, as in control, median and V are those of every mini-batch anew. The authors
    did not try it on language: there the sizes of batches and steps are PPO's, and its critic learns on its own.
    """
    return ppo().but(
        credit=gae(gamma=1.0, lam=0.95, normalise=False),
        surrogate=bounded_ratio(low=0.3, high=0.3),
        update=adam(lr=1e-6, clip=1.0, epochs=4, minibatches=4),
        models=(median_critic(update=adam(lr=1e-5, epochs=4, minibatches=4)),),
    )


# ------------------------------------------------------------------ groups


def _alone(held: Any, method: Any) -> list[Finding]:
    if method.sample.settings().get("group", 1) > 1:
        return []
    return [("", "it needs other episodes of a group to compare one with, and every group is one episode")]


@part(
    "surrogate",
    equation=lambda held: (
        f"−|A|·|ρ − (1 − {held.low:g} + {held.low + held.high:g}·σ((R − median R)/({held.temperature:g}·std R)))|"
        " over the group"
    ),
    idle="advantage",
    needs=lambda held: needs_against(held) | {"whole:group"},
    impossible=_alone,
    bounds={**BAND, "epsilon": "from 0 to 1", "weight": "above 0"},
)
def group_bounded_ratio(
    batch: Batch,
    *,
    low: float = 0.3,
    high: float = 0.3,
    temperature: float = 1e-4,
    epsilon: float = 1e-6,
    against: str = "behaviour",
    weight: float | Part = 1.0,
) -> Values:
    """`bounded_ratio` without a critic: an episode's return against the median of its group, in deviations.

    Where more than half of a group earned the same, that is the median, and those episodes are pulled to the middle of
    the band: to where their ratio is before the first update. Of |ρ − 1| at ρ = 1 rounding alone decides the sign, so
    that sums in another order (other micro-batches, several learners) part by some percent from the second update on.

    low, high: how far the band goes below and above 1
    temperature: of deviations from the median, over which the aim goes from one edge to the other
    epsilon: added to the deviation
    """
    returns, peers = episode_returns(batch.experience)
    deviation = peers.rows(peers.std(returns).nan_to_num()) + epsilon
    above = (returns - peers.rows(peers.median(returns))) / (deviation * temperature)
    aim = batch.by("episode").rows(_aim(above, low, high))
    return _pulled(batch, batch["advantage"], aim, low, high, against)


GROUP_TINY = {
    "update.schedule": "constant",
    **{k: v for k, v in GRPO_TINY.items() if k not in ("surrogate.high", "reduce")},
    "sample.prompts": 16,
    "update.epochs": 4,
    "update.minibatches": 1,
}
GROUP_CONTROL = {
    "update.schedule": "constant",
    **{k: v for k, v in GRPO_CONTROL.items() if k != "reduce"},
}
GROUP_PUBLISHED: Published = {
    "released code, ttrl/Qwen2.5-Math/amc.sh": {
        "surrogate.low": 0.3,
        "surrogate.high": 0.3,
        "surrogate.temperature": 1e-4,
        "sample.prompts": 8,
        "sample.group": 32,
        "sample.temperature": 1.0,
        "update.lr": 5e-7,
        "update.schedule": "cosine",
        "update.epochs": 10,
        "update.minibatches": 4,
    },
    "released code, src/verl/trainer/config/ppo_trainer.yaml": {
        "reduce": "token_mean",
        "regularise.kl.weight": 1e-3,
        "regularise.kl.estimator": "k3",
        "update.clip": 1.0,
    },
    "released code, src/verl/trainer/ppo/core_algos.py": {
        "surrogate.epsilon": 1e-6,
        "credit.epsilon": 1e-6,
        "credit.scale": "std",
    },
}
"""The code also warms the rate up over 3 % of the run; here warm-ups are counted in steps (update.schedule.warmup)."""


GROUP_CLAIM = Learns(
    "With eight passes over each batch of answers, paid by the share of right steps, GBPO learns more than GRPO does "
    "with as many.",
    over="grpo",
    world="chain",
    budget="episodes=1920",
    settings={"update.epochs": 8, "reward.name": "steps"},
    tune={},
    fixed="eight passes at GRPO's rate for tiny models are the regime: a baseline free to choose its rate leaves it",
    also=("success", "mean:end_ratio_off", "mean:end_ratio_max"),
    reworded="it failed with rewards of 0 and 1, where the median of a group is what most of its answers earned, and "
    "those have no advantage to be pulled by.",
)


@method(
    "gbpo@1",
    paper=33,
    base="grpo",
    presets={"tiny": GROUP_TINY, "control": GROUP_CONTROL},
    claim=GROUP_CLAIM,
    published=GROUP_PUBLISHED,
)
def gbpo() -> OnPolicy:
    """Group Bounded Policy Optimization (arXiv 2604.18578): BPO with GRPO's groups in place of the critic.

    The ratio of every token of an answer is pulled to 1 + ε where the answer earned more than the median of its group,
    to 1 − ε where less, with the weight of its advantage's size. Made for many epochs on one batch.
    """
    return grpo().but(
        sample=groups(prompts=8, group=32),
        credit=group(baseline="mean", scale="std", epsilon=1e-6),
        surrogate=group_bounded_ratio(low=0.3, high=0.3),
        regularise=(kl(weight=1e-3, estimator="k3"),),
        reduce=token_mean(),
        update=adam(lr=5e-7, epochs=10, minibatches=4, schedule=cosine()),
    )
