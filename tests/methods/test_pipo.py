"""PIPO: when it looks back, at what, by how much, and that the two stages are two steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kit import Slow, Tabular, assert_same, hand, learner, ragged, rows_of, shuffled
from papers import ZERO, groups_of, standardised

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import OWN, REPLAY, Experience
from panoply.methods.base.grpo import grpo
from panoply.methods.objectives.pipo import BEFORE, NOW, and_previous, improvement, pipo, retrospective
from panoply.seeds import torch_rng
from panoply.slots.credit.groups import group
from panoply.slots.credit.moving import moving_baseline
from panoply.slots.select.filters import varied_groups
from panoply.slots.update.optimisers import sgd


def test_improvement_by_hand() -> None:
    """Mean 0.25 and sample deviation 0.1291: 0.3 is 0.387 above, 0.1 is 1.16 below."""
    window = [0.1, 0.2, 0.3, 0.4]
    assert improvement(0.3, window, 0.5, 0.0, 1e-6) == pytest.approx(0.05 / math.sqrt(0.05 / 3))
    assert improvement(0.9, window, 0.5, 0.0, 1e-6) == 0.5
    assert improvement(0.1, window, 0.5, 0.0, 1e-6) == 0.0
    assert improvement(0.1, window, 0.5, 2.0, 1e-6) == pytest.approx(-0.15 / math.sqrt(0.05 / 3))
    assert improvement(0.1, window, 0.5, 0.7, 1e-6) == -0.7


def test_a_flat_window_is_floored() -> None:
    assert improvement(0.2, [0.2] * 8, 0.5, 0.0, 1e-6) == 0.0
    assert improvement(0.3, [0.2] * 8, 0.5, 0.0, 1e-6) == 0.5
    assert improvement(0.3, [0.2] * 8, 0.5, 0.0, 1.0) == pytest.approx(0.1)


def earned(number: int, *rewards: float) -> Experience:
    """A batch of one group, an episode of one decision for each reward."""
    n = len(rewards)
    keys = torch.arange(n) + 10 * number
    return hand(
        episode=keys,
        group=torch.full((n,), number),
        reward=list(map(float, rewards)),
        logp=[-0.1 * number] * n,
        source=torch.zeros(n, dtype=torch.long),
    )


def looked(batches: list[Experience], **settings: Any) -> Iterator[Experience]:
    state: dict[str, Any] = and_previous(**settings).info.state()  # type: ignore[misc]
    for batch in batches:
        state, found = and_previous(**settings)(state, batch)
        yield found


def test_it_begins_when_the_window_is_full_and_this_batch_is_not_in_it() -> None:
    """Means 0.5, 0, 1, 0.5: the third is compared with 0.25 ± 0.354, the fourth with 0.5 ± 0.707."""
    batches = [earned(i, *r) for i, r in enumerate([(0, 1), (0, 0), (1, 1), (0, 1)])]
    found = list(looked(batches, window=2, rise=9.0, fall=9.0))
    assert [f["stage"].tolist() for f in found] == [[NOW] * 2, [NOW] * 2, [BEFORE] * 2 + [NOW] * 2, [NOW] * 2]
    assert found[2]["improvement"].tolist() == pytest.approx([0.75 / math.sqrt(0.125)] * 4)
    assert found[3]["improvement"].tolist() == [0.0] * 2


def test_the_batch_before_comes_as_it_was() -> None:
    """With its own log-probabilities and rewards, marked as of an earlier self; and once, not again and again."""
    batches = [earned(i, *r) for i, r in enumerate([(0, 0), (0, 1), (1, 1), (1, 3)])]
    *_, third, fourth = looked(batches, window=2)
    for found, now in ((third, 2), (fourth, 3)):
        assert found["group"].tolist() == [now - 1] * 2 + [now] * 2
        assert found["logp"].tolist() == pytest.approx([-0.1 * (now - 1)] * 2 + [-0.1 * now] * 2)
        assert found["source"].tolist() == [REPLAY] * 2 + [OWN] * 2
    assert third["reward"].tolist() == [0, 1, 1, 1]
    assert fourth["reward"].tolist() == [1, 1, 1, 3]


def test_nothing_left_by_others_says_nothing() -> None:
    empty = earned(5).with_columns(logp=torch.zeros(0), reward=torch.zeros(0))
    batches = [earned(0, 0, 0), earned(1, 0, 1), empty, earned(2, 1, 1)]
    found = list(looked(batches, window=2))
    assert len(found[2]) == 0
    assert found[3]["group"].tolist() == [1, 1, 2, 2]


def staged(stage: list[int], phi: float, **columns: Any) -> Experience:
    rows = len(stage)
    return hand(stage=stage, improvement=[phi] * rows, **columns)


def test_shares_by_hand() -> None:
    """Returns 3, 1, 1, 1 of a group are A = 1.5, −.5, −.5, −.5: G/Σ|A| is 4/3. Groups without differences have none."""
    made = staged(
        [0] * 6 + [1] * 2,
        0.3,
        group=[0, 0, 0, 0, 1, 1, 2, 2],
        reward=[3.0, 1.0, 1.0, 1.0, 2.0, 2.0, 1.0, 0.0],
    )
    plain = retrospective(credit=group(scale="none"))(made)["advantage"]
    third = 0.5 * 4 / 3 * 0.3
    assert plain.tolist() == pytest.approx([3 * third, -third, -third, -third, 0, 0, 0.5, -0.5])
    scaled = retrospective(credit=group())(made)["advantage"]
    assert scaled[:4].tolist() == pytest.approx(plain[:4].tolist()), "a deviation cancels"


def test_each_batch_is_credited_alone() -> None:
    """A credit that compares over the batch sees what it saw then."""
    made = staged([0, 0, 1, 1], 1.0, group=[0, 0, 1, 1], reward=[4.0, 0.0, 1.0, 0.0])
    credit = group(baseline="batch_mean", scale="none")
    found = retrospective(credit=credit)(made)["advantage"]
    assert found.tolist() == pytest.approx([1.0, -1.0, 0.5, -0.5])


def both(phi: float = 0.4) -> Experience:
    """Random experience whose first two groups are of the step before."""
    made = ragged(drift=0.4)
    stage = torch.where(made["group"] < 12, BEFORE, NOW)
    return made.with_columns(stage=stage, improvement=torch.full((len(made),), phi))


@pytest.mark.parametrize("epochs", [1, 2])
def test_stages_never_share_a_mini_batch(epochs: int) -> None:
    """All of the earlier one's epochs come first, and every epoch has every row of its stage."""
    method = pipo().but(update=sgd(lr=0.1, minibatches=2, epochs=epochs))
    made = shuffled(both())
    parts = list(learner(Tabular(), method).minibatches(made, torch_rng("x", 0)))
    stages = [set(part["stage"].tolist()) for part in parts]
    assert stages == [{BEFORE}] * 2 * epochs + [{NOW}] * 2 * epochs
    for stage in (BEFORE, NOW):
        rows = sum(len(part) for part in parts if stage in part["stage"].tolist())
        assert rows == epochs * int((made["stage"] == stage).sum())


