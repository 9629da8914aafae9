"""Low-rank adapters through PEFT: only they learn, and they are what a checkpoint must remember."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from panoply.errors import PanoplyError, needs_extra
from panoply.policies.decoder import Decoder
from panoply.policies.text import TextPolicy
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
    if not isinstance(policy.model, Decoder):
        raise PanoplyError("--lora needs a Llama, Qwen2, Qwen3 or Mistral layout.")
    peft = _peft()
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS), lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stable_hash("lora", seed) % 2**31)
        model = peft.get_peft_model(policy.model, config)
    return TextPolicy(model.eval(), policy.tokenizer, shared=policy.shared, companions=policy.companions)


def save_adapter(policy: TextPolicy, folder: Path) -> None:
    """A folder that PEFT opens on the base model."""
    model: Any = policy.model
    model.save_pretrained(str(folder))


def load_adapter(policy: TextPolicy, folder: Path) -> None:
    """Overwrite the adapters' weights with saved ones."""
    from safetensors.torch import load_file

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise PanoplyError(f"{folder} holds no adapter: there is no {file.name}.")
    _peft().set_peft_model_state_dict(policy.model, load_file(file))
