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
from panoply.worlds.text.keydoor import Keydoor
from panoply.worlds.text.quests import NONE, Layout, Quest
from panoply.worlds.world import Reply, Task

WORLD = Keydoor()
AGENT, KEY, DOOR = (1, 2), (0, 4), (1, 3)
LAYOUT = Layout(AGENT, (KEY,), 0, DOOR)
"""W N N to the key, P, E S to the door, O: seven turns."""


TRAIN = ("120413_>", 7, 9120404470047283035)
TEST = ("131144_>", 10, 503954592581541064)


def task(world: Keydoor = WORLD) -> Task:
    return world._asked(7, 7, LAYOUT)


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
    assert turns + 1 == LAYOUT.left((2, 1), NONE)


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


# ------------------------------------------------------------------ options


def prompts(world: Keydoor, actions: str, some: Task | None = None) -> list[str]:
    """What is seen, from the first prompt on."""
    play = world.play(some or task(world))
    return [
        world.text(play.prompt),
        *(world.text(play.act(world.tokens(world.word(a))).observation) for a in actions),
    ]


def test_history_is_the_last_places_oldest_first() -> None:
    world = Keydoor(history=2)
    seen = ["____120413_>", "__12020413_>", "1202030413_>", "0203040413_>", "0304040413k>"]
    assert prompts(world, "WNNP") == seen


def test_an_alias_hides_what_is_in_hand_from_prompt_and_state() -> None:
    world = Keydoor(alias=True, history=1)
    assert prompts(world, "WNNP")[-2:] == ["03040413_>", "04040413_>"]
    bare, picked = (played(actions, world)[0] for actions in ("WNN", "WNNP"))
    assert bare.state == picked.state
    assert played("WNNPESO", world)[1][-1].signals["success"] == 1, "the door knows what is in hand"


@pytest.mark.parametrize("said", ["unloc.", "unlock", "dow.", ".", "unlock.."])
def test_words_are_actions_only_when_whole(said: str) -> None:
    world = Keydoor(words=True)
    play, _ = played("", world)
    for action in "WNNPES":
        assert play.act(world.tokens(world.word(action))).signals["invalid"] == 0
    assert play.act(world.tokens(said)).signals == {"success": 0.0, "progress": 0.0, "invalid": 1.0}
    assert play.act(world.tokens("unlock.")).signals["success"] == 1


def test_a_word_ends_with_its_full_stop_or_at_the_longest() -> None:
    world = Keydoor(words=True)
    assert [world.complete(world.tokens(w)) for w in ("n", "n.", "westward", "westward.", "takedownn")] == [
        False, True, False, True, True,
    ]  # fmt: skip
    assert world.max_tokens == 9
    assert sorted(len(world.word(a)) - 1 for a in "NSEWPO") == [1, 4, 4, 5, 6, 8]


def test_legal_words_go_on_as_actions_that_can_be_done() -> None:
    """In the corner with the key in it: up and west are walls, and there is no door."""
    world = Keydoor(words=True, legal=True)
    play = world.play(task(world))
    for action in "WNN":
        play.act(world.tokens(world.word(action)))

    def may(said: str) -> str:
        return world.text(play.allowed(world.tokens(said)) or [])

    assert sorted(may("")) == ["d", "r", "t"]
    assert (may("t"), may("tak"), may("take")) == ("a", "e", ".")


def test_walls_have_one_gap() -> None:
    """Two rooms of five columns: columns 0 to 1 and 2 to 4, with a gap in row 4."""
    world = Keydoor(rooms=2, quest=(5, 12))
    layout = Layout((0, 0), ((4, 0),), 0, (0, 1), (2,), (4,))
    assert layout.left(layout.agent, NONE) == 12 + 1 + 11 + 1
    some = Keydoor(rooms=2, cap=30, quest=(5, 25))._asked(1, 25, layout)
    wide = Keydoor(rooms=2, cap=30, quest=(5, 25))
    assert wide.text(some.prompt) == "0040014_>"
    assert wide.text(wide.gold(some)) == "ENNNNEEESSSSPWWNNNNWWSSSO"
    play = wide.play(some)
    blocked = [play.act(wide.tokens(a)).signals["invalid"] for a in "EENNNNE"]
    assert blocked == [0, 1, 0, 0, 0, 0, 0]
    assert play.agent == (2, 4)
    for index in range(40):
        found = world.task("train", index)
        assert len(world.gold(found)) == found.level


