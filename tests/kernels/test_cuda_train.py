"""Kernels of the learner against plain torch."""

from __future__ import annotations

import pytest
import torch

from panoply.policies.packing import pack


@pytest.mark.gpu
def test_many_gradients_are_added_at_once() -> None:
    from panoply.kernels.collecting import add_all, fits

    shapes = [(16,), (3, 4096), (5000, 32), (1, 16), (70, 48)]
    parts = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    assert all(map(fits, parts))
    assert not fits(parts[1].t())
    assert not fits(torch.zeros(15, device="cuda").bfloat16())
    assert not fits(parts[0].float())
    totals = [torch.full(shape, 7.0, device="cuda") for shape in shapes]
    add_all(totals, parts, fresh=True)
    for total, part in zip(totals, parts, strict=True):
        assert torch.equal(total, part.float())
    add_all(totals, parts, fresh=False)
    for total, part in zip(totals, parts, strict=True):
        assert torch.equal(total, 2 * part.float())


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(3, 2, 40, 5, 1), (130, 0, 0, 7, 9)])
@pytest.mark.parametrize("share", [1, 3])
def test_slopes_of_listed_keys_come_back_to_their_tokens(lengths: tuple[int, ...], share: int) -> None:
    from panoply.kernels.train import gather

    packing = pack(torch.tensor(lengths), torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 0, 0, 1, 1])).to(
        "cuda"
    )
    shape = len(packing.source), 2 * share, 24
    keys, values = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    out = torch.zeros(sum(lengths), 7, 24, device="cuda").bfloat16()
    gather(keys, values, packing.places, packing.bounds, out[:, 3:])
    for found, slopes in ((out[:, 3:5], keys), (out[:, 5:], values)):
        of_heads = slopes.float().view(len(slopes), 2, share, 24).sum(2)
        wanted = torch.zeros(sum(lengths), 2, 24, device="cuda").index_add_(0, packing.source, of_heads)
        torch.testing.assert_close(found, wanted.bfloat16(), atol=2e-2, rtol=1e-2)
    assert not out[:, :3].any()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 8), (33, 130), (5000, 1152)])
def test_columns_are_summed_in_float32(shape: tuple[int, int]) -> None:
    from panoply.kernels.train import column_sums

    x = torch.randn(shape, device="cuda").bfloat16()
    torch.testing.assert_close(column_sums(x), x.float().sum(0), atol=1e-2, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 8), (64, 130), (512, 896)])
def test_partial_sums_are_folded_onto_what_is_there(shape: tuple[int, int]) -> None:
    from panoply.kernels.train import folded

    partial = torch.randn(shape, device="cuda")
    once = folded(partial)
    torch.testing.assert_close(once, partial.sum(0), atol=1e-4, rtol=1e-5)
    assert folded(partial, once) is once
    torch.testing.assert_close(once, 2 * partial.sum(0), atol=1e-4, rtol=1e-5)
