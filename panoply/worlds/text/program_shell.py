"""Shell commands that are built argument by argument; what counts is that every argument matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import ClassVar

import numpy as np

from panoply.worlds.text.characters import END, Draws
from panoply.worlds.text.program_kind import Kind
from panoply.worlds.text.shell import (
    ARGUMENTS,
    FILES,
    FIRST,
    NUMBERS,
    OPTIONS,
    PATTERN,
    PATTERNS,
    SECOND,
    UTILITIES,
    Command,
    minimality,
    run,
)
from panoply.worlds.world import Signal

HORIZON = 8
"""The most arguments of a command."""
FEWEST = 3
"""A command of which fewer arguments matter is no success."""


@dataclass(frozen=True)
class Shell(Kind):
    """`Gcfo2>` is grep with the files c and f, the pattern o and the number 2 at hand; `ivPFE$` is `grep -i -v o c f`.

    A token is a production of a grammar: an option of the utility, or F, E and P for the first file, the second and the
    pattern. After every argument the command is run, and run again without each of its arguments in turn; S is the
    share of arguments without which something else would be said, or done to the files. With m arguments so far and
    L = 8 at most,

        an argument earns     (S − S before)/L, or 1/L where S was 1 and still is
        the end of a command  (m/L)·(S − margin), and −1 where it fails

    on its own token (`score`). A success is a command of which three arguments or more matter, and all of them. The
    files are the same twelve for all problems and are shown to nobody: whether `-i` matters depends on what is in them.
    Where `masked`, only productions of the left-most non-terminal can be drawn: options, then what a utility wants in
    its order; else any production may follow any other, and the shell refuses most of what comes of it. The expert
    gives the longest command without repetition of which all arguments matter; the careless teacher draws productions
    by lot, and is content with what comes of it where that is no success; in the `hard` setting it says its first
    argument twice.
    """

    masked: bool = True
    margin: float = 0.5

    alphabet: ClassVar[str] = "".join(sorted({*UTILITIES, *FILES, *PATTERNS, *NUMBERS, *ARGUMENTS})) + ">"
    longest: ClassVar[int] = HORIZON
    slip: ClassVar[float] = 0.75
    hard_slip: ClassVar[float] = 0.975

    def problem(self, draws: Draws) -> str:
        utility = [*UTILITIES][draws.below(len(UTILITIES))]
        first = draws.below(len(FILES))
        second = (first + 1 + draws.below(len(FILES) - 1)) % len(FILES)
        pattern, number = PATTERNS[draws.below(len(PATTERNS))], NUMBERS[draws.below(len(NUMBERS))]
        return f"{utility}{FILES[first]}{FILES[second]}{pattern}{number}>"

    def worth_asking(self, problem: str) -> bool:
        return len(self.solution(problem)) >= FEWEST

    def part(self, problem: str) -> str:
        return UTILITIES[problem[0]]

    def solution(self, problem: str) -> str:
        return longest_minimal(command(problem))

    def careless(self, problem: str, slip: float, hard: bool, rng: np.random.Generator) -> str:
        if rng.random() >= slip:
            return self.solution(problem)
        drawn = (by_lot(problem, True, rng) for _ in range(64))
        poor = (said for said in drawn if not self._succeeds(problem, said))
        return next((said for said in poor if not hard or said[:2] == 2 * said[:1] != ""), "")

    def _succeeds(self, problem: str, said: str) -> bool:
        return len(said) >= FEWEST and minimality(command(problem, said)) == 1

    def grade(self, problems: Sequence[str], programs: Sequence[str | None]) -> list[dict[str, Signal]]:
        """Beside `success`: `score`, of every token; `valid`, whether it exits with 0; `minimal`, S; `arguments`, m;
        `worth`, m·S."""
        found: list[dict[str, Signal]] = []
        for problem, program in zip(problems, programs, strict=True):
            whole = command(problem, program or "")
            sound = program is not None and not set(program) - set(ARGUMENTS)
            share, m = minimality(whole) if sound else 0.0, len(program or "")
            found.append(
                {
                    "success": float(sound and self._succeeds(problem, program or "")),
                    "score": rewards(whole, self.margin)
                    if sound
                    else [0.0] * m + [-1.0]
                    if program
                    else -1.0,
                    "valid": float(sound and run(whole).exit == 0),
                    "minimal": share,
                    "arguments": float(m),
                    "worth": m * share,
                }
            )
        return found

    def verdict(self, problem: str, program: str) -> str:
        if set(program) - set(ARGUMENTS):
            return "it has what is no argument"
        whole = command(problem, program)
        ran = run(whole)
        return f"{whole.text()} → exit {ran.exit}{': ' if ran.output else ''}{ran.output.strip()}"

    def wrong(self, problem: str) -> list[str]:
        """An argument that is there twice, no argument, a file without what comes before it."""
        right = self.solution(problem)
        return [right[0] + right, "", FIRST]

    def allowed(self, problem: str, said: str) -> str | None:
        return productions(problem, said, self.masked)


def command(problem: str, arguments: str = "") -> Command:
    """A problem as a command. A number that the utility has no use for is left out: equal commands are run once."""
    utility, files, pattern, number = problem[0], problem[1:3], problem[3], int(problem[4])
    return Command(utility, files, pattern, number if utility == "H" else 0, arguments)


def rewards(whole: Command, margin: float) -> list[float]:
    """What each argument earns, and after them the end."""
    before, earned = 0.0, []
    for m in range(1, len(whole.arguments) + 1):
        partial = replace(whole, arguments=whole.arguments[:m])
        share = minimality(partial)
        failed = run(partial).exit != 0
        gained = 1.0 if share == before == 1 else share - before
        earned.append(0.0 if failed else gained / HORIZON)
        before = share
    failed = run(whole).exit != 0
    return [*earned, len(whole.arguments) / HORIZON * (before - margin) - failed]


# ------------------------------------------------------------------ the grammar


def follows(problem: str, said: str) -> str:
    """The productions of the left-most non-terminal after what was said, the end among them where it may come."""
    utility, files = problem[0], FIRST + SECOND
    named = any(letter in files for letter in said)
    pattern = utility == "G" and PATTERN not in said
    missing = pattern + (utility != "L" and not named)
    ends = END if not missing else ""
    if len(said) >= HORIZON:
        return END
    options = "" if named or PATTERN in said or len(said) + missing >= HORIZON else OPTIONS[utility]
    return options + (PATTERN if pattern else files) + ends


def productions(problem: str, said: str, masked: bool) -> str:
    """What may follow; without masks all productions of the grammar, as long as there is room for an argument."""
    if masked or len(said) >= HORIZON:
        return follows(problem, said)
    return ARGUMENTS + END


def by_lot(problem: str, masked: bool, rng: np.random.Generator) -> str:
    """Productions drawn alike, one after another: what a policy that knows nothing does."""
    said = ""
    while len(said) < HORIZON:
        choices = productions(problem, said, masked)
        drawn = choices[int(rng.integers(len(choices)))]
        if drawn == END:
            break
        said += drawn
    return said


@lru_cache(maxsize=65536)
def longest_minimal(bare: Command) -> str:
    """The arguments of the longest command whose arguments all matter; of equals the first."""
    found = (a for a in _orderly(bare.utility) if minimality(replace(bare, arguments=a)) == 1)
    return next(found, "")


@lru_cache
def _orderly(utility: str) -> tuple[str, ...]:
    """Arguments without repetition, the most first: options, then what the utility wants."""
    before = PATTERN if utility == "G" else ""
    every = [
        "".join(options) + before + files
        for n in range(len(OPTIONS[utility]) + 1)
        for options in combinations(OPTIONS[utility], n)
        for files in (FIRST, FIRST + SECOND, *([""] if utility == "L" else []))
    ]
    return tuple(sorted(every, key=len, reverse=True))
