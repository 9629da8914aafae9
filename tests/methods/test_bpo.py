"""BPO and GBPO: values by hand, gradients by plain loops, the median, and the improvement identity on a tabular MDP."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import Slow, Tabular, assert_same, batch, hand, learner, ragged, rows_of, shuffled, slopes
from papers import groups_of, returns_of, standardised

import panoply as pp
from panoply.batch import Batch
from panoply.effects import inert
from panoply.errors import PanoplyError
from panoply.methods.objectives.bpo import bounded_ratio, gbpo, group_bounded_ratio
from panoply.policies.control import ControlPolicy, ValueNet
from panoply.policies.value import ValueModel
from panoply.progress import Progress
from panoply.rollout.text import Collector
from panoply.run import Run
from panoply.slots.loss.values import smooth_pinball
from panoply.slots.reduce.averages import token_mean
from panoply.slots.update.optimisers import sgd
from panoply.worlds.control.mdp import MDP
from panoply.worlds.control.world import Box, Discrete

SHARP = 1e-6


def decided(**columns: Any) -> dict[str, Any]:
    """Four decisions: above the median and below it, with the ratio inside of the band and out of it."""
    return {
        "episode": [0, 1, 2, 3],
        "logp": [-1.0] * 4,
        "advantage": [2.0, -2.0, 1.0, -3.0],
        "target": [5.0, 3.0, 5.0, 3.0],
        "median": [4.0] * 4,
        "value": [4.5] * 4,
        **columns,
    }


def ratios(*values: float) -> list[float]:
    return [-1 + math.log(v) for v in values]


def test_golden() -> None:
    """Aims 1.2, .9, 1.2, .9. Ratios 1 and 1 go there; 1.5 and .5, which PPO would let go, are pulled back."""
    made = batch(hand(**decided()), logp=ratios(1.0, 1.0, 1.5, 0.5))
    value, stats = bounded_ratio(low=0.1, high=0.2, temperature=SHARP)(made)
    assert value.tolist() == pytest.approx([-2 * 0.2, -2 * 0.1, -1 * 0.3, -3 * 0.4])
    assert slopes(value, made.now["logp"]) == pytest.approx([2 * 1.0, -2 * 1.0, -1 * 1.5, 3 * 0.5])
    assert stats["band_high"].tolist() == [False, False, True, False]
    assert stats["band_low"].tolist() == [False, False, False, True]
    assert stats["off_aim"].tolist() == pytest.approx([0.2, 0.1, 0.3, 0.4])


def test_the_aim_goes_softly_from_edge_to_edge() -> None:
    """σ(log 3) = ¾ of the way from .7 to 1.3, and the middle of the band at the median itself."""
    made = batch(hand(**decided(target=[4 + 2 * math.log(3), 4.0, 5.0, 3.0])), logp=ratios(1, 1, 1, 1))
    _, stats = bounded_ratio(low=0.3, high=0.3, temperature=2.0)(made)
    assert stats["off_aim"].tolist()[:2] == pytest.approx([0.15, 0.0])


def test_what_q_is_compared_with() -> None:
    """Q = 4.2 is above the median, 4, and below the mean, 4.5."""
    columns = decided(target=[4.2] * 4)
    now = ratios(1.0, 1.0, 1.0, 1.0)

    def pull(centre: Any, **more: Any) -> float:
        made = batch(hand(**{**columns, **more}), logp=now)
        return slopes(bounded_ratio(temperature=SHARP, centre=centre)(made)[0], made.now["logp"])[0]

    assert pull("median") == pull("auto") == pytest.approx(2.0)
    assert pull("value") == pytest.approx(-2.0)
    without = {k: v for k, v in columns.items() if k != "median"}
    made = batch(hand(**without), logp=now)
    assert slopes(bounded_ratio(temperature=SHARP)(made)[0], made.now["logp"])[0] == pytest.approx(-2.0)


def test_median_and_advantage_are_those_of_each_mini_batch() -> None:
    """Collected with median 4 and V 4.5, the critic says 6 and 1 by now: Q = 5 is below the median, and A is 4.

    `collection` keeps what it said then; a critic that learns on its own has nothing to say now.
    """
    columns, said = decided(), {"median": [6.0] * 4, "value": [1.0] * 4}
    now = ratios(1.0, 1.0, 1.0, 1.0)

    def pulls(**settings: Any) -> list[float]:
        made = batch(hand(**columns), logp=now, **said)
        value, _ = bounded_ratio(temperature=SHARP, low=0.1, high=0.2, **settings)(made)
        assert not value.grad_fn or all(
            g is None
            for g in torch.autograd.grad(
                value.sum(), [made.now["value"], made.now["median"]], allow_unused=True, retain_graph=True
            )
        ), "neither is moved by the policy's loss"
        return slopes(value, made.now["logp"])

    assert pulls() == pytest.approx([-4.0, -2.0, -4.0, -2.0])
    assert pulls(centre="value") == pytest.approx([4.0, 2.0, 4.0, 2.0])
    frozen = [2.0, -2.0, 1.0, -3.0]
    assert pulls(at="collection") == pytest.approx(frozen)
    said = {}
    made = batch(hand(**columns), logp=now)
    assert slopes(bounded_ratio(temperature=SHARP)(made)[0], made.now["logp"]) == pytest.approx(frozen)


def test_a_run_judges_anew_in_every_mini_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of forty updates on one batch the aims of some decisions turn, since the median moves; frozen ones never do."""
    from panoply.methods.objectives import bpo

    seen: list[torch.Tensor] = []
    real = bpo._pulled
    monkeypatch.setattr(
        bpo, "_pulled", lambda b, a, aim, *more: (seen.append(aim), real(b, a, aim, *more))[1]
    )
    turned = {}
    for at in ("now", "collection"):
        seen.clear()
        settings = {
            "sample.envs": 2,
            "sample.length": 32,
            "update.epochs": 40,
            "surrogate.at": at,
            "run.episodes_every": 0,
        }
        pp.train(
            "bpo",
            "cartpole",
            run=tmp_path / at,
            settings=settings,
            steps=1,
            threads=1,
            held_out=2,
            progress=Progress(),
        )
        turned[at] = int((torch.stack(seen[1:40]) != seen[0]).any(0).sum())
    assert turned["collection"] == 0
    assert turned["now"] > 0


