"""Room for learning on a GPU: how many tokens a pass may have, measured by two small ones before the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

TRIAL = 1024
"""Tokens of the first trial pass; the second has about twice as many."""
SHARE = 0.9
"""Of the memory that is left, what a pass may take: sequences differ, and memory is never quite whole."""


class Meter(Protocol):
    """What measures passes."""

    def used(self, run: Callable[[], None]) -> int:
        """The most bytes a pass takes beyond what is held before it."""

    def left(self) -> int:
        """Bytes that nothing holds."""


class CudaMeter:
    def __init__(self, device: torch.device):
        self.device = device

    def used(self, run: Callable[[], None]) -> int:
        held = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        return torch.cuda.max_memory_allocated(self.device) - held

    def left(self) -> int:
        idle = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + idle


def fitting(sizes: Sequence[int], used: Sequence[int], left: int) -> int:
    """The tokens whose pass fits into `left` bytes, from the bytes that two passes of other sizes used.

    A pass takes a part that is always the same (gradients, a chunk of logits) and one that grows with its tokens.
    """
    each = max(1.0, (used[1] - used[0]) / (sizes[1] - sizes[0]))
    fixed = used[0] - each * sizes[0]
    return int((SHARE * left - fixed) / each)
