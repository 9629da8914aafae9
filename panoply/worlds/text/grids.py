"""Small pictures as tokens: cells of a grid, and questions about one row or one column of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.measures import measures
from panoply.worlds.presets import Preset
from panoply.worlds.text.characters import DIGITS, END, CharacterWorld, Draws
from panoply.worlds.world import Correction, Task

OPEN, BLANK, CLOSE = "<_>"
"""Begin what is looked at, stand for what is seen there without being written, and end it."""
IN_MARKS, IN_BITS = str.maketrans("01", "89"), str.maketrans("89", "01")
ASKED = 128
"""Held-out problems on which the chance of references is measured."""
HELD_OUT = 8
"""One problem in so many is in the test split."""


@world("grids@1")
@dataclass(frozen=True)
class Grids(CharacterWorld):
    """`0110100111000101r1=` is a grid of 4 × 4 cells, read row by row, and asks how many in row 1 are 1: `<1001>2$`.

        0 1 1 0
        1 0 0 1    row 1, counted from 0
        1 1 0 0
        0 1 0 1

    Between `<` and `>` stands what is looked at: the cells themselves, or as many blanks (`<____>2$`), or nothing at
    all (`2$`); only the number counts. The careless teacher looks in the wrong place: with a chance of `slip` it takes
    the next row or column, after the last the first. With `dialect=marks` references and the expert write 8 and 9 for 0
    and 1, `<9889>2$`, which counts as much and which the start never does.
    """

    side: int = 4
    """Rows of the grid, and columns."""
    slip: float = 0.65
    """How often the teacher looks at the next row or column."""
    dialect: Literal["bits", "marks"] = "bits"
    """How references and the expert write cells: 0 and 1, or 8 and 9."""

    presets: ClassVar[Mapping[str, Preset]] = {
        "foreign": Preset(
            {"dialect": "marks"},
            "an expert who sees better and writes as the start never does: pairs out of its reach, imitation first",
            0.33,
            baseline="dpo",
            budget="steps=60",
        ),
    }
    bounds: ClassVar[Mapping[str, str]] = {"side": "from 2 to 8", "slip": "from 0 to 1"}
    access: ClassVar[frozenset[str]] = frozenset(
        {"verify", "reference", "teacher", "pairs", "looks", "expert", "picture"}
    )
    alphabet: ClassVar[str] = DIGITS + "rc=" + OPEN + BLANK + CLOSE

    @property
    def max_tokens(self) -> int:
        return self.side + 4

    def task(self, split: str, index: int) -> Task:
        def draw(draws: Draws) -> Task | None:
            cells = "".join(DIGITS[draws.below(2)] for _ in range(self.side**2))
            line, number = "rc"[draws.below(2)], draws.below(self.side)
            problem = f"{cells}{line}{number}="
            id = stable_hash("grids", problem)
            if (id % HELD_OUT == 0) != (split == "test"):
                return None
            return Task(id, tuple(self.tokens(problem)), 0, {"cells": cells, "line": line, "number": number})

        return self._first(split, index, draw)

    def looked_at(self, task: Task, further: int = 0) -> str:
        """The cells of the row or column asked for, or of one so much further on."""
        n, cells = self.side, task.data["cells"]
        at = (task.data["number"] + further) % n
        found: str = cells[at * n : at * n + n] if task.data["line"] == "r" else cells[at::n]
        return found

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        """Beside `success`: `looked`, whether something stands between `<` and `>`, and `ended`."""
        body = self.body(answer)
        before, looked, rest = (body or "").partition(OPEN)
        seen, closed, said = rest.partition(CLOSE)
        said = said if looked else before
        fits = not looked or (before == "" and bool(closed) and len(seen) == self.side)
        right = str(self.looked_at(task).count("1"))
        return {
            "success": float(body is not None and fits and said == right),
            "looked": float(bool(looked)),
            "ended": float(body is not None),
        }

    def gold(self, task: Task) -> list[int]:
        return self.tokens("".join(self._sentences(task)))

    def corrected(self, task: Task, answer: Sequence[int]) -> Correction:
        """Its two sentences are what is looked at, and the number. A misread cell costs the first a point of four."""
        head, closed, rest = (text := self.text(answer)).partition(CLOSE)
        said = [head + closed, rest] if text.startswith(OPEN) and closed else ["", text]
        cells, right = self.looked_at(task), self._sentences(task)
        read = said[0].translate(IN_BITS)[1:-1]
        misread = sum(a != b for a, b in zip(read, cells, strict=False)) + abs(len(read) - len(cells))
        seen = max(1, 4 - misread) if said[0] else 4
        scores = [seen, 4 if said[1] == right[1] else 1]
        kept = [old if score == 4 else new for old, new, score in zip(said, right, scores, strict=True)]
        return Correction(
            self.tokens("".join(kept)),
            [score for old, score in zip(said, scores, strict=True) for _ in old],
            [score for new, score in zip(kept, scores, strict=True) for _ in new],
            [seen < 4 and i == 0 for i, new in enumerate(kept) for _ in new],
        )

    def blotted(self, task: Task, share: float, rng: np.random.Generator) -> Task:
        """Cells become blanks."""
        prompt, count = list(task.prompt), self.side**2
        for at in rng.permutation(count)[: int(share * count)]:
            prompt[at] = self.tokens(BLANK)[0]
        return replace(task, prompt=tuple(prompt))

    @measures("reference")
    def reference_chance(self, policy: Any, seed: int) -> float:
        """The mean chance of the reference answer to held-out problems."""
        from panoply.rollout.text import Collector

        tasks = self.held_out(ASKED)
        given = Collector(self, policy, seed).answers(tasks, [self.gold(task) for task in tasks])
        logp = policy.score(given)["logp"].detach().double().cpu()
        return float(given.by("episode").sum(logp).exp().mean())

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        return self._answer(self.looked_at(task, int(rng.random() < self.slip)))

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also one too many, and what is looked at left open."""
        cells = self.looked_at(task)
        texts = (f"{OPEN}{cells}{CLOSE}{cells.count('1') + 1}", f"{OPEN}{cells}{cells.count('1')}")
        return [*super().mistakes(task), *(self.tokens(text + END) for text in texts)]

    def _sentences(self, task: Task) -> list[str]:
        """What is right, as references write it: what is looked at, and the number."""
        cells = self.looked_at(task)
        shown = cells.translate(IN_MARKS) if self.dialect == "marks" else cells
        return [f"{OPEN}{shown}{CLOSE}", f"{cells.count('1')}{END}"]

    def _answer(self, cells: str) -> list[int]:
        return self.tokens(f"{OPEN}{cells}{CLOSE}{cells.count('1')}{END}")
