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

    def named(self) -> dict[str, nn.Parameter]:
        """What carries the gradient of each weight."""
        return self.moving

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

    def clip(self, limit: float) -> float:
        """Scale all gradients so that their norm is at most `limit` (0: as it is); the norm it was."""
        gradients = [p.grad for p in self.moving.values() if p.grad is not None]
        if not gradients:
            return 0.0
        norm = torch.nn.utils.get_total_norm(gradients)
        if limit > 0:
            torch.nn.utils.clip_grads_with_norm_(self.moving.values(), limit, norm)
        return float(norm)

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


class Flat(Masters):
    """All weights, and all gradients, as pieces of one vector each, for models whose weights are few and small.

    The optimiser then moves one tensor: the arithmetic is the same, without the many small operations.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]):
        super().__init__({})
        self.pieces = dict(weights)
        whole = nn.Parameter(torch.cat([w.detach().flatten() for w in weights.values()]))
        whole.grad = torch.zeros_like(whole)
        self.moving = {"weights": whole}
        sizes = [w.numel() for w in weights.values()]
        numbers, slopes = torch.split(whole.detach(), sizes), torch.split(whole.grad, sizes)
        for weight, number, slope in zip(weights.values(), numbers, slopes, strict=True):
            weight.data = number.view_as(weight)
            weight.grad = slope.view_as(weight)

    def named(self) -> dict[str, nn.Parameter]:
        return self.pieces

    @property
    def gradient(self) -> Tensor:
        found = self.moving["weights"].grad
        assert found is not None
        return found

    def clear(self) -> None:
        self.gradient.zero_()

    def clip(self, limit: float) -> float:
        norm = float(torch.linalg.vector_norm(self.gradient))
        if 0 < limit < norm:
            self.gradient.mul_(limit / (norm + 1e-6))
        return norm
