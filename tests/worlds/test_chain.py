"""The chain world, against examples worked out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.policies.decoder_config import DecoderConfig
from panoply.worlds.text.chain import Chain
from panoply.worlds.world import Task

SHORT, LONG = "3+4*2=", "3*4+5*2*9*1+8="


def task_of(world: Chain, problem: str) -> Task:
    return Task(1, tuple(world.tokenizer.encode(problem)), problem.count("*"), {"problem": problem})


def tokens(world: Chain, text: str) -> list[int]:
    return world.tokenizer.encode(text)


# ------------------------------------------------------------------ problems and answers


@pytest.mark.parametrize(
    ("modulus", "problem", "trace"),
    [
        (10, SHORT, "+47*24$"),  # 3+4 = 7, 7·2 = 14
        (10, LONG, "*42+57*24*96*16+84$"),  # 12, 7, 14, 36, 6, 14
        (7, "6+5*4=", "+54*42$"),  # 11 = 4, 16 = 2
    ],
)
def test_the_reference_restates_each_operation_and_gives_the_running_result(
    modulus: int, problem: str, trace: str
) -> None:
    world = Chain(operations=len(trace) // 3, modulus=modulus)
    assert world.gold(task_of(world, problem)) == tokens(world, trace)
    assert len(tokens(world, trace)) == world.max_tokens


def test_the_careless_teacher_adds_where_it_slips_and_goes_on_from_there() -> None:
    # default_rng(0) draws .64 .27 .04 .02 .81 .91: at 0.7 the first four steps slip, if they are products.
    world = Chain()
    trace = world.demonstrate(task_of(world, LONG), np.random.default_rng(0))
    assert trace == tokens(world, "*47+52*24*93*13+81$")


@pytest.mark.parametrize("slip", [0.0, 1.0])
def test_the_teacher_at_the_ends_of_slip(slip: float) -> None:
    world = Chain(operations=2, slip=slip)
    trace = world.demonstrate(task_of(world, SHORT), np.random.default_rng(3))
    assert trace == tokens(world, "+47*29$" if slip else "+47*24$")


def test_the_teacher_is_right_as_often_as_the_docstring_says() -> None:
    rng = np.random.default_rng(0)
    for slip, strict, final in [(0.7, 0.29, 0.37), (1.0, 0.20, 0.26)]:
        world = Chain(slip=slip)
        tasks = [world.task("train", index) for index in range(4000)]
        grades = [world.grade(task, world.demonstrate(task, rng)) for task in tasks]
        assert np.mean([g["success"] for g in grades]) == pytest.approx(strict, abs=0.025)
        assert np.mean([g["final"] for g in grades]) == pytest.approx(final, abs=0.025)


# ------------------------------------------------------------------ the verifier


@pytest.mark.parametrize(
    ("answer", "success", "final", "steps", "ended"),
    [
        ("+47*24$", 1, 1, 1.0, 1),
        ("+47*24", 0, 0, 1.0, 0),  # no end
        ("+47*24$+", 0, 0, 1.0, 0),  # something after the end
        ("+47*24$$", 0, 0, 1.0, 0),
        ("+47*29$", 0, 0, 0.5, 1),  # the slip
        ("+42*24$", 0, 1, 0.5, 1),  # 3+4 is not 2, but 2·2 is 4
        ("+46*24$", 0, 1, 0.0, 1),  # 3+4 is not 6, and 6·2 is not 4
        ("*47*24$", 0, 1, 0.5, 1),  # the right numbers, another operation
        ("4$", 0, 1, 0.0, 1),  # the answer without the work
        ("+47=*24$", 0, 1, 0.5, 1),
        ("$", 0, 0, 0.0, 1),
        ("", 0, 0, 0.0, 0),
    ],
)
def test_grades(answer: str, success: float, final: float, steps: float, ended: float) -> None:
    world, lenient = Chain(operations=2), Chain(operations=2, strict=False)
    signals = {"success": success, "final": final, "steps": steps, "ended": ended}
    assert world.grade(task_of(world, SHORT), tokens(world, answer)) == signals
    assert lenient.grade(task_of(lenient, SHORT), tokens(world, answer)) == {**signals, "success": final}


def test_a_token_outside_the_alphabet_is_not_skipped() -> None:
    world = Chain(operations=2)
    answer = tokens(world, "+47*24$")
    foreign = [*answer[:3], world.tokenizer.vocab_size, *answer[3:]]
    assert world.grade(task_of(world, SHORT), foreign)["success"] == 0


# ------------------------------------------------------------------ tasks


def test_tasks_are_the_same_in_every_process() -> None:
    train, test = Chain().task("train", 0), Chain().task("test", 12345)
    assert (train.data["problem"], train.id, train.level) == ("9+0+7+9+3+0+7=", 113269405118429194, 0)
    assert (test.data["problem"], test.id, test.level) == ("5+5+9+1+5*7+8=", 6653126903152420784, 1)
    assert train.prompt == tuple(Chain().tokenizer.encode(train.data["problem"]))


def test_train_and_test_never_meet() -> None:
    world = Chain(operations=3)
    train = {world.task("train", index).data["problem"] for index in range(20_000)}
    test = {world.task("test", index).data["problem"] for index in range(20_000)}
    assert not train & test
    assert len(test) > 4_000


def test_problems_are_spread_evenly() -> None:
    world = Chain(levels=(0, 6))
    problems = [world.task("train", index).data["problem"] for index in range(7_000)]
    levels = np.bincount([p.count("*") for p in problems], minlength=7)
    assert levels.tolist() == pytest.approx([1000] * 7, rel=0.15)
    for place in range(0, 13, 2):
        digits = np.bincount([int(p[place]) for p in problems], minlength=10)
        assert digits.tolist() == pytest.approx([700] * 10, rel=0.2)
    for place in range(1, 13, 2):
        assert np.mean([p[place] == "*" for p in problems]) == pytest.approx(0.5, abs=0.03)


def test_levels_bound_the_number_of_products() -> None:
    world = Chain(operations=8, levels=(4, 6))
    assert {world.task("train", index).level for index in range(200)} == {4, 5, 6}


def test_an_identity_belongs_to_the_problem() -> None:
    easy, any_level = Chain(operations=1, levels=(0, 0)), Chain(operations=1)
    ids = {task.data["problem"]: task.id for task in (easy.task("train", i) for i in range(2_000))}
    others = {task.data["problem"]: task.id for task in (any_level.task("train", i) for i in range(2_000))}
    assert ids == {problem: others[problem] for problem in ids}
    assert all(0 <= id < 2**63 for id in ids.values())
    assert {task.id for task in Chain(modulus=9).held_out(50)}.isdisjoint(t.id for t in Chain().held_out(50))


def test_the_held_out_list_is_fixed_and_without_repeats() -> None:
    world = Chain(operations=2)
    held = world.held_out(300)
    assert len({task.id for task in held}) == 300
    assert held[:50] == world.held_out(50)
    with pytest.raises(PanoplyError, match="too few problems to hold out 300"):
        Chain(operations=1).held_out(300)


# ------------------------------------------------------------------ hints


@pytest.mark.parametrize(("fraction", "steps"), [(0, 0), (0.25, 2), (0.5, 3), (0.75, 4), (1, 6)])
def test_a_hint_puts_whole_steps_of_the_reference_into_the_prompt(fraction: float, steps: int) -> None:
    world, trace = Chain(), "*42+57*24*96*16+84$"
    task = task_of(world, LONG)
    hinted = world.hint(task, fraction)
    assert hinted.prompt == tuple(tokens(world, LONG + trace[: 3 * steps]))
    assert (hinted.id, hinted.level) == (task.id, task.level)
    assert world.gold(hinted) == tokens(world, trace[3 * steps :])
    assert world.grade(hinted, world.gold(hinted))["success"] == 1
    assert world.grade(hinted, world.gold(task))["success"] == (steps == 0)
    assert world.hint(hinted, 0.5) == world.hint(task, 0.5)


def test_the_teacher_goes_on_from_a_hint() -> None:
    world = Chain(slip=1.0)
    hinted = world.hint(task_of(world, LONG), 0.5)  # …*24, and then 4+9 = 3, 3+1 = 4, 4+8 = 2
    assert world.demonstrate(hinted, np.random.default_rng(0)) == tokens(world, "*93*14+82$")


def test_a_hint_is_a_fraction() -> None:
    with pytest.raises(PanoplyError, match="between 0 and 1"):
        Chain().hint(Chain().task("train", 0), 1.5)


# ------------------------------------------------------------------ the world checks itself


@pytest.mark.parametrize("strict", [True, False])
def test_self_test_passes(strict: bool) -> None:
    Chain(strict=strict).self_test(50)
    Chain(operations=2, modulus=2, strict=strict).self_test(5)


@dataclasses.dataclass(frozen=True)
class Generous(Chain):
    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        return {**super().grade(task, answer), "success": 1.0}


@dataclasses.dataclass(frozen=True)
class LastDigitOnly(Chain):
    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        signals = super().grade(task, answer)
        return {**signals, "success": signals["final"]}


@dataclasses.dataclass(frozen=True)
class Unfair(Chain):
    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        return {**super().grade(task, answer), "success": 0.0}


@dataclasses.dataclass(frozen=True)
class Silent(Chain):
    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        return {}


@pytest.mark.parametrize(
    ("sabotaged", "complaint"),
    [
        (Generous, "generous grades the wrong answer .* with success 1.0, not 0"),
        (LastDigitOnly, "grades the wrong answer"),
        (Unfair, "grades the reference answer .* with success 0.0, not 1"),
        (Silent, "with success None, not 1"),
    ],
)
def test_self_test_catches_a_broken_verifier(sabotaged: type[Chain], complaint: str) -> None:
    with pytest.raises(PanoplyError, match=complaint):
        sabotaged().self_test(3)


@pytest.mark.parametrize(
    ("problem", "knowledge", "plan"),
    [
        (SHORT, ["7*2=4"], ["+4", "*2"]),
        (LONG, ["3*4=2", "4*9=6", "6*1=6", "7*2=4"], ["*4", "+5", "*2", "*9", "*1", "+8"]),
        ("9*9*9=", ["1*9=9", "9*9=1"], ["*9", "*9"]),
        ("1+2+3=", [], ["+2", "+3"]),
    ],
)
def test_knowledge_is_facts_in_no_order_and_a_plan_has_no_results(
    problem: str, knowledge: list[str], plan: list[str]
) -> None:
    """They stand before the problem, whose answer and hints stay what they are."""
    world = Chain(operations=problem.count("+") + problem.count("*"))
    task = task_of(world, problem)
    for kind, pieces in (("knowledge", knowledge), ("plan", plan)):
        assert world.aid(task, kind) == [tokens(world, piece) for piece in pieces]
        half = world.aided(task, kind, 0.5)
        assert half.prompt == (*tokens(world, "".join(pieces[: round(len(pieces) / 2)])), *task.prompt)
        aided = world.hint(world.aided(task, kind), 0.5)
        assert world.grade(aided, world.gold(aided))["success"] == 1
        assert aided.given == world.hint(task, 0.5).given
    with pytest.raises(PanoplyError, match="no proverbs"):
        world.aid(task, "proverbs")


def test_annotators_prefer_what_is_right_and_else_what_is_less_wrong() -> None:
    world = Chain(operations=2, sharpness=4.0)
    task = task_of(world, SHORT)
    right, half, wrong = (tokens(world, text) for text in ("+47*24$", "+47*25$", "+46*25$"))
    assert [world.worth(task, answer) for answer in (right, half, wrong)] == [1.0, 0.25, 0.0]
    assert world.preference(task, right, half) == pytest.approx(1 / (1 + np.exp(-3)))  # 4 · (1 − 1/4)
    assert world.preference(task, wrong, half) == pytest.approx(1 / (1 + np.exp(1)))
    assert world.preference(task, half, half) == 0.5
    noisy = Chain(operations=2, sharpness=1e6, noise=0.2)
    assert noisy.preference(task, right, half) == pytest.approx(0.8)
    rng = np.random.default_rng(0)
    assert np.mean([noisy.prefer(task, right, half, rng) for _ in range(2000)]) == pytest.approx(
        0.8, abs=0.03
    )


# ------------------------------------------------------------------ facts and options


def test_facts() -> None:
    world = Chain()
    assert world.access == {
        "verify",
        "reference",
        "teacher",
        "pairs",
        "hint",
        "judge",
        "knowledge",
        "plan",
    } | {
        "prefer",
        "preference",
    }
    assert (world.preset, world.max_tokens, world.stop_tokens) == ("tiny", 19, (world.tokenizer.eos_id,))
    model = DecoderConfig(**world.default_model())
    assert (model.vocab_size, model.width, model.inner, model.tied) == (14, 64, 192, True)
    task = world.task("train", 0)
    reply = world.play(task).act(world.gold(task))
    assert reply.done
    assert reply.signals["success"] == 1
    assert world.render(task_of(world, SHORT), tokens(world, "+47*24$")) == "3+4*2= → +47*24$"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"operations": 0}, "chain.operations must be from 1 to 1000, not 0."),
        ({"operations": "six"}, "chain.operations takes a whole number, not 'six'."),
        ({"modulus": 11}, "chain.modulus must be from 2 to 10, not 11."),
        ({"slip": 1.2}, "chain.slip must be from 0 to 1, not 1.2."),
        ({"slip": -0.1}, "chain.slip must be from 0 to 1, not -0.1."),
        ({"levels": (2, 7)}, "chain.levels is a range within 0 to 6, the operations, not 2 to 7."),
        ({"levels": (3, 2)}, "chain.levels is a range within 0 to 6, the operations, not 3 to 2."),
        ({"levels": (-1, 2)}, "chain.levels must be from 0 to 1000, not -1."),
    ],
)
def test_bad_options_are_refused_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PanoplyError) as refusal:
        Chain(**options)
    assert str(refusal.value) == sentence


def test_options_survive_json() -> None:
    assert Chain(levels=[2, 4], slip=1) == Chain(levels=(2, 4), slip=1.0)  # type: ignore[arg-type]
    assert hash(Chain(levels=(2, 4))) == hash(Chain(levels=(2, 4)))


def test_a_split_that_is_empty_or_unknown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PanoplyError, match=r"Unknown split 'trian'\. Did you mean 'train'\?"):
        Chain().task("trian", 0)
    monkeypatch.setattr("panoply.worlds.text.chain.HELD_OUT", 2**62)
    with pytest.raises(PanoplyError, match="too few problems for a test split"):
        Chain(operations=1).task("test", 0)


def test_a_judge_of_single_steps() -> None:
    """`3+4*2=`: the first step is wrong, the second follows from it; a third there is not."""
    world = Chain(operations=2, levels=(1, 1))
    task = Task(0, tuple(world.tokenizer.encode("3+4*2=")), 1, {"problem": "3+4*2="})
    rng = np.random.default_rng(0)
    said = world.tokenizer.encode("+48*26+11$")
    assert world.spans(task, said) == [(0, 3), (3, 6), (6, 9)]
    assert world.judge(task, said, rng) == [False, True, False]
    assert world.spans(task, said[:4]) == [(0, 3), (3, 4)], "an answer that was cut"
    hinted = world.hint(task, 0.5)
    assert world.judge(hinted, world.gold(hinted), rng) == [True]
    noisy = Chain(operations=2, levels=(1, 1), judge_noise=0.25)
    flips = [v for _ in range(400) for v in noisy.judge(task, world.gold(task), rng)]
    assert 0.2 < flips.count(False) / len(flips) < 0.3
