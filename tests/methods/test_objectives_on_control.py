"""Works of the objectives family learn from text and by control: the same parts, in seconds, on `chain` and CartPole.

By control, of works that sample as only text is sampled, the rest is put into GRPO.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import panoply as pp
from panoply import registry
from panoply.experience import OWN, Experience, Segments
from panoply.methods.base.grpo import grpo
from panoply.methods.objectives.hapo import token_average, uncertain_clip, uncertainty
from panoply.parts import Part
from panoply.slots.surrogate.phases import in_phases

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
    "adora",
    "dcpo",
    "gbpo",
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
    "fiberpo",
    "apc-obj",
    "reg-grpo",
]
PARTS: dict[str, Any] = {
    "hapo": grpo().but(select=(uncertainty(),), credit=token_average(), surrogate=uncertain_clip()),
    "bupo": grpo().but(surrogate=in_phases(steps=4)),
}
STEPS = 9
MORE: dict[str, dict[str, Any]] = {
    **{name: {"reduce": "token_mean", "regularise.kl": "none"} for name in PARTS},
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


# ------------------------------------------------------------------ all of the family

FAMILY: dict[str, Any] = {
    listed.name: registry.find("method", listed.name).build()
    for listed in registry.works("method")
    if listed.family == "objectives"
}
AT_HOME = {"bpo", "mdpo"}
"""Learn by control from rollouts and a critic, in tests of their own."""
SHORT = {
    "sample.prompts": 4,
    "sample.group": 8,
    "update.lr": 1e-3,
    "update.epochs": 2,
    "update.minibatches": 2,
    "run.seed": 1,
    "run.held_out": 1,
    "run.greedy": False,
    "run.evaluate_every": 0,
    "run.device": "cpu",
}


ELSEWHERE = {"fiberpo-domain": "mixed", "urpo": "referee"}
"""What chain has not: several kinds of problem, a referee."""
LEAST = {"bupo": 0.0}
"""Of the gain: at first an inner layer's policy learns, and the whole one by what the two share alone."""


def gain(policy: Any, rows: Experience) -> float:
    """mean (R − mean_group(R))·Δlog π of own answers: above 0 where better answers have become likelier than worse.

    Answers that are alone in their group are compared with all.
    """
    rows = rows.take(rows["source"] == OWN)
    with torch.no_grad():
        moved = policy.score(rows)["logp"] - rows["logp"]
    episodes = rows.by("episode")
    earned, groups = episodes.sum(rows["signal:success"]), Segments(episodes.first(rows["group"]))
    usual = groups.rows(groups.mean(earned)) if int(groups.count.min()) > 1 else earned.mean()
    return float(((earned - usual) * episodes.sum(moved)).mean())


def short(name: str) -> dict[str, Any]:
    """`SHORT`, as far as a method has these settings, without anything that would keep the first step from learning."""
    parts = dict(FAMILY[name].parts())
    found = {f"{slot}.{of}" for slot in ("sample", "update") for of in parts[slot].settings()}
    settings = {path: value for path, value in SHORT.items() if path in found or path.startswith("run.")}
    if isinstance(schedule := parts["update"].settings().get("schedule"), Part):
        parts["update.schedule"] = schedule
    return settings | {f"{path}.warmup": 0 for path, part in parts.items() if "warmup" in part.settings()}


@pytest.mark.parametrize("name", [name for name, made in FAMILY.items() if made.regime == "on_policy"])
def test_after_a_step_on_chain_right_answers_are_likelier(name: str, tmp_path: Path) -> None:
    """Of the step's own answers, within their groups; a step that does nothing has a gain of 0."""
    choices: dict[str, Any] = {"settings": short(name), "steps": 2, "threads": 1, "progress": pp.Progress()}
    with pp.steps(name, ELSEWHERE.get(name, "chain"), run=tmp_path / "run", **choices) as steps:
        first = next(steps)
        assert gain(first.policy, first.experience) > LEAST.get(name, 0.05)
    assert math.isfinite(first.metrics["loss"])


def test_all_that_can_learn_by_control_is_among_those_that_do() -> None:
    """A new work of the family is named above, or cannot be planned on CartPole."""
    assert {*METHODS, *PARTS} | AT_HOME <= FAMILY.keys()
    for name in FAMILY.keys() - {*METHODS, *PARTS} - AT_HOME:
        with pytest.raises(pp.PanoplyError):
            pp.plan(name, "cartpole")
