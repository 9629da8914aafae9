"""The world guess, against episodes worked out by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.policies.build import warm_start
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.worlds.text.guess import Dialogue, Guess
from panoply.worlds.text.riddles import FACTS, ITEMS, TABLE
from panoply.worlds.world import Reply, Task

ITEMS_WORLD = Guess()


def task(world: Guess, secret: str) -> Task:
    return Task(7, tuple(world.tokens(world.riddle.prompt(secret))), data={"secret": secret})


def played(world: Guess, secret: str, *turns: str) -> tuple[Dialogue, list[Reply]]:
    play = world.play(task(world, secret))
    return play, [play.act(world.tokens(turn)) for turn in turns]


# ------------------------------------------------------------------ items


def test_no_two_items_are_alike_and_every_fact_tells_some_apart() -> None:
    assert len(set(TABLE.values())) == len(ITEMS) == 16
    assert all(0 < sum(facts[i] for facts in TABLE.values()) < 16 for i in range(len(FACTS)))


def test_an_episode_of_questions_and_a_guess() -> None:
    secret = "bcekopp"
    turns = ("Q1", "Q0", "Q3", "Gp")
    play, replies = played(ITEMS_WORLD, secret, *turns)
    heard = "".join("y" if TABLE["p"][fact] else "N" for fact in (1, 0, 3))
    assert ITEMS_WORLD.text(play.prompt) == "bcekop>"
    assert "".join(ITEMS_WORLD.text(r.observation) for r in replies[:3]) == heard
    assert [r.signals["success"] for r in replies] == [0, 0, 0, 1]
    assert [r.signals["score"] for r in replies] == [-1, -1, -1, 0]
    assert [r.done for r in replies] == [False, False, False, True]
    assert not replies[-1].truncated
    assert ITEMS_WORLD.text(ITEMS_WORLD.gold(play.task)) == "".join(turns)


def test_a_wrong_guess_costs_the_turns_that_were_left() -> None:
    _, replies = played(ITEMS_WORLD, "bcekopp", "Q1", "Gb")
    assert [r.signals["score"] for r in replies] == [-1, -5]  # six in all, as if none had come out
    assert (replies[-1].done, replies[-1].signals["success"]) == (True, 0)


def test_six_turns_truncate_and_a_question_asked_again_is_wasted() -> None:
    _, replies = played(ITEMS_WORLD, "bcekopp", *["Q1"] * 6)
    assert [r.done for r in replies] == [False] * 5 + [True]
    assert replies[-1].truncated
    assert [r.signals["wasted"] for r in replies] == [0, 1, 1, 1, 1, 1]
    assert sum(float(r.signals["score"]) for r in replies) == -6  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("turn", "invalid"), [("Q1", 0), ("Gb", 0), ("Qb", 1), ("G1", 1), ("b", 1), ("N", 1)]
)
def test_grammar_of_items(turn: str, invalid: int) -> None:
    assert ITEMS_WORLD.complete(ITEMS_WORLD.tokens(turn))
    assert not any(ITEMS_WORLD.complete(ITEMS_WORLD.tokens(turn[:n])) for n in range(1, len(turn)))
    _, (reply,) = played(ITEMS_WORLD, "bcekopp", turn)
    assert reply.signals["invalid"] == invalid
    assert ITEMS_WORLD.text(reply.observation) == "_" or not invalid


def test_what_is_left_agrees_with_all_that_was_heard() -> None:
    play, _ = played(ITEMS_WORLD, "bcekopp", "Q1", "b", "Q0")
    left = ITEMS_WORLD.riddle.left(play.secret, play.said)  # type: ignore[attr-defined]
    assert left == "".join(i for i in "bcekop" if all(TABLE[i][f] == TABLE["p"][f] for f in (1, 0)))


def test_the_careless_teacher_guesses_among_what_is_left() -> None:
    rng, hasty = np.random.default_rng(0), Guess(slip=1.0)
    play, _ = played(hasty, "bcekopp", "Q1")
    left = hasty.riddle.left(play.secret, play.said)  # type: ignore[attr-defined]
    said = {hasty.text(hasty.careless(play, rng)) for _ in range(50)}
    assert said == {f"G{item}" for item in left}
    assert hasty.text(Guess(slip=0.0).careless(play, rng)) == hasty.text(hasty.expert(play))


def test_turns_can_be_capped_where_one_text_holds_all_of_them() -> None:
    collect = Collector(ITEMS_WORLD, TextPolicy.load(warm_start(ITEMS_WORLD) or ""), 0)
    rows = collect.episodes(collect.tasks(6), 1, turns=1)
    assert int(rows["turn"].max()) == 0
    assert set(rows["end"][rows.by("episode").is_last()].tolist()) <= {1, 2}


# ------------------------------------------------------------------ the gatekeeper

GATE = Guess(kind="gatekeeper")


def heard(secret: str, *turns: str) -> tuple[str, list[Reply]]:
    _, replies = played(GATE, secret, *turns)
    return "".join(GATE.text(r.observation) for r in replies), replies


def patient() -> str:
    """A secret whose gatekeeper listens to the first three right questions."""
    secrets = ("".join(p) + "3" for p in itertools.permutations("abcdefgh", 3))
    return next(s for s in secrets if heard(s, *(f"T{t}Q{t}." for t in (s[1], s[2], s[0])))[0] == "++!")


def test_a_mood_says_the_order() -> None:
    f, b, d, _ = secret = patient()
    signs, replies = heard(secret, f"T{b}Q{b}.", f"ThQ{d}.", f"T{f}Q{f}.")  # a thought is free
    assert signs[0] == "+"
    assert replies[0].signals["success"] == 0
    assert GATE.text(GATE.gold(task(GATE, secret))) == f"T{b}Q{b}.T{d}Q{d}.T{f}Q{f}."
    signs, replies = heard(secret, *(f"T{t}Q{t}." for t in (b, d, f)))
    assert signs == "++!"
    assert [(r.signals["success"], r.done) for r in replies] == [(0, False), (0, False), (1, True)]
    assert heard(secret, *(f"T{t}Q{t}." for t in (f, b, d)))[0][0] == "-"


@pytest.mark.parametrize(
    ("turn", "sign", "malformed", "astray"),
    [
        ("QaTa.", "?", 1, 0),
        ("TaQaT", "?", 1, 0),
        ("Ta.a.", "?", 1, 0),
        ("T3Qa.", "?", 1, 0),
        ("TaQ3.", "?", 1, 0),
        ("TaQh.", "-", 0, 1),
        ("TaQb.", "-", 0, 0),
    ],
)
def test_tags_and_topics(turn: str, sign: str, malformed: int, astray: int) -> None:
    signs, (reply,) = heard("abc0", turn)
    assert signs == sign
    assert (reply.signals["malformed"], reply.signals["astray"]) == (malformed, astray)


def test_one_right_question_in_ten_is_not_listened_to_and_two_are_never_lost() -> None:
    secrets = ["".join(p) + "0" for p in itertools.permutations("abcdefgh", 3)]
    deaf = sum(heard(s, f"T{s[0]}Q{s[0]}.")[0] == "-" for s in secrets) / len(secrets)
    assert 0.05 < deaf < 0.15
    for secret in secrets[:60]:  # four turns are always enough for the expert
        assert GATE.grade(task(GATE, secret), GATE.gold(task(GATE, secret)))["success"] == 1


def test_the_careless_teacher_ignores_the_mood_and_mixes_tags() -> None:
    rng, hasty = np.random.default_rng(0), Guess(kind="gatekeeper", slip=1.0)
    play, _ = played(hasty, "abc5")
    said = [hasty.text(hasty.careless(play, rng)) for _ in range(300)]
    assert set(said) == {"TaQa.", "QaTa."}
    assert 0.05 < said.count("QaTa.") / 300 < 0.15


# ------------------------------------------------------------------ slots

TALK = Guess(kind="slots")
PROFILE = "dbacabdc3037"
"""Asked for fact 3 twice."""


def test_a_conversation_without_a_fault() -> None:
    _, replies = played(TALK, PROFILE, "F3c.", "F0d!.", "K3.", "F7c.")
    assert [TALK.text(r.observation) for r in replies] == ["?0>", "?3>", "?7>", ""]
    assert [r.signals["passed"] for r in replies] == [1, 1, 1, 1]
    assert [r.signals["appeal"] for r in replies] == [0, 1, 0, 0]
    assert [r.signals["success"] for r in replies] == [0, 0, 0, 1]
    assert TALK.text(TALK.gold(task(TALK, PROFILE))) == "F3c.F0d.K3.F7c."
    _, replies = played(TALK, PROFILE, "F3b.", "F0d.", "K3.", "F7c.")
    assert [r.signals["passed"] for r in replies] == [0, 1, 1, 1]
    assert replies[-1].signals["success"] == 0


@pytest.mark.parametrize(
    ("turns", "fault"),
    [
        (["F3b."], "contradicted"),
        (["K3."], "contradicted"),  # it was not told
        (["F3c.", "F0d.", "F3c."], "repeated"),
        (["F3c.", "F3c."], "repeated"),
        (["F3."], "invalid"),
        (["F3c!!"], "invalid"),
        (["."], "invalid"),
    ],
)
def test_detectors(turns: list[str], fault: str) -> None:
    _, replies = played(TALK, PROFILE, *turns)
    found = {name for name in ("contradicted", "repeated", "invalid") if replies[-1].signals[name]}
    assert found == {fault}
    assert replies[-1].signals["passed"] == 0


def test_a_fact_that_was_not_asked_for_does_not_pass() -> None:
    _, (reply,) = played(TALK, PROFILE, "F0d.")
    assert (reply.signals["passed"], reply.signals["contradicted"], reply.signals["repeated"]) == (0, 0, 0)


def test_careless_logs_contradict_and_repeat() -> None:
    rng, hasty = np.random.default_rng(0), Guess(kind="slots", slip=1.0)
    first, _ = played(hasty, PROFILE)
    assert {hasty.text(hasty.careless(first, rng)) for _ in range(50)} == {"F3a.", "F3a!."}  # fact 4's value
    again, _ = played(hasty, PROFILE, "F3c.", "F0d.")
    assert {hasty.text(hasty.careless(again, rng)) for _ in range(50)} == {"F3c.", "F3c!."}


# ------------------------------------------------------------------ all kinds


@pytest.mark.parametrize("kind", ["items", "gatekeeper", "slots"])
def test_self_test_splits_and_forks(kind: str) -> None:
    world = Guess(kind=kind)  # type: ignore[arg-type]
    world.self_test(16)
    train, test = ({world.task(split, i).id for i in range(150)} for split in ("train", "test"))
    assert not train & test
    assert len(world.held_out(120)) == 120
    play = world.play(world.task("train", 0))
    other = play.fork()
    other.act(world.expert(other))
    assert play.said == ()
    assert play.state == world.play(play.task).state != other.state


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(PanoplyError, match="guess.kind"):
        Guess(kind="item")  # type: ignore[arg-type]