def test_only_the_key_of_the_doors_colour_fits() -> None:
    world = Keydoor(objects=2, quest=(4, 12))
    some = world._asked(1, 7, Layout((1, 2), ((1, 3), (0, 4)), 1, (1, 4)))
    assert world.text(some.prompt) == "1213a04b14b_>"
    seen = prompts(world, "NPNO", some)
    assert [s[-2] for s in seen] == ["_", "_", "a", "a", "a"]
    play = world.play(some)
    replies = [play.act(world.tokens(a)) for a in "NPNOWPEO"]
    assert [r.signals["invalid"] for r in replies] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert replies[-1].signals["success"] == 1
    assert [r.signals["progress"] > 0 for r in replies] == [True, False, True, False, True, True, True, True]


def test_a_door_that_sticks_is_tried_again_and_grades_are_repeatable() -> None:
    world = Keydoor(chance=0.5)
    tasks = [world.task("train", index) for index in range(200)]
    tries = [world.text(world.gold(t)).count("O") for t in tasks]
    assert np.mean([n == 1 for n in tries]) == pytest.approx(0.5, abs=0.1)
    stuck = next(t for t, n in zip(tasks, tries, strict=True) if n > 1)
    once = world.gold(stuck)[: stuck.level]
    assert world.grade(stuck, once) == world.grade(stuck, once)
    assert world.grade(stuck, once)["success"] == 0
    assert world.grade(stuck, once)["invalid"] == 0


def test_a_hint_names_the_next_subgoal_and_can_be_dropped() -> None:
    world = Keydoor(hints=True)
    some = task(world)
    told = world.guided(some)
    assert (told.id, told.level) == (some.id, some.level)
    plain, helped = prompts(world, "WNNPE", some), prompts(world, "WNNPE", told)
    assert [p[-2] for p in plain] == ["_"] * 6
    assert [p[-2] for p in helped] == ["P", "P", "P", "P", "O", "O"]
    assert [world.text(world.unguided(world.tokens(p))) for p in helped] == plain
    with pytest.raises(PanoplyError, match="no place for hints"):
        Keydoor().guided(task())


def test_guidance_by_a_failure_tells_what_it_missed_and_nothing_else() -> None:
    world = Keydoor(hints=True)
    some = task(world)
    without, stuck = (world.guided(some, world.tokens(failed)) for failed in ("NOOO", "WNNPEO"))
    assert [p[-2] for p in prompts(world, "WNNPE", without)] == ["P", "P", "P", "P", "_", "_"]
    assert [p[-2] for p in prompts(world, "WNNPE", stuck)] == ["_", "_", "_", "_", "O", "O"]
    assert "guided" in world.access
    assert "guided" not in Keydoor().access


def test_half_of_the_lessons_are_guided_and_slip_half_as_often() -> None:
    world = Keydoor(hints=True, slip=1.0)
    rng = np.random.default_rng(0)
    lessons = [world.lessons(task(world), rng) for _ in range(200)]
    told = [lesson for lesson in lessons if world.text(lesson[0][0])[-2] == "P"]
    assert len(told) == pytest.approx(100, abs=25)
    slips = np.mean([world.text(lesson[1][1]) == "E" for lesson in told])
    assert slips == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize(
    "options",
    [
        {"alias": True, "history": 2},
        {"words": True},
        {"rooms": 2, "quest": (5, 12)},
        {"objects": 3, "words": True},
        {"chance": 0.3},
        {"hints": True, "rooms": 3, "size": 6, "quest": (4, 12)},
    ],
)
def test_the_world_tests_itself_with_every_option(options: dict[str, Any]) -> None:
    Keydoor(**options).self_test(8)


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({}, "keydoor-start"),
        ({"slip": 0.8, "quest": (6, 10)}, "keydoor-hard-start"),
        ({"slip": 0.8}, "keydoor-start"),
        ({"alias": True, "history": 2}, "keydoor-aliased-start"),
        ({"alias": True}, "keydoor-start"),
        ({"slip": 0.9, "quest": (6, 10), "hints": True}, "keydoor-guided-start"),
        ({"slip": 0.8, "quest": (6, 10), "words": True}, "keydoor-start-of-other-prompts"),
        ({"size": 7, "quest": (3, 15), "cap": 20}, "keydoor-wide-start"),
        ({"rooms": 2}, "keydoor-start-of-other-prompts"),
    ],
)
def test_a_start_reads_what_prompts_show(options: dict[str, Any], start: str) -> None:
    assert Keydoor(**options).start == start


def test_rooms_fit_into_columns() -> None:
    with pytest.raises(PanoplyError, match="3 rooms do not fit into 2 columns"):
        Keydoor(size=2, rooms=3)
