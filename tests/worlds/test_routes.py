"""Routes: answers in each mode by hand, what the tool works out, prices, and what a right answer costs."""

from __future__ import annotations

import pytest

from panoply.errors import PanoplyError
from panoply.policies.build import open_policy
from panoply.worlds.text.routes import Routes
from panoply.worlds.world import Task

WORLD = Routes()
TASK = Task(1, tuple(WORLD.tokens("3+4*2=")), 2, {"problem": "3+4*2"})


def grade(answer: str, task: Task = TASK) -> dict[str, float]:
    return WORLD.grade(task, WORLD.tokens(answer))


@pytest.mark.parametrize(
    ("answer", "success", "cost", "malformed"),
    [
        ("I4$", 1, 1, 0),
        ("I5$", 0, 1, 0),
        ("R+47*24$", 1, 5, 0),
        ("R+46*24$", 0, 5, 0),  # every step must be right
        ("A3+4*2$", 1, 20, 0),
        ("A3*4+2$", 1, 20, 0),  # another problem with the same result: what is written is worked out
        ("A3+4+2$", 0, 20, 0),
        ("A3+4$", 0, 20, 1),
        ("I4", 0, 1, 1),
        ("4$", 0, 20, 1),
        ("$", 0, 20, 1),
    ],
)
def test_answers(answer: str, success: float, cost: float, malformed: float) -> None:
    found = grade(answer)
    assert (found["success"], found["cost"], found["malformed"]) == (success, cost, malformed)
    assert (found["instant"], found["agentic"]) == (answer[0] == "I", answer[0] == "A")


def test_a_mode_that_is_given() -> None:
    begun = WORLD.in_mode(TASK, "R")
    assert WORLD.text(begun.prompt) == "3+4*2=R"
    assert WORLD.text(WORLD.gold(begun)) == "+47*24$"
    assert grade("+47*24$", begun)["success"] == 1
    assert grade("4$", begun)["success"] == 0


def test_the_world_tests_itself_and_refuses() -> None:
    WORLD.self_test(32)
    for settings, why in (
        ({"costs": (1.0, 2.0)}, "routes.costs has a number for each of the modes I, R, A"),
        ({"habit": (1.0,)}, "routes.habit"),
        ({"operations": (3, 2)}, "routes.operations is a range"),
    ):
        with pytest.raises(PanoplyError, match=why):
            Routes(**settings)  # type: ignore[arg-type]


def test_what_a_right_answer_costs() -> None:
    """All modes about equally often, a good third of the answers right."""
    policy = open_policy("start", WORLD, 0, "cpu")
    shares = [float(WORLD.begins(policy, way).mean()) for way in WORLD.ways]
    assert sum(shares) == pytest.approx(1, abs=0.05)
    assert min(shares) > 0.2
    cheap, dear = (Routes(costs=costs).measure("per-right", policy) for costs in ((1, 1, 1), (2, 2, 2)))
    assert dear == pytest.approx(2 * cheap)
    assert 1 / 0.5 < cheap < 1 / 0.3
