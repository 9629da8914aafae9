"""The kind wordle of the world guess: marks against a slow reference, experts, players and what they leave."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import panoply as pp
from panoply.errors import PanoplyError
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.slots.data.log import log
from panoply.worlds.text.guess import Dialogue, Guess
from panoply.worlds.text.wordle import LETTERS, WORDS, Wordle, best_of, marks
from panoply.worlds.world import Reply, Task

WORLD = Guess(kind="wordle")
HIDDEN, FIRST, OTHER = WORDS[5], WORDS[0], WORDS[9]


def task(secret: str) -> Task:
    return Task(7, tuple(WORLD.tokens(WORLD.riddle.prompt(secret))), data={"secret": secret})


def played(secret: str, *turns: str) -> tuple[Dialogue, list[Reply]]:
    play = WORLD.play(task(secret))
    return play, [play.act(WORLD.tokens(turn)) for turn in turns]


# ------------------------------------------------------------------ marks


def slow(hidden: str, guess: str) -> str:
    """By hand, as with pegs: first every letter in its place is struck out on both sides, then others find a pair."""
    said, there, found = list(guess), list(hidden), ["_"] * len(guess)
    for i in range(len(guess)):
        if said[i] == there[i]:
            found[i], said[i], there[i] = "G", "-", "+"
    for i in range(len(guess)):
        if said[i] in there:
            found[i] = "Y"
            there[there.index(said[i])] = "+"
    return "".join(found)


def test_marks_against_a_slow_reference_on_all_words_of_three_letters() -> None:
    every = ["".join(word) for word in itertools.product(LETTERS[:4], repeat=3)]
    assert all(marks(hidden, guess) == slow(hidden, guess) for hidden in every for guess in every)


@pytest.mark.parametrize(
    ("hidden", "guess", "found"),
    [
        ("cad", "aab", "_G_"),  # the one a is accounted for by its place
        ("dca", "aab", "Y__"),  # the first of two finds it
        ("aab", "baa", "YGY"),
        ("aba", "aab", "GYY"),
        ("abc", "cba", "YGY"),
        ("aaa", "aba", "G_G"),
        ("abc", "abc", "GGG"),
        ("abc", "def", "___"),
    ],
)
def test_repeated_letters_are_marked_as_often_as_they_are_there(hidden: str, guess: str, found: str) -> None:
    assert marks(hidden, guess) == found


def test_the_list_is_the_same_everywhere_and_has_repeated_letters() -> None:
    assert len(WORDS) == len(set(WORDS)) == 64
    assert WORDS[:4] == ("aaa", "aab", "aad", "aae")
    assert sum(len(set(word)) < 3 for word in WORDS) > 15


# ------------------------------------------------------------------ episodes


def test_an_episode_until_the_word_is_found() -> None:
    play, replies = played(HIDDEN + FIRST, OTHER, "afG", HIDDEN)
    assert WORLD.text(play.prompt) == f"{FIRST}{slow(HIDDEN, FIRST)}>"
    assert WORLD.text(replies[0].observation) == f"{slow(HIDDEN, OTHER)}>"
    assert WORLD.text(replies[1].observation) == "?>"
    assert [r.signals["score"] for r in replies] == [-1, -1, 0]
    assert [r.signals["invalid"] for r in replies] == [0, 1, 0]
    assert [r.signals["success"] for r in replies] == [0, 0, 1]
    assert [r.done for r in replies] == [False, False, True]
    assert not replies[-1].truncated


def test_five_turns_are_all_and_a_word_that_is_ruled_out_is_wasted() -> None:
    _, replies = played(HIDDEN + FIRST, *[FIRST] * 5)
    assert [r.done for r in replies] == [False] * 4 + [True]
    assert replies[-1].truncated
    assert all(r.signals["wasted"] == 1 for r in replies)
    assert WORLD.grade(task(HIDDEN + FIRST), WORLD.tokens(FIRST * 5))["score"] == WORLD.least == -5


def test_what_is_left_agrees_with_every_mark() -> None:
    play, _ = played(HIDDEN + FIRST, OTHER, "GGG")
    left = Wordle().left(play.secret, play.said)
    heard = [(guess, slow(HIDDEN, guess)) for guess in (FIRST, OTHER)]
    assert left == tuple(w for w in WORDS if all(slow(w, guess) == reply for guess, reply in heard))
    assert HIDDEN in left


def test_the_expert_asks_for_what_leaves_least_and_finds_every_word() -> None:
    left = ("abc", "abd", "abe", "dce")  # dce leaves 1, 1, 1 of the others, each of which leaves two together
    assert best_of(left) == min(left, key=lambda g: sum(slow(a, g) == slow(b, g) for a in left for b in left))
    tasks = [WORLD.task("train", i) for i in range(300)]
    assert all(WORLD.grade(t, WORLD.gold(t))["success"] == 1 for t in tasks)
    assert np.mean([WORLD.grade(t, WORLD.gold(t))["score"] for t in tasks]) > -2


def test_the_careless_teacher_says_the_last_word_again() -> None:
    rng, hasty = np.random.default_rng(0), Guess(kind="wordle", slip=1.0)
    play, _ = played(HIDDEN + FIRST)
    assert hasty.text(hasty.careless(play, rng)) == FIRST
    play, _ = played(HIDDEN + FIRST, OTHER)
    assert hasty.text(hasty.careless(play, rng)) == OTHER
    careful = Guess(kind="wordle", slip=0.0)
    assert careful.careless(play, rng) == careful.expert(play)


def test_it_grades_itself_and_forks() -> None:
    WORLD.self_test(16)
    train, test = ({WORLD.task(split, i).id for i in range(150)} for split in ("train", "test"))
    assert not train & test
    assert len({t.id for t in WORLD.held_out(256)}) == 256
    play = WORLD.play(WORLD.task("train", 0))
    other = play.fork()
    other.act(WORLD.expert(other))
    assert play.said == ()
    assert play.state == WORLD.play(play.task).state != other.state


# ------------------------------------------------------------------ the log


def test_players_differ_in_how_often_they_heed_the_marks() -> None:
    earned: list[list[float]] = [[], [], []]
    for i, (asked, answer) in enumerate(WORLD.log(600)):
        earned[i % 3].append(WORLD.grade(asked, answer)["score"])
    thorough, careless, stubborn = (float(np.mean(scores)) for scores in earned)
    assert -2.8 < thorough < -2.1
    assert stubborn + 0.3 < careless < thorough - 0.3
    least, mean, best = WORLD.scale
    assert least == -5
    assert mean == pytest.approx(np.mean([x for scores in earned for x in scores]))
    assert best > -2
    perfect = Guess(kind="wordle", slip=0.0)
    assert perfect.log(3)[2][1] != perfect.gold(
        perfect.log(3)[2][0]
    )  # half of nothing but care is not all of it


def test_methods_learn_from_the_log() -> None:
    collect = Collector(WORLD, open_policy("start", WORLD, 0, "cpu"), 0)
    rows = log(batch=8, size=30, best=0.2)(collect)
    assert len(rows.by("episode")) == 8
    assert {float(x) for x in rows["signal:score"]} <= {-1.0, 0.0}
    for name in ("ilql", "mc-returns"):
        pp.plan(name, "guess:words")
    with pytest.raises(PanoplyError, match="no scripted players|writers"):
        pp.plan("ilql", "guess")


def test_kinds_without_a_score_measure_no_return() -> None:
    gate = Guess(kind="gatekeeper")
    with pytest.raises(PanoplyError, match="pays no score"):
        gate.measure("return", open_policy("start", gate, 0, "cpu"))
    with pytest.raises(PanoplyError, match="no scripted players"):
        Guess().measure("normalised", open_policy("start", Guess(), 0, "cpu"))
