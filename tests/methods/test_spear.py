"""SPEAR: its memory and P50 by hand, the released code's clip-cov, schedules, and a run that is resumed."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kit import Slow, Tabular, assert_same, batch, gradient, hand, ragged, rows_of

import panoply as pp
from panoply.batch import Batch
from panoply.experience import REPLAY, Experience
from panoply.loops.learner import Learner
from panoply.methods.agents.spear import (
    AGAIN,
    NOW,
    _drawn,
    and_wins,
    clip_cov,
    dr_bot,
    for_calls,
    most_varied_groups,
    recalibrated,
    spear,
)
from panoply.slots.credit.groups import group
from panoply.slots.schedule.schedules import half_cosine
from panoply.slots.surrogate.ratios import clip


def step(version: int, *returns: float, calls: float = 1.0, first: int = 0) -> Experience:
    """A group of episodes of two decisions each, as they were collected in a step."""
    rows = [(10 * version + first + i, r) for i, r in enumerate(returns) for _ in range(2)]
    last = [0.0, 1.0] * len(returns)
    return hand(
        episode=[e for e, _ in rows],
        group=[version] * len(rows),
        source=[0] * len(rows),
        version=[version] * len(rows),
        reward=[r * end for (_, r), end in zip(rows, last, strict=True)],
        logp=[-0.1 * version - 0.01 * i for i in range(len(rows))],
        **{"signal:calls": [calls * end for end in last]},
    )


def fresh() -> dict[str, Any]:
    return {"means": [], "spreads": [], "step": 0}


def replayed(found: Experience) -> dict[int, float]:
    """Remembered episodes that came back, and what they are worth now."""
    rows = found.take(found["stage"] == AGAIN)
    return {} if not len(rows) else dict(
        zip(rows["episode"].tolist(), [round(x, 5) for x in rows["recalibrated"].tolist()], strict=True)
    )  # fmt: skip


def test_wins_wait_until_there_are_enough_and_are_forgotten_then() -> None:
    """size 2: more than 3 usable ones. Steps give 2 wins each, so that the third step sees four and draws two."""
    part, state = and_wins(size=2), fresh()
    found = []
    for version, returns in enumerate([(0.0, 1.0, 1.0), (0.0, 1.0, 1.0), (1.0, 0.0, 0.0), (0.0, 1.0, 1.0)]):
        state, now = part(state, step(version, *returns))
        found.append(now)
    assert [len(replayed(now)) for now in found] == [0, 0, 2, 0]
    third = found[2]
    assert set(replayed(third)) < {1, 2, 11, 12}
    assert set(replayed(third).values()) == {round(1 - 2 / 3, 5)}  # P50 of ⅔ and ⅔
    again = third.take(third["stage"] == AGAIN)
    assert set(again["source"].tolist()) == {REPLAY}
    assert (third["stage"] == NOW).sum() == 6
    assert state["step"] == 4


def test_the_log_probabilities_are_those_of_collection() -> None:
    part, state = and_wins(size=1), fresh()
    first = step(0, 0.0, 1.0, 1.0)
    state, _ = part(state, first)
    _, now = part(state, step(1, 0.0, 0.0))
    again = now.take(now["stage"] == AGAIN)
    (episode,) = set(again["episode"].tolist())
    assert torch.equal(again["logp"], first.take(first["episode"] == episode)["logp"])


def test_this_steps_wins_do_not_come_back_in_it() -> None:
    part, state = and_wins(size=1), fresh()
    for version in range(3):
        state, now = part(state, step(version, 0.0, 1.0, 1.0, 1.0))
        assert all(episode < 10 * version for episode in replayed(now))


def test_only_wins_with_calls_are_remembered() -> None:
    part, state = and_wins(size=1), fresh()
    state, _ = part(state, step(0, 0.0, 1.0, 1.0, 1.0, calls=0.0))
    assert not replayed(part(state, step(1, 0.0, 0.0))[1])
    state, _ = part(fresh(), step(0, 1.0, 1.0, 1.0))  # nobody is above the mean
    assert not replayed(part(state, step(1, 0.0, 0.0))[1])


def test_what_others_won_is_not_remembered() -> None:
    taught = step(0, 0.0, 1.0, 1.0)
    state, _ = and_wins(size=1)(fresh(), taught.with_columns(source=torch.ones(6, dtype=torch.long)))
    assert not any(name.startswith("decisions") for name in state)


def test_what_was_a_win_and_is_usual_now_teaches_nothing() -> None:
    """Two wins of ½, then groups of mean 0.9, then two wins of 1: of four only two are above P50, too few."""
    part, state = and_wins(size=2), fresh()
    for version, returns in enumerate([(0.0, 0.0, 0.5, 0.5), (0.9, 0.9), (0.9, 0.9), (0.0, 1.0, 1.0)]):
        state, _ = part(state, step(version, *returns))
    assert len(set(state["decisions:episode"].tolist())) == 4
    assert not replayed(part(state, step(4, 0.0, 0.0))[1])


def test_as_many_as_are_drawn_are_not_enough() -> None:
    part, state = and_wins(size=2), fresh()
    state, _ = part(state, step(0, 0.0, 1.0, 1.0, 1.0))
    assert not replayed(part(state, step(1, 0.0, 0.0))[1])


def test_the_median_is_of_group_means_and_of_earlier_steps() -> None:
    part, state = and_wins(size=1, history=2), fresh()
    for version, returns in enumerate([(0.0, 0.0, 0.0, 1.0), (0.0, 1.0), (0.0, 0.0, 1.0, 1.0, 1.0)]):
        state, now = part(state, step(version, *returns))
    assert state["means"] == pytest.approx([0.5, 0.6])  # the last two
    assert list(replayed(now).values()) == [0.625]  # P50 of ¼ and ½, without this step
    _, now = part(state, step(3, 0.0, 0.0))
    assert set(replayed(now).values()) == {round(1 - 0.55, 5)}


def test_divided_by_the_median_deviation_where_credit_is() -> None:
    part, state = and_wins(size=1, scale="std"), fresh()
    state, _ = part(state, step(0, 0.0, 1.0, 1.0))
    _, now = part(state, step(1, 0.0, 0.0))
    spread = statistics.stdev([0.0, 1.0, 1.0])
    assert list(replayed(now).values()) == [pytest.approx((1 / 3) / (spread + 1e-6), abs=1e-4)]


def test_old_wins_leave() -> None:
    """With fresh=3 a win is remembered for the step it was won in and two more."""
    for later, kept in ((0, True), (2, True), (3, False)):
        part, state = and_wins(size=100, fresh=3), fresh()
        state, _ = part(state, step(0, 0.0, 1.0))
        for version in range(1, 1 + later):
            state, _ = part(state, step(version, 0.0, 0.0))
        assert any(name.startswith("decisions") for name in state) == kept


# ------------------------------------------------------------------ credit


def test_credit_of_new_and_of_remembered_rows() -> None:
    rows = hand(
        episode=[1, 2, 3],
        group=[1, 1, 1],
        reward=[0.0, 1.0, 5.0],
        stage=[NOW, NOW, AGAIN],
        recalibrated=[0.0, 0.0, 0.4],
    )
    assert recalibrated(weight=0.5)(rows).tolist() == pytest.approx([-0.5, 0.5, 0.2])
    assert recalibrated(credit=group(), weight=0.0)(rows)[2] == 0
    mixed = rows.take(torch.tensor([2, 0, 1]))
    assert recalibrated(weight=0.5)(mixed).tolist() == pytest.approx([0.2, -0.5, 0.5])


def test_schedules() -> None:
    rise, fall = half_cosine(first=0.0, last=1.0, steps=200), half_cosine(first=1.0, last=0.0, steps=200)
    for at in (0, 50, 100, 200, 900):
        share = min(at, 200) / 200
        assert rise(at, 1000) == pytest.approx(0.5 * (1 - math.cos(math.pi * share)))
        assert fall(at, 1000) == pytest.approx(0.5 * (1 + math.cos(math.pi * share)))
    assert half_cosine(first=0.0, last=2.0, steps=0.5)(25, 100) == pytest.approx(1.0)


def test_calls_are_paid_up_to_a_limit() -> None:
    rows = hand(episode=[1, 1, 2], **{"signal:calls": [1.0, 2.0, 14.0]})
    assert for_calls()(rows).tolist() == pytest.approx([0.0, 0.3, 1.0])


def test_groups_that_vary_most_are_kept() -> None:
    rows = hand(
        episode=list(range(8)),
        group=[1, 1, 2, 2, 3, 3, 4, 4],
        reward=[0.0, 1.0, 0.0, 0.2, 1.0, 1.0, 0.0, 0.5],
    )
    assert most_varied_groups()(rows).tolist() == [True] * 4 + [False] * 2 + [True] * 2
    assert most_varied_groups(share=0.1)(rows).tolist() == [True] * 2 + [False] * 6


# ------------------------------------------------------------------ clip-cov


def covarying() -> tuple[Experience, list[float]]:
    made = hand(
        episode=[1, 1, 1, 2, 2, 2],
        turn=[0, 1, 2, 0, 1, 2],
        position=[3, 4, 5, 3, 4, 5],
        logp=[-0.1, -1.5, -4.0, -0.1, -2.0, -3.0],
        advantage=[2.0, 2.0, 2.0, -2.0, -2.0, -2.0],
    )
    return made, [-0.1, -1.2, -4.0, -0.1, -2.0, -3.0]


def test_clip_cov_is_the_released_codes() -> None:
    """Recomputed from its equations: which tokens may be left out, how many are, and what the rest is worth."""
    made, now = covarying()
    seen = batch(made, logp=now)
    a, logp = made["advantage"], torch.tensor(now).double()
    cov = (a - a.mean()) * (logp - logp.mean())
    ratio = (logp - made["logp"]).exp()
    free, bounded = ratio * a, ratio.clamp(0.8, 1.28) * a
    may = (cov > 1.0) & (cov < 40.0) & ~(bounded < free)
    assert may.tolist() == [True, False, False, False, False, True]  # the second is above 1.28 already
    for share, number in ((0.02, 1), (0.34, 2), (1.0, 2)):
        part = clip_cov(share=share)
        state, told = _drawn({"drawn": 0}, seen, **part.settings())
        value, stats = part(Batch(made, seen.now, {"clip_cov": told}))
        out = stats["clip_cov"]
        assert int(out.sum()) == number
        assert not (out & ~may).any()
        assert torch.allclose(value, torch.where(out, 0.0, torch.minimum(free, bounded)))
        assert state == {"drawn": 1}


def test_lots_differ_from_draw_to_draw_and_not_with_the_order_of_rows() -> None:
    made, now = covarying()
    left: set[tuple[int, ...]] = set()
    for drawn in range(12):
        seen = batch(made, logp=now)
        _, told = _drawn({"drawn": drawn}, seen, **clip_cov().settings())
        out = clip_cov()(Batch(made, seen.now, {"clip_cov": told}))[1]["clip_cov"]
        left.add(tuple(out.nonzero().flatten().tolist()))
        assert int(out.sum()) == 1
        order = torch.tensor([5, 3, 1, 0, 2, 4])
        turned = batch(made.take(order), logp=[now[i] for i in order.tolist()])
        again = _drawn({"drawn": drawn}, turned, **clip_cov().settings())[1]
        same = clip_cov()(Batch(made.take(order), turned.now, {"clip_cov": again}))[1]["clip_cov"]
        assert torch.equal(same, out[order])
    assert len(left) > 1


def test_without_covariance_it_is_the_plain_clip_and_any_split_gives_one_gradient() -> None:
    made = ragged(drift=0.4)
    plain = dr_bot().but(select=(), surrogate=clip(low=0.2, high=0.28))
    mine = dr_bot().but(select=(), surrogate=clip_cov(least=900.0, most=901.0))
    assert_same(gradient(mine, made), gradient(plain, made), rel=1e-9)
    cut = dr_bot().but(select=(), surrogate=clip_cov(share=0.5, least=0.0))
    whole, parts = (
        Learner(Tabular(), cut, total_steps=1, micro_tokens=tokens).gradient(made)["logits"]
        for tokens in (10_000, 3)
    )
    assert torch.allclose(whole, parts, atol=1e-12)
    assert not torch.allclose(whole, gradient(plain, made))


def test_gradient_of_remembered_rows_is_the_papers() -> None:
    """PPO's bound with the stored log-probabilities and κ·(R − P50), over a fixed length."""
    made, slow = ragged(lengths=((2, 3),), drift=0.5), Slow()
    worth = {100: 0.7, 101: 0.2}
    made = made.with_columns(
        stage=torch.full((5,), AGAIN), recalibrated=torch.tensor([worth[int(e)] for e in made["episode"]])
    )
    loss = torch.zeros((), dtype=torch.float64)
    for e, above in worth.items():
        for row in rows_of(made, episode=e):
            rho = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
            loss = loss - torch.minimum(rho, rho.clamp(0.8, 1.28)) * 0.5 * above / (2 * 512)
    method = spear().but(surrogate=clip_cov(least=900.0, most=901.0), credit=recalibrated(weight=0.5))
    found = gradient(method, made.with_columns(advantage=method.credit(made)))
    assert_same(found, slow.gradient(loss), rel=1e-5)


