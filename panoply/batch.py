"""Batch: what a term sees, columns of some decisions and what the policy says of them. Totals: what terms said."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import hardtanh

from panoply.experience import Experience, Segments, Table
from panoply.parts import Part, Scores

LOG_RATIO_LIMIT = 20.0
"""exp(±20) is the largest ratio formed; beyond it a policy has diverged and the guard will say so."""

Values = tuple[Tensor, Mapping[str, Tensor]]
"""What a term returns: one value per row of its unit, and detached columns to be averaged into metrics.

A boolean column is a gate: true where the term cut or bounded something. Its mean is a metric like any other, and the
record of sampled episodes names it at the decisions on which it acted.
"""


@dataclass(frozen=True)
class Batch:
    experience: Experience
    now: Mapping[str, Tensor]
    """`logp` of each decision under the current weights, with gradient, and what else the terms need."""
    prepared: Mapping[str, Any] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    """Streams known to hold all the decisions, so that nobody has to look (which on a GPU means to wait)."""
    _ratios: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __getitem__(self, column: str) -> Tensor:
        return self.experience[column]

    def __contains__(self, column: str) -> bool:
        return column in self.experience

    def by(self, key: str) -> Segments:
        return self.experience.by(key)

    def of_stream(self, name: str) -> Batch:
        """The decisions of a stream that learn: all that its terms get to see."""
        if name in self.whole:
            return self
        mask = self.experience.stream(name)
        if bool(mask.all()):
            return self
        now = {key: column[mask] for key, column in self.now.items()}
        return Batch(self.experience.take(mask), now, self.prepared)

    def scored(self, scores: Scores) -> Batch:
        """The log-probabilities a term asks for: as they are for `sampled`; for `policy` those of the policy itself.

        The two differ, and the columns `own` and `own@SNAPSHOT` are there, where a temperature or a cut applied.
        """
        apart = [n for n in self.experience.decisions if n.startswith("own@")] if scores == "policy" else []
        if scores != "policy" or (not apart and "own" not in self.now):
            return self
        columns = {f"logp@{name.removeprefix('own@')}": self[name] for name in apart}
        now = {**self.now, "logp": self.now.get("own", self.now["logp"])}
        return Batch(self.experience.with_columns(**columns), now, self.prepared, self.whole)

    @property
    def pairs(self) -> Table:
        assert self.experience.pairs is not None, "this term needs preference pairs"
        return self.experience.pairs

    def log_ratio(self, against: str = "behaviour") -> Tensor:
        """log π_now − log π_against per decision, in float32 at least, clamped to ±20."""
        if against not in self._ratios:
            free = self._free_log_ratio(against)
            self._ratios[against] = hardtanh(
                free, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
            )  # a clamp, one kernel back
        return self._ratios[against]

    def episode_log_ratio(self, against: str) -> Tensor:
        """Σ_t log π_now/π_against, one value per episode, in the order of `by("episode")`."""
        return self.by("episode").sum(self._free_log_ratio(against))

    def _free_log_ratio(self, against: str) -> Tensor:
        then = self["logp" if against == "behaviour" else f"logp@{against}"]
        return _wide(self.now["logp"]) - _wide(then)

    def pair_rows(self, per_episode: Tensor) -> tuple[Tensor, Tensor]:
        """An episode column looked up for the chosen and the rejected side of each pair."""
        keys = self.by("episode").keys
        chosen = torch.searchsorted(keys, self.pairs.tensor("chosen"))
        rejected = torch.searchsorted(keys, self.pairs.tensor("rejected"))
        return per_episode[chosen], per_episode[rejected]

    @property
    def lists(self) -> Table:
        assert self.experience.lists is not None, "this term needs ranked lists"
        return self.experience.lists

    def list_rows(self, per_episode: Tensor, empty: float) -> Tensor:
        """An episode column looked up for every place of each list, [lists, longest], the best first.

        Shorter lists are filled up with `empty`.
        """
        members = self.lists.ragged("episodes")
        found = per_episode[torch.searchsorted(self.by("episode").keys, members.values)]
        return members.padded(found, empty)


def _wide(x: Tensor) -> Tensor:
    """float32, or float64 where it already is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Totals:
    """Metrics summed over micro-batches: means over rows, or maxima where the name ends in `/max`.

    They stay where they were computed until `means`, so that no micro-batch waits for the one before.
    """

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.values: dict[str, list[Tensor]] = defaultdict(list)
        self.sums: list[tuple[list[str], int, Tensor]] = []
        """Names of columns, their length, and the sum of each in one tensor."""
        self.maxima: dict[str, Tensor] = {}
        self._columns: dict[str, Tensor] = {}

    def add(self, term: Part, value: Tensor, stats: Mapping[str, Tensor]) -> None:
        """What a term came to on a micro-batch, and columns it gave."""
        self.values[term.info.name].append(value)
        if self._columns.keys() & stats.keys():
            self._sum()
        self._columns |= stats

    def close(self, loss: Tensor, stats: Mapping[str, Tensor]) -> None:
        """The end of a micro-batch."""
        self.losses.append(loss)
        self._columns |= stats
        self._sum()

    def _sum(self) -> None:
        """Columns of one length and kind are summed in one operation."""
        alike: dict[tuple[int, torch.dtype], dict[str, Tensor]] = defaultdict(dict)
        for name, column in self._columns.items():
            if column.numel() == 0:
                continue
            if name.endswith("/max"):
                name = name.removesuffix("/max")
                most = column.max()
                self.maxima[name] = torch.maximum(self.maxima[name], most) if name in self.maxima else most
            else:
                alike[len(column), column.dtype][name] = column
        for (rows, kind), columns in alike.items():
            wide = torch.float64 if kind.is_floating_point else torch.int64
            total = torch.stack(list(columns.values())).sum(1, dtype=wide)
            self.sums.append((list(columns), rows, total))
        self._columns = {}

    def said(self) -> dict[str, Any]:
        """As plain numbers, to be told elsewhere."""
        return {
            "losses": list(map(float, self.losses)),
            "values": {name: list(map(float, parts)) for name, parts in self.values.items()},
            "sums": [(names, rows, totals.tolist()) for names, rows, totals in self.sums],
            "maxima": {name: float(value) for name, value in self.maxima.items()},
        }

    def hear(self, said: Mapping[str, Any]) -> None:
        """Add what was said elsewhere of other micro-batches."""

        def number(value: Any) -> Tensor:
            return torch.tensor(value, dtype=torch.float64)

        self.losses += map(number, said["losses"])
        for name, parts in said["values"].items():
            self.values[name] += map(number, parts)
        self.sums += [(names, rows, number(totals)) for names, rows, totals in said["sums"]]
        for name, value in said["maxima"].items():
            most = number(value)
            self.maxima[name] = torch.maximum(self.maxima[name], most) if name in self.maxima else most

    def means(self) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        for names, rows, totals in self.sums:
            for name, total in zip(names, totals.tolist(), strict=True):
                sums[name] += total
                counts[name] += rows
        means = {name: total / counts[name] for name, total in sums.items()}
        added = {name: sum(map(float, parts)) for name, parts in self.values.items()}
        maxima = {name: float(value) for name, value in self.maxima.items()}
        return {"loss": sum(map(float, self.losses)), **added, **maxima, **means}
