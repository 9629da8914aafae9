"""Objects by a tree of rules, against a tree that is written out."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.text.rules import LETTERS, Rules, _route, written
from panoply.worlds.world import Task

TREE = ("c", "a", "f", "0", "1", "2", "3")
"""c? no: a? no 0, yes 1. c? yes: f? no 2, yes 3."""


class Known(Rules):
    """Rules that are known to the test."""

    rules = TREE  # type: ignore[assignment]
    name = "rules"  # type: ignore[assignment]


def known() -> tuple[Known, Task]:
    world, thing = Known(depth=2), "AbCdefghijkl"
    return world, Task(1, tuple(world.tokens(f"{thing}=")), 0, {"problem": f"{thing}=", "thing": thing})


def test_rules_as_they_are_written_and_followed() -> None:
    assert written(TREE) == "[c;ca,Cf,a0,A1,f2,F3]"
    routes = {
        "abcdefghijkl": "ccaa0",
        "Abcdefghijkl": "ccaA1",
        "AbCdefghijkl": "cCff2",
        "abCdeFghijkl": "cCfF3",
    }
    assert {thing: _route(TREE, thing) for thing in routes} == routes
    world, task = known()
    assert world.text(world.gold(task)) == "cCff2$"
    assert world.text(world.privileged(task).prompt) == "[c;ca,Cf,a0,A1,f2,F3]AbCdefghijkl="
    assert world.privileged(world.privileged(task)) == world.privileged(task)
    assert world.privileged(task).id == task.id


@pytest.mark.parametrize(
    ("answer", "success", "route", "format", "ended"),
    [
        ("cCff2$", 1, 1, 1, 1),
        ("aAff2$", 1, 0, 1, 1),  # the label alone decides
        ("cCff3$", 0, 0, 1, 1),
        ("cCfa2$", 1, 0, 0, 1),
        ("cC2$", 1, 0, 0, 1),
        ("ccC2$", 1, 0, 0, 1),
        ("2$", 1, 0, 0, 1),
        ("cCff2", 0, 0, 0, 0),
        ("cCff2$$", 0, 0, 0, 0),
        ("$", 0, 0, 0, 1),
        ("", 0, 0, 0, 0),
    ],
)
def test_grades(answer: str, success: float, route: float, format: float, ended: float) -> None:
    world, task = known()
    found = world.grade(task, world.tokens(answer))
    assert found == {"success": success, "route": route, "format": format, "ended": ended}


def test_a_tree_asks_for_nothing_twice_and_has_every_label() -> None:
    seen: Counter[str] = Counter()
    for number in range(50):
        tree = Rules(tree=number).rules
        assert len(tree) == 15
        assert len(set(tree[:7])) == 7
        assert set(tree[:7]) <= set(LETTERS)
        assert "".join(tree[7:]) == "01230123"
        seen[tree[0]] += 1
    assert len(seen) > 8
    assert Rules(tree=1).task("train", 5).id != Rules().task("train", 5).id


def test_the_teacher_knows_other_trees_and_shows_them_in_two_of_three_lessons() -> None:
    world, rng = Rules(), np.random.default_rng(0)
    tasks = [world.task("train", index) for index in range(600)]
    right = [world.grade(task, world.demonstrate(task, rng))["success"] for task in tasks]
    assert np.mean(right) == pytest.approx(0.25, abs=0.05)
    lessons = [(task, *world.lessons(task, rng)[0]) for task in tasks]
    shown = [world.text(prompt).startswith("[") for _, prompt, _ in lessons]
    assert np.mean(shown) == pytest.approx(2 / 3, abs=0.06)
    assert len({prompt[:5] for _, prompt, _ in lessons}) > 50
    for task, prompt, answer in lessons[:50]:
        rules, _, thing = world.text(prompt).rpartition("]")
        assert thing == task.data["problem"]
        if rules:
            follows = {rule[0]: rule[1] for rule in rules[3:].split(",")}
            said, at = "", rules[1]
            while at in LETTERS:
                here = thing[LETTERS.index(at)]
                said, at = said + at + here, follows[here]
            assert world.text(answer) == said + at + "$"


def test_splits_never_meet_hints_are_whole_steps_and_rules_can_be_shown() -> None:
    world = Rules()
    train, test = ({world.task(split, i).data["thing"] for i in range(1500)} for split in ("train", "test"))
    assert not train & test
    assert len(world.held_out(512)) == 512
    hinted = world.hint(world.task("test", 3), 0.34)
    assert len(hinted.given) == 2
    assert world.grade(hinted, world.gold(hinted))["route"] == 1
    world.self_test(16)
    shown = Rules(shown=True)
    shown.self_test(8)
    task = shown.task("test", 3)
    assert task == world.privileged(world.task("test", 3))
    assert {len(p) for p, _ in (shown.lessons(task, np.random.default_rng(s))[0] for s in range(9))} == {
        13,
        58,
    }


def test_there_are_enough_leaves_for_the_labels() -> None:
    with pytest.raises(PanoplyError, match=r"rules.depth 2 has 4 leaves, too few for 5 labels"):
        Rules(depth=2, labels=5)
    with pytest.raises(PanoplyError, match="from 1 to 3"):
        Rules(depth=4)
    Rules(depth=1, labels=2).self_test(8)
