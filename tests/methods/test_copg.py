"""CoPG: eight arms with the numbers of the paper's toy, its loss by hand, and its limits IPO and RLOO."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from kit import Tabular, assert_same, dataset, gradient, on_policy, ragged, shuffled, slopes
from lists_kit import Answers, flat, listed, slow_gradient
from torch import Tensor

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Table
from panoply.methods.preferences.copg import ahead, arms, best, copg_arms, learned
from panoply.slots.credit.groups import group
from panoply.slots.loss.lists import contrastive
from panoply.slots.loss.pairs import squared
from panoply.slots.reduce.averages import sequence_sum
from panoply.slots.surrogate.ratios import log_likelihood

# ------------------------------------------------------------------ eight arms


@pytest.fixture(autouse=True)
def fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("panoply.methods.preferences.copg.STEPS", 1500)


def test_eight_arms() -> None:
    """From data that prefer bad arms: CoPG is at the optimum, the policy gradient without a baseline is not."""
    found = copg_arms(seed=1)
    rounded = {name: round(value, 4) for name, value in found.items()}
    assert rounded == {
        "optimum": 0.4681,
        "copg": 0.4681,
        "no baseline": 0.4262,
        "mean reward": 0.1888,
        "policy's mean": 0.4681,
    }
    found = ahead(1001)
    assert found["ahead"] > 0
    assert abs(found["left by copg"]) < 1e-3


def test_the_optimum_is_reached_on_any_data() -> None:
    rewards, reference = arms(np.random.default_rng(1))
    wanted = best(rewards, reference)
    for tilt in (-1.0, 0.0, 1.0):
        data = np.exp(tilt * rewards) / np.exp(tilt * rewards).sum()
        np.testing.assert_allclose(learned(rewards, reference, data)["copg"], wanted, atol=1e-4)


def test_the_part_s_gradient_is_that_of_the_arms() -> None:
    """The expected loss of two answers of the data has the gradient that the exact rule ascends."""
    rewards, reference = arms(np.random.default_rng(1))
    data = np.exp(-2 * rewards) / np.exp(-2 * rewards).sum()
    law = np.full(8, 1 / 8)
    pairs = [(a, b) for a in range(8) for b in range(8)]
    worth = [[rewards[a], rewards[b]] for a, b in pairs]
    logits = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)[torch.tensor(pairs).flatten()]
    then = torch.from_numpy(np.log(reference))[torch.tensor(pairs).flatten()]
    value, _ = contrastive(beta=0.5)(flat(worth, logp, reference=then))
    weight = torch.tensor([data[a] * data[b] for a, b in pairs])
    (found,) = torch.autograd.grad((weight * value).sum(), logits)
    regularised = rewards - 0.5 * np.log(law / reference)
    slope = data * (regularised - (data * regularised).sum())
    np.testing.assert_allclose(-found.numpy(), slope - law * slope.sum(), atol=1e-12)


# ------------------------------------------------------------------ the loss


def test_by_hand() -> None:
    """β = ½; R = 1 − ½·ln 2, 0, ½ + ½·ln 2 for r = 1, 0, ½ and log-ratios ln 2, 0, −ln 2."""
    ln2 = float(np.log(2.0))
    logp = torch.tensor([ln2, -ln2, 0.0], dtype=torch.float64, requires_grad=True)
    value, _ = contrastive(beta=0.5)(flat([[1.0, 0.5, 0.0]], logp, reference=torch.zeros(3).double()))
    r = [1 - ln2 / 2, 0.5 + ln2 / 2, 0.0]
    squares = (r[0] - r[1]) ** 2 + (r[0] - r[2]) ** 2 + (r[1] - r[2]) ** 2
    assert value.tolist() == pytest.approx([squares / (2 * 0.5 * 3 * 2)])
    others = [r[i] - (sum(r) - r[i]) / 2 for i in range(3)]
    assert slopes(value, logp) == pytest.approx([-a / 3 for a in others]), (
        "each has the others as its baseline"
    )


@pytest.mark.parametrize("baseline", ["others", "rewards", "none"])
def test_the_gradient_is_a_policy_gradient_s(baseline: str) -> None:
    """Squared or as stopped advantages: the same gradient, in any order and any split, from a slow reference."""

    def slow(answers: Answers) -> Tensor:
        """−mean_i sg(R_i − baseline)·log π_i with R = r − s."""
        n = len(answers.worth)
        r = [w - float(s.detach()) for w, s in zip(answers.worth, answers.scores(0.3), strict=True)]
        base = {
            "others": [(sum(r) - x) / (n - 1) for x in r],
            "rewards": [sum(answers.worth) / n] * n,
            "none": [0.0] * n,
        }[baseline]
        return torch.stack([-(x - b) * p / n for x, b, p in zip(r, base, answers.own, strict=True)]).sum()

    made, expected = slow_gradient(slow)
    for micro in (10**9, 1):
        for rows in (made, shuffled(made)):
            part = contrastive(beta=0.3, baseline=baseline)
            assert_same(gradient(dataset(part), rows, micro_tokens=micro), expected)


def test_two_answers_worth_a_quarter_and_minus_a_quarter_are_ipo() -> None:
    """(gap − 1/2β)², but for the factor β/4."""
    made = listed(ragged(), [[107, 104]], [[0.25, -0.25]])
    pair = made.with_pairs(Table({"chosen": torch.tensor([107]), "rejected": torch.tensor([104])}))
    expected = 0.3 / 4 * gradient(dataset(squared(beta=0.3)), pair)
    assert_same(gradient(dataset(contrastive(beta=0.3)), made), expected)


def test_on_the_policy_s_own_answers_it_is_rloo() -> None:
    """A list for each group: leave-one-out credit of r − β·Σ log π/π_ref, summed over tokens, mean over answers."""
    made = ragged(lengths=((2, 1, 3), (1, 4, 2)))
    episodes = made.by("episode")
    worth = episodes.sum(made["reward"])
    groups = episodes.first(made["group"])
    members = [episodes.keys[groups == g].tolist() for g in (10, 11)]
    lists = listed(made, members, [[float(worth[episodes.keys == e]) for e in m] for m in members])
    with torch.no_grad():
        apart = Tabular().score(made)["logp"] - made["logp@reference"]
    shaped = made.with_columns(reward=made["reward"] - 0.3 * apart)
    shaped = shaped.with_columns(
        advantage=group(baseline="leave_one_out", scale="none")(shaped).double(),
        logp=apart + made["logp@reference"],
    )
    rloo = on_policy(surrogate=log_likelihood(), reduce=sequence_sum())
    assert_same(gradient(dataset(contrastive(beta=0.3)), lists), gradient(rloo, shaped), rel=1e-5)


# ------------------------------------------------------------------ runs

QUICK: dict[str, Any] = {
    "run.held_out": 4,
    "data.batch": 4,
    "data.prompts": 6,
    "data.answers": 3,
    "data.name": "true",
    "update.lr": 1e-3,
}


def test_a_run_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    settings = {**QUICK, "data.refresh": 2, "run.checkpoint_every": 3}
    whole = tiny.bare(tmp_path / "run", "copg", world="strings", model="fresh", steps=5, settings=settings)
    logged = tiny.metrics(whole.run)
    assert logged[1]["contrastive"] != logged[0]["contrastive"]
    shutil.rmtree(whole.run / "checkpoints/step-0000005")
    (whole.run / "result.json").unlink()
    assert tiny.resume(whole.run).fingerprint == whole.fingerprint
    assert tiny.metrics(whole.run) == logged


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data.answers": 1}, "at least 2"),
        ({"losses.contrastive.beta": 0.0}, "above 0"),
        ({"data.used": 5}, "4 answers to a prompt"),
        ({"data.prompts": 0, "data.refresh": 3}, "new prompts in every step"),
        ({"data.whose": "teacher", "data.temperature": 0.5}, "the world's teacher answers"),
    ],
)
def test_refusals(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        pp.plan("copg", "strings", settings=settings)
