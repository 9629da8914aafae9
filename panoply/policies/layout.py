"""From ragged contexts to padded rows: a prompt and its completions in one row, like lengths together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import Experience, Ragged, moved
from panoply.policies.packing import Packing, pack
from panoply.policies.thoughts import Inputs
from panoply.tables import picked

CALL_TOKENS = 256
"""What one more forward call costs, in tokens: a bucket is split when that saves more padding."""


@dataclass(frozen=True)
class Rows:
    """One forward call. `state[i]`, of its B·T hidden states, predicts decision `decision[i]`."""

    tokens: Tensor
    positions: Tensor
    segments: Tensor | None
    decision: Tensor
    state: Tensor
    packing: Packing | None = None
    inputs: Inputs | None = None

    def to(self, device: torch.device | str) -> Rows:
        segments = None if self.segments is None else moved(self.segments, device)
        rest = (moved(self.decision, device), moved(self.state, device))
        packing = None if self.packing is None else self.packing.to(device)
        inputs = None if self.inputs is None else Inputs(*(moved(x, device) for x in self.inputs))
        return Rows(
            moved(self.tokens, device), moved(self.positions, device), segments, *rest, packing, inputs
        )


@dataclass(frozen=True)
class _Pieces:
    """Spans of contexts laid into rows: a prefix (segment 0) or a suffix (segment 1, 2, …), at a column."""

    row: Tensor
    context: Tensor
    start: Tensor
    length: Tensor
    segment: Tensor
    column: Tensor


@dataclass(frozen=True)
class _Vectors:
    """The vectors of all contexts, and the number of the one that each token of all has, −1 where it has none."""

    number: Tensor
    values: Tensor

    @classmethod
    def of(cls, experience: Experience, tokens: Ragged) -> _Vectors | None:
        if "vectors" not in experience.context:
            return None
        at = experience.context.ragged("vectors_at").to("cpu")
        first = tokens.offsets[:-1].repeat_interleave(at.lengths)
        number = torch.full((len(tokens.values),), -1)
        number[first + at.values] = torch.arange(len(first))
        return cls(number, experience.context.ragged("vectors").values)

    def inputs(self, token: Tensor, place: Tensor) -> Inputs:
        """Of some tokens, by their numbers among all, that stand at places of a pass."""
        number = self.number[token]
        there = number >= 0
        return Inputs(place[there], self.values[number[there].to(self.values.device)])


ENDLESS = 1 << 40


def lay_out(
    experience: Experience, *, shared: bool = True, dense: int = 384, packed: bool = False
) -> list[Rows]:
    """Rows with every state a decision is predicted from, and no more: what follows the last is left out.

    With `shared`, contexts of one prompt share a row, in which their common prefix stands once; without, or
    where there is nothing to share, each is a row of its own. `dense` is the row length at which attention
    costs as much as the rest of the model: beyond it a prompt is better split over several rows. `packed`
    lays all rows end to end in one, which needs an attention that does not look across.
    """
    tokens = experience.context.ragged("tokens").to("cpu")
    context, position = experience["context"].cpu(), experience["position"].cpu()
    if len(position) == 0:
        return []
    if int(position.min()) < 1:
        raise PanoplyError("A decision at position 0 has no token before it to be predicted from.")
    needed = position.new_zeros(len(tokens)).scatter_reduce(0, context, position, "amax")
    if bool((needed > tokens.lengths).any()):  # one past the end is the state after the last token
        raise PanoplyError("A decision's position lies beyond the end of its tokens.")
    prefix, row = _assign(experience, needed, shared, ENDLESS if packed else dense)
    pieces, prefix_piece, suffix_piece = _cut(needed, prefix, row)

    before = position - 1
    inside = before < picked(prefix, context)
    piece = torch.where(inside, picked(prefix_piece, context), picked(suffix_piece, context))
    column = picked(pieces.column - pieces.start, piece) + before
    vectors = _Vectors.of(experience, tokens)
    fill = _pack if packed else _fill
    return fill(tokens, pieces, picked(row, context), column, vectors)


def _assign(experience: Experience, needed: Tensor, shared: bool, dense: int) -> tuple[Tensor, Tensor]:
    """Each context's prefix length and row. Alone in a row it is all prefix; unused, its row is -1."""
    used = needed > 0
    table = experience.context
    if not shared or "prompt" not in table or "shared" not in table:
        return needed.clone(), torch.where(used, used.cumsum(0) - 1, -1)
    prompt, common = table.tensor("prompt").cpu(), table.tensor("shared").cpu()
    _, group = torch.unique(prompt, return_inverse=True)
    groups = int(group.max()) + 1
    prefix = needed.new_full((groups,), 1 << 62).scatter_reduce(0, group, common, "amin")
    members = needed.new_zeros(groups).index_add(0, group, used.long())
    suffix = (needed - prefix[group]).clamp(min=0)
    total = needed.new_zeros(groups).index_add(0, group, suffix)

    # r rows of P + S/r tokens cost r·P + S + r·(P + S/r)²/dense, least at r = S / sqrt(dense·P + P²).
    best = total / (prefix * (prefix + dense)).double().sqrt().clamp(min=1e-9)
    parts = best.round().clamp(min=1).minimum(members.clamp(min=1)).long()

    # Within a group the longest suffixes are dealt out first, so that its rows are of like length.
    order = torch.argsort(group * (int(suffix.max()) + 1) - suffix + (~used) * (1 << 40), stable=True)
    ordered = group[order]
    first = torch.searchsorted(ordered[: int(used.sum())], torch.arange(groups))
    rank = torch.empty_like(group)
    rank[order] = torch.arange(len(group)) - first[ordered]
    stride = int(members.max()) + 1
    key = torch.where(used, group * stride + rank % parts[group], -1)
    keys, row = torch.unique(key, return_inverse=True)
    row = row - int(keys[0] == -1)
    alone = row[used].bincount()[row] == 1
    return torch.where(alone | ~used, needed, prefix[group].minimum(needed)), row


