"""program:ir, translations that are right when they compute the same."""

from __future__ import annotations

import numpy as np
import pytest

from panoply.worlds.text.characters import Draws
from panoply.worlds.text.program_ir import (
    PRIME,
    Ir,
    changed,
    computed,
    equal,
    parsed,
    postfix,
    prefix,
    rewritten,
)

KIND = Ir()
PROBLEMS = [p for p in (KIND.problem(Draws(str(i))) for i in range(120)) if KIND.worth_asking(p)]


def test_signs_move_from_the_front_to_the_back() -> None:
    assert KIND.solution("-+ab*cd>") == "ab+cd*-"
    assert prefix(parsed("-+ab*cd")) == "-+ab*cd"


def test_programs_are_run_on_five_inputs() -> None:
    assert computed("ab-")[4] == (2 - 3) % PRIME
    assert computed("cd/")[4] == 5 * pow(7, -1, PRIME) % PRIME
    assert computed("aa-b/") == (0,) * 5
    for broken in ("ab", "+", "a+", "baa-/", "a>"):
        assert computed(broken) == (None,) * 5


def test_what_is_regrouped_is_equal() -> None:
    """(a − b) − c = a − (b + c), (a / b) / c = a / (b·c): the sign inside turns round."""
    assert ("-", "a", ("+", "b", "c")) in list(rewritten(parsed("--abc")))
    assert ("/", "a", ("*", "b", "c")) in list(rewritten(parsed("//abc")))
    for problem in PROBLEMS:
        tree = parsed(problem[:-1])
        assert {computed(postfix(other)) for other in equal(tree, 12)} == {computed(postfix(tree))}


def test_every_problem_has_equivalents_and_mutants() -> None:
    for problem in PROBLEMS:
        right, broken = KIND.equivalents(problem), KIND.broken(problem, 3, np.random.default_rng(0))
        assert right[0] == KIND.solution(problem)
        assert len(set(right)) == len(set(broken)) == 3
        assert [s["success"] for s in KIND.grade([problem] * 6, right + broken)] == [1, 1, 1, 0, 0, 0]


def test_operands_of_a_difference_are_not_exchanged_and_those_of_a_sum_are() -> None:
    found = KIND.grade(["-+ab*cd>"] * 4, ["ba+dc*-", "cd*ab+-", "ab+cd*", None])
    assert [signals["success"] for signals in found] == [1, 0, 0, 0]
    assert [signals["runs"] for signals in found] == [1, 1, 0, 0]


@pytest.mark.parametrize("seed", range(4))
def test_one_thing_is_changed(seed: int) -> None:
    before, after = prefix(parsed("-+ab*cd")), prefix(changed(parsed("-+ab*cd"), np.random.default_rng(seed)))
    assert after != before
    assert sorted(after) == sorted(before) or sum(x != y for x, y in zip(before, after, strict=True)) == 1


def test_the_teacher_slips_where_order_matters() -> None:
    rng = np.random.default_rng(0)
    said = {KIND.careless("-+ab*cd>", 0.5, False, rng) for _ in range(40)}
    assert said == {"ab+cd*-", "cd*ab+-"}
    assert any(set(KIND.careless("-+ab*cd>", 0.5, True, rng)) & {"/"} for _ in range(40))
