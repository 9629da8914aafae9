"""What PEFT's `adapter_config.json` says: what can be opened of it, and what training can go on with."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from panoply.errors import PanoplyError, plain
from panoply.files import is_file, read_json
from panoply.lora import TABLES, Lora, changed, check_same, names
from panoply.policies import hub
from panoply.policies.adapter_base import in_checkpoint, read_base
from panoply.policies.expert_adapters import own_name
from panoply.policies.weights import read_shapes

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
"""What PEFT puts before the names of layers."""
ROUTERS = (".mlp.gate", ".mlp.router")
"""How the names of layers end that choose among experts; they are merged, and cannot learn by adapters."""
LIKE_OTHERS: dict[str, tuple[Any, ...]] = {
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None, False),
    "use_qalora": (False,),
}
"""What a config may say, if nothing learns but factors and what is added to a layer's output, for every token."""
THROUGH_PEFT: dict[str, tuple[Any, ...]] = {
    **LIKE_OTHERS,
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", "pissa", "olora"),
}
"""… and where PEFT goes on with it: beginnings that leave the base as it is, or change it alike every time."""
PLAIN: dict[str, tuple[Any, ...]] = {
    **LIKE_OTHERS,
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""… and where W = W₀ + s·B·A, with W₀ as the base has it, is to be all there is to the adapter."""


UNREPEATED = ("pissa_niter_", "corda")
"""Beginnings of `init_lora_weights` that change the base by chance, or by data that is not in the folder."""


class Config(TypedDict):
    """What an `adapter_config.json` must say."""

    peft_type: str
    r: int
    lora_alpha: float
    base_model_name_or_path: NotRequired[str | None]
    revision: NotRequired[str | None]
    use_rslora: NotRequired[bool]
    use_dora: NotRequired[bool]
    target_parameters: NotRequired[list[str] | None]
    rank_pattern: NotRequired[dict[str, int] | None]
    alpha_pattern: NotRequired[dict[str, float] | None]
    task_type: NotRequired[str | None]
    init_lora_weights: NotRequired[bool | str | None]
    bias: NotRequired[str]
    layer_replication: NotRequired[list[list[int]] | None]


@dataclass(frozen=True)
class Patterns:
    """The rank and the α of each layer, as PEFT reads patterns: the first that fits the end of a name counts."""

    config: Config
    where: str

    def rank(self, layer: str) -> int:
        return int(self._found(layer, self.config.get("rank_pattern") or {}, self.config["r"]))

    def alpha(self, layer: str) -> float:
        return float(self._found(layer, self.config.get("alpha_pattern") or {}, self.config["lora_alpha"]))

    def _found(self, layer: str, patterns: Mapping[str, Any], usual: Any) -> Any:
        """Of a layer whose weight is adapted as a parameter, PEFT looks for the parameter's name."""
        weight = f"{layer}.weight"
        name = (
            weight
            if any(names(word, weight) for word in self.config.get("target_parameters") or ())
            else layer
        )
        try:
            fits = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name))
            return next(fits, usual)
        except (re.error, RecursionError, OverflowError) as error:
            raise PanoplyError(f"{self.where} has a pattern that is none: {plain(error)}.") from error


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
    if config.get("task_type") == "SEQ_CLS":
        raise PanoplyError(
            f"The adapter in {plain(folder)} is one of a reward model (task_type SEQ_CLS), which is opened whole "
            "alone: merge it with PEFT, by merge_and_unload, and save what that gives."
        )
    ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
    alphas = [config["lora_alpha"], *(config.get("alpha_pattern") or {}).values()]
    if min(ranks) < 1 or not all(alpha > 0 for alpha in alphas):
        raise PanoplyError(f"{plain(folder / CONFIG)}: r and lora_alpha must be above 0.")
    _check_base_is_known(folder, config)
    return config


