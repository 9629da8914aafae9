"""Ranges: which numbers a setting may be, in words that a message and a page can show as they are.

    above 0          greater than 0
    at least 1       1 or more
    from 0 to 1      both ends included
    from 0 up to 1   1 itself excluded
    above 0 to 1     0 itself excluded
    any number       said on purpose: a sign or a size would make no difference

Whatever the range, a setting is finite and not absurd: a whole number is at most a billion, so that a slip of the hand
is refused before memory is asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from panoply.errors import PanoplyError

ANY = "any number"
SEED = "any whole number"
"""Of seeds, which may be as large as 64 bits."""
MOST_WHOLE = 10**9
MOST = 1e12
MOST_THREADS = 1024

_NUMBER = r"-?\d+(?:\.\d+)?"
_FORMS = (
    re.compile(rf"(above|at least) ({_NUMBER})"),
    re.compile(rf"(from) ({_NUMBER}) (to|up to) ({_NUMBER})"),
    re.compile(rf"(above) ({_NUMBER}) (to) ({_NUMBER})"),
)


def check_range(where: str, value: Any, bound: str = ANY) -> None:
    """Refuse a number that is out of its range, and one in a list; what is no number has none."""
    if isinstance(value, tuple | list):
        for one in value:
            check_range(where, one, bound)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not within(value, bound):
        raise PanoplyError(f"{where} must be {bound}, not {shown(value)}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise PanoplyError(f"{where} must be a finite number, not {shown(value)}.")
    most = 2**63 if bound == SEED else MOST_WHOLE if isinstance(value, int) else MOST
    if abs(value) > most:
        raise PanoplyError(f"{where} must be at most {most:,.0f}, not {shown(value)}.")


def within(value: float, bound: str) -> bool:
    """Whether a number lies in a range."""
    if bound in (ANY, SEED):
        return True
    found = next((m for form in _FORMS if (m := form.fullmatch(bound))), None)
    if found is None:
        raise PanoplyError(
            f"'{bound}' is no range: write one such as 'above 0', 'at least 1' or 'from 0 to 1'."
        )
    low = float(found[2])
    enough = value > low if found[1] == "above" else value >= low
    if found.re is _FORMS[0]:
        return enough
    return enough and (value <= float(found[4]) if found[3] == "to" else value < float(found[4]))


def shown(value: float) -> str:
    """A number in a sentence, however large it is."""
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else f"a number of {value.bit_length()} bits"
    return f"{value:g}"


def merged(cls: type) -> dict[str, str]:
    """The ranges a class declares as `bounds`, with those of its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        declared: Mapping[str, str] = vars(base).get("bounds", {})
        found |= declared
    return found
