"""One GPU: what a learner of a group costs beside a learner alone, and whether it learns the same, over NCCL.

    python -m benchmarks.fsdp_cell plain | whole | sharded … | all     (results/bench-gpu/fsdp-CELL.json; what is there
    python -m benchmarks.fsdp_cell --tiny all                           is skipped; --tiny tries the script on a CPU)

`plain` is the learner of one process. `whole` is one that shares (`scale/shards.py`): weights whole, masters and
moments with their owner. `sharded` is FSDP2 (`scale/sharded.py`), whose blocks are gathered for every pass. One GPU
is a group of one rank, NCCL takes no two ranks on a card: what is found are the costs of the layouts themselves, not
of a network. Rows are the anchor's, sampled once; the gradient is compared in float32, on shorter rows.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu import Fixed, Shape, method
from benchmarks.gpu_cells import command, now
from benchmarks.gpu_models import DTYPES, random_policy
from benchmarks.vllm_cell import TINY, opened
from panoply.experience import Experience
from panoply.loops.learner import Learner
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.scale.meeting import Distributed, free_address
from panoply.scale.sharded import Sharded, shard
from panoply.scale.shards import Shards

CELLS = ("plain", "whole", "sharded")
ANCHOR = Shape()
SHORT = Shape(prompts=4, group=4, prompt=64, completion=64)


def policy_of(shape: Shape, dtype: str) -> TextPolicy:
    return opened(shape) if shape.model == "tiny" else random_policy(shape.model, DTYPES[dtype])


def sampled(shape: Shape, dtype: str) -> Experience:
    """A batch of the shape, with advantages; the policy that drew it is forgotten."""
    grpo = method(shape)
    rows = grpo.sample(Collector(Fixed(shape), policy_of(shape, dtype), seed=0))
    rows = rows.with_columns(reward=grpo.reward(rows))
    return rows.with_columns(advantage=grpo.credit(rows))


def learner_of(cell: str, shape: Shape, dtype: str) -> tuple[Learner, Shards | Sharded | None]:
    policy, grpo = policy_of(shape, dtype), method(shape)
    if cell == "plain":
        return Learner(policy, grpo, total_steps=100, micro_tokens=0), None
    device = next(policy.model.parameters()).device
    meeting = Distributed(0, 1, free_address(), device)
    if cell == "sharded":
        shard(policy.model, nodes=1, ranks=1)
        learner = Learner(policy, grpo, total_steps=100, micro_tokens=0)
        return learner, Sharded(learner.masters, meeting, policy.model)
    shared: list[Shards] = []
    learner = Learner(
        policy,
        grpo,
        total_steps=100,
        micro_tokens=0,
        share=lambda masters: shared.append(Shards(masters, meeting)),
    )
    return learner, shared[0]


def step(learner: Learner, shards: Shards | Sharded | None, rows: Experience, number: int) -> None:
    """One move, as a rank of a group makes it."""
    if shards is None:
        learner.step(rows, number)
        return
    learner.passes(learner.weigh(rows, number))
    shards.sum()
    learner.mover.set_rate(number)
    shards.clip(learner.mover.limit)
    with shards.own_alone():
        learner.mover.move()
    shards.hand_around()


def gradient(cell: str, shape: Shape, rows: Experience) -> dict[str, Tensor]:
    learner, shards = learner_of(cell, shape, "float32")
    if shards is None:
        return learner.gradient(rows)
    learner.passes(learner.weigh(rows, 0))
    shards.sum()
    return shards.gradient()


def off(shape: Shape, cell: str) -> float:
    """The largest difference from the plain learner's gradient, in units of its largest entry."""
    rows = sampled(shape, "float32")
    wanted, found = gradient("plain", shape, rows), gradient(cell, shape, rows)
    _leave()
    largest = max(float(one.abs().max()) for one in wanted.values())
    assert wanted.keys() == found.keys()
    return max(float((wanted[name] - found[name]).abs().max()) for name in wanted) / largest


def measure(cell: str, tiny: bool, steps: int, warm: int) -> dict[str, Any]:
    shape, short = (TINY, TINY) if tiny else (ANCHOR, SHORT)
    apart = off(short, cell) if cell != "plain" else 0.0
    rows = sampled(shape, "bfloat16")
    began = now()
    learner, shards = learner_of(cell, shape, "bfloat16")
    started, seconds = now() - began, list[float]()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for number in range(warm + steps):
        before = now()
        step(learner, shards, rows, number)
        seconds.append(now() - before)
        print(json.dumps({"cell": cell, "number": number, "seconds": seconds[-1]}), flush=True)
    _leave()
    return {
        **asdict(shape),
        "learn": statistics.median(seconds[warm:]),
        "steps": seconds,
        "start_s": started,
        "gradient_off": apart,
        "backend": "nccl" if torch.cuda.is_available() else "gloo",
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    command(__doc__, "fsdp", CELLS, 5, measure)
