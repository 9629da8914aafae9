"""R²VPO: the brake by hand, a multiplier that moves once a mini-batch and is remembered, groups that come again."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import Slow, Tabular, assert_same, batch, gradient, hand, learner, ragged, rows_of, shuffled, slopes
from papers import ZERO
from tiny import SETTINGS, bare, metrics, resume

import panoply as pp
from panoply.batch import Batch
from panoply.effects import inert
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.loops.mover import Diverged
from panoply.methods.objectives.r2vpo import r2vpo, r2vpo_replay, ratio_variance
from panoply.slots.surrogate.ratios import log_likelihood, ratio
from panoply.slots.update.optimisers import sgd


def seen(q: list[float], advantage: list[float] | None = None) -> Batch:
    """Decisions whose ratios are `q`."""
    rows = len(q)
    made = hand(episode=list(range(rows)), logp=[-1.0] * rows, advantage=advantage or [1.0] * rows)
    return batch(made, logp=[-1 + math.log(v) for v in q])


def moved(part: Any, made: Batch, lam: float | None = None) -> tuple[float, float]:
    """λ of this mini-batch and of the next."""
    assert part.info.prepare is not None
    state, used = part.info.prepare({"lam": lam}, made, **part.settings())
    return used["lam"], state["lam"]


def at(part: Any, made: Batch, lam: float) -> tuple[torch.Tensor, Any]:
    return part(Batch(made.experience, made.now, {"ratio_variance": {"lam": lam}}))


def test_numbers_by_hand() -> None:
    """(ρ − 1)² of .5, 1 and 3, and a slope of 2λρ(ρ − 1) by log π."""
    made = seen([0.5, 1.0, 3.0])
    value, stats = at(ratio_variance(), made, 0.5)
    assert value.tolist() == pytest.approx([0.125, 0.0, 2.0])
    assert slopes(value, made.now["logp"]) == pytest.approx([-0.25, 0.0, 6.0])
    assert stats["ratio_square"].tolist() == pytest.approx([0.25, 0.0, 4.0])
    assert stats["lambda"].tolist() == [0.5] * 3


def test_it_is_about_one_and_not_about_the_batch_s_mean() -> None:
    """All ratios 2 have no variance about their mean, and a variance of 1 under who acted."""
    value, _ = at(ratio_variance(), seen([2.0, 2.0]), 1.0)
    assert value.tolist() == pytest.approx([1.0, 1.0])
    assert moved(ratio_variance(rate=0.5), seen([2.0, 2.0]), 1.0)[1] == pytest.approx(1 + 0.5 * 0.96)


def test_increases_are_held_more_than_decreases() -> None:
    """Unlike (log ρ)², which is the same for ρ and 1/ρ."""
    value, _ = at(ratio_variance(), seen([2.0, 0.5]), 1.0)
    assert value.tolist() == pytest.approx([1.0, 0.25])


def test_the_brake_turns_into_a_pull_back_where_the_paper_says() -> None:
    """ρ·(A − 2λ(ρ − 1)) is 0 at ρ = 1 + A/2λ: with A = 1 and λ = 2 at 1.25, and farther out for a larger A."""
    for advantage, turns in ((1.0, 1.25), (2.0, 1.5)):
        made = seen([turns - 0.01, turns, turns + 0.01], [advantage] * 3)
        gain = ratio()(made)[0] - at(ratio_variance(), made, 2.0)[0]
        before, there, after = slopes(gain, made.now["logp"])
        assert before > 0 > after
        assert there == pytest.approx(0.0, abs=1e-12)


def test_the_multiplier_by_hand() -> None:
    """It begins at `first`, is used before it moves, rises above the target, falls below it, and never below 0."""
    part = ratio_variance(target=0.1, first=2.0, rate=0.5, most=3.0)
    assert moved(part, seen([1.0, 2.0])) == pytest.approx((2.0, 2.0 + 0.5 * (0.5 - 0.1)))
    assert moved(part, seen([1.0, 1.0]), 1.0) == pytest.approx((1.0, 0.95))
    assert moved(part, seen([1.0, 1.0]), 0.01) == (0.01, 0.0)
    assert moved(part, seen([9.0, 1.0]), 1.0) == (1.0, 3.0)
    assert moved(part.but(rate=0.0), seen([9.0, 1.0])) == (2.0, 2.0)


def test_the_square_does_not_overflow() -> None:
    """A token that became e⁵⁰ times likelier is counted as e²⁰: e¹⁰⁰ would be infinite in float32."""
    made = hand(logp=[-60.0], advantage=[1.0]).with_columns(logp=torch.tensor([-60.0]))
    value, _ = at(ratio_variance(), Batch(made, {"logp": torch.tensor([-10.0], requires_grad=True)}), 50.0)
    assert bool(value.isfinite().all())


def test_on_policy_it_is_reinforce() -> None:
    made = seen([1.0, 1.0, 1.0], [1.0, -3.0, 0.5])
    gain = ratio()(made)[0] - at(ratio_variance(), made, 7.0)[0]
    assert slopes(gain, made.now["logp"]) == slopes(log_likelihood()(made)[0], made.now["logp"])


def slow(made: Experience, lam: float) -> torch.Tensor:
    """−mean over tokens of ρA − λ(ρ − 1)², a decision at a time."""
    table, loss = Slow(), ZERO
    for row in rows_of(made):
        q = (table.logp(row["state"], row["action"]) - row["logp"]).exp()
        loss = loss - (q * row["advantage"] - lam * (q - 1) ** 2) / len(made)
    return table.gradient(loss)


def plain(**settings: Any) -> Any:
    return r2vpo().but(regularise=(ratio_variance(**settings),), update=sgd(lr=0.1, clip=0.0))


@pytest.mark.parametrize("micro", [1, 4, 10**9])
def test_the_gradient_is_the_equation_s_however_it_is_split(micro: int) -> None:
    made = ragged(drift=1.0)
    for each in (made, shuffled(made)):
        assert_same(gradient(plain(first=1.5), each, micro_tokens=micro), slow(made, 1.5))


@pytest.mark.parametrize("micro", [1, 10**9])
def test_the_multiplier_moves_once_a_mini_batch(micro: int) -> None:
    """Three steps on all rows: three moves, each by the variance at the weights before its step."""
    made, policy = ragged(drift=1.0), Tabular()
    taught = learner(policy, plain(target=0.05, first=1.0, rate=0.5), micro_tokens=micro)
    lam = 1.0
    for step in range(3):
        with torch.no_grad():
            gap = (policy.score(made)["logp"] - made["logp"]).exp() - 1
        found = taught.step(made, step)
        assert found["lambda"] == pytest.approx(lam)
        assert found["ratio_square"] == pytest.approx(float((gap**2).mean()))
        lam += 0.5 * (float((gap**2).mean()) - 0.05)
        assert taught.states["ratio_variance"]["lam"] == pytest.approx(lam)


def test_a_step_that_is_not_taken_does_not_move_it() -> None:
    made = ragged(drift=1.0)
    taught = learner(Tabular(), plain())
    taught.step(made, 0)
    before = dict(taught.states["ratio_variance"])
    with pytest.raises(Diverged):
        taught.step(made.with_columns(advantage=made["advantage"] * math.inf), 1)
    assert taught.states["ratio_variance"] == before


def test_others_rows_have_no_say() -> None:
    """A teacher's rows have no `logp`; they neither move λ nor feel it."""
    made = ragged(drift=1.0)
    own = made["group"] != 10
    foreign = made.with_columns(
        source=torch.where(own, 0, 2),
        **{name: made[name].masked_fill(~own, math.nan) for name in ("logp", "advantage")},
    )
    for rows in (foreign, made.take(own)):
        taught = learner(Tabular(), plain())
        taught.step(rows, 0)
        found = taught.states["ratio_variance"]["lam"]
        assert found == pytest.approx(
            moved(
                ratio_variance(),
                Batch(made.take(own), {"logp": Tabular().score(made.take(own))["logp"]}),
            )[1]
        )


