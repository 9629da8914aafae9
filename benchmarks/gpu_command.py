"""LoRA as people run it: a model's folder, a file of prompts, a reward, and `panoply train` as its own process.

The cell `lora-command` of the GPU benchmark. PEFT opens the adapter that the run leaves, and its logits must be ours.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu_models import MODELS
from panoply.policies.decoder import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.policies.tokenizer import Tokenizer

if TYPE_CHECKING:
    from benchmarks.gpu import Shape

LETTERS = "abcdefghijklmnopqrstuvwxyz "
REWARD = "def by_length(completions, **_):\n    return [len(text) % 7 / 7 for text in completions]\n"


def measure(shape: Shape, steps: int = 6, warm: int = 2) -> dict[str, Any]:
    """Seconds of a step as the run's own metrics have them, and how far PEFT's logits are from ours."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _prepare(folder, shape)
        settings = {
            "sample.prompts": shape.prompts, "sample.group": shape.group, "sample.max_tokens": shape.completion,
            "regularise.kl": "none", "update.lr": 1e-3, "run.held_out": 2, "run.evaluate_every": 0,
        }  # fmt: skip
        chosen = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        asked = ["--model", "model", "--lora", str(shape.lora), "--dtype", "bfloat16", "--steps", str(steps)]
        data = ["--data", "data.jsonl", "--reward", "reward.py:by_length", "--run", "run", "--quiet"]
        _panoply(folder, "train", "grpo", *asked, *data, *chosen)
        _panoply(folder, "export", "run", "adapter", "--adapter", "--which", "last")
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        kept = rows[warm:]
        found = {
            name: statistics.median(row[f"seconds_{name}"] for row in kept) for name in ("sample", "learn")
        }
        times = [row["seconds"] for row in rows]
        whole = [b - a for a, b in zip(times[warm - 1 :], times[warm:], strict=False)]
        return {
            **found,
            "step": statistics.median(whole),
            "first_step_s": times[0],
            "gap": kept[0]["step0_gap"],
            "decisions": [row["decisions"] for row in rows],
            **_opened(folder),
        }


def _prepare(folder: Path, shape: Shape) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = DecoderConfig.from_hf(MODELS[shape.model])
    policy = TextPolicy.fresh(config, Tokenizer.of_characters(LETTERS), dtype=torch.bfloat16, device=device)
    policy.save(folder / "model")
    chance = random.Random(0)
    prompts = ("".join(chance.choices(LETTERS, k=shape.prompt - 1)) for _ in range(32 * shape.prompts))
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "reward.py").write_text(REWARD)


def _panoply(folder: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "panoply", *words], cwd=folder, check=True)


@torch.no_grad()
def _opened(folder: Path) -> dict[str, float]:
    """The largest differences from our logits, on a CPU in float32: of PEFT's, and of the model's before adapters."""
    from peft import AutoPeftModelForCausalLM

    text = torch.randint(3, 25, (2, 40), generator=torch.Generator().manual_seed(0))
    theirs = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter", dtype=torch.float32).eval()
    ours, before = (
        TextPolicy.load(folder / name, torch.float32).model(text) for name in ("adapter", "model")
    )
    return {
        "peft_off": float((theirs(text).logits - ours).abs().max()),
        "learned": float((before - ours).abs().max()),
    }
