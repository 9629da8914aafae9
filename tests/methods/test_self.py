"""SELF: which prompts are learned from, what happens when none fails, and how interference is measured."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from kit import Tabular, hand
from torch import Tensor

import panoply as pp
from panoply.errors import PanoplyError
from panoply.evaluation import judged
from panoply.experience import Experience
from panoply.methods.reasoning_data.self import (
    exact_matrix,
    greedy_failed,
    hurt,
    interference,
    interference_matrix,
    told,
)
from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.run import Run
from panoply.worlds.control.bandit import Bandit
from panoply.worlds.control.world import Box
from panoply.worlds.world import Task


class Asked:
    """A collector of tasks 0, 1, …, of which those in `right` are answered rightly without chance; others half so."""

    def __init__(self, *right: int, version: int = 0):
        self.right, self.version, self.next, self.notes = right, version, 0, {}
        self.asked: list[tuple[list[int], int, float]] = []

    def tasks(self, n: int) -> list[Task]:
        self.next += n
        return [Task(i, (0,)) for i in range(self.next - n, self.next)]

    def episodes(self, tasks: list[Task], group: int, *, temperature: float, **sampling: Any) -> Experience:
        self.asked.append(([t.id for t in tasks], group, temperature))
        rows = [t.id for t in tasks for _ in range(group)]
        sure = [float(i in self.right) if temperature == 0 else 0.5 for i in rows]
        return hand(group=rows, task=rows, **{"signal:success": sure})


def asked(collect: Asked, **settings: Any) -> Experience:
    found: Experience = greedy_failed(prompts=3, group=2, temperature=0.7, **settings)(collect)  # type: ignore[arg-type]
    return found


def test_only_what_the_greedy_answer_gets_wrong_is_sampled() -> None:
    """Not what succeeds seldom: answers that are drawn play no part."""
    collect = Asked(0, 2)
    assert "train" not in asked(collect)
    assert collect.asked == [([0, 1, 2], 1, 0.0), ([1], 2, 0.7)]
    assert collect.notes == {"failed": pytest.approx(1 / 3), "groups_asked": 1}


def test_a_batch_in_which_none_fails_is_passed_over() -> None:
    collect = Asked(0, 1, 2, 4)
    asked(collect)
    assert collect.asked == [([0, 1, 2], 1, 0.0), ([3, 4, 5], 1, 0.0), ([3, 5], 2, 0.7)]
    assert collect.notes == {"failed": pytest.approx(2 / 6), "groups_asked": 2}


def test_failing_prompts_are_drawn_until_there_are_enough() -> None:
    collect = Asked(0, 2, 3)
    asked(collect, refill=True)
    assert collect.asked[-1] == ([1, 4, 5], 2, 0.7)
    short = Asked(0, 2, 3)
    asked(short, refill=True, rounds=1)
    assert short.asked[-1] == ([1], 2, 0.7)


def test_without_a_failing_prompt_nothing_is_learned() -> None:
    with pytest.raises(PanoplyError, match="None of 6 prompts is answered wrongly by greedy decoding"):
        asked(Asked(*range(6)), rounds=2)
    later = Asked(*range(6), version=7)
    found = asked(later, rounds=2)
    assert found["train"].tolist() == [False, False]
    assert later.notes == {"failed": 0.0, "groups_asked": 0}


# ------------------------------------------------------------------ interference


def experiences() -> tuple[Experience, Experience]:
    """Solutions to three problems, and two answers to each; problems 0 and 1 have a state in common."""
    solutions = hand(group=[0, 1, 1, 2], episode=[0, 1, 1, 2], state=[0, 1, 0, 2], action=[1, 0, 2, 3])
    sampled = hand(
        group=[0, 0, 0, 1, 1, 2, 2],
        episode=[0, 1, 1, 2, 3, 4, 5],
        state=[0, 0, 0, 1, 1, 2, 2],
        action=[1, 2, 0, 0, 1, 3, 3],
        reward=[1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0],
    )
    return solutions, sampled


def test_the_matrix_is_what_a_small_step_does() -> None:
    """Step along problem x′ alone, and look at log π of the solution to x."""
    policy, (solutions, sampled) = Tabular(), experiences()
    found = interference_matrix(policy, solutions, sampled)
    advantage = {0: 0.5, 1: -0.5, 2: -0.5, 3: 0.5, 4: 0.0, 5: 0.0}
    deviation = 0.5**0.5 + 1e-4

    def likely() -> Tensor:
        return solutions.by("group").sum(policy.score(solutions)["logp"]).detach()

    before, size = likely(), 1e-5
    for at in range(3):
        mine = sampled.take(sampled["group"] == at)
        a = torch.tensor([advantage[e] / deviation / 2 for e in mine["episode"].tolist()])
        slope = torch.autograd.grad((policy.score(mine)["logp"] * a).sum(), policy.logits)[0]
        with torch.no_grad():
            policy.logits += size * slope
        assert ((likely() - before) / size).tolist() == pytest.approx(found[:, at].tolist(), abs=1e-4)
        with torch.no_grad():
            policy.logits -= size * slope
    assert found[0, 0] > 0
    assert found[:, 2].tolist() == [0, 0, 0], "all answers were right, and nothing is learned"
    assert found[2].tolist() == [0, 0, 0], "nobody shares its state"
    assert found[1, 0] != 0
    assert hurt(torch.tensor([[1.0, -2.0, 0.0], [3.0, -4.0, -1.0], [0.0, 0.0, -9.0]])) == pytest.approx(2 / 3)


def test_numbers_of_a_run_by_hand() -> None:
    """Of ten answers 8, 5, 5, 0 were right, then 10, 10, 0, 0."""
    before, after = torch.tensor([0.8, 0.5, 0.5, 0.0]).double(), torch.tensor([1.0, 1.0, 0.0, 0.0]).double()
    found = told(before, after, torch.tensor([1.0, 0.5, -2.0, -0.1]), 10, 2)
    assert found["pass@1 first"] == pytest.approx(0.45)
    assert found["pass@2 last"] == 0.5
    assert found["pass@2 first"] == pytest.approx((1 - 1 / 45 + 2 * (1 - 10 / 45)) / 4)
    assert found["problems lost"] == 1
    assert found["solutions that became less likely"] == 0.5
    expected = np.corrcoef([0.8, 0.5, 0.5, 0.0], [0.2, 0.5, -0.5, 0.0])[0, 1]
    assert found["correlation of first success and gain"] == pytest.approx(expected)


def test_problems_with_features_of_their_own_do_not_interfere() -> None:
    found = interference(problems=8, answers=5)
    assert found["40 features"]["steps that hurt another problem"] == 0
    assert found["5 features"]["steps that hurt another problem"] > 0.3
    assert all(row["mean effect on itself"] > 0 for row in found.values())


def test_the_exact_matrix_is_that_of_the_softmax() -> None:
    dice = torch.Generator().manual_seed(0)
    features = torch.randn(3, 4, 2, generator=dice, dtype=torch.double)
    right = torch.tensor([[1.0, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]).double()
    theta = torch.randn(2, generator=dice, dtype=torch.double, requires_grad=True)
    policy = (features @ theta).softmax(-1)
    solved = (policy * right).sum(-1)
    here = torch.stack([torch.autograd.grad(s.log(), theta, retain_graph=True)[0] for s in solved])
    gain = torch.stack([torch.autograd.grad(s, theta, retain_graph=True)[0] for s in solved])
    assert torch.allclose(exact_matrix((features @ theta).detach(), features, right), here @ gain.T)


# ------------------------------------------------------------------ the bandit whose problems share features


def test_a_policy_weighs_features_alike_everywhere(tmp_path: Path) -> None:
    world = Bandit("problems", problems=5, arms=4, features=3, seen="features")
    policy = ControlPolicy.fresh(world.observation, world.action, PolicySpec(hidden=(), shared=True), 1)
    theta = dict(policy.named_parameters())["layers.each.layers.0.weight"].detach().numpy()[0]
    phi = world.tables.features
    logits = phi.astype(np.float32) @ theta
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    seen = phi.reshape(5, -1).astype(np.float32)
    np.testing.assert_allclose(policy.chances(seen), expected, rtol=1e-5)
    np.testing.assert_allclose(policy.model.numpy()(seen, np.zeros(5, int)), logits, rtol=1e-4, atol=1e-5)
    policy.save(tmp_path)
    assert ControlPolicy.load(tmp_path).fingerprint() == policy.fingerprint()
    p = (expected * world.tables.means).sum(-1)
    assert world.measure("pass@4", policy) == pytest.approx((1 - (1 - p) ** 4).mean(), rel=1e-5)
    with pytest.raises(PanoplyError, match="no right answers"):
        Bandit().measure("pass@4", policy)


# ------------------------------------------------------------------ runs

SHARED = {
    "world.variant": "problems",
    "world.problems": 6,
    "world.arms": 5,
    "world.features": 4,
    "world.seen": "features",
    "policy.shared": True,
    "policy.hidden": (),
    "run.held_out": 4,
    "run.checkpoint_every": 2,
    "update.lr": 0.1,
}


def test_it_runs_on_shared_features_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    done = tiny.bare(tmp_path / "run", "self", world="bandit", steps=4, settings=SHARED)
    rows = tiny.metrics(done.run)
    assert all(0 < row["failed"] <= 1 for row in rows)
    assert rows[0]["total_episodes"] == 16 + 8 * rows[0]["groups_asked"], "greedy answers count"
    shutil.copytree(done.run, tmp_path / "cut")
    (tmp_path / "cut/result.json").unlink()
    shutil.rmtree(tmp_path / "cut/checkpoints/step-0000004")
    again = tiny.resume(tmp_path / "cut")
    assert again.fingerprint == done.fingerprint
    assert tiny.metrics(again.run) == rows
    with pytest.raises(PanoplyError, match="reference answers, which only some worlds of text have"):
        judged.judge(Run.open(done.run), "interference")


def test_a_run_is_judged_by_what_became_of_single_problems(tmp_path: Path) -> None:
    settings = {"world.operations": 2, "run.held_out": 4, "run.checkpoint_every": 1, "sample.prompts": 2}
    settings |= {"reward.name": "ended"}
    done = tiny.bare(tmp_path / "run", "self", world="chain", model="fresh", steps=2, settings=settings)
    found = judged.judge(Run.open(done.run), "interference", {"problems": 3, "answers": 4, "k": 2})
    assert 0 <= found["solutions that became less likely"] <= 1
    assert found["mean change of their log-probability"] != 0
    with pytest.raises(PanoplyError, match="more than 16 answers, not by 16"):
        judged.judge(Run.open(done.run), "interference", {"answers": 16})


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PanoplyError, match="temperature"):
        pp.plan("self", "chain", settings={"sample.temperature": 0.0})
    more = Box((3,), (-1.0,) * 3, (1.0,) * 3)
    with pytest.raises(PanoplyError, match="needs hidden layers"):
        ControlPolicy.fresh(Box((4,), nodes=(2, 2)), more, PolicySpec(hidden=(), shared=True))
