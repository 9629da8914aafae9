"""Different right answers among several."""

from __future__ import annotations

import pytest

from panoply.evaluation import coverage as module
from panoply.evaluation.coverage import coverage, right_answers
from panoply.policies.build import open_policy
from panoply.policies.text import TextPolicy
from panoply.worlds.text.manyanswers import ManyAnswers
from panoply.worlds.world import Task, TextWorld

WORLD = ManyAnswers()


@pytest.fixture(scope="module")
def policy() -> TextPolicy:
    return open_policy("start", WORLD, 0, "cpu")


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch, policy: TextPolicy) -> None:
    def given(
        world: TextWorld, policy: TextPolicy, tasks: list[Task], attempts: int, **_: object
    ) -> list[object]:
        assert (len(tasks), attempts) == (7, 4)
        return [[(1,), (1,), (2,)], [(3,), (3,), (3,), (3,)], [], [], [], [], []]

    monkeypatch.setattr(module, "right_answers", given)
    found = coverage(WORLD, policy, 64, attempts=4, ks=(1, 4))
    assert (found.problems, found.attempts) == (7, 4)
    assert found.distinct == pytest.approx((2 + 1) / 7)
    assert found.share == pytest.approx((2 / 3 + 1 / 4) / 7)
    assert found.pass_at == {1: pytest.approx((3 / 4 + 1) / 7), 4: pytest.approx(2 / 7)}
    assert found.to_json()["pass@4"] == found.pass_at[4]


def test_right_answers_are_right_and_belong_to_their_task(policy: TextPolicy) -> None:
    tasks = WORLD.held_out(7)
    found = right_answers(WORLD, policy, tasks, 8)
    assert sum(len(answers) for answers in found) > 0
    for task, answers in zip(tasks, found, strict=True):
        assert len(answers) <= 8
        assert all(WORLD.grade(task, answer)["success"] == 1 for answer in answers)
        assert WORLD.coverage(task, answers) == len(set(answers))


def test_batches_do_not_matter(monkeypatch: pytest.MonkeyPatch, policy: TextPolicy) -> None:
    tasks = WORLD.held_out(7)
    whole = right_answers(WORLD, policy, tasks, 8)
    monkeypatch.setattr(module, "ROWS", 16)
    assert right_answers(WORLD, policy, tasks, 8) == whole


def test_a_greedy_policy_has_one_answer(policy: TextPolicy) -> None:
    found = coverage(WORLD, policy, attempts=4, ks=(1, 4), temperature=0.0)
    assert found.distinct == found.pass_at[1] == found.pass_at[4]
