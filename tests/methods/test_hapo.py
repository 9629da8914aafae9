"""HAPO: uncertainty has a sign, temperatures are those drawn at, tokens are averaged, and bounds follow."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kit import Slow, Tabular, assert_same, batch, gradient, hand, learner, ragged, rows_of, shuffled, slopes
from papers import ZERO, groups_of, returns_of
from torch import Tensor

import panoply as pp
from panoply.effects import inert
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.base.grpo import grpo
from panoply.methods.objectives.hapo import (
    hapo,
    heat,
    heated,
    standards,
    token_average,
    uncertain_clip,
    uncertainties,
    uncertainty,
)
from panoply.rollout.text import Collector
from panoply.slots.credit.groups import group
from panoply.slots.update.optimisers import sgd

LOGS = (-4.0, -3.0, -2.0, -1.0, 0.0, 1.0)
"""Of entropies: the quantile 0.8 of six is the fifth, 0, from which the mean square is (16 + 9 + 4 + 1 + 0 + 1)/6."""


def entropies(logs: tuple[float, ...] = LOGS) -> Tensor:
    return torch.tensor(logs, dtype=torch.float64).exp()


def test_standards_by_hand() -> None:
    found, spread = standards(entropies(), 0.8), math.sqrt(31 / 6)
    assert found == pytest.approx({"centre": 0.0, "spread": spread, "above": 1 / spread, "below": 4 / spread})
    assert standards(entropies(), 0.0)["centre"] == pytest.approx(-4.0)
    assert standards(entropies(), 0.5)["centre"] == pytest.approx(-2.0), "the nearest; of two the even one"


def test_uncertainty_has_a_sign() -> None:
    """The surest is −1, the pivot 0 and the most uncertain 1; the released code makes all of them positive."""
    by = standards(entropies(), 0.8)
    assert uncertainties(entropies(), by, True).tolist() == pytest.approx([-1, -0.75, -0.5, -0.25, 0, 1])
    assert uncertainties(entropies(), by, False).tolist() == pytest.approx([1, 0.75, 0.5, 0.25, 0, 1])
    made = hand(entropy=entropies())
    assert uncertainty()(made)["uncertainty"].min() == pytest.approx(-1)
    assert uncertainty(signed=False)(made)["uncertainty"].min() == 0


def test_entropies_that_are_all_the_same_are_the_pivot() -> None:
    for value in (0.0, 0.7):
        found = uncertainty()(hand(entropy=torch.full((5,), value)))["uncertainty"]
        assert found.tolist() == [0.0] * 5


def released(entropy: Tensor, pivot: float) -> Tensor:
    """ĥ by the equations of compute_entropy_h, in which neg_min is below 0."""
    x = entropy.clamp(min=1e-8).log()
    h = x - torch.quantile(x, pivot, interpolation="nearest")
    h = h / (h**2).mean().clamp(min=1e-8).sqrt()
    most, least = h.clamp(min=0).max().clamp(min=1e-8), h.clamp(max=0).min().clamp(max=-1e-8)
    return torch.where(h > 0, h / most, h / least)


@pytest.mark.parametrize("pivot", [0.3, 0.8])
def test_unsigned_it_is_the_released_codes(pivot: float) -> None:
    entropy = torch.rand(201, generator=torch.Generator().manual_seed(1), dtype=torch.float64) ** 4
    found = uncertainty(pivot=pivot, signed=False)(hand(entropy=entropy))["uncertainty"]
    assert found.tolist() == pytest.approx(released(entropy, pivot).tolist(), abs=1e-9)
    assert bool((found >= 0).all())


# ------------------------------------------------------------------ credit


def answers(*asked: list[tuple[float, int]]) -> Experience:
    rows = [(g, r, n) for g, of in enumerate(asked) for r, n in of]
    columns: dict[str, list[Any]] = {"group": [], "episode": [], "reward": []}
    for e, (g, r, n) in enumerate(rows):
        for t in range(n):
            columns["group"].append(g)
            columns["episode"].append(e)
            columns["reward"].append(r if t == n - 1 else 0.0)
    return hand(**columns)


def test_averages_are_over_tokens_by_hand() -> None:
    """1 of 1 token and 0 of 3: the mean is 1/4, the deviation √3/4, and over tokens advantages sum to 0."""
    found = token_average(epsilon=0.0)(answers([(1.0, 1), (0.0, 3)]))
    assert found.tolist() == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3])
    assert float(found.sum()) == pytest.approx(0, abs=1e-6)


def test_a_group_that_stands_out_is_compared_by_answers() -> None:
    """1 of 1 token and 0 of 29 is √29 = 5.4 deviations above; the group beside it keeps its tokens' mean."""
    odd, plain = [(1.0, 1), (0.0, 29)], [(1.0, 1), (0.0, 3)]
    made = answers(odd, plain)
    found = token_average(epsilon=1e-6)(made)
    assert found[:30].tolist() == pytest.approx(group(epsilon=1e-6)(answers(odd)).tolist())
    assert found[30:].tolist() == pytest.approx(token_average(epsilon=1e-6)(answers(plain)).tolist())
    assert float(token_average(limit=6.0)(made)[0]) == pytest.approx(math.sqrt(29), rel=1e-4)


