"""What top-k, top-p and min-p leave of a distribution, and what is recorded of that in bounded memory.

All three keep the likeliest tokens, so each is a threshold: what lies no further below the likeliest token than some
`gap` is kept. Gaps are compared as whole numbers (`ranks`), which hold about 1e-5 of a nat and are made by the same
arithmetic on every device. Equal ranks are ties, and ties are kept together. A GPU finds the threshold in a few passes
over the logits (`kernels/cut.py`), where a CPU sorts.

A decision records the ids that could have been drawn where they are at most `LISTED`. Of a larger set it records
the log-probability that separates what was kept from what was not (`cut`), and the mass of what was kept (`kept`).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from panoply.experience import Ragged

LISTED = 64
"""The largest set that is recorded by ids: half a kilobyte a decision."""
DROPPED = 6
"""Low bits of a gap, as a float32 from 1 on, that make no difference between two tokens."""
FARTHEST = (1 << 20) - 1
"""The rank of whatever is 255 nats or more below the likeliest token."""
SLACK = 1e-6
"""A sum of float32 shares reaches `top_p` when it lacks no more than this share of it."""
_ONE = 0x3F800000
CONTAINERS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where Linux says how much memory a container may have, by either version of its groups."""


@dataclass(frozen=True)
class Few:
    """Ids as a kernel lists them, [rows, LISTED], of which the first `counts` of a row are there.

    How many these are together only the device knows: they stay there until somebody has to wait for it anyway.
    """

    ids: Tensor
    counts: Tensor

    def __len__(self) -> int:
        return len(self.counts)

    def ragged(self) -> Ragged:
        inside = torch.arange(self.ids.shape[1], device=self.ids.device) < self.counts[:, None]
        ends = self.counts.long().cumsum(0)
        return Ragged(self.ids[inside].long(), torch.cat([ends.new_zeros(1), ends]))

    @staticmethod
    def cat(parts: Sequence[Few]) -> Few:
        return Few(torch.cat([p.ids for p in parts]), torch.cat([p.counts for p in parts]))


def most_listed() -> int:
    """Bytes that listed ids may take: a quarter of the machine's memory, or of the container's where that has less,
    since a step holds them up to three times."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in map(Path, CONTAINERS):
        with contextlib.suppress(OSError, ValueError):  # there are none, or no limit
            found = min(found, int(file.read_text()))
    return found // 4


def ranks(logits: Tensor) -> Tensor:
    """How far below the likeliest token each is, in whole numbers; FARTHEST + 1 for what has no probability."""
    gap = logits.amax(-1, keepdim=True) - logits
    found = ((1 + gap).view(torch.int32) - _ONE) >> DROPPED
    return found.clamp_(max=FARTHEST).masked_fill_(logits == -torch.inf, FARTHEST + 1)


def farthest(min_p: float) -> int:
    """The last rank that `min_p` of the likeliest token's probability leaves; FARTHEST where it is 0."""
    if min_p == 0:
        return FARTHEST
    gap = torch.tensor([1 - math.log(min_p)], dtype=torch.float32)
    return min(int((gap.view(torch.int32) - _ONE) >> DROPPED), FARTHEST)


def truncated(logits: Tensor, top_k: int | None, top_p: float, min_p: float = 0.0) -> Tensor:
    """Marks the `top_k` likeliest tokens; of those, the fewest whose probability reaches `top_p`; and of those, what
    has at least `min_p` of the likeliest token's probability. Ties with the last of them are in."""
    rank = ranks(logits.float())
    ordered, order = rank.sort(-1)
    limit = torch.full_like(ordered[:, :1], FARTHEST)
    if top_k is not None and top_k < rank.shape[-1]:
        limit = limit.minimum(ordered[:, top_k - 1 : top_k])
    if top_p < 1:
        share = (logits - logits.amax(-1, keepdim=True)).exp().gather(-1, order)
        reached = share.masked_fill_(ordered > limit, 0.0).cumsum(-1, dtype=torch.float64)
        last = (reached < reached[:, -1:] * (top_p * (1 - SLACK))).sum(-1, keepdim=True)
        limit = limit.minimum(ordered.gather(-1, last))
    return rank <= limit.clamp(max=farthest(min_p))


def separated(logits: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """`cut` and `kept` [B] of a set of likeliest tokens; −∞ and 1 where it is everything that could be drawn.

    The cut lies halfway between the least likely token inside and the likeliest one outside, so that rounding moves no
    token over it unless the two are as good as tied.
    """
    whole = logits.logsumexp(-1)
    outside = logits.masked_fill(inside, -torch.inf)
    least, next_best = logits.masked_fill(~inside, torch.inf).amin(-1), outside.amax(-1)
    cut = torch.where(next_best > -torch.inf, (least + next_best) / 2 - whole, -torch.inf)
    return cut, -torch.expm1(outside.logsumexp(-1) - whole)