def test_advantages_weigh_and_do_not_aim() -> None:
    """Another sign changes nothing, another size the size."""
    now = ratios(1.1, 0.9, 1.5, 0.5)
    first, _ = bounded_ratio()(batch(hand(**decided()), logp=now))
    other, _ = bounded_ratio()(batch(hand(**decided(advantage=[-1.0, 1.0, -0.5, 1.5])), logp=now))
    assert other.tolist() == pytest.approx((first / 2).tolist())


def test_at_ratio_1_the_gradient_is_the_policy_gradient_by_the_median() -> None:
    """|A|·sign(Q − median)·∇log π: where the median is the mean, that is A·∇log π."""
    columns = decided(advantage=[1.0, -1.0, 1.0, -1.0])
    made = batch(hand(**columns), logp=ratios(1, 1, 1, 1))
    assert slopes(bounded_ratio(temperature=SHARP)(made)[0], made.now["logp"]) == columns["advantage"]


# ------------------------------------------------------------------ the theory


def test_the_improvement_identity() -> None:
    """η(π*) = η(π_0) + ε·E_{d_π*, π_0}|Q_0 − μ_0| for π* = (1 + ε·sign(Q_0 − μ_0))·π_0, which the part aims at.

    π_0 is uniform over four actions, so that a half lies above the median and π* is a policy.
    """
    dice, gamma, epsilon, n = np.random.default_rng(0), 0.9, 0.3, 5
    world = MDP(
        dice.dirichlet(np.ones(n), (n, 4)), dice.normal(size=(n, 4, n)), np.full(n, 1 / n), np.zeros(n, bool)
    )
    before = np.full((n, 4), 0.25)
    q = world.evaluate(before, gamma)
    median = np.median(q, -1, keepdims=True)
    best = before * (1 + epsilon * np.sign(q - median))
    assert best.sum(-1) == pytest.approx(np.ones(n))
    gain = world.occupancy(best, gamma).sum(-1, keepdims=True) * before * np.abs(q - median)
    assert world.value(best, gamma) == pytest.approx(world.value(before, gamma) + epsilon * gain.sum())
    assert world.value(best, gamma) > world.value(before, gamma) + 0.1

    flat = {"target": q, "median": np.repeat(median, 4, -1), "advantage": q - q.mean(-1, keepdims=True)}
    columns = {name: torch.as_tensor(column.ravel()) for name, column in flat.items()}
    rows = hand(logp=[math.log(0.25)] * (4 * n), **columns)
    part = bounded_ratio(low=epsilon, high=epsilon, temperature=1e-9)
    there, _ = part(Batch(rows, {"logp": torch.as_tensor(best.ravel()).log()}))
    here, _ = part(Batch(rows, {"logp": rows["logp"]}))
    assert there.abs().max() < 1e-9
    assert here.sum() < -0.1


# ------------------------------------------------------------------ the median