def test_credit_is_the_released_codes() -> None:
    """Reward and length of every answer, the population's deviation over tokens; where one is at 5, GRPO's."""
    dice = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 60, (20, 4), generator=dice).tolist()
    rewards = torch.randint(0, 2, (20, 4), generator=dice).float().tolist()
    expected: list[float] = []
    odd = 0
    for r, n in zip(rewards, lengths, strict=True):
        tokens = [x for x, times in zip(r, n, strict=True) for _ in range(times)]
        mean, std = statistics.fmean(tokens), statistics.pstdev(tokens)
        advantage = [(x - mean) / (std + 1e-6) for x in r]
        if max(map(abs, advantage)) >= 5:
            odd += 1
            advantage = [(x - statistics.fmean(r)) / (statistics.stdev(r) + 1e-6) for x in r]
        expected += advantage
    made = answers(*([*zip(r, n, strict=True)] for r, n in zip(rewards, lengths, strict=True)))
    assert odd
    found = made.by("episode").first(token_average()(made))
    assert found.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


# ------------------------------------------------------------------ surrogate


def clipped(ratio: float, h: float, advantage: float, **settings: Any) -> tuple[float, float]:
    """Value and slope of one decision."""
    made = hand(logp=[0.0], advantage=[advantage], uncertainty=[h])
    seen = batch(made, logp=[math.log(ratio)])
    value, _ = uncertain_clip(**settings)(seen)
    return float(value.detach()[0]), slopes(value, seen.now["logp"])[0]


@pytest.mark.parametrize(
    ("ratio", "h", "advantage", "value", "slope"),
    [
        (1.0, 1.0, 2.0, 2.0, 2.0),  # uncertain and still: as it is
        (1.3, 1.0, 2.0, 1.3 * 4, 1.3 * 4),  # out of the inner half (1.2), within 1.4: doubled
        (1.5, 1.0, 2.0, 1.4 * 4, 0.0),  # above 1 + 0.2·2
        (1.15, 0.0, 2.0, 1.15 * 2, 1.15 * 2),  # the pivot: nothing changes
        (1.25, 0.0, 2.0, 1.2 * 2, 0.0),
        (1.0, -1.0, 2.0, 0.0, 0.0),  # sure and still: nothing is left
        (1.0, -0.5, 2.0, 1.0, 1.0),
        (1.15, -0.5, 2.0, 1.15 * 2, 1.15 * 2),  # sure and moving: as it is
        (0.7, -1.0, -2.0, 0.7 * -2, 0.7 * -2),  # may fall to 0.6
        (0.5, -1.0, -2.0, 0.6 * -2, 0.0),
        (0.7, 1.0, -2.0, 0.8 * -4, 0.0),  # uncertain ones no further than 0.8
        (30.0, 0.0, -2.0, -20.0, 0.0),  # the floor of 10·A
    ],
)
def test_values_by_hand(ratio: float, h: float, advantage: float, value: float, slope: float) -> None:
    assert clipped(ratio, h, advantage) == (pytest.approx(value), pytest.approx(slope))


