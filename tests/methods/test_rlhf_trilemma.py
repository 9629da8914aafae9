"""The RLHF trilemma: labels counted by hand, planted policies that serve some and are shaken, and runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import panoply as pp
from panoply.errors import PanoplyError
from panoply.evaluation import trilemma
from panoply.evaluation.judged import find
from panoply.methods.preferences.rlhf_trilemma import labels_needed, rlhf_trilemma
from panoply.progress import Progress
from panoply.report.pages import shown
from panoply.worlds.text.strings import Strings
from panoply.worlds.world import Task

# ------------------------------------------------------------------ labels


def dice(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_what_the_worst_served_group_loses_by_hand() -> None:
    """One answer for all contexts, three of which prefer the first: a quarter of 0.2 is lost. Two groups that want the
    opposite of each other: one of them loses all of 0.4."""
    alike = np.array([[0.4, 0.4, 0.4, -0.2]])
    assert trilemma.worst_regret(alike, "one", 400, dice(), honest=1.0) == pytest.approx(0.05)
    assert trilemma.worst_regret(alike, "table", 400, dice(), honest=1.0) == 0
    opposed = np.array([[0.4, 0.4], [-0.4, -0.4]])
    assert trilemma.worst_regret(opposed, "one", 100, dice()) == pytest.approx(0.4)
    assert trilemma.worst_regret(opposed, "table", 100, dice()) == 0
    assert trilemma.worst_regret(opposed, "table", 100, dice(), honest=0.0) == pytest.approx(0.4)


def test_a_context_without_labels_is_guessed() -> None:
    """One label, 64 contexts of ±0.2: 63 are guesses, of which about half are wrong, not none and not all."""
    gaps = np.where(dice(1).random((1, 64)) < 0.5, 0.2, -0.2)
    lost = [trilemma.worst_regret(gaps, "table", 1, dice(i), honest=1.0) for i in range(50)]
    assert np.mean(lost) == pytest.approx(0.5 * 0.2 * 63 / 64, abs=0.005)


def test_what_is_linear_is_learned_from_a_few_contexts() -> None:
    gaps = trilemma.gaps_of(8, "linear", 3, seed=0)
    assert gaps.shape == (3, 256)
    few = {way: trilemma.worst_regret(gaps, way, 100, dice(), honest=1.0) for way in ("linear", "table")}  # type: ignore[arg-type]
    assert few["linear"] < 0.02 < 0.08 < few["table"]


def test_labels_are_counted_until_enough_and_no_further() -> None:
    gaps = np.full((1, 8), 0.1)
    found = trilemma.labels_needed(gaps, "table", target=0.02)
    assert found.regret <= 0.02
    fewer = trilemma.labels_needed(gaps, "table", target=0.04)
    assert 1 < fewer.labels < found.labels
    opposed = np.array([[0.4], [-0.4]])
    assert trilemma.labels_needed(opposed, "one", most=8) == (16, pytest.approx(0.4))
    assert trilemma.slope([1, 2, 4], [3, 5, 9]) == pytest.approx(2)


def test_the_table_of_labels_and_what_it_refuses() -> None:
    found = labels_needed(bits=(2, 4), groups=2)
    assert list(found) == ["2 bits", "4 bits"]
    assert found["4 bits"]["unstructured"] > 2 * found["2 bits"]["unstructured"]
    assert found["4 bits"]["linear"] < found["4 bits"]["linear, as a table"]
    with pytest.raises(PanoplyError, match=r"labels-needed.bits are numbers from 1 to 12"):
        labels_needed(bits=(0,))
    with pytest.raises(PanoplyError, match="at least one group, and a target between 0 and 1"):
        labels_needed(target=0.0)


# ------------------------------------------------------------------ planted policies

MANY, FEW = (1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0)
WORLD = Strings(groups=(MANY, FEW), populations=(10, 1))
"""Ten want the right length, one wants brackets."""
TASKS = WORLD.held_out(6)


def for_the_many(task: Task) -> list[int]:
    return WORLD.tokens("a" * task.data["length"] + "$")


def planted(*, shaken_by: str = "") -> trilemma.Ask:
    """Serves the ten alone, and nobody where it is shaken."""

    def ask(tasks: Sequence[Task], attempts: int, temperature: float) -> list[list[list[int]]]:
        plain = {task.prompt for task in TASKS}
        said = []
        for task in tasks:
            away = {"unsteady": temperature > 1, "distracted": task.prompt not in plain}.get(shaken_by, False)
            said.append([[] if away else for_the_many(task)] * attempts)
        return said

    return ask


def test_a_policy_for_the_many_by_hand() -> None:
    """Worth 1 to ten of eleven and 0 to one, who could have 1: ε is 1, ½ on average, and he likes nothing of it."""
    found = trilemma.of_text(WORLD, planted(), TASKS, attempts=2)
    assert found["worth"] == pytest.approx(10 / 11)
    assert found["ε worst group"] == 1
    assert found["ε mean"] == 0.5
    assert found["minority"] == 0
    assert found["δ"] == 0

    def balanced(tasks: Sequence[Task], attempts: int, temperature: float) -> list[list[list[int]]]:
        return [[WORLD.gold(task)] * attempts for task in tasks]

    found = trilemma.of_text(WORLD, balanced, TASKS, attempts=2)
    assert (found["worth"], found["ε worst group"], found["δ"]) == (1, 0, 0)
    assert found["minority"] == pytest.approx(0.5 * 11), "half of what is said, of one in eleven"


def test_the_best_is_the_reference_or_what_was_said_that_is_better() -> None:
    """An answer of the wrong length has ¾ of it: to have said it and nothing loses the half of that, not of 1."""
    world = Strings(groups=(MANY, FEW))
    task = TASKS[0]
    short = WORLD.tokens("a" * (task.data["length"] - 1) + "$")
    found = trilemma.worths(world, [task], [[short, []]])
    assert found.best["group0"].tolist() == [1.0], "the reference has the right length"
    assert found.people == {"group0": 1, "group1": 1}
    best = {"group0": np.array([0.75]), "group1": np.array([0.0])}
    assert trilemma.represented(found._replace(best=best))["ε worst group"] == pytest.approx(0.375)
    object.__setattr__(world, "access", world.access - {"reference"})
    assert trilemma.worths(world, [task], [[short, []]]).best["group0"].tolist() == [0.75]


@pytest.mark.parametrize("by", ["unsteady", "distracted"])
def test_what_shakes_a_policy_is_named(by: str) -> None:
    found = trilemma.of_text(WORLD, planted(shaken_by=by), TASKS, attempts=2)
    assert found["δ"] == found[f"δ {by}"] == pytest.approx(10 / 11)
    assert sum(value > 0 for name, value in found.items() if name.startswith("δ ")) == 1
    turns = trilemma.of_text(WORLD, planted(shaken_by=by), TASKS, attempts=2, one_turn=False)
    assert ("δ distracted" in turns) is False
    assert turns["δ"] == (pytest.approx(10 / 11) if by == "unsteady" else 0)


def test_problems_that_are_served_badly_and_problems_that_had_bad_luck() -> None:
    worth = np.ones((8, 4))
    worth[:2] = 0
    assert trilemma.shifted(worth) == 0.75, "a quarter is never served: 0.75 in all, 0 on those"
    luck = np.ones((8, 4))
    luck[:2, :2] = 0
    assert trilemma.shifted(luck) == pytest.approx(luck.mean() - 1), "chosen by one half, judged by the other"


def test_without_groups_everybody_is_one() -> None:
    world = Strings()
    found = trilemma.of_text(
        world, lambda tasks, n, t: [[world.gold(x)] * n for x in tasks], world.held_out(4)
    )
    assert (found["worth"], found["ε worst group"]) == (1, 0)
    assert "minority" not in found


def test_control_by_group_of_start() -> None:
    returns = np.array([[1.0, 1.0], [0.5, 0.5], [0.0, 0.5], [0.0, 0.5]])
    found = trilemma.of_control(lambda t: returns / t, np.array([0, 0, 1, 1]), np.ones(4))
    assert found["ε worst group"] == 0.75
    assert found["ε mean"] == 0.5
    assert found["δ unsteady"] == pytest.approx(0.5 / 3)
    assert "ε mean" not in trilemma.of_control(lambda t: returns)
    assert trilemma.of_control(lambda t: returns, best=2.0)["ε mean"] == 1.5


def test_what_a_run_took() -> None:
    assert trilemma.spent({"update.epochs": 2, "update.minibatches": 3}, "on_policy", 10, 640) == {
        "labels": 640, "updates": 60,
    }  # fmt: skip
    pairs = {"data.batch": 64, "data.pairs": 500, "update.epochs": 1, "update.minibatches": 1}
    assert trilemma.spent(pairs, "dataset", 100, 0) == {"labels": 500, "updates": 100}
    assert trilemma.spent(pairs, "dataset", 2, 0)["labels"] == 128
    assert trilemma.spent({"data.batch": 64}, "dataset", 2, 0)["labels"] == 128


# ------------------------------------------------------------------ of a run, and its page


@pytest.mark.parametrize(
    ("method", "world", "settings"),
    [
        ("sft", "strings", {"world.groups": (MANY, FEW), "data.batch": 4}),
        ("dqn", "bandit", {"world.variant": "bits", "world.groups": 2, "world.bits": 2, "sample.length": 8}),
    ],
)
def test_a_run_is_judged(method: str, world: str, settings: dict[str, object], tmp_path: Path) -> None:
    small = {"run.steps": 1, "run.held_out": 2, "run.evaluate_every": 0, "run.threads": 1, **settings}
    run = pp.train(method, world, run=tmp_path / "run", settings=small, progress=Progress()).run
    found = pp.judge(run, "rlhf-trilemma", settings={"problems": 4, "attempts": 2})
    assert list(found) == ["start", "trained"]
    assert {"worth", "ε worst group", "ε mean", "δ", "δ shifted", "δ unsteady"} <= found["start"].keys()
    assert found["trained"]["labels"] > 0
    assert found["trained"]["updates"] > 0
    assert found["trained"]["ε worst group"] >= found["trained"]["ε mean"] >= 0
    with pytest.raises(PanoplyError, match="at least 4 problems with 2 attempts each"):
        pp.judge(run, "rlhf-trilemma", settings={"problems": 3})


def test_its_page_orders_works_and_says_how_to_judge() -> None:
    order = rlhf_trilemma()
    assert {"rlhf", "reward-model"} <= set(order["one reward for everybody: affordable"])
    assert "sppo" in order["preferences of a population as they are, in a game"]
    page = shown("rlhf-trilemma")
    assert "panoply eval RUN --by rlhf-trilemma" in page
    assert find("rlhf-trilemma").kind == "survey"
    with pytest.raises(PanoplyError, match="Unknown protocol"):
        find("grpo")
