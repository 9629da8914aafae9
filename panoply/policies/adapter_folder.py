"""PEFT's folders: `adapter_config.json` and `adapter_model.safetensors`, written and read without PEFT."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from panoply.errors import PanoplyError, plain
from panoply.lora import Lora
from panoply.policies.adapter_base import read_base
from panoply.policies.adapter_config import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    Patterns,
    adapted_layers,
    check_factors,
    check_plain,
    read_config,
    settings_of,
    targeted,
)
from panoply.policies.expert_adapters import (
    LowRankExperts,
    expert_tensors,
    from_peft,
    own_name,
    routers,
    target_parameters,
    to_peft,
)
from panoply.policies.experts import TENSORS
from panoply.policies.low_rank import LowRank, adapt, adapters, linear_layers, merge, merged
from panoply.policies.quantised import Kind, Quantised
from panoply.policies.weights import listed, read_weights


@dataclass(frozen=True)
class Adapter:
    """A folder's adapter: what it is made of, and the factors of each layer by name."""

    folder: Path
    base: str
    rank: int
    settings: Lora
    patterns: Patterns
    weights: Mapping[str, Tensor]
    dtype: torch.dtype | None = None
    """In which its base was, before it was brought to few bits, where that is known."""

    @property
    def where(self) -> str:
        return plain(self.folder)

    def layers(self) -> list[str]:
        return sorted({name.rpartition(".lora_")[0] for name in self.weights})

    def check(self, linear: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse an adapter of another base, whose layers the model does not have, or has in other shapes."""
        for layer in self.layers():
            a, b = (self.weights.get(f"{layer}.lora_{side}") for side in "AB")
            if layer not in linear:
                raise PanoplyError(
                    f"The adapter in {self.where} is of another base than {plain(self.base)}, which has no layer "
                    f"{plain(layer)}."
                )
            if a is None or b is None:
                raise PanoplyError(
                    f"The adapter in {self.where} lacks lora_{'A' if a is None else 'B'} of {layer}."
                )
            if not (a.is_floating_point() and b.is_floating_point()):
                raise PanoplyError(f"The factors of {layer} in {self.where} are no floating-point numbers.")
            *many, outputs, inputs = linear[layer]
            rank = a.shape[0] if a.dim() else 0
            fits = tuple(a.shape) == (rank, inputs) and tuple(b.shape) == (outputs, rank)
            if not fits or not rank or (many and rank % many[0]):
                raise PanoplyError(
                    f"The adapter in {self.where} is of another base than {plain(self.base)}: {layer} is "
                    f"{' × '.join(map(str, linear[layer]))} there, and has factors {tuple(b.shape)} and "
                    f"{tuple(a.shape)} here."
                )
            own = rank // many[0] if many else rank
            if own != (said := self.patterns.rank(layer)):
                raise PanoplyError(
                    f"{plain(self.folder / CONFIG)} says that {layer} has rank {said}, and its factors have rank {own}."
                )
        self._check_whole(linear)

    def _check_whole(self, linear: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse one that lacks factors of layers that it says it is for."""
        if any(".experts" in name for name in linear):
            return  # names that PEFT makes something else of
        try:
            missing = targeted(self.patterns.config, linear) - set(self.layers())
        except (re.error, RecursionError, OverflowError, TypeError) as error:
            raise PanoplyError(
                f"{plain(self.folder / CONFIG)} names its layers by a pattern that is none: {plain(error)}."
            ) from error
        if missing:
            raise PanoplyError(f"The adapter in {self.where} lacks factors of {listed(missing)}.")

    def ranks(self, experts: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, int]:
        """Of each layer; PEFT's matrices of experts have the rank once for each of them."""
        shapes = experts or {}
        return {
            layer: self.weights[f"{layer}.lora_A"].shape[0] // shapes.get(layer, (1,))[0]
            for layer in self.layers()
        }

    def scales(self, ranks: Mapping[str, int]) -> dict[str, float]:
        """By what B·A of each layer is multiplied, where it has such a rank."""
        alphas = {layer: self.patterns.alpha(layer) for layer in ranks}
        return {n: replace(self.settings, alpha=alphas[n]).scale(own, own) for n, own in ranks.items()}

    def factors(self, layer: str, experts: int = 0, paired: bool = False) -> tuple[Tensor, Tensor]:
        """A and B of a layer, or of a tensor of so many experts."""
        a, b = (self.weights[f"{layer}.lora_{side}"] for side in "AB")
        return from_peft(a, b, experts, paired and layer.endswith(TENSORS[0])) if experts else (a, b)


def read_adapter(folder: Path) -> Adapter:
    config = read_config(folder)
    check_plain(folder, config)
    check_factors(folder)
    saved = read_weights([folder / WEIGHTS])
    if not saved:
        raise PanoplyError(f"{plain(folder)} holds no adapter: {WEIGHTS} is empty.")
    named = {name.rpartition(".")[0] for name in map(_layer, saved) if name}
    targets = config.get("target_parameters") or []
    ours = {
        f"{PREFIX}{name}": f"{own_name(layer, named, targets)}.{side}"
        for layer, _, side in (name.rpartition(".") for name in map(_layer, saved) if name)
        for name in [f"{layer}.{side}"]
    }
    factors = {}
    for name, weight in saved.items():
        own = ours.get(name.removesuffix(".weight"))
        if own is None or not name.endswith(".weight"):
            raise PanoplyError(
                f"The adapter in {plain(folder)} holds {listed([name])}, which is no factor of a layer."
            )
        factors[own] = weight
    rank, settings = settings_of(folder)
    base = config.get("base_model_name_or_path") or "its model"
    known, patterns = read_base(folder), Patterns(config, plain(folder / CONFIG))
    dtype = None if known is None else getattr(torch, known["dtype"])
    return Adapter(folder, base, rank, settings, patterns, factors, dtype)


def own_layers(folder: Path) -> list[str]:
    """The layers, and tensors of experts, that a folder has an adapter for, by our names."""
    there, targets = adapted_layers(folder), read_config(folder).get("target_parameters") or []
    return [own_name(layer, set(there), targets) for layer in there]


def _layer(name: str) -> str:
    """A factor's name as this library has it, `LAYER.lora_A`; nothing where it is no such name."""
    own = name.removeprefix(PREFIX).removesuffix(".weight")
    return own if own.endswith((".lora_A", ".lora_B")) and name.startswith(PREFIX) else ""


@torch.no_grad()
def load_factors(model: nn.Module, adapter: Adapter) -> None:
    """Overwrite the factors of a model that has adapters on these very layers, and merge them."""
    here = dict(adapters(model))
    if missing := here.keys() - set(adapter.layers()):
        raise PanoplyError(f"The adapter in {adapter.where} lacks {listed(missing)}.")
    experts = expert_tensors(model)
    adapter.check({n: experts.get(n, (layer.out_features, layer.in_features)) for n, layer in here.items()})
    for name, layer in here.items():
        many = experts.get(name, (0,))[0]
        both = adapter.factors(name, many, _paired(model))
        for side, factor, saved in zip("AB", (layer.lora_A, layer.lora_B), both, strict=True):
            if saved.shape != factor.shape:
                raise PanoplyError(
                    f"The adapter in {adapter.where} does not fit: lora_{side} of {name} is {tuple(saved.shape)}, not "
                    f"{tuple(factor.shape)}."
                )
            factor.copy_(saved)
    merge(model)


@torch.no_grad()
def add_merged(model: nn.Module, adapter: Adapter) -> None:
    """Add an adapter to a plain model's weights for good; where it was trained over few bits, to what these say."""
    experts, base = expert_tensors(model), adapter.settings.base
    adapter.check(linear_layers(model) | experts | routers(model))
    ranks = adapter.ranks(experts)
    scales = adapter.scales(ranks)
    for name in ranks:
        weight = model.get_parameter(name if name in experts else f"{name}.weight")
        both = adapter.factors(name, experts.get(name, (0,))[0], _paired(model))
        a, b = (factor.to(weight.device).float() for factor in both)
        start = (
            weight if base == "whole" else Quantised(weight.to(adapter.dtype or weight.dtype), base).whole()
        )
        weight.copy_(merged(start, a, b, scales[name]))


def add_beside(model: nn.Module, adapter: Adapter, kind: Kind, device: torch.device) -> None:
    """Keep a plain model's weights in few bits and the adapter beside them, as both were trained; nothing learns.

    It goes to a device a layer at a time.
    """
    adapter.check(linear_layers(model))
    ranks = adapter.ranks()
    for name in ranks:
        weight = model.get_parameter(f"{name}.weight").data
        weight.copy_(weight.to(adapter.dtype or weight.dtype))
    adapt(model, ranks, adapter.scales(ranks), kind, device)
    load_factors(model, adapter)
    model.requires_grad_(False)


def _paired(model: nn.Module) -> bool:
    """Whether the layout's folders have gates and what they multiply take turns."""
    sparse = cast(Any, model).config.layout.sparse
    return sparse is not None and not sparse.each


def write_adapter(
    model: nn.Module, folder: Path, rank: int, settings: Lora, base: Path | None = None
) -> None:
    """A folder that PEFT opens on the base model, by `AutoPeftModelForCausalLM` where a folder holds that."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = dict(adapters(model))
    experts = {name: la for name, la in layers.items() if isinstance(la, LowRankExperts)}
    linear = {name: la for name, la in layers.items() if not isinstance(la, LowRankExperts)}
    factors: dict[str, Tensor] = {
        f"{name}.lora_{side}": factor
        for name, layer in linear.items()
        for side, factor in (("A", layer.lora_A), ("B", layer.lora_B))
    }
    for name, one in experts.items():
        both = all(f"{name.rpartition('.')[0]}.{tensor}" in experts for tensor in TENSORS)
        factors |= to_peft(name, one, both, _paired(model))
    weights = {f"{PREFIX}{name}.weight": f.detach().cpu().contiguous() for name, f in factors.items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    # PEFT moves layers of such names to the experts of other blocks, unless they are named as parameters.
    dense = [name for name in linear if ".mlp." in name] if expert_tensors(model) else []
    parameters = [f"{name}.weight" for name in dense] + target_parameters(experts, model)
    named = {f"{name}.weight" if name in dense else name: layer for name, layer in layers.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base.resolve()),
        "r": rank,
        **_patterns(named, rank, settings),
        "lora_alpha": 2 * rank if settings.alpha is None else settings.alpha,
        "lora_dropout": 0.0,
        "use_rslora": settings.rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "target_modules": _targets(linear.keys() - set(dense), model),
        **({"target_parameters": sorted(parameters)} if parameters else {}),
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _patterns(
    named: Mapping[str, LowRank | LowRankExperts], rank: int, settings: Lora
) -> dict[str, dict[str, float]]:
    """Of layers with another rank, or another α, than most have."""
    ranks = {name: layer.lora_A.shape[-2] for name, layer in named.items()}
    other = {n: layer.scale for n, layer in named.items() if layer.scale != settings.scale(ranks[n], rank)}
    alphas = {n: scale * (ranks[n] ** 0.5 if settings.rslora else ranks[n]) for n, scale in other.items()}
    return {"rank_pattern": {n: own for n, own in ranks.items() if own != rank}, "alpha_pattern": alphas}


def _targets(adapted: Iterable[str], model: nn.Module) -> list[str]:
    """The layers' last names, where all layers of these names are adapted; else their whole names."""
    short = {name.rpartition(".")[2] for name in adapted}
    named = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in short}
    return sorted(short if named == set(adapted) else adapted)
