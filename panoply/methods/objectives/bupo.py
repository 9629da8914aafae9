"""Bottom-up Policy Optimization: at first an inner layer's policy learns, then the whole one."""

from __future__ import annotations

from typing import Any, Literal

from panoply.batch import Batch, Values
from panoply.evidence.claims import Ranks
from panoply.methods.base.grpo import TINY as GRPO_TINY
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import token_mean
from panoply.slots.sample.groups import groups
from panoply.slots.surrogate.phases import in_phases
from panoply.slots.surrogate.ratios import STAYS, clip, stays_at_one
from panoply.slots.update.optimisers import adam


def _read(held: Any) -> str:
    """The output that is the inner policy's log-probability."""
    return f"logp:{held.block}:{held.norm}"


def _inert(held: Any, method: Any) -> list[Finding]:
    still = stays_at_one("old", method)
    return [(name, STAYS) for name in ("low", "high", "dual")] if still else []


@part(
    "surrogate",
    equation=lambda held: (
        f"min(ρA, clip(ρ, {1 - held.low:g}, {1 + held.high:g})·A), ρ = π^{held.block}/π^{held.block}_old of block "
        f"{held.block}"
    ),
    idle="advantage",
    needs=lambda held: frozenset({_read(held), f"{_read(held)}@old"}),
    inert=_inert,
    bounds={
        "block": "at least 1",
        "low": "from 0 to 1",
        "high": "at least 0",
        "dual": "above 1",
        "weight": "above 0",
    },
)
def inner_clip(
    batch: Batch,
    *,
    block: int = 6,
    norm: Literal["raw", "normed"] = "raw",
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    weight: float | Part = 1.0,
) -> Values:
    """PPO's bounded ratio of the policy that a layer is by itself: π^k = softmax(E·h^k / T) (arXiv 2512.19673).

    h^k is the state after k blocks and E the output weights. Both log-probabilities of the ratio are of that one layer,
    now and before the step's first update; a ratio to what was recorded while sampling would be of two policies.
    Gradients reach the blocks up to k and E, and with tied embeddings the input's too; what is above k stands still.

    block: k, counted from 1
    norm: `raw` reads h^k as it is, like the released code; `normed` through the final norm, which E is used to
    """
    read = f"logp:{block}:{norm}"
    inside = Batch(
        batch.experience.with_columns(logp=batch[f"{read}@old"]), {**batch.now, "logp": batch.now[read]}
    )
    value, stats = clip(low=low, high=high, dual=dual)(inside)
    return value, {**stats, "logp_gap": batch.log_ratio("behaviour").detach().abs()}


TINY = {
    **{
        path: value
        for path, value in GRPO_TINY.items()
        if path not in ("surrogate.high", "reduce", "regularise.kl")
    },
    "sample.prompts": 16,
    "surrogate.first.block": 1,
    "surrogate.steps": 15,
    "update.minibatches": 1,
}
"""The starts of most worlds have two layers; a tenth of the steps is the first phase, as published."""
PUBLISHED: Published = {
    "Trae1ounG/BuPO, run_code/BuPO_qwen3.sh": {
        "sample.prompts": 128,
        "sample.group": 8,
        "sample.temperature": 1.0,
        "surrogate.first.block": 6,
        "surrogate.first.low": 0.2,
        "surrogate.first.high": 0.2,
        "surrogate.first.dual": 10.0,
        "surrogate.then.low": 0.2,
        "surrogate.then.high": 0.2,
        "surrogate.then.dual": 10.0,
        "surrogate.steps": 30,
        "reduce": "token_mean",
        "regularise.kl.weight": None,
        "update.lr": 1e-6,
        "update.clip": 1.0,
        "update.minibatches": 4,
    },
    "Trae1ounG/BuPO, verl/models/custom_model/modeling_qwen3.py": {"surrogate.first.norm": "raw"},
}
"""The script counts blocks from 0, so its 5 is block 6; runs have 300 steps."""
CLAIM = Ranks(
    "With a model of four layers, learning in the policy of the first for a tenth of the steps loses at most two "
    "hundredths of the area against GRPO, and learns more than with two thirds of the steps spent there.",
    ("bupo=bupo:surrogate.steps=6", "grpo", "too long=bupo:surrogate.steps=40"),
    "chain:deep",
    "episodes=7680",
    leads=True,
    margins=(0.02, 0.0),
    also=("success", "mean:entropy", *(f"world:entropy@{k}" for k in range(1, 5))),
)


@method("bupo@1", paper=65, base="grpo", presets={"tiny": TINY}, claim=CLAIM, published=PUBLISHED)
def bupo() -> OnPolicy:
    """Bottom-up Policy Optimization (arXiv 2512.19673): a layer inside of a model is a policy, too, and learns first.

    Any state of the residual stream can be read through the output weights, π^k = softmax(E·h^k / T). Answers are
    always those of the whole model; in the first steps their advantages teach π^k, the policy of an early layer, by a
    ratio of its own, and from then on the whole policy, as in GRPO. The features that the upper layers build on are
    changed first.

    What is surprising: in the first phase the policy that acts is not the one that is improved, and gets better, if at
    all, because later layers share what lies below them; with too many such steps it falls apart. The released code
    reads the state without the final norm, under which logits have another size: `surrogate.first.norm`. How the
    entropy of π^k falls with depth, `world.measure("entropy@K", policy)` measures; policies of attention and of
    feed-forward layers alone are not built. Which block is early depends on the model, `surrogate.first.block`: 6 is
    published for 36.
    """
    return grpo().but(
        sample=groups(prompts=128, group=8),
        credit=group(epsilon=1e-6),
        surrogate=in_phases(first=inner_clip(dual=10.0), then=clip(dual=10.0), steps=30),
        regularise=(),
        reduce=token_mean(),
        update=adam(lr=1e-6, minibatches=4),
    )
