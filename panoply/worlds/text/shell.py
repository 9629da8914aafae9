"""A shell in memory: a tree of twelve files, six utilities, and which arguments of a command matter.

Nothing of it touches the machine. A command is a utility and arguments, a letter each: options (`r` is `-r`), and what
stands for a file, another file, or a pattern. What those are the command says (`Command.files`, `pattern`, `number`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from panoply.worlds.text.characters import Draws

FILES = "abcdefghijkl"
HIDDEN = "dk"
"""Files whose names begin with a point, so that `ls` passes them over."""
UTILITIES = {"L": "ls", "G": "grep", "S": "sort", "H": "head", "R": "rm", "T": "touch"}
OPTIONS = {"L": "alrS", "G": "ivcn", "S": "runf", "H": "ncqv", "R": "fv", "T": "amc"}
"""`S` of ls orders by size; `n` and `c` of head take a number; all else is as in coreutils."""
FIRST, SECOND, PATTERN = OPERANDS = "FEP"
LINES = "ox", "Ox", "OX", "fig", "Fig", "9", "10", "9 ox", "elk", "fox"
PATTERNS, NUMBERS = "ofx9", "12345"
ARGUMENTS = "".join(sorted({*"".join(OPTIONS.values())})) + OPERANDS
"""All productions of all non-terminals of the grammar."""

Tree = dict[str, tuple[tuple[str, ...], int, int]]
"""Lines, time of access and time of change of each file, by name."""


@dataclass(frozen=True)
class Command:
    """A utility, what its placeholders stand for, and arguments. `tree` says which files there are, by number."""

    utility: str
    files: str
    pattern: str
    number: int
    arguments: str = ""
    tree: int = 0

    def text(self) -> str:
        """As one would type it."""
        return " ".join([UTILITIES[self.utility], *(self._word(letter) for letter in self.arguments)])

    def operands(self) -> list[str]:
        stands = {FIRST: _name(self.files[0]), SECOND: _name(self.files[1]), PATTERN: self.pattern}
        return [stands[letter] for letter in self.arguments if letter in OPERANDS]

    def _word(self, letter: str) -> str:
        if letter in OPERANDS:
            return replace(self, arguments=letter).operands()[0]
        return f"-{letter} {self.number}" if self.utility == "H" and letter in "nc" else f"-{letter}"


@dataclass(frozen=True)
class Ran:
    """What came of a command: its exit code, its output, and the files after it."""

    exit: int
    output: str
    files: tuple[tuple[str, tuple[str, ...], int, int], ...]


def _name(letter: str) -> str:
    return f".{letter}" if letter in HIDDEN else letter


@lru_cache(maxsize=64)
def tree_of(number: int) -> Tree:
    """Twelve files of two to five lines; many lines come twice, and in both cases of their letters."""
    found = {}
    for letter in FILES:
        draws = Draws(f"shell/{number}/{letter}")
        lines = tuple(LINES[draws.below(len(LINES))] for _ in range(2 + draws.below(4)))
        found[_name(letter)] = (lines, 0, 0)
    return found


@lru_cache(maxsize=65536)
def run(command: Command) -> Ran:
    """Run a command on its tree of files, which is fresh each time."""
    tree = dict(tree_of(command.tree))
    options = "".join(a for a in command.arguments if a not in OPERANDS)
    if set(options) - set(OPTIONS[command.utility]):
        code, output = 2, f"{UTILITIES[command.utility]}: invalid option"
    else:
        code, output = _DONE[command.utility](tree, options, command.operands(), command.number)
    return Ran(code, output, tuple((name, *tree[name]) for name in sorted(tree)))


# ------------------------------------------------------------------ the utilities


def _ls(tree: Tree, options: str, names: list[str], number: int) -> tuple[int, str]:
    if set(names) - tree.keys():
        return 2, "ls: cannot access"
    shown = sorted(names or (n for n in tree if "a" in options or not n.startswith(".")))
    if "S" in options:
        shown.sort(key=lambda name: -_size(tree[name][0]))
    if "r" in options:
        shown.reverse()
    return 0, "\n".join(f"{_size(tree[name][0])} {name}" if "l" in options else name for name in shown)


def _grep(tree: Tree, options: str, names: list[str], number: int) -> tuple[int, str]:
    if len(names) < 2:
        return 2, "grep: nothing to search"
    pattern, *names = names
    if set(names) - tree.keys():
        return 2, "grep: no such file"
    look = re.compile(re.escape(pattern), re.IGNORECASE if "i" in options else 0)
    said: list[str] = []
    found = False
    for name in names:
        before = f"{name}:" if len(names) > 1 else ""
        lines = [(i, x) for i, x in enumerate(tree[name][0], 1) if bool(look.search(x)) != ("v" in options)]
        found = found or bool(lines)
        if "c" in options:
            said.append(f"{before}{len(lines)}")
        else:
            said += [f"{before}{i}:{x}" if "n" in options else f"{before}{x}" for i, x in lines]
    return int(not found), "\n".join(said)


def _sort(tree: Tree, options: str, names: list[str], number: int) -> tuple[int, str]:
    if not names or set(names) - tree.keys():
        return 2, "sort: cannot read"

    def key(line: str) -> tuple[int, str]:
        digits = re.match(r"\d*", line)
        leading = int(digits[0] or 0) if digits and "n" in options else 0
        return leading, "" if "n" in options else line.upper() if "f" in options else line

    lines = [line for name in names for line in tree[name][0]]
    if "u" in options:
        lines = list({key(line): line for line in reversed(lines)}.values())[::-1]
    else:
        lines.sort()  # what is equal by its key comes in the order of its bytes
    return 0, "\n".join(sorted(lines, key=key, reverse="r" in options))


def _head(tree: Tree, options: str, names: list[str], number: int) -> tuple[int, str]:
    if not names or set(names) - tree.keys():
        return 1, "head: cannot open"
    last = next((o for o in reversed(options) if o in "nc"), "")
    titles = next((o == "v" for o in reversed(options) if o in "qv"), len(names) > 1)
    said = []
    for name in names:
        lines = tree[name][0]
        text = "\n".join(lines)[:number] if last == "c" else "\n".join(lines[: number if last else 10])
        said.append(f"==> {name} <==\n{text}" if titles else text)
    return 0, "\n".join(said)


def _rm(tree: Tree, options: str, names: list[str], number: int) -> tuple[int, str]:
    code, said = int(not names and "f" not in options), []
    for name in names:
        if name in tree:
            del tree[name]
            said += [f"removed '{name}'"] if "v" in options else []
        elif "f" not in options:
            code = 1
            said.append(f"rm: cannot remove '{name}'")
    return code, "\n".join(said)


def _touch(tree: Tree, options: str, names: list[str], number: int) -> tuple[int, str]:
    for name in names:
        if name in tree or "c" not in options:
            lines, read, changed = tree.get(name, ((), 1, 1))
            only = set(options) & set("am")
            tree[name] = lines, 1 if only != {"m"} else read, 1 if only != {"a"} else changed
    return int(not names), ""


_DONE: dict[str, Callable[..., tuple[int, str]]] = {
    "L": _ls, "G": _grep, "S": _sort, "H": _head, "R": _rm, "T": _touch,
}  # fmt: skip


def _size(lines: tuple[str, ...]) -> int:
    return sum(len(line) + 1 for line in lines)


# ------------------------------------------------------------------ which arguments matter


@lru_cache(maxsize=65536)
def minimality(command: Command, alike: float = 0.95) -> float:
    """S = max(1 − n_o/m, 1 − n_x/m): the share of a command's m arguments that matter; 0 where it fails.

    n_o   arguments without which it exits alike and says the same, or nearly: 1 − edits/length of at least `alike`
    n_x   those without which the files are the same after it; all, where the command changes none
    """
    ran, m = run(command), len(command.arguments)
    if ran.exit or not m:
        return 0.0
    rest = [
        run(replace(command, arguments=command.arguments[:j] + command.arguments[j + 1 :])) for j in range(m)
    ]
    said = sum(one.exit == 0 and similar(one.output, ran.output, alike) for one in rest)
    changed = ran.files != run(replace(command, utility="L", arguments="")).files
    left = sum(one.files == ran.files for one in rest) if changed else m
    return max(1 - said / m, 1 - left / m)


def similar(a: str, b: str, least: float) -> bool:
    """Whether 1 − edits/length is at least so much, edits being Levenshtein's and the length that of the longer."""
    longest = max(len(a), len(b))
    most = int((1 - least) * longest + 1e-9)
    if a == b or abs(len(a) - len(b)) > most:
        return a == b
    before = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (x != y)))
        if min(row) > most:
            return False
        before = row
    return before[-1] <= most
