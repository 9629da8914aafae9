"""One GPU: a GRPO step of Panoply and of TRL at the same work. `make bench-gpu`, or one cell at a time:

    python -m benchmarks.gpu list | CELL… | table     (results/bench-gpu/CELL.json; a cell that has one is skipped)

Weights are random, ends are switched off, so that every step has the same number of tokens; rewards are pseudo-random.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.gpu_cells import kept, write
from benchmarks.gpu_models import DTYPES, MODELS, random_policy
from panoply import compose
from panoply.errors import PanoplyError, unknown
from panoply.footprint import SIZES
from panoply.kernels.together import begin
from panoply.loops.learner import Learner
from panoply.lora import Lora
from panoply.policies.lora import add_lora
from panoply.policies.tokenizer import Tokenizer
from panoply.regimes import OnPolicy
from panoply.rollout.graphs import _made
from panoply.rollout.text import Collector
from panoply.seeds import numpy_rng
from panoply.threads import keep_memory, pick_threads
from panoply.worlds.world import Task, TextWorld

RESULTS = Path("results/bench-gpu")
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""What tells one start of a machine from another, so that cells know whether they were measured beside one another."""
BYTES_A_SECOND, OPERATIONS_A_SECOND = 4.3e12, 790e12
"""Measured ceilings of one H200: a copy, counting bytes read and written, and a large bf16 matrix product."""


@dataclass(frozen=True)
class Shape:
    """The work of a cell, which both sides do."""

    prompts: int = 16
    group: int = 8
    prompt: int = 128
    completion: int = 512
    model: str = "0.5B"
    lora: int = 0
    """Rank of adapters on all linear layers; 0 trains every weight."""
    base: Literal["whole", "int8", "nf4"] = "whole"
    """How the weights under adapters are kept."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Further settings of the method, such as sample.top_p."""

    @property
    def sampled(self) -> int:
        return self.prompts * self.group * self.completion

    @property
    def trained(self) -> int:
        """Tokens in the forward pass that learns: a prompt counts once."""
        return self.prompts * self.prompt + self.sampled

    @classmethod
    def of(cls, cell: Mapping[str, Any]) -> Shape:
        """The work of a cell, by its result."""
        return cls(**{field.name: cell[field.name] for field in fields(cls) if field.name in cell})

    def floor(self) -> dict[str, float]:
        """Seconds that the fewest bytes (sampling) and operations (learning) take at the measured ceilings.

        In half precision. A prompt's keys are read once for its group, and nothing is computed twice.
        """
        raw, rows = MODELS[self.model], self.prompts * self.group
        width, layers, heads = raw["hidden_size"], raw["num_hidden_layers"], raw["num_attention_heads"]
        head, kv, size = raw["vocab_size"] * width, raw["num_key_value_heads"], width // heads
        each, experts = 3 * width * raw["intermediate_size"], raw.get("num_experts", 1)
        block = width * size * (2 * heads + 2 * kv)
        read = block + each * experts / raw.get(
            "num_experts_per_tok", 1
        )  # with many rows every expert is asked
        kept = 4 * layers * kv * size * (self.prompt * self.prompts + self.completion / 2 * rows)
        sample = self.completion * (2 * (head + layers * read) + kept) / BYTES_A_SECOND
        seen = self.prompts * self.prompt**2 / 2 + self.sampled * (self.prompt + self.completion / 2)
        passes = 4 if self.lora else 6  # frozen weights have no gradient
        learn = passes * (layers * (block + each) * self.trained + head * self.sampled)
        learn += 12 * layers * heads * size * seen
        return {"sample": sample, "learn": learn / OPERATIONS_A_SECOND}


class Fixed(TextWorld):
    """Random prompts of one length, answers of one length, and grades that are as good as random."""

    def __init__(self, shape: Shape):
        self.shape = shape

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.of_characters("ab")

    @property
    def max_tokens(self) -> int:
        return self.shape.completion

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return ()

    def task(self, split: str, index: int) -> Task:
        tokens = numpy_rng("bench", split, index).integers(0, 1000, self.shape.prompt)
        return Task(index, tuple(tokens.tolist()))

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        return {"success": sum(answer) % 1009 / 1009}


def method(shape: Shape) -> OnPolicy:
    """GRPO without a KL term, decisions averaged as TRL averages them by default."""
    settings = {"sample.prompts": shape.prompts, "sample.group": shape.group, "regularise.kl": "none"}
    settings |= {"reduce": "token_mean", **dict(shape.settings)}
    found = compose.resolve("grpo", settings=settings).method
    assert isinstance(found, OnPolicy)
    return found


