"""Rotary positions: how many radians each pair of dimensions turns from one position to the next.

They are rounded as transformers rounds them: at position 100,000 the last bit of the fastest is 0.01 radians.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from panoply.errors import PanoplyError

TYPES = ("default", "linear", "llama3", "yarn", "longrope")
NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "factor", "original_max_position_embeddings"),
}
"""What each kind of scaling must say."""


def plain(size: int, base: float) -> Tensor:
    """Without scaling: base^(−2i / size) for pair i of the dimensions that are turned."""
    return 1.0 / _periods(size, base)


def _periods(size: int, base: float) -> Tensor:
    """How many positions a radian takes."""
    steps = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    return base**steps


class Positions(Protocol):
    """What is asked of a model's config here."""

    @property
    def max_positions(self) -> int: ...


def reach(scaling: Mapping[str, Any], longest: int) -> tuple[int, int]:
    """How many tokens a sequence may have where nothing else is asked for, and at most.

    `longest` is what `max_position_embeddings` says. With YaRN that is often still the length before it was stretched.
    With longrope a sequence beyond the original length turns by other factors: that has to be asked for.
    """
    kind, original = scaling.get("rope_type"), int(scaling.get("original_max_position_embeddings") or longest)
    if kind == "longrope":
        return min(longest, original), longest
    if kind == "yarn":
        longest = max(longest, round(original * float(scaling.get("factor") or 1.0)))
    return longest, longest


def positions(scaling: Mapping[str, Any], longest: int, context: int) -> int:
    """The longest sequence: what is asked for, if the model's positions reach so far, or what it was made for."""
    usual, most = reach(scaling, longest)
    if context > most:
        raise PanoplyError(f"The model reads at most {most:,} tokens: a context of {context:,} is too long.")
    return context or usual


def wider(config: Positions) -> str:
    """What to say where a sequence is too long for a model that could be opened for longer ones."""
    most = int(getattr(config, "most_positions", 0))
    if most <= config.max_positions:
        return ""
    return (
        f" It can be up to {most:,}, by other factors of its positions: ask for N tokens with --set policy.context=N "
        "(train), or --context N (sample, eval, serve)."
    )


def scaled(size: int, base: float, scaling: Mapping[str, Any], positions: int) -> tuple[Tensor, float]:
    """By `rope_type` and its numbers, for sequences of so many positions; with them the factor on cosine and sine."""
    kind, unscaled = str(scaling.get("rope_type", "default")), plain(size, base)
    try:
        if kind == "linear":
            return unscaled / float(scaling["factor"]), 1.0
        if kind == "llama3":
            return _llama3(unscaled, scaling), 1.0
        if kind == "yarn":
            return _yarn(_periods(size, base), base, scaling)
        if kind == "longrope":
            return _longrope(_periods(size, base), scaling, positions)
    except (KeyError, TypeError) as missing:
        names = ", ".join(NEEDED[kind]) if isinstance(missing, TypeError) else missing
        raise PanoplyError(f"Rotary scaling '{kind}' needs {names} in config.json.") from None
    return unscaled, 1.0


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    if not low < high:
        raise PanoplyError(
            f"Rotary scaling 'llama3' needs low_freq_factor below high_freq_factor, not {low:g} and {high:g}."
        )
    turns = float(scaling["original_max_position_embeddings"]) / (2 * math.pi / plain)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * plain / factor + keep * plain


def _longrope(periods: Tensor, scaling: Mapping[str, Any], positions: int) -> tuple[Tensor, float]:
    """Each pair divided by a number of its own: of the short factors, or the long ones.

    transformers looks at the longest sequence of a batch, and turns all of it by the long factors where that is beyond
    the original length. A sequence that grows past it while it is sampled would then have keys of both kinds, and be
    scored by others than it was sampled with. Here, as in vLLM, the length that was asked for decides, for all.
    """
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    factors = {name: scaling[f"{name}_factor"] for name in ("short", "long")}
    for name, each in factors.items():
        if len(each) != len(periods):
            raise PanoplyError(
                f"Rotary scaling 'longrope' has {len(each)} {name} factors for {len(periods)} pairs of dimensions."
            )
    each = torch.tensor(
        factors["long" if positions > original else "short"], dtype=torch.float32, device="cpu"
    )
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (each * periods), float(attention)


def _yarn(periods: Tensor, base: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """As llama3, but the blend is linear in the dimension's index; attention is sharpened besides."""
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    size = 2 * len(periods)

    def index_of(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = index_of(scaling.get("beta_fast") or 32), index_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(len(periods), dtype=torch.float32, device="cpu") - low) / (high - low or 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return 1.0 / (factor * periods) * (1 - keep) + 1.0 / periods * keep, sharpness(scaling)


def sharpness(scaling: Mapping[str, Any]) -> float:
    """YaRN's factor on cosine and sine: what is said, or what the stretch makes of it, times `attn_factor`.

    vLLM knows that last name, and models are published with it; transformers passes it over.
    """
    said, factor = scaling.get("attention_factor"), float(scaling["factor"])
    if said is not None:
        return float(said)

    def of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    top, bottom = scaling.get("mscale"), scaling.get("mscale_all_dim")
    usual = of(top) / of(bottom) if top and bottom else of(1.0)
    return usual * float(scaling.get("attn_factor") or 1.0)
