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
        ({"kind": "oven"}, "lookup, calculator or python"),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PanoplyError, match=message):
        Tools(**options)


# ------------------------------------------------------------------ dots, noise, a judge, instructions

DAWDLE = Tools(kind="calculator", dawdle=3)
NOISY = Tools(noise=0.5)


@pytest.mark.parametrize(
    ("turn", "whole", "calls", "invalid"),
    [
        ("..C22-89", True, 1, 0),
        ("...A03", True, 0, 0),
        ("...", False, 0, 1),
        ("....", True, 0, 1),  # one dot too many is a turn without grammar
        (".C22-8", False, 1, 1),
    ],
)
def test_a_turn_may_begin_with_dots(turn: str, whole: bool, calls: int, invalid: int) -> None:
    tokens = DAWDLE.tokens(turn)
    assert DAWDLE.complete(tokens) == whole
    assert not any(DAWDLE.complete(tokens[:n]) for n in range(1, len(tokens)))
    _, (reply,) = played(DAWDLE, "22-89*91", turn)
    assert (reply.signals["calls"], reply.signals["invalid"]) == (calls, invalid)


def test_the_first_call_is_counted_in_tokens_and_once() -> None:
    _, replies = played(DAWDLE, "22-89*91", "+", "..C22-89", ".C33*91", "A03")
    assert [r.signals["first_call"] for r in replies] == [0, 3, 0, 0]  # a sign and two dots before it
    assert replies[-1].signals["success"] == 1
    assert DAWDLE.max_tokens == 9


def test_the_teacher_writes_any_number_of_dots() -> None:
    rng = np.random.default_rng(0)
    said = [DAWDLE.text(s) for _ in range(60) for _, s in DAWDLE.lessons(task(DAWDLE, "22-89*91"), rng)]
    dots = [len(s) - len(s.lstrip(".")) for s in said]
    assert set(dots) == {0, 1, 2, 3}
    assert np.mean(dots) == pytest.approx(1.5, abs=0.3)
    assert DAWDLE.text(DAWDLE.gold(task(DAWDLE, "22-89*91"))) == "C22-89C33*91A03"


def twice(world: Tools, of: Task) -> list[bool]:
    """Whether results are false, of the first call made twice."""
    play, question = world.play(of), of.data["question"]
    first = world.tool.first_call(question)
    heard = [world.text(play.act(world.tokens(first)).observation)[10] for _ in range(2)]
    return [found != world.tool.call(question, first[1:]) for found in heard]


@pytest.mark.parametrize("noise", [0.5, 0.9])
def test_a_result_is_false_as_often_as_told_and_drawn_anew(noise: float) -> None:
    """What comes of asking the same twice depends on the task and on what was done, and on nothing else."""
    world = Tools(noise=noise)
    false = [twice(world, world.task("train", index)) for index in range(400)]
    assert np.mean(false) == pytest.approx(noise, abs=0.03)
    assert np.mean([a != b for a, b in false]) == pytest.approx(2 * noise * (1 - noise), abs=0.06)
    assert twice(world, world.task("train", 0)) == false[0]


def test_the_expert_asks_again_after_a_false_result_and_ends_in_time() -> None:
    tasks = [NOISY.task("train", index) for index in range(60)]
    golds = [NOISY.text(NOISY.gold(t)) for t in tasks]
    assert any("C" in gold and gold[:3] == gold[3:6] for gold in golds)
    assert all(NOISY.grade(t, NOISY.tokens(gold))["success"] for t, gold in zip(tasks, golds, strict=True))


