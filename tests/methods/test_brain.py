"""BRAIn: weights by hand, the baseline's gradient, its limits DPO and DPG, and the exact variance of eight answers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from kit import assert_same, dataset, gradient, ragged, shuffled, slopes
from lists_kit import Answers, flat, listed, slow_gradient
from torch import Tensor

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Table
from panoply.methods.preferences.brain import brain_variance, draws, less_variance, spread
from panoply.slots.loss.lists import self_normalised
from panoply.slots.loss.pairs import logistic

# ------------------------------------------------------------------ variance


def test_the_baseline_takes_two_thirds_of_the_variance() -> None:
    found = {name: round(number, 3) for name, number in brain_variance(seed=2).items()}
    assert found == {
        "variance with baseline": 0.114,
        "mean with baseline": 0.215,
        "variance without": 0.317,
        "mean without": 0.215,
    }
    measured = less_variance(1001)
    assert measured["less variance"] > 0.5
    assert measured["means"] < 1e-12


def test_all_draws_are_there() -> None:
    counts, chances = draws(np.array([0.5, 0.3, 0.2]), 2)
    assert counts.tolist() == [[2, 0, 0], [1, 1, 0], [1, 0, 1], [0, 2, 0], [0, 1, 1], [0, 0, 2]]
    assert chances.tolist() == pytest.approx([0.25, 0.3, 0.2, 0.09, 0.12, 0.04])


@pytest.mark.parametrize("baseline", [True, False])
def test_the_exact_variance_is_that_of_the_loss(baseline: bool) -> None:
    """Each of the 330 draws as a list of four, by a prior and proposals that are not the policy's."""
    rng = np.random.default_rng(0)
    prior, law, proposals = (rng.dirichlet(np.ones(8)) for _ in range(3))
    rewards = rng.normal(size=8)
    counts, chances = draws(proposals)
    members = torch.tensor([np.repeat(np.arange(8), row.astype(int)).tolist() for row in counts])
    logits = torch.from_numpy(np.log(law)).repeat(len(counts), 1).requires_grad_()
    logp = logits.log_softmax(1).gather(1, members).flatten()
    columns = {
        name: torch.from_numpy(np.log(of))[members].flatten()
        for name, of in (("reference", prior), ("behaviour", proposals))
    }
    made = flat(rewards[members].tolist(), logp, **columns)
    value, _ = self_normalised(gamma=0.7, baseline=baseline)(made)
    (found,) = torch.autograd.grad(-value.sum(), logits)
    mean = chances @ found.numpy()
    variance = chances @ ((found.numpy() - mean) ** 2).sum(1)
    which = "with baseline" if baseline else "without"
    expected = spread(prior, law, proposals, rewards, 0.7)
    assert variance == pytest.approx(expected[f"variance {which}"])
    assert np.linalg.norm(mean) == pytest.approx(expected[f"mean {which}"])


# ------------------------------------------------------------------ the loss


def two(part: Any, **columns: list[float]) -> tuple[Tensor, Tensor]:
    """Three answers worth 1, 0 and 0, of log-probabilities ln ½, ln ¼, ln ¼."""
    logp = torch.tensor([0.5, 0.25, 0.25], dtype=torch.double).log().requires_grad_()
    given = {name: torch.tensor(column, dtype=torch.double).log() for name, column in columns.items()}
    return part(flat([[1.0, 0.0, 0.0]], logp, **given))[0], logp


def test_by_hand() -> None:
    """γ = 1/ln 2 doubles the first. With proposals ¼, ¼, ½ and a prior ½, ¼, ¼: α ∝ 4, 1, ½ and b ∝ 2, 1, ½."""
    part = self_normalised(gamma=1 / math.log(2))
    value, logp = two(part, reference=[0.5, 0.25, 0.25], behaviour=[0.25, 0.25, 0.5])
    alpha, own = [x / 5.5 for x in (4, 1, 0.5)], [x / 3.5 for x in (2, 1, 0.5)]
    assert float(value.detach()) == pytest.approx(
        -sum(a * math.log(b) for a, b in zip(alpha, own, strict=True))
    )
    assert slopes(value, logp) == pytest.approx([b - a for a, b in zip(alpha, own, strict=True)]), (
        "Σ(b − α)∇log π"
    )
    value, logp = two(part.but(baseline=False), reference=[0.5, 0.25, 0.25], behaviour=[0.25, 0.25, 0.5])
    assert slopes(value, logp) == pytest.approx([-a for a in alpha]), "distributional policy gradient"


