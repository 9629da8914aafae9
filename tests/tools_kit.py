"""Tools for tests, as a user writes them, and rewards that grade answers given with them."""

from __future__ import annotations

import os
import time
from typing import Any, Literal


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second one, which may
            be negative.

    Returns:
        Their sum.
    """
    return a + b


def look(place: Literal["left", "right"], times: list[int] | None = None, far: float = 1.0) -> dict[str, Any]:
    """Look somewhere.

    Args:
        place: Where.
        times: When.
    """
    return {"place": place, "times": times, "far": far}


def wait(how: str) -> str:
    """Do something bad.

    Args:
        how: What.
    """
    if how == "die":
        os._exit(1)
    if how == "raise":
        raise ValueError("as asked")
    time.sleep(60)
    return "never"


def untyped(a):  # type: ignore[no-untyped-def]
    """No types."""


def graded(completions: list[Any], answer: list[Any], **_: Any) -> list[float]:
    return [float(str(a) in talk[-1].get("content", "")) for talk, a in zip(completions, answer, strict=True)]
