"""A world of your own: panoply train grpo --world reverse --model fresh --plugin examples/plugin_world.py"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

import panoply as pp
from panoply.policies.tokenizer import Tokenizer
from panoply.seeds import numpy_rng, stable_hash
from panoply.worlds.world import Task, TextWorld


@pp.world("reverse@1")
@dataclass(frozen=True)
class Reverse(TextWorld):
    """`abca|` is to be written backwards: `acba.` The careless teacher sometimes just copies."""

    length: int = 4
    letters: str = "abcdefgh"
    slip: float = 0.5
    """How often the teacher copies."""

    access: ClassVar[frozenset[str]] = frozenset({"verify", "reference", "teacher", "pairs"})

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.of_characters(self.letters + "|", specials=(".",))

    @property
    def max_tokens(self) -> int:
        return self.length + 1

    def task(self, split: str, index: int) -> Task:
        """One word in eight belongs to the test split, by its hash, so no word is in both."""
        rng = numpy_rng("reverse", split, index)
        while True:
            word = "".join(rng.choice(list(self.letters), self.length))
            id = stable_hash("reverse", word)
            if (id % 8 == 0) == (split == "test"):
                return Task(id, tuple(self.tokenizer.encode(word + "|")), data={"word": word})

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        """`success`, and `letters`: the share of letters that stand where they should."""
        text, right = self.tokenizer.decode(answer), task.data["word"][::-1]
        good = sum(a == b for a, b in zip(text, right, strict=False))
        return {"success": float(text == right + "."), "letters": good / self.length}

    def gold(self, task: Task) -> list[int]:
        return self.tokenizer.encode(task.data["word"][::-1] + ".")

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        word = task.data["word"]
        return self.tokenizer.encode((word if rng.random() < self.slip else word[::-1]) + ".")