def test_without_alpha_and_beta_it_is_the_plain_clip() -> None:
    assert clipped(1.3, 1.0, 2.0, alpha=0.0, beta=0.0) == (pytest.approx(2.4), 0.0)
    assert clipped(1.3, 1.0, 2.0, alpha=0.0) == (pytest.approx(4.8), 0.0)
    assert clipped(1.3, 1.0, 2.0, beta=0.0) == (pytest.approx(2.6), pytest.approx(2.6))


def judged() -> Experience:
    """Random experience whose tokens were drawn with other entropies than the policy has now."""
    made = ragged(drift=0.5)
    dice = torch.Generator().manual_seed(2)
    entropy = torch.rand(len(made), generator=dice, dtype=torch.float64)
    return uncertainty(pivot=0.5)(made.with_columns(entropy=entropy))


@pytest.mark.parametrize("micro", [1, 4, 10**9])
def test_gradient_is_the_papers_in_any_order_and_split(micro: int) -> None:
    method, made = hapo().but(update=sgd(lr=1.0, clip=0.0)), judged()
    credited = made.with_columns(advantage=method.credit(made))
    returns, slow, loss = returns_of(made), Slow(), ZERO
    changed = set()
    for members in groups_of(made):
        tokens = [returns[e] for e in members for _ in rows_of(made, episode=e)]
        mean, std = statistics.fmean(tokens), statistics.pstdev(tokens)
        for e in members:
            for row in rows_of(made, episode=e):
                a, h = (returns[e] - mean) / (std + 1e-6) if std else 0.0, row["uncertainty"]
                ratio = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
                low = 0.2 * (1 - h) if h <= 0 else 0.2
                high = 0.2 * (1 + h) if h > 0 else 0.2
                inside = 1 - low / 2 < float(ratio.detach()) < 1 + high / 2
                if (h > 0 and not inside) or (h <= 0 and inside):
                    a = a * (1 + h)
                changed.add((h > 0, inside))
                value = torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
                loss = loss - (torch.maximum(value, torch.tensor(10.0 * a)) if a < 0 else value) / len(made)
    assert len(changed) == 4, "all four branches are taken"
    expected = slow.gradient(loss)
    for each in (credited, shuffled(credited)):
        assert_same(gradient(method, each, micro_tokens=micro), expected)


def test_at_ratio_one_sure_tokens_are_damped_and_others_are_reinforces() -> None:
    made = judged()
    with torch.no_grad():
        made = made.with_columns(logp=Tabular().score(made)["logp"])
    slow, loss = Slow(), ZERO
    for row in rows_of(made):
        factor = 1 + min(row["uncertainty"], 0.0)
        loss = loss - factor * row["advantage"] * slow.logp(row["state"], row["action"]) / len(made)
    method = hapo().but(update=sgd(lr=1.0, clip=0.0))
    assert_same(learner(Tabular(), method).gradient(made)["logits"], slow.gradient(loss))


# ------------------------------------------------------------------ temperature


def test_heat_by_hand() -> None:
    """Two equal logits have the entropy log 2, four log 4: with the pivot at log 2 and log 4 the end, 1 and 1 + τ."""
    logits = torch.tensor([[0.0, 0.0, -99.0, -99.0], [0.0] * 4, [9.0, 0.0, 0.0, 0.0]])
    by = standards(torch.tensor([0.5, math.log(2), math.log(4)], dtype=torch.float64), 0.5)
    assert heat(logits, by, 1.0, 0.05, True).tolist() == pytest.approx([1.0, 1.05, 0.95])
    assert heat(logits, by, 1.0, 0.05, False).tolist() == pytest.approx([1.0, 1.05, 1.05])


