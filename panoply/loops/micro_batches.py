"""How a mini-batch is split: what of it must stay together, what that costs, and how it is dealt out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from panoply.experience import KEY_UNITS, Experience, Segments, Table
from panoply.parts import Part
from panoply.tables import in_order, picked


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
    if len(keys) == 1 and not compared:
        return label
    while True:
        joined = label
        for key in keys:
            joined = rows.by(key).rows(rows.by(key).min(joined))
        for pairs in compared:
            joined = _join(rows, pairs, joined)
        if torch.equal(joined, label):
            return Segments(label).index
        label = joined


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


def split(rows: Experience, terms: Sequence[Part], limit: int) -> Iterator[Experience]:
    """Whole units, in order, up to `limit` context tokens at a time; one unit may exceed it."""
    if tokens(rows) <= limit:
        yield rows
        return
    label = unit_labels(rows, terms)
    bins = picked(torch.tensor(fill(unit_tokens(rows, label).tolist(), limit), device=label.device), label)
    order = torch.arange(len(bins), device=bins.device) if in_order(bins) else bins.argsort(stable=True)
    yield from map(rows.take, order.split(bins.bincount().tolist()))  # type: ignore[no-untyped-call]
