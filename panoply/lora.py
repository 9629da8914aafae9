"""Settings of low-rank adapters (LoRA): W = W₀ + s·B·A, of which only A and B learn."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import ClassVar, Literal, NamedTuple

from panoply.errors import PanoplyError, nearest, plain, unknown
from panoply.parts import check_fields

TABLES = ("embed", "wte", "wpe", "lm_head")
"""In names of weights: tables of tokens and positions."""
ROUTER = "gate"
"""What chooses among experts; it stays as it is, unless it is named."""
ROUTERS = (ROUTER, "router")
"""What layouts that run natively call it, where it has no adapter of its own."""
TENSORS: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "experts"),
    "down_proj": ("down_proj", "w2", "experts"),
}
"""An expert's matrices, by the tensor of all experts' that holds them."""
ALL = "all-linear"
"""PEFT's word for every linear layer."""
MIXED = ("gate_proj", "up_proj", "down_proj")
"""Layers of blocks without experts, which PEFT takes for experts' where other blocks have some."""

BLOCK = 64
"""Quantised weights that share a scale."""
PAIR = 2 * BLOCK
"""Quantised weights whose codes lie together."""
BYTES: Mapping[str, float] = {"nf4": 1 / 2 + 4 / BLOCK, "int8": 1 + 4 / BLOCK}
"""Of a quantised weight, its share of the scale included."""


class Planned(NamedTuple):
    """Adapters that are not there yet: the shapes of the weights they are for, and what they are made of."""

    shapes: list[tuple[int, ...]]
    settings: Lora
    """Of saved ones that go on, their own; `target_modules` are then the last parts of their layers' names."""
    learning: int
    """How many numbers learn."""
    fresh: bool
    """Whether they begin as nothing, and do not go on from saved ones."""


def factors(shapes: Iterable[tuple[int, ...]], rank: int, dora: bool = False) -> int:
    """Numbers of fresh adapters: rank · (in + out) for every matrix that gets one, and its lengths' with DoRA."""
    return sum(math.prod(s[:-2]) * (rank * (s[-2] + s[-1]) + dora * s[-2]) for s in shapes)


@dataclass(frozen=True)
class Lora:
    """What adapters are made of, beside their rank, which is `--lora RANK`. Dropout is always 0."""

    alpha: float | None = None
    """s = α / rank. Left out, it is twice the rank."""
    target_modules: tuple[str, ...] = ()
    """Names of the layers that get adapters, or patterns of whole names (`*.3.mlp.*`). Left out, every linear layer, as
    with PEFT's word for them, `all-linear`."""
    target_parameters: tuple[str, ...] = ()
    """Tensors of experts' weights that get adapters as well: `mlp.experts.gate_up_proj`, `mlp.experts.down_proj`."""
    rslora: bool = False
    """Whether s = α / √rank, which keeps steps of one size as the rank grows."""
    dora: bool = False
    """Whether a weight's length learns beside its direction (DoRA), through PEFT and several times slower."""

    base: Literal["whole", "int8", "nf4"] = "whole"
    """How the weights under adapters are kept: whole, or in a half or a quarter of the bytes (QLoRA). The policy then
    begins as what these bytes say; they are made whole for a product and forgotten, and adapters are not merged into
    them, but multiplied with beside them. Experts stay whole."""

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

    def effective(self, name: str, rank: int) -> object:
        """What a setting comes to with adapters of a rank."""
        value = getattr(self, name)
        if isinstance(value, tuple):
            return frozenset(value)
        return 2.0 * rank if name == "alpha" and value is None else value

    def check_foreign(self) -> None:
        """Refuse what only this library's own decoder has."""
        if self.base != "whole":
            raise PanoplyError(
                f"lora.base={self.base} is for adapters of this library's own decoder: not for DoRA, nor for models "
                "that transformers runs."
            )

    def scale(self, rank: int, asked: int) -> float:
        """s, by which the B·A of a layer is multiplied; its rank may be another than the one asked for."""
        alpha = 2.0 * asked if self.alpha is None else self.alpha
        return alpha / (rank**0.5 if self.rslora else rank)

    def layers(
        self, linear: Mapping[str, tuple[int, ...]], rank: int, experts: Collection[str] = ()
    ) -> list[str]:
        """Which of a model's linear layers, given with the shapes of their weights, get adapters of this rank.

        linear    may hold other weights, too: vectors, which are no layers, and tables, which get no adapters
        experts   names of the model's tensors of experts, where it has some
        """
        apart = ROUTERS if experts else ()
        inside = {
            name: shape
            for name, shape in linear.items()
            if len(shape) == 2 and name.rpartition(".")[2] not in apart and not any(t in name for t in TABLES)
        }
        usual = [n for n in inside if n.rpartition(".")[2] != ROUTER]
        found = [] if self.target_modules else usual
        for word in self.target_modules:
            if word == ALL:
                return self._fitting(usual, inside, rank)
            named = [name for name in (usual if _is_pattern(word) else inside) if names(word, name)]
            if not named:
                raise _no_layer(word, linear, inside, experts)
            found += [name for name in named if name not in found]
        if self.dora and experts and any(name.endswith(MIXED) for name in found):
            raise PanoplyError(
                "lora.dora is not for gate_proj, up_proj and down_proj where other blocks have experts, since PEFT "
                "takes them for those: name other layers, such as lora.target_modules=q_proj,k_proj,v_proj,o_proj."
            )
        return self._fitting(found, inside, rank)

    @staticmethod
    def _fitting(found: list[str], shapes: Mapping[str, tuple[int, ...]], rank: int) -> list[str]:
        for name in found:
            if rank > min(shapes[name]):
                wide = " × ".join(map(str, shapes[name]))
                raise PanoplyError(
                    f"--lora {rank} is more than {name} allows, whose weight is {wide}: at most {min(shapes[name])}."
                )
        return found

    def tensors(self, experts: Mapping[str, tuple[int, ...]], rank: int) -> list[str]:
        """Which of a model's tensors of experts, given with their shapes, get adapters of this rank."""
        found: list[str] = []
        for word in self.target_parameters:
            named = [name for name in experts if names(word, name)]
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


