"""RL-PLUS: a teacher in every group, a ratio to a mixture that nothing clips, and attention to unlikely tokens."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from kit import Slow, assert_same, batch, gradient, hand, ragged, rows_of, shuffled, slopes
from papers import groups_of
from tiny import bare, metrics
from torch import Tensor

import panoply as pp
from panoply.costs import cost
from panoply.errors import PanoplyError
from panoply.experience import OWN, TEACHER, Experience
from panoply.methods.reasoning_data.rl_plus import rl_plus
from panoply.rollout.text import Collector
from panoply.slots.sample.taught import taught
from panoply.slots.surrogate.hybrid import hybrid
from panoply.slots.surrogate.ratios import ratio
from panoply.slots.update.optimisers import sgd

NAN = math.nan


def mixture(p: float, old: float, **settings: float) -> tuple[float, float]:
    """What one teacher's token of advantage 1 is worth, and its slope by log p."""
    made = hand(source=[TEACHER], advantage=[1.0], logp=[NAN], **{"logp@old": [math.log(old)]})
    seen = batch(made, logp=[math.log(p)])
    value, _ = hybrid(own=ratio(), shape="mixture", **settings)(seen)
    return float(value.detach()), slopes(value, seen.now["logp"])[0]


@pytest.mark.parametrize(
    ("p", "old", "focus", "worth"),
    [
        (1.0, 1.0, 0.0, 1.0),  # 2/(1.5 + .5)
        (1.0, 1e-12, 0.0, 4.0),  # the bound
        (0.01, 0.01, 0.0, 0.02 / 0.515),  # about 4p of a rare token
        (0.75, 0.2, 0.5, 1.5 / 0.8 * 0.5),  # (1 − .75)^½ = .5
        (0.36, 0.36, 0.5, 0.72 / 1.04 * 0.8),
    ],
)
def test_numbers_by_hand(p: float, old: float, focus: float, worth: float) -> None:
    """The slope is the value: the weight (1 − p)^½ has no gradient of its own."""
    assert mixture(p, old, focus=focus) == pytest.approx((worth, worth))


def test_a_guess_that_is_uniform_is_the_paper_s() -> None:
    """|V| = 50: 2·.3/(.3 + ½(.3 + .02))."""
    assert mixture(0.3, 0.3, guess=0.02, focus=0.0)[0] == pytest.approx(0.6 / 0.46)


def test_far_above_any_clip_there_is_still_a_gradient() -> None:
    """From 1e-3 to .9: the ratio is 3.6, and what a bound of 1.2 would have cut still teaches."""
    value, slope = mixture(0.9, 1e-3, focus=0.0)
    assert value == slope == pytest.approx(1.8 / 0.5015)


def test_a_probability_rounded_to_above_one_is_no_nan() -> None:
    made = hand(source=[TEACHER], advantage=[1.0], logp=[NAN], **{"logp@old": [0.0]})
    seen = batch(made, logp=[1e-7])
    value, _ = hybrid(own=ratio(), shape="mixture", focus=0.5)(seen)
    assert value.tolist() == slopes(value, seen.now["logp"]) == [0.0]


def mixed() -> Experience:
    """Every third episode is a teacher's, rewarded; of its `logp` nobody knows."""
    made = ragged(drift=0.4)
    theirs = made["episode"] % 3 == 0
    last = made.by("episode").is_last()
    reward = torch.where(theirs, 1.0, (made["episode"] % 2).float()) * last
    return made.with_columns(
        source=torch.where(theirs, TEACHER, OWN),
        logp=made["logp"].masked_fill(theirs, NAN),
        reward=reward,
        **{"logp@old": made["logp@reference"]},
    )


def slow(made: Experience) -> Tensor:
    """−1/(E·L)·[Σ own ρ·A + Σ teacher 2p/(1.5·p_old + .5)·(1 − p)^½·A], A = R − mean of the whole group; no entropy."""
    table, groups = Slow(), groups_of(made)
    loss = torch.zeros((), dtype=torch.float64)
    returns = {e: sum(r["reward"] for r in rows_of(made, episode=e)) for g in groups for e in g}
    worth = {e: returns[e] - sum(returns[m] for m in g) / len(g) for g in groups for e in g}
    for row in rows_of(made):
        logp = table.logp(row["state"], row["action"])
        if row["source"] == TEACHER:
            p = logp.exp()
            factor = 2 * p / (1.5 * math.exp(row["logp@old"]) + 0.5) * (1 - p.detach()).sqrt()
        else:
            factor = (logp - row["logp"]).exp()
        loss = loss - factor * worth[row["episode"]] / (len(returns) * 32)
    return table.gradient(loss)