def slow_step(slow: Slow, made: Experience, stage: int, phi: float, lr: float) -> torch.Tensor:
    """One ascent on the mean over episodes of the mean over tokens of min(ρr, clip(ρ)·r), from the page's formulas."""
    advantage, value = standardised(made), ZERO
    members = [m for m in groups_of(made) if rows_of(made, episode=m[0])[0]["stage"] == stage]
    episodes = sum(map(len, members))
    for group_ in members:
        size = sum(abs(advantage[e]) for e in group_)
        for e in group_:
            share = len(group_) * advantage[e] / size if size else 0.0
            r = share * phi if stage == BEFORE else advantage[e]
            rows = rows_of(made, episode=e)
            for row in rows:
                ratio = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
                value = value + torch.minimum(ratio * r, ratio.clamp(0.8, 1.2) * r) / (len(rows) * episodes)
    return slow.logits.detach() + lr * slow.gradient(value)


@pytest.mark.parametrize("micro", [1, 10**9])
def test_a_step_is_two_ascents_and_the_second_begins_where_the_first_ends(micro: int) -> None:
    made, lr = both(), 0.7
    method = pipo().but(update=sgd(lr=lr, clip=0.0))
    made = made.with_columns(**method.credit(made))
    policy = Tabular()
    teacher = learner(policy, method, micro_tokens=micro)
    slow = Slow()
    start = slow.logits.detach().clone()
    for stage, part in zip(
        (BEFORE, NOW), teacher.minibatches(shuffled(made), torch_rng("x", 0)), strict=True
    ):
        teacher.step(part, 0)
        slow.logits.data = slow_step(slow, made, stage, 0.4, lr)
    assert_same(policy.logits.detach() - start, slow.logits.detach() - start)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_why_group_gradients_grow_at_the_ends(p: float) -> None:
    """E[g | the group differs] = η(p)·p(1 − p), η = E[√(S(G − S)) | differs]/(G·p(1 − p)), over all outcomes.

    The page divides by the population's deviation, which is √((G − 1)/G) of the sample's.
    """
    size, expected, eta, whole = 4, 0.0, 0.0, 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=size):
        right = sum(outcome)
        likely = p**right * (1 - p) ** (size - right)
        if right in (0, size):
            continue
        made = hand(group=[0] * size, reward=list(outcome))
        advantage = group(epsilon=0.0)(made) * math.sqrt(size / (size - 1))
        expected += likely * float((advantage * (torch.tensor(outcome) - p)).mean())
        eta += likely * math.sqrt(right * (size - right)) / (size * p * (1 - p))
        whole += likely
    assert expected / whole == pytest.approx(eta / whole * p * (1 - p), rel=1e-5)


