"""Rewards from signals, and which groups are kept."""

from __future__ import annotations

import pytest
import torch
from kit import hand

import panoply as pp
from panoply.errors import PanoplyError
from panoply.slots.credit.groups import group
from panoply.slots.reward.signals import blend, signal
from panoply.slots.select.filters import overlong_filter, varied_groups


def test_signal() -> None:
    made = hand(**{"signal:success": [0.0, 1.0], "signal:steps": [0.5, 0.25]})
    assert signal()(made).tolist() == [0.0, 1.0]
    assert signal(name="steps", scale=4.0)(made).tolist() == [2.0, 1.0]
    with pytest.raises(PanoplyError, match="Did you mean 'signal:success'"):
        signal(name="succes")(made)


def test_blend() -> None:
    made = hand(**{"signal:success": [0.0, 1.0], "signal:steps": [0.5, 0.25]})
    assert blend(names=("success", "steps"), weights=(0.5, -2.0))(made).tolist() == [-1.0, 0.0]
    assert blend(names=("success", "steps"))(made).tolist() == [0.5, 1.25]
    assert blend(names=("success", "steps"), weights=(0.5, 1.0)).equation() == "0.5·success + steps"
    for settings, said in (
        ({"reward.names": ("success", "steps"), "reward.weights": (1.0,)}, "2 signals, and one weight each"),
        ({"reward.names": ()}, "at least one signal"),
        ({"reward.names": ("success", "politeness")}, "politeness"),
    ):
        with pytest.raises(PanoplyError, match=said):
            pp.plan("grpo", "chain", settings={"reward": "blend", **settings})


def test_varied_groups() -> None:
    """Group 1 holds returns 1 and 0, group 2 only 1 (over unequal lengths), group 3 a single episode."""
    made = hand(
        group=[2, 1, 1, 1, 2, 2, 3],
        episode=[0, 1, 1, 2, 3, 3, 4],
        reward=[1.0, 0.5, 0.5, 0.0, 0.0, 1.0, 7.0],
    )
    assert varied_groups()(made).tolist() == [False, True, True, True, False, False, False]


def test_overlong_filter_keeps_the_comparison_and_drops_the_lesson() -> None:
    """Rows in no order: the mark of a truncated episode stands on any of them."""
    made = hand(group=[0] * 5, episode=[0, 1, 0, 1, 2], end=[2, 0, 0, 1, 2], reward=[0.0, 0.0, 0.0, 1.0, 0.0])
    found = overlong_filter()(made)
    assert found["train"].tolist() == [False, True, False, True, False]
    assert group(scale="none")(found).tolist() == pytest.approx([-1 / 3, 2 / 3, -1 / 3, 2 / 3, -1 / 3])
    again = overlong_filter()(made.with_columns(train=torch.tensor([True, False, True, True, True])))
    assert again["train"].tolist() == [False, False, False, True, False]
