"""The objective: a method's terms, what each weighs in a step, and what they come to on a batch.

Whatever looks at a whole mini-batch (counts, weights, what terms prepare, which rows can be left out) is done once,
before any pass. A pass only sums: however rows are dealt out, the gradient is the same.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from panoply.batch import Batch, Totals
from panoply.experience import Experience, Segments
from panoply.loops.micro_batches import unit_labels
from panoply.loops.samples import Watch
from panoply.parts import Part
from panoply.policies import divergence
from panoply.slots.schedule.schedules import at
from panoply.states import State, handed_back

DESCENT = {"surrogate": -1.0, "regularise": 1.0, "loss": 1.0}
"""Surrogates are ascended, everything else descended."""


class Active(NamedTuple):
    """A term whose weight is not 0."""

    term: Part
    column: str
    """The column of its decisions' weights."""
    weight: float


class Weighed(NamedTuple):
    """A mini-batch of which nothing more has to be known as a whole: it may be cut and dealt out."""

    rows: Experience
    """With each term's weights, without what has no gradient."""
    active: list[Active]
    prepared: Mapping[str, Any]


class Objective:
    """`reduce` says how decisions share the weight of a term."""

    def __init__(self, terms: Sequence[Part], reduce: Part, total_steps: int):
        self.terms, self.reduce, self.total_steps = list(terms), reduce, total_steps
        self.needs = asked_of_a_pass(self.terms)
        """What terms ask of the policy; where they act in phases, those whose turn it is."""
        self.states = {t.info.name: t.info.state() for t in self.terms if t.info.state is not None}
        """What terms remember, by their names."""
        self._next: dict[str, State] = {}
        self._phased = any(t.info.acts is not None for t in self.terms)
        self._scheduled = self._phased or any(isinstance(_weight(t), Part) for t in self.terms)
        self._acting: tuple[int, list[Active]] | None = None
        self._weighed: tuple[Experience, list[Active], Experience] | None = None
        """The last mini-batch with its weights: epochs without mini-batches see the same one again."""
        self._awake: tuple[Experience, Sequence[Active], Experience] | None = None
        """Its rows with weights, and those of them that have a gradient."""

    def active(self, step: int) -> list[Active]:
        """The terms whose weight is not 0 at this step."""
        if self._acting is None or (self._scheduled and self._acting[0] != step):
            acting = [t.acting(step) for t in self.terms]
            weights = [at(_weight(t), step, self.total_steps) for t in acting]
            if self._phased:
                self.needs = asked_of_a_pass(acting)
            numbered = enumerate(zip(acting, weights, strict=True))
            self._acting = (step, [Active(t, f"weight:{i}", w) for i, (t, w) in numbered if w])
        return self._acting[1]

    # -------------------------------------------------------------- of a whole mini-batch

    def weighed(self, experience: Experience, active: list[Active]) -> Experience:
        """Add each term's weights, normalised once over the mini-batch by its stream's own count."""
        known = self._weighed
        if known is not None and known[0] is experience and known[1] == active:
            return known[2]
        columns: dict[str, Tensor] = {}
        shares: dict[str, Tensor] = {}
        for term, column, _ in active:
            experience.holds_all(term.info.stream)  # known of all, it need not be looked for in any part
            mask = experience.stream(term.info.stream)
            if term.info.unit == "decision":
                stream = term.info.stream
                if stream not in shares:
                    shares[stream] = self.reduce.filled(experience, mask)
                columns[column] = shares[stream]
                if term.info.slot == "surrogate" and "weight" in experience:
                    columns[column] = columns[column] * experience["weight"]
            else:
                columns[column] = mask.float() / max(1, experience.take(mask).count(term.info.unit))
        rows = experience.with_columns(**columns)
        self._weighed = (experience, active, rows)
        return rows

    @torch.no_grad()
    def prepared(self, batch: Batch, asking: Sequence[Part]) -> dict[str, Any]:
        """Detached numbers of the whole mini-batch at current weights, for the terms that ask for them."""
        self._next.clear()
        found: dict[str, Any] = {}
        for term in asking:
            info, settings = term.info, term.settings()
            assert info.prepare is not None
            view = batch.of_stream(info.stream).scored(info.scores)
            if info.state is None:
                found[info.name] = info.prepare(view, **settings)
                continue
            returned = info.prepare(copy.deepcopy(self.states[info.name]), view, **settings)
            self._next[info.name], found[info.name] = handed_back(f"The prepare of {info.id}", returned)
        return found

    def remember(self) -> None:
        """The weights have moved: what terms have found in preparing is remembered from now on."""
        self.states |= self._next

    def awake(self, rows: Experience, active: Sequence[Active]) -> Experience:
        """Leave out units on which no term has a gradient (every advantage exactly 0): same gradient, less work."""
        if "tokens" not in rows.context or any(term.info.idle is None for term, _, _ in active):
            return rows
        known = self._awake
        if known is not None and known[0] is rows and known[1] == active:
            return known[2]
        awake = torch.zeros(len(rows), dtype=torch.bool, device=rows["action"].device)
        for term, _, _ in active:
            awake |= (rows[str(term.info.idle)] != 0) & rows.stream(term.info.stream)
        units = Segments(unit_labels(rows, self.terms))
        keep = units.rows(units.sum(awake) > 0)
        kept = rows if bool(keep.all()) else rows.take(keep)
        self._awake = (rows, active, kept)
        return kept

    # -------------------------------------------------------------- of any part of it

    def loss(
        self, batch: Batch, active: Sequence[Active], totals: Totals, watch: Watch | None = None
    ) -> Tensor:
        """Σ over terms and rows of value times weight; what terms say beside it is added to the totals."""
        loss: Tensor | None = None
        for term, column, weight in active:
            view = batch.of_stream(term.info.stream).scored(term.info.scores)
            if view.experience.count(term.info.unit) == 0:
                continue
            values, stats = term.filled(view)
            shares = view[column] if term.info.unit == "decision" else view[column][0]
            term_loss = (values * shares.to(values.dtype)).sum()
            factor = DESCENT[term.info.slot] * weight
            part = term_loss if factor == 1 else factor * term_loss
            loss = part if loss is None else loss + part
            totals.add(term, term_loss.detach(), stats)
            if watch is not None:
                watch.see(term, view, stats)
        if loss is None:
            loss = next(iter(batch.now.values())).new_zeros(())
        entropy = {"entropy": batch.now["entropy"].detach()} if "entropy" in batch.now else {}
        totals.close(loss.detach(), entropy)
        return loss


def asked_of_a_pass(terms: Sequence[Part]) -> frozenset[str]:
    """What terms together need of the current policy's forward pass."""
    return frozenset(
        n
        for t in terms
        for n in t.needs()
        if not n.startswith(("world:", "column:", "whole:", "signal:", "engine:"))
        if "@" not in n or n.startswith(divergence.NEED)
    )


def _weight(term: Part) -> float | Part:
    found: float | Part = term.settings().get("weight", 1.0)
    return found