def measure(
    shape: Shape, dtype: str = "bfloat16", steps: int = 3, warm: int = 2, micro_tokens: int = 0
) -> dict[str, Any]:
    """Steps of Panoply, phase by phase. The first ones, with capture and compilation, are left out."""
    torch.cuda.reset_peak_memory_stats()
    torch.set_num_threads(pick_threads(device="cuda"))  # all three as `panoply train` does
    keep_memory()
    begin()
    policy, grpo = random_policy(shape.model, DTYPES[dtype]), method(shape)
    if shape.lora:
        policy = add_lora(policy, shape.lora, settings=Lora(base=shape.base))
    collect = Collector(Fixed(shape), policy, seed=0)
    learner = Learner(policy, grpo, total_steps=100, micro_tokens=micro_tokens)
    found: list[dict[str, float]] = []
    for step in range(warm + steps):
        times = [_now()]
        rows = grpo.sample(collect)
        times.append(_now())
        rows = rows.with_columns(reward=grpo.reward(rows))
        rows = rows.with_columns(advantage=grpo.credit(rows))
        times.append(_now())
        metrics = learner.step(rows, step)
        times.append(_now())
        assert len(rows) == shape.sampled
        names = ("sample", "credit", "learn")
        found.append({n: b - a for n, a, b in zip(names, times, times[1:], strict=False)})
        found[-1] |= {"step": times[-1] - times[0], "gap": metrics["logp_gap"], "off": metrics["ratio_off"]}
        found[-1] |= {
            "entropy": float(rows["entropy"].mean()),
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        }
    kept = found[warm:]
    median = {n: statistics.median(f[n] for f in kept) for n in kept[0]}
    return {
        **asdict(shape),
        "dtype": dtype,
        "micro_tokens": learner.room.tokens,
        **median,
        "steps": found,
        "setup_s": sum(d.setup_seconds for d in _made.values()),
        "first_step_s": found[0]["step"],
        "ms_per_token": 1e3 * median["sample"] / shape.completion,
        "tokens_per_s": shape.sampled / median["step"],
    }


def cold(shape: Shape) -> dict[str, Any]:
    """The same where nothing was compiled before."""
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TRITON_CACHE_DIR"] = empty
        return measure(shape, steps=1, warm=1)


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def equality() -> dict[str, Any]:
    """What must hold before a clock starts: sampler, scorer, packed and padded rows, and transformers agree."""
    from benchmarks.gpu_equality import check

    return check()


def trl(
    shape: Shape, best: bool = False, continuous: bool = False, steps: int = 3, rows: int = 64
) -> dict[str, Any]:
    from benchmarks.gpu_trl import measure as measure_trl

    return measure_trl(shape, best=best, continuous=continuous, steps=steps, most=rows)


def command(shape: Shape) -> dict[str, Any]:
    from benchmarks.gpu_command import measure as measure_command

    return measure_command(shape)


def memory(size: str) -> dict[str, Any]:
    from benchmarks.gpu_memory import measure as measure_memory

    return measure_memory(size)


def learn() -> dict[str, Any]:
    from benchmarks.gpu_learn import learn as run_here

    return run_here()


def learn_in_trl() -> dict[str, Any]:
    from benchmarks.gpu_learn import learn_in_trl as run_there

    return run_there()


