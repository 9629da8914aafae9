"""Names of snapshots: other selves of the policy, with the rule by which each is renewed.

| name | who it is |
|---|---|
| `reference` | a frozen copy of the start, or the model named by `--reference` |
| `old` | the policy as it is before the step's first update |
| `behind:10` | the policy as it was after the last 10th, 20th, … step |
| `past:4` | the policy of 4 steps ago; before that, the start |
| `ema:0.05` | a mean of weights: after every step 0.95 of what it was and 0.05 of the policy |
| `best` | the policy at its best held-out score so far |
| `mix:0.25:NAME` | a mixture: logits that are 0.75 of the policy's and 0.25 of NAME's |

A part that needs the column `X@NAME` gets the output X of that self; one that needs `acts@NAME` may let it act
(`collect.acted_by(NAME)`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from panoply.errors import PanoplyError, plain, unknown

if TYPE_CHECKING:
    from panoply.planning import Options

LEARNER = "learner"
"""Who acts where nobody else is named."""
ACTS = "acts@"
NUMBERS = {"behind": (2, "10"), "past": (1, "4"), "ema": (0, "0.05"), "mix": (0, "0.25:reference")}
"""Those with a number: the least it can be (shares are between 0 and 1), and an example."""
KNOWN = ("reference", "old", "best", *(f"{kind}:{example}" for kind, (_, example) in NUMBERS.items()))


@dataclass(frozen=True)
class Self:
    """What the name of a snapshot says: its rule, and the number or the other name in it."""

    name: str
    kind: str
    number: float = 0.0
    other: str = ""
    """Of a mixture: who else."""

    @property
    def copies(self) -> int:
        """How many copies of the weights are kept for it."""
        return {"old": 0, "mix": 0, "past": int(self.number) + 1}.get(self.kind, 1)

    def idle(self, options: Options) -> str:
        """Why this snapshot would never be renewed in a run of this kind; empty where it is."""
        steps, every = options.steps, options.evaluate_every
        if self.kind in ("behind", "past") and self.number >= steps:
            return f"would stay the start for all of {steps} steps"
        if self.kind == "best" and not 0 < every < steps:
            return f"would stay the start, since nothing is evaluated before the end (run.evaluate_every is {every})"
        return ""


def parse(name: str) -> Self:
    """Take a name apart, or say in one sentence why it is none."""
    kind, *words = name.split(":")
    if kind in ("reference", "old", "best"):
        if words:
            raise PanoplyError(f"The snapshot '{plain(name)}' takes no number: write {kind}.")
        return Self(name, kind)
    if kind not in NUMBERS:
        raise unknown("snapshot", name, KNOWN)
    least, example = NUMBERS[kind]
    number, other = _number(words[0] if words else ""), ":".join(words[1:])
    whole = kind in ("behind", "past")
    sound = number == int(number) and number >= least if whole and math.isfinite(number) else 0 < number < 1
    if not sound or bool(other) != (kind == "mix"):
        what = f"a whole number from {least} on" if whole else "a share between 0 and 1"
        and_whom = ", and whom to mix with" if kind == "mix" else ""
        raise PanoplyError(f"The snapshot '{plain(name)}' needs {what}{and_whom}, as in {kind}:{example}.")
    if other.split(":")[0] in ("old", "mix"):
        raise PanoplyError(
            f"The snapshot '{plain(name)}' mixes the policy with itself: name a self of another time."
        )
    if other:
        parse(other)
    return Self(name, kind, number, other)


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


def named(needs: Iterable[str]) -> list[Self]:
    """The snapshots that are named in needs, each once, and those that they are mixed with."""
    found = {name: parse(name) for name in sorted({n.partition("@")[2] for n in needs if "@" in n})}
    for self in list(found.values()):
        if self.other:
            found.setdefault(self.other, parse(self.other))
    return list(found.values())


def actors(needs: Iterable[str]) -> list[str]:
    """Who may act beside the learner."""
    return sorted(n.removeprefix(ACTS) for n in needs if n.startswith(ACTS))


def by_whom(by: str) -> str:
    """Who acts, as an equation says it; empty where it is the learner."""
    return "" if by == LEARNER else f", by {by}"


def acts(by: str) -> frozenset[str]:
    """What a sample part needs whose setting `by` names who acts."""
    return frozenset() if by == LEARNER else frozenset({f"{ACTS}{by}"})
