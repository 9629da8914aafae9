"""Rows that several have played, as one process would have written them: columns, contexts and prompts in its order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from panoply.experience import Column, Experience, Ragged, Table, distinct
from panoply.scale.sampler import FAILED
from panoply.units import ALTERING


def together(parts: Sequence[Experience]) -> Experience:
    """One after another. A column that only some have is what it stands for where it is absent.

    Signals that were not earned are 0, a temperature that nobody raised is 1; prompts are told apart by share, so that
    their numbers have to be given anew.
    """
    if len(parts) == 1:
        return parts[0]
    kinds: dict[str, Column] = {}
    for part in parts:
        kinds = {**{name: part.decisions[name] for name in part.decisions}, **kinds}
    return Experience.cat([_filled(part, kinds) for part in parts])


def _filled(part: Experience, kinds: dict[str, Column]) -> Experience:
    absent: dict[str, Column] = {}
    for name, kind in kinds.items():
        if name in part:
            continue
        if isinstance(kind, Ragged):
            absent[name] = Ragged(kind.values[:0], torch.zeros(len(part) + 1, dtype=torch.long))
            continue
        if name not in ALTERING and name != FAILED and not name.startswith("signal:"):
            raise ValueError(f"column '{name}' came from some samplers and not from others")
        absent[name] = torch.full((len(part),), ALTERING.get(name, 0), dtype=kind.dtype)
    return part.with_columns(**absent) if absent else part


def in_order(found: Experience, markov: bool) -> Experience:
    """Contexts and prompts as a collector of one process has them.

    There, prompts are numbered as they first occur, and episodes with the same prompt lie beside one another; in a
    world whose turns have prompts of their own, contexts lie turn after turn.
    """
    context = found["context"]
    rows = found.context.rows
    of, turn = (
        torch.zeros(rows, dtype=torch.long).index_copy(0, context, found[n]) for n in ("episode", "turn")
    )
    order = of.argsort(stable=True)
    if markov:
        order = order[turn[order].argsort(stable=True)]
    prompt = numbered_prompts(found.context, order)
    if not markov:
        order = order[prompt[order].argsort(stable=True)]
    place = torch.empty_like(order).index_copy(0, order, torch.arange(rows))
    return Experience(
        found.decisions.plus({"context": place[context]}), found.context.plus({"prompt": prompt}).take(order)
    )


def numbered_prompts(context: Table, order: Tensor) -> Tensor:
    """Equal prompts have one number, in the order in which they first occur among rows taken in this `order`."""
    tokens, shared, given = context.ragged("tokens"), context.tensor("shared"), context.tensor("prompt")
    numbers, index = distinct(given)
    one = torch.empty(len(numbers), dtype=torch.long).index_copy(0, index, torch.arange(len(index)))
    known: dict[tuple[int, ...], int] = {}
    same = [
        known.setdefault(tuple(tokens[int(r)][: int(shared[r])].tolist()), len(known)) for r in one.tolist()
    ]
    key = torch.tensor(same)[index]
    place = torch.empty_like(order).index_copy(0, order, torch.arange(len(order)))
    first = torch.full((len(known),), len(order)).scatter_reduce(0, key, place, "amin")
    rank = torch.empty_like(first).index_copy(0, first.argsort(), torch.arange(len(first)))
    return rank[key]
