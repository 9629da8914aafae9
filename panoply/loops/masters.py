"""Float32 copies of weights that work in fewer bits: what the optimiser moves, and where gradients add up."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

NARROW = (torch.bfloat16, torch.float16)
SCALE = 2.0**16
"""float16 gradients are computed this many times too large, or they would vanish below its smallest number."""


class Masters:
    """`moving` are the parameters an optimiser should move: the weights themselves, or their float32 masters.

    A step of 1e-6 is lost on a bfloat16 weight, whose neighbours are 4e-3 of it away; its master keeps it.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]):
        self.weights = {name: w for name, w in weights.items() if w.dtype in NARROW}
        self.masters = {name: nn.Parameter(w.detach().float()) for name, w in self.weights.items()}
        self.moving: dict[str, nn.Parameter] = {**weights, **self.masters}
        half = any(w.dtype == torch.float16 for w in self.weights.values())
        self.scale = SCALE if half else 1.0

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter in (*self.weights.values(), *self.moving.values()):
            parameter.grad = None

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of a micro-batch to the masters', in float32."""
        for name, weight in self.weights.items():
            if weight.grad is None:
                continue
            master = self.masters[name]
            if master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad += weight.grad
            weight.grad = None

    def overflowed(self, loss: float) -> bool:
        """Whether the scale was too large for float16; it is then halved, and the pass must be repeated."""
        grads = [m.grad for m in self.masters.values() if m.grad is not None]
        if self.scale <= 1.0 or not grads or not math.isfinite(loss):
            return False
        if bool(torch.nn.utils.get_total_norm(grads).isfinite()):
            return False
        self.scale /= 2
        return True

    @torch.no_grad()
    def unscale(self) -> None:
        """Divide what was collected by the scale its losses were multiplied by."""
        grads = [m.grad for m in self.masters.values() if m.grad is not None]
        if self.scale != 1.0 and grads:
            torch._foreach_div_(grads, self.scale)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the weights, in place: whoever holds those samples from the new policy."""
        if self.masters:
            torch._foreach_copy_(list(self.weights.values()), list(self.masters.values()))

    def state(self) -> dict[str, Tensor]:
        return {f"{name}:master": master.detach() for name, master in self.masters.items()}

    @torch.no_grad()
    def load(self, name: str, value: Tensor) -> None:
        if name in self.masters:
            self.masters[name].copy_(value)
            self.weights[name].copy_(value)
