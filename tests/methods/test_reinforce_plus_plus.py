"""REINFORCE++ as published."""

from __future__ import annotations

import statistics

import torch
from kit import Slow, assert_same, gradient, ragged, rows_of, values_of
from papers import ZERO

from panoply.methods.base.reinforce_plus_plus import reinforce_plus_plus


def test_gradient_is_the_papers() -> None:
    """A_t = r − β·Σ_{s≥t} log π/π_ref, normalised over the batch's tokens, under PPO's clip (arXiv 2501.03262)."""
    made, slow = ragged(drift=0.4), Slow()
    made = made.with_columns(**{"signal:success": made["reward"], "position": torch.arange(len(made))})
    terms: list[tuple[float, torch.Tensor]] = []
    for e in values_of(made, "episode"):
        rows = rows_of(made, episode=e)
        for t, row in enumerate(rows):
            pull = sum(r["logp"] - r["logp@reference"] for r in rows[t:])
            rho = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
            terms.append((rows[-1]["reward"] - 0.01 * pull, rho))
    mean = statistics.fmean(a for a, _ in terms)
    spread = statistics.pstdev(a for a, _ in terms)
    loss = ZERO
    for raw, rho in terms:
        advantage = (raw - mean) / spread
        loss = loss - torch.minimum(rho * advantage, rho.clamp(0.8, 1.2) * advantage) / len(terms)
    method = reinforce_plus_plus()
    made = made.with_columns(reward=method.reward(made))
    made = made.with_columns(advantage=method.credit(made))
    assert_same(gradient(method, made), slow.gradient(loss))
