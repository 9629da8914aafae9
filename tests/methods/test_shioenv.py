"""ShIOEnv: a grammar is recorded with every decision, and every argument has its own reward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit import assert_same
from tiny import bare, metrics

import panoply as pp
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.worlds.text.program import Program
from panoply.worlds.text.program_shell import command, follows, rewards


def test_masks_are_stored_and_applied_again_when_ratios_are_taken() -> None:
    world = Program(kind="shell")
    policy = open_policy("fresh", world, 0, "cpu")
    made = Collector(world, policy, seed=0).episodes([world.task("train", i) for i in range(6)])
    allowed, said = made.decisions.ragged("allowed"), ""
    for row in range(len(made)):
        said = "" if int(made["position"][row]) == 6 else said
        prompt = world.text(made.context.ragged("tokens")[int(made["context"][row])][:6].tolist())
        ids = sorted(world.tokens(follows(prompt, said)))
        assert sorted(allowed[row].tolist()) == ids
        said += world.text([int(made["action"][row])])
    assert_same(policy.score(made)["logp"].detach(), made["logp"])
    free = policy.score(made.without("allowed"))["logp"].detach()
    assert bool((free < made["logp"] - 0.1).any()), "without its mask the ratio would be wrong"


def test_arguments_are_paid_where_they_are_said() -> None:
    world = Program(kind="shell", margin=0.25)
    tasks = [world.task("train", i) for i in range(4)]
    made = Collector(world, open_policy("fresh", world, 0, "cpu"), seed=0).answers(
        tasks, [world.gold(t) for t in tasks]
    )
    for episode, task in zip(made.by("episode").keys.tolist(), tasks, strict=True):
        whole = command(task.data["problem"], world.text(world.gold(task))[:-1])
        found = made["signal:score"][made["episode"] == episode]
        assert_same(found, torch.tensor(rewards(whole, 0.25)))


def test_hints_keep_rewards_on_what_is_said() -> None:
    world = Program(kind="shell")
    task = world.task("train", 0)
    hinted = world.hint(task, 0.5)
    score, rest = world.grade(hinted, world.gold(hinted))["score"], world.gold(hinted)
    assert isinstance(score, list)
    whole = world.grade(task, world.gold(task))["score"]
    assert isinstance(whole, list)
    assert score == whole[-len(rest) :]


def test_settings_of_the_shell_are_refused_elsewhere() -> None:
    with pytest.raises(pp.PanoplyError, match="program.margin has no effect: it is of the kind shell"):
        Program(kind="ir", margin=0.1)
    with pytest.raises(pp.PanoplyError, match="program.masked has no effect"):
        pp.plan("grpo", "program:stack", settings={"world.masked": False})


def test_masked_and_unmasked_runs(tmp_path: Path) -> None:
    settings = {"sample.prompts": 16, "update.minibatches": 1, "update.epochs": 1, "run.held_out": 4}
    valid = []
    for masked in (True, False):
        run = tmp_path / str(masked)
        bare(run, "shioenv", model="fresh", steps=1, settings={**settings, "world.masked": masked})
        last = metrics(run)[-1]
        assert last["worth"] <= last["arguments"] <= 8
        valid.append(last["valid"])
    assert valid[0] > 0.6 > 0.3 > valid[1]
