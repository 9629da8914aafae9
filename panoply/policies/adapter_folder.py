"""PEFT's folders: `adapter_config.json` and `adapter_model.safetensors`, written and read without PEFT."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from panoply.errors import PanoplyError, plain
from panoply.files import is_file, read_json
from panoply.lora import Lora
from panoply.policies import hub
from panoply.policies.expert_adapters import LowRankExperts, expert_tensors, from_peft, own_name, to_peft
from panoply.policies.experts import TENSORS
from panoply.policies.low_rank import adapters, linear_layers, merge, merged
from panoply.policies.weights import listed, read_shapes, read_weights

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT puts before the names of layers."""
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (False,),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}
"""What a config may say, if W = W₀ + s·B·A with W₀ as the base has it is to be all there is to the adapter."""


class Config(TypedDict):
    """What an `adapter_config.json` must say."""

    peft_type: str
    r: int
    lora_alpha: float
    base_model_name_or_path: NotRequired[str | None]
    use_rslora: NotRequired[bool]
    use_dora: NotRequired[bool]
    target_parameters: NotRequired[list[str] | None]


@dataclass(frozen=True)
class Adapter:
    """A folder's adapter: what it is made of, and the factors of each layer by name."""

    folder: Path
    base: str
    rank: int
    settings: Lora
    weights: Mapping[str, Tensor]

    @property
    def where(self) -> str:
        return plain(self.folder)

    def layers(self) -> list[str]:
        return sorted({name.rpartition(".lora_")[0] for name in self.weights})

    def check(self, linear: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse an adapter of another base: one whose layers the model does not have, or has in other shapes."""
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
            *many, outputs, inputs = linear[layer]
            rank = a.shape[0] if a.dim() else 0
            fits = tuple(a.shape) == (rank, inputs) and tuple(b.shape) == (outputs, rank)
            if not fits or not rank or (many and rank % many[0]):
                raise PanoplyError(
                    f"The adapter in {self.where} is of another base than {plain(self.base)}: {layer} is "
                    f"{' × '.join(map(str, linear[layer]))} there, and has factors {tuple(b.shape)} and "
                    f"{tuple(a.shape)} here."
                )

    def ranks(self, experts: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, int]:
        """Of each layer; PEFT's matrices of experts have the rank once for each of them."""
        shapes = experts or {}
        return {
            layer: self.weights[f"{layer}.lora_A"].shape[0] // shapes.get(layer, (1,))[0]
            for layer in self.layers()
        }

    def factors(self, layer: str, experts: int = 0, paired: bool = False) -> tuple[Tensor, Tensor]:
        """A and B of a layer, or of a tensor of so many experts."""
        a, b = (self.weights[f"{layer}.lora_{side}"] for side in "AB")
        return from_peft(a, b, experts, paired and layer.endswith(TENSORS[0])) if experts else (a, b)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, and no model beside it."""
    return is_file(folder / CONFIG) and not is_file(folder / "config.json")


def read_config(folder: Path) -> Config:
    """What a folder says of its adapter, if that is LoRA of a kind that can be read."""
    config = read_json(folder / CONFIG, Config, finite=False)
    if config["peft_type"] != "LORA":
        raise PanoplyError(
            f"The adapter in {plain(folder)} is of the kind {plain(config['peft_type'])}: only LORA can be opened."
        )
    if config["r"] < 1 or not config["lora_alpha"] > 0:
        raise PanoplyError(f"{plain(folder / CONFIG)}: r and lora_alpha must be above 0.")
    return config


def settings_of(folder: Path) -> tuple[int, Lora]:
    """The rank of a folder's adapter, and what else it is made of."""
    config = read_config(folder)
    alpha, rslora, dora = float(config["lora_alpha"]), config.get("use_rslora"), config.get("use_dora")
    return config["r"], Lora(alpha, rslora=bool(rslora), dora=bool(dora))


def check_going_on(folder: Path, rank: int, settings: Lora) -> None:
    """Refuse to go on with a folder's adapter as with one of another rank, or of other settings."""
    own, _ = settings_of(folder)
    if own != rank:
        raise PanoplyError(
            f"The adapter in {plain(folder)} has rank {own}: go on with it by --lora {own}, or train every weight of "
            "the merged model without --lora."
        )
    if settings != Lora():
        name = next(f.name for f in fields(settings) if getattr(settings, f.name) != f.default)
        raise PanoplyError(f"lora.{name} has no effect: the adapter in {plain(folder)} has its own settings.")


def model_under(folder: Path) -> Path:
    """The folder of the model that an adapter is of, or the folder itself where it holds no adapter alone."""
    if not is_adapter(folder):
        return folder
    base = read_config(folder).get("base_model_name_or_path")
    if not base:
        raise PanoplyError(f"{plain(folder / CONFIG)} does not say which model its adapter is of.")
    found = hub.fetch(base) if hub.is_id(base) else Path(base)
    if not is_file(found / "config.json"):
        raise PanoplyError(
            f"The adapter in {plain(folder)} is one of {plain(base)}, where there is no model: put its base there, or "
            f"name the base's folder in {CONFIG}."
        )
    return found


def read_adapter(folder: Path) -> Adapter:
    config = read_config(folder)
    for name, may in PLAIN.items():
        if name in config and (said := dict(config)[name]) not in may:
            raise PanoplyError(
                f"The adapter in {plain(folder)} has {name}={plain(json.dumps(said))[:60]}, which is not supported."
            )
    if not is_file(folder / WEIGHTS):
        raise PanoplyError(f"{plain(folder)} holds no adapter: there is no {WEIGHTS}.")
    saved = read_weights([folder / WEIGHTS])
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
    return Adapter(folder, base, rank, settings, factors)


def adapted_layers(folder: Path) -> list[str]:
    """The names of the layers that a folder has an adapter for, of whatever kind."""
    names = (name.partition(".lora_") for name in read_shapes([folder / WEIGHTS]))
    return sorted({layer.removeprefix(PREFIX) for layer, mark, _ in names if mark})


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
    """Add an adapter to a plain model's weights for good."""
    experts = expert_tensors(model)
    adapter.check(linear_layers(model) | experts)
    for name, own in adapter.ranks(experts).items():
        weight = model.get_parameter(name if name in experts else f"{name}.weight")
        both = adapter.factors(name, experts.get(name, (0,))[0], _paired(model))
        a, b = (factor.to(weight.device).float() for factor in both)
        weight.copy_(merged(weight, a, b, adapter.settings.scale(own, adapter.rank)))


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
    layers = {name: layer for name, layer in layers.items() if name not in experts}
    factors: dict[str, Tensor] = {
        f"{name}.lora_{side}": factor
        for name, layer in layers.items()
        for side, factor in (("A", layer.lora_A), ("B", layer.lora_B))
    }
    for name, one in experts.items():
        both = all(f"{name.rpartition('.')[0]}.{tensor}" in experts for tensor in TENSORS)
        factors |= to_peft(name, one, both, _paired(model))
    weights = {f"{PREFIX}{name}.weight": f.detach().cpu().contiguous() for name, f in factors.items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base.resolve()),
        "r": rank,
        "rank_pattern": {n: len(layer.lora_A) for n, layer in layers.items() if len(layer.lora_A) != rank},
        "lora_alpha": 2 * rank if settings.alpha is None else settings.alpha,
        "lora_dropout": 0.0,
        "use_rslora": settings.rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "target_modules": _targets(layers, model),
    }
    if experts:
        config["target_parameters"] = sorted({f"mlp.experts.{name.rpartition('.')[2]}" for name in experts})
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _targets(adapted: Iterable[str], model: nn.Module) -> list[str]:
    """The layers' last names, where all layers of these names are adapted; else their whole names."""
    short = {name.rpartition(".")[2] for name in adapted}
    named = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in short}
    return sorted(short if named == set(adapted) else adapted)
