"""Rules that end a run, or the rounds of a recipe, early: `success>0.9`, `kl>0.1`, `return>=-200`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from panoply.errors import PanoplyError, unknown

_RULE = re.compile(
    r"\s*(?P<name>[A-Za-z_][\w@.:]*)\s*(?P<sign>[<>]=?)\s*(?P<mark>[-+]?[\d.]+(?:e[-+]?\d+)?)\s*"
)


@dataclass(frozen=True)
class Until:
    """A number that is measured, and the mark at which it is enough."""

    name: str
    sign: str
    mark: float

    @classmethod
    def parse(cls, word: str) -> Until:
        found = _RULE.fullmatch(word)
        try:
            assert found is not None
            return cls(found["name"].removeprefix("held_out_"), found["sign"], float(found["mark"]))
        except (AssertionError, ValueError):
            raise PanoplyError(
                f"until is a rule such as success>0.9 or loss<0.1, not '{word[:60]}'."
            ) from None

    def met(self, measured: Mapping[str, Any], logged: Mapping[str, Any]) -> bool:
        """Whether the mark is reached by the last evaluation on held-out problems, or by what the last step logged.

        A name that both have is the evaluation's. Before the first step nothing is logged, and no such rule is met.
        """
        known = {name: v for name, v in {**logged, **rates(measured)}.items() if isinstance(v, int | float)}
        if self.name not in known:
            if logged and self.name not in logged:
                raise unknown("metric of the rule until", self.name, known)
            return False
        found = known[self.name]
        ahead = found > self.mark if ">" in self.sign else found < self.mark
        return ahead or ("=" in self.sign and found == self.mark)


def rates(measured: Mapping[str, Any]) -> dict[str, Any]:
    """What an evaluation measured, by name; what a run is judged by (`success`) is the last that has an interval."""
    judged = [value for name, value in measured.items() if f"{name}_interval" in measured]
    return {**measured, **({str(measured["of"]): judged[-1]} if judged and "of" in measured else {})}
