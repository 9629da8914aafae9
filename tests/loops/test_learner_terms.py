"""Terms together: streams, numbers of the whole mini-batch, weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from kit import (
    Slow,
    Tabular,
    assert_same,
    dataset,
    gradient,
    learner,
    on_policy,
    ragged,
    rows_of,
    shuffled,
)
from toys import toy_prepared

from panoply.batch import Batch, Values
from panoply.errors import PanoplyError
from panoply.experience import Experience, Table
from panoply.loops.mover import Diverged
from panoply.parts import Part, part
from panoply.slots.loss.imitation import nll
from panoply.slots.reduce.averages import sequence_mean, sequence_sum, token_mean
from panoply.slots.regularise.terms import kl
from panoply.slots.schedule.schedules import linear
from panoply.slots.surrogate.ratios import clip, log_likelihood

ZERO = torch.zeros((), dtype=torch.float64)


# ------------------------------------------------------------------ streams


@part("regularise", stream="imitation", equation="−log π")
def toy_imitation(batch: Batch, *, weight: float | Part = 1.0) -> Values:
    return -batch.now["logp"], {"seen": torch.ones(len(batch.experience))}


@part("regularise", stream="imitation", unit="episode", equation="(log π)²")
def toy_imitation_episode(batch: Batch, *, weight: float | Part = 1.0) -> Values:
    return batch.by("episode").sum(batch.now["logp"]) ** 2, {}


def mixed() -> tuple[Experience, Experience, Experience]:
    """Own and foreign rows in one table. Foreign rows have no log-probability and no advantage."""
    made = ragged()
    foreign = (made["group"] == 11) | (made["episode"] == 107)
    holes = {n: made[n].masked_fill(foreign, math.nan) for n in ("logp", "advantage", "logp@reference")}
    both = made.with_columns(source=torch.where(foreign, 2, 0), **holes)
    return both, both.take(~foreign), both.take(foreign)


@pytest.mark.parametrize("toy", [toy_imitation, toy_imitation_episode])
@pytest.mark.parametrize("reduce", [token_mean(), sequence_mean(), sequence_sum()], ids=str)
@pytest.mark.parametrize("surrogate", [clip(), log_likelihood()], ids=["clip", "log_likelihood"])
def test_streams_are_normalised_apart(toy: Callable[..., Part], reduce: Part, surrogate: Part) -> None:
    """The gradient of the mix is the sum of the gradients of each stream alone, under any split."""
    both, own, foreign = mixed()
    term = toy(weight=0.3)
    method = on_policy(surrogate=surrogate, regularise=(kl(), term), reduce=reduce)
    alone = gradient(method.but(regularise=(kl(),)), own) + gradient(method.but(regularise=(term,)), foreign)
    for micro_tokens in (10**9, 6, 1):
        assert_same(gradient(method, both, micro_tokens=micro_tokens), alone)
        assert_same(gradient(method, shuffled(both), micro_tokens=micro_tokens), alone)


def test_statistics_are_of_the_stream() -> None:
    both, own, foreign = mixed()
    method = on_policy(surrogate=clip(), regularise=(toy_imitation(),))
    metrics = learner(Tabular(), method).step(both, 0)
    alone = learner(Tabular(), method).step(own, 0)
    assert metrics["seen"] == 1.0
    for name in ("ratio_max", "logp_gap", "clip_high", "kl_behaviour", "clip"):
        assert metrics[name] == pytest.approx(alone[name]), name
    assert len(foreign) > 0


# ------------------------------------------------------------------ prepare, weights


def test_prepare_sees_the_whole_minibatch() -> None:
    seen: list[Mapping[str, Any]] = []

    @part("loss", prepare=lambda batch: {"mean": batch.now["logp"].mean(), "rows": len(batch.experience)})
    def toy_watching(batch: Batch) -> Values:
        seen.append(batch.prepared["toy_watching"])
        return (batch.now["logp"] - batch.prepared["toy_watching"]["mean"]) ** 2, {}

    made = shuffled(ragged())
    policy = Tabular()
    expected = float(policy.score(made)["logp"].detach().mean())
    for micro_tokens in (10**9, 4):
        seen.clear()
        policy.scored.clear()
        learner(policy, dataset(toy_watching()), micro_tokens=micro_tokens).gradient(made)
        assert {(x["rows"], round(float(x["mean"]), 12)) for x in seen} == {(len(made), round(expected, 12))}
        assert not seen[0]["mean"].requires_grad
        assert sum(policy.scored) == 2 * len(made), "one more forward pass"
        assert max(policy.scored) <= max(5, micro_tokens), "no more rows at once than elsewhere"


def test_prepare_gradient() -> None:
    made, slow = ragged(), Slow()
    every = [slow.logp(r["state"], r["action"]) for r in rows_of(made)]
    mean = sum(float(x.detach()) for x in every) / len(every)
    loss = sum(((x - mean) ** 2 for x in every), ZERO) / len(every)
    assert_same(gradient(dataset(toy_prepared()), made, micro_tokens=3), slow.gradient(loss))


def _counted(state: dict[str, Any], batch: Batch, weight: float, broken: bool) -> tuple[Any, Any]:
    """How many mini-batches there were, and a running mean of log π: a number and a tensor."""
    mean = (state["mean"] * state["count"] + batch.now["logp"].mean()) / (state["count"] + 1)
    state["mean"], state["count"] = (
        mean,
        state["count"] + 1,
    )  # in place, which must not count before the weights move
    return state, {"mean": mean}


@part("loss", state=lambda: {"count": 0, "mean": torch.zeros(()).double()}, prepare=_counted)
def toy_remembering(batch: Batch, *, weight: float = 1.0, broken: bool = False) -> Values:
    """Squared distance to the mean of all mini-batches so far."""
    return (math.nan if broken else 1.0) * (
        batch.now["logp"] - batch.prepared["toy_remembering"]["mean"]
    ) ** 2, {}


class TestRemembering:
    def test_once_a_minibatch_however_it_is_split(self) -> None:
        ends = []
        for micro_tokens in (10**9, 6, 1):
            policy = Tabular()
            made = learner(policy, dataset(toy_remembering()), micro_tokens=micro_tokens)
            for step in range(3):
                made.step(shuffled(ragged()), step)
            assert made.states["toy_remembering"]["count"] == 3
            ends.append((policy.logits.detach().clone(), made.states["toy_remembering"]["mean"]))
        for logits, mean in ends[1:]:
            assert_same(logits, ends[0][0])
            assert_same(mean, ends[0][1])

    def test_it_is_remembered_when_the_weights_have_moved(self) -> None:
        made = learner(Tabular(), dataset(toy_remembering(broken=True)))
        made.gradient(ragged())
        with pytest.raises(Diverged):
            made.step(ragged(), 0)
        assert made.states["toy_remembering"] == {"count": 0, "mean": torch.zeros(())}

    def test_it_is_saved_and_comes_back(self) -> None:
        policy, again = Tabular(), Tabular()
        made, resumed = (learner(p, dataset(toy_remembering())) for p in (policy, again))
        made.step(ragged(), 0)
        with torch.no_grad():
            again.logits.copy_(policy.logits)
        resumed.load_state(made.state())
        assert resumed.states == made.states
        for one in (made, resumed):
            one.step(ragged(), 1)
        assert torch.equal(again.logits, policy.logits)
        assert type(resumed.states["toy_remembering"]["count"]) is int

    def test_a_state_of_something_else_is_refused(self) -> None:
        made = learner(Tabular(), dataset(toy_remembering()))
        with pytest.raises(PanoplyError, match="count of toy_remembering is 0 at first, and cannot be 'x'"):
            made.load_state({"term:toy_remembering:": torch.tensor(list(b'{"count": "x"}')).byte()})
        with pytest.raises(PanoplyError, match="lacks a state of toy_remembering"):
            made.load_state({})


def test_a_weight_may_follow_a_schedule() -> None:
    made = ragged()
    parts = {w: on_policy(regularise=(kl(weight=w),)) for w in (1.0, 0.5)}
    scheduled = learner(Tabular(), on_policy(regularise=(kl(weight=linear()),)), steps=10)
    plain = gradient(on_policy(), made)
    assert_same(scheduled.gradient(made, 0)["logits"], gradient(parts[1.0], made), rel=1e-12)
    assert_same(scheduled.gradient(made, 5)["logits"], gradient(parts[0.5], made), rel=1e-12)
    assert_same(scheduled.gradient(made, 10)["logits"], plain, rel=1e-12)


def test_a_term_without_weight_costs_nothing() -> None:
    made = ragged().take(torch.arange(9))
    without = Experience(
        Table({k: c for k, c in made.decisions.items() if k != "logp@reference"}), made.context
    )
    policy = Tabular()
    found = learner(policy, on_policy(regularise=(kl(weight=0.0),))).gradient(without)["logits"]
    assert_same(found, gradient(on_policy(), made), rel=1e-12)
    policy.scored.clear()
    learner(policy, dataset(nll(), toy_prepared(weight=0.0))).gradient(made)
    assert policy.scored == [9], "its prepare step is not run"
