"""Every method in one process and with two learners: how far their first two steps are apart.

python tests/spread.py [METHOD…]     # all that learn by terms, if none is named

The largest difference of any metric as a share of what it may be, or the sentence with which learners are refused.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

STRICT = {"loss": 1e-6, "gradient_norm": 1e-6}
"""How far the two may be apart: what is learned from."""
OTHERS = 1e-5
"""And what is only told: differences of sums over episodes, of which nothing may be left but rounding."""
SIGNS = ("accuracy", "rank_accuracy", "right_order", "likely_order", "inverse_order")
"""Shares of differences above 0, which before the first step are nothing but rounding."""


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


def apart(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> tuple[float, str]:
    """The largest difference as a share of what it may be, and of which metric of which step."""
    worst = (0.0, "")
    for number, (first, second) in enumerate(zip(one, two, strict=True)):
        if first.keys() != second.keys():
            return float("inf"), f"names {sorted(first.keys() ^ second.keys())}"
        for name, value in first.items():
            if isinstance(value, int | float) and name not in SIGNS:
                gap = abs(second[name] - value) / (STRICT.get(name, OTHERS) * max(1.0, abs(value)))
                worst = max(worst, (gap, f"{name} of step {number + 1}: {value} {second[name]}"))
    return worst


def main(names: list[str]) -> int:
    import torch
    from methods.test_conformance import small

    from panoply import registry
    from panoply.errors import PanoplyError
    from panoply.scale import placement

    torch.set_num_threads(1)
    wrong = 0
    for name in names or sorted(e.name for e in registry.entries("method")):
        try:
            plan = small(name)
            if plan.method.regime not in ("on_policy", "dataset"):
                continue
            with tempfile.TemporaryDirectory() as folder:
                placement.check(there := spread(plan))
                one, two = logged(plan, Path(folder) / "one"), logged(there, Path(folder) / "two")
            gap, where = apart(one, two)
            wrong += gap > 1
            print(f"{'ok   ' if gap <= 1 else 'APART'} {name} {gap:.2f} {where}", flush=True)
        except PanoplyError as refused:
            print(f"no    {name} {refused}", flush=True)
        except Exception as error:
            wrong += 1
            print(f"CRASH {name} {type(error).__name__}: {error}", flush=True)
            traceback.print_exc()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
