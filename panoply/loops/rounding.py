"""bfloat16 weights without float32 copies: after a step each is rounded up or down by chance, right on average.

Weights then take 2 bytes and not 6. A step of 1e-6 on weights of 1, whose neighbours are 8e-3 away, moves one of 8,000
of them, by 8e-3: the mean is kept, at the price of noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from panoply.loops.mover import Masters, nothing
from panoply.seeds import stable_hash

TOGETHER = 1 << 26
"""Weights that are in float32 at a time, while the optimiser moves them."""


def rounded(wide: Tensor, chance: torch.Generator) -> Tensor:
    """float32 to bfloat16: the lower neighbour, or the upper one with the probability that makes the mean right.

    bfloat16 is the first half of float32's bits; what is cut off is the way to the next number, in 65,536ths.
    """
    noise = torch.randint(0, 1 << 16, wide.shape, generator=chance, device=wide.device, dtype=torch.int32)
    bits = (wide.view(torch.int32) + noise) & -(1 << 16)
    return torch.where(wide.isfinite(), bits.view(torch.float32), wide).bfloat16()


class Rounding(Masters):
    """Gradients add up in float32; the weights are float32 only while they are moved, some at a time.

    The chance is made of `seed`, the step and how many moves it has had: a run that goes on draws what it would have.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], seed: int):
        super().__init__({})
        self.seed, self.moves = seed, (0, 0)
        self.weights = {name: w for name, w in weights.items() if w.dtype == torch.bfloat16}
        self.masters = {name: nn.Parameter(nothing(w)) for name, w in self.weights.items()}
        self.moving = {**weights, **self.masters}

    def move(self, optimiser: torch.optim.Optimizer, step: int) -> None:
        """A step of the optimiser, which passes over weights that have no gradient: a few have one at a time."""
        self.moves = (step, self.moves[1] + 1 if self.moves[0] == step else 0)
        slopes = {name: moving.grad for name, moving in self.moving.items()}
        for moving in self.moving.values():
            moving.grad = None
        with _once(optimiser):
            for names in self._together():
                for name in names:
                    if name in self.masters:
                        self.masters[name].data = self.weights[name].detach().float()
                    self.moving[name].grad = slopes[name]
                optimiser.step()
                for name in names:
                    self.moving[name].grad = None
                    if name in self.masters:
                        self._put_back(name)
        for name, moving in self.moving.items():
            moving.grad = slopes[name]

    @torch.no_grad()
    def _put_back(self, name: str) -> None:
        weight, master = self.weights[name], self.masters[name]
        chance = torch.Generator(weight.device)
        chance.manual_seed(stable_hash("rounding", self.seed, *self.moves, name))
        weight.copy_(rounded(master.detach(), chance))
        master.data = nothing(weight)

    def _together(self) -> Iterator[set[str]]:
        names: set[str] = set()
        count = 0
        for name, weight in self.moving.items():
            names.add(name)
            count += weight.numel()
            if count >= TOGETHER:
                yield names
                names, count = set(), 0
        if names:
            yield names

    def publish(self) -> None:
        """The weights are where the optimiser has left them."""

    def state(self) -> dict[str, Tensor]:
        return {}


@contextmanager
def _once(optimiser: torch.optim.Optimizer) -> Iterator[None]:
    """Whoever is told of an optimiser's steps is told of those inside as of one."""
    told = dict(optimiser._optimizer_step_post_hooks)
    optimiser._optimizer_step_post_hooks.clear()
    try:
        yield
    finally:
        optimiser._optimizer_step_post_hooks.update(told)
    for hook in told.values():
        hook(optimiser, (), {})
