"""Expressions that are translated into programs of a stack machine; each has several right translations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np

from panoply.worlds.text.characters import Draws
from panoply.worlds.text.program_kind import Kind

LEAVES, SIGNS = "abcd", "+-*/"
PRIME = 10_007
"""Numbers are taken modulo this, so that they are exact and a quotient is a number again."""
INPUTS = tuple(
    dict(zip(LEAVES, row, strict=True))
    for row in (
        (17, 201, 3011, 9),
        (4, 8191, 77, 1203),
        (523, 6, 41, 7001),
        (9001, 12, 345, 88),
        (2, 3, 5, 7),
    )
)
"""What the letters are when a program is run: two that differ give the same five times only by a rare accident."""
EQUIVALENTS = 3
OPERATORS = 3

Tree = str | tuple[str, "Tree", "Tree"]
"""A letter, or a sign and its two operands."""


class Ir(Kind):
    """`-+ab*cd>` is a + b − c·d with signs in front; its translation has them behind: `ab+cd*-$`.

    Any program that computes the same on five inputs is right: `ba+cd*-$`, with operands exchanged, or for a − b − c
    both `ab-c-$` and `abc+-$`. Every problem has at least three right ones, and at least one sign whose operands cannot
    be exchanged. The careless teacher exchanges them, at `-` and at `/`; in the `hard` setting it also takes every sign
    for the next one more often than not.
    """

    alphabet: ClassVar[str] = LEAVES + SIGNS + ">"
    longest: ClassVar[int] = 11
    slip: ClassVar[float] = 0.6
    hard_slip: ClassVar[float] = 0.7
    access: ClassVar[frozenset[str]] = frozenset({"teachers"})

    def problem(self, draws: Draws) -> str:
        def drawn(operators: int) -> Tree:
            if not operators:
                return LEAVES[draws.below(len(LEAVES))]
            left = draws.below(operators)
            return SIGNS[draws.below(len(SIGNS))], drawn(left), drawn(operators - 1 - left)

        return prefix(drawn(OPERATORS)) + ">"

    def worth_asking(self, problem: str) -> bool:
        """Where operands out of order make a difference, there are equivalents, and inputs decide what comes out."""
        tree = parsed(problem[:-1])
        values = computed(postfix(tree))
        varied = None not in values and len(set(values)) > 2
        slips = computed(self.careless(problem, 1.0, False, np.random.default_rng())) != values
        return varied and slips and len(equal(tree, EQUIVALENTS)) == EQUIVALENTS

    def solution(self, problem: str) -> str:
        return postfix(parsed(problem[:-1]))

    def equivalents(self, problem: str) -> list[str]:
        """Three right translations, the reference first."""
        return [postfix(tree) for tree in equal(parsed(problem[:-1]), EQUIVALENTS)]

    def broken(self, problem: str, n: int, rng: np.random.Generator) -> list[str]:
        """Up to so many right translations with one thing changed, which compute something else: operands exchanged,
        another sign, or another letter."""
        right, found = computed(self.solution(problem)), list[str]()
        trees = equal(parsed(problem[:-1]), EQUIVALENTS)
        for _ in range(16 * n):
            program = postfix(changed(trees[int(rng.integers(len(trees)))], rng))
            if program not in found and computed(program) != right:
                found.append(program)
            if len(found) == n:
                break
        return found

    def careless(self, problem: str, slip: float, hard: bool, rng: np.random.Generator) -> str:
        def said(tree: Tree) -> str:
            if isinstance(tree, str):
                return tree
            sign, left, right = tree[0], said(tree[1]), said(tree[2])
            if sign in "-/" and rng.random() < slip:
                left, right = right, left
            if hard and rng.random() < slip:
                sign = SIGNS[(SIGNS.index(sign) + 1) % len(SIGNS)]
            return left + right + sign

        return said(parsed(problem[:-1]))

    def grade(self, problems: Sequence[str], programs: Sequence[str | None]) -> list[dict[str, float]]:
        """Beside `success`: `runs`, whether it computes anything at all."""
        found = []
        for problem, program in zip(problems, programs, strict=True):
            values = (None,) if program is None else computed(program)
            right = values == computed(self.solution(problem))
            found.append({"success": float(right), "runs": float(None not in values)})
        return found

    def verdict(self, problem: str, program: str) -> str:
        return f"computes {', '.join('nothing' if x is None else str(x) for x in computed(program))}"

    def wrong(self, problem: str) -> list[str]:
        """Its source as it is, and the operands of the first `-` or `/` exchanged, where that makes a difference."""
        right, exchanged = computed(self.solution(problem)), postfix(_exchanged(parsed(problem[:-1])))
        return [problem[:-1]] + ([exchanged] if computed(exchanged) != right else [])


# ------------------------------------------------------------------ expressions


def parsed(source: str) -> Tree:
    """An expression with signs in front."""

    def read(at: int) -> tuple[Tree, int]:
        if source[at] in LEAVES:
            return source[at], at + 1
        left, at_right = read(at + 1)
        right, end = read(at_right)
        return (source[at], left, right), end

    return read(0)[0]


def prefix(tree: Tree) -> str:
    return tree if isinstance(tree, str) else tree[0] + prefix(tree[1]) + prefix(tree[2])


def postfix(tree: Tree) -> str:
    return tree if isinstance(tree, str) else postfix(tree[1]) + postfix(tree[2]) + tree[0]


@lru_cache(maxsize=65536)
def computed(program: str) -> tuple[int | None, ...]:
    """What a program computes on each of five inputs; None where it fails: too few numbers, too many, a zero below."""
    return tuple(_run(program, given) for given in INPUTS)


def _run(program: str, given: dict[str, int]) -> int | None:
    stack: list[int] = []
    for word in program:
        if word in given:
            stack.append(given[word])
            continue
        if word not in _DOES or len(stack) < 2:
            return None
        right, left = stack.pop(), stack.pop()
        if word == "/" and right == 0:
            return None
        stack.append(_DOES[word](left, right) % PRIME)
    return stack[0] if len(stack) == 1 else None


_DOES: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a * pow(b, -1, PRIME),
}


# ------------------------------------------------------------------ the same in other words


def rewritten(tree: Tree) -> Iterator[Tree]:
    """Expressions one step away that are always equal: operands of + and * exchanged, or grouped differently."""
    if isinstance(tree, str):
        return
    sign, left, right = tree
    if sign in "+*":
        yield sign, right, left
    if not isinstance(left, str) and left[0] == sign:
        inner = {"-": "+", "/": "*"}.get(sign, sign)
        yield sign, left[1], (inner, left[2], right)
    yield from ((sign, other, right) for other in rewritten(left))
    yield from ((sign, left, other) for other in rewritten(right))


def equal(tree: Tree, n: int) -> list[Tree]:
    """Up to so many expressions that are equal to one, which comes first, those nearest to it before others."""
    found = [tree]
    for one in found:
        for other in rewritten(one):
            if other not in found and len(found) < n:
                found.append(other)
    return found


def changed(tree: Tree, rng: np.random.Generator) -> Tree:
    """The same with one thing changed, drawn by lot."""
    if isinstance(tree, str):
        return LEAVES[(LEAVES.index(tree) + 1 + int(rng.integers(len(LEAVES) - 1))) % len(LEAVES)]
    sign, left, right = tree
    at = int(rng.integers(4))
    if at == 0:
        return sign, right, left
    if at == 1:
        return SIGNS[(SIGNS.index(sign) + 1 + int(rng.integers(3))) % 4], left, right
    return (sign, changed(left, rng), right) if at == 2 else (sign, left, changed(right, rng))


def _exchanged(tree: Tree) -> Tree:
    """The operands of the first `-` or `/` exchanged."""
    if isinstance(tree, str) or not set(prefix(tree)) & set("-/"):
        return tree
    sign, left, right = tree
    if sign in "-/":
        return sign, right, left
    inside = set(prefix(left)) & set("-/")
    return (sign, _exchanged(left), right) if inside else (sign, left, _exchanged(right))
