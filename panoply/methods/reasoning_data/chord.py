"""CHORD: on-policy learning beside off-policy experts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch

from panoply.batch import Batch, Values
from panoply.costs import Lengths, Tokens, own_episodes
from panoply.evidence.claims import Learns
from panoply.experience import Experience
from panoply.methods.base.grpo import TINY, grpo
from panoply.parts import Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.reduce.averages import token_mean
from panoply.slots.sample.groups import LIMITS

if TYPE_CHECKING:
    from panoply.rollout.text import Collector


@part(
    "schedule",
    equation="{valley} + up to {peak}: {warmup} steps up, {decay} down",
    bounds={
        "peak": "from 0 to 1",
        "valley": "from 0 to 1",
        "warmup": "at least 0",
        "hold": "at least 0",
        "decay": "at least 0",
    },
)
def peak_and_valley(
    step: int,
    total: int,
    *,
    peak: float = 0.9,
    valley: float = 0.05,
    warmup: int = 0,
    hold: int = 0,
    decay: int = 200,
) -> float:
    """A line up to `peak`, `hold` steps there, half a cosine down to `valley`, then constant."""
    if step < warmup:
        return peak * step / warmup
    fall = min(1.0, max(0, step - warmup - hold) / max(1, decay))
    return valley + (peak - valley) * 0.5 * (1 + math.cos(math.pi * fall))


@part("schedule", equation="1 − ({of})")
def complement(step: int, total: int, *, of: Part) -> float:
    """1 minus another schedule."""
    return 1.0 - float(of(step, total))


def _cost(held: Any, of: Lengths) -> Tokens:
    sampled, trained = own_episodes(held, of)
    return sampled, trained + held.experts * (of.prompt + of.context)


@part(
    "sample",
    equation="{prompts} prompts × {group} episodes and {experts} expert answers",
    needs={"world:reference"},
    bounds={**LIMITS, "experts": "at least 1", "pool": "at least 1"},
    gives={"stream:imitation"},
    cost=_cost,
)
def with_experts(
    collect: Collector,
    *,
    prompts: int = 32,
    group: int = 8,
    experts: int = 64,
    pool: int = 5000,
    temperature: float = 1.0,
) -> Experience:
    """Own episodes, and expert answers to other tasks, drawn from a fixed pool: two streams in one batch."""
    own = collect.episodes(collect.tasks(prompts), group, temperature=temperature)
    return Experience.mix([own, collect.references(experts, pool)])


@part(
    "regularise",
    equation="−φ(p)·log π on expert tokens, φ = {focus}",
    stream="imitation",
    scores="policy",
    bounds={"weight": "at least 0"},
)
def focused_imitation(
    batch: Batch, *, weight: float | Part = 0.1, focus: Literal["1", "p", "p(1-p)"] = "p(1-p)"
) -> Values:
    """Imitate expert tokens that are neither known already nor quite alien: φ is largest at p = ½."""
    logp = batch.now["logp"]
    p = logp.detach().exp()
    phi = {"1": torch.ones_like(p), "p": p, "p(1-p)": p * (1 - p)}[focus]
    return -phi * logp, {"expert_p": p}


MU = peak_and_valley(peak=0.9, valley=0.05, decay=200)


def _mix(**settings: float) -> str:
    """CHORD with another schedule for μ, and every expert token weighing the same."""
    paths = ("surrogate.weight.of", "regularise.focused_imitation.weight")
    words = [f"{path}.{name}={value}" for path in paths for name, value in settings.items()]
    return "imitation first=chord:" + ",".join([*words, "regularise.focused_imitation.focus=1"])


CLAIM = Learns(
    "With few expert answers at hand, mixing imitation and trial by a falling weight gets further in as many steps "
    "than imitating first and trying afterwards.",
    method="chord=chord:sample.pool=64,surrogate.weight.of.decay=30,regularise.focused_imitation.weight.decay=30",
    over=_mix(peak=1, valley=0, hold=10, decay=1) + ",sample.pool=64",
    world="chain",
    budget="steps=30",
    metric="success",
    settings={"world.levels": (3, 4)},
    also=("area", "entropy"),
    reworded="it held by a hundredth at a success of 0.95, where nothing is left to be gained.",
)


CHORD_TINY = {
    **TINY,
    "sample.prompts": 16,
    "sample.experts": 32,
    "sample.pool": 256,
    "surrogate.weight.of.decay": 60,
    "regularise.focused_imitation.weight.decay": 60,
}
MU_OF = "regularise.focused_imitation.weight"
PUBLISHED: Published = {
    "modelscope/Trinity-RFT, examples/mix_chord/mix_chord.yaml": {
        "sample.prompts": 32,
        "sample.group": 8,
        "sample.experts": 64,
        "sample.temperature": 1.0,
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
        "regularise.kl.weight": None,
        f"{MU_OF}.peak": 0.9,
        f"{MU_OF}.valley": 0.05,
        f"{MU_OF}.warmup": 0,
        f"{MU_OF}.decay": 200,
        "regularise.focused_imitation.focus": "p(1-p)",
    },
    "arXiv 2508.11408, §4.1": {"sample.pool": 5000, "update.lr": 1e-6},
}
"""μ as that file says it is for CHORD-μ, and φ as for CHORD-φ."""


@method(
    "chord@1",
    paper=157,
    base="grpo",
    claim=CLAIM,
    presets={"tiny": CHORD_TINY},
    published=PUBLISHED,
)
def chord() -> OnPolicy:
    """CHORD (arXiv 2508.11408). L = (1 − μ)·GRPO on own episodes + μ·SFT-φ on experts' answers.

    Each part is averaged over its own decisions, so μ is a true mixing weight. This is CHORD-μ with φ on; the paper's
    CHORD-φ is μ = 0.1 throughout, its CHORD-μ has φ = 1.
    """
    return grpo().but(
        sample=with_experts(),
        surrogate=grpo().surrogate.but(weight=complement(of=MU)),
        regularise=(focused_imitation(weight=MU, focus="p(1-p)"),),
        reduce=token_mean(),
    )
