"""What a game of several seats gives one that learns from data."""

from __future__ import annotations

from typing import Any

from panoply.experience import Experience
from panoply.parts import part


@part(
    "data",
    equation="what the game gives this seat",
    needs={"world:game"},
    gives={"dealt"},
    cost=lambda held, of: (0, 0),
)
def dealt(collect: Any) -> Experience:
    """The rows that this step's `game` has for this seat (see `Several`)."""
    rows: Experience = collect.dealt
    return rows
