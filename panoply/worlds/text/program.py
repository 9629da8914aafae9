"""Programs that are run: a verifier that looks at what a program does, and not at how it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np

from panoply.errors import PanoplyError
from panoply.policies.tokenizer import Tokenizer
from panoply.registry import world
from panoply.sandbox import Wanted
from panoply.seeds import stable_hash
from panoply.worlds.presets import Preset
from panoply.worlds.text.characters import END, CharacterWorld, Draws
from panoply.worlds.text.program_ir import Ir
from panoply.worlds.text.program_kind import Kind
from panoply.worlds.text.program_python import Python
from panoply.worlds.text.program_shell import Shell
from panoply.worlds.text.program_sql import Sql
from panoply.worlds.text.program_stack import Stack
from panoply.worlds.world import Signal, Task

HELD_OUT = 8
"""One problem in so many is in the test split."""
KINDS: dict[str, Kind] = {"sql": Sql(), "python": Python(), "stack": Stack(), "ir": Ir(), "shell": Shell()}


@world("program@1")
@dataclass(frozen=True)
class Program(CharacterWorld):
    """A question in a few characters, and a program that answers it. Every program that does what is asked is right.

    `sql`: `#n/c s>2:` asks how many people there are in each city whose department has a size above 2. A token of an
    answer is a word of SQL: `Sc,#n)FJWs>2Bc$` is

        SELECT city, COUNT(name) FROM people JOIN depts ON dept = id WHERE size > 2 GROUP BY city

    There are two data bases of 40 people and 6 departments, and a query must be right on both. Nobody says which
    questions need both tables. The careless teacher forgets the last condition; in the `hard` setting it also takes a
    sign or what is asked for, such as COUNT, for another.

    `python`: `sdr+>` asks to sort a list, drop its first number, turn it around, and for the sum:

        sum(sorted(x)[1:][::-1])$

    A program is tried on four lists that nobody sees, in a sandbox; what is expected of it stays outside. The careless
    teacher forgets the last verb; in the `hard` setting it also forgets the first and takes the end for another.

    `stack`: `4071=` asks for a program of a stack machine that leaves this number, `25*dd4*0+*7+*1+$`. `score` tells
    failures apart. The teacher doubles a number once too few.

    `ir`: `-+ab*cd>` is to be translated into a program, `ab+cd*-$`; others that compute the same are as right. The
    teacher exchanges operands where that matters.

    `shell`: `Gcfo2>` is grep with two files, a pattern and a number at hand; `ivPFE$` is `grep -i -v o c f`. A command
    succeeds if all of its arguments matter, three or more; `score` pays every one. Its files are in memory.
    """

    kind: Literal["sql", "python", "stack", "ir", "shell"] = "sql"
    hard: bool = False
    """Whether the teacher slips in more ways; its pupil, the start, is then right on one problem in a hundred or so."""
    slip: float | None = None
    """How often it slips; none means what the kind has."""
    sandbox: str = "auto"
    """Where programs run, of kinds that run code: `auto` takes the first sandbox that is safe here."""
    masked: bool = True
    """Of shell: whether only arguments can be drawn that its grammar has there."""
    margin: float = 0.5
    """Of shell: how large a share of arguments must matter for a command to be worth its length."""

    bounds: ClassVar[Mapping[str, str]] = {"slip": "from 0 to 1", "margin": "from 0 to 1"}
    presets: ClassVar[Mapping[str, Preset]] = {
        "python": Preset({"kind": "python"}, "programs of Python that run in a sandbox", 0.24),
        "sql-hard": Preset(
            {"hard": True},
            "most groups of queries have none that is right: graded rewards, replay, hints",
            0.012,
        ),
        "python-hard": Preset({"kind": "python", "hard": True}, "the same with programs of Python", 0.012),
        "stack": Preset(
            {"kind": "stack"},
            "programs whose failures are told apart: values of tokens, learning from scored programs",
            0.32,
            budget="steps=40",
        ),
        "stack-hard": Preset(
            {"kind": "stack", "hard": True}, "the same where most groups have none that is right", 0.01
        ),
        "ir": Preset(
            {"kind": "ir"},
            "several right answers to each problem, and wrong ones that look like them: preferences between groups",
            0.33,
            budget="steps=60",
        ),
        "ir-hard": Preset(
            {"kind": "ir", "hard": True}, "the same where most groups have none that is right", 0.02
        ),
        "shell": Preset(
            {"kind": "shell"},
            "a reward for every token, and a grammar: masks, critics, new weights",
            0.19,
            budget="steps=40",
        ),
        "shell-hard": Preset(
            {"kind": "shell", "hard": True}, "the same where most groups have none that is right", 0.018
        ),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, usual in (("masked", True), ("margin", 0.5)):
            if self.kind != "shell" and getattr(self, name) != usual:
                raise PanoplyError(
                    f"program.{name} has no effect: it is of the kind shell, and not of {self.kind}."
                )
        if self.sandbox != "auto" and KINDS[self.kind].sandboxed is None:
            raise PanoplyError(f"program.sandbox has no effect: {self.kind} runs no code of others.")

    @property
    def access(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"verify", "reference", "teacher", "pairs", "hint"}) | self.does.access

    @property
    def start(self) -> str:
        """Each kind, and each setting of it, has a model of its own to start from."""
        return f"program-{self.kind}-{'hard-' if self.hard else ''}start"

    @cached_property
    def does(self) -> Kind:
        kind = Shell(self.masked, self.margin) if self.kind == "shell" else KINDS[self.kind]
        return kind.within(self.sandbox)

    @property
    def sandboxed(self) -> Wanted | None:
        return self.does.sandboxed

    def walls(self) -> str:
        return super().walls() or self.does.walls

    @property
    def alphabet(self) -> str:  # type: ignore[override]
        return self.does.alphabet

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.of_characters(self.alphabet, specials=(END,))

    @property
    def max_tokens(self) -> int:
        return self.does.longest + 1

    # -------------------------------------------------------------- problems

    def task(self, split: str, index: int) -> Task:
        def draw(draws: Draws) -> Task | None:
            problem = self.does.problem(draws)
            id = stable_hash(self.name, self.kind, problem)
            if (id % HELD_OUT == 0) != (split == "test") or not self.does.worth_asking(problem):
                return None
            prompt = tuple(self.tokens(self.does.prompt(problem)))
            return Task(id, prompt, self.does.level(problem), {"problem": problem})

        return self._first(split, index, draw)

    def part_of(self, task: Task) -> str:
        return self.does.part(task.data["problem"])

    # -------------------------------------------------------------- programs

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, Signal]:
        return self.grade_all([task], [answer])[0]

    def grade_all(self, tasks: Sequence[Task], answers: Sequence[Sequence[int]]) -> list[dict[str, Signal]]:
        """All programs at once. Beside `success` and what its kind says: `ended`, a program has one end, the last."""
        bodies = [self.body([*task.given, *said]) for task, said in zip(tasks, answers, strict=True)]
        graded = self.does.grade([task.data["problem"] for task in tasks], bodies)
        return [
            {**_said(signals, len(task.given)), "ended": float(body is not None)}
            for task, signals, body in zip(tasks, graded, bodies, strict=True)
        ]

    def verdict(self, prompt: Sequence[int], answer: Sequence[int]) -> str:
        asked, sign, _ = self.text(prompt).partition(self.does.asks)
        program = self.body([*prompt, *answer][len(asked + sign) :])
        return (
            "it has no end, or more than one" if program is None else self.does.verdict(asked + sign, program)
        )

    def allowed(self, task: Task, said: Sequence[int]) -> Sequence[int] | None:
        allowed = self.does.allowed(task.data["problem"], self.text([*task.given, *said]))
        return None if allowed is None else self.tokens(allowed)

    @property
    def restricts(self) -> bool:
        return type(self.does).allowed is not Kind.allowed

    def gold(self, task: Task) -> list[int]:
        whole = self.tokens(self.does.solution(task.data["problem"]) + END)
        return whole[len(task.given) :]

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        usual = self.does.hard_slip if self.hard else self.does.slip
        slip = usual if self.slip is None else self.slip
        return self.tokens(self.does.careless(task.data["problem"], slip, self.hard, rng) + END)

    def solutions(self, task: Task) -> list[list[int]]:
        return [self.tokens(text + END) for text in self.does.equivalents(task.data["problem"])]

    def wrong_answers(self, task: Task, n: int, rng: np.random.Generator) -> list[list[int]]:
        broken = self.does.broken(task.data["problem"], n, rng)
        if broken is None:
            return super().wrong_answers(task, n, rng)
        return [self.tokens(text + END) for text in broken]

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also what its kind knows to be wrong."""
        wrong = self.does.wrong(task.data["problem"])
        return [*super().mistakes(task), *(self.tokens(text + END) for text in wrong)]


def _said(signals: Mapping[str, Signal], given: int) -> dict[str, Signal]:
    """Of signals that have a number for every token, those of the tokens that were not given."""
    return {name: x[given:] if isinstance(x, Sequence) else x for name, x in signals.items()}