SETTINGS = {
    **tiny.SETTINGS,
    "select.and_previous.window": 2,
    "update.lr": 1e-2,
    "update.schedule.warmup": 0,
    "run.checkpoint_every": 3,
    "run.episodes_every": 0,
}
CHOICES: dict[str, Any] = {"model": "fresh", "world": "chain", "steps": 6, "settings": SETTINGS}


def test_a_run_looks_back_sometimes_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = tiny.bare(tmp_path / "whole", "pipo", **CHOICES)
    rows = tiny.metrics(tmp_path / "whole")
    updates = [row["updates"] for row in rows]
    assert updates[:2] == [1, 1]
    assert {1, 2} == set(updates), "without a rise there is no first stage, and so no step of it"
    assert [row["episodes"] for row in rows] == [8] * 6, "metrics are of what is new"
    with pp.steps("pipo", run=tmp_path / "cut", threads=1, progress=tiny.Notes(), **CHOICES) as made:
        for _ in range(4):
            next(made)
    assert tiny.resume(tmp_path / "cut").fingerprint == whole.fingerprint
    assert tiny.metrics(tmp_path / "cut") == rows


def test_what_cannot_be_is_refused() -> None:
    for made, why in (
        (grpo().but(credit=retrospective()), "needs the column 'improvement'"),
        (grpo().but(select=(and_previous(),)), "take credit=retrospective"),
        (pipo().but(select=(and_previous(), varied_groups())), "the last in select"),
    ):
        with pytest.raises(PanoplyError, match=why):
            pp.plan(made, "chain")
    with pytest.raises(PanoplyError, match="a part that remembers must stand in a slot"):
        retrospective(credit=moving_baseline())
    with pytest.raises(PanoplyError, match="at least 2"):
        and_previous(window=1)


def test_bounds_act_on_the_batch_before() -> None:
    """With one update a batch the ratio is 1 there, but not of rows of the step before: no setting is idle."""
    pp.plan("pipo", "chain", settings={"surrogate.low": 0.1})
    with pytest.raises(PanoplyError, match="ratio stays at 1"):
        pp.plan("grpo", "chain", settings={"surrogate.low": 0.1})