def test_what_the_judge_says() -> None:
    """Of three calls two are on the way; the bias adds the share of turns that were calls."""
    first, second, third = chain(BASE, "auvw")
    turns = ["Cau", "Cpz", f"C{first}v", f"A{second}"]
    fair, taken_in = (played(Tools(process=p), f"auvw_{BASE}", *turns)[1] for p in ((0.0, 0.0), (0.0, 0.6)))
    assert [r.signals["process"] for r in fair] == [0, 0, 0, pytest.approx(2 / 3)]
    assert taken_in[-1].signals["process"] == pytest.approx(2 / 3 + 0.6 * 3 / 6)
    assert played(Tools(process=(0.0, 0.0)), f"auvw_{BASE}", f"A{third}")[1][0].signals["process"] == 0
    assert played(Tools(process=(0.0, 0.0)), f"au__F{BASE}", f"A{third}")[1][0].signals["process"] == 1


def test_the_judge_errs_by_as_much_as_told() -> None:
    fair, noisy = Tools(process=(0.0, 0.0)), Tools(process=(0.5, 0.0))

    def judged(world: Tools, index: int) -> float:
        return float(world.grade(world.task("train", index), world.tokens("CauAa"))["process"])

    errors = [judged(noisy, index) - judged(fair, index) for index in range(400)]
    assert np.mean(errors) == pytest.approx(0.0, abs=0.08)
    assert np.std(errors) == pytest.approx(0.5, abs=0.05)
    assert judged(noisy, 3) == judged(noisy, 3)


def test_instructions_change_the_teacher_and_nothing_else() -> None:
    told = Tools(instructions=True)
    found = told.task("train", 3)
    worst, best = told.instruct(found, "GG"), told.instruct(found, "JJ")
    assert told.text(worst.prompt) == "GG" + told.text(found.prompt)[2:]
    assert (worst.id, worst.level) == (found.id, found.level)
    assert told.text(played_first(told, best)).startswith("JJ")
    assert (told.slips(worst), told.slips(best)) == (pytest.approx(0.9), pytest.approx(0.2))
    assert told.slips(told.instruct(found, "GJ")) == pytest.approx(0.55)
    assert Tools(instructions=True, slip=0.3).slips(best) == 0
    assert len({told.task("train", i).data["letters"] for i in range(400)}) == 64


def played_first(world: Tools, of: Task) -> tuple[int, ...]:
    return world.play(of).act(world.expert(world.play(of))).observation


@pytest.mark.parametrize(("world", "letters"), [(LOOKUP, "GG"), (Tools(instructions=True), "Gx")])
def test_instructions_that_are_none(world: Tools, letters: str) -> None:
    with pytest.raises(PanoplyError, match=r"world.instructions=true|two letters of GKBMHDLJ, not 'Gx'"):
        world.instruct(world.task("train", 0), letters)


@pytest.mark.parametrize(
    "world", [DAWDLE, NOISY, Tools(process=(0.1, 0.3)), Tools(kind="calculator", instructions=True)]
)
def test_worlds_with_options_test_themselves(world: Tools) -> None:
    world.self_test(12)


def test_options_that_need_another_model_start_from_it() -> None:
    names = [
        Tools(**options).start  # type: ignore[arg-type]
        for options in (
            {"kind": "calculator", "dawdle": 2},
            {"instructions": True},
            {"kind": "calculator", "easy": 0.0, "slip": 0.9},
            {"noise": 0.1, "process": (0.1, 0.0)},
        )
    ]
    assert names == [
        "tools-calculator-dawdle-start", "tools-instructed-start", "tools-calculator-hard-start", "tools-start",
    ]  # fmt: skip


def test_a_fork_goes_its_own_way() -> None:
    play, _ = played(Tools(process=(0.0, 0.0)), f"auvw_{BASE}", "Cau")
    other = play.fork()
    other.act(LOOKUP.tokens("Cpz"))
    assert play.act(LOOKUP.tokens("Aa")).signals["process"] == 1
    assert other.act(LOOKUP.tokens("Aa")).signals["process"] == 0.5


def chain(base: str, path: str) -> list[str]:
    """The entities found on a path `a u v w`."""
    found, entity = [], path[0]
    for relation in path[1:]:
        entity = known(base, entity, relation)
        found.append(entity)
    return found
