"""Choosing one answer out of many, and judging who chooses: by hand."""

from __future__ import annotations

import math

import pytest

from panoply.errors import PanoplyError
from panoply.evaluation.best_of import acceptance, acceptance_by, association, best, majority, process_f1


def test_f1_of_first_wrong_steps() -> None:
    found = process_f1([0, 0, 0, 0, 2, 3, 1], [0, 0, 0, 1, 2, 2, None])
    assert (found.sound, found.erroneous) == (0.75, pytest.approx(1 / 3))
    assert found.f1 == pytest.approx(2 * 0.75 / 3 / (0.75 + 1 / 3))
    assert process_f1([0, 1], [0, 0]).f1 == 0, "who accepts everything gets nothing"
    assert process_f1([0, 1], [2, 3]).f1 == 0
    with pytest.raises(PanoplyError, match="with a fault and some without"):
        process_f1([0, 0], [0, 0])


def test_the_most_frequent_answer() -> None:
    assert majority("abcbc") == "b", "of those that are level the first"
    assert majority("abcbc", [1, 0, 1, 0, 1]) == "c"
    assert majority("abcbc", [0, 0, 0, 0, 0]) == "b", "none accepted: the plain majority"
    assert majority("ab", [0.2, 0.7]) == "b"
    assert best("abc", [0.1, 0.9, 0.9]) == "b"
    for empty in (majority, lambda answers: best(answers, [])):
        with pytest.raises(PanoplyError, match="no answer"):
            empty([])


def test_precision_and_recall_of_what_is_accepted() -> None:
    right, taken = [True, True, False, False], [True, False, True, False]
    found = acceptance(right, taken)
    assert (found.precision, found.recall, found.accepted) == (0.5, 0.5, 2)
    by = acceptance_by([0, 0, 3, 3], right, taken)
    assert (by[0].precision, by[0].recall) == (1.0, 0.5)
    assert by[3].precision == 0
    assert math.isnan(by[3].recall)


def test_whether_two_things_go_together() -> None:
    """30 and 10 against 10 and 30: odds ratio 9 but for the halves, and χ² = 80·(900 − 100)²/40⁴ = 20."""
    one = [True] * 40 + [False] * 40
    other = [True] * 30 + [False] * 10 + [True] * 10 + [False] * 30
    found = association(one, other)
    assert found.odds_ratio == pytest.approx((30.5 / 10.5) ** 2)
    assert found.chi_squared == pytest.approx(20.0)
    assert association([True, True], [True, False]).chi_squared == 0
