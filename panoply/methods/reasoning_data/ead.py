"""EAD: exploratory annealed decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience
from panoply.methods.base.grpo import TINY, grpo
from panoply.parts import Finding, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import token_mean
from panoply.slots.sample.groups import LIMITS
from panoply.slots.surrogate.ratios import clip
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.rollout.text import Collector


def annealed_temperature(
    position: Tensor, hottest: float, coldest: float, warmup: int, scale: float
) -> Tensor:
    """τ_t = max(1 + τ_max − e^{t/d}, τ_min) from position `warmup` on, 1 before it."""
    falling = (1 + hottest - (position / scale).exp()).clamp(min=coldest)
    return torch.where(position < warmup, 1.0, falling)


def _inert(held: Any, method: Any) -> list[Finding]:
    found = [] if held.correction == "truncated" else [("cap", "only correction=truncated weighs decisions")]
    still = held.growth == 0 and held.scale <= held.longest_scale
    return [*found, ("longest_scale", "the scale does not grow (sample.growth=0)")] if still else found


@part(
    "sample",
    needs={"engine:heat"},
    inert=_inert,
    equation="{prompts} prompts × {group} episodes, τ_t = max(1 + {hottest} − e^(t/d), {coldest})",
    bounds={
        **LIMITS,
        "hottest": "from 0 to 100",
        "coldest": "from 0 to 100",
        "warmup": "at least 0",
        "scale": "above 0",
        "growth": "at least 0",
        "longest_scale": "above 0",
        "cap": "above 0",
    },
)
def annealed(
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    hottest: float = 1.2,
    coldest: float = 0.1,
    warmup: int = 10,
    scale: float = 500.0,
    growth: float = 100.0,
    longest_scale: float = 800_000.0,
    correction: Literal["annealed", "none", "truncated"] = "annealed",
    cap: float = 2.0,
) -> Experience:
    """Hot early tokens, cold late ones; the scale d grows by `growth` a step.

    correction: what the ratio is about. `annealed` scores under the temperatures sampled with, so the ratio starts at
    1; `none` forgets them, as the published default does: old and new log-probabilities are both at temperature 1;
    `truncated` does too, and weighs each decision by min(π_old/π_sampled, cap).
    scale, growth: in tokens as the published sampler uses them, twenty times the script's 25 and 5.
    """
    d = min(scale + growth * collect.version, longest_scale)

    def schedule(position: Tensor) -> Tensor:
        return annealed_temperature(position, hottest, coldest, warmup, d)

    sampled = collect.episodes(collect.tasks(prompts), group, temperature=schedule)
    if correction == "annealed" or "temperature" not in sampled:
        return sampled
    plain = sampled.without("temperature")
    with torch.no_grad():
        logp = collect.policy.score(plain)["logp"].cpu()
    forgotten = plain.with_columns(logp=logp)
    if correction == "none":
        return forgotten
    return forgotten.with_columns(weight=(logp - sampled["logp"]).exp().clamp(max=cap))


CLAIM = Learns(
    "Where the first tokens choose among right answers and the last ones carry it out, sampling hot early and cold "
    "late keeps more different right answers than temperature 1, and loses at most three points of success.",
    method="ead=ead:sample.scale=6",
    race="countdown",
    metric="distinct@16",
    keeps={"success": 0.03},
    also=("pass@16", "entropy"),
    shows=(Shows("success", least=0.5),),
    reworded="it was asked on seven different held-out numbers, and tuned by how many right answers differ, which "
    "took the rate that learns least.",
)


EAD_TINY = {
    **TINY,
    "sample.prompts": 16,
    "sample.warmup": 0,
    "sample.scale": 24.0,
    "sample.growth": 0.0,
    "update.weight_decay": 0.0,
    "update.minibatches": 1,
}
SCRIPT = "yangalan123/EAD-RLVR, recipe/ead/run_annealed_sampling.sh"
PUBLISHED: Published = {
    SCRIPT: {
        "sample.prompts": 1024,
        "sample.group": 8,
        "sample.hottest": 1.2,
        "sample.coldest": 0.1,
        "sample.warmup": 10,
        "surrogate.low": 0.2,
        "surrogate.high": 0.28,
        "regularise.kl.weight": None,
        "update.lr": 2e-6,
        "update.minibatches": 4,
    },
    "yangalan123/EAD-RLVR, verl/workers/rollout/vllm_rollout/annealed_sampling.py": {
        "sample.scale": 500.0,
        "sample.growth": 100.0,
        "sample.longest_scale": 800_000.0,
    },
    "yangalan123/EAD-RLVR, verl/trainer/config/ppo_trainer.yaml": {
        "sample.correction": "none",
        "surrogate.dual": 3.0,
        "reduce": "token_mean",
        "credit.scale": "std",
        "update.weight_decay": 0.01,
        "update.clip": 1.0,
        "update.epochs": 1,
    },
    "yangalan123/EAD-RLVR, verl/trainer/ppo/core_algos.py": {"credit.epsilon": 1e-6},
}
"""Of the script's three group sizes, 4, 8 and 16 with their learning rates, the middle one."""


@method("ead@1", paper=216, base="grpo", claim=CLAIM, presets={"tiny": EAD_TINY}, published=PUBLISHED)
def ead() -> OnPolicy:
    """Exploratory Annealed Decoding (arXiv 2510.05251). τ_t = max(1 + τ_max − e^{t/d}, τ_min); the rest is GRPO.

    Exploration where an answer's course is chosen, coherence where it is carried out. As published, learning forgets
    the temperatures: old and new log-probabilities are both at temperature 1 (`sample.correction` has two other ways).
    """
    return grpo().but(
        sample=annealed(prompts=1024, group=8, correction="none"),
        credit=group(epsilon=1e-6),
        surrogate=clip(low=0.2, high=0.28, dual=3.0),
        regularise=(),
        reduce=token_mean(),
        update=adam(lr=2e-6, weight_decay=0.01, minibatches=4),
    )
