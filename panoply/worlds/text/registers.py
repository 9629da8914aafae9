"""Programs on four registers, in lines that are macros; a comment may stand before a line."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.measures import measures
from panoply.worlds.text.characters import DIGITS, END, CharacterWorld, Draws
from panoply.worlds.world import Task

if TYPE_CHECKING:
    from panoply.rollout.lines import ReadThrough

REGISTERS = "abcd"
INSTRUCTIONS = REGISTERS + REGISTERS.upper() + "xy"
"""a adds 1 to register a, A adds 3; x exchanges a and b, y exchanges c and d."""
COMMENT, LINE = "#", "."
GAINS = 1, 3
"""What a macro adds to its register: there are two for each."""
DRAWN_FROM = "program"
"""What macros and the split are hashes of; with another word the warm start would not know them."""
HELD_OUT = 8
"""One problem in so many is in the test split."""
LOOKED_AT = 256
"""Held-out programs that are read through for what a policy makes of them."""
FORM = re.compile(rf"(({COMMENT}[0-9])?\{LINE}[{INSTRUCTIONS}]+)+")


@world("registers@1")
@dataclass(frozen=True)
class Registers(CharacterWorld):
    """`31>60=`: registers a, b, c and d hold 3, 1, 6 and 0, and c shall be 0. Any program that ends so is right.

        .CBx.cDA$        lines alone, a point before each
        #4.CBx#1.cDA$    the same with comments: 4 are missing, then 1

    A line of the expert's is one of eight macros of three to five instructions, which nobody is told: for each register
    one that adds 3, all told, and one that adds 1, whatever else they do to the others. It adds 3 as often as that
    fits, then 1. A comment changes nothing of what a program does. What a digit after `#` means is up to who writes it;
    the teacher says how much is still missing, and a line that it has commented on is right. On other lines it slips:
    it writes the other macro of the register, and goes on as if it had not.
    """

    macros: int = 0
    """Which eight macros, of very many."""
    comments: float = 0.4
    """How often the teacher comments on a line."""
    slip: float = 0.8
    """How often it writes the other macro, on lines that it has not commented on."""

    bounds: ClassVar[Mapping[str, str]] = {
        "macros": "at least 0",
        "comments": "from 0 to 1",
        "slip": "from 0 to 1",
    }
    access: ClassVar[frozenset[str]] = frozenset({"verify", "reference", "teacher", "pairs", "lines"})
    alphabet: ClassVar[str] = DIGITS + INSTRUCTIONS + COMMENT + LINE + ">="

    @property
    def max_tokens(self) -> int:
        """Of four lines of five instructions with comments, and the end."""
        return 4 * (5 + len("#0.")) + 1

    @cached_property
    def library(self) -> dict[tuple[str, int], str]:
        """The macros, by register and by what they add to it."""
        found: dict[tuple[str, int], str] = {}
        for register in REGISTERS:
            for gain in GAINS:
                for attempt in range(100_000):
                    draws = Draws(f"{DRAWN_FROM}/{self.macros}/{register}/{gain}/{attempt}")
                    text = "".join(INSTRUCTIONS[draws.below(10)] for _ in range(3 + draws.below(3)))
                    if adds(text, register) == gain and text not in found.values():
                        found[register, gain] = text
                        break
        return found

    # -------------------------------------------------------------- problems

    def task(self, split: str, index: int) -> Task:
        def draw(draws: Draws) -> Task | None:
            held = [draws.below(10) for _ in REGISTERS]
            at = draws.below(len(REGISTERS))
            problem = "".join(f">{v}" if i == at else str(v) for i, v in enumerate(held))
            id = stable_hash(DRAWN_FROM, problem)
            if not held[at] or (id % HELD_OUT == 0) != (split == "test"):
                return None
            missing = 10 - held[at]
            data = {"held": tuple(held), "register": REGISTERS[at], "missing": missing}
            return Task(id, tuple(self.tokens(problem + "=")), len(_gains(missing)), data)

        return self._first(split, index, draw)

    def part_of(self, task: Task) -> str:
        """By the expert's lines."""
        return f"{task.level} line{'s' if task.level > 1 else ''}"

    # -------------------------------------------------------------- answers

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        """Beside `success`: `commented`, the share of lines with a comment; `known`, of lines that are macros; `ended`.

        Of a mark alone (`before_line`) `commented` is whether it is a comment, and `success` whether it is a mark.
        """
        body = self.body(answer)
        if task.data.get("mark"):
            mark = float(body in MARKS)
            return {"success": mark, "commented": float(mark and body != LINE), "known": 0.0, "ended": mark}
        lines = [] if body is None or not FORM.fullmatch(body) else _lines(body)
        done = run(task.data["held"], "".join(line for _, line in lines))
        macros = set(self.library.values())
        return {
            "success": float(bool(lines) and done[task.data["register"]] == 0),
            "commented": sum(bool(comment) for comment, _ in lines) / max(len(lines), 1),
            "known": sum(line in macros for _, line in lines) / max(len(lines), 1),
            "ended": float(body is not None),
        }

    def gold(self, task: Task) -> list[int]:
        """The expert's program, without comments."""
        return [token for line in self.lines(task) for token in (*self.tokens(LINE), *line)]

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        gains, register, text = _gains(task.data["missing"]), task.data["register"], ""
        for missing, gain in zip(_missing(gains), gains, strict=True):
            comment, slip = rng.random() < self.comments, rng.random() < self.slip
            text += f"{COMMENT}{missing}" if comment else ""
            text += LINE + self.library[register, sum(GAINS) - gain if slip and not comment else gain]
        return self.tokens(text + END)

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also one line too many, a comment without a line, and a comment of two digits."""
        gold, step = self.text(self.gold(task))[:-1], self.library[task.data["register"], 1]
        wrong = [gold + LINE + step, gold + "#1", "#12" + gold, "#1." + gold]
        return [*super().mistakes(task), *(self.tokens(text + END) for text in wrong)]

    # -------------------------------------------------------------- the expert's text, line by line

    def lines(self, task: Task) -> list[list[int]]:
        """The expert's lines without the point before each; the end belongs to the last."""
        gains = _gains(task.data["missing"])
        texts = [self.library[task.data["register"], gain] for gain in gains]
        return [self.tokens(text) for text in (*texts[:-1], texts[-1] + END)]

    def before_line(self, task: Task, said: Sequence[int]) -> Task:
        """The same task after so much of a program: to be answered with a mark, a point or a comment and a point."""
        return dataclasses.replace(task, prompt=(*task.prompt, *said), data={**task.data, "mark": True})

    def allowed(self, task: Task, said: Sequence[int]) -> Sequence[int] | None:
        """All, but where a mark is asked for: `.$` or `#0.$`."""
        if not task.data.get("mark"):
            return None
        follows = {"": COMMENT + LINE, COMMENT: DIGITS, LINE: END}
        return self.tokens(follows.get(self.text(said[-1:]), LINE))

    # -------------------------------------------------------------- what a policy makes of the expert's text

    @measures("nats")
    def nats(self, policy: Any, seed: int) -> float:
        """−log π of a token of held-out expert lines, each after the mark that the policy draws for it."""
        read, tasks = self._read(policy, seed)
        tokens = sum(len(line) for task in tasks for line in self.lines(task))
        return -sum(float(found["signal:likelihood"].double().sum()) for found in read.found) / tokens

    @measures("thinks")
    def thinks(self, policy: Any, seed: int) -> float:
        """The share of these lines that it comments on."""
        pairs = self._marked(policy, seed)
        return sum(bool(comment) for comment, _ in pairs) / len(pairs)

    @measures("informs")
    def informs(self, policy: Any, seed: int) -> float:
        """The mutual information of its marks and these lines in nats: ln 8 where a mark says all about its line."""
        return mutual_information(self._marked(policy, seed))

    def _marked(self, policy: Any, seed: int) -> list[tuple[str, str]]:
        return [pair for text in self._read(policy, seed)[0].texts for pair in _lines(self.text(text))]

    def _read(self, policy: Any, seed: int) -> tuple[ReadThrough, list[Task]]:
        from panoply.rollout.lines import read_through
        from panoply.rollout.text import Collector

        tasks = self.held_out(LOOKED_AT)
        return read_through(Collector(self, policy, seed, split="test"), tasks), tasks


