"""Chains of sums and products that may be answered at once, thought through, or jotted down."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import Experience, Ragged, Table
from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.measures import measures
from panoply.worlds.text.characters import DIGITS, END, CharacterWorld, Draws
from panoply.worlds.world import Task

AT_ONCE, WRITTEN, JOTTED = MODES = "NTG"
TOKENS = {AT_ONCE: 0, WRITTEN: 3, JOTTED: 1}
"""Tokens of a step in each mode; at once there are no steps, but the answer alone."""
HELD_OUT, LOOKED_AT = 8, 512
"""One problem in so many is in the test split; how many draws of it are looked at for all problems of one length."""


@dataclass(frozen=True)
class Chains(CharacterWorld):
    """Chains of sums and products, from left to right and modulo 10, answered in a mode that the first letter names.

    A world of this kind says which modes there are (`ways`), how an answer reads in each (`_said`), and its worth.
    """

    operations: tuple[int, int] = (1, 6)
    """Fewest and most steps of a problem, all numbers between equally likely."""
    room: int = 14
    """Tokens of an answer at most."""
    habit: tuple[float, ...] = ()
    """How often the teacher answers in each of the modes."""
    slips: tuple[float, ...] = ()
    """How often it does `*` as `+` in each of them."""

    bounds: ClassVar[Mapping[str, str]] = {
        "operations": "from 1 to 30",
        "room": "from 3 to 100",
        "habit": "from 0 to 1",
        "slips": "from 0 to 1",
    }
    keys: ClassVar[frozenset[str]] = frozenset({"domain"})
    access: ClassVar[frozenset[str]] = frozenset({"verify", "reference", "teacher", "pairs", "modes"})
    ways: ClassVar[tuple[str, ...]]
    """By what letters an answer may begin (`in_mode`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.operations
        if low > high:
            raise PanoplyError(f"{self.name}.operations is a range, fewest first, not {low} to {high}.")
        if high + 2 > self.room:
            raise PanoplyError(
                f"{self.name}.room is {self.room}, and a problem of {high} steps needs {high + 2} tokens at the least."
            )
        if len(self.habit) != len(self.ways) or abs(sum(self.habit) - 1) > 1e-6:
            raise PanoplyError(
                f"{self.name}.habit has a number for each of the modes {', '.join(self.ways)}, 1 in all, unlike "
                f"{', '.join(f'{h:g}' for h in self.habit)}."
            )
        if len(self.slips) != len(self.ways):
            raise PanoplyError(
                f"{self.name}.slips has a number for each of the modes {', '.join(self.ways)}, not {len(self.slips)}."
            )

    @property
    def max_tokens(self) -> int:
        return self.room

    def part_of(self, task: Task) -> str:
        """By its steps."""
        return f"{task.level} step{'s' if task.level > 1 else ''}"

    # -------------------------------------------------------------- problems

    def task(self, split: str, index: int) -> Task:
        def draw(draws: Draws) -> Task | None:
            low, high = self.operations
            steps, problem = low + draws.below(high - low + 1), DIGITS[draws.below(10)]
            for _ in range(steps):
                problem += "+*"[draws.below(2)] + DIGITS[draws.below(10)]
            id = stable_hash("modes", problem)
            if (id % HELD_OUT == 0) != (split == "test"):
                return None
            return Task(id, tuple(self.tokens(problem + "=")), steps, {"problem": problem})

        return self._first(split, index, draw)

    def in_mode(self, task: Task, mode: str) -> Task:
        """The same task, whose answer has begun already: with this letter."""
        given = tuple(self.tokens(mode))
        return dataclasses.replace(task, prompt=task.prompt + given, data={**task.data, "given": given})

    def mode(self, task: Task, answer: Sequence[int]) -> str:
        """The letter by which an answer begins; nothing where that is none of the modes."""
        said = self.text([*task.given, *answer])[:1]
        return said if said in self.ways else ""

    @abstractmethod
    def _said(self, task: Task, mode: str, slips: Sequence[bool] | None = None) -> str:
        """An answer in a mode, without its end; a slip does `*` as `+`, and the next step goes on from there."""

    @torch.no_grad()
    def begins(self, policy: Any, way: str) -> Tensor:
        """How likely a policy is to answer in a mode, on each of the held-out problems, without any sample."""
        tasks = list({t.id: t for t in (self.task("test", i) for i in range(LOOKED_AT))}.values())
        row, lengths = torch.arange(len(tasks)), torch.tensor([len(t.prompt) for t in tasks])
        letter = torch.full_like(row, self.tokens(way)[0])
        tokens = Ragged.from_lists([[*t.prompt, *self.tokens(way)] for t in tasks])
        rows = Experience(
            Table({"context": row, "position": lengths, "action": letter}),
            Table({"tokens": tokens, "prompt": row, "shared": lengths}),
        )
        return policy.score(rows)["logp"].double().exp()  # type: ignore[no-any-return]

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        drawn = self.ways[int((rng.random() >= np.cumsum(self.habit)[:-1]).sum())]
        mode = self.mode(task, ()) or drawn
        slips = (rng.random(task.level) < self.slips[self.ways.index(mode)]).tolist()
        return self.tokens(self._said(task, mode, slips) + END)[len(task.given) : self.room]


@world("modes@1")
@dataclass(frozen=True)
class Modes(Chains):
    """`3+4*2=` is worked out from left to right, modulo 10, in a mode that the first letter of the answer names.

        N4$          at once
        T+47*24$     thought through: sign, operand and result of every step
        G74$         jotted down: results alone

    T is the surest and takes the most tokens; an answer has `room` for 14, so that T serves up to four steps, beyond
    them G, which a small model does less well. At once it can do one step, and guesses at more. The careless teacher
    answers at once half of the time, however long the problem; and it does `*` as `+`, less often in T than elsewhere.
    A problem of up to `easy` steps is labelled as one that needs no thought, as an annotator would by a rule: `missed`
    and `overused` are the two ways not to follow the label.
    """

    habit: tuple[float, ...] = (0.5, 0.25, 0.25)
    """How often the teacher answers in each of the modes N, T and G."""
    slips: tuple[float, ...] = (0.4, 0.2, 0.4)
    """How often it does `*` as `+` in each of them."""
    easy: int = 1
    """Steps up to which a problem is labelled as one that needs no thought."""

    bounds: ClassVar[Mapping[str, str]] = {**Chains.bounds, "easy": "from 0 to 30"}
    alphabet: ClassVar[str] = DIGITS + "+*=" + MODES
    ways: ClassVar[tuple[str, ...]] = tuple(MODES)

    # -------------------------------------------------------------- worth

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        """Beside `success`: `thought`, in T or G; `missed` and `overused`, against the label; `malformed`; `ended`."""
        body, mode = self.body([*task.given, *answer]), self.mode(task, answer)
        thought, needed = mode in (WRITTEN, JOTTED), task.level > self.easy
        shaped = body is not None and bool(mode) and len(body) == self._length(task, mode)
        return {
            "success": float(bool(mode) and body == self._said(task, mode)),
            "thought": float(thought),
            "missed": float(needed and mode == AT_ONCE),
            "overused": float(not needed and thought),
            "malformed": float(not shaped),
            "ended": float(body is not None),
        }

    def gold(self, task: Task) -> list[int]:
        """Thought through where there is room for it, else jotted down; or in the mode that is given."""
        mode = self.mode(task, ()) or (WRITTEN if self._length(task, WRITTEN) < self.room else JOTTED)
        return self.tokens(self._said(task, mode) + END)[len(task.given) :]

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also a right answer in no mode, and one whose last digit is changed."""
        said = self.text(self.gold(task))
        wrong = said[:-2] + DIGITS[(int(said[-2]) + 1) % 10] + END
        return [*super().mistakes(task), self.tokens(said[1:]), self.tokens(wrong)]

    def _length(self, task: Task, mode: str) -> int:
        """Characters of an answer in a mode, before its end."""
        return 1 + max(1, task.level * TOKENS[mode])

    def _said(self, task: Task, mode: str, slips: Sequence[bool] | None = None) -> str:
        """An answer in a mode, without its end; a slip does `*` as `+`, and the next step goes on from there."""
        problem: str = task.data["problem"]
        value, text = int(problem[0]), mode
        for sign, by, slip in zip(problem[1::2], problem[2::2], slips or repeat(False), strict=False):
            value = (value * int(by) if sign == "*" and not slip else value + int(by)) % 10
            text += {WRITTEN: f"{sign}{by}{value}", JOTTED: str(value), AT_ONCE: ""}[mode]
        return text + (str(value) if mode == AT_ONCE else "")

    # -------------------------------------------------------------- the decision

    @measures("thinks@K")
    def thinks(self, policy: Any, seed: int, steps: int) -> float:
        """How likely a policy is not to answer at once, over held-out problems of so many steps, without any sample."""
        own = dataclasses.replace(self, operations=(steps, steps), room=max(self.room, steps + 2))
        return float(1 - own.begins(policy, AT_ONCE).mean())
