"""Low-rank adapters on a policy: only they learn, and they are what a checkpoint must remember.

The decoder of this library has its own (low_rank.py), merged into its weights. Models that transformers runs, and DoRA,
go through PEFT: separate products, without fused blocks, and several times slower.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from panoply.errors import PanoplyError, needs_extra, plain
from panoply.files import is_file
from panoply.lora import Lora
from panoply.policies import low_rank
from panoply.policies.adapter_folder import (
    CONFIG,
    WEIGHTS,
    adapted_layers,
    check_going_on,
    is_adapter,
    load_factors,
    model_under,
    read_adapter,
    settings_of,
    write_adapter,
)
from panoply.policies.decoder import Decoder
from panoply.policies.expert_adapters import expert_tensors
from panoply.policies.foreign import Foreign
from panoply.policies.text import TextPolicy
from panoply.policies.thoughts import read_thoughts, write_thoughts
from panoply.policies.weights import check_fit, read_weights, weight_files
from panoply.seeds import stable_hash


@dataclass(frozen=True)
class Adapted:
    """What a policy's adapters are, and the policy as it was before them, where that is at hand for nothing."""

    rank: int
    settings: Lora
    base: TextPolicy | None


def add_lora(
    policy: TextPolicy, rank: int, seed: int = 0, settings: Lora | None = None, folder: Path | None = None
) -> TextPolicy:
    """The policy with adapters of that rank: fresh ones, with which it starts unchanged, or those of a `folder`."""
    settings = settings or Lora()
    model = policy.model
    if isinstance(model, Foreign) or settings.dora:
        return _through_peft(policy, rank, seed, settings, folder)
    linear, experts = low_rank.linear_layers(model), expert_tensors(model)
    saved = None if folder is None else read_adapter(folder)
    _refuse_experts(model, settings)
    if saved is None:
        ranks = dict.fromkeys([*settings.layers(linear, rank), *settings.tensors(experts, rank)], rank)
    else:
        saved.check(linear | experts)
        ranks = saved.ranks(experts)
    scales = {name: settings.scale(own, rank) for name, own in ranks.items()}
    base = low_rank.adapt(model, ranks, scales, None if settings.base == "whole" else settings.base)
    before = TextPolicy(base, policy.tokenizer, shared=policy.shared)
    if saved is None:
        low_rank.start(model, torch.Generator().manual_seed(stable_hash("lora", seed) % 2**31))
    else:
        load_factors(model, saved)
    policy.adapted = Adapted(rank, settings, before if saved is None else None)
    return policy


def _refuse_experts(model: Any, settings: Lora) -> None:
    """A layer's experts are one tensor, which has a setting of its own."""
    if model.config.mixing is None:
        return
    inside = {part for name, _ in model.named_parameters() if ".mlp." in name for part in name.split(".")[3:]}
    inside -= {part for name in low_rank.linear_layers(model) for part in name.split(".")} | {
        "weight",
        "bias",
    }
    if named := [word for word in settings.target_modules if word in inside]:
        raise PanoplyError(
            f"lora.target_modules cannot name {named[0]}: routers get no adapters, and tensors of experts are named in "
            "lora.target_parameters (mlp.experts.gate_up_proj, mlp.experts.down_proj)."
        )


def begun_with(policy: TextPolicy) -> TextPolicy | None:
    """The policy as it was when its adapters were added: its base, without a second copy of anything.

    With adapters that went on from saved ones, a copy of the weights that they move; through PEFT there is none.
    """
    if policy.adapted is None or _peft_model(policy):
        return None
    return policy.adapted.base or policy.copy()


def open_adapted(
    opened: Callable[[str], TextPolicy],
    source: str,
    folder: Path | None,
    rank: int,
    seed: int,
    settings: Lora,
) -> TextPolicy:
    """The policy that `source` stands for with adapters: its own where its `folder` holds some, else fresh ones."""
    if folder is None or not is_adapter(folder):
        return add_lora(opened(source), rank, seed, settings)
    check_going_on(folder, rank, settings)
    policy = add_lora(opened(str(model_under(folder))), rank, seed, settings_of(folder)[1], folder)
    if (thoughts := read_thoughts(folder, policy.model.config.width)) is not None:
        policy.think(thoughts)
    return policy


