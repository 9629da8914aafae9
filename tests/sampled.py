"""Whole runs with samplers against one process: weights and metrics, bit for bit.

    python tests/sampled.py [--samplers N] [--steps N] [METHOD…]

Samplers are threads here: what differs from processes is where they are, and tests/scale/ has runs of those. The one
process keeps its batches from getting small, as samplers do (`STEADY`); without that the last bits differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

CLOCK = ("seconds", "store_bytes", "tokens_per_second", "peak_memory")


def differing(name: str, samplers: int, steps: int) -> str:
    """What differs, in words; empty where nothing does."""
    from sweep import outcome, small

    plan = small(name)
    if plan.method.regime != "on_policy" or plan.world().medium != "text":
        return "–"
    plan = dataclasses.replace(plan, options=dataclasses.replace(plan.options, steps=steps))
    spread = dataclasses.replace(plan.options, samplers=samplers, cluster="threads")
    told = outcome(plan), outcome(dataclasses.replace(plan, options=spread))
    if not all(one.startswith("[") for one in told):
        return "" if told[0] == told[1] else " | ".join(one[:200] for one in told)
    (mark, rows, _), (other, others, _) = map(json.loads, told)
    for one, two in zip(rows, others, strict=True):
        names = [k for k in {*one, *two} if not k.startswith(CLOCK) and one.get(k) != two.get(k)]
        if names:
            return ", ".join(f"{k} {one.get(k)} → {two.get(k)}" for k in sorted(names))
    return "" if mark == other else f"weights {mark} → {other}"


def main() -> int:
    import torch

    from panoply import registry
    from panoply.rollout.engine import STEADY, TextEngine

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", help="all, if none is named")
    parser.add_argument("--samplers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    defaults: dict[str, Any] = TextEngine.__init__.__kwdefaults__
    defaults["least"] = STEADY
    wrong = 0
    for name in chosen.methods or sorted(e.name for e in registry.entries("method")):
        found = differing(name, chosen.samplers, chosen.steps)
        if found != "–":
            print(f"{name}: {found or 'the same'}", flush=True)
        wrong += found not in ("", "–")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