ANCHOR = Shape()
LONG = Shape(32, 16, 1024, 128)
LORA, LORA_7B, QLORA = Shape(lora=16), Shape(model="7B", lora=16), Shape(lora=16, base="nf4")
GEMMA2, MOE, FOREIGN = (Shape(model=f"{layout}-0.5B") for layout in ("gemma2", "moe", "cohere"))
TOP_P = Shape(settings=(("sample.top_p", 0.95),))
CELLS: dict[str, Callable[[], dict[str, Any]]] = {
    "equality": equality,
    "anchor": lambda: measure(ANCHOR, steps=5),
    "anchor-cold": lambda: cold(ANCHOR),
    "anchor-large-passes": lambda: measure(ANCHOR, steps=5, micro_tokens=17664),
    "anchor-float16": lambda: measure(ANCHOR, "float16"),
    "anchor-float32": lambda: measure(ANCHOR, "float32", steps=1, warm=1, micro_tokens=8192),
    "anchor-trl-best": lambda: trl(ANCHOR, best=True, steps=2),
    "anchor-trl-default": lambda: trl(ANCHOR),
    "anchor-trl-continuous": lambda: trl(ANCHOR, best=True, continuous=True),
    "short": lambda: measure(Shape(completion=128)),
    "far": lambda: measure(Shape(completion=2048)),
    "group-8": lambda: measure(Shape(32, 8, 1024, 128)),
    "prompt-1024": lambda: measure(LONG),
    "prompt-1024-completion-1024": lambda: measure(Shape(32, 16, 1024, 1024)),
    "1.5B": lambda: measure(Shape(model="1.5B")),
    "prompt-1024-trl": lambda: trl(LONG, best=True),
    "1.5B-trl": lambda: trl(Shape(model="1.5B"), best=True),
    "lora": lambda: measure(LORA, steps=5),
    "lora-command": lambda: command(LORA),
    "lora-trl": lambda: trl(LORA, best=True, steps=1),
    "lora-7b": lambda: measure(LORA_7B),
    "lora-7b-trl": lambda: trl(LORA_7B, best=True, steps=1),
    "lora-7b-trl-16": lambda: trl(LORA_7B, best=True, steps=1, rows=16),
    "qlora": lambda: measure(QLORA),
    "qlora-trl": lambda: trl(QLORA, best=True, steps=1),
    "qlora-7b": lambda: measure(replace(QLORA, model="7B")),
    "gemma2": lambda: measure(GEMMA2),
    "gemma2-trl": lambda: trl(GEMMA2, best=True, steps=1),
    "moe": lambda: measure(MOE),
    "moe-trl": lambda: trl(MOE, best=True, steps=1),
    "foreign": lambda: measure(FOREIGN),
    "foreign-trl": lambda: trl(FOREIGN, best=True, steps=1),
    "top-p": lambda: measure(TOP_P),
    "top-p-trl": lambda: trl(TOP_P, best=True, steps=1),
    "learn": learn,
    "learn-trl": learn_in_trl,
    **{f"memory-{size}": partial(memory, size) for size in SIZES},
}


def run(name: str) -> None:
    """One cell in this process; its result is written when it is whole."""
    began = time.perf_counter()
    result = CELLS[name]()
    about = {"cell": name, "date": date.today().isoformat(), "machine": torch.cuda.get_device_name()}
    about |= {"sitting": BOOT.read_text()[:8] if BOOT.exists() else ""}
    about |= {"torch": torch.__version__, "seconds": time.perf_counter() - began}
    place = RESULTS / f"{name}.json"
    before = kept(place) or {}
    if "step" in before:
        about["elsewhere"] = [*before.get("elsewhere", []), round(before["step"], 2)][-3:]
    write(place, {**about, **result})
    brief = ("sample", "learn", "step", "peak_gb", "gap", "off", "ms_per_token", "setup_s", "first_step_s")
    shown = {k: round(v, 5) for k in brief if isinstance(v := result.get(k), float)} or {
        k: v for k, v in result.items() if k != "curve"
    }
    print(name, json.dumps(shown), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("cells", nargs="*", help="cells to run; without any, all that have no result yet")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--trl", action="store_true", help="also TRL's at the same work, after each")
    given = parser.parse_args(arguments)
    if given.cells == ["list"]:
        print("\n".join(CELLS))
        return 0
    if given.cells == ["table"]:
        from benchmarks import gpu_table

        try:
            gpu_table.write()
        except PanoplyError as problem:
            parser.error(f"{problem} Remove it, and measure its cell again.")
        return 0
    if strange := [name for name in given.cells if name not in CELLS]:
        parser.error(str(unknown("cell", strange[0], CELLS)))
    if not torch.cuda.is_available():
        print("There is no CUDA device here, so the GPU benchmark is skipped.")
        return 0
    beside = (b for a in given.cells if given.trl for b in CELLS if b.startswith(f"{a}-trl"))
    asked = list(dict.fromkeys([*given.cells, *beside]))
    due = [c for c in asked or CELLS if given.again or kept(RESULTS / f"{c}.json") is None]
    if done := [c for c in asked if c not in due]:
        print(f"{', '.join(done)}: there is a result already, --again measures once more.")
    if len(due) == 1:
        run(due[0])
        return 0
    failed = 0
    for name in due:  # each in a process of its own: memory and compiled code start afresh
        command = [sys.executable, "-m", "benchmarks.gpu", "--again", name]
        failed |= subprocess.run(command, check=False).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