def test_where_the_prior_proposes_only_rewards_are_left() -> None:
    """log p − log q cancels: α = softmax(r/γ), whatever the prior."""
    one, logp = two(self_normalised(gamma=1.0), reference=[0.7, 0.2, 0.1], behaviour=[0.7, 0.2, 0.1])
    e = math.e
    own = [x / (0.5 / 0.7 + 0.25 / 0.2 + 0.25 / 0.1) for x in (0.5 / 0.7, 0.25 / 0.2, 0.25 / 0.1)]
    assert slopes(one, logp) == pytest.approx([o - a / (e + 2) for o, a in zip(own, (e, 1, 1), strict=True)])


def slow(answers: Answers, target: str, baseline: bool) -> Tensor:
    n = len(answers.worth)
    weights = [
        math.exp(p - q + r / 0.4)
        for p, q, r in zip(answers.reference, answers.wrote, answers.worth, strict=True)
    ]
    alpha = [w / sum(weights) for w in weights] if target == "posterior" else [1.0] + [0.0] * (n - 1)
    own = torch.stack([p - q for p, q in zip(answers.own, answers.wrote, strict=True)])
    said = list(own - own.exp().sum().log()) if baseline else answers.own
    return -torch.stack([a * s for a, s in zip(alpha, said, strict=True)]).sum()


@pytest.mark.parametrize("target", ["posterior", "best"])
@pytest.mark.parametrize("baseline", [True, False])
def test_the_gradient_is_the_equation_s(target: Any, baseline: bool) -> None:
    made, expected = slow_gradient(lambda answers: slow(answers, target, baseline))
    part = self_normalised(gamma=0.4, target=target, baseline=baseline)
    for micro in (10**9, 1):
        for rows in (made, shuffled(made)):
            assert_same(gradient(dataset(part), rows, micro_tokens=micro), expected)


def test_the_better_of_two_answers_of_the_prior_is_dpo() -> None:
    """With β = 1, exactly."""
    made = ragged()
    made = listed(made.with_columns(logp=made["logp@reference"]), [[107, 104]], [[1.0, 0.0]])
    made = made.with_pairs(Table({"chosen": torch.tensor([107]), "rejected": torch.tensor([104])}))
    expected = gradient(dataset(logistic(beta=1.0)), made)
    assert_same(gradient(dataset(self_normalised(target="best")), made), expected)


def test_an_answer_that_was_drawn_twice_has_twice_the_weight() -> None:
    """And what it teaches is what both together do."""
    logp = torch.tensor([-1.0, -2.0, -2.0], dtype=torch.double, requires_grad=True)
    then = torch.tensor([-1.5, -1.0, -1.0], dtype=torch.double)
    value, _ = self_normalised(gamma=0.5)(
        flat([[0.5, 0.2, 0.2]], logp, reference=then, behaviour=then.clone())
    )
    once, twice = math.exp(1.0), math.exp(0.4)
    own = [math.exp(0.5), math.exp(-1.0), math.exp(-1.0)]
    expected = [o / sum(own) - a / (once + 2 * twice) for o, a in zip(own, (once, twice, twice), strict=True)]
    assert slopes(value, logp) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data.whose": "teacher"}, "a teacher has no log-probabilities"),
        ({"data.answers": 1}, "at least 2"),
        ({"data.used": 1}, "another one to be compared with"),
        ({"losses.self_normalised.gamma": 0.0}, "above 0"),
        (
            {"losses.self_normalised.target": "best", "losses.self_normalised.gamma": 0.5},
            "the best answer alone",
        ),
    ],
)
def test_refusals(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        pp.plan("brain", "strings", settings=settings)
