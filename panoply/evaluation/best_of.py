"""One answer out of many: by majority, by what a judge accepts, and how good such a judge is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from panoply.errors import PanoplyError

A = TypeVar("A", bound=Hashable)


@dataclass(frozen=True)
class ProcessF1:
    """How well a judge finds the first wrong step (ProcessBench, arXiv 2412.06559).

    A judge that finds everything right has `sound` 1 and `erroneous` 0, so that f1, their harmonic mean, is 0.
    """

    erroneous: float
    """Of solutions with a fault, the share whose first wrong step it names."""
    sound: float
    """Of solutions without one, the share it accepts."""

    @property
    def f1(self) -> float:
        total = self.erroneous + self.sound
        return 2 * self.erroneous * self.sound / total if total else 0.0


def process_f1(first: Sequence[int], said: Sequence[int | None]) -> ProcessF1:
    """By the number of the first wrong step, 0 where none is, and by what a judge says; None is never right."""
    met: dict[bool, list[bool]] = {True: [], False: []}
    for truth, word in zip(first, said, strict=True):
        met[truth == 0].append(word == truth)
    if not (met[True] and met[False]):
        raise PanoplyError("F1 of first wrong steps needs solutions with a fault and some without.")
    return ProcessF1(*(sum(met[sound]) / len(met[sound]) for sound in (False, True)))


def majority(answers: Sequence[A], weights: Sequence[float] | None = None) -> A:
    """The answer with the most votes, the first of those that are level. Votes that are all 0 count as all alike.

    With `weights` 1 for answers that a judge accepts and 0 for others it is the majority among those accepted, and
    where none is, the plain one; with sums of a judge's votes it is the score variant.
    """
    if not answers:
        raise PanoplyError("There is no answer to choose from.")
    held = weights if weights is not None and any(weights) else [1.0] * len(answers)
    votes: dict[A, float] = {}
    for answer, weight in zip(answers, held, strict=True):
        votes[answer] = votes.get(answer, 0.0) + weight
    most = max(votes.values())
    return next(answer for answer in answers if votes[answer] == most)


def best(answers: Sequence[A], scores: Sequence[float]) -> A:
    """The answer with the highest score, the first of those that are level: best of N by a reward model."""
    if not answers:
        raise PanoplyError("There is no answer to choose from.")
    return answers[max(range(len(answers)), key=lambda at: (scores[at], -at))]


@dataclass(frozen=True)
class Acceptance:
    """What a judge accepts, of answers of which it is known whether they are right."""

    precision: float
    """Right ones among those accepted; NaN where none is."""
    recall: float
    """Accepted ones among those that are right; NaN where none is."""
    accepted: int


def acceptance(right: Sequence[bool], accepted: Sequence[bool]) -> Acceptance:
    both = sum(r and a for r, a in zip(right, accepted, strict=True))
    taken, good = sum(accepted), sum(right)
    return Acceptance(both / taken if taken else math.nan, both / good if good else math.nan, taken)


def acceptance_by(
    level: Sequence[int], right: Sequence[bool], accepted: Sequence[bool]
) -> Mapping[int, Acceptance]:
    """The same for every difficulty by itself."""
    found = {}
    for here in sorted(Counter(level)):
        rows = [at for at, of in enumerate(level) if of == here]
        found[here] = acceptance([right[at] for at in rows], [accepted[at] for at in rows])
    return found


@dataclass(frozen=True)
class Association:
    """Whether two things go together, from how often each of four cases was seen."""

    odds_ratio: float
    """With half a case added to each, so that none is empty; 1 where they do not go together."""
    chi_squared: float
    """With one degree of freedom: above 3.84, chance does it in less than one case of twenty."""


def association(one: Sequence[bool], other: Sequence[bool]) -> Association:
    seen = Counter(zip(one, other, strict=True))
    a, b, c, d = (seen[case] for case in ((True, True), (True, False), (False, True), (False, False)))
    odds = (a + 0.5) * (d + 0.5) / ((b + 0.5) * (c + 0.5))
    margins = (a + b) * (c + d) * (a + c) * (b + d)
    return Association(odds, (a + b + c + d) * (a * d - b * c) ** 2 / margins if margins else 0.0)
