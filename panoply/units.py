"""What a decision belongs to (keys, units) and where it comes from (sources, streams): names only, without torch."""

from __future__ import annotations

import math
from typing import Literal, get_args

OWN, TEACHER, DEMONSTRATION, REPLAY, SYNTHETIC = range(5)
"""Values of the `source` column."""
OPEN, TERMINATED, TRUNCATED = range(3)
"""Values of the `end` column."""
STREAMS: dict[str, tuple[int, ...]] = {
    "own": (OWN, REPLAY),
    "imitation": (TEACHER, DEMONSTRATION),
    "synthetic": (SYNTHETIC,),
    "joint": (OWN, REPLAY, TEACHER),
}
"""The sources of each stream. A term is a mean over the rows of its stream alone: rows of other streams in the same
batch do not change what it is divided by. `joint` takes own and teacher's rows as one stream, for methods that put a
teacher's answer into a group of the policy's own."""

KeyUnit = Literal["turn", "segment", "episode", "parent", "step", "game", "group", "task", "domain", "agent"]
"""Keys that say which decisions belong together. A term may have one value for each turn, each episode, …"""
KEY_UNITS: tuple[KeyUnit, ...] = get_args(KeyUnit)
Unit = Literal["decision", KeyUnit, "pair", "list", "batch", "transition"]
KEYS = {*KEY_UNITS, "state", "context", "next", "source", "train"}
"""Columns that segments, streams and look-ups depend on: who replaces one of them starts these anew."""
ALTERING = {
    "temperature": 1.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "within": 0.0,
    "allowed": 0.0, "cut": -math.inf, "kept": 1.0,
}  # fmt: skip
"""How the distribution drawn from differs from the policy's own, by columns, and what they hold where it does not."""
COMMON_KEYS: tuple[KeyUnit, ...] = ("turn", "episode", "group", "task")
"""Keys that all decisions have. Others exist only where a world or a part gives them."""
INSIDE: dict[str, tuple[str, ...]] = {
    "turn": ("episode",),
    "segment": ("episode",),
    "step": ("game", "episode"),
}
"""Keys that count from 0 inside something larger, and inside what: the first of these that the decisions have."""


def plural(unit: str) -> str:
    """The name of a unit in the plural."""
    return "batches" if unit == "batch" else f"{unit}s"
