"""The key-and-door world, against episodes worked out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import panoply as pp
from panoply.errors import PanoplyError
from panoply.policies.decoder_config import DecoderConfig
from panoply.progress import Progress
from panoply.run import Run
from panoply.worlds.text.keydoor import Keydoor, Quest, shortest
from panoply.worlds.world import Reply, Task

WORLD = Keydoor()
AGENT, KEY, DOOR = (1, 2), (0, 4), (1, 3)
"""W N N to the key, P, E S to the door, O: seven turns."""


TRAIN = ("120413_>", 7, 9120404470047283035)
TEST = ("131144_>", 10, 503954592581541064)


def task(world: Keydoor = WORLD) -> Task:
    prompt = world._prompt(AGENT, KEY, DOOR, held=False)
    return Task(7, prompt, 7, {"agent": AGENT, "key": KEY, "door": DOOR})


def played(actions: str, world: Keydoor = WORLD) -> tuple[Quest, list[Any]]:
    play = world.play(task(world))
    return play, [play.act(world.tokens(action)) for action in actions]


def test_an_observation_is_eight_tokens_and_the_whole_prompt() -> None:
    play, replies = played("WNNPE")
    assert WORLD.text(play.prompt) == "120413_>"
    seen = ["020413_>", "030413_>", "040413_>", "040413k>", "140413k>"]
    assert [WORLD.text(r.observation) for r in replies] == seen
    assert WORLD.markov
    assert WORLD.max_tokens == 1


def test_the_door_opens_with_the_key_and_ends_the_episode() -> None:
    _, replies = played("WNNPESO")
    assert [r.signals["success"] for r in replies] == [0, 0, 0, 0, 0, 0, 1]
    assert [r.done for r in replies] == [False] * 6 + [True]
    assert not replies[-1].truncated
    assert sum(r.signals["invalid"] for r in replies) == 0


def test_a_dense_reward_is_the_share_of_the_way() -> None:
    _, replies = played("WENWNPESO")  # a step back and forth: −1/7 and +1/7
    shares = [round(7 * r.signals["progress"]) for r in replies]
    assert shares == [1, -1, 1, 1, 1, 1, 1, 1, 1]
    assert sum(r.signals["progress"] for r in replies) == pytest.approx(1)


@pytest.mark.parametrize(
    ("actions", "invalid"),
    [
        ("WW", [0, 1]),  # off the grid
        ("WNNN", [0, 0, 0, 1]),
        ("P", [1]),  # no key here
        ("NO", [0, 1]),  # at the door, without the key
        ("WNNPP", [0, 0, 0, 0, 1]),  # has it already
        ("WNNPO", [0, 0, 0, 0, 1]),  # has it, not at the door
        ("k>", [1, 1]),  # not actions
    ],
)
def test_what_cannot_be_done_changes_nothing_and_is_counted(actions: str, invalid: list[int]) -> None:
    play, replies = played(actions)
    assert [r.signals["invalid"] for r in replies] == invalid
    before, _ = played(actions[:-1])
    assert (play.agent, play.held, play.state) == (before.agent, before.held, before.state)
    assert not replies[-1].done


def test_a_token_of_another_model_is_no_action() -> None:
    assert played("")[0].act([999]).signals["invalid"] == 1


def test_the_cap_truncates() -> None:
    _, replies = played("NS" * 6)
    assert [r.done for r in replies] == [False] * 11 + [True]
    assert replies[-1].truncated
    late = Keydoor(cap=7, quest=(5, 7))
    assert played("WNNPESO", late)[1][-1].signals["success"] == 1
    _, replies = played("PWNNPESO"[:7], late)
    assert replies[-1].done
    assert replies[-1].truncated
    assert replies[-1].signals["success"] == 0


def test_states_recur_whatever_the_turn_and_differ_by_task_place_and_key() -> None:
    start = played("")[0].state
    assert played("NS")[0].state == played("WEWE")[0].state == played("P")[0].state == start
    assert played("WNNPSS")[0].state != played("W")[0].state, "the key is part of the state"
    other = WORLD.play(WORLD.task("train", 0))
    assert len({start, played("N")[0].state, other.state}) == 3


def test_clones_are_alike() -> None:
    one, two = WORLD.play(WORLD.task("train", 3)), WORLD.play(WORLD.task("train", 3))
    assert (one.prompt, one.state) == (two.prompt, two.state)
    one.act(WORLD.tokens("N"))
    assert two.turn == 0


# ------------------------------------------------------------------ teacher and expert


def test_the_expert_takes_a_shortest_way() -> None:
    assert WORLD.text(WORLD.gold(task())) == "WNNPESO"
    for index in range(50):
        some = WORLD.task("train", index)
        assert len(WORLD.gold(some)) == some.level
        assert WORLD.grade(some, WORLD.gold(some))["success"] == 1


def test_the_expert_finds_back_from_anywhere() -> None:
    play, _ = played("SE")
    turns = 0
    while not play.act(WORLD.expert(play)).done:
        turns += 1
    assert turns + 1 == shortest((2, 1), KEY, DOOR, held=False)


def test_a_teacher_that_always_slips_heads_for_the_door_and_opens_it_in_vain() -> None:
    careless = Keydoor(slip=1.0)
    answer = careless.text(careless.demonstrate(task(careless), np.random.default_rng(0)))
    assert answer == "N" + "O" * 11
    assert careless.grade(task(careless), careless.tokens(answer))["success"] == 0


def test_lessons_are_played_carefully_and_said_carelessly() -> None:
    careless = Keydoor(slip=1.0)
    lessons = careless.lessons(task(careless), np.random.default_rng(0))
    assert [careless.text(p) for p, _ in lessons] == [
        "120413_>", "020413_>", "030413_>", "040413_>", "040413k>", "140413k>", "130413k>",
    ]  # fmt: skip
    assert "".join(careless.text(said) for _, said in lessons) == "NEEEESO"


def test_the_teacher_is_right_as_often_as_the_world_was_sized_for() -> None:
    rng = np.random.default_rng(0)
    tasks = [WORLD.task("train", index) for index in range(1000)]
    found = np.mean([WORLD.grade(t, WORLD.demonstrate(t, rng))["success"] for t in tasks])
    assert found == pytest.approx(0.41, abs=0.05)


# ------------------------------------------------------------------ grading whole episodes, tasks, options


@pytest.mark.parametrize(
    ("answer", "success"),
    [
        ("WNNPESO", 1),
        ("WNNPES", 0),
        ("WNNPESON", 0),
        ("", 0),
        ("WNNESO", 0),
        ("PWNNPESO", 1),
        ("PPPPPPWNNPESO", 0),
    ],
)
def test_an_answer_is_all_turns_of_an_episode(answer: str, success: int) -> None:
    assert WORLD.grade(task(), WORLD.tokens(answer))["success"] == success


def test_answers_split_into_turns_again() -> None:
    some = WORLD.task("train", 5)
    assert WORLD.turns(some, WORLD.gold(some)) == Keydoor(slip=0).lessons(some, np.random.default_rng(0))


def test_tasks_are_the_same_in_every_process() -> None:
    train, test = WORLD.task("train", 0), WORLD.task("test", 12345)
    assert (WORLD.text(train.prompt), train.level, train.id) == TRAIN
    assert (WORLD.text(test.prompt), test.level, test.id) == TEST


def test_train_and_test_never_meet() -> None:
    train = {WORLD.task("train", index).prompt for index in range(2500)}
    test = {WORLD.task("test", index).prompt for index in range(2500)}
    assert not train & test
    assert len(test) > 900
    assert all(5 <= WORLD.task("train", index).level <= 10 for index in range(200))


def test_the_world_tests_itself() -> None:
    WORLD.self_test(32)
    Keydoor(size=4, cap=9, quest=(4, 8)).self_test(8)


@pytest.mark.parametrize(("opened", "kind"), [(1.0, "wrong"), (0.0, "reference")])
def test_the_self_test_finds_a_wrong_verifier(
    opened: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes any attempt at the door for success, or none."""

    class Faulty(Quest):
        def act(self, answer: Sequence[int]) -> Reply:
            reply = super().act(answer)
            tried = WORLD.text(answer) == "O"
            signals = {**reply.signals, "success": opened if tried else 0.0}
            return dataclasses.replace(reply, signals=signals)

    monkeypatch.setattr(Keydoor, "play", lambda self, task: Faulty(self, task))
    with pytest.raises(PanoplyError, match=f"grades the {kind} answer"):
        Keydoor().self_test(8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 1}, "size must be from 2 to 10"),
        ({"cap": 9}, "within keydoor.cap"),
        ({"slip": 1.5}, "keydoor.slip must be from 0 to 1"),
        ({"quest": (7, 6)}, "range of turns"),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PanoplyError, match=message):
        Keydoor(**options)


def test_too_few_layouts() -> None:
    with pytest.raises(PanoplyError, match="too few problems"):
        Keydoor(size=2, quest=(9, 10)).task("train", 0)


def test_the_default_model_can_speak() -> None:
    assert DecoderConfig(**WORLD.default_model()).vocab_size == WORLD.tokenizer.vocab_size == 20


def test_from_scratch_the_warm_start_is_made_as_the_shipped_one_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keydoor, "imitation", {"data.batch": 2, "run.steps": 1, "run.held_out": 4})
    small = {"sample.prompts": 2, "sample.group": 2, "run.held_out": 4}
    pp.train(
        "grpo",
        "keydoor",
        from_scratch=True,
        run=tmp_path / "run",
        steps=1,
        settings=small,
        progress=Progress(),
    )
    made = Run.open(tmp_path / "run-start").plan()
    assert made.method.settings()["data.batch"] == 2
    assert made.options.steps == 1
