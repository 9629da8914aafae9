"""Forward passes over many known tokens: prompts, each once however many rows share it, and observations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from panoply.experience import moved
from panoply.policies.attention import Cache
from panoply.policies.reading import Read
from panoply.policies.thoughts import Inputs
from panoply.rollout.requests import CachedModel

_EVEN = 64
"""Sums over so many slots, or a multiple, do not depend on how many there are, if those that are not seen count 0."""
_PIECE = 1024
"""A long row is fed in pieces of this many tokens, so that a mask has at most so many rows of queries."""


def even(slots: int, least: int) -> int:
    """How many slots are looked at: where rows are to be the same in whatever company, a whole number of `_EVEN`."""
    return slots if least == 1 else -(-slots // _EVEN) * _EVEN


def feed(
    model: Any,
    cache: Cache,
    tokens: Sequence[Sequence[int]],
    starts: Sequence[int],
    vectors: Mapping[int, Tensor] | None = None,
    least: int = 1,
) -> int:
    """Write tokens of unequal length into the first rows of a cache, row i from position `starts[i]` on.

    Gives the number of slots then in use. Padding goes to later slots, at most to the one past those; rows are made
    `least` tokens long with it. `vectors` are read in place of the first tokens of some rows.
    """
    width = max(start + len(row) for start, row in zip(starts, tokens, strict=True))
    filled = padded(tokens, model.device)
    if filled.shape[1] < least:
        filled = F.pad(filled, (0, least - filled.shape[1]))
    begin = torch.tensor(starts, device=model.device)[:, None]
    positions = (begin + torch.arange(filled.shape[1], device=model.device)).clamp(max=width)
    for low in range(0, filled.shape[1], _PIECE):
        piece = slice(low, low + _PIECE)
        cache.begin(positions[:, piece], even(width + 1, least))
        given = {} if not vectors else {"inputs": _inputs(vectors, low, positions[:, piece].shape[1])}
        model.hidden(filled[:, piece], positions[:, piece], cache=cache, **given)
    return width


def _inputs(vectors: Mapping[int, Tensor], low: int, size: int) -> Inputs:
    """Those of rows' first vectors that stand in the `size` columns from `low` on."""
    there = {row: given[low : low + size] for row, given in vectors.items()}
    at = [row * size + i for row, given in there.items() for i in range(len(given))]
    found = torch.cat([*there.values()])
    return Inputs(torch.tensor(at, device=found.device), found)


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Rows to one tensor, filled up with zeros on the right."""
    length = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], device=device)


def chunks(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Split rows so that none takes more than `budget` tokens with its padding, a single row excepted.

    Rows are taken from the longest down; one less than half as long as the first begins a new chunk, unless
    all are short and a pass of its own would cost more than the padding.
    """
    chunk: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[chunk[0]] if chunk else 0
        if chunk and ((len(chunk) + 1) * longest > budget or 64 < longest > 2 * lengths[row]):
            yield chunk
            chunk = []
        chunk.append(row)
    if chunk:
        yield chunk


class _Padded(NamedTuple):
    """Prompts that were read side by side, in rows of a cache of which none takes more than `width` positions."""

    cache: Cache
    width: int

    def put(self, into: Cache, at: Tensor, places: list[int]) -> None:
        """Copy the prompts at some places of this to rows `at` of a cache."""
        into.put(at, self.cache, torch.tensor(places, device=at.device), self.width)

    def alone(self, place: int) -> _Padded:
        """The prompt at a place by itself."""
        row = torch.tensor([place], device=self.cache.keys.device)
        return _Padded(self.cache.take(row, self.width, self.cache.capacity), self.width)


class _Packed(NamedTuple):
    """Prompts that were read end to end: [layers, tokens, kv_heads, size] keys and values, and each one's length."""

    keys: Tensor
    values: Tensor
    lengths: list[int]

    def put(self, into: Cache, at: Tensor, places: list[int]) -> None:
        ends = list(accumulate(self.lengths))
        count = [self.lengths[place] for place in places]
        first = [ends[place] - n for place, n in zip(places, count, strict=True)]
        begins, counts = moved(torch.tensor([first, count]), at.device)
        into.put_tokens(at, (self.keys, self.values), begins, counts, max(self.lengths))

    def alone(self, place: int) -> _Packed:
        end = sum(self.lengths[: place + 1])
        keys, values = (x[:, end - self.lengths[place] : end].clone() for x in (self.keys, self.values))
        return _Packed(keys, values, [self.lengths[place]])


class Prompts:
    """Distinct prompts, prefilled but for their last token when a first row needs them, kept for the last.

    The last token is left to the decoding step, as every row's newest token is.
    """

    def __init__(
        self,
        model: CachedModel,
        prompts: Sequence[Sequence[int]],
        budget: int,
        prefixes: Mapping[int, Tensor] | None = None,
        least: int = 1,
        read: Read | None = None,
    ):
        self.model, self.prompts, self.budget = model, prompts, budget
        self.prefixes, self.least, self.read = prefixes or {}, least, read
        self._ready: dict[int, tuple[_Padded | _Packed, int]] = {}
        """What a prompt was read into, and its place there."""

    def install(self, wanted: Sequence[int], cache: Cache, at: Tensor) -> None:
        """Put prompt `wanted[i]` into row `at[i]` of the cache."""
        self._prefill([p for p in dict.fromkeys(wanted) if p not in self._ready and len(self.prompts[p]) > 1])
        sources: dict[int, tuple[_Padded | _Packed, list[int], list[int]]] = {}
        for i, prompt in enumerate(wanted):
            if prompt in self._ready:
                source, place = self._ready[prompt]
                _, members, places = sources.setdefault(id(source), (source, [], []))
                members.append(i)
                places.append(place)
        for source, members, places in sources.values():
            to = at if len(members) == len(at) else at[torch.tensor(members, device=at.device)]
            source.put(cache, to, places)

    def keep(self, prompt: int | None) -> None:
        """Forget all prompts but this one, and its chunk's others with them."""
        kept = self._ready.pop(prompt, None) if prompt is not None else None
        self._ready.clear()
        if prompt is not None and kept is not None:
            source, place = kept
            self._ready[prompt] = source.alone(place), 0

    def _prefill(self, prompts: list[int]) -> None:
        for chunk in chunks([len(self.prompts[p]) for p in prompts], self.budget):
            tokens = [self.prompts[prompts[i]][:-1] for i in chunk]
            vectors = {
                i: self.prefixes[prompts[p]] for i, p in enumerate(chunk) if prompts[p] in self.prefixes
            }
            found: _Padded | _Packed
            if self.read is not None and not vectors:
                found = _Packed(*self.read(tokens), [len(row) for row in tokens])
            else:
                width = max(map(len, tokens))
                found = _Padded(self.model.new_cache(len(chunk), even(width + 1, self.least)), width)
                feed(self.model, found.cache, tokens, [0] * len(chunk), vectors, self.least)
            self._ready |= {prompts[i]: (found, place) for place, i in enumerate(chunk)}
