"""What `panoply plan` expects a step to take of a GPU, beside what it takes: cells `memory-SIZE` of the GPU benchmark.

A step of 16 × 8 × (128 + 112) is one micro-batch of 16,384 tokens. All steps of a way see the same answers: what
is learned from them (`gain`, the mean of advantage times what the log-probability rose by) compares ways of one size.
"""

from __future__ import annotations

import gc
import json
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from benchmarks.gpu_models import DTYPES, random_policy
from panoply.footprint import GB, SIZES, Dimensions, Work, expected, held
from panoply.loops.learner import Learner
from panoply.lora import Lora
from panoply.policies.lora import add_lora
from panoply.rollout.text import Collector

STEPS, RATE = 3, 1e-5
STEP = Work(prompt=128, answer=112, rows=128, trained=16384, decisions=14336, micro_tokens=16384, width=2)
H200 = 143_771 * 2**20
"""Bytes of the GPU that cells are measured on."""
SCORED = 1024
"""Decisions whose log-probabilities are looked at again."""


@dataclass(frozen=True)
class Way:
    """How a size is trained."""

    lora: int = 0
    base: Literal["whole", "int8", "nf4"] = "whole"
    bits: Literal[32, 8] = 32
    masters: bool = True
    offload: bool = False

    def __str__(self) -> str:
        said = [
            f"--lora {self.lora}" if self.lora else "all weights",
            f"lora.base={self.base}" if self.base != "whole" else "",
            f"update.bits={self.bits}" if self.bits != 32 else "",
            "" if self.masters else "run.masters=false",
            "run.offload=activations" if self.offload else "",
        ]
        return ", ".join(filter(None, said))


WHOLE, ADAPTED = Way(), Way(lora=16)
LEAST = Way(bits=8, masters=False)
WAYS: dict[str, tuple[Way, ...]] = {
    "0.5B": (
        WHOLE, Way(bits=8), Way(masters=False), LEAST, Way(offload=True), ADAPTED, replace(ADAPTED, base="nf4"),
    ),
    "1.5B": (WHOLE, LEAST, ADAPTED, replace(ADAPTED, offload=True)),
    "3B": (WHOLE, LEAST, ADAPTED),
    "7B": (LEAST, ADAPTED, replace(ADAPTED, base="nf4")),
    "14B": (ADAPTED, replace(ADAPTED, base="nf4")),
}  # fmt: skip
"""What fits on 141 GB; activations of the larger sizes would take a minute to pin in host memory."""


def foreseen(size: str, way: Way, memory: int, work: Work) -> int:
    """Bytes at most, as a plan counts them."""
    sizes = Dimensions.of(SIZES[size])
    assert sizes is not None
    numbers = 2 * way.bits / 32 * (1 if way.bits == 32 else 1 + 4 / 256)
    holding = held(SIZES[size], numbers, way.lora, way.masters, base=way.base)
    return expected(sizes, holding, replace(work, frozen=way.lora > 0, offload=way.offload), memory).total


def measure(size: str) -> dict[str, Any]:
    """Every way of a size; one that fails says why, and the next begins."""
    rows = []
    for way in WAYS[size]:
        gc.collect()
        torch.cuda.empty_cache()
        began = time.perf_counter()
        try:
            found = _taken(size, way)
        except Exception as problem:  # the others are still worth having
            found = {"failed": f"{type(problem).__name__}: {str(problem).splitlines()[0]}"}
        rows.append({**asdict(way), "way": str(way), **found, "seconds": time.perf_counter() - began})
        print(json.dumps({"size": size, **rows[-1]}), flush=True)
    return {"size": size, "rows": rows}


def _taken(size: str, way: Way) -> dict[str, float]:
    from benchmarks.gpu import Fixed, Shape, method

    more = (("update.bits", way.bits), ("update.lr", RATE))
    shape = Shape(completion=112, model=size, settings=more)
    policy, grpo = random_policy(size, DTYPES["bfloat16"]), method(shape)
    if way.lora:
        policy = add_lora(policy, way.lora, settings=Lora(base=way.base))
    collect = Collector(Fixed(shape), policy, seed=0)
    kept = "activations" if way.offload else "none"
    learner = Learner(
        policy, grpo, total_steps=100, micro_tokens=16384, offload=kept, masters=way.masters
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    rows = grpo.sample(collect)
    rows = rows.with_columns(reward=grpo.reward(rows))
    rows = rows.with_columns(advantage=grpo.credit(rows))
    for step in range(STEPS):
        learner.step(rows, step)
    peak = torch.cuda.max_memory_allocated()
    memory = torch.cuda.get_device_properties(0).total_memory
    return {
        "expected_gb": foreseen(size, way, memory, STEP) / GB,
        "peak_gb": peak / GB,
        "held_gb": torch.cuda.memory_allocated() / GB,
        "tokens": learner.room.tokens,
        "gain": _gain(policy, rows),
    }


@torch.no_grad()
def _gain(policy: Any, rows: Any) -> float:
    some = rows.take(torch.arange(len(rows)) < SCORED)
    moved = policy.score(some)["logp"].cpu() - some["logp"]
    return float((moved * some["advantage"]).mean())
