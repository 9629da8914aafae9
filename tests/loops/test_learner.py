"""The learner: its gradient against slow references, and in the on-policy limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import (
    Slow,
    Tabular,
    assert_same,
    dataset,
    gradient,
    on_policy,
    ragged,
    rows_of,
    values_of,
)
from torch import Tensor
from toys import PAIRS, with_pairs

from panoply.experience import Experience
from panoply.parts import Part
from panoply.slots.loss.imitation import nll
from panoply.slots.loss.pairs import logistic
from panoply.slots.reduce.averages import constant, sequence_mean, sequence_sum, token_mean
from panoply.slots.regularise.terms import entropy, kl
from panoply.slots.surrogate.ratios import clip, log_likelihood, ratio

ZERO = torch.zeros((), dtype=torch.float64)


# ------------------------------------------------------------------ against slow references


def per_episode_mean(experience: Experience, value: Callable[[dict[str, Any]], Tensor]) -> Tensor:
    """(1/E) Σ_e (1/|e|) Σ_t value, as GRPO writes it."""
    total = ZERO
    episodes = values_of(experience, "episode")
    for episode in episodes:
        rows = rows_of(experience, episode=episode)
        inner = ZERO
        for row in rows:
            inner = inner + value(row)
        total = total + inner / len(rows)
    return total / len(episodes)


def slow_clip(
    row: dict[str, Any], logp: Tensor, low: float, high: float, kind: str, dual: float | None
) -> Tensor:
    rho, a = (logp - row["logp"]).exp(), row["advantage"]
    size = float(rho.detach())
    inside = 1 - low <= size <= 1 + high
    bounded = rho if inside else torch.tensor(1 - low if size < 1 else 1 + high, dtype=torch.float64)
    if kind == "mask":
        return rho * a if inside else ZERO
    if kind == "truncate":
        return bounded.detach() * a * logp
    value = torch.minimum(rho * a, bounded * a) if not inside else rho * a
    if dual is not None and a < 0 and size > dual:
        return torch.tensor(dual * a, dtype=torch.float64)
    return value


@pytest.mark.parametrize("kind", ["min", "mask", "truncate"])
@pytest.mark.parametrize("dual", [None, 1.25])
def test_clip_gradient(kind: str, dual: float | None) -> None:
    made, slow = ragged(drift=0.5), Slow()
    dual = dual if kind == "min" else None
    term = clip(low=0.2, high=0.15, kind=kind, dual=dual)
    objective = per_episode_mean(
        made, lambda r: slow_clip(r, slow.logp(r["state"], r["action"]), 0.2, 0.15, kind, dual)
    )
    assert_same(gradient(on_policy(surrogate=term, reduce=sequence_mean()), made), slow.gradient(-objective))


@pytest.mark.parametrize(
    ("surrogate", "value"),
    [
        (log_likelihood(), lambda r, logp: r["advantage"] * logp),
        (ratio(), lambda r, logp: (logp - r["logp"]).exp() * r["advantage"]),
    ],
    ids=["log_likelihood", "ratio"],
)
def test_surrogate_gradient(surrogate: Part, value: Callable[[dict[str, Any], Tensor], Tensor]) -> None:
    made, slow = ragged(), Slow()
    objective = per_episode_mean(made, lambda r: value(r, slow.logp(r["state"], r["action"])))
    assert_same(
        gradient(on_policy(surrogate=surrogate, reduce=sequence_mean()), made), slow.gradient(-objective)
    )


@pytest.mark.parametrize(
    "reduce", [token_mean(), sequence_mean(), sequence_sum(), constant(length=3)], ids=str
)
def test_reduce_gradient(reduce: Part) -> None:
    """Each average as its equation says, written with plain loops."""
    made, slow = ragged(), Slow()
    episodes = [rows_of(made, episode=e) for e in values_of(made, "episode")]
    objective = ZERO
    for rows in episodes:
        for row in rows:
            share = {
                "token_mean": 1 / len(made),
                "sequence_mean": 1 / (len(episodes) * len(rows)),
                "sequence_sum": 1 / len(episodes),
                "constant": 1 / (len(episodes) * 3),
            }[reduce.info.name]
            objective = objective + share * row["advantage"] * slow.logp(row["state"], row["action"])
    assert_same(gradient(on_policy(reduce=reduce), made), slow.gradient(-objective))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("descends", [None, "reverse", "forward"])
def test_kl_gradient(estimator: str, descends: str | None) -> None:
    made, slow = ragged(), Slow()
    forward = (descends or {"k1": "reverse", "k2": "reverse", "k3": "forward"}[estimator]) == "forward"

    def pull(row: dict[str, Any]) -> Tensor:
        logp = slow.logp(row["state"], row["action"])
        l = float(logp.detach()) - row["logp@reference"]  # noqa: E741
        return (1 - math.exp(-l) if forward else l) * logp

    method = on_policy(
        regularise=(kl(weight=0.7, estimator=estimator, descends=descends),), reduce=sequence_mean()
    )
    loss = 0.7 * per_episode_mean(made, pull) - per_episode_mean(
        made, lambda r: r["advantage"] * slow.logp(r["state"], r["action"])
    )
    assert_same(gradient(method, made), slow.gradient(loss))


def test_entropy_gradient() -> None:
    made, slow = ragged(), Slow()
    loss = per_episode_mean(
        made,
        lambda r: -r["advantage"] * slow.logp(r["state"], r["action"]) - 0.3 * slow.entropy(r["state"]),
    )
    method = on_policy(regularise=(entropy(weight=0.3),), reduce=sequence_mean())
    assert_same(gradient(method, made), slow.gradient(loss))


def test_nll_gradient() -> None:
    made, slow = ragged(), Slow()
    loss = per_episode_mean(made, lambda r: -slow.logp(r["state"], r["action"]))
    assert_same(gradient(dataset(nll(), reduce=sequence_mean()), made), slow.gradient(loss))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_logistic_gradient(smoothing: float) -> None:
    made, slow = with_pairs(ragged()), Slow()

    def l(episode: int) -> Tensor:  # noqa: E743
        total = ZERO
        for row in rows_of(made, episode=episode):
            total = total + slow.logp(row["state"], row["action"]) - row["logp@reference"]
        return total

    loss = ZERO
    for chosen, rejected in PAIRS:
        p = 1 / (1 + (-0.5 * (l(chosen) - l(rejected))).exp())
        loss = loss - ((1 - smoothing) * p.log() + smoothing * (1 - p).log()) / len(PAIRS)
    assert_same(gradient(dataset(logistic(beta=0.5, smoothing=smoothing)), made), slow.gradient(loss))


# ------------------------------------------------------------------ the on-policy limit


@pytest.mark.parametrize(
    "surrogate",
    [
        ratio(),
        clip(),
        clip(kind="mask"),
        clip(kind="truncate"),
        clip(dual=3.0),
        clip(against="old"),
        ratio(against="old"),
    ],
    ids=str,
)
def test_at_ratio_one_everything_is_reinforce(surrogate: Part) -> None:
    made = ragged()
    logp = Tabular().score(made)["logp"].detach()
    made = made.with_columns(**{"logp": logp, "logp@old": logp})
    for reduce in (token_mean(), sequence_mean()):
        expected = gradient(on_policy(surrogate=log_likelihood(), reduce=reduce), made)
        assert_same(gradient(on_policy(surrogate=surrogate, reduce=reduce), made), expected, rel=1e-12)


def test_at_the_reference_kl_has_no_gradient() -> None:
    made = ragged()
    made = made.with_columns(**{"logp@reference": Tabular().score(made)["logp"].detach()})
    for estimator in ("k1", "k2", "k3"):
        method = on_policy(regularise=(kl(weight=1.0, estimator=estimator),))
        assert_same(gradient(method, made), gradient(on_policy(), made), rel=1e-12)
