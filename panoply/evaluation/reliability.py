"""Whether a reward model means what it says: σ(margin) against how often it is right, its margins, and for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

BINS = 10
"""Of confidence, between a half and one."""
BARS = 24
"""Of margins, an even number: none lies across 0."""
MOST = 20
"""Groups that are told apart; of more, those with the most pairs."""


def reliability(
    margins: Sequence[float], p: Sequence[float], groups: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """What is known of a reward model from its margins r_chosen − r_rejected on held-out pairs, as JSON has it.

    p       how likely the first of each pair is preferred; 1 where that is certain
    groups  for each way to tell pairs apart (annotator, domain, level), the name of each pair's group

    A margin m says that one of the two is preferred with probability σ(|m|). `calibration` has for each tenth of such
    confidences from ½ to 1 what was said on average, how often it was so, and of how many pairs; `error` is the mean
    difference of the two, weighted by pairs (expected calibration error, arXiv 1706.04599). Which answer stands first
    does not matter, and a margin of 0 is right half of the time.
    """
    margin, sure = np.asarray(margins, dtype=float), np.asarray(p, dtype=float)
    said = 1 / (1 + np.exp(-np.abs(margin)))
    right = np.where(margin > 0, sure, np.where(margin < 0, 1 - sure, 0.5))
    place = np.minimum(((said - 0.5) * 2 * BINS).astype(int), BINS - 1)
    calibration = [
        {"said": float(said[at].mean()), "right": float(right[at].mean()), "pairs": int(at.sum())}
        for at in (place == i for i in range(BINS))
        if at.any()
    ]
    error = sum(b["pairs"] * abs(b["said"] - b["right"]) for b in calibration) / max(1, len(margin))
    widest = float(np.abs(margin).max(initial=0.0)) or 1.0
    counts, _ = np.histogram(margin, BARS, (-widest, widest))
    by = {name: _by(np.asarray(keys), right) for name, keys in groups.items() if len(set(keys)) > 1}
    return {
        "pairs": len(margin),
        "error": float(error),
        "calibration": calibration,
        "margins": {"widest": widest, "counts": counts.tolist(), "mean": float(margin.mean())},
        "groups": by,
    }


def _by(keys: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> dict[str, dict[str, float]]:
    """Accuracy of each group, by name; of too many those with the most pairs."""
    names, counts = np.unique(keys, return_counts=True)
    kept = sorted(names[np.argsort(-counts, kind="stable")[:MOST]].tolist(), key=_natural)
    return {
        str(name): {"accuracy": float(right[keys == name].mean()), "pairs": int((keys == name).sum())}
        for name in kept
    }


def _natural(name: str) -> tuple[bool, float, str]:
    """Numbers by their size, before words."""
    number = name.removeprefix("-")
    return (not number.isdecimal(), float(name) if number.isdecimal() else 0.0, name)
