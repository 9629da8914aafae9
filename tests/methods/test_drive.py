"""DRIVE: when phases begin, what they keep, by whose answers, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kit import hand

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.reasoning_data.drive import broad_then_hardest, drive, hardest
from panoply.worlds.text.chain import Chain
from panoply.worlds.world import Task


def test_the_hardest_are_kept_and_never_solved_ones_left_out_on_demand() -> None:
    rate = torch.tensor([0.9, 0.0, 0.25, 0.5, 0.0, 0.25])
    assert hardest(rate, 3, solvable=False).tolist() == [1, 2, 4]
    assert hardest(rate, 3, solvable=True).tolist() == [2, 3, 5]
    assert hardest(rate, 1, solvable=True).tolist() == [2]
    assert hardest(rate, 9, solvable=True).tolist() == [0, 2, 3, 5]


class Asked:
    """A collector whose task t succeeds in the first `solved(t)` of its answers; what was asked is written down."""

    def __init__(self, solved: Callable[[int], int]):
        self.seed, self.solved, self.notes = 0, solved, {}
        self.asked: list[tuple[list[int], int, int | None]] = []

    def tasks(self, n: int) -> list[Task]:
        return [Task(100 + i, (0,)) for i in range(n)]

    def pool(self, n: int) -> list[Task]:
        return [Task(i, (0,)) for i in range(n)]

    def episodes(
        self, tasks: list[Task], group: int, *, max_tokens: int | None, **sampling: Any
    ) -> Experience:
        assert sampling["temperature"] == 0.7
        self.asked.append(([t.id for t in tasks], group, max_tokens))
        rows = [(t, i) for t in tasks for i in range(group)]
        return hand(
            group=[t.id for t, _ in rows],
            **{"signal:success": [float(i < self.solved(t.id)) for t, i in rows]},
        )


def steps(collect: Asked, n: int, state: dict[str, Any], **settings: Any) -> dict[str, Any]:
    chosen = {
        "prompts": 2, "group": 4, "phases": (2, 2, 1), "sizes": (3, 2), "pool": 6, "hard_prompts": 2,
        "hard_group": 8, "estimate": 4, "window": 5, "max_tokens": 9, "temperature": 0.7, **settings,
    }  # fmt: skip
    for _ in range(n):
        state, _ = broad_then_hardest(**chosen)(state, collect)  # type: ignore[misc,call-overload]
    return state


def test_phases_follow_one_another_and_estimate_with_the_policy_of_the_moment() -> None:
    """Task t is solved in t of four answers; from step 4 on 0 is solved always, so that it leaves."""
    collect = Asked(lambda t: t)
    state = steps(collect, 2, {})
    assert collect.asked == [([100, 101], 4, 5)] * 2, "few answers within the window"
    assert collect.notes == {"phase": 0.0}
    state = steps(collect, 2, state)
    assert collect.asked[2] == ([0, 1, 2, 3, 4, 5], 4, 9), "everything in the pool is tried, once"
    assert len(collect.asked) == 5
    assert all(group == 8 and longest == 9 for _, group, longest in collect.asked[3:])
    assert set(collect.asked[3][0] + collect.asked[4][0]) == {0, 1, 2}, "in turn"
    assert collect.notes == {"phase": 1.0, "hard_rate": pytest.approx(0.25)}
    collect.solved = lambda t: 4 if t == 0 else t
    state = steps(collect, 1, state)
    assert collect.asked[5] == ([0, 1, 2], 4, 9), "only what is left"
    assert sorted(collect.asked[6][0]) == [1, 2]
    steps(collect, 3, state)
    assert len(collect.asked) == 10, "the last phase goes on, and nothing is estimated any more"
    assert all(sorted(ids) == [1, 2] for ids, _, _ in collect.asked[7:])


def test_a_pool_without_a_failing_or_a_solvable_prompt_is_refused_in_a_sentence() -> None:
    with pytest.raises(PanoplyError, match="None of the 6 prompts of the pool fails in 4 answers"):
        steps(Asked(lambda t: 4), 3, {})
    with pytest.raises(PanoplyError, match="Not one of the 6 prompts of the pool is solved in 4 answers"):
        steps(Asked(lambda t: 0), 3, {}, solvable=True)
    steps(Asked(lambda t: 0), 3, {})
    mastered = Asked(lambda t: t)
    state = steps(mastered, 4, {})
    mastered.solved = lambda t: 4
    assert len(steps(mastered, 1, state)["kept"]) == 2, "later it only goes on"


def test_a_group_of_64_finds_what_a_group_of_8_does_not() -> None:
    """The numbers of the page: 1 − (1 − p)^G − p^G at p = 0.02."""
    assert [round(1 - 0.98**g - 0.02**g, 2) for g in (8, 64)] == [0.15, 0.73]
    assert drive().sample.settings()["hard_group"] == 64


def test_the_hardest_levels_are_the_upper_third() -> None:
    """A policy that is asked nothing: the problems are all that is looked at."""
    seen: list[int] = []

    class Spied(Chain):
        def held_out(self, n: int) -> list[Task]:
            seen.extend(task.level for task in super().held_out(n))
            raise PanoplyError("enough")

    with pytest.raises(PanoplyError, match="enough"):
        Spied(operations=8, levels=(0, 8), shares=(40, 1, 1, 1, 1, 1, 1, 1, 1)).measure("hardest", None)
    assert set(seen) == {6, 7, 8}
    assert len(seen) == 128


SMALL = {
    "run.device": "cpu",
    "run.held_out": 4,
    "run.checkpoint_every": 2,
    "world.operations": 2,
    "sample.prompts": 4,
    "sample.group": 4,
    "sample.phases": (1, 2, 1),
    "sample.sizes": (3, 2),
    "sample.pool": 5,
    "sample.hard_prompts": 2,
    "sample.hard_group": 8,
    "sample.estimate": 2,
    "sample.solvable": False,
    "reward.name": "ended",
}


def test_what_is_kept_goes_on_bit_for_bit(tmp_path: Path) -> None:
    done = tiny.bare(tmp_path / "run", "drive", model="fresh", steps=4, settings=SMALL)
    rows = tiny.metrics(done.run)
    assert [row["phase"] for row in rows] == [0, 1, 1, 2]
    assert [row["total_episodes"] for row in rows] == [16, 42, 58, 80], "estimates count: 5 × 2 and 3 × 2"
    shutil.copytree(done.run, tmp_path / "cut")
    (tmp_path / "cut/result.json").unlink()
    shutil.rmtree(tmp_path / "cut/checkpoints/step-0000004")
    again = tiny.resume(tmp_path / "cut")
    assert again.fingerprint == done.fingerprint
    assert tiny.metrics(again.run) == rows


def test_what_cannot_be_is_refused() -> None:
    for settings, why in (
        ({"sample.sizes": (24, 16)}, "4 phases are the broad one and 3 others"),
        ({"sample.sizes": (24, 30, 8)}, "keeps some of the one before it"),
        ({"sample.pool": 20}, "the first of 20"),
        ({"sample.hard_prompts": 9}, "the last phase has 8 prompts in all"),
        ({"sample.window": 12, "sample.max_tokens": 8}, "longer than the answers after it"),
        ({"sample.window": 400}, "no answer of chain is longer"),
        ({"sample.phases": (60,), "sample.sizes": (), "sample.pool": 99}, "but the broad phase"),
    ):
        with pytest.raises(PanoplyError, match=why):
            pp.plan("drive", "chain", settings=settings)
