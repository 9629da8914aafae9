"""What every registered method must do, with no code for any of them: plan, run, save, resume, export, load."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import world_for
from spread import wide

import panoply as pp
from panoply import index, registry
from panoply.batch import Totals
from panoply.experience import Experience
from panoply.loops.learner import Learner
from panoply.loops.objective import Weighed
from panoply.planning import Plan
from panoply.policies.build import open_folder, warm_start
from panoply.progress import Progress
from panoply.run import Run
from panoply.scale.group import deal
from panoply.worlds.control.world import ControlWorld

METHODS = [e.name for e in registry.entries("method")]
WEIGHED = [
    e.name for e in index.works().values() if e.kind == "method" and {"on-policy", "dataset"} & {*e.tags}
]
SMALL = {
    "sample.prompts": 8,
    "sample.group": 4,
    "sample.slots": 8,
    "sample.warmup": 0,
    "sample.demonstrations": 8,
    "data.batch": 8,
    "data.prompts": 8,
    "data.answers": 4,
    "data.pairs": 32,
    "data.fit": 4,
    "sample.pairs": 32,
    "sample.fit": 4,
    "data.data.batch": 8,
    "models.critic.warmup": 0,
    "models.utterance_critic.warmup": 0,
    "models.utterance_critic.updates": 2,
    "models.utterance_critic.batch": 16,
    "models.utterance_critic.states": 16,
    "models.pretrained_value.warmup": 0,
    "sample.length": 16,
    "sample.random": 4,
    "replay.warmup": 4,
    "replay.every": 4,
    "replay.updates": 2,
    "replay.batch": 16,
}


def small(name: str, device: str = "cpu", **more: Any) -> Plan:
    """The method on the first world that serves it, with as little data as its settings allow."""
    world = world_for(name)
    plain = pp.plan(name, world)
    known, built = plain.method.settings(), plain.world()
    unused = ("replay.warmup", "replay.every") if "data" in known else ()
    fitting: dict[str, Any] = {
        path: value
        for path, value in SMALL.items()
        if isinstance(now := known.get(path, 0), int) and now > value and path not in unused
    }
    if isinstance(built, ControlWorld):
        fitting["policy.hidden"] = (8,)
    run: dict[str, Any] = {"held_out": 2, "steps": 2, "threads": 1, "device": device}
    run |= {"checkpoint_every": 1, "keep": 9, "evaluate_every": 0} | more
    if "judged" not in plain.method.needs():
        run["greedy"] = False
    model = "start" if isinstance(built, ControlWorld) or warm_start(built) else "fresh"
    return pp.plan(name, world, settings=fitting, model=model, **run)


def metrics(run: Path) -> list[dict[str, Any]]:
    """What was logged, but for what depends on the clock."""
    clock = ("seconds", "tokens_per_second", "peak_memory")
    return [{k: v for k, v in row.items() if not k.startswith(clock)} for row in Run.open(run).metrics()]


@pytest.fixture
def dealt(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Learners whose first gradient was made a second time, from rows dealt to two as learners elsewhere have them."""
    passes, seen = Learner.passes, set[int]()

    def both(learner: Learner, weighed: Weighed) -> Totals:
        if id(learner) not in seen:
            seen.add(id(learner))
            watch, learner.watch = learner.watch, None
            check_dealt(learner, weighed, passes)
            learner.watch = watch
        return passes(learner, weighed)

    monkeypatch.setattr(Learner, "passes", both)
    return seen


def check_dealt(learner: Learner, weighed: Weighed, passes: Callable[..., Totals]) -> None:
    """The gradient of all rows is the sum of those of two hands, which only get rows with their weights."""

    def gradient(rows: Experience) -> dict[str, torch.Tensor]:
        passes(learner, weighed._replace(rows=rows))
        named = learner.masters.named().items()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}

    hands = [gradient(rows) for rows in deal(weighed.rows, learner.terms, 2) if rows is not None]
    whole = gradient(weighed.rows)
    largest = max(float(slope.abs().max()) for part in (*hands, whole) for slope in part.values())
    for name, slope in whole.items():
        error = float((sum(hand[name] for hand in hands) - slope).abs().max()) if hands else 0.0
        assert error <= 1e-6 * largest, f"{name}: off by {error:.2g}, where the largest is {largest:.2g}"


