"""Digits to be put in order: answers of one length, which can be filled in anywhere first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.text.characters import DIGITS, CharacterWorld, Draws
from panoply.worlds.world import Task

HOLE = "_"
"""The token that stands for one not known yet."""
HELD_OUT = 8
"""One problem in so many is in the test split."""


@world("digits@1")
@dataclass(frozen=True)
class Digits(CharacterWorld):
    """`3081527=` asks for its digits in order: `0123578`. An answer has as many tokens as there are digits, and no end.

    Its model is a masked-diffusion one (`is_causal` false in its config): it sees prompt and answer at once, `3081527=`
    and `0_2_57_`, and says what stands where `_` does. So it is for methods that train such models; others are refused.

    The careless teacher mostly exchanges two digits of an answer that lie anywhere. What differs from a right answer is
    thus small, and cannot be told from any one place.
    """

    length: int = 7
    """Digits of a problem."""
    slip: float = 0.7
    """How often the teacher exchanges two digits."""

    bounds: ClassVar[Mapping[str, str]] = {"length": "from 3 to 12", "slip": "from 0 to 1"}
    access: ClassVar[frozenset[str]] = frozenset({"verify", "reference", "teacher", "pairs", "masks"})
    alphabet: ClassVar[str] = DIGITS + "=" + HOLE

    @property
    def max_tokens(self) -> int:
        return self.length

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return ()

    def default_model(self) -> dict[str, Any]:
        extras = {"is_causal": False, "mask_token_id": self.tokenizer.id(HOLE)}
        return {**super().default_model(), "extras": extras}

    def task(self, split: str, index: int) -> Task:
        def draw(draws: Draws) -> Task | None:
            problem = "".join(DIGITS[draws.below(10)] for _ in range(self.length)) + "="
            id = stable_hash("digits", problem)
            if (id % HELD_OUT == 0) != (split == "test"):
                return None
            return Task(id, tuple(self.tokens(problem)), 0, {"problem": problem})

        return self._first(split, index, draw)

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        """Beside `success`: `places`, the share of places with the right digit, and `same`, the digits are those."""
        text, gold = self.text(answer), self._gold(task)
        right = sum(a == b for a, b in zip(text, gold, strict=False)) if len(text) == len(gold) else 0
        return {
            "success": float(text == gold),
            "places": right / len(gold),
            "same": float(sorted(text) == sorted(gold)),
        }

    def gold(self, task: Task) -> list[int]:
        return self.tokens(self._gold(task))

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        said = list(self._gold(task))
        slips, (a, b) = rng.random() < self.slip, rng.choice(len(said), 2, replace=False)
        if slips:
            said[a], said[b] = said[b], said[a]
        return self.tokens("".join(said))

    def mistakes(self, task: Task) -> list[list[int]]:
        """Nothing, a digit too few or too many, and one that is another."""
        gold = self._gold(task)
        other = DIGITS[(int(gold[-1]) + 1) % 10]
        return [self.tokens(text) for text in ("", gold[:-1], gold + gold[-1], gold[:-1] + other)]

    def _gold(self, task: Task) -> str:
        return "".join(sorted(task.data["problem"][:-1]))
