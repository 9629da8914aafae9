"""A world of several turns with a tool, for a tiny model of its own or for yours (`--set world.model=DIR --model DIR`).

panoply train sft --world sums --model fresh --steps 600 --plugin examples/own_world_with_tools.py --run runs/sums-start
panoply train grpo --world sums --model runs/sums-start --plugin examples/own_world_with_tools.py --run runs/sums
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

import panoply as pp
from panoply.policies.tokenizer import Tokenizer
from panoply.seeds import numpy_rng, stable_hash
from panoply.worlds.episodic import Episodic
from panoply.worlds.world import Play, Reply, Task


class Conversation(Play):
    """`17+25=` is asked. `?17+25` calls the calculator, which says `42>`. `!42` answers, and that is the end."""

    def __init__(self, world: "Sums", task: Task):
        super().__init__(task.prompt, state=task.id)
        self.world, self.question, self.result, self.turns = world, task.data["question"], "", 0

    def act(self, answer: Sequence[int]) -> Reply:
        """A turn of the policy: what it earned, what is seen next (appended to the context), whether that was all."""
        text, self.turns = self.world.text(answer), self.turns + 1
        if text.startswith("!"):
            right = text[1:] == add(self.question) and self.world.complete(answer)
            return Reply({"success": float(right), "calls": 0.0})
        self.result = add(text[1:]) if text.startswith("?") else "error"
        self.state = stable_hash(self.question, self.result)
        seen = tuple(self.world.tokenizer.encode(self.result + ">"))
        return Reply({"success": 0.0, "calls": 1.0}, seen, done=self.turns == 3, truncated=self.turns == 3)


def add(text: str) -> str:
    """The tool."""
    numbers = text.split("+")
    return str(sum(map(int, numbers))) if all(n.isdecimal() for n in numbers) else "error"


@pp.world("sums@1")
@dataclass(frozen=True)
class Sums(Episodic):
    """Sums of two numbers below 100, with a calculator. The careless teacher guesses instead of asking it."""

    slip: float = 0.5
    """How often the teacher guesses."""
    model: str = ""
    """A folder whose tokenizer is used; without one, a token is a character."""

    access: ClassVar[frozenset[str]] = frozenset({"verify", "reference", "teacher", "pairs"})
    max_tokens: ClassVar[int] = 8  # of a turn, its end included

    @cached_property
    def tokenizer(self) -> Tokenizer:
        own = Tokenizer.of_characters("0123456789+=?!>ero", specials=(".",))
        return Tokenizer.load(self.model) if self.model else own

    def tokens(self, text: str) -> list[int]:
        return [*self.tokenizer.encode(text), *self.stop_tokens]  # a turn ends with the tokenizer's end token

    def text(self, answer: Sequence[int]) -> str:
        return self.tokenizer.decode([t for t in answer if t not in self.stop_tokens])

    def complete(self, answer: Sequence[int]) -> bool:
        return bool(answer) and answer[-1] in self.stop_tokens

    def task(self, split: str, index: int) -> Task:
        """Task number `index` of a split, always the same one. One question in eight is held out, by its hash."""
        rng = numpy_rng("sums", split, index)
        while True:
            question = "{}+{}".format(*rng.integers(100, size=2))
            id = stable_hash("sums", question)
            if (id % 8 == 0) == (split == "test"):
                return Task(id, tuple(self.tokenizer.encode(question + "=")), data={"question": question})

    def play(self, task: Task) -> Conversation:
        return Conversation(self, task)

    def expert(self, play: Conversation) -> list[int]:
        return self.tokens(f"!{play.result}" if play.result else f"?{play.question}")

    def careless(self, play: Conversation, rng: np.random.Generator) -> list[int]:
        return self.tokens(f"!{rng.integers(199)}") if rng.random() < self.slip else self.expert(play)
