"""Log-probabilities with their gradient in one reading, against the kernels that take two."""

from __future__ import annotations

import pytest
import torch

ROWS = 6


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [300, 9001])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("heated", [False, True])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_one_reading_finds_what_two_find(
    vocab: int, softcap: float, heated: bool, cut: bool, listed: bool
) -> None:
    from panoply.kernels.scoring import Drawn, normalise, slope, weigh

    torch.manual_seed(0)
    z, actions = 3 * torch.randn(ROWS, vocab), torch.randint(0, vocab, (ROWS,))
    if not softcap:  # what is far above the first tokens, or far below all others
        z[0, vocab - 3], z[1] = 150.0, z[1] - 300.0
        z[5, vocab // 2] += 95.0
    lists = torch.stack([torch.randperm(vocab)[:8] for _ in range(ROWS)]).int()
    counts = torch.tensor([0, 3, 8, 0, 1, 0], dtype=torch.int32)
    cuts = torch.tensor([-9.0, -torch.inf, -9.0, -7.0, -torch.inf, -9.0])
    if listed:
        actions = torch.where(counts > 0, lists[:, 0].long(), actions)
        cuts[counts > 0] = -torch.inf
    given = (
        actions,
        torch.rand(ROWS) + 0.5 if heated else None,
        softcap,
        cuts if cut else None,
        *((lists, counts) if listed else (None, None)),
    )
    drawn = Drawn(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in given))
    z = z.cuda()
    ours, right = torch.full_like(z, 7.0), torch.empty_like(z)
    logp, scale = weigh(z, drawn, ours)
    sums = normalise(z, drawn, entropy=False)
    slope(z, drawn, sums, torch.ones_like(logp), None, right)
    torch.testing.assert_close(logp, sums.logp, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(ours * scale[:, None], right, atol=1e-4, rtol=1e-4)
