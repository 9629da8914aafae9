"""Credit by the return from a decision on."""

from __future__ import annotations

import math

import pytest
import torch
from kit import hand, ragged, shuffled

from panoply.experience import Experience
from panoply.slots.credit.returns import in_time, over_others, place, return_to_go, to_go


def two() -> Experience:
    """Episode 5 earns 1, 0, 4 in two turns; episode 2 earns 8. Rows are not in order."""
    return hand(
        episode=[5, 2, 5, 5],
        turn=[1, 0, 0, 0],
        position=[3, 7, 9, 8],
        reward=[4.0, 8.0, 0.0, 1.0],
    )


def test_order_in_time() -> None:
    assert in_time(two()).tolist() == [1, 3, 2, 0]


@pytest.mark.parametrize(("gamma", "returns"), [(1.0, [4, 8, 4, 5]), (0.5, [4, 8, 2, 2])])
def test_to_go(gamma: float, returns: list[float]) -> None:
    assert to_go(two(), two()["reward"], gamma).tolist() == returns
    assert return_to_go(gamma=gamma, normalise=False)(two()).tolist() == returns


def test_normalised_over_all_decisions() -> None:
    """4, 8, 4, 5: mean 5.25, population variance 2.6875."""
    expected = [(g - 5.25) / math.sqrt(2.6875) for g in (4, 8, 4, 5)]
    assert return_to_go()(two()).tolist() == pytest.approx(expected, rel=1e-6)


def test_equal_returns_give_nothing() -> None:
    made = hand(episode=[0, 1], reward=[0.1, 0.1])
    assert return_to_go()(made).tolist() == [0.0, 0.0]


def test_row_order_does_not_matter() -> None:
    made = ragged()
    made = made.with_columns(row=torch.arange(len(made)), position=torch.arange(len(made)))
    moved = shuffled(made)
    torch.testing.assert_close(return_to_go()(moved), return_to_go()(made)[moved["row"]])


def test_against_others_at_the_same_place() -> None:
    """With γ = ½ the returns are 4, 8, 2, 2, at the places 2, 0, 1, 0; only at place 0 there are others."""
    assert place(two()).tolist() == [2, 0, 1, 0]
    plain = over_others(gamma=0.5, normalise=False)
    assert plain(two()).tolist() == [4, 6, 2, -6]
    assert plain.but(discounted=True)(two()).tolist() == [1, 6, 1, -6]
    assert plain.but(baseline="none")(two()).tolist() == [4, 8, 2, 2]
    size = math.sqrt((16 + 36 + 4 + 36) / 4)
    assert over_others(gamma=0.5)(two()).tolist() == pytest.approx([4 / size, 6 / size, 2 / size, -6 / size])