@pytest.mark.parametrize("name", WEIGHED)
def test_rows_may_be_dealt(name: str, tmp_path: Path, dealt: set[int]) -> None:
    """Models of text in float64: centred advantages leave little of what is added up but the rounding of float32.

    What values and policies of control keep in float32 is off by up to 4e-7.
    """
    with wide():
        pp.train(small(name, steps=1), run=tmp_path / "run", progress=Progress())
    assert dealt


@pytest.mark.parametrize("name", METHODS)
def test_method(name: str, tmp_path: Path) -> None:
    plan = small(name)
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan

    trained = pp.train(plan, run=tmp_path / "whole", progress=Progress())
    assert Run.open(trained.run).status() == "finished"
    checkpoints = [c / "model" for c in sorted((trained.run / "checkpoints").iterdir())]
    weights = [[file.read_bytes() for file in sorted(f.glob("*.safetensors"))] for f in checkpoints]
    assert open_folder(checkpoints[-1]).fingerprint() == trained.fingerprint
    logged = metrics(trained.run)
    if plan.options.model == "start":  # new weights may earn nothing, and then nothing moves
        agreed = [row.get("degenerate_groups") == 1 and row.get("gradient_norm") == 0 for row in logged]
        moved = sum(before != after for before, after in itertools.pairwise(weights))
        assert moved == 2 - sum(agreed) > 0, "a step did not move the weights"
    assert [row["step"] for row in logged] == [1, 2]
    assert all(torch.tensor(row["loss"]).isfinite() for row in logged)

    # The same folder as it was after step 1: what came later is gone, and is made again bit for bit.
    stopped = tmp_path / "stopped"
    shutil.copytree(trained.run, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step-0000002")
    (stopped / "result.json").unlink()
    resumed = pp.train(resume=stopped, progress=Progress())
    assert resumed.fingerprint == trained.fingerprint
    assert metrics(stopped) == logged
    assert resumed.after == trained.after

    exported = pp.export(trained.run, tmp_path / "exported", which="last")
    assert open_folder(exported).fingerprint() == trained.fingerprint


@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_repeats(name: str, tmp_path: Path) -> None:
    """Equal plans give equal weights whatever global generator they find; another seed gives others."""
    plan = small(name)
    first = pp.train(plan, run=tmp_path / "first", progress=Progress())
    torch.manual_seed(99)
    again = pp.train(plan, run=tmp_path / "again", progress=Progress())
    assert again.fingerprint == first.fingerprint
    assert metrics(again.run) == metrics(first.run)
    other = dataclasses.replace(plan, options=dataclasses.replace(plan.options, seed=1, steps=1))
    assert pp.train(other, run=tmp_path / "other", progress=Progress()).fingerprint != first.fingerprint


DEEPER: dict[str, dict[str, Any]] = {"bupo": {"model": "fresh", "settings": {"world.layers": 8}}}
"""Published for models of more layers than any start has."""


@pytest.mark.parametrize("name", METHODS)
def test_entry(name: str) -> None:
    """An entry says what it is, and its presets are settings it has."""
    entry = registry.find("method", name)
    assert entry.doc
    assert entry.id == f"{name}@{entry.version}"
    assert entry.family
    if entry.base is not None:
        registry.find("method", entry.base)
    for preset in ("published", *entry.presets):
        world = entry.world or world_for(name)
        if preset not in ("published", "tiny") and registry.find("world", world).build.medium == "text":
            world = "cartpole"
        model = DEEPER.get(name, {}) if preset == "published" else {}
        assert pp.plan(name, world, preset=preset, **model).method_id == entry.id
