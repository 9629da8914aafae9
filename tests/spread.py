"""Every method in one process and with two learners: how far their first two steps are apart.

    python tests/spread.py [--float32] [METHOD…]     # all that learn by terms, if none is named

The largest difference of any metric as a share of what it may be, or the sentence with which learners are refused.
Weights are float64, where nothing but the order of sums is left to differ; `--float32` has them as runs have.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

STRICT = {"loss": 1e-6, "gradient_norm": 1e-6}
"""How far the two may be apart: what is learned from."""
OTHERS = 1e-5
"""And what is only told: differences of sums over episodes, of which nothing may be left but rounding."""
SIGNS = ("accuracy", "rank_accuracy", "right_order", "likely_order", "inverse_order")
"""Shares of differences above 0, which in the first step, where policy and reference are one, are but rounding."""
TIES = ("lipo",)
"""Weighed by ranks of scores, which are all 0 before the first step: in float32 exactly, in float64 up to rounding."""
WIDE = 2e-7
"""How far any number may be apart in float64: about 1e-15, but values, Qs and judges' scores stay float32."""


@contextmanager
def wide() -> Iterator[None]:
    """Policies opened within have weights of 64 bits, which no run of a user has: only tests ask whether what differs
    is rounding."""
    import torch

    from panoply.policies import build

    kept = dict(build.DTYPE)
    build.DTYPE["float32"] = torch.float64
    try:
        yield
    finally:
        build.DTYPE |= kept


def spread(plan: Any, **options: Any) -> Any:
    """The same plan with learners elsewhere."""
    options = {"learners": 2, "cluster": "threads", **options}
    return dataclasses.replace(plan, options=dataclasses.replace(plan.options, **options))


def logged(plan: Any, folder: Path) -> list[dict[str, Any]]:
    import panoply as pp
    from panoply.progress import Progress
    from panoply.run import Run

    pp.train(plan, run=folder, progress=Progress())
    told = ("seconds", "tokens_per_second", "peak_memory", "store_bytes")
    return [{k: v for k, v in row.items() if not k.startswith(told)} for row in Run.open(folder).metrics()]


def apart(
    one: list[dict[str, Any]], two: list[dict[str, Any]], most: float | None = None, tied: Sequence[str] = ()
) -> tuple[float, str]:
    """The largest difference as a share of what it may be (`most`, if it is said), and of which metric of which step.

    tied   metrics that are left out of every step
    """
    worst = (0.0, "")
    for number, (first, second) in enumerate(zip(one, two, strict=True)):
        if first.keys() != second.keys():
            return float("inf"), f"names {sorted(first.keys() ^ second.keys())}"
        for name, value in first.items():
            if isinstance(value, int | float) and name not in (tied if number else SIGNS):
                gap = abs(second[name] - value) / max(1.0, abs(value)) / (most or STRICT.get(name, OTHERS))
                worst = max(worst, (gap, f"{name} of step {number + 1}: {value} {second[name]}"))
    return worst


def compared(name: str, float32: bool) -> tuple[float, str]:
    """How far a method's two runs are apart. Networks of control and masked diffusion are float32 in any case."""
    from methods.test_conformance import small

    from panoply.scale import placement

    plan = small(name)
    placement.check(there := spread(plan))
    narrow = (
        float32 or plan.world().medium == "control" or "world:masks" in plan.method.needs() or name in TIES
    )
    with tempfile.TemporaryDirectory() as folder, nullcontext() if narrow else wide():
        one, two = logged(plan, Path(folder) / "one"), logged(there, Path(folder) / "two")
    tied = ("accuracy",) if plan.method.regime == "on_policy" else ()  # margins of own answers may be 0
    return apart(one, two, None if narrow else WIDE, tied)


def main() -> int:
    import torch

    from panoply import registry
    from panoply.errors import PanoplyError

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", help="all that learn by terms, if none is named")
    parser.add_argument("--float32", action="store_true", help="weights as runs have them")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    wrong = 0
    for name in chosen.methods or sorted(e.name for e in registry.entries("method")):
        if registry.find("method", name).build().regime not in ("on_policy", "dataset"):
            continue
        try:
            gap, where = compared(name, chosen.float32)
            wrong += gap > 1
            print(f"{'ok   ' if gap <= 1 else 'APART'} {name} {gap:.2g} {where}", flush=True)
        except PanoplyError as refused:
            print(f"no    {name} {refused}", flush=True)
        except Exception as error:
            wrong += 1
            print(f"CRASH {name} {type(error).__name__}: {error}", flush=True)
            traceback.print_exc()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
