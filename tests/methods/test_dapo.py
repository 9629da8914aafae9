"""DAPO as published."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from kit import Slow, assert_same, gradient, ragged, rows_of, values_of
from papers import ZERO, standardised

import panoply as pp
from panoply.methods.base.dapo import dapo
from panoply.progress import Progress


def test_gradient_is_the_papers() -> None:
    """Equation 8 of arXiv 2503.14476: bounds 0.8 and 1.28, one mean over all tokens."""
    made, slow, loss = ragged(drift=0.4), Slow(), ZERO
    advantage = standardised(made)
    for e in values_of(made, "episode"):
        for row in rows_of(made, episode=e):
            rho = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
            gain = torch.minimum(rho * advantage[e], rho.clamp(0.8, 1.28) * advantage[e])
            loss = loss - gain / len(made)
    method = dapo()
    made = made.with_columns(advantage=method.credit(made))
    assert_same(gradient(method, made), slow.gradient(loss))


def test_reward() -> None:
    """Right 1 and wrong −1, less the share of the last 4096 of 20480 tokens that was used."""
    made = ragged(lengths=((16384, 18432),))
    last = made.by("episode").is_last()
    made = made.with_columns(**{"signal:success": last.double()})
    assert dapo().reward(made)[last].tolist() == [1.0, 0.5]


def test_a_run_says_what_it_asked(tmp_path: Path) -> None:
    """New weights never succeed, so no group varies and every round is asked."""
    settings = {"sample.prompts": 2, "sample.group": 2, "sample.rounds": 3, "run.held_out": 8}
    trained = pp.train(
        "dapo",
        run=tmp_path / "run",
        model="fresh",
        steps=1,
        threads=1,
        settings=settings,
        progress=Progress(),
    )
    row = json.loads((trained.run / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["groups_asked"] == 6
    assert row["episodes"] == 4
