"""GRPO-TCR: the reward by hand and by the released code, and the gradient from its equations."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest
import torch
from kit import Slow, assert_same, gradient, hand, ragged, rows_of, shuffled, values_of

import panoply as pp
from panoply.compose import resolve
from panoply.evidence.arms import Arm, Budget
from panoply.experience import Experience
from panoply.methods.agents.grpo_tcr import PLAIN, attempts


def answers(*rows: tuple[float, int]) -> Experience:
    """Episodes of (success, calls): a decision for every call and one for the answer."""
    columns: dict[str, list[Any]] = {k: [] for k in ("episode", "group", "signal:success", "signal:calls")}
    for episode, (success, calls) in enumerate(rows):
        for t in range(calls + 1):
            last = t == calls
            values = (episode, 1, success if last else 0.0, 0.0 if last else 1.0)
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
    return hand(**columns)


def earned(made: Experience, **settings: Any) -> list[float]:
    return [round(float(x), 6) for x in made.by("episode").sum(attempts(**settings)(made))]


CASES = answers((1.0, 0), (1.0, 3), (0.0, 0), (0.0, 1), (0.0, 3), (0.0, 4), (0.0, 9))


def test_a_wrong_answer_loses_less_for_calls_and_a_right_one_earns_nothing_by_them() -> None:
    assert earned(CASES) == [1.0, 1.0, -1.0, -0.9, -0.7, -0.6, -0.6]
    assert earned(CASES, bonus=0.0) == [1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0]
    assert earned(CASES, most=-0.2, bonus=0.05)[3:] == [-0.95, -0.85, -0.8, -0.55]


def test_it_stands_on_the_last_decision() -> None:
    made = answers((0.0, 2))
    assert attempts()(made).tolist() == pytest.approx([0.0, 0.0, -0.8])


def test_it_is_the_released_codes() -> None:
    """There a call is two more turns, the first two being the question and an answer."""
    for calls in range(10):
        turns = 2 + 2 * calls
        assert earned(answers((0.0, calls))) == [pytest.approx(min(-0.6, -1 + (turns - 2) / 2 * 0.1))]


def test_row_order_does_not_matter() -> None:
    made = CASES.with_columns(key=torch.arange(len(CASES)))
    mixed = shuffled(made)
    assert earned(mixed) == earned(made)


def test_gradient_is_the_papers() -> None:
    """Card 205: z-scores of the shaped reward, one mean over all tokens, bounds .8 and 1.28, a floor of 10·A."""
    made, slow, dice = ragged(drift=3.0), Slow(), random.Random(0)
    ids = values_of(made, "episode")
    last = made.by("episode").is_last()
    right = {e: float(dice.random() < 0.5) for e in ids}
    calls = {e: float(dice.randrange(6)) for e in ids}
    made = made.with_columns(**{
        f"signal:{name}": torch.tensor([of[int(e)] for e in made["episode"]]).double() * last
        for name, of in (("success", right), ("calls", calls))
    })  # fmt: skip
    method = resolve("grpo-tcr", settings={"reward.limit": 4, "reward.cache": 2}).method
    rows = rows_of(made)
    size = {e: len(rows_of(made, episode=e)) for e in ids}
    paid = {
        e: (1.0 if right[e] else min(-0.6, -1 + 0.1 * calls[e])) - min(1.0, max(0.0, (size[e] - 2) / 2))
        for e in ids
    }
    loss = torch.zeros((), dtype=torch.float64)
    for e in ids:
        mine = rows_of(made, episode=e)
        peers = sorted({r["episode"] for r in rows if r["group"] == mine[0]["group"]})
        spread = statistics.stdev([paid[p] for p in peers]) if len(peers) > 1 else 0.0
        a = (paid[e] - statistics.fmean(paid[p] for p in peers)) / (spread + 1e-4) if spread else 0.0
        for row in mine:
            rho = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
            value = torch.minimum(rho * a, rho.clamp(0.8, 1.28) * a)
            loss = loss - (value.clamp(min=10 * a) if a < 0 else value) / len(rows)
    made = made.with_columns(reward=method.reward(made))
    made = made.with_columns(advantage=method.credit(made))
    found = slow.gradient(loss)
    assert found.abs().max() > 0
    assert_same(gradient(method, made), found, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward.reward.most": 1.5}, "between wrong and right"),
        ({"reward.reward.most": -1.5}, "between wrong and right"),
        ({"reward.reward.name": "oven"}, "oven"),
    ],
)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(pp.PanoplyError, match=message):
        pp.plan("grpo-tcr", "tools", settings=settings)


def test_the_plain_arm_differs_in_t_c_and_r_alone() -> None:
    (plain,), (tcr,) = Arm.of(PLAIN), Arm.of("grpo-tcr")
    budget = Budget.parse("episodes=128")
    first, second = (arm.plan("tools:dawdle", 1001, budget, greedy=False).method for arm in (plain, tcr))
    assert {path for path, *_ in first.diff(second)} == {"reduce", "surrogate.high", "reward.weight"}
