"""ASPO: the bias worked by hand, what the paper warns of, and a gradient from its equations."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest
import torch
from kit import Slow, assert_same, gradient, hand, ragged, rows_of, shuffled, values_of

import panoply as pp
from panoply.experience import Experience
from panoply.methods.agents.aspo_tir import aspo_tir, earlier, shaped
from panoply.methods.base.dapo import dapo
from panoply.slots.credit.groups import group
from panoply.slots.reward.signals import signal


def answers(*rows: tuple[int, int, float, float, float]) -> Experience:
    """Episodes as (group, decisions, success, calls, tokens before the first call)."""
    columns: dict[str, list[Any]] = {
        k: [] for k in ("group", "episode", "reward", "signal:success", "signal:calls", "signal:first_call")
    }
    for episode, (of, length, success, calls, first) in enumerate(rows):
        for t in range(length):
            last = t == length - 1
            values = (of, episode, success * last, success * last, calls * last, first * last)
            for column, value in zip(columns.values(), values, strict=True):
                column.append(
                    float(value)
                    if column is not columns["group"] and column is not columns["episode"]
                    else value
                )
    return hand(**columns)


GROUP = answers((1, 4, 1, 1, 1), (1, 6, 1, 2, 3), (1, 2, 1, 0, 0), (1, 3, 0, 1, 2))
"""Two right answers that call, after 1 and 3 tokens and with 4 and 6 in all; one that does not; a wrong one."""


def of_episodes(made: Experience, column: torch.Tensor) -> list[float]:
    return [float(x) for x in made.by("episode").first(column)]


def test_the_bias_by_hand() -> None:
    """C has p = 1 and 3, mean 2, and a mean length of 5: the bias is δ·(∓1)/5 = ±0.2 at δ −1, within ±k·¼."""
    plain = group(scale="none")
    assert of_episodes(GROUP, plain(GROUP)) == [0.25, 0.25, 0.25, -0.75]
    wide = shaped(credit=plain, delta=-1.0, k=0.9)(GROUP)
    assert of_episodes(GROUP, wide) == pytest.approx([0.45, 0.05, 0.25, -0.75])
    narrow = shaped(credit=plain, delta=-1.0, k=0.5)(GROUP)
    assert of_episodes(GROUP, narrow) == pytest.approx([0.375, 0.125, 0.25, -0.75])
    assert of_episodes(GROUP, shaped(credit=plain, delta=1.0, k=0.9)(GROUP))[:2] == pytest.approx(
        [0.05, 0.45]
    )


def test_all_decisions_of_an_answer_get_it() -> None:
    found = shaped()(GROUP)
    assert all(len(set(found[GROUP["episode"] == e].tolist())) == 1 for e in range(4))


def test_one_right_answer_with_calls_is_compared_with_nobody() -> None:
    alone = answers((1, 4, 1, 1, 1), (1, 6, 1, 0, 0), (1, 3, 0, 1, 9))
    assert torch.equal(shaped()(alone), group()(alone))


def test_groups_are_apart() -> None:
    other = answers((2, 9, 1, 1, 8), (2, 9, 1, 1, 2), (2, 9, 0, 1, 2))
    both = Experience.cat([GROUP, other.with_columns(episode=other["episode"] + 4)])
    assert torch.allclose(shaped()(both), torch.cat([shaped()(GROUP), shaped()(other)]))


def test_a_right_answer_with_a_negative_advantage_keeps_its_sign() -> None:
    """Graded rewards: the bound is of |A|, for k·A would turn the bounds around."""
    graded = answers((1, 4, 1, 1, 1), (1, 4, 1, 1, 3), (1, 4, 1, 1, 8))
    graded = graded.with_columns(reward=graded["reward"] * torch.where(graded["episode"] == 2, 3.0, 1.0))
    before, after = (of_episodes(graded, credit(graded)) for credit in (group(), shaped(delta=-50.0, k=0.7)))
    assert before[0] < 0 < before[2]
    assert after[0] == pytest.approx(0.3 * before[0])
    assert after[1] == pytest.approx(0.3 * before[1])
    assert after[2] == pytest.approx(0.3 * before[2])


def test_shaping_the_reward_punishes_half_of_the_right_answers_and_shaping_the_advantage_none() -> None:
    """In groups of right answers alone, whatever δ is."""
    dice = random.Random(0)
    right = answers(*((g, 5, 1, 1, dice.randrange(30)) for g in range(40) for _ in range(8)))
    assert of_episodes(right, shaped()(right)) == [0.0] * 320
    for delta in (-0.2, -0.001):
        paid = earlier(reward=signal(), delta=delta)(right)
        advantage = of_episodes(right, group(epsilon=0.0)(right.with_columns(reward=paid)))
        assert statistics.fmean(a < 0 for a in advantage) == pytest.approx(0.5, abs=0.05)


def test_the_shaped_reward_by_hand() -> None:
    """p = 1 and 3: z = ∓1/√2; clipped at ½ and times −0.2, on the last decision."""
    assert of_episodes(
        GROUP, GROUP.by("episode").rows(GROUP.by("episode").sum(earlier(reward=signal())(GROUP)))
    ) == (pytest.approx([1 + 0.2 / 2**0.5, 1 - 0.2 / 2**0.5, 1.0, 0.0], abs=1e-6))
    paid = earlier(reward=signal(), most=0.5)(GROUP)
    assert paid.tolist()[3] == pytest.approx(1.1)
    assert paid.tolist()[:3] == [0.0] * 3


def test_equal_positions_are_no_reason() -> None:
    alike = answers((1, 4, 1, 1, 2), (1, 6, 1, 1, 2), (1, 4, 0, 1, 5))
    assert torch.equal(shaped()(alike), group()(alike))
    assert torch.equal(earlier(reward=signal())(alike), alike["signal:success"])


def test_row_order_does_not_matter() -> None:
    made = GROUP.with_columns(key=torch.arange(len(GROUP)))
    mixed = shuffled(made)
    assert torch.allclose(shaped()(mixed)[mixed["key"].argsort()], shaped()(made))


def test_gradient_is_the_papers() -> None:
    """Card 42, one episode at a time, with DAPO's loss."""
    made, slow, dice = ragged(drift=0.4), Slow(), random.Random(1)
    ids = values_of(made, "episode")
    last = made.by("episode").is_last()
    right, calls, first = ({e: float(draw()) for e in ids} for draw in (
        lambda: dice.random() < 0.7, lambda: dice.random() < 0.8, lambda: dice.randrange(6),
    ))  # fmt: skip

    def column(of: dict[int, float]) -> torch.Tensor:
        return torch.tensor([of[int(e)] for e in made["episode"]]).double() * last

    made = made.with_columns(**{
        "reward": column(right), "signal:success": column(right), "signal:calls": column(calls),
        "signal:first_call": column(first),
    })  # fmt: skip
    rows = rows_of(made)
    loss = torch.zeros((), dtype=torch.float64)
    for e in ids:
        mine = rows_of(made, episode=e)
        peers = sorted({r["episode"] for r in rows if r["group"] == mine[0]["group"]})
        spread = statistics.stdev([right[p] for p in peers]) if len(peers) > 1 else 0.0
        advantage = (
            (right[e] - statistics.fmean(right[p] for p in peers)) / (spread + 1e-4) if spread else 0.0
        )
        chosen = [p for p in peers if right[p] and calls[p]]
        if e in chosen and len(chosen) > 1:
            length = statistics.fmean(len(rows_of(made, episode=p)) for p in chosen)
            bias = -2.0 * (first[e] - statistics.fmean(first[p] for p in chosen)) / length
            advantage += max(-0.7 * abs(advantage), min(0.7 * abs(advantage), bias))
        for row in mine:
            rho = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
            loss = loss - torch.minimum(rho * advantage, rho.clamp(0.8, 1.28) * advantage) / len(rows)
    method = aspo_tir()
    made = made.with_columns(advantage=method.credit(made))
    assert_same(gradient(method, made), slow.gradient(loss), rel=1e-5)


def test_the_diff_is_the_credit() -> None:
    assert {path.split(".")[0] for path, *_ in aspo_tir().diff(dapo())} == {"sample", "reward", "credit"}


@pytest.mark.parametrize(
    ("world", "settings", "message"),
    [
        ("keydoor", {}, "calls"),
        ("tools:dawdle", {"credit.k": 1.0}, "credit.k must be from 0 up to 1"),
    ],
)
def test_refusals(world: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(pp.PanoplyError, match=message):
        pp.plan("aspo-tir", world, settings=settings)


def test_a_credit_of_something_else_is_refused() -> None:
    with pytest.raises(pp.PanoplyError, match="it gives no advantages"):
        pp.plan(aspo_tir().but(credit=shaped(credit=signal())), "tools:dawdle")