def test_smooth_pinball_golden() -> None:
    """x = 0 gives log 2, with the slope σ(x) − ½ = 0; x = log 3 gives log 4 − ½·log 3, with −(¾ − ½) in u."""
    made = batch(hand(target=[1.0, math.log(3)], episode=[0, 1]), median=[1.0, 0.0])
    value, stats = smooth_pinball()(made)
    assert value.tolist() == pytest.approx([math.log(2), math.log(4) - math.log(3) / 2])
    assert slopes(value, made.now["median"]) == pytest.approx([0.0, -0.25])
    assert stats["above_median"].tolist() == [0, 1]


def test_smooth_pinball_finds_the_median_and_not_the_mean() -> None:
    u = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    rows = hand(target=[0.0, 10.0, 20.0, 30.0, 500.0], episode=[0, 1, 2, 3, 4])
    move = torch.optim.Rprop([u], lr=1.0)
    for _ in range(60):
        move.zero_grad()
        smooth_pinball()(Batch(rows, {"median": u.expand(5)}))[0].mean().backward()
        move.step()
    assert u.item() == pytest.approx(20.0, abs=1e-3)


def test_a_critic_says_both(tiny_collector: Collector, tmp_path: Path) -> None:
    both = ("value", "median")
    control = ValueNet.of(ControlPolicy.fresh(Box((3,)), Discrete(2)), 0, both)
    seen = torch.arange(12.0).view(4, 3)
    found = control.named(seen)
    assert tuple(found) == both
    assert torch.equal(found["value"], control.values(seen))
    assert not torch.equal(found["value"], found["median"])

    text = ValueModel.of(tiny_collector.policy.copy(), both)
    torch.nn.init.normal_(text.head.weight, generator=torch.Generator().manual_seed(0))
    rows = tiny_collector.episodes(tiny_collector.tasks(2), 2)
    with torch.no_grad():
        said = text.score(rows)
        text.save(tmp_path)
        again = ValueModel.load(tmp_path).score(rows)
    assert tuple(said) == tuple(again) == both
    for name in both:
        torch.testing.assert_close(said[name], again[name])


def test_both_outputs_learn_in_a_run(tmp_path: Path) -> None:
    settings = {"sample.envs": 4, "sample.length": 16, "update.epochs": 2}
    done = pp.train(
        "bpo",
        "cartpole",
        run=tmp_path,
        settings=settings,
        steps=3,
        threads=1,
        held_out=2,
        progress=Progress(),
    )
    assert {"smooth_pinball", "squared_value", "band_high", "end_ratio_off"} <= Run.open(done.run).metrics()[
        -1
    ].keys()


# ------------------------------------------------------------------ groups


def test_group_golden() -> None:
    """Returns 0, 1, 3: the median's episode is pulled to the middle of its band, 1.1. Of 0, 1 each is on its side."""
    rows = hand(
        episode=[0, 0, 1, 2, 3, 4],
        group=[7, 7, 7, 7, 8, 8],
        reward=[0.0, 0.0, 1.0, 3.0, 0.0, 1.0],
        advantage=[-1.0, -1.0, -0.5, 2.0, -1.0, 1.0],
        logp=[-1.0] * 6,
    )
    value, stats = group_bounded_ratio(low=0.2, high=0.4)(batch(rows, logp=ratios(*[1.0] * 6)))
    assert stats["off_aim"].tolist() == pytest.approx([0.2, 0.2, 0.1, 0.4, 0.2, 0.4])
    assert value.tolist() == pytest.approx([-0.2, -0.2, -0.05, -0.8, -0.2, -0.4])


def test_the_aim_of_a_group_is_in_deviations_from_its_median() -> None:
    """Returns 0, 2, 4 have the deviation 2: at a temperature of 1 the aims are σ(−1), ½ and σ(1) of the way."""
    rows = hand(
        episode=[0, 1, 2], group=[0] * 3, reward=[0.0, 2.0, 4.0], advantage=[1.0] * 3, logp=[-1.0] * 3
    )
    _, stats = group_bounded_ratio(low=0.5, high=0.5, temperature=1.0)(batch(rows, logp=ratios(1, 1, 1)))
    away = 1 / (1 + math.exp(-1)) - 0.5
    assert stats["off_aim"].tolist() == pytest.approx([away, 0.0, away], abs=1e-5)


def test_the_majority_of_a_binary_group_is_pulled_to_the_middle() -> None:
    rows = hand(
        episode=[0, 1, 2],
        group=[0, 0, 0],
        reward=[1.0, 0.0, 0.0],
        advantage=[1.0, -1.0, -1.0],
        logp=[-1.0] * 3,
    )
    _, stats = group_bounded_ratio()(batch(rows, logp=ratios(1.2, 1.2, 1.0)))
    assert stats["off_aim"].tolist() == pytest.approx([0.1, 0.2, 0.0])


