"""REINFORCE with a moving baseline."""

from __future__ import annotations

import torch
from kit import Tabular, assert_same, gradient, ragged

from panoply.methods.base.reinforce import reinforce
from panoply.slots.credit.moving import moving_baseline
from panoply.slots.reduce.averages import sequence_sum
from panoply.slots.surrogate.ratios import log_likelihood


def test_parts() -> None:
    method = reinforce()
    assert (method.credit, method.surrogate) == (moving_baseline(decay=0.9), log_likelihood())
    assert method.reduce == sequence_sum()
    assert method.regularise == method.select == ()


def test_gradient_is_the_policy_gradient() -> None:
    """−(1/E) Σ_e (R_e − b) ∇ log π(e), with the baseline of earlier batches."""
    made, method, policy = ragged(), reinforce(), Tabular()
    state, _ = method.credit(method.credit.info.state(), ragged(seed=1))
    _, advantage = method.credit(state, made)
    episodes = made.by("episode")
    returns = episodes.sum(made["reward"])
    log_likelihoods = episodes.sum(policy.score(made)["logp"])
    loss = -((returns - state["baseline"]) * log_likelihoods).mean()
    (expected,) = torch.autograd.grad(loss, policy.logits)
    assert_same(gradient(method, made.with_columns(advantage=advantage)), expected)
