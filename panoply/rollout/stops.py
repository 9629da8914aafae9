"""Stop strings: found in decoded text, though tokens are the record and a string may span several of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


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
