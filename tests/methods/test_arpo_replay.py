"""ARPO by replay: which groups get a success back, what it weighs, what is kept, and that its ratio is 1."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import tiny
from kit import batch, hand

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import OWN, REPLAY, Experience
from panoply.methods.agents.arpo_replay import Successes, arpo_replay, outcome_and_format, successes
from panoply.slots.credit.groups import group

FEW = {"sample.prompts": 2, "sample.group": 2, "sample.pool": 2, "run.held_out": 4}


def collected(first: int, outcomes: list[list[float]], tasks: list[int] | None = None) -> Experience:
    """Groups of one-decision episodes that earned so much; the task of a group is its number unless it is said."""
    flat = [(g, r) for g, row in enumerate(outcomes) for r in row]
    n = len(flat)
    of = tasks or list(range(len(outcomes)))
    return hand(
        episode=list(range(first, first + n)),
        group=[first + g for g, _ in flat],
        task=[of[g] for g, _ in flat],
        source=[OWN] * n,
        logp=[-float(first + 1)] * n,
        **{"signal:success": [r for _, r in flat]},
    )


def memory(**settings: float) -> Successes:
    made = successes(**settings)(None, 0)  # type: ignore[arg-type]
    assert isinstance(made, Successes)
    return made


def stepped(held: Successes, rows: Experience) -> Experience:
    found = held.beside(rows)
    held.keep()
    return found


def test_a_failed_group_gets_one_success_for_one_failure_and_others_are_left_alone() -> None:
    held = memory()
    stepped(held, collected(0, [[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]))
    found = stepped(held, collected(100, [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]))
    back = found.take(found["source"] == REPLAY)
    assert back["episode"].tolist() == [0], "of group 1 there is a new success, and of group 2 no old one"
    assert back["group"].tolist() == [100]
    assert back["logp"].tolist() == [-1.0], "kept as it was"
    assert found.by("group").count.tolist() == [4, 4, 4]
    assert len(held) == 3, "the replayed one is not kept twice"


def test_a_success_among_seven_failures_is_root_seven_deviations() -> None:
    """The card's 2.5 is with the sample deviation: 7/8 ÷ √(1/8) = 2.475; with the population's it is √7."""
    held = memory()
    stepped(held, collected(0, [[1.0] + [0.0] * 7]))
    found = stepped(held, collected(50, [[0.0] * 8]))
    found = found.with_columns(reward=found["signal:success"])
    advantage = group(epsilon=0.0)(found)
    assert advantage[found["source"] == REPLAY].tolist() == pytest.approx(
        [7 / 8 / math.sqrt(1 / 8)], rel=1e-5
    )
    assert advantage[found["source"] == OWN].tolist() == pytest.approx(
        [-1 / 8 / math.sqrt(1 / 8)] * 7, rel=1e-5
    )


def test_graded_outcomes_fail_where_they_are_flat_and_low() -> None:
    kept = [[0.9, 0.0]]
    for outcomes, replayed in (([0.1, 0.1], 1), ([0.15, 0.0], 0), ([0.3, 0.3], 0), ([0.0, 0.05], 1)):
        held = memory()
        stepped(held, collected(0, kept))
        found = stepped(held, collected(10, [outcomes]))
        assert int((found["source"] == REPLAY).sum()) == replayed, outcomes


def test_the_last_eight_of_a_task_are_kept() -> None:
    held = memory(size=2)
    stepped(held, collected(0, [[1, 0.1, 0.11], [1, 0, 0]]))
    assert held.held is not None
    assert held.held["episode"].tolist() == [0, 2, 3], "more than 0.1 is worth it, 0.1 is not"
    stepped(held, collected(10, [[1, 0, 0]]))
    assert sorted(held.held["episode"].tolist()) == [2, 3, 10], (
        "the oldest of task 0 has left, that of task 1 has not"
    )


def test_the_newest_of_each_task_stays() -> None:
    held = memory(size=1)
    stepped(held, collected(0, [[1, 1], [1, 0]]))
    assert held.held is not None
    assert sorted(held.held["episode"].tolist()) == [1, 2]


def test_every_stored_success_may_come_back() -> None:
    held = memory()
    stepped(held, collected(0, [[1, 1, 1, 0]]))
    came = set()
    for step in range(1, 30):
        found = stepped(held, collected(10 * step, [[0, 0]]))
        came |= set(found["episode"][found["source"] == REPLAY].tolist())
    assert came == {0, 1, 2}


def test_several_may_stand_in() -> None:
    held = memory(batch=2)
    stepped(held, collected(0, [[1, 1, 1, 0]]))
    found = stepped(held, collected(10, [[0, 0, 0]]))
    assert int((found["source"] == REPLAY).sum()) == 2
    assert len(found) == 3


def test_a_stored_success_has_ratio_one_under_todays_weights() -> None:
    """Whatever it was drawn with: the ratio is to what the weights say at the start of the step."""
    assert "logp@old" in arpo_replay().needs()
    rows = hand(episode=[0, 1], logp=[-9.0, -1.0], advantage=[2.0, -1.0], **{"logp@old": [-3.0, -1.0]})
    value, _ = arpo_replay().surrogate(batch(rows, logp=[-3.0, -1.0]))
    assert value.tolist() == [2.0, -1.0]


def test_a_broken_format_costs_half_once_an_episode() -> None:
    rows = hand(
        episode=[0, 0, 0, 1, 1],
        **{"signal:success": [0.0, 0, 1, 0, 0], "signal:invalid": [1.0, 1, 0, 0, 0]},
    )
    assert outcome_and_format()(rows).tolist() == [0, 0, 0.5, 0, 0]


def test_it_resumes_bit_for_bit_with_what_it_has_kept(tmp_path: Path) -> None:
    """Every group counts as failed here, so that what is kept comes back in every step."""
    few = FEW | {"sample.group": 6, "replay.low": 2.0, "replay.flat": 9.0, "run.checkpoint_every": 1}
    whole = tiny.bare(tmp_path / "run", "arpo-replay", world="keydoor", settings=few, steps=3)
    logged = tiny.metrics(whole.run)
    assert logged[0]["episodes"] == 12 > logged[2]["episodes"], "some were replaced"
    shutil.rmtree(whole.run / "checkpoints/step-0000003")
    (whole.run / "result.json").unlink()
    assert tiny.resume(whole.run).fingerprint == whole.fingerprint
    assert tiny.metrics(whole.run) == logged


def test_tasks_that_are_never_solved_are_left_out(tmp_path: Path) -> None:
    """The easy start solves a third: of eight tasks with two tries each some stay and some do not."""
    settings = FEW | {"sample.pool": 8, "sample.tries": 2}
    run = tiny.bare(tmp_path / "run", "arpo-replay", world="keydoor", settings=settings, steps=2).run
    rows = tiny.metrics(run)
    assert 1 <= rows[0]["tasks_left"] < 8
    assert rows[1]["tasks_left"] == rows[0]["tasks_left"]


def test_where_nothing_is_ever_solved_it_says_so(tmp_path: Path) -> None:
    settings = FEW | {"sample.tries": 1}
    with pytest.raises(PanoplyError, match="None of 2 tasks was solved in 1 attempts each"):
        tiny.bare(tmp_path / "run", "arpo-replay", world="keydoor", model="fresh", settings=settings, steps=1)


def test_a_pool_must_fill_a_batch() -> None:
    with pytest.raises(PanoplyError, match="a pool of 8 tasks is smaller than a batch of 16 prompts"):
        pp.plan("arpo-replay", "keydoor", settings={"sample.pool": 8})
