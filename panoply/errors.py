"""The one exception a user is meant to see: a sentence, not a traceback."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


class PanoplyError(Exception):
    """Bad input, an impossible plan, a broken file. The command line prints it and exits with code 2."""


class Resumable(PanoplyError):
    """What stopped a run lies outside of it and can be mended. What was saved before is untouched."""


class DeviceError(Resumable):
    """A GPU failed or has too little memory."""


class LearnersDied(Resumable):
    """One of the learners of a run that is spread has gone, and with it all: only a checkpoint has what they held."""


@contextmanager
def machine_errors() -> Iterator[None]:
    """Turn what a driver says of a GPU, and an allocation that failed, into a sentence."""
    try:
        yield
    except (MemoryError, RuntimeError, ImportError) as problem:
        said = str(problem).strip()
        if type(problem).__name__ in ("AcceleratorError", "OutOfMemoryError"):
            raise DeviceError(
                f"The GPU failed: {first_line(problem)}. A run can be resumed from its last checkpoint."
            ) from problem
        words = ("allocate memory", "failed to map segment")
        if not isinstance(problem, MemoryError) and not any(w in said for w in words):
            raise
        asked = re.search(r"allocate (\d+) bytes", said)
        size = f": {int(asked[1]) / 2**20:,.0f} MiB could not be had" if asked else ""
        raise Resumable(
            f"There is too little memory{size}. Make batches or the model smaller, or close other programs."
        ) from problem


def first_line(problem: BaseException) -> str:
    """What an error says first, without the stop at its end; its kind where it says nothing."""
    lines = [line for line in str(problem).splitlines() if line.strip()]
    return plain(lines[0].strip()).rstrip(".:") if lines else type(problem).__name__


def unknown(kind: str, name: str, known: Iterable[str], meant: Sequence[str] = ()) -> PanoplyError:
    """An error for a name that does not exist, with what was probably `meant`, or the nearest ones that do."""
    names = sorted(set(known))
    near = meant or nearest(name, names)
    if near:
        choice = " or ".join(f"'{n}'" for n in near)
        return PanoplyError(f"Unknown {kind} '{name}'. Did you mean {choice}?")
    listing = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return PanoplyError(f"Unknown {kind} '{name}'. There is: {listing or 'nothing yet'}.")


def nearest(name: str, names: Sequence[str], most: int = 3) -> list[str]:
    """What was probably meant: the one name that is spelt alike, or those of which it is a piece.

    A piece is what follows the last dot or stroke, a word between dashes, or a beginning.
    """
    asked = name.lower().lstrip("-")
    spelt = {re.split("[./]", n.lower())[-1]: n for n in names} | {n.lower().lstrip("-"): n for n in names}
    if asked in spelt and asked in (spelt[asked].lower(), spelt[asked].lower().lstrip("-")):
        return [spelt[asked]]
    pieces = [n for n in names if asked in (n.lower().rpartition(".")[2], *re.split(r"[-_.@/]", n.lower()))]
    if 0 < len(pieces) <= most:
        return pieces
    close = difflib.get_close_matches(asked, spelt, n=most, cutoff=0.5 if len(asked) < 4 else 0.6)
    turned = [n for n in spelt if sorted(n) == sorted(asked)]  # letters that changed places
    for word in (*turned, *close):
        if spelt[word].lower().lstrip("-") == word or _alike(asked, word) > 0.7:
            return [spelt[word]]
    begun = [n for n in names if len(asked) > 2 and n.lower().startswith(asked)]
    return begun if len(begun) <= most else []


def _alike(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


def plain(text: object, lines: bool = False) -> str:
    r"""A text as it may be printed: what a terminal would obey is written out, an escape as the letters `\x1b`.

    That is every character Unicode does not call printable: control codes, marks that turn the direction of writing,
    halves of surrogate pairs. With `lines`, line feeds and tabs stay. All that files and models say is printed so.
    """
    words, kept = str(text), "\n\t" if lines else ""
    if words.isprintable():
        return words
    return "".join(c if c.isprintable() or c in kept else _written(c) for c in words)


def _written(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def needs_extra(package: str, extra: str, purpose: str) -> PanoplyError:
    """An error for an optional library that is not installed, with the line that installs it."""
    return PanoplyError(f"{purpose} needs {package}: pip install 'panoply-rl[{extra}]'.")
