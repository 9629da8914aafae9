"""What an object is by a tree of rules, which stands in the prompt or has to be known by heart."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from panoply.errors import PanoplyError
from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.text.characters import DIGITS, END, CharacterWorld, Draws
from panoply.worlds.world import Lesson, Task

LETTERS = "abcdefghijkl"
HELD_OUT = 4
"""One object in so many is in the test split."""
NUMBERS = 32
"""Enough numbers to draw a tree by."""

Tree = tuple[str, ...]
"""Node by node from the root, as in a heap: below number i are 2i + 1, where the attribute is missing, and 2i + 2.
First come the attributes that are asked for, then the labels."""


@world("rules@1")
@dataclass(frozen=True)
class Rules(CharacterWorld):
    """`aBCdEfghiJkl=` is an object with the attributes b, c, e and j; a fixed tree of rules says which label it has.

    An answer goes down the tree: an attribute, how it is here, and so on, and the label at the end. `cCff2$` says: c?
    yes. f? no. So it is a 2. Only the label decides about success. With its rules in the prompt the same question is

        [c;ca,Cf,a0,A1,f2,F3]aBCdEfghiJkl=

    First c is asked for; where it is missing (`c`), a is next, where it is there (`C`), f; and from there to labels.
    (That tree asks twice; by default they ask three times.) No attribute is asked for at two nodes, and labels lie in
    the same order in every tree: what a tree says is what to ask for. A prompt shows rules where they are `shown`, and
    to a method that asks for them (`privileged`); an evaluation without them tells what has been learned by heart.

    The teacher does not know this tree. For imitation it invents another one for every object, and shows it in two of
    three prompts: who learns from that reads rules, and without them guesses.
    """

    tree: int = 0
    """Which tree it is, of endlessly many."""
    depth: int = 3
    """Attributes that are asked for before the label."""
    labels: int = 4
    """Different labels."""
    shown: bool = False
    """Whether prompts show the rules."""

    bounds: ClassVar[Mapping[str, str]] = {
        "tree": "at least 0",
        "depth": "from 1 to 3",
        "labels": "from 2 to 8",
    }
    access: ClassVar[frozenset[str]] = frozenset(
        {"verify", "reference", "teacher", "pairs", "hint", "privileged"}
    )
    alphabet: ClassVar[str] = DIGITS + LETTERS + LETTERS.upper() + "[;,]="
    step_tokens: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels > 2**self.depth:
            raise PanoplyError(
                f"A tree of rules.depth {self.depth} has {2**self.depth} leaves, too few for {self.labels} labels."
            )

    @property
    def max_tokens(self) -> int:
        return self.step_tokens * self.depth + 2

    # -------------------------------------------------------------- objects and rules

    def task(self, split: str, index: int) -> Task:
        def draw(draws: Draws) -> Task | None:
            letters = [letter.upper() if draws.below(2) else letter for letter in LETTERS]
            thing = "".join(letters)
            id = stable_hash("rules", self.tree, self.depth, self.labels, thing)
            if (stable_hash("rules", thing) % HELD_OUT == 0) != (split == "test"):
                return None
            task = Task(id, tuple(self.tokens(f"{thing}=")), 0, {"problem": f"{thing}=", "thing": thing})
            return self.privileged(task) if self.shown else task

        return self._first(split, index, draw)

    @cached_property
    def rules(self) -> Tree:
        """The tree of this world."""
        draws = Draws(f"rules/tree/{self.tree}", 96)
        return self._tree([draws.below(2**20) for _ in range(NUMBERS)])

    def privileged(self, task: Task) -> Task:
        """The same problem with the rules before it."""
        return self._showing(task, self.rules)

    def _showing(self, task: Task, tree: Tree) -> Task:
        if task.data.get("shown"):
            return task
        prompt = (*self.tokens(written(tree)), *task.prompt)
        return dataclasses.replace(task, prompt=prompt, data={**task.data, "shown": True})

    def _tree(self, numbers: Sequence[int]) -> Tree:
        """Different attributes, by numbers to draw with, and labels, which lie in the same order in every tree."""
        attributes = _shuffled(LETTERS, list(numbers))[: 2**self.depth - 1]
        return (*attributes, *(DIGITS[leaf % self.labels] for leaf in range(2**self.depth)))

    # -------------------------------------------------------------- answers

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        """Beside `success`: `route`, every step is the tree's; `format`, it has the form of an answer; `ended`."""
        body, gold = self.body([*task.given, *answer]), _route(self.rules, task.data["thing"])
        steps = body[:-1] if body else ""
        formed = (
            body is not None
            and len(body) == len(gold)
            and all(a in LETTERS and b.lower() == a for a, b in zip(steps[::2], steps[1::2], strict=True))
            and body[-1] in DIGITS
        )
        return {
            "success": float(body is not None and body[-1:] == gold[-1]),
            "route": float(body == gold),
            "format": float(formed),
            "ended": float(body is not None),
        }

    def gold(self, task: Task) -> list[int]:
        return self.tokens(_route(self.rules, task.data["thing"])[len(task.given) :] + END)

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        """What is right by some tree, for the teacher does not know this one."""
        route = _route(self._tree(rng.integers(2**20, size=NUMBERS).tolist()), task.data["thing"])
        return self.tokens(route[len(task.given) :] + END)

    def lessons(self, task: Task, rng: np.random.Generator) -> list[Lesson]:
        tree = self._tree(rng.integers(2**20, size=NUMBERS).tolist())
        bare = dataclasses.replace(task, prompt=tuple(self.tokens(task.data["problem"])), data={})
        answer = self.tokens(_route(tree, task.data["thing"]) + END)
        return [(self._showing(bare, tree).prompt if rng.random() < 2 / 3 else bare.prompt, answer)]

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also another label after the right steps."""
        gold = _route(self.rules, task.data["thing"])
        other = DIGITS[(int(gold[-1]) + 1) % self.labels]
        return [*super().mistakes(task), self.tokens(gold[len(task.given) : -1] + other + END)]


def written(tree: Tree) -> str:
    """Rules as a prompt shows them: the first attribute, then what follows from each as it may be, and labels last."""
    below = ((tree[2 * i + 1], tree[2 * i + 2]) for i in range(len(tree) // 2))
    follows = (f"{a}{no},{a.upper()}{yes}" for a, (no, yes) in zip(tree, below, strict=False))
    return f"[{tree[0]};{','.join(follows)}]"


def _route(tree: Tree, thing: str) -> str:
    """The right answer without its end."""
    at, said = 0, ""
    while at < len(tree) // 2:
        here = thing[LETTERS.index(tree[at])]
        said += tree[at] + here
        at = 2 * at + 1 + here.isupper()
    return said + tree[at]


def _shuffled(items: Sequence[str], numbers: list[int]) -> list[str]:
    """In an order that the first of these numbers decide; they are used up."""
    left = list(items)
    return [left.pop(numbers.pop() % len(left)) for _ in range(len(left))]
