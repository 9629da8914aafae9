"""Segment credit: cuts, gains and prefix values by hand."""

from __future__ import annotations

import math

import pytest
import torch
from kit import hand

from panoply.methods.reasoning_data.spo_segment import cut_and_valued, cut_rows, segment_gain, whitened
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.worlds.text.chain import Chain

SURE, DOUBT = math.log(0.95), math.log(0.5)


def test_every_second_doubt_is_cut_and_counting_starts_anew_in_each_episode() -> None:
    logp = [SURE, DOUBT, DOUBT, SURE, DOUBT, DOUBT, DOUBT, SURE, DOUBT]
    rows = hand(episode=[0] * 6 + [1] * 3, logp=logp)
    assert cut_rows(rows, 0.9, 2).nonzero().flatten().tolist() == [2, 5, 8]
    assert cut_rows(rows, 0.9, 1).nonzero().flatten().tolist() == [1, 2, 4, 5, 6, 8]


def test_gains_golden() -> None:
    """Episode 0 goes .2 → .7 → success 1; episode 1 fails from .5; episode 2 was never cut."""
    rows = hand(
        episode=[0, 0, 0, 0, 1, 1, 2],
        logp=[SURE, DOUBT, SURE, DOUBT, DOUBT, SURE, DOUBT],
        segment_start=[False, True, False, True, True, False, False],
        segment_value=[0.0, 0.2, 0.0, 0.7, 0.5, 0.0, 0.0],
        reward=[0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0],
    )
    found = segment_gain(whiten=False)(rows)
    assert found["advantage"].tolist() == pytest.approx([0.0, 0.5, 0.5, 0.3, -0.5, -0.5, 0.0])
    assert found["train"].tolist() == [False, True, False, True, True, False, True]


def test_prefix_values_are_shares_of_success(tiny_collector: Collector) -> None:
    world = tiny_collector.world
    tasks = [world.task("train", i) for i in range(3)]
    gold = [world.gold(t) for t in tasks]
    state = dict(tiny_collector.state)
    whole = tiny_collector.prefix_values(tasks, [g[:-1] for g in gold], 40)
    drawn, waited = (tiny_collector.state[name] for name in ("decisions", "decode_steps"))
    assert tiny_collector.state == {**state, "decisions": drawn, "decode_steps": waited}
    assert drawn >= 3 * 40
    # only the end token is missing: the share of continuations that draw it at once
    prompts = [[*t.prompt, *g[:-1]] for t, g in zip(tasks, gold, strict=True)]
    model = tiny_collector.policy.model
    for i, prompt in enumerate(prompts):
        tokens = torch.tensor([prompt])
        hidden = model.hidden(tokens, torch.arange(len(prompt))[None])
        p = float(model.logits(hidden[0, -1:]).softmax(-1)[0, gold[i][-1]].detach())
        assert float(whole[i]) == pytest.approx(p, abs=3.5 * math.sqrt(p * (1 - p) / 40))


def test_cuts_carry_values_and_others_do_not(tiny_collector: Collector) -> None:
    found = cut_and_valued(prompts=3, group=2, every=2, samples=2)(tiny_collector)
    assert bool(found["segment_start"].any())
    assert float(found["segment_value"][~found["segment_start"]].abs().sum()) == 0


def test_continuations_are_of_who_answered() -> None:
    """Greedy continuations of greedy answers are these answers, so that every cut is worth what its answer earned."""
    collect = Collector(Chain(), open_policy("start", Chain(), 0, "cpu"), 0)
    found = cut_and_valued(prompts=12, group=1, every=1, samples=3, temperature=0.0)(collect)
    cut = found["segment_start"]
    earned = found.by("episode").sum(found["signal:success"])
    assert bool(cut.any())
    assert 0 < float(earned.mean()) < 1
    assert torch.equal(found["segment_value"][cut], found.by("episode").rows(earned)[cut])


def test_whitened_over_what_learns() -> None:
    """Of 0.5, 0.3, −0.5 and 0 that learn, the mean is 0.075 and the deviation √(0.5675/3); the others get nothing."""
    gains = torch.tensor([9.0, 0.5, 0.5, 0.3, -0.5, -0.5, 0.0], dtype=torch.float64)
    learns = torch.tensor([False, True, False, True, True, False, True])
    spread = math.sqrt(((0.425**2) + (0.225**2) + (0.575**2) + (0.075**2)) / 3)
    expected = [0.0, 0.425 / spread, 0.0, 0.225 / spread, -0.575 / spread, 0.0, -0.075 / spread]
    assert whitened(gains, learns).tolist() == pytest.approx(expected, abs=1e-6)
    assert whitened(torch.ones(3), torch.tensor([True, True, False])).tolist() == [0.0, 0.0, 0.0]
    assert whitened(gains, learns & (gains == 0.5)).tolist() == [0.0] * 7, "one row alone has no deviation"


def test_credit_is_whitened_as_published() -> None:
    rows = hand(
        episode=[0, 0, 1],
        logp=[DOUBT, SURE, DOUBT],
        segment_start=[True, False, True],
        segment_value=[0.25, 0.0, 0.75],
        reward=[0.0, 1.0, 0.0],
    )
    gains = segment_gain(whiten=False)(rows)
    assert gains["advantage"].tolist() == pytest.approx([0.75, 0.75, -0.75])
    assert segment_gain()(rows)["advantage"].tolist() == pytest.approx([0.5**0.5, 0.0, -(0.5**0.5)], abs=1e-6)