STALE = {**SETTINGS, "sample.by": "behind:2", "update.lr": 1e-2, "update.minibatches": 2}


def test_it_is_saved_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """A run without its last checkpoint repeats what it lost, λ included."""
    choices = {"model": "fresh", "steps": 4, "settings": {**STALE, "run.checkpoint_every": 2}}
    whole = bare(tmp_path / "run", "r2vpo", **choices)
    logged = metrics(whole.run)
    assert len({row["lambda"] for row in logged if "lambda" in row}) > 2, "λ moves in this run"
    shutil.rmtree(whole.run / "checkpoints/step-0000004")
    (whole.run / "result.json").unlink()
    assert resume(whole.run).fingerprint == whole.fingerprint
    assert metrics(whole.run) == logged


def test_groups_come_again_with_the_log_probabilities_of_who_acted(tmp_path: Path) -> None:
    settings = {**SETTINGS, "replay.size": 16, "replay.batch": 2, "update.lr": 1e-2, "update.minibatches": 1}
    bare(tmp_path / "run", "r2vpo-replay", model="fresh", steps=3, settings=settings)
    rows = metrics(tmp_path / "run")
    assert rows[0]["ratio_square"] == pytest.approx(0.0, abs=1e-6)
    assert all(row["ratio_square"] > 1e-6 for row in rows[1:]), "what comes again is of who acted then"
    assert r2vpo_replay().replay is not None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"regularise.ratio_variance.target": -0.1}, "at least 0"),
        ({"regularise.ratio_variance.rate": -1.0}, "at least 0"),
        ({"regularise.ratio_variance.first": 60.0}, "would begin above it"),
        ({"regularise.ratio_variance.rate": 0.0, "regularise.ratio_variance.target": 0.1}, "rate is 0"),
        ({"update.minibatches": 1, "regularise.ratio_variance.first": 2.0}, "the ratio stays at 1"),
    ],
)
def test_refusals(settings: dict[str, object], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        pp.plan("r2vpo", "chain", settings=settings)


def test_stale_answers_and_replay_give_it_something_to_do() -> None:
    path = "regularise.ratio_variance.first"
    for name, settings in (("r2vpo", {"sample.by": "behind:10"}), ("r2vpo-replay", {})):
        plan = pp.plan(name, "chain", settings={"update.minibatches": 1, **settings})
        assert path not in dict(inert(plan))
