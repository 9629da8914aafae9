"""Think2SQL: what a query earns by its result, worked out by hand, and the rewards it was compared with."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import tiny
import torch
from kit import Slow, assert_same, gradient, hand, ragged, rows_of
from papers import ZERO, groups_of, returns_of

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.applied_agents.think2sql import at_least, ladder, no_longer, think2sql
from panoply.rewards import tables
from panoply.slots.reward.signals import signal
from panoply.worlds.text.program import Program
from panoply.worlds.world import Task

WORLD = Program(kind="sql")


def graded(problem: str, query: str) -> dict[str, float]:
    return WORLD.grade(Task(1, (), 0, {"problem": problem}), WORLD.tokens(query))


def answers(**signals: list[float]) -> Experience:
    """Answers of one token each, in one group."""
    n = len(next(iter(signals.values())))
    return hand(episode=list(range(n)), group=[0] * n, **{f"signal:{k}": v for k, v in signals.items()})


# ------------------------------------------------------------------ pitfalls of the card


def test_results_are_compared_and_not_strings() -> None:
    for query in ("SnFWa<5&c=1$", "SnFWc=1&a<5$", "SnFJWc=1&a<5$"):
        assert graded("n a<5&c=1:", query)["success"] == graded("n a<5&c=1:", query)["table"] == 1


def test_a_query_that_selects_everything_is_not_paid_for_it() -> None:
    """All 40 people for the few who are wanted: recall is 1, and precision and cardinality say what it is worth."""
    everything = graded("n a<5&c=1:", "SnF$")["table"]
    found = [list(base.rows) for base in _bases("SnFWa<5&c=1")]
    assert everything == pytest.approx(statistics.fmean((len(f) / 40 + 1 + len(f) / 40) / 3 for f in found))
    assert everything < graded("n a<5&c=1:", "SnFWa<9&c=1$")["table"] < 1


def test_nearly_right_is_worth_more_than_wrong_and_what_does_not_run_nothing() -> None:
    right, near, far, broken = (
        graded("n p>3&c=2:", query)["table"]
        for query in ("SnFWp>3&c=2$", "SnFWp>2&c=2$", "ScFWp<1$", "SnFWp>3&c=$")
    )
    assert right == 1 > near > far > broken == 0


def test_no_wanted_table_is_empty() -> None:
    """An empty result would be right for every query that finds nothing."""
    for i in range(40):
        wanted = _bases(WORLD.does.solution(WORLD.task("train", i).data["problem"]))
        assert all(base.rows for base in wanted)
    assert tables.graded([], []) == 1, "which is why they are left out"


def _bases(program: str) -> tuple[object, ...]:
    from panoply.worlds.text import program_sql

    return program_sql.run(program)


def test_released_metrics_on_a_frozen_pair() -> None:
    """By QATCH's equations: sets of values, and a ratio of lengths (rounded there to three places)."""
    target, found = [["a", "b"], ["c", "d"], ["c", "d"], ["f", "g"]], [["a", "b"], ["c", "e"]]
    cells, wanted = {"a", "b", "c", "e"}, {"a", "b", "c", "d", "f", "g"}
    assert tables.precision(found, target) == len(cells & wanted) / len(cells) == 0.75
    assert tables.recall(found, target) == len(cells & wanted) / len(wanted) == 0.5
    assert tables.cardinality(found, target) == 2 / 4
    assert tables.graded(found, target) == pytest.approx((0.75 + 0.5 + 0.5) / 3)


# ------------------------------------------------------------------ rewards


def test_reward_of_the_method() -> None:
    made = answers(table=[1.0, 0.4, 0.0], ended=[1.0, 1.0, 0.0])
    assert think2sql().reward(made).tolist() == pytest.approx([1.0, 0.49, 0.0])


def test_at_least_pays_for_every_query_that_runs() -> None:
    made = answers(table=[0.95, 0.05, 0.0, 0.0], success=[0.0, 0.0, 1.0, 0.0], ran=[1.0, 1.0, 1.0, 0.0])
    assert at_least()(made).tolist() == pytest.approx([0.95, 0.1, 0.1, 0.0])
    assert at_least(name="success")(made).tolist() == pytest.approx([0.1, 0.1, 1.0, 0.0]), "Arctic's"
    steps = at_least(buckets=(0.1, 0.5, 0.8, 0.9, 1.0))
    made = answers(table=[1.0, 0.95, 0.8, 0.79, 0.2, 0.0], ran=[1.0] * 6)
    assert steps(made).tolist() == pytest.approx([1.0, 0.9, 0.8, 0.5, 0.1, 0.1])


