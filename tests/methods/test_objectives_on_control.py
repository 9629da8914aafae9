"""Works of the objectives family learn by control, too: the same parts, in seconds, on CartPole.

Of works that sample as only text is sampled, the rest is put into GRPO.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny

from panoply.methods.base.grpo import grpo
from panoply.methods.objectives.hapo import token_average, uncertain_clip, uncertainty

QUICK = {
    "sample.prompts": 4,
    "sample.group": 8,
    "update.lr": 3e-3,
    "update.epochs": 4,
    "update.minibatches": 2,
    "policy.hidden": (32,),
    "run.held_out": 2,
    "run.evaluate_every": 0,
    "run.seed": 1,
}
"""Episodes from four starts, eight each, and large steps of a small network."""
METHODS = [
    "rec",
    "opmd",
    "asymre",
    "red-drop",
    "red-weight",
    "bapo",
    "lite-ppo",
    "pipo",
    "spo-single",
    "trpa",
    "r2vpo",
]
PARTS: dict[str, Any] = {
    "hapo": grpo().but(select=(uncertainty(),), credit=token_average(), surrogate=uncertain_clip()),
}
STEPS = 12
MORE: dict[str, dict[str, Any]] = {
    "hapo": {"reduce": "token_mean", "regularise.kl": "none"},
    "spo-single": {"sample.pool": 8, "models.tracker.estimate": 2},
}
"""What a work needs beside that: the same few starts again."""


@pytest.mark.parametrize("name", [*METHODS, *PARTS])
def test_it_balances_the_pole_for_longer(name: str, tmp_path: Path) -> None:
    """A policy that does not learn stays at 22 steps; every one here doubles that."""
    settings = {**QUICK, **MORE.get(name, {})}
    tiny.bare(tmp_path / "run", PARTS.get(name, name), world="cartpole", steps=STEPS, settings=settings)
    rows = tiny.metrics(tmp_path / "run")
    lengths = [row["episode_length"] for row in rows]
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert sum(lengths[-3:]) / 3 > 1.5 * sum(lengths[:2]) / 2, lengths
