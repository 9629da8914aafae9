"""What a world measures of a policy, by name: anything that a claim may be about.

    @world("maze@1")
    @dataclass(frozen=True)
    class Maze(ControlWorld):
        @measures("rooms")
        def rooms_seen(self, policy: ControlPolicy, seed: int) -> float: ...

`world.measure("rooms", policy, seed=0)` asks for it, and `panoply compare --metric world:rooms`, or a claim with that
metric, judges runs by it. What is measured in every world of a kind (`success`, `pass@K`, `return`) its kind says
(`MEASURES` in kinds/text.py and kinds/control.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from panoply.errors import PanoplyError, unknown

Measure = Callable[..., float]
"""`(policy, seed)`, and `(policy, seed, k)` of one whose name ends in `@K`."""
F = TypeVar("F", bound=Callable[..., float])


def measures(name: str) -> Callable[[F], F]:
    """Mark a world's method as what it measures under a name; one that is called `NAME@K` gets the number K too."""

    def mark(method: F) -> F:
        method.measures = name  # type: ignore[attr-defined]
        return method

    return mark


class Measuring:
    """Worlds that can be asked by name how good a policy is."""

    name: Any

    def measures(self) -> dict[str, Measure]:
        """What can be measured here, the world's own and what its kind measures everywhere."""
        from panoply.kinds import kind_of

        held = (getattr(type(self), attribute, None) for attribute in dir(type(self)))
        own = {
            f.measures: f.__get__(self)
            for f in held
            if callable(f) and isinstance(getattr(f, "measures", None), str)
        }
        everywhere = {name: _of(self, measure) for name, measure in kind_of(self).MEASURES.items()}
        return {**everywhere, **own}

    def measure(self, name: str, policy: Any, seed: int = 0) -> float:
        """One number of a policy: `world.measure("pass@8", policy)`. The same policy and seed give the same number."""
        measure, more = self.find_measure(name)
        found = float(measure(policy, seed, *more))
        if not math.isfinite(found):
            raise PanoplyError(f"{self.name} measures {name} as {found}, which is no number to compare.")
        return found

    def find_measure(self, name: str) -> tuple[Measure, tuple[int, ...]]:
        """What measures under a name, and the K of `NAME@K`."""
        known = self.measures()
        word, _, k = name.partition("@")
        if k.isdigit() and int(k) > 0 and f"{word}@K" in known:
            return known[f"{word}@K"], (int(k),)
        if name not in known or name.endswith("@K"):
            raise unknown(f"measure of {self.name}", name, known)
        return known[name], ()


def _of(world: Any, measure: Measure) -> Measure:
    return lambda *given: measure(world, *given)