def test_an_undecided_group_pulls_nowhere() -> None:
    rows = hand(
        episode=[0, 1, 2], group=[0, 0, 1], reward=[1.0, 1.0, 1.0], advantage=[0.0, 0.0, 0.0], logp=[-1.0] * 3
    )
    made = batch(rows, logp=ratios(1.2, 1.2, 1.0))
    value, _ = group_bounded_ratio()(made)
    assert value.tolist() == [0.0] * 3
    assert slopes(value, made.now["logp"]) == [0.0] * 3


def slow_gradient(low: float, high: float, temperature: float) -> torch.Tensor:
    """Over groups, episodes and decisions, one at a time."""
    made, slow = ragged(), Slow()
    returns, advantage = returns_of(made), standardised(made, 1e-6)
    loss, count = torch.zeros((), dtype=torch.float64), len(made)
    for members in groups_of(made):
        inside = [returns[e] for e in members]
        deviation = statistics.stdev(inside) if len(inside) > 1 else 0.0
        for e in members:
            above = (returns[e] - statistics.median(inside)) / ((deviation + 1e-6) * temperature)
            aim = 1 - low + (low + high) / (1 + math.exp(-above))
            for r in rows_of(made, episode=e):
                ratio = (slow.logp(r["state"], r["action"]) - r["logp"]).exp()
                loss = loss + abs(advantage[e]) * (ratio - aim).abs() / count
    return slow.gradient(loss)


@pytest.mark.parametrize("micro", [1, 5, 100])
def test_the_gradient_is_the_equations_however_the_batch_is_split(micro: int) -> None:
    """Groups are never cut: the median is always that of the whole one."""
    made = ragged()
    advantage = standardised(made, 1e-6)
    rows = made.with_columns(
        advantage=torch.tensor([advantage[e] for e in made["episode"].tolist()]).double()
    )
    part = group_bounded_ratio(low=0.2, high=0.3, temperature=0.5)
    method = gbpo().but(surrogate=part, regularise=(), reduce=token_mean(), update=sgd(lr=1.0))
    expected = slow_gradient(0.2, 0.3, 0.5)
    for each in (rows, shuffled(rows)):
        assert_same(learner(Tabular(), method, micro_tokens=micro).gradient(each)["logits"], expected)


def test_minibatches_keep_groups_whole() -> None:
    method = gbpo().but(update=sgd(lr=0.1, minibatches=3))
    parts = list(learner(Tabular(), method).minibatches(ragged(), torch.Generator().manual_seed(0)))
    assert len(parts) == 3
    assert sum(len(set(p["group"].tolist())) for p in parts) == 4


# ------------------------------------------------------------------ as a diff


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr-grpo", "rloo"])
def test_it_can_be_borrowed_by_methods_of_groups(name: str) -> None:
    assert pp.plan(name, "chain", surrogate="gbpo").method.surrogate.info.name == "group_bounded_ratio"


def test_borrowed_by_ppo_it_says_what_stands_in_for_the_median() -> None:
    for world in ("cartpole", "chain"):
        assert "V stands in for it" in dict(inert(pp.plan("ppo", world, surrogate="bpo")))["surrogate.centre"]
        assert "surrogate.centre" not in dict(inert(pp.plan("ppo", world, surrogate="bpo", models="bpo")))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(PanoplyError, match="every group is one episode"):
        pp.plan("ppo", "cartpole", surrogate="gbpo")
    with pytest.raises(
        PanoplyError, match="needs the column 'target', which credit.archer/q_minus_v or credit.gae or"
    ):
        pp.plan("grpo", "chain", surrogate="bpo")
    with pytest.raises(PanoplyError, match="needs the column 'median', which model.bpo/median_critic gives"):
        pp.plan("ppo", "chain", surrogate="bpo", settings={"surrogate.centre": "median"})
    with pytest.raises(PanoplyError, match="low must be from 0 up to 1, not 1"):
        pp.plan("bpo", "cartpole", settings={"surrogate.low": "1"})


@pytest.mark.learn
@pytest.mark.parametrize(("name", "world", "least"), [("bpo", "cartpole", 400.0), ("gbpo", "chain", 0.7)])
def test_it_learns(name: str, world: str, least: float, tmp_path: Path) -> None:
    done = pp.train(name, world, run=tmp_path / "run", threads=1, progress=Progress())
    assert done.after["sampled"] > least
