"""Activations in host memory: what a pass keeps for its backward pass leaves the GPU and comes back when asked for.

Bytes are copied, so the gradient is the same to the last bit. A pass waits for its copies: were they made beside it,
memory would be given back only when they are done, and the pass, which is faster, would run out of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from panoply.policies.moving import piece

LEAST = 1 << 20
"""Bytes of a tensor that is worth a copy."""


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """A context for a forward pass. Weights stay where they are: the pass keeps them, but does not own them."""

    def __init__(self, weights: Iterable[Tensor], least: int = LEAST):
        pieces = (piece(weight.detach()) for weight in weights)
        self.staying = {one.untyped_storage().data_ptr() for one in pieces}
        self.least = least
        self.moved_bytes = 0
        super().__init__(self._away, self._back)

    def _away(self, kept: Tensor) -> Any:
        if kept.nbytes < self.least or kept.untyped_storage().data_ptr() in self.staying:
            return kept
        self.moved_bytes += kept.nbytes
        host = torch.empty_like(kept, device="cpu", pin_memory=kept.is_cuda)
        return kept.device, host.copy_(kept, non_blocking=True)

    def _back(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        found: Tensor = host.to(device, non_blocking=True)
        return found
