"""Supervised fine-tuning as published."""

from __future__ import annotations

import torch
from kit import Tabular, assert_same, gradient, ragged

from panoply.methods.base.sft import sft
from panoply.slots.loss.imitation import nll
from panoply.slots.reduce.averages import token_mean


def test_parts() -> None:
    method = sft()
    assert method.losses == (nll(),)
    assert method.reduce == token_mean()
    assert method.data.info.name == "demonstrations"
    assert method.equation()[0] == "minimise  mean over tokens [ −log π ]"


def test_gradient_is_of_the_mean_negative_log_likelihood() -> None:
    made, policy = ragged(), Tabular()
    (expected,) = torch.autograd.grad(-policy.score(made)["logp"].mean(), policy.logits)
    assert_same(gradient(sft(), made), expected)
