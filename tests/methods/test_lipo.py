"""LiPO: weights of pairs by hand, ranks that are the policy's own, and lists of two, which are DPO."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kit import assert_same, dataset, gradient, ragged, slopes
from lists_kit import flat, listed
from torch import Tensor

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Table
from panoply.methods.preferences.lipo import lipo
from panoply.slots.loss.lists import lambda_rank, list_pairs, list_pointwise, list_softmax
from panoply.slots.loss.pairs import hinge, logistic


def swap(a: int, b: int) -> float:
    """|1/log(1 + a) − 1/log(1 + b)| of two ranks, of which the first is 1: 1/log 2 and not 1/0."""
    return abs(1 / math.log(1 + a) - 1 / math.log(1 + b))


def slope_of(s: list[float], psi: list[float], **settings: Any) -> list[float]:
    logp = torch.tensor(s, dtype=torch.double, requires_grad=True)
    value, _ = lambda_rank(beta=1.0, to=None, **settings)(flat([psi], logp))
    return slopes(value, logp)


def by_hand(s: list[float], psi: list[float], rank: list[int]) -> list[float]:
    """d/ds of −Σ Δ·log σ(s_i − s_j), Δ held fixed."""
    found = [0.0] * len(s)
    for i in range(len(s)):
        for j in range(len(s)):
            if psi[i] > psi[j]:
                delta = (2 ** psi[i] - 2 ** psi[j]) * swap(rank[i], rank[j])
                pull = delta / (1 + math.exp(s[i] - s[j]))
                found[i] -= pull
                found[j] += pull
    return found


def test_ranks_are_the_policy_s_and_not_the_labels() -> None:
    """The worst of three by its label is first by its score; swapping it with the second costs most."""
    s, psi = [0.1, -0.4, 0.7], [0.9, 0.5, 0.2]
    assert slope_of(s, psi) == pytest.approx(by_hand(s, psi, [2, 3, 1]))
    assert slope_of(s, psi) != pytest.approx(by_hand(s, psi, [1, 2, 3]))
    later = [0.8, -0.4, 0.7]
    assert slope_of(later, psi) == pytest.approx(by_hand(later, psi, [1, 3, 2])), (
        "looked at anew, as it is now"
    )


def test_ties_teach_nothing() -> None:
    s, psi = [0.3, -0.1, 0.2], [0.8, 0.5, 0.5]
    assert slope_of(s, psi) == pytest.approx(by_hand(s, psi, [1, 3, 2]))
    assert slope_of(s, [0.5, 0.5, 0.5]) == [0.0] * 3


def test_labels_that_are_close_are_nearly_silent_unless_weights_are_normalised() -> None:
    wide, close = ([0.9, 0.5, 0.1], [0.52, 0.5, 0.48])
    s = [0.1, 0.0, -0.1]
    quiet = slope_of(s, close)[0] / slope_of(s, wide)[0]
    assert 0.02 < quiet < 0.06
    loud = slope_of(s, close, normalise=True)[0] / slope_of(s, wide, normalise=True)[0]
    assert loud == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("part", "pair"),
    [
        (lipo().losses[0].but(beta=0.3), logistic(beta=0.3)),
        (list_pairs(beta=0.3), logistic(beta=0.3)),
        (list_pairs(beta=0.3, kind="hinge"), hinge(beta=0.3, to="reference")),
        (list_softmax(beta=0.3, target="shares"), logistic(beta=0.3)),
    ],
)
def test_lists_of_two_are_pairs_up_to_a_constant(part: Any, pair: Any) -> None:
    made = ragged().with_pairs(Table({"chosen": torch.tensor([107]), "rejected": torch.tensor([104])}))
    made = listed(made, [[107, 104]], [[1.0, 0.0]])
    found, expected = gradient(dataset(part), made), gradient(dataset(pair), made)
    assert_same(found / found.norm(), expected / expected.norm())


def test_points_are_regressed_one_by_one() -> None:
    """σ(s) − ψ, and 2(s − ψ): what the others are worth does not matter."""
    s, psi = [0.1, -0.4, 0.7], [0.9, 0.5, 0.2]
    for kind, expected in (
        ("sigmoid", [1 / (1 + math.exp(-x)) - w for x, w in zip(s, psi, strict=True)]),
        ("squared", [2 * (x - w) for x, w in zip(s, psi, strict=True)]),
    ):
        logp: Tensor = torch.tensor(s, dtype=torch.double, requires_grad=True)
        value, _ = list_pointwise(beta=1.0, to=None, kind=kind)(flat([psi], logp))
        assert slopes(value, logp) == pytest.approx(expected)


def test_a_run_learns_what_annotators_rank(tmp_path: Path) -> None:
    settings = {"run.held_out": 4, "data.batch": 4, "data.prompts": 4, "data.answers": 3, "update.lr": 1e-3}
    tiny.bare(tmp_path / "run", "lipo", world="strings", model="fresh", steps=3, settings=settings)
    rows = tiny.metrics(tmp_path / "run")
    assert rows[-1]["lambda_rank"] < rows[0]["lambda_rank"]
    assert rows[0]["rank_accuracy"] == 0.0, "all scores are 0 before the first step"
    assert rows[-1]["rank_accuracy"] > 0.3


@pytest.mark.parametrize(
    ("world", "settings", "said"),
    [
        ("strings", {"data.answers": 1}, "at least 2"),
        ("strings", {"losses.lambda_rank.beta": 0.0}, "above 0"),
        ("strings", {"data.name": "true"}, "annotators say"),
        ("strings", {"losses": "list_softmax", "losses.list_softmax.target": "shares",
                     "losses.list_softmax.tau": 0.5}, "as they are"),
        ("manyanswers", {}, "needs a world with 'preference'"),
    ],
)  # fmt: skip
def test_refusals(world: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        pp.plan("lipo", world, settings=settings)