MARKS = (LINE, *(f"{COMMENT}{digit}{LINE}" for digit in DIGITS))


def run(held: Sequence[int], instructions: str) -> dict[str, int]:
    """The registers after instructions."""
    now = dict(zip(REGISTERS, held, strict=True))
    for word in instructions:
        if word in "xy":
            one, other = "ab" if word == "x" else "cd"
            now[one], now[other] = now[other], now[one]
        else:
            now[word.lower()] = (now[word.lower()] + (3 if word.isupper() else 1)) % 10
    return now


def adds(instructions: str, register: str) -> int | None:
    """What instructions add to a register whatever it and the others hold; None where that depends."""
    gain, other = run((0, 0, 0, 0), instructions)[register], (1, 2, 3, 4)
    moved = run(other, instructions)[register]
    return gain if moved == (other[REGISTERS.index(register)] + gain) % 10 else None


def _gains(missing: int) -> list[int]:
    """3 as often as it fits, then 1."""
    return [3] * (missing // 3) + [1] * (missing % 3)


def _missing(gains: Sequence[int]) -> list[int]:
    """How much is missing before each of these steps."""
    return [sum(gains[i:]) for i in range(len(gains))]


def _lines(body: str) -> list[tuple[str, str]]:
    """Comment (empty where there is none) and instructions of each line."""
    return re.findall(rf"(?:{COMMENT}([0-9]))?\{LINE}([{INSTRUCTIONS}]+)", body)


def mutual_information(pairs: Sequence[tuple[str, str]]) -> float:
    """Σ p(x, y)·ln(p(x, y)/(p(x)·p(y))) of pairs as often as they came."""
    n, both = len(pairs), Counter(pairs)
    first, second = Counter(x for x, _ in pairs), Counter(y for _, y in pairs)
    return sum(k / n * math.log(k * n / (first[x] * second[y])) for (x, y), k in both.items())