def _check_base_is_known(folder: Path, config: Config) -> None:
    """Refuse an adapter over weights that only its own training had, or over other layers than the base has."""
    began = config.get("init_lora_weights")
    if isinstance(began, str) and began.startswith(UNREPEATED):
        raise PanoplyError(
            f"The adapter in {plain(folder)} began by init_lora_weights={plain(began)}, which changed its base in a "
            "way that cannot be repeated: have PEFT convert it, by save_pretrained with "
            "path_initial_model_for_weight_conversion."
        )
    if config.get("layer_replication"):
        raise PanoplyError(
            f"The adapter in {plain(folder)} has layer_replication, which makes a deeper model of its base: that is "
            "not supported."
        )


def settings_of(folder: Path) -> tuple[int, Lora]:
    """The rank of a folder's adapter, and what else it is made of, but for which layers have it."""
    config, known = read_config(folder), read_base(folder)
    alpha, rslora, dora = float(config["lora_alpha"]), config.get("use_rslora"), config.get("use_dora")
    base = "whole" if known is None else known["base"]
    return config["r"], Lora(alpha, rslora=bool(rslora), dora=bool(dora), base=base)


def check_plain(folder: Path, config: Config) -> None:
    """Refuse an adapter that is more than W = W₀ + s·B·A."""
    if said := _unlike(config, PLAIN):
        raise PanoplyError(f"The adapter in {plain(folder)} has {said}, which is not supported.")


def more_than_factors(folder: Path) -> str:
    """What an adapter has beside factors of layers, W = W₀ + s·B·A, as a sentence names it; empty where it is all."""
    check_factors(folder)
    names = read_shapes([folder / WEIGHTS])
    others = (n for n in names if not n.endswith((".lora_A.weight", ".lora_B.weight")))
    said = _unlike(read_config(folder), PLAIN) or _table(adapted_layers(folder))
    return said or next((plain(n) for n in others), "")


def _table(layers: Collection[str]) -> str:
    tables = (n for n in layers if any(table in n for table in TABLES))
    return next((f"factors of {plain(n)}, a table of tokens" for n in tables), "")


def targeted(config: Config, layers: Collection[str]) -> set[str]:
    """Those of a model's layers that a config's `target_modules` are, as PEFT reads it."""
    said: dict[str, Any] = {**config}
    wanted, barred = said.get("target_modules") or (), said.get("exclude_modules") or ()
    numbers, place = said.get("layers_to_transform"), said.get("layers_pattern") or r"[^.]*"
    only = [numbers] if isinstance(numbers, int) else numbers
    places = place if isinstance(place, str) else "|".join(place)

    def among(layer: str, words: Any) -> bool:
        if isinstance(words, str):
            return re.fullmatch(words, layer) is not None
        return any(layer == word or layer.endswith(f".{word}") for word in words)

    def numbered(layer: str) -> bool:
        found = re.match(rf".*\.({places})\.(\d+)\.", layer)
        return not only or isinstance(wanted, str) or (found is not None and int(found[2]) in only)

    return {la for la in layers if among(la, wanted) and not among(la, barred) and numbered(la)}


def going_on(
    folder: Path, rank: int, asked: Lora, chosen: Collection[str] | None = None, native: bool = True
) -> Lora:
    """The settings of a folder's adapter with which training goes on, if they are those that were asked for.

    chosen   names of the settings that were asked for; left out, those that are not as usual
    native   whether this library's own decoder would run it
    """
    (own_rank, own), known = settings_of(folder), read_base(folder)
    chosen = changed(asked) if chosen is None else chosen
    if known is None and "base" in chosen:
        own = replace(own, base=asked.base)
    where = f"the adapter in {plain(folder)}"
    check_same(where, (own_rank, own), (rank, asked), set(chosen) - {"target_modules", "target_parameters"})
    _check_targets(folder, where, asked, chosen)
    layers = adapted_layers(folder)
    if native and not own.dora:
        said = more_than_factors(folder)
        said = said or next((f"factors of {plain(n)}, a router" for n in layers if n.endswith(ROUTERS)), "")
    else:
        said = _unlike(read_config(folder), THROUGH_PEFT) or _table(layers)
    if said:
        raise PanoplyError(
            f"The adapter in {plain(folder)} has {said}, with which training cannot go on: leave --lora out, and every "
            "weight of the merged model is trained."
        )
    return own


