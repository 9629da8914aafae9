"""The kind `python` of the world `program`: expressions on a list of numbers, run in a sandbox."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from panoply.sandbox import Limits, Result, Wanted
from panoply.sandbox import Program as Source
from panoply.worlds.text.characters import Draws
from panoply.worlds.text.program_kind import Kind

Numbers = list[int]
VERBS: Mapping[str, tuple[str, Callable[[Numbers], Numbers]]] = {
    "s": ("sorted({})", sorted),
    "r": ("{}[::-1]", lambda x: x[::-1]),
    "d": ("{}[1:]", lambda x: x[1:]),
    "p": ("{}[:-1]", lambda x: x[:-1]),
    "e": ("{}[::2]", lambda x: x[::2]),
    "o": ("{}[1::2]", lambda x: x[1::2]),
    "t": ("{}[:3]", lambda x: x[:3]),
    "k": ("{}[2:]", lambda x: x[2:]),
}
ENDS: Mapping[str, tuple[str, Callable[[Numbers], int]]] = {
    "+": ("sum({})", sum),
    "M": ("max({})", max),
    "m": ("min({})", min),
    "#": ("len({})", len),
    "f": ("{}[0]", lambda x: x[0]),
    "l": ("{}[-1]", lambda x: x[-1]),
}
_NAMED = [*VERBS.items(), *ENDS.items()]
TAKEN_FOR = {"+": "#", "#": "+", "M": "m", "m": "M", "f": "l", "l": "f"}
LISTS = (
    [7, 2, 19, 4, 1, 8, 3, 16, 11],
    [3, 11, 5, 0, 12, 5, 9, 21, 6, 13],
    [20, 1, 14, 14, 6, 2, 17, 10, 4],
    [4, 18, 2, 13, 7, 15, 8, 12],
)
"""What programs are tried on. Policies do not see them."""
ASK, MOST = ">", 4
LIMITS = Limits(seconds=0.5, memory=64 * 2**20, output=4096)
FRAME = f"def program(x):\n    return {{}}\nfor x in {[*LISTS]}:\n    print(program(x))\n"
"""What is run around a program: it prints what it gives, and nothing of what is expected goes in."""
ENDED: Mapping[str, str] = {
    "": "",
    "time": "it took too long",
    "output": "it printed too much",
    "lost": "it died",
}
KEPT = 1 << 15
"""Programs whose results are remembered: the same ones come again and again, and give the same."""


@dataclass(frozen=True)
class Python(Kind):
    """Programs are characters of Python; a problem is two to four verbs, an end and `>`."""

    sandbox: str = "auto"

    alphabet = "".join(sorted({*"".join(f"x>{c}{t}" for c, (t, _) in _NAMED)} - {*"{}"}))
    longest = len("sum(sorted(sorted(x[1::2])[1::2]))")
    slip, hard_slip = 0.7, 0.7

    @property
    def sandboxed(self) -> Wanted:
        return Wanted(self.sandbox)

    def within(self, sandbox: str) -> Python:
        return Python(sandbox)

    def problem(self, draws: Draws) -> str:
        verbs = [[*VERBS][draws.below(len(VERBS))] for _ in range(2 + draws.below(MOST - 1))]
        return "".join(verbs) + [*ENDS][draws.below(len(ENDS))] + ASK

    def worth_asking(self, problem: str) -> bool:
        """Where every list has a result, no slip of a teacher's gives the same, and nothing is done and undone."""
        wanted = None if "ss" in problem or "rr" in problem else _wanted(problem)
        slips = (_slipped(problem, *how) for how in product((0, 1), repeat=3) if any(how))
        return wanted is not None and wanted not in map(_wanted, slips)

    def solution(self, problem: str) -> str:
        text = "x"
        for verb in problem[:-2]:
            text = VERBS[verb][0].format(text)
        return ENDS[problem[-2]][0].format(text)

    def careless(self, problem: str, slip: float, hard: bool, rng: np.random.Generator) -> str:
        """Forgets the last verb; in the hard setting also the first, and takes the end for another."""
        last, first, end = (int(slips) for slips in rng.random(3) < slip)
        return self.solution(_slipped(problem, last, first * hard, end * hard))

    def grade(self, problems: Sequence[str], programs: Sequence[str | None]) -> list[dict[str, float]]:
        """`success`: right on all lists; `passed`: on which share of them; `ran`: to its end."""
        ran = self._ran({program for program in programs if program})
        return [
            _graded(_wanted(problem) or [], _lines(ran.get(program or "")))
            for problem, program in zip(problems, programs, strict=True)
        ]

    def _ran(self, programs: Iterable[str]) -> dict[str, Result]:
        """What became of programs, all run at once but for those that were before."""
        known = _remembered(self.sandbox)
        if new := [program for program in sorted(programs) if program not in known]:
            results = self.sandboxed.find().run_many([Source(FRAME.format(p), limits=LIMITS) for p in new])
            if len(known) > KEPT:
                known.clear()
            known |= dict(zip(new, results, strict=True))
        return {program: known[program] for program in programs}

    def verdict(self, problem: str, program: str) -> str:
        if not program:
            return "there is no program"
        result = self._ran({program})[program]
        lines = result.said.split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f"printed {' '.join(result.said.split())}" if result.ok else ENDED[result.ended] or last

    def wrong(self, problem: str) -> list[str]:
        """The last verb forgotten, one bracket too few, and what leaves the frame that a program stands in."""
        right = self.solution(problem)
        return [self.solution(_slipped(problem, 1, 0, 0)), right[:-1], f"{right})", "x"]

    def level(self, problem: str) -> int:
        return len(problem) - 2


@lru_cache(maxsize=8)
def _remembered(sandbox: str) -> dict[str, Result]:
    """What became of programs in a sandbox, in this process."""
    return {}


def _lines(result: Result | None) -> list[str] | None:
    """What a program printed; None of one that did not run to its end."""
    return result.said.splitlines() if result is not None and result.ok else None


def _graded(wanted: Numbers, said: list[str] | None) -> dict[str, float]:
    passed = [a == str(b) for a, b in zip(said or [], wanted, strict=False)]
    right = said is not None and len(said) == len(wanted) == sum(passed)
    return {
        "success": float(right),
        "passed": sum(passed) / len(LISTS),
        "ran": float(said is not None),
    }


@lru_cache(maxsize=1 << 14)
def _wanted(problem: str) -> Numbers | None:
    """What is expected of each list, worked out here and not by the program; None where some list has no result."""
    lists: Iterable[Numbers] = LISTS
    for verb in problem[:-2]:
        lists = [VERBS[verb][1](numbers) for numbers in lists]
    return [ENDS[problem[-2]][1](numbers) for numbers in lists] if all(lists) else None


def _slipped(problem: str, last: int, first: int, end: int) -> str:
    """The problem as a teacher takes it that forgets a verb, or takes the end for another."""
    verbs, asked = problem[first : len(problem) - 2 - last], problem[-2]
    return verbs + (TAKEN_FOR[asked] if end else asked) + ASK