def test_the_ladder_of_sql_r1() -> None:
    """±1, ±2, ±3; and 1 + ½·|y|/limit more for a right answer, here of one token in a limit of four."""
    made = answers(ended=[0.0, 1.0, 1.0, 1.0], ran=[0.0, 0.0, 1.0, 1.0], success=[0.0, 0.0, 0.0, 1.0])
    assert ladder(limit=4)(made).tolist() == pytest.approx([-1.0, 1 - 2, 1 + 2 - 3, 1 + 2 + 3 + 1 + 0.125])
    assert ladder(limit=1)(made).tolist()[3] == pytest.approx(7.5)


def test_longer_answers_pay_by_deviations_of_the_right_ones() -> None:
    """Lengths 2, 4 and 9 of which the first two are right: mean 3, std √2; (9 − 3)/√2 deviations for the third.

    Its reward is 0.3 and cannot fall below 0; the second pays 0.1·(4 − 3)/√2, the first nothing.
    """
    lengths, worth = [2, 4, 9, 5], [1.0, 0.8, 0.3, 0.0]
    episode = [e for e, n in enumerate(lengths) for _ in range(n)]
    last = [e for e, n in enumerate(lengths) for i in range(n) if i == n - 1]
    earned = [worth[e] if i == n - 1 else 0.0 for e, n in enumerate(lengths) for i in range(n)]
    made = hand(episode=episode, group=[0] * len(episode), **{"signal:table": earned})
    paid = [
        sum(x for x, e in zip(no_longer()(made).tolist(), episode, strict=True) if e == of) for of in last
    ]
    assert paid == pytest.approx([1.0, 0.8 - 0.1 / 2**0.5, max(0.0, 0.3 - 0.1 * 6 / 2**0.5), 0.0])
    assert no_longer(strength=10.0)(made).tolist()[5] == pytest.approx(0.0), "at most all of it"
    assert no_longer(strength=10.0, most=0.25)(made).tolist()[5] == pytest.approx(0.55)
    alone = hand(episode=[0, 1, 1], group=[0] * 3, **{"signal:table": [1.0, 0.0, 0.2]})
    assert no_longer()(alone).tolist() == pytest.approx([1.0, 0.0, 0.2]), "one right answer sets no standard"
    wide = hand(episode=[0, 1, 1], group=[0] * 3, **{"signal:table": [1.0, 0.0, 1.0]})
    assert no_longer(spread=1.0)(wide).tolist()[2] == pytest.approx(1 - 0.1 * 0.5 / 1.5), "the least std"


# ------------------------------------------------------------------ gradient and runs


def slow_gradient(made: Experience) -> torch.Tensor:
    slow, loss, returns = Slow(), ZERO, returns_of(made)
    spread = statistics.stdev(returns.values())
    for members in groups_of(made):
        centre = statistics.fmean(returns[e] for e in members)
        for e in members:
            advantage = (returns[e] - centre) / (spread + 1e-4)
            for row in rows_of(made, episode=e):
                rho = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
                gain = torch.minimum(rho * advantage, rho.clamp(0.8, 1.28) * advantage)
                loss = loss - gain / len(made)
    return slow.gradient(loss)


def test_gradient_is_the_equations_in_any_split() -> None:
    method, made = think2sql(), ragged(drift=0.4)
    credited = made.with_columns(advantage=method.credit(made))
    expected = slow_gradient(made)
    for tokens in (0, 5):
        assert_same(gradient(method, credited, micro_tokens=tokens), expected, 1e-5)


def test_a_run_on_queries(tmp_path: Path) -> None:
    """Rewards are above successes, and fewer groups have nothing to tell."""
    settings = {"sample.prompts": 4, "sample.group": 4, "run.held_out": 4}
    told = {}
    for name, changes in {"graded": {}, "exact": {"reward.names": ["success", "ended"]}}.items():
        tiny.bare(
            tmp_path / name, "think2sql", world="program", steps=1, settings=settings | changes, seed=1001
        )
        told[name] = tiny.metrics(tmp_path / name)[0]
    assert told["graded"]["reward"] > told["exact"]["reward"] > 0.15 * 0.99
    assert told["graded"]["degenerate_groups"] <= told["exact"]["degenerate_groups"]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PanoplyError, match="Unknown signal of chain@1 for reward .table."):
        pp.plan("think2sql", "chain")
    for settings, why in (
        ({"reward.buckets": [0.5, 0.1]}, "they rise"),
        ({"reward.floor": 2.0}, "from 0 to 1"),
    ):
        with pytest.raises(PanoplyError, match=why):
            pp.plan("think2sql", "program", reward="at_least", settings=settings)
    assert signal(name="table").needs() >= {"signal:table"}