# ------------------------------------------------------------------ in a run

SETTINGS = {
    "run.held_out": 4, "sample.prompts": 2, "sample.group": 4, "select.and_wins.size": 1, "reward.first.name": "calls",
    "run.checkpoint_every": 2, "run.episodes_every": 0, "update.schedule.warmup": 0, "credit.weight": 1.0,
}  # fmt: skip
CHOICES: dict[str, Any] = {"world": "tools", "steps": 4, "settings": SETTINGS}


def test_a_run_learns_again_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = tiny.bare(tmp_path / "whole", "spear", **CHOICES)
    rows = tiny.metrics(tmp_path / "whole")
    assert {row["updates"] for row in rows} == {1, 2}
    with pp.steps("spear", run=tmp_path / "cut", threads=1, progress=tiny.Notes(), **CHOICES) as made:
        for _ in range(3):
            next(made)
    assert tiny.resume(tmp_path / "cut").fingerprint == whole.fingerprint
    assert tiny.metrics(tmp_path / "cut") == rows


def test_refusals() -> None:
    for made, why in (
        (spear().but(credit=group()), "does not look at what is recalibrated"),
        (spear().but(select=(and_wins(), most_varied_groups())), "it is the last in select"),
        (dr_bot().but(surrogate=clip_cov(least=2.0, most=1.0)), "above least"),
        (spear().but(credit=recalibrated(credit=for_calls())), "gives no advantages"),
    ):
        with pytest.raises(pp.PanoplyError, match=why):
            pp.plan(made, "tools")
