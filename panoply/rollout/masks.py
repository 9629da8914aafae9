"""Logit masks: which tokens a row may draw next, for grammars, formats and legal moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.worlds.world import Play


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
    vocabulary: int


Allowed = Tensor | Sequence[int] | None
"""A bool tensor over the vocabulary, a list of allowed ids, or None for all."""
RowMask = Callable[[list[int]], Allowed]
"""A row's tokens so far to what may come next."""
BatchMask = Callable[[View], Tensor | None]
"""All running rows at once to a bool tensor [rows, vocabulary], or None for all."""


def combined(view: View, batch: BatchMask | None, rows: Mapping[int, RowMask]) -> Tensor | None:
    """What the call's mask and the requests' masks allow together; None when that is everything."""
    device, whole = view.row.device, None if batch is None else batch(view)
    if whole is not None and not (isinstance(whole, Tensor) and whole.dtype == torch.bool):
        given = f"one of {whole.dtype}" if isinstance(whole, Tensor) else f"a {type(whole).__name__}"
        raise PanoplyError(f"A mask of all rows is a bool tensor, not {given}.")
    if whole is not None and whole.shape != (shape := (len(view.row), view.vocabulary)):
        raise PanoplyError(f"A mask of {shape} was asked for, and {tuple(whole.shape)} given.")
    mask = None if whole is None else whole.to(device) | ~view.live[:, None]
    if rows:
        own = by_row(view, lambda row, tokens, _: rows[row](tokens) if row in rows else None)
        mask = own if mask is None else mask & own
    return None if mask is None else checked(view, mask, "The mask leaves", "allow a token that ends it")


def checked(view: View, mask: Tensor, what: str, mend: str) -> Tensor:
    """A mask that leaves every row something to draw; `what` says who does not, and what to do is said, too."""
    if not bool(mask.any(-1).all()):
        stuck = int((~mask.any(-1)).nonzero()[0])
        after = int(view.length[stuck] - view.start[stuck])
        raise PanoplyError(
            f"{what} row {int(view.row[stuck])} no token to draw after {after} of its turn: {mend}."
        )
    return mask


def by_row(view: View, ask: Callable[[int, list[int], int], Allowed]) -> Tensor:
    """What each row may draw, asked one after another: `ask` gets its number, its tokens, and where its turn began."""
    free: list[int] = []
    slots: list[int] = []
    ids: list[int] = []
    whole: dict[int, Tensor] = {}
    columns = (view.row, view.length, view.start, view.live, view.tokens)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for slot, (row, length, start, live, tokens) in enumerate(rows):
        given = ask(row, tokens[:length], start) if live else None
        if given is None:
            free.append(slot)
        elif isinstance(given, Tensor) and given.dtype == torch.bool:
            if given.shape != (view.vocabulary,):
                raise PanoplyError(
                    f"The mask of row {row} marks {tuple(given.shape)} tokens, and the vocabulary has "
                    f"{view.vocabulary}."
                )
            whole[slot] = given
        else:
            listed = _ids(row, given, view.vocabulary)
            if bad := [i for i in listed if not 0 <= i < view.vocabulary]:
                raise PanoplyError(
                    f"The mask of row {row} allows token {bad[0]}, and the vocabulary has {view.vocabulary}."
                )
            slots += [slot] * len(listed)
            ids += listed
    device = view.row.device
    allowed = torch.zeros(len(view.row), view.vocabulary, dtype=torch.bool, device=device)
    allowed[torch.tensor(free, dtype=torch.long, device=device)] = True
    at = torch.tensor([slots, ids], dtype=torch.long, device=device)
    allowed[at[0], at[1]] = True
    for slot, marks in whole.items():
        allowed[slot] = marks.to(device)
    return allowed


def _ids(row: int, given: Sequence[int] | Tensor, vocabulary: int) -> list[int]:
    """The ids that a row's mask lists. Marks that are no bool tensor would be taken for the ids 0 and 1."""
    listed = given.tolist() if isinstance(given, Tensor) else given
    ids = list(listed) if isinstance(listed, Iterable) else [None]
    kinds = set(map(type, ids))
    whole = bool not in kinds and all(issubclass(kind, Integral) for kind in kinds)
    if not whole or (len(ids) == vocabulary > 2 and set(ids) <= {0, 1}):
        raise PanoplyError(
            f"The mask of row {row} is neither ids of tokens, which are whole numbers, nor a bool tensor with a mark "
            f"for each of {vocabulary}."
        )
    return ids


def of_plays(plays: Sequence[Play], before: Sequence[Sequence[int]] = ()) -> BatchMask:
    """What episodes under way allow, row by row.

    before   what the turn of each had said before its row began
    """

    def ask(row: int, tokens: list[int], start: int) -> Allowed:
        said = tokens[start:]
        return plays[row].allowed([*before[row], *said] if before else said)

    return lambda view: by_row(view, ask)
