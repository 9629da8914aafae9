"""The search for a threshold on a GPU, on rows as wide as a real vocabulary, against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from panoply.rollout.cuts import FARTHEST, SLACK, ranks

ROWS, VOCABULARY = 128, 151936


def logits(kind: str) -> Tensor:
    torch.manual_seed(0)
    noise = torch.randn(ROWS, VOCABULARY, device="cuda")
    if kind == "sharp":
        noise[:, :20] += torch.linspace(9, 2, 20, device="cuda")
    scale = {"flat": 0.5, "peaked": 4.0, "sharp": 2.0, "tied": 0.0, "far": 60.0}[kind]
    return noise * scale


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["flat", "peaked", "sharp", "tied", "far"])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, 0.95), (None, 0.3), (50, 1.0), (3000, 0.9)])
def test_the_search_finds_the_first_rank_at_which_the_sum_reaches_its_goal(
    kind: str, top_k: int | None, top_p: float
) -> None:
    """Again and again: many threads add to one table, and whatever they forget to wait for shows up seldom."""
    from panoply.kernels.cut import _searched

    z = logits(kind)
    rank, nothing = ranks(z), torch.zeros(ROWS, dtype=torch.long, device="cuda")
    temperature, highest = torch.ones(2, device="cuda"), z.amax(1, keepdim=True).repeat(1, 2)
    given = (z, temperature, nothing, nothing, highest)
    share = (z - highest[:, :1]).double().exp()

    def right(limit: Tensor, weight: Tensor, goal: Tensor) -> None:
        inside = rank <= limit[:, None]
        reached = (weight * inside).sum(1)
        last = rank.masked_fill(~inside, -1).amax(1)
        before = (weight * (rank < last[:, None])).sum(1)
        assert bool((reached >= goal * (1 - 1e-6)).all())
        assert bool((before < goal * (1 + 1e-6)).all())

    for _ in range(20):
        ceiling = None
        if top_k is not None:
            goal = torch.tensor([float(top_k)], dtype=torch.float64, device="cuda")
            ceiling = _searched(given, goal, None, True)
            right(ceiling, torch.ones_like(share), goal)
        if top_p < 1:
            goal = torch.tensor([top_p * (1 - SLACK)], dtype=torch.float64, device="cuda")
            limit = _searched(given, goal, ceiling, False)
            counted = share if ceiling is None else share * (rank <= ceiling[:, None])
            right(limit, counted, goal * counted.sum(1))
            assert bool((limit <= (FARTHEST if ceiling is None else ceiling)).all())
