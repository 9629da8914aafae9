"""Attention over pieces in padded buckets against each piece on its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from panoply.policies.attention import Focus
from panoply.policies.packing import Packing, attend, lay, pack

# Rows of a prefix and its suffixes, of all lengths, one of them nothing; and a sequence alone.
LENGTHS = torch.tensor([3, 1, 4, 2, 0, 5, 2, 6, 7])
SEGMENTS = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 0])
ROWS = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2])


def one_by_one(packing: Packing, qkv: Tensor, heads: int, window: int) -> Tensor:
    """Straight from the definition: softmax over what a query sees."""
    shared = (qkv.shape[1] - heads) // 2
    q, k, v = qkv.split([heads, shared, shared], dim=1)
    out = []
    bounds = zip(packing.queries.tolist(), packing.keys.tolist(), strict=True)
    (begin, first), *rest = bounds
    for end, last in rest:
        source = packing.source[first:last]
        for i, token in enumerate(range(begin, end)):
            stop = len(source) - (end - begin) + i + 1
            seen = source[max(0, stop - window) if window else 0 : stop]
            keys, values = (x[seen].repeat_interleave(heads // shared, dim=1) for x in (k, v))
            weight = torch.einsum("hd,khd->hk", q[token], keys).div(q.shape[-1] ** 0.5).softmax(-1)
            out.append(torch.einsum("hk,khd->hd", weight, values))
        begin, first = end, last
    return torch.stack(out)


@pytest.mark.parametrize("call_pairs", [0, 40, 1 << 20])
@pytest.mark.parametrize("window", [0, 3])
def test_values_and_gradients(call_pairs: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("panoply.policies.packing.CALL_PAIRS", call_pairs)
    packing = pack(LENGTHS, SEGMENTS, ROWS)
    layout = lay(packing)
    assert (len(layout.buckets) == 1) == (call_pairs > 100)
    generator = torch.Generator().manual_seed(0)
    total = int(LENGTHS.sum())
    qkv = torch.randn(total, 8, 4, generator=generator, dtype=torch.float64).requires_grad_()
    found, expected = attend(qkv, 4, layout, Focus(window)), one_by_one(packing, qkv, 4, window)
    torch.testing.assert_close(found, expected)
    weight = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    (slope,) = torch.autograd.grad((found * weight).sum(), qkv)
    (reference,) = torch.autograd.grad((expected * weight).sum(), qkv)
    torch.testing.assert_close(slope, reference)
