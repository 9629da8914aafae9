"""Metis-RISE: whose answers are imitated, and the order of its stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

import panoply as pp
from panoply.data_folder import Row, read
from panoply.errors import PanoplyError
from panoply.methods.reasoning_data.metis_rise import targeted
from panoply.run import Run
from panoply.slots.make.answers import solved_for
from panoply.worlds.text.chain import Chain

WORLD = Chain(operations=2)


class Said:
    """A maker whose policy says what it is told: rows of `(answer, right)` for each task in turn."""

    world = WORLD

    def __init__(self, *tasks: list[tuple[list[int], float]]):
        self.tasks = tasks
        self.asked: tuple[Any, ...] = ()

    def answered(self, *asked: Any) -> list[list[Row]]:
        self.asked = asked
        return [
            [
                {
                    "task": i,
                    "id": WORLD.task("train", i).id,
                    "prompt": "",
                    "answer": a,
                    "numbers": {"success": r},
                }
                for a, r in rows
            ]
            for i, rows in enumerate(self.tasks)
        ]

    def answer(self, place: int, task: Any, answer: list[int], **numbers: float) -> Row:
        return {"task": place, "id": task.id, "prompt": "", "answer": list(answer), "numbers": numbers}


def test_own_answers_where_it_succeeds_at_times_and_a_teacher_s_where_never() -> None:
    """p̂ = ½ keeps the shortest of its own, each once; 0 asks the teacher; 1 and what is above the bound is dropped."""
    maker = Said(
        [([1, 2, 3], 1.0), ([1, 2], 1.0), ([1, 2], 1.0), ([9], 0.0), ([8], 0.0), ([7], 0.0)],
        [([9], 0.0)] * 4,
        [([1], 1.0)] * 4,
        [([1], 1.0)] * 3 + [([9], 0.0)],
    )
    rows = list(targeted(policy="there", prompts=4, answers=4, high=0.7, most=1, temperature=0.8)(maker))
    assert maker.asked == ("there", 4, 4, 0.8)
    assert [(row["task"], row["numbers"]) for row in rows] == [
        (0, {"rate": 0.5, "own": 1.0}),
        (1, {"rate": 0.0, "own": 0.0}),
    ]
    assert [row["answer"] for row in rows] == [[1, 2], WORLD.gold(WORLD.task("train", 1))]
    every = list(targeted(high=0.75, most=2)(maker))
    assert [row["answer"] for row in every if row["numbers"]["own"]] == [[1, 2], [1, 2, 3], [1]]


def test_a_wrong_teacher_is_not_imitated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chain, "solutions", lambda world, task: [world.gold(task)[:-1]])
    assert list(targeted()(Said([([9], 0.0)]))) == []


def test_the_stages_follow_one_another(tmp_path: Path) -> None:
    """Tasks are sorted by who has tried, and imitation goes on from there; teachers' answers are right."""
    settings = {
        "run.held_out": 2,
        "world.operations": 2,
        "try.sample.prompts": 2,
        "try.sample.group": 2,
        "try.run.steps": 1,
        "target.prompts": 4,
        "target.answers": 2,
        "imitate.data.batch": 4,
        "imitate.run.steps": 1,
    }
    tiny.bare(tmp_path / "run", "metis-rise", model="fresh", world="chain", settings=settings)
    rows = read(str(tmp_path / "run/02-target"), "answer")
    assert {row["numbers"]["own"] for row in rows} == {0.0}, "new weights never succeed"
    task = WORLD.task("train", rows[0]["task"])
    assert (task.id, WORLD.gold(task)) == (rows[0]["id"], rows[0]["answer"])
    last = Run.open(tmp_path / "run/03-imitate").plan()
    tried = str((tmp_path / "run/01-try").resolve())
    assert last.options.model.startswith(tried)
    made = Run.open(tmp_path / "run/02-target").plan()
    assert made.method.settings()["make.policy"].startswith(tried)


def test_teachers_answers_as_they_come(tmp_path: Path) -> None:
    class Maker(Said):
        def collect(self, policy: str) -> Any:
            return type(
                "Collect",
                (),
                {"place": lambda self, i: i + 7, "task": lambda self, i: WORLD.task("train", i)},
            )()

    rows = list(solved_for(prompts=3)(Maker()))
    assert [row["task"] for row in rows] == [7, 8, 9]
    assert all(row["answer"] == WORLD.gold(WORLD.task("train", row["task"])) for row in rows)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PanoplyError, match="high"):
        pp.plan_recipe("metis-rise", "chain:frontier", settings={"target.high": 1.5})
    with pytest.raises(PanoplyError, match="needs a world with 'reference'|text"):
        pp.plan_recipe("metis-rise", "cartpole")
