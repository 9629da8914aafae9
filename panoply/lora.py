"""Settings of low-rank adapters (LoRA): W = W₀ + s·B·A, of which only A and B learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

from panoply.errors import PanoplyError, unknown
from panoply.parts import check_fields

TABLES = ("embed", "wte", "wpe", "lm_head")
"""In names of weights: tables of tokens and positions."""
ROUTER = "gate"
"""What chooses among experts; it stays as it is, unless it is named."""


BLOCK = 64
"""Quantised weights that share a scale."""
BYTES: Mapping[str, float] = {"nf4": 1 / 2 + 4 / BLOCK, "int8": 1 + 4 / BLOCK}
"""Of a quantised weight, its share of the scale included."""


@dataclass(frozen=True)
class Lora:
    """What adapters are made of, beside their rank, which is `--lora RANK`. Dropout is always 0."""

    alpha: float | None = None
    """s = α / rank. Left out, it is twice the rank."""
    target_modules: tuple[str, ...] = ()
    """Names of the layers that get adapters, or patterns of whole names (`*.3.mlp.*`). Left out, every linear layer."""
    target_parameters: tuple[str, ...] = ()
    """Tensors of experts' weights that get adapters as well: `mlp.experts.gate_up_proj`, `mlp.experts.down_proj`."""
    rslora: bool = False
    """Whether s = α / √rank, which keeps steps of one size as the rank grows."""
    dora: bool = False
    """Whether a weight's length learns beside its direction (DoRA), through PEFT and several times slower."""

    base: Literal["whole", "int8", "nf4"] = "whole"
    """How the weights under adapters are kept: whole, or in a half or a quarter of the bytes (QLoRA). The policy then
    begins as what these bytes say, and a layer's weights are made whole, with its adapter, for every product."""

    bounds: ClassVar[Mapping[str, str]] = {"alpha": "above 0"}

    def __post_init__(self) -> None:
        check_fields(self, "lora")
        if self.dora and self.base != "whole":
            raise PanoplyError(f"lora.base={self.base} is not for DoRA, whose weights go through PEFT.")
        if self.target_parameters and self.base != "whole":
            raise PanoplyError(
                f"lora.base={self.base} is not for adapters on experts: leave out lora.target_parameters."
            )
        if self.target_parameters and self.dora:
            raise PanoplyError("lora.dora is not for adapters on experts: leave out lora.target_parameters.")

    def scale(self, rank: int, asked: int) -> float:
        """s, by which the B·A of a layer is multiplied; its rank may be another than the one asked for."""
        alpha = 2.0 * asked if self.alpha is None else self.alpha
        return alpha / (rank**0.5 if self.rslora else rank)

    def layers(self, linear: Mapping[str, tuple[int, ...]], rank: int) -> list[str]:
        """Which of a model's linear layers, given with the shapes of their weights, get adapters of this rank."""
        inside = {n: s for n, s in linear.items() if len(s) == 2 and not any(word in n for word in TABLES)}
        found = [n for n in inside if not self.target_modules and n.rpartition(".")[2] != ROUTER]
        for word in self.target_modules:
            if any(_names(word, name) for name in linear.keys() - inside.keys()):
                raise PanoplyError(
                    f"lora.target_modules cannot name {word}: tables of tokens get no adapters."
                )
            named = [name for name in inside if _names(word, name)]
            if not named:
                raise unknown("layer in lora.target_modules", word, {n.rpartition(".")[2] for n in inside})
            found += [name for name in named if name not in found]
        for name in found:
            if rank > min(inside[name]):
                wide = " × ".join(map(str, inside[name]))
                raise PanoplyError(
                    f"--lora {rank} is more than {name} allows, whose weight is {wide}: at most {min(inside[name])}."
                )
        return found

    def tensors(self, experts: Mapping[str, tuple[int, ...]], rank: int) -> list[str]:
        """Which of a model's tensors of experts, given with their shapes, get adapters of this rank."""
        found: list[str] = []
        for word in self.target_parameters:
            named = [name for name in experts if _names(word, name)]
            if not named and not experts:
                raise PanoplyError(f"lora.target_parameters cannot name {word}: the model has no experts.")
            if not named:
                there = {".".join(name.split(".")[-3:]) for name in experts}
                raise unknown("tensor in lora.target_parameters", word, there)
            found += [name for name in named if name not in found]
        for name in found:
            if rank > min(experts[name][1:]):
                wide = " × ".join(map(str, experts[name][1:]))
                raise PanoplyError(
                    f"--lora {rank} is more than {name} allows, whose experts are {wide}: at most "
                    f"{min(experts[name][1:])}."
                )
        return found


def _names(word: str, layer: str) -> bool:
    """As PEFT reads names, the last part or parts of a layer's; a pattern must fit all of it."""
    if any(sign in word for sign in "*?["):
        return fnmatchcase(layer, word)
    return layer == word or layer.endswith(f".{word}")
