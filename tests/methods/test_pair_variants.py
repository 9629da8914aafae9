"""Losses on pairs beside DPO's: their gradients are the papers', in float64 and from plain loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from kit import Slow, assert_same, gradient
from papers import PAIRS, over_pairs, paired, total
from torch import Tensor

from panoply.compose import resolve
from panoply.experience import Experience
from panoply.regimes import Dataset

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of ℓ_chosen and ℓ_rejected, the log-ratios to the reference."""


def log_sigmoid(x: Tensor) -> Tensor:
    return (1 / (1 + (-x).exp())).log()


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def robust(won: Tensor, lost: Tensor) -> Tensor:
    margin = 0.1 * (won - lost)
    return (-0.9 * log_sigmoid(margin) + 0.1 * log_sigmoid(-margin)) / 0.8


def exo(won: Tensor, lost: Tensor) -> Tensor:
    p = (0.1 * won).exp() / ((0.1 * won).exp() + (0.1 * lost).exp())
    return p * (p / 0.999).log() + (1 - p) * ((1 - p) / 0.001).log()


def discopop(won: Tensor, lost: Tensor) -> Tensor:
    margin = 0.05 * (won - lost)
    share = sigmoid(margin / 0.05)
    return (1 - share) * -log_sigmoid(margin) + share * (-margin).exp()


def nca(won: Tensor, lost: Tensor) -> Tensor:
    return -log_sigmoid(0.01 * won) - 0.5 * log_sigmoid(-0.01 * won) - 0.5 * log_sigmoid(-0.01 * lost)


def apo_zero(won: Tensor, lost: Tensor) -> Tensor:
    return 1 - sigmoid(0.1 * won) + sigmoid(0.1 * lost)


def apo_down(won: Tensor, lost: Tensor) -> Tensor:
    return sigmoid(0.1 * won) + 1 - sigmoid(0.1 * (won - lost))


def sppo_hard(won: Tensor, lost: Tensor) -> Tensor:
    return (won - 500) ** 2 + (lost + 500) ** 2


LOSSES: dict[str, Loss] = {
    "robust-dpo": robust,
    "exo": exo,
    "discopop": discopop,
    "nca": nca,
    "apo-zero": apo_zero,
    "apo-down": apo_down,
    "sppo-hard": sppo_hard,
}


def built(name: str) -> Dataset:
    method = resolve(name).method
    assert isinstance(method, Dataset)
    return method


def scores(made: Experience, slow: Slow) -> tuple[list[Tensor], list[Tensor]]:
    """ℓ of all chosen and of all rejected sides."""
    of = partial(total, made, slow, against="logp@reference")
    return [of(w) for w, _ in PAIRS], [of(x) for _, x in PAIRS]


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_the_papers(name: str) -> None:
    made, slow, ref = paired(), Slow(), "logp@reference"
    loss = over_pairs(lambda w, x: LOSSES[name](total(made, slow, w, ref), total(made, slow, x, ref)))
    assert_same(gradient(built(name), made), slow.gradient(loss))


def test_bco_subtracts_the_mean_reward_of_the_mini_batch() -> None:
    """δ is a number at the weights of now: no gradient goes through it."""
    made, slow = paired(), Slow()
    won, lost = scores(made, slow)
    shift = 0.01 * float(torch.stack([*won, *lost]).detach().mean())
    losses = [
        -log_sigmoid(0.01 * w - shift) - log_sigmoid(shift - 0.01 * x) for w, x in zip(won, lost, strict=True)
    ]
    found = gradient(built("bco"), made)
    assert_same(found, slow.gradient(torch.stack(losses).mean()))
    assert_same(gradient(built("bco"), made, micro_tokens=1), found)


def by_rank(values: list[Tensor]) -> list[Tensor]:
    return sorted(values, key=lambda x: float(x.detach()))


@pytest.mark.parametrize("micro", [1, 5, 10**9])
@pytest.mark.parametrize("name", ["aot", "aot-unpaired"])
def test_aot_compares_rank_by_rank(name: str, micro: int) -> None:
    """Also where a mini-batch is cut so that a pair is far from the one it is compared with."""
    made, slow = paired(), Slow()
    made = made.with_columns(**{"logp@reference": -made["logp"]})  # what is likely here is unlikely there
    if name == "aot":
        mine = [total(made, slow, w) - total(made, slow, x) for w, x in PAIRS]
        won, lost = scores(made, slow)
        theirs = [(m - (w - x)).detach() for m, w, x in zip(mine, won, lost, strict=True)]
        assert [mine.index(m) for m in by_rank(mine)] != [theirs.index(m) for m in by_rank(theirs)]
    else:
        mine, theirs = scores(made, slow)
    gaps = zip(by_rank(mine), by_rank(theirs), strict=True)
    loss = torch.stack([-log_sigmoid(0.01 * (high - low)) for high, low in gaps]).mean()
    assert_same(gradient(built(name), made, micro_tokens=micro), slow.gradient(loss))
