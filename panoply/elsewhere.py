"""What settings are called elsewhere, so that a name from TRL, Stable-Baselines3 or a paper finds its own here."""

from __future__ import annotations

import dataclasses

from panoply.lora import Lora
from panoply.regimes import Method

NAMES = {
    "adam_beta1": ("update.beta1",),
    "adam_beta2": ("update.beta2",),
    "adam_epsilon": ("update.epsilon",),
    "batch_size": ("update.minibatches", "sample.prompts", "data.batch"),
    "beta": ("regularise.kl", "losses.logistic.beta"),
    "bf16": ("run.dtype",),
    "clip": ("surrogate.low", "surrogate.high"),
    "clip_range": ("surrogate.low", "surrogate.high"),
    "ent_coef": ("regularise.entropy",),
    "entropy_coef": ("regularise.entropy",),
    "epochs": ("update.epochs",),
    "epsilon": ("surrogate.low", "surrogate.high"),
    "epsilon_high": ("surrogate.high",),
    "eval_steps": ("run.evaluate_every",),
    "gae_lambda": ("credit.lam",),
    "gradient_accumulation_steps": ("run.micro_tokens",),
    "gradient_checkpointing": ("run.recompute",),
    "group_size": ("sample.group",),
    "kl": ("regularise.kl",),
    "kl_coef": ("regularise.kl",),
    "learning_rate": ("update.lr",),
    "load_in_4bit": ("lora.base",),
    "load_in_8bit": ("lora.base", "update.bits"),
    "lora_alpha": ("lora.alpha",),
    "lora_r": ("run.lora",),
    "lora_rank": ("run.lora",),
    "lora_target_modules": ("lora.target_modules",),
    "max_completion_length": ("sample.max_tokens",),
    "max_grad_norm": ("update.clip",),
    "max_new_tokens": ("sample.max_tokens",),
    "max_steps": ("run.steps",),
    "n_epochs": ("update.epochs",),
    "num_epochs": ("update.epochs",),
    "num_generations": ("sample.group",),
    "num_iterations": ("update.epochs",),
    "num_train_epochs": ("update.epochs",),
    "per_device_train_batch_size": ("sample.prompts", "data.batch"),
    "save_steps": ("run.checkpoint_every",),
    "save_total_limit": ("run.keep",),
    "target_modules": ("lora.target_modules",),
    "total_timesteps": ("run.steps",),
    "use_dora": ("lora.dora",),
    "use_rslora": ("lora.rslora",),
    "warmup_steps": ("update.schedule.warmup",),
}
OPTIONS = (
    "steps",
    "minutes",
    "seed",
    "held_out",
    "evaluate_every",
    "checkpoint_every",
    "micro_tokens",
    "keep",
    "lora",
    "dtype",
    "masters",
    "recompute",
    "offload",
    "device",
    "threads",
)
"""Settings of any run that are asked for by their bare names."""
ADAPTERS = tuple(f"lora.{setting.name}" for setting in dataclasses.fields(Lora))
"""Settings that are meant by names of adapters alone: a bare `alpha` is more often something else."""
TERMS = ("regularise.kl", "regularise.entropy")
"""What may be set though a method does not have it: it is added."""


def meant(method: Method, name: str, most: int = 3) -> list[str]:
    """The settings of a method that a name without its slot, or from another library, probably means."""
    slot, _, word = name.rpartition(".")
    word = word.lstrip("-").replace("-", "_").lower()
    known = [*method.settings(), *(f"run.{option}" for option in OPTIONS)]
    own = [path for path in known if path.rpartition(".")[2] == word and path not in (word, name)]
    more = (*ADAPTERS, *(TERMS if "regularise" in method.slot_of else ()))
    other = [path for path in NAMES.get(word, ()) if path in known or path in more]
    found = list(dict.fromkeys([*other, *own]))
    here = [path for path in found if slot and path.startswith(f"{slot.split('.')[0]}.")]
    return (here or found) if len(here or found) <= most else []