def test_tokens_are_drawn_at_what_their_own_entropy_says(tiny_collector: Collector) -> None:
    """The policy scored again, without temperatures, gives the entropies that the factors were made of."""
    collect = tiny_collector
    by = standards(torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64), 0.5)

    def hot(logits: Tensor) -> Tensor:
        return heat(logits, by, 1.0, 0.5, True)

    with collect.heated(hot):
        made = collect.episodes(collect.tasks(2), 3, temperature=0.8)
    with torch.no_grad():
        raw = collect.policy.score(made.unaltered(), frozenset({"entropy"}))["entropy"]
        now = collect.policy.score(made, frozenset())["logp"]
    expected = 0.8 * (1 + 0.5 * uncertainties(raw, by, True).clamp(-1, 1))
    assert made["temperature"].tolist() == pytest.approx(expected.tolist(), rel=1e-4)
    assert expected.std() > 1e-3, "they differ"
    assert now.tolist() == pytest.approx(made["logp"].tolist(), abs=1e-5)
    assert "temperature" not in collect.episodes(collect.tasks(1), 2), "and afterwards it is as before"


def test_heat_is_by_the_step_before(tiny_collector: Collector) -> None:
    collect = tiny_collector
    part = heated(prompts=2, group=3, name="ended", rounds=1, tau=0.5)
    state, first = part({}, collect)
    assert "temperature" not in first
    assert state == standards(first["entropy"], 0.8)
    after, second = part(dict(state), collect)
    assert after == standards(second["entropy"], 0.8)
    with torch.no_grad():
        raw = collect.policy.score(second.unaltered(), frozenset({"entropy"}))["entropy"]
    expected = 1 + 0.5 * uncertainties(raw, state, True).clamp(-1, 1)
    assert second["temperature"].tolist() == pytest.approx(expected.tolist(), rel=1e-3)
    assert "temperature" not in heated(prompts=2, group=3, name="ended", rounds=1, tau=0.0)(state, collect)[1]


SETTINGS = {
    "run.device": "cpu",
    "world.operations": 2,
    "run.held_out": 8,
    "sample.prompts": 2,
    "sample.group": 4,
    "sample.tau": 0.9,
    "sample.name": "ended",
    "sample.rounds": 1,
    "reward.reward.name": "ended",
    "run.checkpoint_every": 2,
    "run.episodes_every": 0,
    "update.lr": 1e-2,
}
CHOICES: dict[str, Any] = {"model": "fresh", "world": "chain", "steps": 3, "settings": SETTINGS}


def test_ratios_are_of_the_temperatures_drawn_at_and_runs_resume_bit_for_bit(tmp_path: Path) -> None:
    quiet: dict[str, Any] = {"threads": 1, "progress": tiny.Notes()}
    tiny.bare(tmp_path / "whole", "hapo", **CHOICES)
    rows = tiny.metrics(tmp_path / "whole")
    assert max(row["step0_gap"] for row in rows) < 1e-5
    with pp.steps("hapo", run=tmp_path / "cut", **quiet, **CHOICES) as made:
        drawn = [next(made).experience for _ in range(2)]
    assert float(drawn[1]["temperature"].std()) > 0.01
    tiny.resume(tmp_path / "cut")
    assert tiny.metrics(tmp_path / "cut") == rows
    assert tiny.model_bytes(tmp_path / "cut", 3) == tiny.model_bytes(tmp_path / "whole", 3)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PanoplyError, match="needs the column 'uncertainty'"):
        pp.plan(grpo().but(surrogate=uncertain_clip()), "chain")
    for path, word, why in (
        ("sample.tau", "1", "must be from 0 up to 1"),
        ("sample.pivot", "1.5", "must be from 0 to 1"),
        ("surrogate.beta", "2", "must be from 0 to 1"),
        ("surrogate.dual", "1", "must be above 1"),
        ("credit.limit", "0", "must be above 0"),
    ):
        with pytest.raises(PanoplyError, match=why):
            pp.plan("hapo", "chain", settings={path: word})


def test_what_has_no_effect_is_said() -> None:
    found = dict(inert(pp.plan("hapo", "chain", settings={"sample.tau": 0.0})))
    assert {"sample.pivot", "sample.signed"} <= found.keys()
    alone = dict(inert(pp.plan("hapo", "chain", settings={"update.minibatches": 1})))
    assert "surrogate.alpha" in alone
    assert "surrogate.beta" not in alone, "sure tokens are damped at ratio 1 as well"