def check_factors(folder: Path) -> None:
    """Refuse a folder without factors, or with such as would have to be unpickled."""
    if is_file(folder / WEIGHTS):
        return
    if is_file(folder / PICKLED):
        raise PanoplyError(
            f"{plain(folder)} holds a pickle ({PICKLED}), and nothing is unpickled: save the adapter as safetensors."
        )
    raise PanoplyError(f"{plain(folder)} holds no adapter: there is no {WEIGHTS}.")


def adapted_layers(folder: Path) -> list[str]:
    """The names of the layers that a folder has an adapter for, as PEFT has them."""
    check_factors(folder)
    said = (name.partition(".lora_") for name in read_shapes([folder / WEIGHTS]))
    return sorted({layer.removeprefix(PREFIX) for layer, mark, _ in said if mark})


def _check_targets(folder: Path, where: str, asked: Lora, chosen: Collection[str]) -> None:
    """Layers that are named must be those that the adapter is on."""
    if not {"target_modules", "target_parameters"} & set(chosen):
        return
    there, words = set(adapted_layers(folder)), read_config(folder).get("target_parameters") or []
    places = {place for place in there if ".experts" in place}
    tensors = {own_name(place, there, words) for place in places}
    for name, given, found in (
        ("target_modules", asked.target_modules, there - places),
        ("target_parameters", asked.target_parameters, tensors),
    ):
        layers = {layer for layer in found if any(names(word, layer) for word in given)}
        if name in chosen and (layers != found or not all(any(names(w, f) for f in found) for w in given)):
            raise PanoplyError(f"lora.{name} has no effect: {where} has its own settings.")


def _unlike(config: Config, table: Mapping[str, tuple[Any, ...]]) -> str:
    """The first thing that a config says and a table has not, as a sentence names it."""
    said = dict(config)
    found = (
        n for n, may in table.items() if n in said and not any(said[n] is m or said[n] == m for m in may)
    )
    name = next(found, "")
    return f"{name}={plain(json.dumps(said[name]))[:60]}" if name else ""


def model_under(folder: Path) -> Path:
    """The folder of the model that an adapter is of, or the folder itself where it holds no adapter alone."""
    if not is_adapter(folder):
        return folder
    base = named_base(folder)
    found = hub.fetch(base) if hub.is_id(base) else Path(base)
    if not is_file(found / "config.json"):
        name = f"name the base's folder in {CONFIG}"
        if in_checkpoint(folder):  # where nothing may be changed
            name = f"take the adapter out (panoply export RUN DIR --adapter) and {name} of DIR"
        raise PanoplyError(
            f"The adapter in {plain(folder)} is one of {plain(base)}, where there is no model: put its base there, or "
            f"{name}."
        )
    return found


def named_base(folder: Path) -> str:
    """The model that an adapter says it is of: a folder, or NAME/MODEL of the Hub, at a revision if it says one."""
    config = read_config(folder)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not base:
        raise PanoplyError(f"{plain(folder / CONFIG)} does not say which model its adapter is of.")
    return f"{base}@{revision}" if revision and "@" not in base and hub.is_id(base) else base


def name_for_others(folder: Path) -> None:
    """Have an adapter of a model in the Hub's cache name it as others find it: NAME/MODEL, and the revision."""
    config = dict(read_json(folder / CONFIG, dict))
    if base := config.get("base_model_name_or_path"):
        (folder / CONFIG).write_text(
            json.dumps(config | hub.address(Path(base)), indent=2, sort_keys=True) + "\n"
        )


def base_is_missing(folder: Path) -> str:
    """The folder that an adapter's base should be in, where it is not; empty where it is, or comes from the Hub."""
    base = named_base(folder)
    return "" if hub.is_id(base) or is_file(Path(base) / "config.json") else base
