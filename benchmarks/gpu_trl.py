"""TRL's side of the GPU benchmark: the same model layout, prompts, lengths, rewards and optimiser steps."""

from __future__ import annotations

import statistics
import tempfile
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from benchmarks.gpu import Shape

WORDS = 1000
LENGTH = "completions/mean_length"
FEW = {1: "One timed step.", 2: "Two timed steps."}
"""What is said of measurements with fewer than usual."""


def measure(
    shape: Shape, best: bool, continuous: bool, steps: int = 3, warm: int = 1, most: int = 64
) -> dict[str, Any]:
    """`best` has bf16 weights, no checkpointing and large micro-batches; otherwise TRL's defaults stand.

    What does not fit into memory is a result, too.

    most   rows of a micro-batch of 640 tokens each
    """
    micro = _rows_at_a_time(shape, most) if best else 8
    setting = "continuous batching" if continuous else "best" if best else "default"
    about = {"trl": version("trl"), "setting": setting, "micro_batch": micro}
    torch.cuda.reset_peak_memory_stats()
    try:
        whole, generating, lengths = _timed(shape, best, continuous, micro, warm + steps)
    except torch.OutOfMemoryError:
        return {**about, "failed": "out of memory"}
    step, sample = statistics.median(whole[warm:]), statistics.median(generating[warm:])
    return {
        **about,
        "step": step,
        "sample": sample,
        "learn": step - sample,
        "steps": whole,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "mean_length": lengths,
        "tokens_per_s": shape.sampled / step,
        **({"note": FEW[steps]} if steps in FEW else {}),
    }


def _rows_at_a_time(shape: Shape, most: int) -> int:
    rows = shape.prompts * shape.group
    micro = max(1, min(rows, most * 640 // (shape.prompt + shape.completion)))
    while rows % micro:
        micro -= 1
    return micro


def _timed(
    shape: Shape, best: bool, continuous: bool, micro: int, steps: int
) -> tuple[list[float], list[float], list[float]]:
    """Of every step its seconds, those of sampling and scoring among them, and the mean length of its answers."""
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    ends: list[float] = []
    generating: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            ends.append(time.perf_counter())

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(ids) % 1009 / 1009 for ids in completion_ids]

    trainer = GRPOTrainer(
        model=_model(shape, torch.bfloat16 if best else torch.float32),
        reward_funcs=reward,
        args=_config(shape, best, continuous, micro, steps),
        train_dataset=_prompts(shape, steps),
        processing_class=_tokenizer(),
        callbacks=[Clock()],
        peft_config=_adapters(shape),
    )
    inner = trainer._generate_and_score_completions

    def timed(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = inner(*args, **kwargs)
        torch.cuda.synchronize()
        generating.append(time.perf_counter() - began)
        return result

    trainer._generate_and_score_completions = timed
    began = time.perf_counter()
    trainer.train()
    lengths = [h[LENGTH] for h in trainer.state.log_history if LENGTH in h]
    return [b - a for a, b in zip([began, *ends], ends, strict=False)], generating, lengths


def _config(shape: Shape, best: bool, continuous: bool, micro: int, steps: int) -> Any:
    from trl import GRPOConfig

    settings: dict[str, Any] = {}
    if best:
        settings |= {"gradient_checkpointing": False, "optim": "adamw_torch_fused"}
    if continuous:
        settings |= {"use_transformers_continuous_batching": True}
    settings |= {name.removeprefix("sample."): value for name, value in shape.settings}
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=shape.prompts * shape.group // micro,
        num_generations=shape.group,
        max_completion_length=shape.completion,
        temperature=1.0,
        beta=0.0,
        bf16=True,
        logging_steps=1,
        max_steps=steps,
        save_strategy="no",
        report_to="none",
        seed=0,
        **settings,
    )


def _prompts(shape: Shape, steps: int) -> Any:
    """Panoply's, as words; of one step more than are made."""
    from datasets import Dataset

    from benchmarks.gpu import Fixed

    tasks = (Fixed(shape).task("train", i) for i in range(shape.prompts * (steps + 1)))
    return Dataset.from_dict({"prompt": [" ".join(f"w{t}" for t in task.prompt) for task in tasks]})


def _model(shape: Shape, dtype: torch.dtype) -> Any:
    from benchmarks.gpu_models import MODELS, transformers_model

    model = transformers_model(MODELS[shape.model], dtype)
    if shape.base != "whole":
        model = _in_few_bits(model, shape.base, dtype)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


def _in_few_bits(model: Any, base: str, dtype: torch.dtype) -> Any:
    """As bitsandbytes keeps it, which quantises what it reads from a folder."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    how = BitsAndBytesConfig(**(four if base == "nf4" else {"load_in_8bit": True}))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=how, dtype=dtype, device_map="cuda"
        )


def _adapters(shape: Shape) -> Any:
    """PEFT's, on the layers that Panoply adapts, where the work has any."""
    if not shape.lora:
        return None
    from peft import LoraConfig

    return LoraConfig(r=shape.lora, lora_alpha=2 * shape.lora, target_modules="all-linear", lora_dropout=0.0)


def _tokenizer() -> Any:
    """Words w0…w999, and an end that random weights hardly ever draw."""
    import tokenizers
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{i}": i for i in range(WORDS)} | {"<end>": WORDS, "<pad>": WORDS + 1, "<unk>": WORDS + 2}
    core = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", pad_token="<pad>", unk_token="<unk>"
    )
