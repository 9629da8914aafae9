"""Adam whose two averages take a byte a weight each, with a scale for every 256 of them.

A byte is a step on a ladder of powers of two, ten to the octave for squares and six for means, below a scale that is a
power of two itself. So the rungs of all blocks and of all times are the same ones, and what does not change is not
rounded again. β₂ = 0.999 moves an average by a thousandth, much less than a rung: rounded to the nearest it would never
move, so it is rounded up or down by chance, right on average. The chance depends on the weight's place and on how often
it has moved, and on nothing else: a run that goes on draws what an uninterrupted one would.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from panoply.seeds import stable_hash

BLOCK = 256
"""Weights that share a scale."""
CHUNK = 1 << 24
"""Weights whose averages are held in float32 at a time."""


@dataclass(frozen=True)
class Ladder:
    """Bytes for numbers of at most `scale`: the rung q stands for scale · 2^((q − top) / octave), 0 for nothing.

    signed   whether there is a ladder below 0, too
    floor    whether what is below the lowest rung, and not 0, stands on it: a mean square of 0 would divide by 0
    """

    octave: int
    top: int
    signed: bool
    floor: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.signed else torch.uint8

    def height(self, rung: Tensor) -> Tensor:
        return torch.exp2((rung - self.top) / self.octave)

    def encode(self, numbers: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """[blocks, BLOCK] numbers to bytes and [blocks, 1] scales; `uniform` says who is rounded up."""
        size = numbers.abs()
        scale = torch.ldexp(torch.ones_like(size[:, :1]), torch.frexp(size.amax(1, keepdim=True)).exponent)
        size = size / scale
        rung = (self.top + torch.floor(torch.log2(size) * self.octave)).clamp(
            0 if not self.floor else 1, self.top
        )
        low, high = torch.where(rung > 0, self.height(rung), 0.0), self.height(rung + 1)
        rung = (rung + (uniform * (high - low) < size - low)).clamp(max=self.top)
        rung = torch.where(size > 0, rung, 0)
        return (torch.copysign(rung, numbers) if self.signed else rung).to(self.dtype), scale

    def decode(self, rungs: Tensor, scale: Tensor) -> Tensor:
        wide = rungs.float()
        found = torch.where(wide != 0, self.height(wide.abs()), 0.0) * scale
        return torch.copysign(found, wide) if self.signed else found


MEANS = Ladder(octave=6, top=127, signed=True, floor=False)
SQUARES = Ladder(octave=10, top=255, signed=False, floor=True)
KEPT = {"exp_avg": MEANS, "exp_avg_sq": SQUARES}


class EightBitAdam(torch.optim.Optimizer):
    """torch's fused AdamW on a chunk of weights at a time, whose averages are float32 only for that long."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], **settings: float):
        super().__init__(list(parameters), {**settings, "fused": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        all_of_them = ((group, parameter) for group in self.param_groups for parameter in group["params"])
        for index, (chosen, parameter) in enumerate(all_of_them):
            if parameter.grad is None:
                continue
            rates = {name: chosen[name] for name in ("lr", "beta1", "beta2", "eps", "weight_decay")}
            kept = self.state[parameter] or self._begin(parameter)
            kept["step"] = float(kept["step"]) + 1
            chance = torch.Generator(parameter.device)
            chance.manual_seed(stable_hash("adam", index, kept["step"]))
            self._move(parameter, kept, rates, chance)

    @staticmethod
    def _move(
        parameter: Tensor, kept: dict[str, Any], rates: dict[str, Any], chance: torch.Generator
    ) -> None:
        assert parameter.grad is not None
        weights, slopes = parameter.view(-1), parameter.grad.reshape(-1)
        count = torch.full((), kept["step"], device=parameter.device)
        for start in range(0, len(weights), CHUNK):
            some = slice(start, min(start + CHUNK, len(weights)))
            length, blocks = some.stop - start, slice(start // BLOCK, -(-some.stop // BLOCK))
            averages = [
                ladder.decode(kept[name][blocks], kept[f"{name}_scale"][blocks])
                for name, ladder in KEPT.items()
            ]
            means, squares = ([average.view(-1)[:length]] for average in averages)
            torch._fused_adamw_(
                [weights[some]], [slopes[some]], means, squares, [], [count], **rates, amsgrad=False, maximize=False
            )  # fmt: skip
            for (name, ladder), average in zip(KEPT.items(), averages, strict=True):
                uniform = torch.rand(average.shape, generator=chance, device=average.device)
                kept[name][blocks], kept[f"{name}_scale"][blocks] = ladder.encode(average, uniform)

    def _begin(self, parameter: Tensor) -> dict[str, Any]:
        blocks = -(-parameter.numel() // BLOCK)
        kept: dict[str, Any] = {"step": 0.0}
        for name, ladder in KEPT.items():
            kept[name] = torch.zeros(blocks, BLOCK, dtype=ladder.dtype, device=parameter.device)
            kept[f"{name}_scale"] = torch.ones(blocks, 1, device=parameter.device)
        self.state[parameter] = kept
        return kept
