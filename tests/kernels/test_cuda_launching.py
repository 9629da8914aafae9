"""Kernels that are launched past Triton's own launcher."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.gpu
def test_what_is_launched_often_is_launched_as_triton_would() -> None:
    """Other types, widths and places that 16 bytes do not divide have code of their own."""
    from panoply.kernels.train import add_norm

    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for width in (64, 65, 64, 200, 65):
            for offset in (0, 1, 0):
                weight = torch.randn(width, device="cuda").to(dtype)
                x = (
                    torch.randn(9 * width + 1, device="cuda")
                    .to(dtype)[offset : offset + 9 * width]
                    .view(9, width)
                )
                wide = x.float()
                wanted = wide * torch.rsqrt((wide * wide).mean(1, keepdim=True) + 1e-6) * weight.float()
                _, found = add_norm(x, None, weight, 1e-6)
                torch.testing.assert_close(found.float(), wanted, atol=2e-2, rtol=2e-2)
