"""What ends a turn beside stop tokens and its length: strings in its text, and the world's word that it is complete.

A string is found in decoded text, though tokens are the record and it may span several of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from panoply.rollout.requests import Complete
from panoply.rollout.rollouts import DEAD, LENGTH, RUNNING, STOP, Slots


class Decodes(Protocol):
    def decode(self, ids: Sequence[int], /) -> str: ...


class StopStrings:
    """Which tokens may complete a stop string, and whether a turn's newest token did.

    Only a token whose text has a string's last character can complete it, so text is decoded only then.
    """

    def __init__(self, strings: tuple[str, ...], tokenizer: Decodes, vocabulary: int, device: torch.device):
        self.strings, self.tokenizer = strings, tokenizer
        last = {string[-1] for string in strings}
        # A token may be a part of a character, and a lone token may lose its space: those always may.
        self._always = any(character.isspace() for character in last)
        self._last = last | {"\ufffd"}
        self._window = 4 * max(map(len, strings)) + 8
        self.may: Tensor = torch.tensor([self._may(i) for i in range(vocabulary)], device=device)

    def __deepcopy__(self, memo: dict[int, object]) -> StopStrings:
        """It never changes, and copies of a model that has one share it."""
        return self

    def _may(self, token: int) -> bool:
        if self._always:
            return True
        text = self.tokenizer.decode([token])
        return not self._last.isdisjoint(text)

    def completed(self, turn: Sequence[int]) -> bool:
        """Whether the newest token of a turn completed a stop string."""
        tail = list(turn[-self._window :])
        text, before = self.tokenizer.decode(tail), self.tokenizer.decode(tail[:-1])
        old = len(before.rstrip("\ufffd"))
        return any(text.find(string, max(0, old - len(string) + 1)) >= 0 for string in self.strings)


@dataclass(frozen=True)
class Ends:
    """Marks turns that have ended so. A string does not end one that has fewer than `least` tokens."""

    strings: StopStrings | None
    complete: Complete | None
    least: int
    begun: Tensor
    """How many tokens of each row's first turn stand in its prompt."""

    def _start(self, slots: Slots) -> Tensor:
        """Where turns began."""
        return slots.start - self.begun[slots.row.clamp(min=0)] * (slots.turn == 0)

    def after_step(self, slots: Slots, history: Tensor, action: Tensor) -> Slots:
        """The slots after each has drawn a token, the newest of its history."""
        if self.strings is not None:
            slots = self._with_strings(self.strings, slots, history, action)
        return slots if self.complete is None else self._completed(self.complete, slots, history)

    def _with_strings(self, strings: StopStrings, slots: Slots, history: Tensor, action: Tensor) -> Slots:
        start = self._start(slots)
        enough = slots.position - start + 1 >= self.least
        maybe = (strings.may[action] & enough & (slots.status != DEAD)).nonzero().flatten()
        bounds = zip(maybe.tolist(), start[maybe].tolist(), slots.position[maybe].tolist(), strict=True)
        return _marked(slots, [s for s, a, b in bounds if strings.completed(history[s, a : b + 1].tolist())])

    def _completed(self, complete: Complete, slots: Slots, history: Tensor) -> Slots:
        """A turn that is complete has stopped, even where its length limit is reached with it."""
        maybe = ((slots.status == RUNNING) | (slots.status == LENGTH)).nonzero().flatten()
        part, said = slots.take(maybe), history[maybe].tolist()
        bounds = zip(maybe.tolist(), said, self._start(part).tolist(), part.position.tolist(), strict=True)
        return _marked(slots, [s for s, tokens, a, b in bounds if complete(tokens[a : b + 1])])

    def after_burst(
        self, before: Slots, slots: Slots, history: Tensor, action: Tensor, live: Tensor
    ) -> tuple[Slots, Tensor]:
        """The slots with turns ended where a burst of [steps, slots] draws completed them, and the draws then left."""
        strings = self.strings
        may = torch.zeros_like(live) if strings is None else live & strings.may[action]
        rows = (
            self._start(before).tolist(),
            before.position.tolist(),
            live.sum(0).tolist(),
            may.t().tolist(),
        )
        tokens = history[: len(slots), : int(slots.position.max()) + 1].tolist()
        hits = {}
        for slot, (start, at, steps, maybe) in enumerate(zip(*rows, strict=True)):
            said = tokens[slot][start : at + 1 + steps]
            before_them = len(said) - steps
            ends = (k for k in range(steps) if self._ended(said[: before_them + k + 1], maybe[k]))
            if (first := next(ends, None)) is not None:
                hits[slot] = first
        if not hits:
            return slots, live
        where, step = (torch.tensor(list(x), device=live.device) for x in (hits.keys(), hits.values()))
        position = before.position[where] + 1 + step
        ended = replace(
            slots.marked(where, STOP),
            position=slots.position.index_copy(0, where, position),
            token=slots.token.index_copy(0, where, history[where, position]),
        )
        last = torch.full((len(slots),), len(live), device=live.device).index_copy(0, where, step)
        return ended, live & (torch.arange(len(live), device=live.device)[:, None] <= last)

    def _ended(self, said: list[int], maybe: bool) -> bool:
        """Whether a turn's newest token completed it, or a string that it `maybe` completes."""
        asked = self.strings if maybe and len(said) >= self.least else None
        if asked is not None and asked.completed(said):
            return True
        return self.complete is not None and self.complete(said)


def _marked(slots: Slots, hits: list[int]) -> Slots:
    return slots.marked(torch.tensor(hits, device=slots.status.device), STOP) if hits else slots
