"""Regularisers: values and slopes by hand, and the divergence that is really descended."""

from __future__ import annotations

import math

import pytest
import torch
from kit import ACTIONS, Tabular, assert_same, batch, hand, learner, on_policy, slopes, toy_shares
from torch import Tensor

from panoply.experience import Experience
from panoply.slots.regularise.terms import entropy, kl
from panoply.slots.schedule.schedules import linear

LOG2 = math.log(2)


@pytest.mark.parametrize(
    ("settings", "values", "slope"),
    [
        ({"estimator": "k1"}, [LOG2, -LOG2], [LOG2, -LOG2]),
        ({"estimator": "k2"}, [0.2402265, 0.2402265], [LOG2, -LOG2]),
        ({"estimator": "k3"}, [0.1931472, 0.3068528], [0.5, -1.0]),
        ({"estimator": "k3", "descends": "reverse"}, [0.1931472, 0.3068528], [LOG2, -LOG2]),
        ({"estimator": "k1", "descends": "forward"}, [LOG2, -LOG2], [0.5, -1.0]),
    ],
)
def test_kl(settings: dict[str, object], values: list[float], slope: list[float]) -> None:
    """A decision twice as likely as under the reference, and one half as likely."""
    made = hand(**{"logp@reference": [math.log(0.25), math.log(0.5)]})
    seen = batch(made, logp=[math.log(0.5), math.log(0.25)])
    found, stats = kl(**settings)(seen)
    assert found.tolist() == pytest.approx(values)
    assert stats["kl_reference"].tolist() == pytest.approx(values)
    assert slopes(found, seen.now["logp"]) == pytest.approx(slope)


def test_kl_does_not_overflow() -> None:
    seen = batch(hand(**{"logp@reference": [0.0, -900.0]}), logp=[-900.0, 0.0])
    found, _ = kl(estimator="k3")(seen)
    assert found.isfinite().all()
    assert all(math.isfinite(s) for s in slopes(found, seen.now["logp"]))


def test_kl_to_other_snapshots() -> None:
    made = hand(logp=[math.log(0.25)], **{"logp@old": [math.log(0.125)]})
    assert kl(to="behaviour", estimator="k1")(batch(made, logp=[math.log(0.5)]))[0].tolist() == pytest.approx(
        [LOG2]
    )
    assert kl(to="old", estimator="k1")(batch(made, logp=[math.log(0.5)]))[0].tolist() == pytest.approx(
        [2 * LOG2]
    )
    assert kl(to="old").needs() == {"logp@old"}
    assert kl(to="behaviour").needs() == frozenset()
    assert kl(weight=0.0).needs() == frozenset()
    assert kl(weight=linear()).needs() == {"logp@reference"}


def test_entropy() -> None:
    seen = batch(hand(action=[0, 1]), logp=[-1.0, -1.0], entropy=[0.5, 0.75])
    found, _ = entropy()(seen)
    assert found.tolist() == [-0.5, -0.75]
    assert slopes(found, seen.now["entropy"]) == [-1.0, -1.0]


# ------------------------------------------------------------------ exact expectations over every action


def every_action() -> tuple[Tabular, Tabular, Experience]:
    """One state, each action once, weighted by its probability: the learner's sum is an exact expectation."""
    policy, reference = Tabular(1, states=1), Tabular(2, states=1)
    made = hand(state=[0] * ACTIONS, action=list(range(ACTIONS)), episode=[0] * ACTIONS)
    with torch.no_grad():
        logp, other = policy.score(made)["logp"], reference.score(made)["logp"]
    columns = {"share": logp.exp(), "logp@reference": other, "logp": logp}
    return policy, reference, made.with_columns(advantage=torch.zeros(ACTIONS), **columns)


def exact(policy: Tabular, reference: Tabular, direction: str) -> Tensor:
    """The divergence itself, a sum over all actions."""
    p, q = (x.logits.log_softmax(-1)[0] for x in (policy, reference))
    return (p.exp() * (p - q)).sum() if direction == "reverse" else (q.exp() * (q - p)).sum()


@pytest.mark.parametrize(
    ("estimator", "descends", "direction"),
    [
        ("k1", None, "reverse"),
        ("k2", None, "reverse"),
        ("k3", None, "forward"),
        ("k1", "forward", "forward"),
        ("k2", "forward", "forward"),
        ("k3", "reverse", "reverse"),
        ("k3", "forward", "forward"),
    ],
)
def test_kl_descends_what_it_says(estimator: str, descends: str | None, direction: str) -> None:
    policy, reference, made = every_action()
    term = kl(weight=0.5, estimator=estimator, descends=descends)
    method = on_policy(regularise=(term,), reduce=toy_shares())
    found = learner(policy, method).gradient(made)["logits"]
    (expected,) = torch.autograd.grad(0.5 * exact(policy, reference, direction), policy.logits)
    assert_same(found, expected, rel=1e-10)
    assert {"reverse": "KL(π‖π_ref)", "forward": "KL(π_ref‖π)"}[direction] in term.equation()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_values_are_unbiased(estimator: str) -> None:
    policy, reference, made = every_action()
    found, _ = kl(estimator=estimator)(batch(made, logp=policy.score(made)["logp"].tolist()))
    expected = exact(policy, reference, "reverse")
    torch.testing.assert_close((found * made["share"]).sum(), expected)


def test_kl_k2_is_near_for_near_policies() -> None:
    """k2 is biased: its mean is E[l²]/2, which agrees with KL to second order only."""
    policy, reference, made = every_action()
    with torch.no_grad():
        reference.logits.copy_(policy.logits + 1e-3 * reference.logits)
    made = made.with_columns(**{"logp@reference": reference.score(made)["logp"].detach()})
    found, _ = kl(estimator="k2")(batch(made, logp=policy.score(made)["logp"].tolist()))
    expected = exact(policy, reference, "reverse")
    torch.testing.assert_close((found * made["share"]).sum(), expected, rtol=5e-3, atol=0)


def test_entropy_gradient_is_that_of_the_whole_distribution() -> None:
    policy, _, made = every_action()
    method = on_policy(regularise=(entropy(weight=0.3),), reduce=toy_shares())
    found = learner(policy, method).gradient(made)["logits"]
    p = policy.logits.log_softmax(-1)[0]
    (expected,) = torch.autograd.grad(0.3 * (p.exp() * p).sum(), policy.logits)
    assert_same(found, expected, rel=1e-10)