def check_same(where: str, own: tuple[int, Lora], asked: tuple[int, Lora], chosen: Collection[str]) -> None:
    """Refuse to go on with adapters as with ones of another rank, or of other settings than their own.

    where    whose they are, as a sentence names it
    chosen   names of the settings that were asked for; the others are as the adapters have them
    """
    (rank, settings), (wanted, other) = own, asked
    if rank != wanted:
        raise PanoplyError(
            f"{where[:1].upper()}{where[1:]} has rank {rank}: go on with it by --lora {rank}, or train every weight of "
            "the merged model without --lora."
        )
    if "base" in chosen and other.base != settings.base:
        raise PanoplyError(
            f"lora.base cannot be {other.base}: {where} was trained over a base that is "
            f"{'whole' if settings.base == 'whole' else f'in {settings.base}'}, and over another it would be another "
            "model: leave lora.base out."
        )
    for name in (field.name for field in fields(settings) if field.name in chosen):
        if settings.effective(name, rank) != other.effective(name, wanted):
            raise PanoplyError(f"lora.{name} has no effect: {where} has its own settings.")


def changed(settings: Lora) -> frozenset[str]:
    """Names of the settings that are not as they are when nothing is said."""
    return frozenset(f.name for f in fields(settings) if getattr(settings, f.name) != f.default)


def _no_layer(
    word: str, linear: Collection[str], inside: Collection[str], experts: Collection[str]
) -> PanoplyError:
    """Why a word names no layer that could have adapters."""
    last = word.rpartition(".")[2]
    tensors = [
        f"mlp.experts.{name}" for name, parts in TENSORS.items() if last in parts or ".experts." in word
    ]
    if experts and tensors:
        return PanoplyError(
            f"lora.target_modules cannot name {word}: weights of experts are named in lora.target_parameters, here "
            f"{' and '.join(tensors)}."
        )
    if experts and last in ROUTERS:
        return PanoplyError(
            f"lora.target_modules cannot name {word}: routers get no adapters, and weights of experts are named in "
            "lora.target_parameters."
        )
    if last in TABLES or any(names(word, name) and any(table in name for table in TABLES) for name in linear):
        return PanoplyError(f"lora.target_modules cannot name {word}: tables of tokens get no adapters.")
    if any(names(word, name) for name in linear):
        return PanoplyError(f"lora.target_modules cannot name {word}: that is no linear layer.")
    short = {ALL, *(name.rpartition(".")[2] for name in inside)}
    if not _is_pattern(word):
        return unknown("layer in lora.target_modules", word, short)
    wider, first = f"*.{word}", next(iter(inside), "none")
    near = [wider] if any(names(wider, name) for name in inside) else nearest(word, sorted(short))
    meant = f" Did you mean '{plain(near[0])}'?" if near else ""
    return PanoplyError(
        f"The pattern '{plain(word)}' in lora.target_modules fits the whole name of no layer, such as {first}.{meant}"
    )


def _is_pattern(word: str) -> bool:
    return any(sign in word for sign in "*?[")


def names(word: str, layer: str) -> bool:
    """As PEFT reads names, the last part or parts of a layer's; a pattern must fit all of it."""
    return fnmatchcase(layer, word) if _is_pattern(word) else layer == word or layer.endswith(f".{word}")
