"""FiberPO: gates by hand, a slow reference through all means, the port's way, and the trust region of APC-Obj."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import (
    Slow,
    Tabular,
    assert_same,
    batch,
    gradient,
    hand,
    ragged,
    rows_of,
    shuffled,
    slopes,
    values_of,
)
from papers import ZERO
from tiny import bare, metrics
from torch import Tensor

import panoply as pp
from panoply.batch import Batch
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.loops.micro_batches import unit_labels
from panoply.methods.objectives.fiberpo import (
    apc_obj,
    budgeted,
    fiberpo,
    fiberpo_domain,
    fibred,
    first_order_gap,
    trust_region_gap,
)
from panoply.slots.surrogate.ratios import log_likelihood
from panoply.slots.update.optimisers import sgd


def seen(logs: Sequence[float], episode: Sequence[int], advantage: float | Sequence[float] = 1.0) -> Batch:
    """Decisions whose log-ratios are `logs`."""
    given = [advantage] * len(logs) if isinstance(advantage, float) else list(advantage)
    made = hand(episode=list(episode), group=[0] * len(logs), logp=[-1.0] * len(logs), advantage=given)
    return batch(made, logp=[-1.0 + v for v in logs])


def logs_of(value: Tensor) -> list[float]:
    return value.detach().log().tolist()


# ------------------------------------------------------------------ two levels


def test_inside_of_its_budgets_it_is_the_ratio() -> None:
    made = seen([0.05, -0.1, 0.02], [0, 0, 1], [2.0, -1.0, 0.5])
    value, stats = fibred()(made)
    plain = (made.now["logp"] - made["logp"]).exp() * made["advantage"]
    assert value.tolist() == pytest.approx(plain.tolist())
    assert slopes(value, made.now["logp"]) == pytest.approx(slopes(plain, made.now["logp"]))
    assert not any(bool(stats[f"gate_{level}"].any()) for level in ("token", "episode"))


def test_both_gates_by_hand() -> None:
    """b = .4 is held at .2; tokens .3 and .5 are −.1 and +.1 beside it, and stay so: .1 and .3."""
    value, stats = fibred()(seen([0.3, 0.5], [0, 0]))
    assert logs_of(value) == pytest.approx([0.1, 0.3])
    assert stats["gate_episode"].tolist() == [True, True]
    assert stats["gate_token"].tolist() == [False, False]
    assert stats["drift_episode"].tolist() == pytest.approx([0.4, 0.4])
    value, stats = fibred()(seen([0.9, -0.9], [0, 0]))
    assert logs_of(value) == pytest.approx([0.2, -0.2]), "b is 0: only tokens are held"
    assert stats["gate_token"].tolist() == [True, True]
    assert stats["gate_episode"].tolist() == [False, False]


def test_what_the_mean_s_gate_holds_does_not_leak_through_the_token_s() -> None:
    """An episode that moved by .4 as a whole: G is e^.2, and with the port's residual e^.4, as if nothing was held."""
    made = seen([0.4, 0.4], [0, 0])
    assert logs_of(fibred()(made)[0]) == pytest.approx([0.2, 0.2])
    assert logs_of(fibred(residual="gated")(made)[0]) == pytest.approx([0.4, 0.4])


def test_a_held_mean_has_no_gradient_and_tokens_move_against_each_other() -> None:
    made = seen([0.3, 0.5], [0, 0])
    found = slopes(fibred()(made)[0], made.now["logp"])
    gates = [math.exp(0.1), math.exp(0.3)]
    assert found == pytest.approx([(gates[0] - gates[1]) / 2, (gates[1] - gates[0]) / 2])
    assert sum(found) == pytest.approx(0.0)


def test_the_mean_is_not_detached() -> None:
    """Tokens beyond their bound, the mean inside: all of the gradient goes through the mean, to both alike."""
    made = seen([0.6, -0.5], [0, 0])
    value, _ = fibred()(made)
    assert slopes(value, made.now["logp"]) == pytest.approx([float(value.detach().sum()) / 2] * 2)


