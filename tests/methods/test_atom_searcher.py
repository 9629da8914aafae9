"""Atom-Searcher: the mixture by hand, its schedule in a run that is resumed, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from kit import hand, shuffled

import panoply as pp
from panoply.compose import resolve
from panoply.experience import Experience
from panoply.methods.agents.atom_searcher import atom_searcher, mixed
from panoply.slots.credit.groups import group
from panoply.slots.schedule.schedules import in_step

SEARCHES = hand(
    group=[1] * 6,
    episode=[1, 1, 2, 2, 3, 3],
    **{
        "signal:success": [0.0, 1.0, 0.0, 0.0, 0.0, 1.0],
        "signal:process": [0.0, 0.5, 0.0, 1.0, 0.0, 1.0],
        "signal:invalid": [0.0, 0.0, 0.0, 0.0, 1.0, 0.0],
    },
)
"""A success with half of its calls on the way, a failure with all, and a success with a turn without grammar."""


def earned(made: Experience = SEARCHES, **settings: Any) -> list[float]:
    return [round(float(x), 6) for x in made.by("episode").sum(mixed(**{"fades": 1.0, **settings})(made))]


def test_the_mixture_by_hand() -> None:
    assert earned() == [0.75, 0.5, -1.0]
    assert earned(fades=0.5) == [0.25 * 0.5 + 0.75, 0.25, -1.0]
    assert earned(first=1.0) == [0.5, 1.0, -1.0]
    assert earned(first=0.0) == [1.0, 0.0, -1.0]
    assert earned(malformed=None) == [0.75, 0.5, 1.0]
    assert earned(otherwise=-0.3)[2] == pytest.approx(-0.3)


def test_the_outcome_alone_needs_no_judge() -> None:
    bare_world = hand(group=[1], episode=[1], **{"signal:success": [1.0], "signal:invalid": [0.0]})
    assert mixed(first=0.0)(bare_world).tolist() == [1.0]


def test_the_share_falls_in_a_line_with_the_steps_of_the_run() -> None:
    reward = atom_searcher().reward
    shares = [in_step(reward, step, 10).settings()["fades"] * 0.5 for step in (0, 4, 9)]
    assert shares == pytest.approx([0.5, 0.5 * (1 - 0.4), 0.5 * (1 - 0.9)])


def test_all_tokens_of_an_episode_share_one_advantage() -> None:
    advantage = group()(SEARCHES.with_columns(reward=mixed(fades=1.0)(SEARCHES))).tolist()
    assert advantage[0] == advantage[1] > advantage[2] == advantage[3] > advantage[4] == advantage[5]


def test_row_order_does_not_matter() -> None:
    assert earned(shuffled(SEARCHES)) == earned()


def test_a_resumed_run_goes_on_with_the_same_share(tmp_path: Path) -> None:
    settings = {"run.held_out": 4, "sample.prompts": 2, "sample.group": 2, "reward.malformed": None}
    choices: dict[str, Any] = {"world": "tools", "model": "fresh", "steps": 3, "settings": settings}
    whole = tiny.bare(tmp_path / "whole", "atom-searcher", **choices)
    with pp.steps("atom-searcher", run=tmp_path / "cut", threads=1, progress=tiny.Notes(), **choices) as made:
        next(iter(made))
    assert tiny.resume(tmp_path / "cut").fingerprint == whole.fingerprint
    assert tiny.metrics(tmp_path / "cut") == tiny.metrics(tmp_path / "whole")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward.process": "oven"}, "oven"),
        ({"reward.first": 2.0}, "reward.first must be from 0 to 1"),
        ({"reward.first": 0.0, "reward.process": "calls"}, "not listened to"),
    ],
)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(pp.PanoplyError, match=message):
        pp.plan("atom-searcher", "tools", settings=settings)


def test_the_diff_is_the_reward() -> None:
    mine, plain = (resolve(name, preset="tiny").method for name in ("atom-searcher", "grpo"))
    assert {path.split(".")[0] for path, *_ in mine.diff(plain)} == {"reward"}
