"""How alike the results of two queries are: as a whole, and cell by cell (QATCH, arXiv 2305.12543).

A result is rows of cells. Order counts for nothing, since no query here asks for one; how often a row comes does. Cells
are compared as a set of values, wherever they stand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

Rows = Sequence[Sequence[Any]]


def same(found: Rows, wanted: Rows) -> float:
    """Execution accuracy: 1 where the same rows come equally often."""
    return float(Counter(map(tuple, found)) == Counter(map(tuple, wanted)))


def precision(found: Rows, wanted: Rows) -> float:
    """The share of its values that the wanted result has anywhere; a query that selects everything has little of it."""
    return _share_within(found, wanted)


def recall(found: Rows, wanted: Rows) -> float:
    """The share of wanted values that it has anywhere."""
    return _share_within(wanted, found)


def cardinality(found: Rows, wanted: Rows) -> float:
    """The number of rows of the shorter result over that of the longer; 1 where neither has any."""
    least, most = sorted((len(found), len(wanted)))
    return least / most if most else 1.0


def graded(found: Rows, wanted: Rows) -> float:
    """The mean of the three: 1 for the same result, and something for one that is nearly so."""
    return (precision(found, wanted) + recall(found, wanted) + cardinality(found, wanted)) / 3


def _share_within(cells: Rows, others: Rows) -> float:
    """The share of different values that are among others; of none it is 1 if there are no others, and else 0."""
    mine, there = set(chain.from_iterable(cells)), set(chain.from_iterable(others))
    return len(mine & there) / len(mine) if mine else float(not there)