@pytest.mark.parametrize("micro", [1, 10**9])
def test_the_gradient_is_the_equation_s_and_no_nan_reaches_it(micro: int) -> None:
    made = mixed()
    method = rl_plus().but(
        regularise=(), reduce=rl_plus().reduce.but(length=32), update=sgd(lr=1.0, clip=0.0)
    )
    made = made.with_columns(advantage=method.credit(made))
    for rows in (made, shuffled(made)):
        found = gradient(method, rows, micro_tokens=micro)
        assert bool(torch.isfinite(found).all())
        assert_same(found, slow(made))


def test_a_teacher_is_in_every_group(tiny_collector: Collector) -> None:
    found = taught(prompts=3, group=4)(tiny_collector)
    episodes, groups = found.by("episode"), found.by("group")
    theirs = episodes.first(found["source"]) == TEACHER
    assert len(groups.keys) == 3
    assert theirs.tolist() == [False] * 9 + [True] * 3
    assert episodes.first(found["group"])[theirs].tolist() == groups.keys.tolist()
    assert episodes.sum(found["signal:success"])[theirs].tolist() == [1.0] * 3
    assert bool(found["logp"].isnan().eq(found["source"] == TEACHER).all())
    for row, task in zip(
        episodes.first(found["context"])[theirs].tolist(), groups.first(found["task"]).tolist(), strict=True
    ):
        said = found.context.ragged("tokens")[row].tolist()
        asked = next(t for t in tiny_collector.numbered(range(3)) if t.id == task)
        assert said == [*asked.prompt, *tiny_collector.world.gold(asked)]
    assert tiny_collector.notes == {"taught": 1.0}


def test_it_trains_above_temperature_one_and_says_what_it_is(tmp_path: Path) -> None:
    """Rows of a teacher's have no temperature; own ones have. Nothing becomes NaN."""
    bare(
        tmp_path,
        "rl-plus",
        world="chain",
        model="start",
        steps=2,
        settings={"sample.prompts": 2, "sample.group": 3, "sample.temperature": 1.3, "run.held_out": 4},
    )
    rows = metrics(tmp_path)
    assert all(math.isfinite(row["loss"]) and row["gradient_norm"] > 0 for row in rows)
    assert rows[0]["taught"] == 1.0
    assert 0 < rows[0]["teacher_p"] < 1
    shown = " ".join(pp.plan("rl-plus", "chain").method.equation())
    assert "2p/(p_old + ½(p_old + 1))·A·(1 − sg(p))^0.5" in shown


def test_what_cannot_be_taught_is_refused() -> None:
    with pytest.raises(PanoplyError, match="needs a world with 'reference'"):
        pp.plan("rl-plus", "cartpole")
    with pytest.raises(PanoplyError, match="has to keep an episode of the policy's own"):
        pp.plan("rl-plus", "chain", settings={"sample.answers": 8})
    with pytest.raises(PanoplyError, match="sample.choose has no effect: chain has one teacher"):
        pp.plan("rl-plus", "chain", settings={"sample.choose": "random"})
    with pytest.raises(PanoplyError, match="guess has no effect: shape=shaped has no guess"):
        pp.plan("rl-plus", "chain", settings={"surrogate.shape": "shaped", "surrogate.guess": 0.5})
    with pytest.raises(PanoplyError, match="above 0 to 1|between|guess"):
        pp.plan("rl-plus", "chain", settings={"surrogate.guess": 0.0})


def test_its_tokens_count_what_is_sampled_and_what_is_learned() -> None:
    """Seven sampled and eight learned a prompt."""
    mine, grpo = (cost(pp.plan(m, "chain", settings={"sample.prompts": 2})) for m in ("rl-plus", "grpo"))
    assert mine.sampled_tokens * 8 == grpo.sampled_tokens * 7
    assert mine.trained_tokens == grpo.trained_tokens
