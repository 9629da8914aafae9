"""RPO: the two conventions by hand, the gradient, and the exact bandit against known numbers."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from kit import Tabular, assert_same, batch, hand, learner

from panoply.batch import Batch
from panoply.methods.preferences.rpo import CLAIM, STEPS, Uncovered, overoptimised, pessimistic, rpo
from panoply.slots.loss.pairs import logistic

EPISODE, REFERENCE, NOW = [0, 0, 1], [-1.0, -1.0, -1.0], [-0.5, -0.7, -2.0]
ROWS = {"episode": EPISODE, "logp@reference": REFERENCE}
"""ℓ_chosen = .8, ℓ_rejected = −1; the chosen side has two tokens of log-probability −1.2 in all."""


@pytest.mark.parametrize(
    ("nll", "more"),
    [("sum", 0.4 * 0.3 * 1.2), ("mean", 0.3 * 0.6)],  # η·β·Σ and η·mean
)
def test_both_conventions_of_the_coefficient(nll: str, more: float) -> None:
    rows = batch(hand([(0, 1)], **ROWS), logp=NOW)
    value, stats = pessimistic(beta=0.4, eta=0.3, nll=nll)(rows)
    margin = 0.4 * 1.8
    assert value.tolist() == pytest.approx([-float(F.logsigmoid(torch.tensor(margin))) + more])
    assert stats["chosen_nll"].tolist() == pytest.approx([1.2 if nll == "sum" else 0.6])
    plain, _ = logistic(beta=0.4)(rows)
    assert pessimistic(beta=0.4, eta=0.0)(rows)[0].tolist() == pytest.approx(plain.tolist())


@pytest.mark.parametrize("micro", [1, 2, 100])
def test_the_gradient_is_the_equations(micro: int) -> None:
    """∇L = −β·[(1 − σ)·(∇ℓ_w − ∇ℓ_l) + η·∇log π(y_w)], a mean over pairs, in whatever pieces."""
    policy = Tabular()
    state, action, episode = [0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 0, 2], [0, 0, 1, 2, 2, 3]
    reference, beta, eta = [-1.0, -1.2, -0.7, -2.0, -1.5, -0.4], 0.7, 2.0
    rows = hand(
        [(0, 1), (3, 2)], state=state, action=action, episode=episode, **{"logp@reference": reference}
    )
    found = learner(policy, rpo().but(losses=(pessimistic(beta=beta, eta=eta),)), micro_tokens=micro)
    logp = policy.logits.detach().log_softmax(-1)
    slow = torch.zeros_like(policy.logits)

    def score(e: int) -> tuple[float, torch.Tensor]:
        ratio, slope = 0.0, torch.zeros_like(slow)
        for i in (i for i in range(6) if episode[i] == e):
            ratio += float(logp[state[i], action[i]]) - reference[i]
            slope[state[i]] -= logp[state[i]].exp()
            slope[state[i], action[i]] += 1
        return ratio, slope

    for won, lost in ((0, 1), (3, 2)):
        (a, up), (b, down) = score(won), score(lost)
        doubt = 1 - torch.sigmoid(torch.tensor(beta * (a - b), dtype=torch.float64))
        slow -= beta * (doubt * (up - down) + eta * up) / 2
    assert_same(found.gradient(rows)["logits"], slow)


# ------------------------------------------------------------------ the bandit


@pytest.mark.parametrize(
    ("eta", "at_100", "end"), [(0.0, 0.773, -0.996), (1.0, 0.752, 0.292), (5.0, 0.756, 0.751)]
)
def test_the_bandit_comes_to_known_values(eta: float, at_100: float, end: float) -> None:
    bandit = Uncovered()
    values = [bandit.value(p) for p in islice(bandit.descent(eta), STEPS + 1)]
    assert values[0] == pytest.approx(0.715)
    assert (values[100], values[-1]) == (pytest.approx(at_100, abs=5e-4), pytest.approx(end, abs=5e-4))


def test_the_bandits_slope_is_that_of_the_loss() -> None:
    """Ten pairs, nine of which prefer A: the part's own gradient by the one weight, at η·β·Σ."""
    bandit, beta, eta, w = Uncovered(), 0.1, 5.0, 1.3
    weight = torch.tensor(w, dtype=torch.float64, requires_grad=True)
    logits = torch.tensor(bandit.reference).double().log() + weight * torch.tensor(bandit.features).double()
    logp, reference = logits.log_softmax(-1), torch.tensor(bandit.reference).double().log()
    arms = torch.tensor([0, 1])
    sides = [(0, 1)] * 9 + [(1, 0)]
    rows = hand(sides, episode=[0, 1], action=arms, **{"logp@reference": reference[arms]})
    value, _ = pessimistic(beta=beta, eta=eta)(Batch(rows, {"logp": logp[arms]}))
    value.mean().backward()
    assert float(weight.grad) == pytest.approx(bandit.slope(w, beta, eta), rel=1e-6)  # type: ignore[arg-type]


def test_the_claim_measures_what_it_says() -> None:
    found = overoptimised(1001)
    first = next(iter(found.values()))
    assert CLAIM.difference(first) == first == found["RPO, η 5: value"] - found["DPO: value"]
    assert found["DPO: mass elsewhere"] > 0.9 > 0.3 > found["RPO, η 5: mass elsewhere"]
    assert found["DPO: log π(chosen)"] < found["RPO, η 5: log π(chosen)"]
