"""DPO as published."""

from __future__ import annotations

import torch
from kit import Slow, assert_same, gradient, ragged, rows_of

from panoply.experience import Table
from panoply.methods.base.dpo import dpo
from panoply.slots.loss.pairs import logistic


def test_parts() -> None:
    method = dpo()
    assert method.losses == (logistic(beta=0.1),)
    assert method.needs() >= {"logp@reference"}
    assert method.equation()[0].startswith("minimise  mean over pairs")


def test_gradient_is_the_papers() -> None:
    """Equation 7 of arXiv 2305.18290, one pair at a time."""
    pairs = [(100, 102), (104, 103), (106, 109)]
    chosen, rejected = (torch.tensor(side) for side in zip(*pairs, strict=True))
    made, slow = ragged().with_pairs(Table({"chosen": chosen, "rejected": rejected})), Slow()
    loss = torch.zeros((), dtype=torch.float64)
    for winner, loser in pairs:
        margin = torch.zeros((), dtype=torch.float64)
        for row in rows_of(made, episode=winner):
            margin = margin + 0.1 * (slow.logp(row["state"], row["action"]) - row["logp@reference"])
        for row in rows_of(made, episode=loser):
            margin = margin - 0.1 * (slow.logp(row["state"], row["action"]) - row["logp@reference"])
        loss = loss - (1 / (1 + (-margin).exp())).log() / len(pairs)
    assert_same(gradient(dpo(), made), slow.gradient(loss))
