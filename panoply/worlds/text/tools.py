"""Questions that are answered with tools: look-ups in a knowledge base, or a calculator."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np

from panoply.errors import PanoplyError
from panoply.policies.tokenizer import Tokenizer
from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.episodic import Episodic
from panoply.worlds.presets import Preset
from panoply.worlds.text.characters import END, CharacterWorld, Draws
from panoply.worlds.text.toolbox import ANSWER, CALL, Calculator, Calls, Lookup, Tool
from panoply.worlds.world import Play, Reply, Task

HELD_OUT = 8
"""One problem in so many is in the test split."""
TOOLS: dict[str, Tool] = {"lookup": Lookup(), "calculator": Calculator()}


@world("tools@1")
@dataclass(frozen=True)
class Tools(Episodic, CharacterWorld):
    """A turn is a call of the tool (`C…`) or the answer (`A…`), which ends the episode; so do `cap` turns.

    `lookup`: who is r2 of r1 of e? The knowledge base has 16 entities and 6 relations, is the task's own, and is seen
    only through calls. A prompt `e r1 r2 r3 F fe fr fv le lr lv >` (`_` where there is nothing) has the question, a
    fact, and the last call with its result. Easy questions are answered by the fact; others need as many calls as
    they have relations, and questions with one relation come with and without the fact. `Cer` asks, `Ae` answers.

    `calculator`: `xx o yy o zz` from left to right, modulo 100. A prompt `x x o y y o z z r r k >` ends with the last
    result and the number of calls. `Cxxoyy` asks, `Avv` answers. Easy questions are sums of single digits.

    An observation is the whole prompt of a turn. A turn is complete with its grammar; one without grammar does
    nothing and is counted (`invalid`; as a call, too, when it was to be one). `calls` counts calls.

    The careless teacher, with probability `slip`, answers too soon: with the entity in hand, or at random; and with
    probability `needless` calls where the fact is enough.
    """

    kind: Literal["lookup", "calculator"] = "lookup"
    easy: float | None = None
    """The share of questions that need no call; none means a half of look-ups, a fifth of calculations."""
    cap: int | None = None
    """Turns in an episode; none means 6 with look-ups, 5 with the calculator."""
    budget: int | None = None
    """Tokens the policy may write in an episode; none means as many as its turns can hold."""
    slip: float | None = None
    """None means 0.6 with look-ups, 0.55 with the calculator."""
    needless: float = 0.5

    bounds: ClassVar[Mapping[str, str]] = {
        "easy": "from 0 to 1",
        "cap": "from 1 to 1000",
        "budget": "from 1 to 1000000",
        "slip": "from 0 to 1",
        "needless": "from 0 to 1",
    }

    presets: ClassVar[Mapping[str, Preset]] = {
        "calls": Preset(
            {"easy": 0.0},
            "every question needs calls, and nothing is right without them: rewards by turn, credit to calls",
            0.18,
            budget="steps=24",
        )
    }

    access: ClassVar[frozenset[str]] = frozenset(
        {"verify", "reference", "teacher", "pairs", "tools", "conclusion", "fork"}
    )
    markov: ClassVar[bool] = True
    imitation: ClassVar[Mapping[str, int]] = {"data.batch": 64, "run.steps": 800}
    """How its warm start is made: a demonstration has several turns, so fewer of them are enough."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.turn_cap <= self.tool.most_calls:
            raise PanoplyError(
                f"tools.cap is more than {self.tool.most_calls}, the calls a question may need."
            )

    @property
    def start(self) -> str:
        """Each kind has a model of its own to start from."""
        return "tools-start" if self.kind == "lookup" else f"tools-{self.kind}-start"

    @property
    def tool(self) -> Tool:
        return TOOLS[self.kind]

    @property
    def turn_cap(self) -> int:
        return self.tool.cap if self.cap is None else self.cap

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.of_characters(self.tool.alphabet, specials=(END,))

    @property
    def alphabet(self) -> str:  # type: ignore[override]
        return self.tool.alphabet

    @property
    def max_tokens(self) -> int:
        return max(self.tool.lengths.values())

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return ()

    def complete(self, answer: Sequence[int]) -> bool:
        """By its first token a turn is a call or an answer, of fixed length; or nothing, and over."""
        return len(answer) >= self._lengths.get(answer[0], 1)

    @cached_property
    def _lengths(self) -> dict[int, int]:
        return {self.tokens(verb)[0]: length for verb, length in self.tool.lengths.items()}

    def task(self, split: str, index: int) -> Task:
        return self._first(split, index, lambda draws: self._question(draws, split))

    def _question(self, draws: Draws, split: str) -> Task | None:
        easy = self.tool.easy if self.easy is None else self.easy
        question = self.tool.question(draws, easy=draws.below(1 << 20) < easy * (1 << 20))
        id = stable_hash(self.name, self.kind, question)
        if (id % HELD_OUT == 0) != (split == "test"):
            return None
        prompt = tuple(self.tokens(self.tool.observe(question, [])))
        return Task(id, prompt, self.tool.needed(question), {"question": question})

    def play(self, task: Task) -> Session:
        return Session(self, task)

    def expert(self, play: Play) -> list[int]:
        assert isinstance(play, Session)
        return self.tokens(self.tool.careful(play.question, play.calls))

    def careless(self, play: Play, rng: np.random.Generator) -> list[int]:
        assert isinstance(play, Session)
        slip = self.tool.slip if self.slip is None else self.slip
        return self.tokens(self.tool.careless(play.question, play.calls, rng, slip, self.needless))

    def conclusion(self, task: Task) -> tuple[list[int], list[int]]:
        return self.tokens(ANSWER), self.tokens(self.tool.answer(task.data["question"]))

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also: another answer, and answering after one call too few."""
        tool, gold = self.tool, self.gold(task)
        right = tool.answer(task.data["question"])
        wrong = next(a for a in tool.answers if a != right)
        short = [] if task.level else [self.tokens(CALL)]
        calls = gold[: -len(right) - 1]
        return [*super().mistakes(task), *short, [*calls, *self.tokens(ANSWER + wrong)]]


class Session(Play):
    """An episode. Its state is the question and what the policy sees of its calls; not the turn."""

    def __init__(self, world: Tools, task: Task):
        self.world, self.task, self.tool = world, task, world.tool
        self.question: str = task.data["question"]
        self.calls: Calls = []
        self.turn, self.spent = 0, 0
        super().__init__(task.prompt, self._state(task.prompt))

    def act(self, answer: Sequence[int]) -> Reply:
        text = self.world.text(answer)
        verb, rest = text[:1], text[1:]
        self.turn += 1
        self.spent += len(answer)
        result = self.tool.call(self.question, rest) if verb == CALL else None
        if result is not None:
            self.calls.append((rest, result))
        answered = verb == ANSWER and rest in self.tool.answers
        prompt = tuple(self.world.tokens(self.tool.observe(self.question, self.calls)))
        self.state = self._state(prompt)
        signals = {
            "success": float(answered and rest == self.tool.answer(self.question)),
            "calls": float(verb == CALL),
            "invalid": float(result is None and not answered),
        }
        late = not answered and (self.turn >= self.world.turn_cap or self._broke())
        return Reply(signals, prompt, done=answered or late, truncated=late)

    def fork(self) -> Session:
        other = copy.copy(self)
        other.calls = list(self.calls)
        return other

    def _broke(self) -> bool:
        return self.world.budget is not None and self.spent >= self.world.budget

    def _state(self, prompt: tuple[int, ...]) -> int:
        return stable_hash(self.task.id, prompt)
