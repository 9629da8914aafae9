"""Attention of packed rows on a GPU, forward and backward, against the same written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from panoply.policies.attention import Focus
from panoply.policies.packing import Packing, pack

FOCI = {
    "plain": Focus(),
    "window": Focus(window=19),
    "capped": Focus(cap=2.0, scale=0.3),
    "both": Focus(window=70, cap=3.0),
}


def written_out(q: Tensor, k: Tensor, v: Tensor, packing: Packing, focus: Focus) -> Tensor:
    found, share = [], q.shape[1] // k.shape[1]
    queries, keys = packing.queries.tolist(), packing.keys.tolist()
    for a, b, c, d in zip(queries, queries[1:], keys, keys[1:], strict=False):
        mine = q[a:b].transpose(0, 1)
        theirs, values = (x[c:d].repeat_interleave(share, 1).transpose(0, 1) for x in (k, v))
        scores = mine @ theirs.transpose(1, 2) * (focus.scale or q.shape[2] ** -0.5)
        if focus.cap:
            scores = (scores / focus.cap).tanh() * focus.cap
        key = torch.arange(d - c, device=q.device)
        query = key[d - c - (b - a) :, None]
        seen = (key <= query) & (key > query - focus.window if focus.window else key >= 0)
        found.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(found)


@pytest.mark.gpu
@pytest.mark.parametrize("focus", FOCI)
@pytest.mark.parametrize(("heads", "shared", "size"), [(4, 2, 64), (6, 2, 128), (2, 1, 24), (2, 2, 256)])
@pytest.mark.parametrize("lengths", [(37, 50, 3, 0, 70, 1, 20), (130, 300, 128, 64, 1, 257, 63)])
def test_the_kernels_are_the_equation(
    focus: str, heads: int, shared: int, size: int, lengths: tuple[int, ...]
) -> None:
    from panoply.kernels.attention import backward, forward

    row, segment = torch.tensor([0, 0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    packing = pack(torch.tensor(lengths), segment, row).to("cuda")
    made = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(sum(lengths), heads + 2 * shared, size, device="cuda", generator=made).bfloat16()
    slope = torch.randn(sum(lengths), heads, size, device="cuda", generator=made).bfloat16()
    leaves = [x.double().clone().requires_grad_() for x in packing.listed(qkv, heads)]
    wanted = written_out(*leaves, packing, FOCI[focus])
    slopes = torch.autograd.grad(wanted, leaves, slope.double())

    out, lse = forward(qkv, heads, packing, FOCI[focus])
    d_q = torch.empty_like(qkv)[:, :heads]
    by_head = backward(slope, qkv, heads, out, lse, packing, FOCI[focus], d_q)
    d_k, d_v = (x.float().view(len(x), shared, -1, size).sum(2) for x in by_head)
    for found, true in zip((out, d_q, d_k, d_v), (wanted, *slopes), strict=True):
        assert float((found.detach() - true.detach()).norm() / true.detach().norm()) < 1e-2
