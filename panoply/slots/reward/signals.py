"""Rewards made of the signals a world gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from panoply.experience import Experience
from panoply.parts import Finding, part


def _needs(held: Any) -> frozenset[str]:
    return frozenset({"world:verify", f"signal:{held.name}"})


@part("reward", equation="{name}", needs=_needs, bounds={"scale": "any number"})
def signal(experience: Experience, *, name: str = "success", scale: float = 1.0) -> Tensor:
    """One named signal of the world, as it is: `success` is its verifier's verdict."""
    return experience[f"signal:{name}"] * scale


def _blend_equation(held: Any) -> str:
    weights = held.weights or (1.0,) * len(held.names)
    return " + ".join(f"{w:g}·{n}" if w != 1 else n for n, w in zip(held.names, weights, strict=False))


def _blend_impossible(held: Any, method: Any) -> list[Finding]:
    if not held.names:
        return [("names", "a reward is made of at least one signal")]
    if held.weights and len(held.weights) != len(held.names):
        return [("weights", f"there are {len(held.names)} signals, and one weight each")]
    return []


@part(
    "reward",
    equation=_blend_equation,
    needs=lambda held: frozenset({"world:verify", *(f"signal:{name}" for name in held.names)}),
    impossible=_blend_impossible,
    bounds={"weights": "any number"},
)
def blend(
    experience: Experience, *, names: tuple[str, ...] = ("success",), weights: tuple[float, ...] = ()
) -> Tensor:
    """Several signals, each times its weight, added up; without weights all count alike."""
    signals = torch.stack([experience[f"signal:{name}"].float() for name in names])
    return torch.tensor(weights or (1.0,) * len(names), device=signals.device) @ signals
