"""Rewards made of other rewards."""

from __future__ import annotations

import pytest
from kit import hand

from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.planning import make_plan
from panoply.slots.reward.shaping import minus_kl, overlong, verdict
from panoply.slots.reward.signals import signal


def rows() -> Experience:
    """Episode 1 has four decisions and succeeds; episode 2 has two, episode 3 one, and both fail."""
    return hand(
        episode=[1, 1, 1, 1, 2, 2, 3],
        logp=[-1.0] * 7,
        **{
            "signal:success": [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
            "logp@reference": [-1.0, -3.0, 0.0, -1.0, -2.0, -2.0, -1.0],
        },
    )


def test_verdict() -> None:
    assert verdict()(rows()).tolist() == [0, 0, 0, 1, 0, -1, -1]
    assert verdict(right=3.0, wrong=0.5)(rows()).tolist() == [0, 0, 0, 3.0, 0, 0.5, 0.5]


def test_minus_kl() -> None:
    """Each decision pays for its own log-ratio; what it earned stays where it was."""
    assert minus_kl(beta=0.5)(rows()).tolist() == [0, -1, 0.5, 1, -0.5, -0.5, 0]
    assert minus_kl(beta=0.5, reward=signal(scale=2.0))(rows()).tolist()[3] == 2
    assert minus_kl().needs() - signal().needs() == {"logp@reference"}


def test_minus_kl_of_nothing_needs_no_reference() -> None:
    plain = rows()
    assert minus_kl(beta=0.0)(plain).tolist() == plain["signal:success"].tolist()
    assert minus_kl(beta=0.0).needs() == signal().needs()


def test_overlong() -> None:
    """Free up to 1, then in a line to −1 at 3, and no more beyond: lengths 4, 2 and 1."""
    assert overlong(limit=3, cache=2)(rows()).tolist() == [0, 0, 0, 0, 0, -0.5, 0]
    assert overlong(limit=3, cache=2, weight=2.0, reward=verdict())(rows()).tolist() == [
        0, 0, 0, -1, 0, -2, -1
    ]  # fmt: skip


def test_overlong_bounds() -> None:
    with pytest.raises(PanoplyError, match=r"reward\.cache cannot be 30"):
        make_plan("dapo", settings={"reward.cache": 30})