def test_it_holds_for_both_signs() -> None:
    """Unlike PPO's minimum, which lets a negative advantage pull back a ratio that is too high."""
    for sign in (1.0, -1.0):
        made = seen([0.5, 0.5], [0, 0], sign)
        value, _ = fibred()(made)
        assert value.tolist() == pytest.approx([sign * math.exp(0.2)] * 2)
        assert slopes(value, made.now["logp"]) == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize("drift", [0.5, -0.5])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_slope_brings_an_episode_back_whatever_its_advantage(drift: float, advantage: float) -> None:
    """Ascent moves b against its drift; log G is ±.2 less or more κ·.3."""
    made = seen([drift, drift], [0, 0], advantage)
    value, _ = fibred(restore=0.5)(made)
    back = math.copysign(0.2, drift) - 0.5 * advantage * 0.3
    assert (value / advantage).detach().log().tolist() == pytest.approx([back] * 2)
    for slope in slopes(value, made.now["logp"]):
        assert slope * drift < 0


def test_episodes_have_nothing_to_do_with_each_other() -> None:
    """The Jacobian is block diagonal: what one episode does leaves the other's value and gradient alone."""
    made, other = seen([0.3, 0.5, 0.1], [0, 0, 1]), seen([0.3, 0.5, 0.9], [0, 0, 1])
    one, two = fibred()(made)[0], fibred()(other)[0]
    assert one[:2].tolist() == two[:2].tolist()
    assert slopes(one[2:], made.now["logp"])[:2] == [0.0, 0.0]


@pytest.mark.parametrize(
    "part", [fibred(), fibred(group=0.15), budgeted(), fibred(residual="gated")], ids=str
)
def test_on_policy_it_is_reinforce(part: Any) -> None:
    made = seen([0.0] * 4, [0, 0, 1, 1], [1.0, -3.0, 0.5, 0.0])
    expected = slopes(log_likelihood()(made)[0], made.now["logp"])
    assert slopes(part(made)[0], made.now["logp"]) == pytest.approx(expected)


# ------------------------------------------------------------------ hierarchy


