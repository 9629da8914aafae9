"""Rewards from signals, and which groups are kept."""

from __future__ import annotations

import pytest
from kit import hand

from panoply.errors import PanoplyError
from panoply.slots.reward.signals import signal
from panoply.slots.select.filters import varied_groups


def test_signal() -> None:
    made = hand(**{"signal:success": [0.0, 1.0], "signal:steps": [0.5, 0.25]})
    assert signal()(made).tolist() == [0.0, 1.0]
    assert signal(name="steps", scale=4.0)(made).tolist() == [2.0, 1.0]
    with pytest.raises(PanoplyError, match="Did you mean 'signal:success'"):
        signal(name="succes")(made)


def test_varied_groups() -> None:
    """Group 1 holds returns 1 and 0, group 2 only 1 (over unequal lengths), group 3 a single episode."""
    made = hand(
        group=[2, 1, 1, 1, 2, 2, 3],
        episode=[0, 1, 1, 2, 3, 3, 4],
        reward=[1.0, 0.5, 0.5, 0.0, 0.0, 1.0, 7.0],
    )
    assert varied_groups()(made).tolist() == [False, True, True, True, False, False, False]
