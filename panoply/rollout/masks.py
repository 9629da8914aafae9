"""Logit masks: which tokens a row may draw next, for grammars, formats and legal moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from panoply.errors import PanoplyError


@dataclass(frozen=True)
class View:
    """The running rows as a mask sees them: row i has `tokens[i, :length[i]]`, its turn began at `start[i]`.

    `row` numbers them as the result will. Rows that are not `live` wait to be dropped; their mask is ignored.
    """

    row: Tensor
    tokens: Tensor
    length: Tensor
    start: Tensor
    live: Tensor


RowMask = Callable[[list[int]], Tensor | Sequence[int] | None]
"""A row's tokens so far to a bool tensor over the vocabulary, a list of allowed ids, or None for all."""
BatchMask = Callable[[View], Tensor | None]
"""All running rows at once to a bool tensor [rows, vocabulary], or None for all."""


def combined(
    view: View, vocabulary: int, batch: BatchMask | None, rows: Mapping[int, RowMask]
) -> Tensor | None:
    """What the call's mask and the requests' masks allow together; None when that is everything."""
    device, whole = view.row.device, None if batch is None else batch(view)
    mask = None if whole is None else whole.to(device) | ~view.live[:, None]
    if rows:
        own = _by_row(view, vocabulary, rows)
        mask = own if mask is None else mask & own
    if mask is not None and not bool(mask.any(-1).all()):
        stuck = view.row[int((~mask.any(-1)).nonzero()[0])]
        raise PanoplyError(f"The mask leaves row {int(stuck)} no token to draw.")
    return mask


def _by_row(view: View, vocabulary: int, masks: Mapping[int, RowMask]) -> Tensor:
    allowed = torch.ones(len(view.row), vocabulary, dtype=torch.bool, device=view.row.device)
    columns = (view.row.tolist(), view.length.tolist(), view.live.tolist(), view.tokens.tolist())
    for slot, (row, length, live, tokens) in enumerate(zip(*columns, strict=True)):
        given = masks[row](tokens[:length]) if live and row in masks else None
        if given is None:
            continue
        listed = torch.as_tensor(given, device=allowed.device)
        if listed.dtype == torch.bool:
            allowed[slot] = listed
        else:
            allowed[slot] = False
            allowed[slot, listed.long()] = True
    return allowed