def save_adapter(policy: TextPolicy, folder: Path, base: Path | None = None) -> None:
    """A folder that PEFT opens on the base model, by `AutoPeftModelForCausalLM` where a folder holds that."""
    assert policy.adapted is not None
    if (model := _peft_model(policy)) is None:
        write_adapter(policy.model, folder, policy.adapted.rank, policy.adapted.settings, base)
    else:
        _save_through_peft(model, folder, base)
    policy.tokenizer.save(folder)
    write_thoughts(policy.thoughts, folder)


def load_adapter(policy: TextPolicy, folder: Path) -> None:
    """Overwrite the adapters' weights with saved ones, and so those of thoughts."""
    if (thoughts := policy.thoughts) is not None:
        thoughts.load_from(folder)
    if (model := _peft_model(policy)) is None:
        load_factors(policy.model, read_adapter(folder))
        return
    if not is_file(folder / WEIGHTS):
        raise PanoplyError(f"{plain(folder)} holds no adapter: there is no {WEIGHTS}.")
    peft, saved = _peft(), read_weights([folder / WEIGHTS])
    expected = peft.get_peft_model_state_dict(model)
    check_fit({name: tuple(w.shape) for name, w in expected.items()}, saved, plain(folder))
    peft.set_peft_model_state_dict(model, saved)


# ------------------------------------------------------------------ through PEFT


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise needs_extra("peft", "peft", "DoRA, or --lora of a model that transformers runs,") from error
    return peft


def _peft_model(policy: TextPolicy) -> Any:
    """PEFT's own model: the policy's, or inside of one that transformers runs; None where there is none."""
    model = policy.model.inner if isinstance(policy.model, Foreign) else policy.model
    return model if hasattr(model, "peft_config") else None


def _through_peft(
    policy: TextPolicy, rank: int, seed: int, settings: Lora, folder: Path | None
) -> TextPolicy:
    if settings.base != "whole":
        raise PanoplyError(
            f"lora.base={settings.base} is for adapters of this library's own decoder: not for DoRA, nor for models "
            "that transformers runs."
        )
    peft, model = _peft(), policy.model
    named: Any = model.inner if isinstance(model, Foreign) else model
    linear = {
        name: tuple(m.weight.shape)
        for name, m in named.named_modules()
        if type(m).__name__ in ("Linear", "Conv1D")
    }
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if settings.alpha is None else settings.alpha,
        target_modules=settings.layers(linear, rank) if folder is None else adapted_layers(folder),
        target_parameters=list(settings.target_parameters) or None,
        lora_dropout=0.0,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT corrects fan_in_fan_out by itself, and says so at length
        torch.manual_seed(stable_hash("lora", seed) % 2**31)
        if isinstance(model, Foreign):
            model.inner = peft.get_peft_model(named, config)
        else:
            model = peft.get_peft_model(model, config)
    found = TextPolicy(model.eval(), policy.tokenizer, shared=policy.shared, files_beside=policy.files_beside)
    found.adapted = Adapted(rank, settings, None)
    if folder is not None:
        load_adapter(found, folder)
    return found


def merged_by_peft(model: Decoder | Foreign, folder: Path) -> Decoder | Foreign:
    """A model with an adapter of a kind that PEFT alone knows, merged into it."""
    read_weights(
        [folder / WEIGHTS] if is_file(folder / WEIGHTS) else weight_files(folder)
    )  # safetensors, and finite
    try:
        inner: Any = model.inner if isinstance(model, Foreign) else model
        opened = _peft().PeftModel.from_pretrained(inner, str(folder))
    except (RuntimeError, ValueError, KeyError) as error:
        said = plain(str(error).strip().splitlines()[0]).rstrip(".:")
        raise PanoplyError(
            f"The adapter in {plain(folder)} is of another base than its own: {said}."
        ) from error
    plain_again = opened.merge_and_unload()
    if isinstance(model, Foreign):
        model.inner = plain_again
    return model if isinstance(model, Foreign) else cast(Decoder, plain_again)


def _save_through_peft(model: Any, folder: Path, base: Path | None) -> None:
    """What PEFT would write of a decoder of this library is no use to others: they open the base with transformers,

    where the layers have the same names.
    """
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a form that nobody has filled in
    config = json.loads((folder / CONFIG).read_text())
    config |= {"auto_mapping": None, "task_type": "CAUSAL_LM"}
    config["base_model_name_or_path"] = None if base is None else str(base.resolve())
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
