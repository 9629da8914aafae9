"""SubPO: credit by hand, and the exact gradient by enumeration of every trajectory."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from kit import Slow, Tabular, assert_same, hand, learner, on_policy, shuffled, toy_shares
from torch import Tensor

import panoply as pp
from panoply.experience import Experience
from panoply.methods.control.subpo import GROUND, subpo
from panoply.progress import Progress
from panoply.slots.credit.returns import over_others
from panoply.worlds.control.grid import Grid

TWO = {"episode": [1, 1, 1, 2, 2], "turn": [0, 1, 2, 0, 1], "group": [1, 1, 1, 2, 2]}
GAINS = [0.5, 0.0, 0.25, 0.25, 0.25]


def test_credit_by_hand() -> None:
    """To go: ¾, ¼, ¼ and ½, ¼; at turn 2 the first episode is alone."""
    made = hand(**TWO, reward=GAINS)
    plain = over_others(baseline="none", normalise=False)(made)
    assert plain.tolist() == pytest.approx([0.75, 0.25, 0.25, 0.5, 0.25])
    against = over_others(normalise=False)(made)
    assert against.tolist() == pytest.approx([0.25, 0.0, 0.25, -0.25, 0.0])
    size = (3 * 0.25**2 / 5) ** 0.5
    scaled = over_others()(made)
    assert scaled.tolist() == pytest.approx([0.25 / size, 0.0, 0.25 / size, -0.25 / size, 0.0])


def test_without_gains_there_is_no_credit() -> None:
    assert over_others()(hand(**TWO, reward=[0.0] * 5)).tolist() == [0.0] * 5


def test_rows_may_come_in_any_order() -> None:
    made = hand(**TWO, reward=GAINS)
    mixed = shuffled(made)
    found = dict(
        zip(
            zip(*(mixed[k].tolist() for k in ("episode", "turn")), strict=True),
            over_others()(mixed).tolist(),
            strict=True,
        )
    )
    expected = over_others()(made).tolist()
    assert [found[key] for key in zip(TWO["episode"], TWO["turn"], strict=True)] == pytest.approx(expected)


# ------------------------------------------------------------------ every trajectory of a small world

CELLS = 9


def trajectories(steps: int) -> Experience:
    """All action sequences from the upper edge of a 3 × 3 grid: the states they pass, the ground they newly cover."""
    world = Grid("open", size=3, counts=(0,), reward="coverage", view="state", level=0, horizon=steps)
    sequences = np.array(list(itertools.product(range(4), repeat=steps)))
    envs, rows = world.envs(len(sequences)), np.arange(len(sequences))
    envs.reset(rows, 0 * rows)
    envs.reset_to(rows, envs.state | {"at": 0 * rows + 1, "covered": world._near[0 * rows + 1]})
    states, gains = [], []
    for t in range(steps):
        states.append(envs.observations.copy())
        gains.append(envs.step(sequences[:, t]).signals["covered"])
    return hand(
        episode=rows.repeat(steps).tolist(),
        turn=list(range(steps)) * len(rows),
        state=np.stack(states, 1).flatten().tolist(),
        action=sequences.flatten().tolist(),
        reward=np.stack(gains, 1).flatten().tolist(),
    )


def chances(made: Experience, slow: Slow) -> Tensor:
    """The probability of each trajectory."""
    logp = [slow.logp(s, a) for s, a in zip(made["state"].tolist(), made["action"].tolist(), strict=True)]
    return made.by("episode").sum(torch.stack(logp)).exp()


def exact_gradient(made: Experience, slow: Slow) -> Tensor:
    """∇ Σ_τ p(τ)·F(τ)."""
    return slow.gradient((chances(made, slow) * made.by("episode").sum(made["reward"])).sum())


def learned(made: Experience, advantage: Tensor, share: Tensor) -> Tensor:
    """The learner's gradient, of what it ascends, with these weights of decisions."""
    rows = made.with_columns(advantage=advantage.double(), share=share, logp=torch.zeros(len(made)))
    return -learner(Tabular(states=CELLS), on_policy(reduce=toy_shares())).gradient(rows)["logits"]


def test_the_gradient_is_that_of_the_expected_worth_of_the_set() -> None:
    made, slow = trajectories(2), Slow(states=CELLS)
    share = made.by("episode").rows(chances(made, slow).detach())
    assert float(share.sum()) == pytest.approx(2)
    exact = exact_gradient(made, slow)
    assert_same(learned(made, over_others(baseline="none", normalise=False)(made), share), exact)
    prefixes = made["reward"].reshape(-1, 2).cumsum(1).flatten()  # as the released script weighs
    off = (learned(made, prefixes, share) - exact).abs().max() / exact.abs().max()
    assert float(off) > 0.05


def test_others_as_baseline_leave_the_gradient_unbiased() -> None:
    """The mean of batches of two over all pairs of trajectories."""
    made, slow = trajectories(2), Slow(states=CELLS)
    likely = chances(made, slow).detach()
    total = torch.zeros_like(slow.logits)
    for i, j in itertools.product(range(len(likely)), repeat=2):
        pair = made.take(torch.tensor([2 * i, 2 * i + 1, 2 * j, 2 * j + 1]))
        pair = pair.with_columns(episode=torch.tensor([0, 0, 1, 1]), context=torch.arange(4) // 2)
        share = torch.full((4,), float(likely[i] * likely[j] / 2), dtype=torch.float64)
        total += learned(pair, over_others(normalise=False)(pair), share)
    assert_same(total, exact_gradient(made, slow))


def test_the_method() -> None:
    made = pp.plan("subpo", "grid", settings=GROUND)
    assert made.method.credit == over_others()
    assert made.policy_options["hidden"] == (64, 32)
    assert subpo().reward.settings()["name"] == "covered"


@pytest.mark.learn
def test_marginal_gains_cover_more_than_modular_rewards(tmp_path: Path) -> None:
    settings = {**GROUND, "run.steps": 60, "update.lr": 1e-2}
    marginal = pp.train(
        "subpo", "grid", run=tmp_path / "a", threads=1, settings=settings, progress=Progress()
    )
    modular = pp.train(
        "subpo",
        "grid",
        run=tmp_path / "b",
        threads=1,
        settings={**settings, "reward.name": "alone"},
        progress=Progress(),
    )
    assert marginal.after["sampled"] > 1.5 * modular.after["sampled"]