def _cut(needed: Tensor, prefix: Tensor, row: Tensor) -> tuple[_Pieces, Tensor, Tensor]:
    """The pieces in the order they lie, and which piece holds each context's prefix and its suffix."""
    contexts = (row >= 0).nonzero().flatten()
    rows = int(row.max()) + 1
    # The context that needs most of the prefix stands for it: others may end inside.
    reach = needed.new_zeros(rows).scatter_reduce(0, row[contexts], prefix[contexts], "amax")
    full = contexts[prefix[contexts] == reach[row[contexts]]]
    holder = needed.new_zeros(rows).scatter_reduce(0, row[full], full, "amax")

    order = contexts[row[contexts].argsort(stable=True)]
    rank = torch.arange(len(order)) - torch.searchsorted(row[order], row[order])
    piece_row = torch.cat([torch.arange(rows), row[order]])
    piece_segment = torch.cat([torch.zeros(rows, dtype=torch.long), rank + 1])
    lie = torch.argsort(piece_row * (len(order) + 2) + piece_segment)
    place = torch.empty_like(lie)
    place[lie] = torch.arange(len(lie))

    start = torch.cat([torch.zeros(rows, dtype=torch.long), prefix[order]])[lie]
    length = torch.cat([reach, needed[order] - prefix[order]])[lie]
    piece_row = piece_row[lie]
    end = length.cumsum(0)
    row_start = (end - length)[place[:rows]]
    pieces = _Pieces(
        row=piece_row,
        context=torch.cat([holder, order])[lie],
        start=start,
        length=length,
        segment=piece_segment[lie],
        column=end - length - row_start[piece_row],
    )
    prefix_piece = place[:rows][row.clamp(min=0)]
    suffix_piece = torch.zeros_like(row)
    suffix_piece[order] = place[rows:]
    return pieces, prefix_piece, suffix_piece


def _pack(
    tokens: Ragged, pieces: _Pieces, row: Tensor, column: Tensor, vectors: _Vectors | None
) -> list[Rows]:
    """All pieces in one row; `row` and `column` are the decisions'."""
    begin = pieces.length.cumsum(0) - pieces.length
    position = (pieces.start - begin).repeat_interleave(pieces.length)
    position += torch.arange(len(position))
    number = tokens.offsets[pieces.context].repeat_interleave(pieces.length) + position
    of_row = begin[torch.searchsorted(pieces.row, torch.arange(int(pieces.row[-1]) + 1))]
    packing = pack(pieces.length, pieces.segment, pieces.row)
    decision = torch.arange(len(row))
    inputs = None if vectors is None else vectors.inputs(number, torch.arange(len(number)))
    token, state = picked(tokens.values, number), picked(of_row, row) + column
    return [Rows(token[None], position[None], None, decision, state, packing, inputs)]


def _fill(
    tokens: Ragged, pieces: _Pieces, row: Tensor, column: Tensor, vectors: _Vectors | None
) -> list[Rows]:
    """Lay the pieces out, a batch of rows per bucket of lengths; `row` and `column` are the decisions'."""
    begin = pieces.length.cumsum(0) - pieces.length
    piece = torch.arange(len(begin)).repeat_interleave(pieces.length)  # of each token
    within = torch.arange(len(piece)) - begin[piece]

    def spread(per_piece: Tensor) -> Tensor:
        return picked(per_piece, piece)

    position = spread(pieces.start) + within
    number = spread(tokens.offsets[pieces.context]) + position
    token = picked(tokens.values, number)
    segment, place = spread(pieces.segment), spread(pieces.column) + within
    token_row = spread(pieces.row)
    lengths = token_row.bincount()
    shared = torch.zeros(len(lengths), dtype=torch.bool)
    shared[token_row[segment > 0]] = True

    batches = []
    for kind in (False, True):  # rows with one sequence need no mask, so they go apart
        rows = (shared == kind).nonzero().flatten()
        if not len(rows):
            continue
        rows = rows[lengths[rows].argsort(stable=True)]
        for bucket in bucketed(lengths[rows], CALL_TOKENS):
            chosen = rows[bucket]
            line = torch.full_like(lengths, -1)
            line[chosen] = torch.arange(len(chosen))
            size = (len(chosen), int(lengths[chosen[-1]]))
            kept, mine = line[token_row] >= 0, line[row] >= 0
            slot = line[token_row[kept]] * size[1] + place[kept]
            blank = torch.zeros(size, dtype=torch.long)
            batches.append(
                Rows(
                    blank.flatten().scatter(0, slot, token[kept]).view(size),
                    blank.flatten().scatter(0, slot, position[kept]).view(size)
                    if kind
                    else torch.arange(size[1]).expand(size),
                    (blank - 1).flatten().scatter(0, slot, segment[kept]).view(size) if kind else None,
                    mine.nonzero().flatten(),
                    line[row[mine]] * size[1] + column[mine],
                    inputs=None if vectors is None else vectors.inputs(number[kept], slot),
                )
            )
    return batches


def bucketed(lengths: Tensor, call_tokens: int) -> list[slice]:
    """Split ascending lengths wherever that saves more padding than one more call costs."""
    pending, done = [slice(0, len(lengths))], []
    while pending:
        span = pending.pop()
        part = lengths[span]
        saved = torch.arange(1, len(part) + 1) * (part[-1] - part)
        cut = int(saved.argmax())
        if int(saved[cut]) <= call_tokens:
            done.append(span)
        else:
            pending += [slice(span.start, span.start + cut + 1), slice(span.start + cut + 1, span.stop)]
    return done
