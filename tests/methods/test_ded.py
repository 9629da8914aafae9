"""DED: edit distance and farthest points by hand, a teacher by trial, and what a curated set is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

import panoply as pp
from panoply.data_folder import Row, read
from panoply.errors import PanoplyError
from panoply.methods.reasoning_data import ded as file
from panoply.methods.reasoning_data.ded import curated
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.run import Run
from panoply.slots.make.curating import (
    corpus_entropy,
    farthest_point,
    latent_shift,
    levenshtein,
    select_teacher,
)
from panoply.which import run_of
from panoply.worlds.text.styles import Styles

WORLD = Styles(operations=2, levels=(0, 1), traps=False)

# ------------------------------------------------------------------ utilities


@pytest.mark.parametrize(
    ("a", "b", "changes"),
    [
        ("kitten", "sitting", 3 / 7),
        ("", "abc", 1.0),
        ("abc", "abc", 0.0),
        ("ab", "ba", 1.0),
        ("abcd", "bcd", 0.25),
    ],
)
def test_edit_distance(a: str, b: str, changes: float) -> None:
    said = [list(map(ord, word)) for word in (a, b)]
    assert levenshtein(*said) == levenshtein(*said[::-1]) == pytest.approx(changes)
    assert levenshtein([], []) == 0.0


def test_farthest_points_by_hand() -> None:
    """From 0000 the farthest is 1111; then 0011, half-way to both, before 0001, which is near the first."""
    answers = [[0, 0, 0, 0], [0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 1, 1]]
    assert farthest_point(answers, 3) == [0, 2, 3]
    assert farthest_point(answers, 9) == [0, 2, 3, 1]
    assert farthest_point(answers, 1) == [0]
    assert farthest_point([], 2) == []
    assert farthest_point([[0, 0], [0, 0, 9, 9, 9], [0, 1]], 2, prefix=2) == [0, 2], (
        "only the beginning counts"
    )


def test_the_teacher_of_the_best_pupil() -> None:
    assert select_teacher({"a": 0.2, "b": 0.5, "c": 0.5}) == "b"
    with pytest.raises(PanoplyError, match="none was"):
        select_teacher({})


def test_what_is_foreign_has_more_entropy_and_learning_moves_hidden_states() -> None:
    world = Styles()
    policy = open_policy("start", world, 0, "cpu")
    collect = Collector(world, policy, seed=3)
    task = collect.tasks(1)[0]
    corpus = collect.answers([task] * 2, [world.gold(task, "C"), world.gold(task, "D")])
    found = corpus_entropy(policy, corpus)
    with torch.no_grad():
        logits = policy.model(torch.tensor([[*task.prompt, *world.gold(task, "D")]]))[0]
    p = logits[len(task.prompt) - 1 : -1].log_softmax(-1)
    assert float(found[1]) == pytest.approx(float(-(p.exp() * p).sum(-1).mean()), rel=1e-3)
    assert float(found[1]) > float(found[0])
    moved = open_policy("start", world, 0, "cpu")
    assert latent_shift(policy, moved, corpus) == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        for weight in moved.model.parameters():
            weight.mul_(1.3)
    assert latent_shift(policy, moved, corpus) > 0.1


def test_teachers_of_styles_and_of_any_world() -> None:
    world, rng = Styles(), np.random.default_rng(0)
    tasks = [world.task("train", i) for i in range(300)]
    assert [world.text(world.teach(tasks[0], style, rng))[0] for style in "ABCD"] == list("ABCD")
    said = [(task, world.teach(task, "native", rng)) for task in tasks]
    assert {world.text(answer)[0] for _, answer in said} == set("ABC")
    assert 0.8 < np.mean([world.grade(t, a)["worked"] for t, a in said]) < 1.0, "it slips at times"
    assert world.teach(tasks[0], "reference", rng) == world.gold(tasks[0])
    with pytest.raises(PanoplyError, match="Unknown teacher of styles 'E'"):
        world.teach(tasks[0], "E", rng)


# ------------------------------------------------------------------ the set


class Said:
    """A maker whose policy solves each task so often, of four times."""

    world, seed = WORLD, 5

    def __init__(self, *right: int):
        self.right = right

    def answered(self, *asked: Any) -> list[list[Row]]:
        return [
            [
                {"task": i, "id": 0, "prompt": "", "answer": [], "numbers": {"success": float(n < r)}}
                for n in range(4)
            ]
            for i, r in enumerate(self.right)
        ]

    def answer(self, place: int, task: Any, answer: list[int], **numbers: float) -> Row:
        return {"task": place, "id": task.id, "prompt": "", "answer": list(answer), "numbers": numbers}


def test_a_curated_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tasks solved 0, 2, 3 and 4 times of four the first two; right answers, far from one another, of the better."""
    monkeypatch.setattr(file, "_score", {"one": 0.3, "two": 0.6}.get)
    rows = list(
        curated(teachers=("D", "native"), first="one", second="two", most=0.5, traces=12, keep=2)(
            Said(0, 2, 3, 4)
        )
    )
    assert [row["task"] for row in rows] == [0, 0, 1, 1]
    assert [row["numbers"]["rate"] for row in rows] == [0.0, 0.0, 0.5, 0.5]
    for row in rows:
        task = WORLD.task("train", row["task"])
        assert WORLD.grade(task, row["answer"])["success"] == 1.0
        assert WORLD.text(row["answer"])[0] in "ABC", "the second teacher's pupil did better"
    assert WORLD.text(rows[0]["answer"])[0] != WORLD.text(rows[1]["answer"])[0]
    swapped = curated(teachers=("D", "native"), first="two", second="one", keep=2)(Said(0))
    assert [WORLD.text(row["answer"])[0] for row in swapped] == ["D"], "who says one thing is heard once"


def test_what_is_no_trial_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PanoplyError, match="A trial is a finished run"):
        list(curated()(Said(0)))
    with pytest.raises(PanoplyError, match="two are tried"):
        pp.plan_recipe("ded", settings={"curate.teachers": ("D",)})


def test_the_stages_follow_one_another(tmp_path: Path) -> None:
    small = {
        "run.held_out": 2,
        "world.operations": 2,
        **{f"{s}.prompts": 4 for s in ("a", "b", "curate")},
        "curate.answers": 2,
        **{f"{s}.data.batch": 2 for s in ("try_a", "try_b", "imitate")},
        **{f"{s}.run.steps": 1 for s in ("try_a", "try_b", "imitate")},
    }
    tiny.bare(tmp_path / "run", "ded", model="start", settings=small)
    lessons = [read(str(tmp_path / "run" / name), "answer") for name in ("01-a", "03-b")]
    assert all(row["numbers"]["entropy"] > 0 for rows in lessons for row in rows)
    assert Run.open(tmp_path / "run/02-try_a").plan().options.split == "validation"
    made = Run.open(tmp_path / "run/05-curate").plan().method.settings()
    assert [run_of(made[f"make.{n}"]).folder.name for n in ("first", "second")] == ["02-try_a", "04-try_b"]
    assert read(str(tmp_path / "run/05-curate"), "answer")
    assert Run.open(tmp_path / "run/06-imitate").plan().options.model == "start"
