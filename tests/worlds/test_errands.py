"""Errands: every module's prompts by hand, doors that stick, a grounder asked in batches, and held-out orders."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.policies.build import warm_start
from panoply.worlds.text import errands as file
from panoply.worlds.text.errands import Errands, Round, unseen
from panoply.worlds.world import Reply, Task

WORLD = Errands()
MODULES = ("whole", "integrated", "planner", "grounder")


def task(sticks: str, order: str = "bca", world: Errands = WORLD) -> Task:
    """With the addresses of the docstring, and a number by which the first goes stick (`-`) or do not (`+`)."""
    for id in range(10**6):
        bare = Task(id, (), 3, {"order": order, "doors": "a1b0c5d9"})
        if sticking(bare, len(sticks)) == sticks:
            return dataclasses.replace(bare, prompt=world.shown(Round(world, bare)))
    raise AssertionError("no number will do")


def sticking(bare: Task, goes: int) -> str:
    """What would come of every go, if it were right: found by going, with doors tried again until they open."""
    play, came = Round(WORLD, dataclasses.replace(bare, data={**bare.data, "order": "bca"})), ""
    for _ in range(goes):
        if play.done == 3:
            break
        play._go(play.address(play.next))
        came += play.seen[0]
    return came


def played(world: Errands, of: Task, said: str) -> tuple[Round, list[Reply], list[str]]:
    play = world.play(of)
    replies = [play.act(world.tokens(turn)) for turn in said.split()]
    prompts = [
        world.text(prompt) for prompt in (world.shown(Round(world, of)), *(r.observation for r in replies))
    ]
    return play, replies, prompts


@pytest.mark.parametrize(
    ("module", "said", "prompts"),
    [
        ("whole", "0 5 5 1 .", ["Wa1b0c5d9_bca.+_", "Wa1b0c5d9_bca.+b", "Wa1b0c5d9_bca.-c",
                                "Wa1b0c5d9_bca.+c", "Wa1b0c5d9_bca.+a"]),
        ("integrated", "b0 c5 c5 a1 .", ["Ia1b0c5d9_bca.+_", "Ia1b0c5d9_bca.+b", "Ia1b0c5d9_bca.-c",
                                         "Ia1b0c5d9_bca.+c", "Ia1b0c5d9_bca.+a"]),
        ("planner", "b c c a .", ["P_bca.+_", "P_bca.+b", "P_bca.-c", "P_bca.+c", "P_bca.+a"]),
        ("grounder", "0 5 5 1", ["Ga1b0c5d9b", "Ga1b0c5d9c", "Ga1b0c5d9c", "Ga1b0c5d9a"]),
    ],
)  # fmt: skip
def test_prompts_of_every_module(module: Any, said: str, prompts: list[str]) -> None:
    """b opens, c sticks once, a opens. A planner sees no address; a grounder no other subgoal, and no result."""
    world = Errands(module=module)
    of = task("+-++", world=world)
    _, replies, seen = played(world, of, said)
    assert seen[: len(prompts)] == prompts
    assert [r.done for r in replies] == [False] * (len(replies) - 1) + [True]
    assert [r.signals["success"] for r in replies] == [0.0] * (len(replies) - 1) + [1.0]
    assert sum(r.signals["goes"] for r in replies) == 4
    assert world.text(world.gold(of)) == said.replace(" ", "")
    taught = (
        world.lessons(of, np.random.default_rng(0))
        if module == "grounder"
        else world.turns(of, world.gold(of))
    )
    assert [world.text(prompt) for prompt, _ in taught] == prompts


@pytest.mark.parametrize(
    ("module", "prompt", "said"),
    [("whole", "Wa1b0c5d9_bca.>", "051"), ("integrated", "Ia1b0c5d9_bca.>", "bca051"),
     ("planner", "P_bca.>", "bca"), ("grounder", "Ga1b0c5d9bca>", "051")],
)  # fmt: skip
def test_in_one_pass_nobody_sees_a_door_stick(module: Any, prompt: str, said: str) -> None:
    world = Errands(module=module, form="onetime")
    for sticks, success in (("+++", 1.0), ("+-+", 0.0)):
        of = task(sticks, world=world)
        _, (reply,), seen = played(world, of, said)
        assert (seen[0], world.text(world.gold(of))) == (prompt, said)
        assert (reply.done, reply.signals["success"], reply.signals["goes"]) == (True, success, 3.0)


def test_at_any_other_address_nothing_happens() -> None:
    """Not at d, not at c before b, not where nobody lives; a letter is no address, and no go."""
    play, replies, prompts = played(Errands(chance=0.0), task("+++"), "9 5 7 0 d 5")
    assert [prompt[-2:] for prompt in prompts] == ["+_", "+_", "+_", "+_", "+b", "+b", "+c"]
    assert [r.signals["invalid"] for r in replies] == [0, 0, 0, 0, 1, 0]
    assert (play.done, play.goes) == (2, 5)


@pytest.mark.parametrize(("said", "cut"), [("5 5 5 5 5 5", True), ("d d d d d d d", True), ("0 .", False)])
def test_how_episodes_end_without_success(said: str, cut: bool) -> None:
    """Six goes, seven turns, or a stop too soon, which is no cut."""
    _, replies, _ = played(WORLD, task("+++"), said)
    assert [r.done for r in replies] == [False] * (len(replies) - 1) + [True]
    assert (replies[-1].truncated, replies[-1].signals["success"]) == (cut, 0.0)


def test_doors_stick_as_often_as_they_are_said_to() -> None:
    came = [sticking(Task(i, (), 3, {"order": "bca", "doors": "a1b0c5d9"}), 1) for i in range(2000)]
    assert came.count("-") / 2000 == pytest.approx(0.4, abs=0.04)
    never = Errands(chance=0.0)
    assert all(len(never.gold(never.task("test", i))) == 4 for i in range(20))
    with pytest.raises(PanoplyError, match="too few problems"):
        Errands(chance=0.999).task("test", 0)


def test_held_out_orders_are_never_seen_in_training() -> None:
    some = {split: [WORLD.task(split, i) for i in range(160)] for split in ("train", "test")}
    orders = {split: {t.data["order"] for t in tasks} for split, tasks in some.items()}
    assert not orders["train"] & orders["test"]
    assert len(orders["train"]) > 100, "too many to be learned by heart one by one"
    assert len(orders["test"]) > 20
    assert all(map(unseen, orders["test"]))
    assert not any(list(order) == sorted(order) for order in orders["test"]), (
        "the alphabet is no way to do them"
    )
    assert len({t.id for t in some["test"]}) == 160
    planner = Errands(module="planner")
    same = [(t.id, t.data) for t in some["test"][:20]]
    assert [(t.id, t.data) for t in (planner.task("test", i) for i in range(20))] == same


@pytest.mark.parametrize("module", MODULES)
def test_references_and_mistakes(module: Any) -> None:
    Errands(module=module).self_test(8)
    Errands(module=module, form="onetime", chance=0.0).self_test(4)


def test_the_careless_teacher_takes_a_door_for_open() -> None:
    """Whoever slips always says after `-c` what follows c; who is told what to do never slips."""
    said = {}
    for module in MODULES:
        world = Errands(module=module, slip=1.0)
        taught = world.lessons(task("+-++", world=world), np.random.default_rng(0))
        said[module] = [world.text(turn) for _, turn in taught]
    assert said["whole"] == ["0", "5", "1", "1", "."]
    assert said["integrated"] == ["b0", "c5", "a1", "a1", "."]
    assert said["planner"] == ["b", "c", "a", "a", "."]
    assert said["grounder"] == ["0", "5", "5", "1"]
    careful = Errands(slip=0.0)
    of, rng = careful.task("test", 0), np.random.default_rng(0)
    assert careful.demonstrate(of, rng) == careful.gold(of)


def test_the_start_is_taught_every_module_and_form() -> None:
    world, rng = Errands(every=True), np.random.default_rng(0)
    taught = [world.text(p) for i in range(60) for p, _ in world.lessons(world.task("train", i), rng)]
    assert {(text[0], text[-1] == ">") for text in taught} == {(m, e) for m in "WIPG" for e in (False, True)}


# ------------------------------------------------------------------ a planner with a grounder


def test_a_grounder_is_asked_for_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose subgoal is none goes nowhere, and a stop needs no grounder; each other goes where its own was sent."""
    asked: list[list[str]] = []

    def grounded(of: Errands, folder: str, texts: list[str]) -> list[str]:
        assert (of.module, folder) == ("grounder", "somewhere")
        asked.append(list(texts))
        return ["0", "9"]

    monkeypatch.setattr(file, "grounded", grounded)
    world = Errands(module="planner", grounder="somewhere")
    plays = [world.play(task("+++", world=world)) for _ in range(4)]
    replies = world.act_all(plays, [world.tokens(said) for said in ("7", "b", "d", ".")])
    assert asked == [["Ga1b0c5d9b", "Ga1b0c5d9d"]]
    assert [world.text(r.observation)[-2:] for r in replies] == ["+_", "+b", "+_", "+_"]
    assert [r.signals["invalid"] for r in replies] == [1, 0, 0, 0]
    assert [r.done for r in replies] == [False, False, False, True]


def test_the_shipped_start_opens_doors_as_hands_do() -> None:
    """One door at a time it looks up nearly all addresses; asked alone or with others it does the same."""
    ground = Errands(module="grounder")
    start = str(warm_start(ground))
    some = [ground.task("test", i) for i in range(24)]
    asked = [ground.text(t.prompt) for t in some]
    done = file.grounded(ground, start, asked)
    right = [t.data["doors"][t.data["doors"].index(t.data["order"][0]) + 1] for t in some]
    assert sum(a == b for a, b in zip(done, right, strict=True)) >= 23
    assert [file.grounded(ground, start, [text])[0] for text in asked[:2]] == done[:2]
    assert file.grounded(ground, start, []) == []


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"grounder": "somewhere"}, "errands.grounder opens doors for a planner; module is 'whole'"),
        ({"chance": 1.0}, "chance"),
        ({"cap": 2}, "cap"),
        ({"slip": 1.5}, "slip"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(PanoplyError, match=match):
        Errands(**settings)
