"""How a `config.json` is read where it can say a thing in several ways, and what of it only transformers computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from panoply.errors import PanoplyError, plain
from panoply.files import brief
from panoply.policies import rotary
from panoply.policies.architectures import ARCHITECTURES, Architecture, without_positions
from panoply.policies.config_fields import check_understood
from panoply.policies.config_schema import check_config

ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_pytorch_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}
"""What may stand in a config, and what is meant."""
KINDS = {"full_attention", "sliding_attention"}
"""Of layers, where each has rotary settings of its own."""


def refuse_unsupported(raw: Mapping[str, Any], layout: Architecture, where: str) -> None:
    if raw.get("quantization_config"):
        dequantised = " (transformers opens gpt-oss's with Mxfp4Config(dequantize=True), and can save it so)"
        raise PanoplyError(
            f"{plain(where)} is of quantised weights; give the full-precision ones"
            f"{dequantised if raw['model_type'] == 'gpt_oss' else ''}."
        )
    if setting := only_in_transformers(raw):
        raise PanoplyError(f"{setting} is not part of the {raw['model_type']} layout as it runs natively.")
    check_understood(raw, layout)


def only_in_transformers(raw: Mapping[str, Any]) -> str:
    """A setting of a layout that runs natively, with a value that only transformers computes; empty: there is none.

    A model with one runs through transformers, as those of other layouts do.
    """
    if raw.get("quantization_config"):
        return ""  # refused, whatever else it says
    layout = ARCHITECTURES[raw["model_type"]]
    given = {**layout.defaults, **raw}
    named = activation_of(given, layout)
    if named not in ACTIVATE or (layout.sparse and not layout.sparse.clamped and named != "silu"):
        return f"{layout.activation_key}={plain(named)}"
    if given.get("clip_qkv"):
        return f"clip_qkv={given['clip_qkv']:g}"
    for where, rope in scalings_of(given, layout).items():
        kind = rope.get("rope_type") or rope.get("type") or "default"
        known = ("default",) if where == "sliding_attention." else (*rotary.TYPES, "su")
        if kind not in known:
            return f"{where}rope_type={plain(kind)}"
        if where and rope.get("truncate") is False:  # which it looks for outside of kinds, and does not find
            return f"{where}truncate=false"
    return ""


def native(raw: Mapping[str, Any], where: str = "config.json") -> bool:
    """Whether a model with such a config runs natively; one that no model can have is refused."""
    if raw.get("model_type") not in ARCHITECTURES:
        return False
    check_config(raw, where)
    return not only_in_transformers(raw)


def activation_of(raw: Mapping[str, Any], layout: Architecture) -> str:
    """By the layout's own key. The first Gemma's 'gelu' always meant its approximation, and experts with clamps have
    their own, whatever is named."""
    named = raw.get(layout.activation_key) or layout.activation
    if (named == "gelu" and layout.old_gelu) or (layout.sparse and layout.sparse.clamped):
        return layout.activation
    return ACTIVATIONS.get(named, named)


def scalings_of(raw: Mapping[str, Any], layout: Architecture) -> dict[str, Mapping[str, Any]]:
    """Rotary settings in both spellings: `rope_parameters` (transformers 5) and `rope_scaling` (before).

    Under the kind of layers that they are of, or nothing where there is one for all.
    """
    if not layout.local_theta:
        return {"": raw.get("rope_scaling") or raw.get("rope_parameters") or layout.rope}
    kinds = raw.get("rope_parameters") or {}
    far = {**(kinds.get("full_attention") or {}), **(raw.get("rope_scaling") or {})}
    return {"full_attention.": far, "sliding_attention.": kinds.get("sliding_attention") or {}}


def rope_of(raw: Mapping[str, Any], layout: Architecture) -> tuple[dict[str, Any], float]:
    """Positions of all layers, with their base; and the base of layers with a window, where those have one."""
    kinds, local = scalings_of(raw, layout), 0.0
    rope = dict(next(iter(kinds.values())))
    if layout.local_theta:
        _check_each_kind(raw)
        near = kinds["sliding_attention."].get("rope_theta") or raw.get("rope_local_base_freq")
        local = float(near or layout.local_theta)
    elif KINDS & rope.keys():
        raise PanoplyError("Rotary settings for each kind of layer are not part of this layout.")
    rope["rope_theta"] = rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if rope["rope_type"] == "su" or (
        rope["rope_type"] == "yarn" and rope.get("short_factor")
    ):  # its first names
        rope["rope_type"] = "longrope"
    longest = raw.get("max_position_embeddings")
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        of_all = None if layout.local_theta else raw.get("original_max_position_embeddings")
        original = of_all or rope.get("original_max_position_embeddings") or longest or 2048
        rope["original_max_position_embeddings"] = original
        if rope["rope_type"] == "yarn" and rope.get("attn_factor") and rope.get("factor"):
            # Written as well, for readers who know this name alone.
            rope["attention_factor"] = rotary.sharpness(rope)
        if rope["rope_type"] == "longrope":
            rope["factor"] = rope.get("factor") or (longest or original) / original
    return rope, local


def _check_each_kind(raw: Mapping[str, Any]) -> None:
    """Refuse rotary settings where transformers does not look for them, and goes on without."""
    each, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if each and not KINDS & each.keys():
        raise PanoplyError(
            "config.json has rotary settings of all layers under rope_parameters, which in this layout holds those of "
            "each kind of layer (full_attention, sliding_attention)."
        )
    if KINDS & scaling.keys():
        raise PanoplyError(
            "config.json has rotary settings of each kind of layer under rope_scaling: put them under rope_parameters."
        )


def unrotated_of(raw: Mapping[str, Any], layout: Architecture, layers: int) -> tuple[int, ...]:
    if not layout.unrotated:
        return ()
    still = without_positions(raw, layers)
    if len(still) < layers:
        raise PanoplyError(f"no_rope_layers of config.json is of {len(still)} layers, not of {layers}.")
    return tuple(i for i in range(layers) if still[i])


def windows_of(raw: Mapping[str, Any], layout: Architecture, layers: int) -> tuple[int, ...]:
    window, kinds = raw.get("sliding_window") or 0, raw.get("layer_types")
    if not layout.windows or (layout.window_switch and not raw.get("use_sliding_window")):
        window = 0
    if kinds is not None:
        _check_kinds(kinds, window, layout, layers)
        if layout.window_switch and raw.get("sliding_window") and not window and "sliding_attention" in kinds:
            raise PanoplyError(
                "config.json says that no layer has a window (use_sliding_window), and which ones have (layer_types)."
            )
    if not window:
        return ()
    if layout.windows == "all":
        return (window,) * layers
    if kinds is None:
        return tuple(window if near else 0 for near in layout.pattern(raw, layers)[:layers])
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _check_kinds(kinds: Sequence[str], window: int, layout: Architecture, layers: int) -> None:
    """Refuse kinds of layers that a layout does not have, whether or not they would make a difference."""
    if len(kinds) != layers:
        raise PanoplyError(f"layer_types of config.json is of {len(kinds)} layers, not of {layers}.")
    strange = set(kinds) - {"full_attention", *(["sliding_attention"] if layout.windows else [])}
    if layout.windows == "all" and window and "full_attention" in kinds:
        strange = {"full_attention"}
    if strange:
        raise PanoplyError(
            f"config.json has layers of kind {brief(min(strange))} (layer_types), which are not known to this layout."
        )
