"""The tools world, against episodes worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.text.toolbox import Calculator, Lookup, known
from panoply.worlds.text.tools import Session, Tools
from panoply.worlds.world import Reply, Task

LOOKUP, CALCULATOR = Tools(), Tools(kind="calculator")
BASE = "5"
"""A knowledge base in which u of a is c, v of c is p, w of p is e."""
TASKS = [("iv__F578901190840", 2384845845630198036), ("05+04+08", 6553624858357418488)]


def task(world: Tools, question: str) -> Task:
    prompt = tuple(world.tokens(world.tool.observe(question, [])))
    return Task(7, prompt, world.tool.needed(question), {"question": question})


def played(world: Tools, question: str, *turns: str) -> tuple[Session, list[Reply]]:
    play = world.play(task(world, question))
    return play, [play.act(world.tokens(turn)) for turn in turns]


# ------------------------------------------------------------------ look-ups


def test_a_knowledge_base_is_a_function_of_its_number() -> None:
    assert chain(BASE, "auvw") == ["c", "p", "e"]
    assert known("6", "a", "u") == "d"


def test_a_chain_of_look_ups() -> None:
    first, second, third = chain(BASE, "auvw")
    turns = ("Cau", f"C{first}v", f"C{second}w", f"A{third}")
    play, replies = played(LOOKUP, f"auvw_{BASE}", *turns)
    assert LOOKUP.text(play.prompt) == "auvwF______>"
    seen = [f"auvwF___au{first}>", f"auvwF___{first}v{second}>", f"auvwF___{second}w{third}>"]
    assert [LOOKUP.text(r.observation) for r in replies[:3]] == seen
    assert [r.signals["success"] for r in replies] == [0, 0, 0, 1]
    assert [r.signals["calls"] for r in replies] == [1, 1, 1, 0]
    assert [r.done for r in replies] == [False, False, False, True]
    assert LOOKUP.text(LOOKUP.gold(task(LOOKUP, f"auvw_{BASE}"))) == "".join(turns)
    assert LOOKUP.conclusion(play.task) == (LOOKUP.tokens("A"), LOOKUP.tokens(third))


def test_the_fact_answers_an_easy_question() -> None:
    (found,) = chain(BASE, "au")
    question = f"au__F{BASE}"
    assert LOOKUP.text(task(LOOKUP, question).prompt) == f"au__Fau{found}___>"
    assert LOOKUP.text(LOOKUP.gold(task(LOOKUP, question))) == f"A{found}"
    assert LOOKUP.tool.needed(question) == 0
    assert LOOKUP.tool.needed(f"au___{BASE}") == 1
    assert LOOKUP.text(task(LOOKUP, f"au___{BASE}").prompt) == "au__F______>"


@pytest.mark.parametrize(
    ("turn", "calls", "invalid", "done"),
    [
        ("Cau", 1, 0, False),
        ("Cpz", 1, 0, False),  # beside the point, but a call
        ("Cua", 1, 1, False),  # the wrong way round: a failed call is a call
        ("C__", 1, 1, False),
        ("Au", 0, 1, False),  # a relation is no answer
        ("A>", 0, 1, False),
        ("a", 0, 1, False),
        (">", 0, 1, False),
        ("Ab", 0, 0, True),
    ],
)
def test_turns_and_their_signals(turn: str, calls: int, invalid: int, done: bool) -> None:
    tokens = LOOKUP.tokens(turn)
    assert LOOKUP.complete(tokens)
    assert not any(LOOKUP.complete(tokens[:n]) for n in range(1, len(tokens)))
    play, (reply,) = played(LOOKUP, f"auvw_{BASE}", turn)
    assert (reply.signals["calls"], reply.signals["invalid"], reply.done) == (calls, invalid, done)
    assert not reply.truncated
    fresh = played(LOOKUP, f"auvw_{BASE}")[0]
    assert (play.state == fresh.state) == bool(invalid or done)


def test_cap_and_budget_truncate() -> None:
    _, replies = played(LOOKUP, f"auvw_{BASE}", *["Cau"] * 6)
    assert [r.done for r in replies] == [False] * 5 + [True]
    assert replies[-1].truncated
    scarce = Tools(budget=7)
    _, replies = played(scarce, f"auvw_{BASE}", "Cau", "Cau", "Cau")
    assert [r.done for r in replies] == [False, False, True]
    (found,) = chain(BASE, "au")
    _, replies = played(scarce, f"au___{BASE}", "Cau", "Cau", f"A{found}")
    assert (replies[-1].signals["success"], replies[-1].truncated) == (1, False)


def test_states_recur() -> None:
    once, twice = (played(LOOKUP, f"auvw_{BASE}", *turns)[0].state for turns in (["Cau"], ["Cpz", "Cau"]))
    assert once == twice
    assert once != played(LOOKUP, f"auvw_{BASE}", "Cpz")[0].state


def test_the_expert_begins_again_after_a_call_beside_the_point() -> None:
    play, _ = played(LOOKUP, f"auvw_{BASE}", "Cpz")
    assert LOOKUP.text(LOOKUP.expert(play)) == "Cau"


# ------------------------------------------------------------------ the calculator


def test_a_calculation() -> None:
    turns = ("C22-89", "C33*91", "A03")  # 22−89 = −67 = 33, 33·91 = 3003, modulo 100
    play, replies = played(CALCULATOR, "22-89*91", *turns)
    assert CALCULATOR.text(play.prompt) == "22-89*91__0>"
    assert [CALCULATOR.text(r.observation) for r in replies[:2]] == ["22-89*91331>", "22-89*91032>"]
    assert [r.signals["success"] for r in replies] == [0, 0, 1]
    assert CALCULATOR.text(CALCULATOR.gold(task(CALCULATOR, "22-89*91"))) == "".join(turns)
    assert CALCULATOR.conclusion(play.task) == (CALCULATOR.tokens("A"), CALCULATOR.tokens("03"))


def test_sums_of_single_digits_need_no_call() -> None:
    assert CALCULATOR.text(CALCULATOR.gold(task(CALCULATOR, "07+09+06"))) == "A22"
    assert [Calculator().needed(q) for q in ("07+09+06", "07+09-06", "17+09+06")] == [0, 2, 2]


@pytest.mark.parametrize(
    ("turn", "invalid"), [("C12*3_", 1), ("C12312", 1), ("A1_", 1), ("+", 1), ("C00+00", 0)]
)
def test_calculator_grammar(turn: str, invalid: int) -> None:
    _, (reply,) = played(CALCULATOR, "22-89*91", turn)
    assert CALCULATOR.complete(CALCULATOR.tokens(turn))
    assert reply.signals["invalid"] == invalid


# ------------------------------------------------------------------ the teacher


def test_the_hasty_teacher_answers_with_the_entity_in_hand() -> None:
    first, second, third = chain(BASE, "auvw")
    hasty, rng = Tools(slip=1.0), np.random.default_rng(0)
    lessons = hasty.lessons(task(hasty, f"auvw_{BASE}"), rng)
    assert [hasty.text(said) for _, said in lessons] == ["Aa", f"A{first}", f"A{second}", f"A{third}"]
    assert [hasty.text(prompt)[8:11] for prompt, _ in lessons] == [
        "___", f"au{first}", f"{first}v{second}", f"{second}w{third}",
    ]  # fmt: skip
    assert hasty.text(hasty.demonstrate(task(hasty, f"auvw_{BASE}"), rng)) == "Aa"


def test_the_needless_call() -> None:
    eager, rng = Tools(slip=0.0, needless=1.0), np.random.default_rng(0)
    (found,) = chain(BASE, "au")
    assert eager.text(eager.demonstrate(task(eager, f"au__F{BASE}"), rng)) == f"CauA{found}"
    assert eager.text(eager.demonstrate(task(eager, f"au___{BASE}"), rng)) == f"CauA{found}"


def test_the_hasty_calculator_answers_at_random_before_the_second_call() -> None:
    hasty, rng = Tools(kind="calculator", slip=1.0), np.random.default_rng(0)
    said = [[hasty.text(s) for _, s in hasty.lessons(task(hasty, "22-89*91"), rng)] for _ in range(40)]
    assert all(a[0] == b[0] == "A" and c == "A03" for a, b, c in said)
    assert len({a for a, _, _ in said}) > 20


@pytest.mark.parametrize(("world", "expected"), [(LOOKUP, 0.32), (CALCULATOR, 0.23)])
def test_the_teacher_is_right_as_often_as_the_world_was_sized_for(world: Tools, expected: float) -> None:
    rng = np.random.default_rng(0)
    tasks = [world.task("train", index) for index in range(1000)]
    found = np.mean([world.grade(t, world.demonstrate(t, rng))["success"] for t in tasks])
    assert found == pytest.approx(expected, abs=0.05)


# ------------------------------------------------------------------ tasks and options


@pytest.mark.parametrize("world", [LOOKUP, CALCULATOR])
def test_the_world_tests_itself(world: Tools) -> None:
    world.self_test(32)


def test_the_self_test_finds_a_tool_that_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lookup, "call", lambda self, question, asked: "a")
    with pytest.raises(PanoplyError, match="grades the reference answer"):
        LOOKUP.self_test(16)


def test_the_self_test_finds_a_verifier_that_takes_any_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    act = Session.act

    def lenient(self: Session, answer: Any) -> Reply:
        reply = act(self, answer)
        return Reply({**reply.signals, "success": float(reply.done)}, reply.observation, reply.done)

    monkeypatch.setattr(Session, "act", lenient)
    with pytest.raises(PanoplyError, match="grades the wrong answer"):
        LOOKUP.self_test(16)


@pytest.mark.parametrize(("world", "share"), [(LOOKUP, 0.5), (CALCULATOR, 0.2), (Tools(easy=0.0), 0.0)])
def test_shares_of_easy_questions(world: Tools, share: float) -> None:
    tasks = [world.task("train", index) for index in range(2000)]
    assert np.mean([t.level == 0 for t in tasks]) == pytest.approx(share, abs=0.04)


def test_one_relation_does_not_mean_easy() -> None:
    tasks = [LOOKUP.task("train", index) for index in range(500)]
    single = [t.level for t in tasks if t.data["question"][2] == "_"]
    assert {0, 1} == set(single)


@pytest.mark.parametrize("world", [LOOKUP, CALCULATOR])
def test_train_and_test_never_meet(world: Tools) -> None:
    train, test = (
        {world.task(split, i).data["question"] for i in range(1500)} for split in ("train", "test")
    )
    assert not train & test
    assert len(world.held_out(512)) == 512


def test_tasks_are_the_same_in_every_process() -> None:
    found = [(t.data["question"], t.id) for t in (LOOKUP.task("train", 0), CALCULATOR.task("test", 12345))]
    assert found == TASKS


def test_each_kind_starts_from_a_model_of_its_own() -> None:
    assert (LOOKUP.start, CALCULATOR.start) == ("tools-start", "tools-calculator-start")
    assert LOOKUP.tokenizer.vocab_size != CALCULATOR.tokenizer.vocab_size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cap": 3}, "cap is more than 3"),
        ({"budget": 0}, "tools.budget must be from 1"),
        ({"slip": 2.0}, "tools.slip must be from 0 to 1"),
        ({"kind": "oven"}, "lookup or calculator"),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PanoplyError, match=message):
        Tools(**options)


def chain(base: str, path: str) -> list[str]:
    """The entities found on a path `a u v w`."""
    found, entity = [], path[0]
    for relation in path[1:]:
        entity = known(base, entity, relation)
        found.append(entity)
    return found
