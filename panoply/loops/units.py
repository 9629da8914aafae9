"""What of a mini-batch must stay together, what it costs, and how it is dealt out to micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from panoply.experience import Experience, Segments, Table
from panoply.parts import Part


def unit_labels(rows: Experience, terms: Sequence[Part]) -> Tensor:
    """A label per decision, 0…n−1, of what must stay together: the largest that a term has to see whole.

    At least a context row, since cutting one only repeats work; episodes joined by a pair stay together too.
    """
    units = {t.info.unit for t in terms} | {t.info.whole for t in terms}
    if units == {"decision"} and "tokens" not in rows.context:
        return torch.arange(len(rows), device=rows["action"].device)
    keys = ["context"]
    if units & {"episode", "turn", "pair", "group"}:
        keys.append("group" if "group" in units else "episode")
    pairs = rows.pairs if "pair" in units else None
    label = rows.by(keys[-1]).index
    while True:
        joined = label
        for key in keys:
            joined = rows.by(key).rows(rows.by(key).min(joined))
        joined = joined if pairs is None else _join_pairs(rows, pairs, joined)
        if torch.equal(joined, label):
            return Segments(label).index
        label = joined


def _join_pairs(rows: Experience, pairs: Table, label: Tensor) -> Tensor:
    """Give the two episodes of every pair the smaller of their labels."""
    episodes = rows.by("episode")
    per_episode = episodes.min(label)
    chosen = torch.searchsorted(episodes.keys, pairs.tensor("chosen"))
    rejected = torch.searchsorted(episodes.keys, pairs.tensor("rejected"))
    low = torch.minimum(per_episode[chosen], per_episode[rejected])
    joined = per_episode.scatter_reduce(0, chosen, low, "amin").scatter_reduce(0, rejected, low, "amin")
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
