"""The text engine: batched decoding in which a prompt is prefilled once and rows come, go, and go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.policies.moving import Weights, checksum, take
from panoply.policies.rotary import wider
from panoply.policies.text import TextPolicy
from panoply.rollout.generation import Generation
from panoply.rollout.masks import BatchMask, RowMask, View
from panoply.rollout.requests import CachedModel, Complete, OnStop, Request, Turn
from panoply.rollout.rollouts import CONTEXT, LENGTH, STOP, Rollouts
from panoply.rollout.sampling import Sampling
from panoply.rollout.stops import Decodes, StopStrings

__all__ = [
    "CONTEXT",
    "LENGTH",
    "STOP",
    "BatchMask",
    "Complete",
    "OnStop",
    "Request",
    "Rollouts",
    "RowMask",
    "Sampling",
    "TextEngine",
    "Turn",
    "View",
]


STEADY = 16
"""Rows of a product on a CPU from which on none depends on how many there are.

Measured with MKL: from 4 on by AVX2; by AVX-512 from 3 on where a row has 64 numbers, and from 16 on where it has 384.
"""


class TextEngine:
    """Samples from a model with a key-value cache.

    Up to `slots` rows run at once; others wait. Ended rows give their slots to waiting ones or leave the
    batch, once they are a fraction `compact` of it. A forward pass over prompts or observations takes at most
    `prefill_tokens`. The host looks for ended turns every `patience` tokens: more than 1 pays only where
    looking waits for a GPU, so left out it is 1 on a CPU, and on a GPU 16, or 32 for turns of 512 and more.

    A row's tokens depend on its prompt and seed alone, up to the rounding of kernels that sum differently in
    batches of other shapes. On a CPU those are the products of few rows: where none has fewer than `least` (`STEADY`),
    filled up with rows that nobody looks at, a row comes out the same bit for bit in whatever company.
    """

    lacks: ClassVar[frozenset[str]] = frozenset()
    version: int | None = None
    """It reads the model's weights where they are."""

    def __init__(
        self,
        model: CachedModel,
        tokenizer: Decodes | None = None,
        *,
        slots: int = 512,
        prefill_tokens: int = 16384,
        compact: float = 0.125,
        patience: int | None = None,
        least: int = 1,
    ):
        if min(slots, prefill_tokens, 1 if patience is None else patience, least) < 1:
            raise PanoplyError("slots, prefill_tokens, patience and least must be at least 1.")
        self.model, self.tokenizer, self.slots = model, tokenizer, slots
        self.prefill_tokens, self.compact, self.patience, self.least = (
            prefill_tokens,
            compact,
            patience,
            least,
        )
        self._strings: dict[tuple[str, ...], StopStrings] = {}
        self.between: Callable[[], int] | None = None
        """Asked whenever the host looks: it may publish newer weights, and says of which version those are that draw
        from then on. Decisions then have a `version` each, and what stands in the cache stays as it was."""

    @classmethod
    def of(cls, policy: TextPolicy, **options: Any) -> TextEngine:
        return cls(policy.model, policy.tokenizer, **options)

    def publish(self, weights: Weights, version: int) -> str:
        """Into the model's own weights, at their addresses."""
        return published(self.model, weights)

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_stop: OnStop | None = None,
        *,
        mask: BatchMask | None = None,
        complete: Complete | None = None,
        entropy: bool = False,
    ) -> Rollouts:
        """Sample every request's rows to their ends. `complete` is asked after every token of every row.

        Without `on_stop` a row is one turn. With it, a turn that stopped or reached `max_tokens` is shown to
        it and what it returns is appended; a row whose observation does not fit the context is truncated.
        """
        self._check(requests, sampling)
        with torch.no_grad(), _evaluating(self.model), _current(self.model.device):
            strings = self._stop_strings(sampling.stop_strings)
            generation = Generation(
                self.model, requests, sampling, on_stop, mask, strings, complete, entropy=entropy
            )
            patience = self.patience or self._patience(sampling.max_tokens)
            return generation.run(
                self.slots, self.prefill_tokens, self.compact, patience, self.least, self.between
            )

    def _patience(self, longest: int) -> int:
        if self.model.device.type == "cpu":
            return 1
        return min(32, max(16, longest // 16))

    def _check(self, requests: Sequence[Request], sampling: Sampling) -> None:
        vocabulary, context = self.model.config.vocab_size, self.model.config.max_positions
        for index, request in enumerate(requests):
            length = len(request.prompt)
            if length == 0:
                raise PanoplyError(f"The prompt of request {index} is empty; give at least one token.")
            if length >= context:
                raise PanoplyError(
                    f"The prompt of request {index} has {length} tokens, but the model's context is "
                    f"{context} and must hold a sampled token too.{wider(self.model.config)}"
                )
            _check_ids(request.prompt, vocabulary, f"The prompt of request {index}")
            if request.prefix is not None:
                self._check_prefix(request.prefix, length, index)
        _check_ids(sampling.stop_tokens, vocabulary, "stop_tokens")
        if sampling.stop_strings and self.tokenizer is None:
            raise PanoplyError("stop_strings need an engine with a tokenizer.")

    def _check_prefix(self, prefix: Tensor, length: int, index: int) -> None:
        if not hasattr(self.model, "thoughts"):
            raise PanoplyError(
                "A prefix of vectors needs a model that runs natively, and one alone: transformers, and mixtures of "
                "two models, read tokens here."
            )
        width = self.model.config.width  # type: ignore[attr-defined]
        if prefix.ndim != 2 or prefix.shape[1] != width or not len(prefix) < length:
            raise PanoplyError(
                f"The prefix of request {index} is {tuple(prefix.shape)}: it must be fewer vectors than the prompt has "
                f"tokens ({length}), each of {width} numbers."
            )

    def _stop_strings(self, strings: tuple[str, ...]) -> StopStrings | None:
        """Kept, because it decodes the whole vocabulary once."""
        if not strings or self.tokenizer is None:
            return None
        if strings not in self._strings:
            vocabulary = self.model.config.vocab_size
            self._strings[strings] = StopStrings(strings, self.tokenizer, vocabulary, self.model.device)
        return self._strings[strings]


def published(model: Any, weights: Weights) -> str:
    """Have a model take weights over; the checksum of those it then has."""
    take(model, weights)
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    return checksum({name: own[name] for name in weights})


def _check_ids(ids: Sequence[int], vocabulary: int, what: str) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
        raise PanoplyError(f"{what} has ids outside the vocabulary of {vocabulary}.")


@contextmanager
def _evaluating(model: CachedModel) -> Iterator[None]:
    """Without dropout: what is sampled from must be what is scored."""
    if not model.training:
        yield
        return
    model.train(False)
    try:
        yield
    finally:
        model.train(True)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Inside, a GPU is the one on which kernels are launched and graphs captured; every thread has its own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
