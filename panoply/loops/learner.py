"""The learner: one mini-batch, one optimiser step. It sees terms and counts, and is blind to methods.

Every sum is weighted by numbers computed once on the whole mini-batch, so any split into micro-batches gives the same
gradient; micro-batches never cut a term's unit.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from panoply.batch import LOG_RATIO_LIMIT, Batch, Totals
from panoply.checkpoint import check_states
from panoply.errors import PanoplyError
from panoply.experience import Experience, Segments
from panoply.footprint import pass_tokens
from panoply.loops.memory import Meter, Recompute, Room, rehearse
from panoply.loops.micro_batches import split, unit_labels, unit_tokens
from panoply.loops.mover import Diverged, Flat, Masters, Mover, guard
from panoply.loops.offload import Offload
from panoply.loops.rounding import Rounding
from panoply.loops.samples import Watch
from panoply.parts import Part
from panoply.policies import divergence
from panoply.policies.low_rank import adapters
from panoply.regimes import Method
from panoply.seeds import torch_rng
from panoply.slots.schedule.schedules import at
from panoply.slots.update.solver import MiniBatchView
from panoply.states import State, as_tensors, from_tensors, handed_back

DESCENT = {"surrogate": -1.0, "regularise": 1.0, "loss": 1.0}
"""Surrogates are ascended, everything else descended."""

REMEMBERED = "term:"
"""What a term remembers is saved under such names."""

STOPPED = "stopped"
"""The metric that says whether the policy has gone too far for more steps on the same experience."""

Offloaded = Literal["none", "activations"]


class Scorer(Protocol):
    """What the learner asks of a policy."""

    def score(self, experience: Experience, needs: frozenset[str]) -> dict[str, Tensor]: ...

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...


class _Active(NamedTuple):
    term: Part
    column: str
    """The column of its decisions' weights."""
    weight: float


