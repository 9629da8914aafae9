"""What the worlds of masses and forces share: constants that may vary, pushes, delays, chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from panoply.worlds.control import wrappers
from panoply.worlds.control.simulated import Dynamics, Simulated


@dataclass(frozen=True, kw_only=True)
class Physical(Simulated):
    """A simulated body. The settings below put wrappers around it, in this order."""

    vary: float = 0.0
    """Each episode draws every constant of the body within this share of its value."""
    reveal: bool = False
    """Whether the constants drawn are part of the observation."""
    adversary: float = 0.0
    """The strongest push of an adversary, in the unit of the world's own force."""
    opponent: Literal["random", "learner"] = "random"
    """Who pushes: chance, or a second player, whose action is then the last number of each action."""
    delay: int = 0
    """Steps by which actions take effect late; the ones under way are part of the observation."""
    late: int = 0
    """Steps by which observations are old."""
    chunk: int = 1
    """Actions that are chosen at once and taken one after the other, unseen."""

    bounds: ClassVar[Mapping[str, str]] = {
        "vary": "from 0 up to 1",
        "adversary": "at least 0",
        "delay": "from 0 to 1000",
        "late": "from 0 to 1000",
        "chunk": "from 1 to 1000",
    }

    access = Simulated.access | {"params"}
    pushes: ClassVar[int] = 1
    """Numbers in a push."""

    @property
    def dynamics(self) -> Dynamics:
        body: Dynamics = self
        if self.vary:
            nominal = {name: getattr(self, name) for name in self.constants}
            body = wrappers.Vary(body, nominal, self.vary, self.reveal)
        if self.adversary:
            body = wrappers.Adversary(body, self.adversary, self.pushes, self.opponent == "learner")
        if self.delay:
            body = wrappers.Delay(body, self.delay)
        if self.late:
            body = wrappers.Late(body, self.late)
        if self.chunk > 1:
            body = wrappers.Chunk(body, self.chunk)
        return body
