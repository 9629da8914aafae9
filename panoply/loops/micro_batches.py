"""What of a mini-batch must stay together, what it costs, how it is dealt out to micro-batches, and how they add up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from panoply.experience import KEY_UNITS, Experience, Segments, Table, Unit
from panoply.parts import Part


def unit_labels(rows: Experience, terms: Sequence[Part]) -> Tensor:
    """A label per decision, 0…n−1, of what must stay together: all that some term has to see whole.

    At least a context row, since cutting one only repeats work. Episodes joined by a pair or a list stay together too.
    """
    units: set[str] = {unit for term in terms for unit in term.units}
    each = torch.arange(len(rows), device=rows["action"].device)
    if units == {"decision"} and "tokens" not in rows.context:
        return each
    if "batch" in units:
        return torch.zeros_like(each)
    tables = {"pair": rows.pairs, "list": rows.lists}
    compared = [_neighbours(table) for unit, table in tables.items() if unit in units and table is not None]
    whole = units | ({"episode"} if units & tables.keys() else set())
    keys = ["context", *(key for key in KEY_UNITS if key in whole)]
    label = rows.by(keys[-1]).index
    while True:
        joined = label
        for key in keys:
            joined = rows.by(key).rows(rows.by(key).min(joined))
        for pairs in compared:
            joined = _join(rows, pairs, joined)
        if torch.equal(joined, label):
            return Segments(label).index
        label = joined


def count_units(experience: Experience, unit: Unit) -> int:
    """How many units there are."""
    if unit == "decision":
        return len(experience)
    if unit in ("pair", "list"):
        compared = experience.pairs if unit == "pair" else experience.lists
        return compared.rows if compared is not None else 0
    return min(1, len(experience)) if unit == "batch" else len(experience.by(unit))


def _neighbours(compared: Table) -> tuple[Tensor, Tensor]:
    """Two columns of episodes that belong together: of pairs both sides, of lists each member and the next."""
    if "episodes" not in compared:
        return compared.tensor("chosen"), compared.tensor("rejected")
    members = compared.ragged("episodes")
    row = torch.arange(len(members), device=members.values.device).repeat_interleave(members.lengths)
    same = row[1:] == row[:-1]
    return members.values[:-1][same], members.values[1:][same]


def _join(rows: Experience, pairs: tuple[Tensor, Tensor], label: Tensor) -> Tensor:
    """Give the two episodes of every pair the smaller of their labels."""
    episodes = rows.by("episode")
    per_episode = episodes.min(label)
    one, other = (torch.searchsorted(episodes.keys, side) for side in pairs)
    low = torch.minimum(per_episode[one], per_episode[other])
    joined = per_episode.scatter_reduce(0, one, low, "amin").scatter_reduce(0, other, low, "amin")
    return episodes.rows(joined)


def fresh_tokens(context: Table) -> Tensor:
    """What each context adds to a forward pass: a prefix that others share counts once, with the first of them."""
    tokens = context.ragged("tokens").lengths
    if "prompt" not in context or "shared" not in context:
        return tokens
    first = Segments(context.tensor("prompt")).first(torch.arange(len(tokens), device=tokens.device))
    fresh = (tokens - context.tensor("shared")).clamp(min=0)
    return fresh.index_copy(0, first, tokens[first])


def tokens(rows: Experience) -> int:
    """What all contexts add to a forward pass; where they are observations, one a decision."""
    if "tokens" not in rows.context:
        return len(rows)
    return int(fresh_tokens(rows.context).sum())


def unit_tokens(rows: Experience, label: Tensor) -> Tensor:
    """What each unit, by the labels of its decisions, adds to a forward pass."""
    if "tokens" not in rows.context:
        return label.bincount()
    sequences, fresh = rows.by("context"), fresh_tokens(rows.context)
    cost = torch.zeros(int(label.max()) + 1, dtype=torch.long, device=label.device)
    return cost.index_add(0, sequences.first(label), fresh[sequences.keys])


def fill(costs: Sequence[int], limit: int) -> list[int]:
    """First-come bins of like size: the bin of each item, a new one whenever the limit would be passed."""
    total = sum(costs)
    even = -(-total // -(-total // limit))
    limit = min(limit, even + max(costs) - 1)
    bins, current, used = [], 0, 0
    for cost in costs:
        if used and used + cost > limit:
            current, used = current + 1, 0
        bins.append(current)
        used += cost
    return bins


# ------------------------------------------------------------------ what they give, summed


def mean_metrics(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the steps that have it."""
    names = dict.fromkeys(name for metrics in found for name in metrics)
    having = {name: [m[name] for m in found if name in m] for name in names}
    return {name: sum(values) / len(values) for name, values in having.items()}


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
