"""A real learning run on one GPU: 33M new parameters imitate chain's careless teacher, then learn with GRPO.

python -m benchmarks.gpu_learn        (results/bench-gpu/learn.json and runs/gpu-*)
"""

from __future__ import annotations

import json
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from panoply import api
from panoply.policies.decoder import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.worlds.text.chain import Chain

SIZE: dict[str, Any] = {"width": 512, "layers": 8, "heads": 8, "kv_heads": 8, "inner": 2048, "tied": True}


def main(
    size: dict[str, Any] = SIZE,
    imitate: int = 400,
    learn: int = 200,
    device: str = "cuda",
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp())
    config = DecoderConfig(Chain().tokenizer.vocab_size, **size)
    policy = TextPolicy.fresh(config, Chain().tokenizer)
    policy.save(folder / "fresh")
    common: dict[str, Any] = {"device": device, "dtype": dtype, "held_out": 256, "checkpoint_every": 1000}
    began = time.perf_counter()
    warm = api.train(
        "sft", "chain", run=folder / "sft", model=str(folder / "fresh"), steps=imitate, evaluate_every=100,
        settings={"update.lr": 5e-4}, **common,
    )  # fmt: skip
    half = time.perf_counter()
    done = api.train(
        "grpo", "chain", run=folder / "grpo", model=str(folder / "sft"), steps=learn, evaluate_every=10,
        settings={"update.lr": 3e-5, "sample.prompts": 32, "sample.group": 16}, **common,
    )  # fmt: skip
    lines = [json.loads(line) for line in (folder / "grpo" / "metrics.jsonl").read_text().splitlines()]
    kept = (
        "step",
        "seconds",
        "held_out_sampled",
        "held_out_greedy",
        "success",
        "step0_gap",
        "tokens_per_second",
    )
    return {
        "cell": "learn",
        "date": date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "parameters": sum(p.numel() for p in policy.parameters()),
        "dtype": dtype,
        "imitation_s": half - began,
        "grpo_s": time.perf_counter() - half,
        "imitated": dict(warm.after),
        "before": dict(done.before),
        "after": dict(done.after),
        "curve": [{k: line[k] for k in kept if k in line} for line in lines if "held_out_sampled" in line],
    }


if __name__ == "__main__":
    found = main()
    target = Path("results/bench-gpu/learn.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(found, indent=1) + "\n")
    curve = [(c["step"], c["held_out_sampled"]) for c in found["curve"]]
    print("learn", json.dumps({k: found[k] for k in ("imitation_s", "grpo_s", "before", "after")}), curve)
