"""Credit, worked by hand."""

from __future__ import annotations

import pytest
import torch
from kit import hand, shuffled

from panoply.experience import Experience, segment_mean
from panoply.slots.credit.groups import group
from panoply.slots.credit.moving import moving_baseline

ROOT3 = 3**0.5
LENGTHS = [2, 1, 3, 1, 2]
RETURNS = [1.0, 0.0, 0.0, 3.0, 1.0]
GROUPS = [5, 5, 5, 2, 2]
"""Two groups: returns 1, 0, 0 and 3, 1. Standard deviations 1/√3 and √2, of all five √1.5."""


def experience(
    returns: list[float] = RETURNS, groups: list[int] = GROUPS, lengths: list[int] = LENGTHS
) -> Experience:
    """Episodes whose return comes in equal shares, one a decision."""
    each = zip(range(len(returns)), returns, groups, lengths, strict=False)
    rows = [(e, g, r / n) for e, r, g, n in each for _ in range(n)]
    episode, key, reward = (list(column) for column in zip(*rows, strict=True))
    return hand(episode=episode, group=key, reward=reward)


@pytest.mark.parametrize(
    ("baseline", "scale", "expected"),
    [
        ("mean", "none", [2 / 3, -1 / 3, -1 / 3, 1.0, -1.0]),
        ("mean", "std", [2 / ROOT3, -1 / ROOT3, -1 / ROOT3, 0.7071068, -0.7071068]),
        ("mean", "batch_std", [0.5443311, -0.2721655, -0.2721655, 0.8164966, -0.8164966]),
        ("leave_one_out", "none", [1.0, -0.5, -0.5, 2.0, -2.0]),
        ("leave_one_out", "std", [ROOT3, -ROOT3 / 2, -ROOT3 / 2, 1.4142136, -1.4142136]),
        ("leave_one_out", "batch_std", [0.8164966, -0.4082483, -0.4082483, 1.6329932, -1.6329932]),
        ("median", "none", [1.0, 0.0, 0.0, 1.0, -1.0]),
        ("median", "std", [ROOT3, 0.0, 0.0, 0.7071068, -0.7071068]),
        ("median", "batch_std", [0.8164966, 0.0, 0.0, 0.8164966, -0.8164966]),
        ("batch_mean", "none", [0.0, -1.0, -1.0, 2.0, 0.0]),
        ("batch_mean", "std", [0.0, -ROOT3, -ROOT3, 1.4142136, 0.0]),
        ("batch_mean", "batch_std", [0.0, -0.8164966, -0.8164966, 1.6329932, 0.0]),
        ("none", "none", [1.0, 0.0, 0.0, 3.0, 1.0]),
        ("none", "std", [ROOT3, 0.0, 0.0, 2.1213203, 0.7071068]),
        ("none", "batch_std", [0.8164966, 0.0, 0.0, 2.4494897, 0.8164966]),
    ],
)
def test_group(baseline: str, scale: str, expected: list[float]) -> None:
    """Each episode has one vote, whatever its length, and all its decisions get its advantage."""
    found = group(baseline=baseline, scale=scale, epsilon=0.0)(experience())
    spread = [a for a, n in zip(expected, LENGTHS, strict=True) for _ in range(n)]
    assert found.tolist() == pytest.approx(spread, abs=1e-6)


def test_group_epsilon_is_added_to_the_deviation() -> None:
    found = group(epsilon=1.0)(experience([0.0, 2.0], [0, 0], [1, 1]))
    assert found.tolist() == pytest.approx([-1 / (1 + 2**0.5), 1 / (1 + 2**0.5)])


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "median", "batch_mean", "none"])
@pytest.mark.parametrize("scale", ["std", "batch_std", "none"])
def test_constant_groups_get_exactly_zero(baseline: str, scale: str) -> None:
    """In float32 the mean of 0.9, 0.9, 0.9 is not 0.9, and their deviation is a rounding error."""
    returns, keys = [0.9, 0.9, 0.9, 2.0], [0, 0, 0, 1]
    assert segment_mean(torch.tensor(returns), by=torch.tensor(keys))[0] != torch.tensor(0.9)
    found = group(baseline=baseline, scale=scale, epsilon=0.0)(
        experience(returns, keys, [1, 1, 1, 1])
    ).tolist()
    if baseline == "none" and scale != "std":
        assert found[0] == found[2] > 0
    elif baseline == "batch_mean" and scale != "std":
        assert found[0] == found[2] < 0 < found[3]
    else:
        assert found == [0.0, 0.0, 0.0, 0.0]


def test_nothing_is_divided_by_a_missing_deviation() -> None:
    one = experience([3.0], [0], [2])
    for scale in ("std", "batch_std"):
        assert group(baseline="none", scale=scale, epsilon=0.0)(one).tolist() == [0.0, 0.0]


def test_group_reads_keys_not_positions() -> None:
    made = experience()
    mixed = shuffled(made.with_columns(advantage=group()(made)))
    assert group()(mixed).tolist() == pytest.approx(mixed["advantage"].tolist())


def test_moving_baseline_remembers_earlier_batches() -> None:
    credit = moving_baseline(decay=0.75)
    first = credit.info.state()
    state, advantage = credit(first, experience([1.0, 3.0], [0, 1], [1, 2]))
    assert advantage.tolist() == [1.0, 3.0, 3.0]
    assert state == {"baseline": 2.0}
    state, advantage = credit(state, experience([4.0, 0.0, 8.0], [0, 1, 2], [1, 1, 1]))
    assert advantage.tolist() == [2.0, -2.0, 6.0]
    assert state == {"baseline": 2.5}
    assert first == {"baseline": None}, "a state is a value: the old one is untouched"
    again, _ = credit({"baseline": 2.0}, experience([4.0, 0.0, 8.0], [0, 1, 2], [1, 1, 1]))
    assert again == state