def placed(made: Experience) -> Experience:
    """Groups 10 and 11 are one domain, 12 and 13 another."""
    return made.with_columns(domain=made["group"] // 12)


def slow(made: Experience, budgets: dict[str, float], token: float = 0.2, restore: float = 0.0) -> Tensor:
    """−mean over episodes of the mean over tokens of exp(log G)·A, every mean written out."""
    table, rows = Slow(), rows_of(made)
    logs = [table.logp(r["state"], r["action"]) - r["logp"] for r in rows]

    def mean_of(level: str, key: int) -> Tensor:
        found = [v for v, r in zip(logs, rows, strict=True) if r[level] == key]
        return sum(found, ZERO) / len(found)

    loss, episodes = ZERO, values_of(made, "episode")
    for log, row in zip(logs, rows, strict=True):
        total, parent = ZERO, ZERO
        for level, budget in budgets.items():
            mean = mean_of(level, row[level])
            beyond = (mean - parent).abs() - budget
            inside = (mean - parent).clamp(-budget, budget)
            sign = math.copysign(1.0, row["advantage"])
            total = total + inside - (restore * sign * beyond if bool(beyond > 0) else 0.0)
            parent = mean
        gated = (total + (log - parent).clamp(-token, token)).exp()
        length = sum(r["episode"] == row["episode"] for r in rows)
        loss = loss - gated * row["advantage"] / (length * len(episodes))
    return table.gradient(loss)


FOUR = {"domain": 0.02, "group": 0.05, "episode": 0.1}


@pytest.mark.parametrize("restore", [0.0, 0.3])
@pytest.mark.parametrize("levels", [("episode",), ("group", "episode"), ("domain", "group", "episode")])
def test_the_gradient_is_the_equation_s(levels: tuple[str, ...], restore: float) -> None:
    """In any order, in micro-batches of whole episodes, groups or domains."""
    made = placed(ragged(drift=0.6))
    budgets = {level: FOUR[level] for level in levels}
    part = fibred(**budgets, restore=restore)
    _, stats = part(Batch(made, {"logp": Tabular().score(made)["logp"]}))
    for level in (*levels, "token"):
        assert bool(stats[f"gate_{level}"].any()), level
    method = fiberpo().but(surrogate=part, update=sgd(lr=1.0, clip=0.0))
    expected = slow(made, budgets, restore=restore)
    for rows in (made, shuffled(made)):
        for micro in (1, 10**9):
            assert_same(gradient(method, rows, micro_tokens=micro), expected)


def test_nothing_is_cut_that_a_mean_is_of() -> None:
    made = placed(ragged())
    for part, key in ((fibred(), "episode"), (fibred(group=0.1), "group"), (fibred(domain=0.1), "domain")):
        assert len(set(unit_labels(made, [part]).tolist())) == len(values_of(made, key))


def test_a_domain_that_drifts_uses_its_own_budget_alone() -> None:
    """Domain 0 moved by .5 and is held at .1; domain 1 did not move, and its tokens are free."""
    columns = {"episode": [0, 0, 1, 1], "group": [0, 0, 1, 1], "domain": [0, 0, 1, 1]}
    made = hand(logp=[-1.0] * 4, advantage=[1.0] * 4, **columns)
    value, _ = fibred(domain=0.1)(batch(made, logp=[-0.5, -0.5, -1.1, -0.9]))
    assert logs_of(value) == pytest.approx([0.1, 0.1, -0.1, 0.1])


# ------------------------------------------------------------------ the port


def port(logs: list[float], episode: list[int], coarser: list[tuple[list[int], float]]) -> list[float]:
    """By the equations of the port: the episode's bounded mean, means of that, the coarsest and the token's rest."""

    def means(values: list[float], of: list[int], budget: float) -> list[float]:
        found = []
        for key in of:
            inside = [v for v, k in zip(values, of, strict=True) if k == key]
            found.append(max(-budget, min(budget, sum(inside) / len(inside))))
        return found

    near = base = means(logs, episode, 0.2)
    for of, budget in coarser:
        base = means(base, of, budget)
    rest = [max(-0.2, min(0.2, v - n)) for v, n in zip(logs, near, strict=True)]
    return [b + r for b, r in zip(base, rest, strict=True)]


def test_parity_with_the_port() -> None:
    made = placed(ragged(drift=0.6))
    now = Tabular().score(made)["logp"].detach()
    logs = (now - made["logp"]).tolist()
    keys = {key: made[key].tolist() for key in ("episode", "group", "domain")}
    made = made.with_columns(advantage=torch.ones(len(made), dtype=torch.float64))
    for settings, coarser in (
        ({}, []),
        ({"group": 0.15}, [(keys["group"], 0.15)]),
        ({"group": 0.15, "domain": 0.1}, [(keys["group"], 0.15), (keys["domain"], 0.1)]),
    ):
        value, _ = fibred(residual="gated", **settings)(Batch(made, {"logp": now}))
        assert logs_of(value) == pytest.approx(port(logs, keys["episode"], coarser), abs=1e-9)


# ------------------------------------------------------------------ APC-Obj


def ratios(*values: float, advantage: float = 1.0) -> Batch:
    return seen([math.log(v) for v in values], [0] * len(values), advantage)


def test_what_others_have_left_by_hand() -> None:
    """T·δ = .6. Of |ρ − 1| = .5 and .3 they leave .3 and .1 to each other; of .4 and .1 all that they want."""
    made = ratios(1.5, 0.7)
    value, stats = budgeted(budget=0.3)(made)
    assert value.tolist() == pytest.approx([1.3, 0.9])
    assert stats["gate_budget"].tolist() == [True, True]
    value, stats = budgeted(budget=0.3)(ratios(1.4, 0.9))
    assert value.tolist() == pytest.approx([1.4, 0.9])
    assert not bool(stats["gate_budget"].any())
    assert budgeted(budget=0.3)(ratios(3.0, 1.8))[0].tolist() == pytest.approx([1.0, 1.0]), "nothing is left"


def test_gates_of_two_episodes_are_apart() -> None:
    value, _ = budgeted(budget=0.3)(seen([math.log(1.5), math.log(0.7), math.log(1.2)], [0, 0, 1]))
    assert value.tolist() == pytest.approx([1.3, 0.9, 1.2])


def test_what_is_left_is_differentiated() -> None:
    """G₀ = 1 + .6 − |ρ₁ − 1|: its slope is by the other's log-probability, −ρ₁·d|ρ₁ − 1|/dρ₁ = ρ₁ below 1."""
    made = ratios(1.5, 0.7)
    value, _ = budgeted(budget=0.3)(made)
    assert slopes(value[:1], made.now["logp"]) == pytest.approx([0.0, 0.7])


def test_gated_ratios_lie_in_the_trust_region() -> None:
    rng = torch.Generator().manual_seed(3)
    for _ in range(50):
        off = torch.rand(6, generator=rng, dtype=torch.float64) * 3
        value, _ = budgeted(budget=0.2)(ratios(*(off + 0.01).tolist()))
        assert float((value - 1).abs().sum()) <= 6 * 0.2 + 1e-9


def apc_slow(made: Experience, budget: float) -> Tensor:
    table, rows = Slow(), rows_of(made)
    off = [(table.logp(r["state"], r["action"]) - r["logp"]).exp() - 1 for r in rows]
    loss, episodes = ZERO, values_of(made, "episode")
    for i, row in enumerate(rows):
        mates = [j for j, r in enumerate(rows) if r["episode"] == row["episode"]]
        left = len(mates) * budget - sum((off[j].abs() for j in mates if j != i), ZERO)
        left = left if bool(left > 0) else ZERO
        gated = 1 + torch.maximum(torch.minimum(off[i], left), -left)
        loss = loss - gated * row["advantage"] / (len(mates) * len(episodes))
    return table.gradient(loss)


@pytest.mark.parametrize("micro", [1, 10**9])
def test_the_gradient_of_apc_is_the_equation_s(micro: int) -> None:
    made = ragged(drift=0.6)
    method = apc_obj().but(surrogate=budgeted(budget=0.2), update=sgd(lr=1.0, clip=0.0))
    for rows in (made, shuffled(made)):
        assert_same(gradient(method, rows, micro_tokens=micro), apc_slow(made, 0.2))


@pytest.mark.parametrize("measure", [first_order_gap, trust_region_gap])
def test_claims_are_within_their_bounds(measure: Callable[[int], dict[str, float]]) -> None:
    assert measure(7)["gap"] < 1e-6


# ------------------------------------------------------------------ as a user meets it


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        (
            "fiberpo",
            {"surrogate.domain": 0.1},
            "several kinds of problem, as mixed has, and chain has one",
        ),
        (
            "fiberpo-domain",
            {},
            "several kinds of problem, as mixed has, and chain has one",
        ),
        ("fiberpo", {"surrogate.token": 0.0}, "above 0"),
        ("fiberpo", {"surrogate.episode": -0.1}, "above 0"),
        ("fiberpo", {"surrogate.restore": -1.0}, "at least 0"),
        ("fiberpo", {"surrogate.residual": "gated", "surrogate.restore": 0.1}, "no slope back"),
        ("fiberpo", {"update.minibatches": 1, "surrogate.token": 0.3}, "the ratio stays at 1"),
        ("apc-obj", {"update.minibatches": 1, "surrogate.budget": 0.3}, "the ratio stays at 1"),
        ("apc-obj", {"surrogate.budget": 0.0}, "above 0"),
    ],
)
def test_refusals(name: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        pp.plan(name, "chain", settings=settings)


def test_two_kinds_of_problem_learn_together(tmp_path: Path) -> None:
    settings = {
        "world.parts": ("chain:operations=2", "manyanswers"),
        "sample.prompts": 4,
        "sample.group": 4,
        "reward.name": "ended",
        "update.lr": 1e-2,
        "surrogate.domain": 0.01,
        "run.held_out": 4,
    }
    bare(tmp_path / "run", "fiberpo-domain", world="mixed", model="fresh", steps=2, settings=settings)
    rows = metrics(tmp_path / "run")
    assert any(row.get("drift_domain", 0.0) > 0 for row in rows), "answers that end teach something"
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert fiberpo_domain().surrogate.units == {"decision", "episode", "group", "domain"}
