"""Low-rank adapters through PEFT: only they learn, and they are what a checkpoint must remember."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from panoply.errors import PanoplyError, needs_extra, plain
from panoply.files import is_file
from panoply.policies.foreign import Foreign
from panoply.policies.text import TextPolicy
from panoply.policies.weights import check_fit, read_weights
from panoply.seeds import stable_hash

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise needs_extra("peft", "peft", "--lora") from error
    return peft


def add_lora(policy: TextPolicy, rank: int, seed: int = 0) -> TextPolicy:
    """The policy with fresh adapters of that rank on every linear layer; α is twice the rank. It starts unchanged."""
    peft, model = _peft(), policy.model
    foreign = isinstance(model, Foreign)
    targets = "all-linear" if foreign else list(TARGETS)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT corrects fan_in_fan_out by itself, and says so at length
        torch.manual_seed(stable_hash("lora", seed) % 2**31)
        if foreign:
            model.inner = peft.get_peft_model(model.inner, config)
        else:
            model = peft.get_peft_model(model, config)
    return TextPolicy(model.eval(), policy.tokenizer, shared=policy.shared, files_beside=policy.files_beside)


def adapted(policy: TextPolicy) -> Any:
    """PEFT's own model: the policy's, or inside of one that transformers runs."""
    return policy.model.inner if isinstance(policy.model, Foreign) else policy.model


def save_adapter(policy: TextPolicy, folder: Path, base: Path | None = None) -> None:
    """A folder that PEFT opens on the base model, by `AutoPeftModelForCausalLM` where a folder holds that.

    What PEFT would write of a decoder of this library is no use to others: they open the base with transformers, where
    the layers have the same names.
    """
    adapted(policy).save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a form that nobody has filled in
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {"auto_mapping": None, "task_type": "CAUSAL_LM"}
    config["base_model_name_or_path"] = None if base is None else str(base.resolve())
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_adapter(policy: TextPolicy, folder: Path) -> None:
    """Overwrite the adapters' weights with saved ones."""
    file = folder / "adapter_model.safetensors"
    if not is_file(file):
        raise PanoplyError(f"{plain(folder)} holds no adapter: there is no {file.name}.")
    peft, model = _peft(), adapted(policy)
    saved = read_weights([file])
    expected = peft.get_peft_model_state_dict(model)
    check_fit({name: tuple(w.shape) for name, w in expected.items()}, saved, plain(folder))
    peft.set_peft_model_state_dict(model, saved)
