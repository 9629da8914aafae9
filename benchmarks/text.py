"""GRPO on text, two cores, equal work: TRL 1.16 and Panoply side by side.

    python benchmarks/text.py              all cells, then the table (make bench-text)
    python benchmarks/text.py --cell panoply-1-ends   one cell; cells that are there already are kept

Both sides load the same model folder (0.86 million parameters, random weights), sample 16 prompts × 8 completions at
temperature 1, score them with the same reward, and take one clipped step with Adam and without KL. A completion ends
with the end token or after 32 (`ends`, as in use), or has exactly 32 tokens (`full`). A step is generation, scoring
and training. Each cell is a process of its own, on one thread or two; three steps warm up, then ten are timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

PROMPTS, GROUP, PROMPT, LENGTH, WARM, TIMED = 16, 8, 16, 32, 3, 10
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
RESULTS = Path("results/bench-text")
SIDES = ["trl-default", "trl-best", "panoply"]
CELLS = [f"{side}-{threads}-{work}" for work in ("ends", "full") for threads in (1, 2) for side in SIDES]


def reward(text: str) -> float:
    """The share of digits: anything both sides can compute alike."""
    return sum(c.isdigit() for c in text) / max(1, len(text))


def make_model(folder: Path) -> None:
    from panoply.policies.decoder import DecoderConfig
    from panoply.policies.text import TextPolicy
    from panoply.policies.tokenizer import Tokenizer

    tokenizer = Tokenizer.of_characters(ALPHABET)
    ids = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    config = DecoderConfig(
        tokenizer.vocab_size,
        width=128,
        layers=4,
        heads=4,
        inner=384,
        max_positions=128,
        tied=True,
        extras=ids,
    )
    TextPolicy.fresh(config, tokenizer, seed=0).save(folder)


def prompt(index: int) -> str:
    from panoply.seeds import numpy_rng

    return "".join(numpy_rng("bench", index).choice(list(ALPHABET), PROMPT))


# ------------------------------------------------------------------ the two sides


def panoply_steps(folder: Path, threads: int, ends: bool) -> tuple[list[float], float]:
    """Seconds of each step, and tokens of a completion."""
    import panoply as pp
    from panoply.progress import Progress
    from panoply.registry import world
    from panoply.worlds.world import Task, TextWorld

    @world("bench@1")
    @dataclass(frozen=True)
    class Bench(TextWorld):
        """Random prompts, digits are good."""

        model: str = ""
        preset: ClassVar[str] = "published"

        @cached_property
        def tokenizer(self) -> Any:
            from panoply.policies.tokenizer import Tokenizer

            return Tokenizer.load(self.model)

        @property
        def max_tokens(self) -> int:
            return LENGTH

        @property
        def stop_tokens(self) -> tuple[int, ...]:
            return (self.tokenizer.eos_id,) if ends else ()

        def task(self, split: str, index: int) -> Task:
            return Task(index % 2**40, tuple(self.tokenizer.encode(prompt(index % 4096))))

        def grade(self, task: Task, answer: Any) -> dict[str, float]:
            special = (self.tokenizer.eos_id, self.tokenizer.pad_id)
            return {"success": reward(self.tokenizer.decode([t for t in answer if t not in special]))}

    settings = {
        "sample.prompts": PROMPTS,
        "sample.group": GROUP,
        "regularise.kl": "none",
        "reduce": "token_mean",
        "update.lr": 1e-4,
        "world.model": str(folder),
    }
    options = {
        "steps": WARM + TIMED,
        "threads": threads,
        "evaluate_every": 0,
        "checkpoint_every": 1000,
        "held_out": 1,
    }
    with tempfile.TemporaryDirectory() as runs:
        made = pp.plan("grpo", "bench", model=str(folder), settings=settings, **options)
        done = pp.train(made, run=Path(runs) / "run", progress=Progress())
        lines = (done.run / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    phases = ("seconds_sample", "seconds_score", "seconds_credit", "seconds_learn")
    tokens = statistics.mean(s["decisions"] for s in steps) / (PROMPTS * GROUP)
    assert ends or tokens == LENGTH, "the work is not equal"
    return [sum(s.get(p, 0.0) for p in phases) for s in steps][WARM:], tokens


def trl_steps(folder: Path, threads: int, best: bool, ends: bool) -> tuple[list[float], float]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    torch.manual_seed(0)

    class Clock(TrainerCallback):  # type: ignore[misc]
        marks: ClassVar[list[float]] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.marks.append(time.perf_counter())

    lengths = []

    def score(completions: list[str], **fields: Any) -> list[float]:
        lengths.extend(len(ids) for ids in fields["completion_ids"])
        return [reward(c) for c in completions]

    tuned = {"gradient_checkpointing": False, "disable_dropout": True, "logging_steps": 1000} if best else {}
    with tempfile.TemporaryDirectory() as runs:
        arguments = GRPOConfig(
            output_dir=runs, max_steps=WARM + TIMED, per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP, max_completion_length=LENGTH, temperature=1.0, beta=0.0, learning_rate=1e-4,
            lr_scheduler_type="constant", use_cpu=True, bf16=False, report_to=[], save_strategy="no",
            disable_tqdm=True, generation_kwargs={} if ends else {"min_new_tokens": LENGTH}, **tuned,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
            reward_funcs=score,
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": prompt(i)} for i in range(512)]),
            callbacks=[Clock()],
        )
        trainer.train()
    assert ends or set(lengths) == {LENGTH}, (
        f"the work is not equal: completions of {sorted(set(lengths))} tokens"
    )
    return [b - a for a, b in itertools.pairwise(Clock.marks)][WARM - 1 :], statistics.mean(lengths)


# ------------------------------------------------------------------ cells and the table


def run_cell(cell: str) -> None:
    side, *kind, threads, work = cell.split("-")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        make_model(folder)
        if side == "panoply":
            steps, tokens = panoply_steps(folder, int(threads), work == "ends")
        else:
            steps, tokens = trl_steps(folder, int(threads), kind == ["best"], work == "ends")
    import torch

    facts = {"cell": cell, "steps": steps, "median": statistics.median(steps), "tokens": tokens}
    facts["torch"] = torch.__version__
    facts |= {"date": time.strftime("%Y-%m-%d"), "load": os.getloadavg()[0], "cores": os.cpu_count()}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{cell}.json").write_text(json.dumps(facts, indent=1))


def floor(tokens: float) -> float:
    """Seconds that the arithmetic of one step takes at the rate of a large matrix product here, on all cores."""
    import torch

    parameters = 4 * (4 * 128**2 + 3 * 128 * 384)
    generated = PROMPTS * GROUP * tokens
    a = torch.randn(1024, 1024)
    a @ a
    start = time.perf_counter()
    for _ in range(20):
        a @ a
    rate = 20 * 2 * 1024**3 / (time.perf_counter() - start)
    return (2 * parameters * generated + 6 * parameters * (PROMPTS * PROMPT + generated)) / rate


def table() -> None:
    for work, meaning in (
        ("ends", f"up to {LENGTH} tokens a completion"),
        ("full", f"exactly {LENGTH} tokens"),
    ):
        print(
            f"\n{meaning}\n{'cell':18} {'s a step':>9} {'quartiles':>15} {'tokens':>7} {'share of floor':>15}"
        )
        best: dict[str, float] = {}
        for cell in (c for c in CELLS if c.endswith(work) and (RESULTS / f"{c}.json").is_file()):
            facts = json.loads((RESULTS / f"{cell}.json").read_text())
            low, _, high = statistics.quantiles(facts["steps"], n=4)
            share = floor(facts["tokens"]) / facts["median"]
            print(
                f"{cell:18} {facts['median']:9.3f} {low:7.3f}–{high:.3f} {facts['tokens']:7.1f} {share:14.0%}"
            )
            side = next(s for s in SIDES if cell.startswith(s))
            best[side] = min(best.get(side, float("inf")), facts["median"])
        if len(best) == len(SIDES):
            trl = min(best["trl-default"], best["trl-best"])
            print(f"TRL's best over Panoply's best: {trl / best['panoply']:.2f}×")
            print(f"TRL as it comes over Panoply's best: {best['trl-default'] / best['panoply']:.2f}×")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cell", choices=CELLS)
    parser.add_argument("--again", action="store_true", help="measure cells that are there already")
    chosen = parser.parse_args()
    if chosen.cell:
        run_cell(chosen.cell)
        return
    for cell in CELLS:
        if chosen.again or not (RESULTS / f"{cell}.json").is_file():
            print(f"measuring {cell} …", flush=True)
            subprocess.run([sys.executable, __file__, "--cell", cell], check=True)
    table()


if __name__ == "__main__":
    main()
