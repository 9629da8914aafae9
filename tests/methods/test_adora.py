"""ADORA: which groups count, by which answers, and when the weight is applied."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kit import Slow, assert_same, gradient, hand, ragged, rows_of, shuffled
from papers import ZERO, groups_of, returns_of, standardised

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.objectives.adora import adora, utility_weighted
from panoply.slots.credit.groups import group
from panoply.slots.credit.moving import moving_baseline

Group = list[tuple[float, int]]
"""Answers of a group: what each earned, and how long it is."""


def answers(*asked: Group, cut_off: tuple[int, ...] = ()) -> Experience:
    rows = [(g, r, n) for g, of in enumerate(asked) for r, n in of]
    columns: dict[str, list[Any]] = {"group": [], "episode": [], "reward": [], "end": []}
    for e, (g, r, n) in enumerate(rows):
        for t in range(n):
            last = t == n - 1
            columns["group"].append(g)
            columns["episode"].append(e)
            columns["reward"].append(r if last else 0.0)
            columns["end"].append((2 if e in cut_off else 1) if last else 0)
    return hand(**columns)


def weights(made: Experience, **settings: Any) -> list[float]:
    """What each group's advantages were multiplied by, read off a credit of the returns as they are."""
    plain = group(baseline="none", scale="none")
    made = made.with_columns(reward=made["reward"] + 1e-3 * made.by("episode").is_last())
    found = utility_weighted(credit=plain, **settings)(made)
    keys = made.by("group")
    return keys.first(found / plain(made)).tolist()


LONGER: Group = [(1.0, 5), (1.0, 1), (0.0, 3), (0.0, 4)]
SHORTER: Group = [(1.0, 3), (1.0, 3), (0.0, 2), (0.0, 4)]
NONE_RIGHT: Group = [(0.0, 2), (0.0, 3)]
NONE_WRONG: Group = [(1.0, 2), (1.0, 3)]


def test_golden_weights() -> None:
    """5 > 3.5; 3 is not more than 3: the longest right answer against the mean of wrong ones, strictly."""
    assert weights(answers(LONGER, SHORTER)) == pytest.approx([1.0, 0.1])
    assert weights(answers(LONGER, SHORTER), advantageous=2.0, disadvantageous=1.0) == pytest.approx(
        [2.0, 1.0]
    )


def test_the_releases_differ_where_a_side_is_missing() -> None:
    made = answers(NONE_RIGHT, NONE_WRONG)
    assert weights(made, edges="vision") == pytest.approx([1.0, 0.1])
    assert weights(made, edges="logic") == pytest.approx([0.1, 1.0])


def test_wrong_answers_at_the_limit_are_ignored() -> None:
    """3 against 2 and 9: the long failure counts unless it is at the limit, or was cut off."""
    made = answers([(1.0, 3), (0.0, 2), (0.0, 9)], cut_off=(2,))
    assert weights(made, cut=10) == pytest.approx([0.1])
    assert weights(made, cut=9) == pytest.approx([1.0])
    assert weights(made, cut=None) == pytest.approx([1.0])


def test_difficulty() -> None:
    made = answers([(1.0, 1), (0.0, 1), (0.0, 1)], [(1.0, 1), (0.0, 1)])
    assert weights(made, by="difficulty", hard=0.5) == pytest.approx([1.0, 0.1])


def test_next_damps_as_many_and_not_those() -> None:
    made = answers(LONGER, SHORTER, SHORTER)
    assert weights(made, whose="next") == pytest.approx([0.1, 0.1, 1.0])


def release(rewards: list[float], lengths: list[int], correct: float, cut: int, edges: str) -> list[float]:
    """The equations of the releases for one group, the deviation with their ε."""
    right = [n for r, n in zip(rewards, lengths, strict=True) if r > correct]
    wrong = [n for r, n in zip(rewards, lengths, strict=True) if r <= correct and n < cut]
    absent = -math.inf if edges == "logic" else math.inf
    longest, mean = max(right, default=-math.inf), sum(wrong) / len(wrong) if wrong else absent
    counts = longest > mean or (edges == "vision" and not right)
    tensor = torch.tensor(rewards)
    advantage = (tensor - tensor.mean()) / (tensor.std() + 1e-6) * (1.0 if counts else 0.1)
    return advantage.tolist()


@pytest.mark.parametrize("edges", ["vision", "logic"])
def test_advantages_are_the_releases(edges: Any) -> None:
    dice = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 12, (12, 4), generator=dice).tolist()
    rewards = torch.randint(0, 3, (12, 4), generator=dice).float().tolist()
    made = answers(*([*zip(r, n, strict=True)] for r, n in zip(rewards, lengths, strict=True)))
    credit = utility_weighted(credit=group(epsilon=1e-6), correct=1.5, cut=10, edges=edges)
    found = made.by("episode").first(credit(made)).tolist()
    expected = [a for r, n in zip(rewards, lengths, strict=True) for a in release(r, n, 1.5, 10, edges)]
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_gradient_is_the_papers_in_any_order_and_split() -> None:
    """The weight multiplies what was divided by the deviation already; damped groups still learn."""
    method, made = adora().but(regularise=()), ragged(drift=0.4)
    credited = made.with_columns(advantage=method.credit(made))
    advantage, returns = standardised(made, 1e-9), returns_of(made)
    slow, loss = Slow(), ZERO
    damped = 0
    for members in groups_of(made):
        size = {e: len(rows_of(made, episode=e)) for e in members}
        right, wrong = ([e for e in members if (returns[e] > 0.5) is side] for side in (True, False))
        counts = not right or (
            bool(wrong) and max(size[e] for e in right) > sum(size[e] for e in wrong) / len(wrong)
        )
        damped += not counts
        for e in members:
            a = advantage[e] * (1.0 if counts else 0.1)
            for row in rows_of(made, episode=e):
                rho = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
                gain = torch.minimum(rho * a, rho.clamp(0.8, 1.2) * a)
                loss = loss - gain / (size[e] * len(returns))
    assert damped
    expected = slow.gradient(loss)
    assert_same(gradient(method, credited), expected)
    mixed = shuffled(made)
    assert_same(
        gradient(method, mixed.with_columns(advantage=method.credit(mixed)), micro_tokens=4), expected
    )


def test_what_cannot_be_is_refused() -> None:
    for settings, why in (
        ({"credit.disadvantageous": 1.0}, "count the same"),
        ({"credit.hard": 0.2}, "by is length"),
        ({"credit.by": "difficulty", "credit.edges": "logic"}, "by is difficulty"),
        ({"credit.cut": 5000}, "no episode of chain is as long"),
    ):
        with pytest.raises(PanoplyError, match=why):
            pp.plan("adora", "chain", settings=settings)
    with pytest.raises(PanoplyError, match="remembers"):
        pp.plan(adora().but(credit=utility_weighted(credit=moving_baseline())), "chain")