class Learner:
    """`more` are terms of models that learn together with the policy, `mover` moves weights that others learn too."""

    def __init__(
        self,
        policy: Scorer,
        method: Method,
        *,
        total_steps: int,
        micro_tokens: int,
        recompute: Recompute = "auto",
        offload: Offloaded = "none",
        masters: bool = True,
        more: Sequence[Part] = (),
        seed: int = 0,
        mover: Mover | None = None,
    ):
        self.policy = policy
        self.terms = [*method.terms(), *more]
        self.reduce: Part = method.slots()["reduce"]  # type: ignore[assignment]
        update: Part = method.slots()["update"]  # type: ignore[assignment]
        self.needs = asked_of_a_pass(self.terms)
        """What terms ask of the policy; where they act in phases, those whose turn it is."""
        self.total_steps, self.seed = total_steps, seed
        self.epochs: int = update.settings().get("epochs", 1)
        self.per_epoch: int = update.settings().get("minibatches", 1)
        learning = {n: p for n, p in policy.named_parameters() if p.requires_grad}
        self.masters = mover.masters if mover is not None else self._masters(learning, masters)
        self.parameters = self.masters.moving
        thoughts = getattr(getattr(policy, "model", None), "thoughts", None)
        rates = (
            {} if thoughts is None else {f"thoughts.{name}": rate for name, rate in thoughts.rates.items()}
        )
        self.mover = mover or Mover(self.masters, update, total_steps, rates=rates)
        self._alone = mover is None
        self._keeps = mover is None or mover.borrows
        if self.mover.solver is not None and not self._alone:
            raise PanoplyError(f"{update.info.id} wants more than gradients, which learners cannot share.")
        if self.mover.solver is not None and not masters:
            raise PanoplyError(
                f"{update.info.id} places weights itself, so that run.masters=false is not possible."
            )
        self.states = {t.info.name: t.info.state() for t in self.terms if t.info.state is not None}
        """What terms remember, by their names."""
        self._next: dict[str, State] = {}
        """What they will remember once the weights have moved."""
        self.watch: Watch | None = None
        self._phased = any(t.info.acts is not None for t in self.terms)
        self._scheduled = self._phased or any(isinstance(_weight(t), Part) for t in self.terms)
        self._acting: tuple[int, list[_Active]] | None = None
        self._weighed: tuple[Experience, list[_Active], Experience] | None = None
        """The last mini-batch with its weights: epochs without mini-batches see the same one again."""
        device = next((p.device for p in self.parameters.values()), torch.device("cpu"))
        asked = pass_tokens(micro_tokens, device.type == "cuda", bool(self.masters.adapted))
        self.room = Room(asked, getattr(policy, "model", None), recompute, device)
        self.offload = offload

    def _masters(self, learning: dict[str, torch.nn.Parameter], copies: bool) -> Masters:
        if not copies:
            return Rounding(learning, self.seed)
        if getattr(self.policy, "small", False):
            return Flat(learning)
        return Masters(learning, (layer for _, layer in adapters(getattr(self.policy, "model", None))))

    @property
    def optimisers(self) -> list[torch.optim.Optimizer]:
        return [self.mover.optimiser]

    def sampled(self, step: int, take: Callable[[], Experience]) -> Experience:
        """What `take` collects, with the weights where the update wants them, who may want a second batch aside.

        What is taken aside does not learn by itself: its `train` is false. Most updates want the weights as they are.
        """
        self.mover.set_rate(step)
        found: list[Experience] = []
        asides: list[bool] = []
        for aside in self.mover.visits(torch_rng("visits", self.seed, step)):
            found.append(take())
            asides.append(aside)
        if not any(asides):
            return found[0]
        marked = zip(found, asides, strict=True)
        return Experience.cat([e.with_columns(train=torch.full((len(e),), not aside)) for e, aside in marked])

    def settle(self) -> None:
        """Put the weights back where they are learned, wherever they were to be sampled with."""
        self.mover.settle()

    def step(self, experience: Experience, step: int) -> dict[str, float]:
        """Move the weights once by the gradient on this mini-batch; returns metrics."""
        totals = self._accumulate(experience, step)
        norm = self.mover.clip()  # before the first number is read, for which the host waits
        metrics = {**totals.means(), "gradient_norm": norm}
        _guard(metrics)
        metrics["lr"] = self.mover.set_rate(step)
        far = 0 < self.mover.skip_kl < metrics.get("kl_behaviour", 0.0)
        if self.mover.skip or self.mover.skip_kl:
            metrics["skipped"] = float(self.mover.skips or far)
        if self.mover.stop_kl > 0:
            metrics[STOPPED] = float(abs(metrics.get("episode_kl", 0.0)) > self.mover.stop_kl)
        if self.mover.skips or far or metrics.get(STOPPED):
            return metrics
        solver = self.mover.solver
        self.mover.move(self._view(experience, step) if solver is not None and solver.looks else None)
        self.states |= self._next
        return metrics

    def _view(self, experience: Experience, step: int) -> MiniBatchView:
        active = self._active(step)
        rows = self._beside(self._with_weights(experience, active))

        def judged() -> tuple[Tensor, Batch]:
            self.masters.publish()  # a solver judges weights that it only tries
            batch = Batch(rows, self._now(rows, active))
            return self._loss(batch, active, Totals()), batch

        return MiniBatchView(self.policy, rows, list(self.masters.named().values()), judged)

    def gradient(self, experience: Experience, step: int = 0) -> dict[str, Tensor]:
        """The gradient of the loss on a mini-batch by parameter name, without moving (for tests and probes)."""
        self._accumulate(experience, step)
        return {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for n, p in self.masters.named().items()
        }

    def _accumulate(self, experience: Experience, step: int) -> Totals:
        active = self._active(step)
        if self._weighed is None or self._weighed[0] is not experience or self._weighed[1] != active:
            self._weighed = (experience, active, self._with_weights(experience, active))
        rows = self._weighed[2]
        prepared = self._prepare(rows, active)
        awake = self._awake(rows, active)
        self._size(awake, active, prepared)
        while True:
            try:
                totals = self._backward(awake, active, prepared)
            except torch.OutOfMemoryError:
                totals = None
            if totals is None:  # outside of the handler, which would keep the failed pass alive
                self.masters.clear()
                self.room.halve(awake, self.micro_batches)
            elif self.masters.scale == 1 or not self.masters.overflowed(totals.means()["loss"]):
                self.masters.unscale()
                return totals

    def _backward(self, rows: Experience, active: Sequence[_Active], prepared: Mapping[str, Any]) -> Totals:
        """Gradients from nothing, a micro-batch at a time."""
        totals = Totals()
        self.masters.clear()
        for micro in self.micro_batches(rows):
            self._pass(micro, active, prepared, totals)
        return totals

    def _pass(
        self, micro: Experience, active: Sequence[_Active], prepared: Mapping[str, Any], totals: Totals
    ) -> None:
        """Forward and backward over one micro-batch."""
        whole = frozenset(n for n in {t.info.stream for t, _, _ in active} if micro.holds_all(n))
        with Offload(self._read()) if self.offload == "activations" else nullcontext():
            batch = Batch(self._beside(micro), self._now(micro, active), prepared, whole)
            loss = self._loss(batch, active, totals)
        if loss.requires_grad:
            scale = self.masters.scale
            (loss if scale == 1 else loss * scale).backward()  # type: ignore[no-untyped-call]
            self.masters.collect()

    def _read(self) -> Iterator[Tensor]:
        """All that a forward pass reads, whether it learns or not."""
        model = getattr(self.policy, "model", None)
        yield from model.parameters() if isinstance(model, torch.nn.Module) else self.parameters.values()

    def _size(self, rows: Experience, active: Sequence[_Active], prepared: Mapping[str, Any]) -> None:
        """Before the first pass on a GPU: micro-batches as small as it has room for."""
        if self.room.meter is None or not len(rows) or "tokens" not in rows.context:
            return
        longest = int(unit_tokens(rows, unit_labels(rows, self.terms)).max())
        coming = 0 if self.mover.optimiser.state else self.mover.will_keep()
        watch, self.watch = self.watch, None

        def rehearsed(rows: Experience) -> None:
            rehearse(self.policy, self._beside(rows), self.needs)
            self.masters.clear()

        def used(meter: Meter, rows: Experience) -> int:
            found = meter.used(partial(self._pass, rows, active, prepared, Totals()))
            self.masters.clear()
            return found

        try:
            self.masters.clear()
            self.room.fit(rows, longest, self.micro_batches, rehearsed, used, coming)
        finally:
            self.watch = watch

    def _beside(self, rows: Experience) -> Experience:
        """The rows on the device of the weights."""
        device = next((p.device for p in self.parameters.values()), rows["action"].device)
        return rows if rows["action"].device == device else rows.to(device)

    # -------------------------------------------------------------- the objective

    def _active(self, step: int) -> list[_Active]:
        """The terms whose weight is not 0 at this step."""
        if self._acting is None or (self._scheduled and self._acting[0] != step):
            acting = [t.acting(step) for t in self.terms]
            weights = [at(_weight(t), step, self.total_steps) for t in acting]
            if self._phased:
                self.needs = asked_of_a_pass(acting)
            numbered = enumerate(zip(acting, weights, strict=True))
            self._acting = (step, [_Active(t, f"weight:{i}", w) for i, (t, w) in numbered if w])
        return self._acting[1]

    def _with_weights(self, experience: Experience, active: Sequence[_Active]) -> Experience:
        """Add each term's weights, normalised once over the mini-batch by its stream's own count."""
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
        return experience.with_columns(**columns)

    def _loss(self, batch: Batch, active: Sequence[_Active], totals: Totals) -> Tensor:
        """The weighted sum of the terms, each on the decisions of its own stream."""
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
            if self.watch is not None:
                self.watch.see(term, view, stats)
        if loss is None:
            loss = next(iter(batch.now.values())).new_zeros(())
        entropy = {"entropy": batch.now["entropy"].detach()} if "entropy" in batch.now else {}
        totals.close(loss.detach(), entropy)
        return loss

    def _prepare(self, rows: Experience, active: Sequence[_Active]) -> dict[str, Any]:
        """Detached numbers of the whole mini-batch at current weights, for terms that ask for them."""
        asking = [term for term, _, _ in active if term.info.prepare is not None]
        if not asking:
            return {}
        self._next.clear()
        batch = Batch(self._beside(rows), self._score(rows, active))
        found: dict[str, Any] = {}
        with torch.no_grad():
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

    def _now(self, rows: Experience, active: Sequence[_Active]) -> dict[str, Tensor]:
        """What the current policy says of the rows; `own`, where terms ask for both, is its own log-probability."""
        asked = {term.info.scores for term, _, _ in active if rows.altered} - {"none"}
        if asked == {"policy"}:
            return self.policy.score(rows.unaltered(), self.needs)
        found = self.policy.score(rows, self.needs)
        if "policy" in asked:
            found = {**found, "own": self.policy.score(rows.unaltered(), frozenset())["logp"]}
        return found

    @torch.no_grad()
    def _score(self, rows: Experience, active: Sequence[_Active]) -> dict[str, Tensor]:
        """What the current policy says of all rows, without gradient, a micro-batch at a time.

        A judge says one thing of an episode, in the order of their numbers.
        """
        numbered = rows.with_columns(row=torch.arange(len(rows), device=rows["action"].device))
        found: dict[str, list[Tensor]] = defaultdict(list)
        for micro in self.micro_batches(numbered):
            at = {"row": micro["row"], "episode": micro.by("episode").keys}
            for name, column in {**self._now(micro, active), **at}.items():
                found[name].append(column)
        joined = {name: torch.cat(columns) for name, columns in found.items()}
        rows_order, episodes_order = (joined.pop(name).argsort() for name in ("row", "episode"))
        return {
            name: column[(episodes_order if name.startswith("judged") else rows_order).to(column.device)]
            for name, column in joined.items()
        }

    # -------------------------------------------------------------- splitting

    def _awake(self, rows: Experience, active: Sequence[_Active]) -> Experience:
        """Leave out units on which no term has a gradient (every advantage exactly 0): same gradient, less work."""
        if "tokens" not in rows.context or any(term.info.idle is None for term, _, _ in active):
            return rows
        awake = torch.zeros(len(rows), dtype=torch.bool, device=rows["action"].device)
        for term, _, _ in active:
            awake |= (rows[str(term.info.idle)] != 0) & rows.stream(term.info.stream)
        units = Segments(unit_labels(rows, self.terms))
        keep = units.rows(units.sum(awake) > 0)
        return rows if bool(keep.all()) else rows.take(keep)

    def micro_batches(self, rows: Experience, limit: int | None = None) -> Iterator[Experience]:
        """Whole units, in order, up to `limit` context tokens at a time, or as many as there is room for."""
        limit = limit or self.room.tokens
        held = len(rows.context.ragged("tokens").values) if "tokens" in rows.context else len(rows)
        if not len(rows):
            return
        yield from split(rows, self.terms, limit) if held > limit else [rows]  # contexts may share some of it

    def minibatches(self, experience: Experience, generator: torch.Generator) -> Iterator[Experience]:
        """Every epoch, the units in a fresh order, in `minibatches` parts of about equal number.

        Where rows have a `stage`, all epochs of an earlier one come before those of a later one, so that no mini-batch
        holds rows of two.
        """
        if len(experience) == 0:
            return
        for term in self.terms:
            experience.holds_all(term.info.stream)  # known of all, it need not be looked for in any part
        stages = sorted(set(experience["stage"].tolist())) if "stage" in experience else [None]
        for stage in stages:
            rows = experience if stage is None else experience.take(experience["stage"] == stage)
            for _ in range(self.epochs):
                yield from [rows] if self.per_epoch == 1 else self._parts(rows, generator)

    def _parts(self, rows: Experience, generator: torch.Generator) -> Iterator[Experience]:
        label = unit_labels(rows, self.terms)
        units = int(label.max()) + 1
        place = torch.randperm(units, generator=generator).to(label.device)
        part = place[label] * self.per_epoch // units
        sizes = [size for size in part.bincount().tolist() if size]
        yield from (rows.take(taken) for taken in part.argsort(stable=True).split(sizes))  # type: ignore[no-untyped-call]

    # -------------------------------------------------------------- saving

    def state(self) -> dict[str, Tensor]:
        """What the optimiser keeps and terms remember, as plain named tensors."""
        remembered = {f"{REMEMBERED}{name}": kept for name, kept in as_tensors(self.states).items()}
        return {**(self.mover.state() if self._keeps else {}), **remembered}

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        ours = {n.removeprefix(REMEMBERED): v for n, v in named.items() if n.startswith(REMEMBERED)}
        self.mover.load_state({n: v for n, v in named.items() if not n.startswith(REMEMBERED)})
        states = from_tensors(ours)
        check_states(states, self.states)
        self.states = states


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


def mean_metrics(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the steps that have it."""
    names = dict.fromkeys(name for metrics in found for name in metrics)
    having = {name: [m[name] for m in found if name in m] for name in names}
    return {name: sum(values) / len(values) for name, values in having.items()}


def _guard(metrics: Mapping[str, float]) -> None:
    guard("loss", metrics["loss"])
    guard("gradient_norm", metrics["gradient_norm"])
    if metrics.get("ratio_max", 1.0) >= math.exp(LOG_RATIO_LIMIT - 1e-3):
        raise Diverged(
            "Stopped: the policy has moved e²⁰-fold on some decision; the last good weights are kept."
        )
