"""What running rows are fed in place of their newest tokens' embeddings, and the record of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from panoply.experience import Column, Ragged
from panoply.policies.thoughts import Drawn, Inputs, Thoughts
from panoply.rollout.rollouts import Slots
from panoply.rollout.sampling import Draw, normals


class Feeding:
    """A vector a slot, where its newest token has one. They move with the slots.

    Neither captured graphs nor the decoder for CPUs read vectors, so rows that may have some are decoded eagerly.
    """

    def __init__(self, model: Any, slots: int):
        self.model = model
        self.thoughts: Thoughts | None = model.thoughts
        self.width, self.device = model.config.width, model.device
        self.there = torch.zeros(slots, dtype=torch.bool, device=self.device)
        self.vectors = torch.zeros(slots, self.width, dtype=model.dtype, device=self.device)
        self._record: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def table(self) -> Tensor:
        """[vocabulary, width], what is read of every token."""
        weight: Tensor = self.model.model.embed_tokens.weight
        factor = self.model.embedding_factor
        return weight if factor == 1.0 else weight * factor

    def newest(self, slots: Tensor | int) -> Inputs:
        """Of some slots' newest tokens, or of so many, in a pass with one token each."""
        some = slice(slots) if isinstance(slots, int) else slots
        at = self.there[some].nonzero().flatten()
        return Inputs(at, self.vectors[some][at])

    def allowed(self, slots: Slots, history: Tensor, vocabulary: int) -> Tensor | None:
        """What thoughts let rows draw next, where they do not let them draw anything."""
        if self.thoughts is None:
            return None
        return self.thoughts.allowed(history[: len(slots)], slots.position + 1, slots.start, vocabulary)

    def after(self, slots: Slots, history: Tensor, state: Tensor, draw: Draw) -> Draw:
        """A token was drawn for every slot, and stands in the history: think. Gives what is to be recorded of it."""
        n, position = len(slots), slots.position + 1
        if self.thoughts is None:
            self.there[:n] = False
            return draw
        assert draw.logits is not None
        seen = Drawn(
            draw.action,
            history[:n],
            position + 1,
            slots.start,
            draw.logits,
            state,
            self.there[:n],
            self.table,
            lambda: normals(slots.stream, position, self.width),
        )
        thinks, vectors = self.thoughts.think(seen)
        thinks &= slots.live
        self.there[:n] = torch.where(
            slots.live, thinks, self.there[:n]
        )  # what has ended keeps its last vector
        at = thinks.nonzero().flatten()
        self.vectors[at] = vectors[at].to(self.vectors.dtype)
        self._record.append((slots.row[at], position[at], self.vectors[at]))
        told = {"logp": draw.logp} | ({} if draw.entropy is None else {"entropy": draw.entropy})
        scored: dict[str, Any] = dict(self.thoughts.scored(told, at, self.vectors[at], state))
        return replace(draw, **scored)

    def prefixed(self, row: int, vectors: Tensor) -> None:
        """Note that a row's prompt begins with vectors."""
        at = torch.arange(len(vectors), device=self.device)
        self._record.append((torch.full_like(at, row), at, vectors.to(self.vectors)))

    def move(self, to: Tensor, source: Tensor) -> None:
        self.there[to], self.vectors[to] = self.there[source], self.vectors[source]

    def begin(self, at: Tensor) -> None:
        """Rows begin at their prompts' last tokens, which are tokens; so are an observation's."""
        self.there[at] = False

    def columns(self, rows: int) -> dict[str, Column]:
        """`vectors` and `vectors_at` of so many contexts, each in the order of its tokens."""
        nothing = self.there.new_zeros(0, dtype=torch.long)
        parts = self._record or [(nothing, nothing, self.vectors[:0])]
        row, at, vectors = (torch.cat(column) for column in zip(*parts, strict=True))
        order = (row * (int(at.max()) + 1 if len(at) else 1) + at).argsort()
        offsets = torch.cat([row.new_zeros(1), row.bincount(minlength=rows).cumsum(0)]).cpu()
        return {
            "vectors": Ragged(vectors[order].cpu(), offsets),
            "vectors_at": Ragged(at[order].cpu(), offsets),
        }
