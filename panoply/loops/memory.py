"""Room for learning on a GPU: how many tokens a pass may have, measured by two small ones before the first.

What does not fit after all is halved, or blocks are computed again in the backward pass; the gradient stays the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch

from panoply.errors import DeviceError
from panoply.experience import Experience
from panoply.loops.micro_batches import tokens
from panoply.policies.scoring import has_triton

TRIAL = 1024
"""Tokens of the first trial pass; the second has about twice as many."""
SHARE = 0.9
"""Of the memory that is left, what a pass may take: sequences differ, and memory is never quite whole."""

Recompute = Literal["auto", "always", "never"]
Split = Callable[[Experience, int | None], Iterator[Experience]]
"""Rows, and how many tokens a part of them may have."""


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


class Room:
    """How many `tokens` a pass may have, and whether it computes blocks again: as asked for, until memory says no."""

    def __init__(self, asked: int, models: Sequence[Any], recompute: Recompute, device: torch.device):
        self.tokens, self.models = asked, models
        self.meter: Meter | None = CudaMeter(device) if device.type == "cuda" else None
        """Measures the first passes; from then on these have their size, and it is gone."""
        self._may_recompute = recompute != "never"
        if recompute == "always":
            self._recompute()
            self._may_recompute = False

    def fit(
        self,
        rows: Experience,
        longest: int,
        split: Split,
        rehearsed: Callable[[Experience], None],
        used: Callable[[Meter, Experience], int],
        coming: int,
    ) -> None:
        """Fewer tokens from now on, where two small passes say that the GPU has no room for those asked for.

        longest     tokens of what cannot be split
        rehearsed   prepares the first pass
        used        the bytes that a pass takes by a meter
        coming      bytes that will be held when it comes to real ones
        """
        small = next(split(rows, TRIAL))
        trials = [small, next(split(rows, 2 * tokens(small) + longest))]
        sizes = [tokens(trial) for trial in trials]
        if self.meter is None or sizes[0] == sizes[1]:
            return
        meter, self.meter = self.meter, None

        def measured() -> int:
            taken = [used(meter, trial) for trial in trials]
            return max(1, fitting(sizes, taken, meter.left() - coming))

        try:
            rehearsed(small)
            fits = measured()
            if fits < longest and self._recompute():
                fits = measured()
            if fits < min(self.tokens, tokens(rows)):
                self.tokens = fits
                warnings.warn(f"Memory has room for micro-batches of {fits} tokens.", stacklevel=2)
        except torch.OutOfMemoryError:
            pass  # the first real pass will say so, and deal with it

    def halve(self, rows: Experience, split: Split) -> None:
        """After running out of memory: smaller passes from now on."""
        torch.cuda.empty_cache()
        parts = [tokens(part) for part in split(rows, None)]
        self.tokens = max(1, min(self.tokens, max(parts)) // 2)
        if len(list(split(rows, None))) > len(parts):
            said = f"going on with micro-batches of {self.tokens} tokens"
        elif self._recompute():
            said = "from now on the inside of blocks is computed again in the backward pass"
        else:
            raise DeviceError(
                f"Out of memory on a micro-batch of {max(parts)} tokens that cannot be split further: take a smaller "
                "model, shorter sequences, or run.dtype=bfloat16. The run can be resumed."
            )
        warnings.warn(f"Out of memory: {said}.", stacklevel=2)

    def _recompute(self) -> bool:
        """Turn activation checkpointing on, where it can and may be and is not yet."""
        keeping = [model for model in self.models if not getattr(model, "checkpointing", True)]
        if not keeping or not self._may_recompute:
            return False
        for model in keeping:
            model.checkpointing = True
        return True


def models_of(scorer: Any) -> list[Any]:
    """The models that passes go through: a policy's own, the one that a judge is made of, and those of critics that
    learn together with a policy."""
    own: Any = getattr(getattr(scorer, "trunk", scorer), "model", None)
    if hasattr(own, "get_base_model"):  # PEFT's, around a model whose settings it does not pass on
        own = own.get_base_model()
    beside = [model for one in getattr(scorer, "models", {}).values() for model in models_of(one)]
    return beside if own is None else [own, *beside]


def rehearse(policy: Any, rows: Experience, needs: frozenset[str], collect: Callable[[], None]) -> None:
    """Have the kernels of a pass, and of what follows it, compiled side by side before the first one."""
    if not has_triton():
        return
    from panoply.kernels.together import rehearsal

    with rehearsal():
        found = policy.score(rows, needs)
        learning = [column.sum() for column in found.values() if column.requires_grad]
        if learning:
            torch.stack(learning).sum().backward()  # type: ignore[no-untyped-call]
        collect()
