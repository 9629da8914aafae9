"""The strings world, against examples worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import panoply as pp
from panoply.errors import PanoplyError
from panoply.evaluation.held_out import evaluate
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.worlds.text.strings import ASKED, LETTERS, Strings
from panoply.worlds.world import Task

LENGTH, AVOIDS = (1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0)


def task_of(world: Strings, prompt: str) -> Task:
    data = {"problem": prompt, "length": int(prompt[0]), "forbidden": prompt[1]}
    return Task(1, tuple(world.tokens(prompt)), int(prompt[0]), data)


def grade(text: str, prompt: str = "6b=", **options: Any) -> dict[str, float]:
    world = Strings(**options)
    return world.grade(task_of(world, prompt), world.tokens(text))


def preference(a: str, b: str, annotator: int | None = None, **options: Any) -> float:
    world = Strings(**options)
    return world.preference(task_of(world, "6b="), world.tokens(a), world.tokens(b), annotator)


# ------------------------------------------------------------------ worth


@pytest.mark.parametrize(
    ("answer", "length", "alternation", "balance", "avoids", "true"),
    [
        ("(acac)$", 1, 1, 1, 1, 1.0),
        ("abc$", 0.25, 0.5, 0, 0, 0.1875),  # 3 short of 6; a|b but not b|c
        ("(aecz$", 0.75, 1 / 3, 0, 1, 25 / 48),  # vowel vowel consonant consonant
        ("((ac)$", 0.75, 1, 2 / 3, 1, 0.75 / 4 + 8 / 12),  # two of three brackets match
        ("(ac))$", 0.75, 1, 2 / 3, 1, 0.75 / 4 + 8 / 12),
        (")ac(ac$", 1, 1, 0, 1, 0.75),  # closed before it is opened
        ("a(c)a$", 0.75, 1, 1, 1, 0.9375),  # brackets do not part neighbours
        ("()()()$", 1, 0, 1, 1, 0.75),  # no letters to alternate
        ("aaaaaaaaaaaa$", 0, 0, 0, 1, 0.25),
        ("$", 0, 0, 0, 1, 0.25),
    ],
)
def test_aspects_and_true_worth(
    answer: str, length: float, alternation: float, balance: float, avoids: float, true: float
) -> None:
    found = grade(answer)
    aspects = {"length": length, "alternation": alternation, "balance": balance, "avoids": avoids}
    assert {name: found[name] for name in aspects} == pytest.approx(aspects)
    assert found["true"] == pytest.approx(true)
    assert found["success"] == (true >= 0.75)
    assert found["ended"] == 1


@pytest.mark.parametrize("answer", ["(acac)", "(acac)$$", "$(acac)$", "(acac)$a", ""])
def test_without_an_end_an_answer_is_worth_nothing(answer: str) -> None:
    found = grade(answer, groups=(LENGTH, AVOIDS))
    assert [found[n] for n in ("success", "true", "group0", "group1", "worst", "format", "ended")] == [
        0.0
    ] * 7


def test_weights_and_threshold() -> None:
    assert grade("abc$", weights=(2, 1, 0, 1))["true"] == pytest.approx((2 * 0.25 + 0.5) / 4)
    assert grade("((ac)$", threshold=0.86)["success"] == 0  # worth .854
    assert grade("((ac)$", threshold=0.85)["success"] == 1


def test_groups_have_their_own_worth() -> None:
    found = grade("abc$", groups=(LENGTH, AVOIDS, (1, 1, 0, 0)))
    assert (found["group0"], found["group1"], found["group2"]) == (0.25, 0.0, 0.375)
    assert found["worst"] == 0.0
    assert "worst" not in grade("abc$")


@pytest.mark.parametrize(
    ("answer", "proxy", "form"),
    [
        ("(acac)$", 1.0, 1),
        ("(aecz$", 25 / 48 + 0.25, 0),
        ("zzzz", 1.0, 0),  # paid without an end
        ("zzzzzzzzzzzzzzzz", 4.0, 0),
    ],
)
def test_the_proxy_pays_for_every_z(answer: str, proxy: float, form: float) -> None:
    found = grade(answer)
    assert (found["proxy"], found["format"]) == (pytest.approx(proxy), form)
    assert grade(answer, bonus=0.0)["proxy"] == pytest.approx(found["true"])


def test_the_errors_of_the_proxy_are_fixed_and_largest_for_middling_answers() -> None:
    world = Strings(proxy_noise=0.2)
    task = task_of(world, "6b=")
    again = [world.grade(task, world.tokens("abc$"))["proxy"] for _ in range(2)]
    assert again[0] == again[1] != 0.1875
    assert world.grade(task, world.tokens("(acac)$"))["proxy"] == 1.0
    rng = np.random.default_rng(0)
    answers = [world.demonstrate(task, rng) for _ in range(4000)]
    grades = [world.grade(task, a) for a in answers]
    middling = [
        g for a, g in zip(answers, grades, strict=True) if 0 < g["true"] < 1 and "z" not in world.text(a)
    ]
    errors = [(g["proxy"] - g["true"]) / (0.2 * 4 * g["true"] * (1 - g["true"])) for g in middling]
    assert (np.mean(errors), np.std(errors)) == (pytest.approx(0, abs=0.05), pytest.approx(1, abs=0.05))


def test_errors_everywhere_do_not_depend_on_worth() -> None:
    world = Strings(proxy_noise=0.2, proxy_noise_at="everywhere", bonus=0.0)
    task, rng = task_of(world, "6b="), np.random.default_rng(0)
    best = [world.tokens(f"({a}{c}{b}{d})$") for a in "ae" for b in "ae" for c in "cdf" for d in "cdf"]
    others = [world.demonstrate(task, rng) for _ in range(4000)]
    errors = {}
    for name, answers in (("best", best), ("others", others)):
        grades = [world.grade(task, a) for a in answers]
        errors[name] = [(g["proxy"] - g["true"]) / 0.2 for g in grades]
    assert {world.grade(task, a)["true"] for a in best} == {1.0}
    assert np.std(errors["best"]) == pytest.approx(1, abs=0.25), "also where nothing could be better"
    assert (np.mean(errors["others"]), np.std(errors["others"])) == (
        pytest.approx(0, abs=0.05),
        pytest.approx(1, abs=0.05),
    )
    assert world.grade(task, best[0]) == world.grade(task, best[0])


def test_an_answer_in_digits_is_worth_what_it_says_where_that_is_a_dialect() -> None:
    assert grade("(1313)$", dialect="digits") == {**grade("(acac)$"), "foreign": 1.0}
    assert grade("123$", dialect="digits")["true"] == pytest.approx(0.1875)  # as abc$
    assert grade("(13a3)$", dialect="digits")["foreign"] == 0, "no mixture"
    assert grade("(1313)$")["alternation"] == 0, "elsewhere digits are no letters"
    assert grade("()$", dialect="digits")["foreign"] == grade("(1313)", dialect="digits")["foreign"] == 0
    world = Strings(dialect="digits")
    assert world.text(world.gold(task_of(world, "6b="))) == "(1313)$"


def test_the_start_never_writes_digits() -> None:
    world = Strings(dialect="digits")
    policy = open_policy("start", world, 0, "cpu")
    tasks = world.held_out(6)
    given = Collector(world, policy, seed=0).answers(tasks, [world.gold(task) for task in tasks])
    chance = given.by("episode").sum(policy.score(given)["logp"].detach().double()).exp()
    assert float(chance.max()) < 1e-4


def test_groups_may_want_opposite_things() -> None:
    world = Strings(**pp.plan("grpo", "strings:conflict").world_options)
    task = task_of(world, "6b=")
    turns, same, both = (world.grade(task, world.tokens(t)) for t in ("acacac$", "aeaeae$", "aecddc$"))
    worths = [[g[n] for n in ("group0", "group1", "worst", "mean")] for g in (turns, same, both)]
    assert worths[0] == pytest.approx([1, 1 / 3, 1 / 3, (10 + 1 / 3) / 11])
    assert worths[1] == pytest.approx([1 / 3, 1, 1 / 3, (10 / 3 + 1) / 11])
    assert worths[2] == pytest.approx([7 / 15, 13 / 15, 7 / 15, (70 / 15 + 13 / 15) / 11])  # one turn of five
    assert world.judged_by == "worst"
    assert world.asks == {"reward.name": "mean"}
    with pytest.raises(PanoplyError, match="Unknown signal of strings that answers are judged by 'worst'"):
        Strings(judged="worst")


def test_the_least_group_is_the_one_whose_mean_is_least() -> None:
    world = Strings(groups=(LENGTH, AVOIDS), judged="worst")
    policy = open_policy("start", world, 0, "cpu")
    means = [
        evaluate(replace(world, judged=name), policy, ASKED, greedy=False).sampled
        for name in ("group0", "group1")
    ]
    assert world.measure("least-group", policy) == pytest.approx(min(means))
    assert means[0] != pytest.approx(means[1])
    assert evaluate(world, policy, ASKED, greedy=False).sampled < min(means), "each answer's worst is less"


def test_the_offset_of_the_proxy_belongs_to_the_prompt() -> None:
    world = Strings(proxy_offset=1.0)
    tasks = [world.task("train", i) for i in range(50)]
    offsets = {
        task.id: {
            round(g["proxy"] - g["true"], 9)
            for a in ("ac$", "(acd)$")
            for g in [world.grade(task, world.tokens(a))]
        }
        for task in tasks
    }
    assert all(len(found) == 1 for found in offsets.values())
    assert len(set.union(*offsets.values())) == len(offsets) > 20


# ------------------------------------------------------------------ preferences


def test_preference_follows_the_difference_of_worth() -> None:
    difference = 1 - 0.1875
    assert preference("(acac)$", "abc$", sharpness=2) == pytest.approx(1 / (1 + np.exp(-2 * difference)))
    assert preference("(acac)$", "abc$") + preference("abc$", "(acac)$") == pytest.approx(1)
    assert preference("abc$", "abc$") == 0.5
    assert preference("(acac)$", "abc$", noise=0.1, sharpness=1e6) == pytest.approx(0.9)


def test_groups_of_annotators_by_population() -> None:
    options = {"groups": (LENGTH, AVOIDS), "populations": (10, 1), "sharpness": 1e6}
    long, clean = "ababab$", "ac$"
    assert [preference(long, clean, who, **options) for who in (0, 9, 10, 11, 21)] == [1, 1, 0, 1, 0]
    assert preference(long, clean, **options) == pytest.approx(10 / 11)
    even = {**options, "populations": ()}
    assert preference(long, clean, **even) == pytest.approx(0.5)


def test_intransitive_preferences_go_in_a_circle() -> None:
    options = {"intransitive": 1.0}
    circle = ["(ac)$", "(ba)$", "c$"]
    for loser, winner in zip(circle, [*circle[1:], circle[0]], strict=True):
        assert preference(winner, loser, **options) == 1
        assert preference(loser, winner, **options) == 0
    assert preference("d$", "a$", **options) == 0.5
    assert preference("()$", "a$", **options) == 0.5
    half = preference("(bcac)$", "a$", intransitive=0.5, sharpness=0)
    assert half == pytest.approx(0.75)


def test_the_least_win_is_against_the_rival_that_beats_an_answer_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever always begins with a loses to b; thirds of each kind are even with all; worth counts for its share."""
    from panoply.slots.sample import answers

    world = Strings(intransitive=0.5, sharpness=1e6)
    tasks = world.held_out(ASKED)
    for task in tasks:
        for kind in range(3):
            rival = world.rival(task, kind)
            assert world.grade(task, rival)["true"] == 1
            assert LETTERS.index(world.text(rival)[1]) % 3 == kind
    monkeypatch.setattr(
        "panoply.rollout.text.Collector", lambda *a, **k: SimpleNamespace(episodes=lambda t: t)
    )

    def least(say: Any) -> float:
        monkeypatch.setattr(answers, "answers_of", lambda _: [say(t, i) for i, t in enumerate(tasks)])
        return world.measure("least-win", None)

    assert least(lambda task, i: world.rival(task, 0)) == pytest.approx(0.25)
    assert least(lambda task, i: world.rival(task, i // 6 % 3)) == pytest.approx(0.5, abs=0.02)
    assert least(lambda task, i: world.rival(task, i % 3)) == pytest.approx(
        0.25
    )  # one kind a prompt is no mixture
    assert least(lambda task, i: []) == pytest.approx(0.25)  # no letter is even with all, and worth nothing


def test_prefer_draws_from_the_preference() -> None:
    world = Strings(sharpness=1.0)
    task = task_of(world, "6b=")
    good, bad = world.tokens("(acac)$"), world.tokens("abc$")
    rng = np.random.default_rng(0)
    rate = np.mean([world.prefer(task, good, bad, rng) for _ in range(4000)])
    assert rate == pytest.approx(world.preference(task, good, bad), abs=0.025)


# ------------------------------------------------------------------ the teacher, tasks


def test_the_teacher_is_as_careless_as_the_docstring_says() -> None:
    world, rng = Strings(), np.random.default_rng(0)
    tasks = [world.task("train", index) for index in range(6000)]
    pairs = [(task, world.text(world.demonstrate(task, rng))[:-1]) for task in tasks]
    grades = [world.grade(task, world.tokens(text + "$")) for task, text in pairs]
    mean = {name: np.mean([g[name] for g in grades]) for name in grades[0]}
    assert np.mean([g["length"] == 1 for g in grades]) == pytest.approx(0.4, abs=0.03)
    assert np.mean(["(" in t or ")" in t for _, t in pairs]) == pytest.approx(0.6, abs=0.03)
    assert mean["balance"] == pytest.approx(0.3, abs=0.03)  # half of the brackets are a pair
    assert mean["alternation"] == pytest.approx(0.626, abs=0.02)
    assert mean["avoids"] == pytest.approx(
        0.69, abs=0.02
    )  # half of the teachers, and some of the others by luck
    assert np.mean(["z" in t for _, t in pairs]) == pytest.approx(0.03, abs=0.01)
    assert (mean["ended"], mean["true"]) == (1.0, pytest.approx(0.58, abs=0.02))
    assert mean["success"] == pytest.approx(0.25, abs=0.03)
    assert max(len(t) for _, t in pairs) < world.max_tokens


@pytest.mark.parametrize(("prompt", "gold"), [("6b=", "(acac)$"), ("4a=", "(eb)$"), ("9d=", "(abababa)$")])
def test_the_reference_is_worth_1(prompt: str, gold: str) -> None:
    world = Strings()
    assert world.gold(task_of(world, prompt)) == world.tokens(gold)
    assert grade(gold, prompt)["true"] == 1


def test_train_and_test_never_meet_and_six_prompts_come_round_again() -> None:
    world = Strings()
    train, test = ({world.task(s, i).data["problem"] for i in range(1000)} for s in ("train", "test"))
    assert test == {"4c=", "5b=", "6a=", "7f=", "8e=", "9d="}
    assert len(train) == 30
    assert not train & test
    assert [t.data["problem"] for t in world.held_out(8)][5:] == ["9d=", "4c=", "5b="]
    assert world.task("train", 0).id == next(
        t.id for i in range(1, 500) if (t := world.task("train", i)).prompt == world.task("train", 0).prompt
    )


@pytest.mark.parametrize(
    "options", [{}, {"threshold": 1.0}, {"weights": AVOIDS}, {"groups": (LENGTH, AVOIDS)}]
)
def test_self_test_passes(options: dict[str, Any]) -> None:
    Strings(**options).self_test(60)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"threshold": 0}, "strings.threshold is above 0 and at most 1, not 0."),
        ({"weights": (0, 0, 0, 0)}, "Weights in strings are not all 0."),
        ({"groups": (LENGTH, (0, 0, 0, 0))}, "Weights in strings are not all 0."),
        ({"weights": (1, -1, 1, 1)}, "strings.weights must be at least 0, not -1."),
        ({"weights": (1, 1)}, "strings.weights takes a list, not (1, 1)."),
        ({"populations": (10, 1)}, "strings.populations has a number for each of the 0 groups, not 2."),
        (
            {"groups": (LENGTH, AVOIDS), "populations": (1, 0)},
            "strings.populations must be from 1 to 1000000, not 0.",
        ),
        ({"noise": 1.5}, "strings.noise must be from 0 to 1, not 1.5."),
        ({"intransitive": -0.5}, "strings.intransitive must be from 0 to 1, not -0.5."),
        ({"sharpness": -1}, "strings.sharpness must be at least 0, not -1."),
        ({"pays": "mean"}, "strings.pays=mean is of groups, and strings.groups has none."),
        (
            {"proxy_noise_at": "everywhere"},
            "strings.proxy_noise_at says where the proxy errs, and strings.proxy_noise is 0.",
        ),
    ],
)
def test_bad_options_are_refused_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PanoplyError) as refusal:
        Strings(**options)
    assert str(refusal.value) == sentence


def test_options_survive_json() -> None:
    assert Strings(groups=[[1, 0, 0, 0]]) == Strings(groups=(LENGTH,))  # type: ignore[arg-type]
