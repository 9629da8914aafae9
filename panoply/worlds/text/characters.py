"""What worlds of short texts share: one token a character, an end token, numbers drawn from names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from hashlib import shake_256
from typing import ClassVar

from panoply.errors import PanoplyError, unknown
from panoply.policies.tokenizer import Tokenizer
from panoply.worlds.world import SPLITS, Task, TextWorld

DIGITS, END = "0123456789", "$"


class Draws:
    """Whole numbers that depend on a name alone; quicker to make than a seeded generator."""

    def __init__(self, name: str, size: int = 32):
        self._left = int.from_bytes(shake_256(name.encode()).digest(size), "big")

    def below(self, bound: int) -> int:
        """The next number, from 0 up to the bound and without it."""
        self._left, drawn = divmod(self._left, bound)
        return drawn


class CharacterWorld(TextWorld):
    """A world whose tokens are single characters and whose answers end with `$`."""

    alphabet: ClassVar[str]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.of_characters(self.alphabet, specials=(END,))

    def tokens(self, text: str) -> list[int]:
        return [self._ids[character] for character in text]

    def text(self, tokens: Sequence[int]) -> str:
        """One character a token, so that nothing a policy may write is skipped; foreign tokens become `?`."""
        return "".join(self._characters.get(token, "?") for token in tokens)

    def body(self, tokens: Sequence[int]) -> str | None:
        """The text before the end token; None where that is missing or is not the last."""
        text = self.text(tokens)
        return text[:-1] if text.find(END) == len(text) - 1 >= 0 else None

    def _first(self, split: str, index: int, draw: Callable[[Draws], Task | None]) -> Task:
        """Task number `index`: the first of its draws that fits, None being one that does not."""
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        for attempt in range(1000):
            found = draw(Draws(f"{self.name}/{split}/{index}/{attempt}"))
            if found is not None:
                return found
        raise PanoplyError(f"{self.name} has too few problems for a {split} split with these options.")

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {character: self.tokenizer.id(character) for character in self.alphabet + END}

    @cached_property
    def _characters(self) -> dict[int, str]:
        return {token: character for character, token in self._ids.items()}
