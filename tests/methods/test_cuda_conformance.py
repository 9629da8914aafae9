"""Every registered method on a GPU: it runs, resumes, and its first step is the host's."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import test_conformance as conformance
import torch
from test_conformance import METHODS, metrics

import panoply as pp
from panoply.errors import PanoplyError
from panoply.planning import Plan
from panoply.policies.build import open_folder
from panoply.progress import Progress
from panoply.run import Run

pytestmark = pytest.mark.gpu

CONTINUOUS = ["ppo", "sac", "td3", "iql"]


KINKED = {"gbpo"}
"""|ρ − 1| at the median: unchanged weights stand on its kink, and rounding decides which side's slope is taken."""


SEEDS = {"p3o": 1, "p3o-joint": 1}
"""Of seed 0 no pair of the first step differs: what is left is rounding, which is another on each device."""


def small(name: str, device: str = "cpu", **more: Any) -> Plan:
    return conformance.small(name, device, seed=SEEDS.get(name, 0), **more)


def alike(there: dict[str, Any], here: dict[str, Any], kinked: bool = False) -> None:
    """Where advantages are centred the loss itself is next to nothing, so that its slope must agree as well."""
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-3, abs=1e-3)
    if "gradient_norm" in here and not kinked:
        assert there["gradient_norm"] == pytest.approx(here["gradient_norm"], rel=0.02, abs=1e-6)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_real_actions(name: str, tmp_path: Path) -> None:
    world = "logged:pendulum-random" if name == "iql" else "pendulum"
    few = {"iql": {"replay.updates": 2}, "ppo": {"sample.length": 16}}
    early = {"sample.length": 16, "sample.random": 4, "replay.warmup": 4}
    settings = {**few.get(name, early), "policy.hidden": (8,)}
    run = {"steps": 2, "threads": 1, "held_out": 2, "evaluate_every": 0}
    logged = []
    for device in ("cuda", "cpu"):
        plan = pp.plan(name, world, settings=settings, device=device, **run)
        done = pp.train(plan, run=tmp_path / device, progress=Progress())
        logged.append(metrics(done.run)[0])
        assert logged[-1]["loss"] != 0
    alike(*logged)


@pytest.mark.parametrize("name", METHODS)
def test_method_with_adapters(name: str, tmp_path: Path) -> None:
    plain = small(name)
    beside = any(model.info.name == "token_values" for model in getattr(plain.method, "models", ()))
    if plain.world().medium != "text" or "judged" in plain.method.needs() or beside:
        with pytest.raises(PanoplyError, match="--lora"):
            small(name, lora=2)
        return
    plans = [small(name, device, lora=2) for device in ("cuda", "cpu")]
    there, here = (pp.train(plan, run=tmp_path / plan.options.device, progress=Progress()) for plan in plans)
    alike(metrics(there.run)[0], metrics(here.run)[0], name in KINKED)
    assert torch.tensor(metrics(there.run)[1]["loss"]).isfinite()


@pytest.mark.parametrize("name", METHODS)
def test_method(name: str, tmp_path: Path) -> None:
    plan = small(name, "cuda")
    there = pp.train(plan, run=tmp_path / "there", progress=Progress())
    here = pp.train(small(name, "cpu"), run=tmp_path / "here", progress=Progress())
    first, second = metrics(there.run)
    alike(first, metrics(here.run)[0], name in KINKED)
    assert torch.tensor(second["loss"]).isfinite()
    if plan.options.model == "start":  # new weights may earn nothing, and then nothing moves
        saved = sorted((there.run / "checkpoints").iterdir())
        start, *later = (open_folder(c / "model").fingerprint() for c in saved)
        moved = [before != after for before, after in pairwise([start, *later])]
        assert moved == [row.get("gradient_norm", 1) > 0 for row in (first, second)]
        assert any(moved)

    shutil.rmtree(there.run / "checkpoints" / "step-0000002")
    (there.run / "result.json").unlink()
    resumed = pp.train(resume=there.run, progress=Progress())
    assert Run.open(resumed.run).status() == "finished"
    alike(metrics(resumed.run)[1], second, name in KINKED)
