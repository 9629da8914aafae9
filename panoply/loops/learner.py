"""The learner: one mini-batch, one optimiser step. It sees terms and counts, and is blind to methods.

Every sum is weighted by numbers computed once on the whole mini-batch, so any split into micro-batches gives the same
gradient; micro-batches never cut a term's unit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from panoply.batch import LOG_RATIO_LIMIT, Batch, Totals
from panoply.checkpoint import check_states
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.footprint import pass_tokens
from panoply.loops.memory import Meter, Recompute, Room, models_of, rehearse
from panoply.loops.micro_batches import split, unit_labels, unit_tokens
from panoply.loops.mover import PLACES, SHARED, Diverged, Flat, Masters, Mover, guard
from panoply.loops.objective import Active, Objective, Weighed
from panoply.loops.offload import Offload
from panoply.loops.rounding import Rounding
from panoply.loops.samples import Watch
from panoply.parts import Part
from panoply.policies.low_rank import adapters
from panoply.regimes import Method
from panoply.seeds import torch_rng
from panoply.slots.update.solver import MiniBatchView
from panoply.states import State, as_tensors, from_tensors

REMEMBERED = "term:"
"""What a term remembers is saved under such names."""

STOPPED = "stopped"
"""The metric that says whether the policy has gone too far for more steps on the same experience."""

Offloaded = Literal["none", "activations"]


class Scorer(Protocol):
    """What the learner asks of a policy."""

    def score(self, experience: Experience, needs: frozenset[str]) -> dict[str, Tensor]: ...

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...


class Learner:
    """`more` are terms of models that learn together with the policy, `mover` moves weights that others learn too.

    `share` is called with the weights before anything keeps what belongs to them: where several processes learn
    together, each moves some.
    """

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
        share: Callable[[Masters], None] | None = None,
    ):
        self.policy = policy
        reduce: Part = method.slots()["reduce"]  # type: ignore[assignment]
        self.objective = Objective([*method.terms(), *more], reduce, total_steps)
        update: Part = method.slots()["update"]  # type: ignore[assignment]
        self.seed = seed
        self.epochs: int = update.settings().get("epochs", 1)
        self.per_epoch: int = update.settings().get("minibatches", 1)
        learning = {n: p for n, p in policy.named_parameters() if p.requires_grad}
        self.masters = mover.masters if mover is not None else self._masters(learning, masters)
        self.parameters = self.masters.moving
        if share is not None and mover is None:
            share(self.masters)
        thoughts = getattr(getattr(policy, "model", None), "thoughts", None)
        rates = (
            {} if thoughts is None else {f"thoughts.{name}": rate for name, rate in thoughts.rates.items()}
        )
        self.mover = mover or Mover(self.masters, update, total_steps, rates=rates)
        self._alone = mover is None
        self.keeps = mover is None or mover.borrows
        if self.mover.solver is not None and not self._alone:
            raise PanoplyError(SHARED.format(update.info.id))
        if self.mover.solver is not None and not masters:
            raise PanoplyError(PLACES.format(update.info.id))
        self.watch: Watch | None = None
        self.together: Callable[[int], int] | None = None
        """Of a learner whose passes others must make too: how many all make, told how many it has itself."""
        device = next((p.device for p in self.parameters.values()), torch.device("cpu"))
        asked = pass_tokens(micro_tokens, device.type == "cuda", bool(self.masters.adapted))
        self.room = Room(asked, models_of(policy), recompute, device)
        self.offload = offload

    def _masters(self, learning: dict[str, torch.nn.Parameter], copies: bool) -> Masters:
        if not copies:
            return Rounding(learning, self.seed)
        in_pieces = any(hasattr(weight, "device_mesh") for weight in learning.values())
        if getattr(self.policy, "small", False) and not in_pieces:
            return Flat(learning)
        return Masters(learning, (layer for _, layer in adapters(getattr(self.policy, "model", None))))

    @property
    def terms(self) -> list[Part]:
        return self.objective.terms

    @property
    def states(self) -> dict[str, State]:
        """What terms remember, by their names."""
        return self.objective.states

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
        totals = self.passes(self.weigh(experience, step))
        norm = self._clip()  # before the first number is read, for which the host waits
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
        self._move(experience, step)
        self.objective.remember()
        return metrics

    def _clip(self) -> float:
        return self.mover.clip()

    def _move(self, experience: Experience, step: int) -> None:
        solver = self.mover.solver
        self.mover.move(self._view(experience, step) if solver is not None and solver.looks else None)

    def _view(self, experience: Experience, step: int) -> MiniBatchView:
        active = self.objective.active(step)
        rows = self._beside(self.objective.weighed(experience, active))

        def judged() -> tuple[Tensor, Batch]:
            self.masters.publish()  # a solver judges weights that it only tries
            batch = Batch(rows, self.now(rows, active))
            return self.objective.loss(batch, active, Totals()), batch

        return MiniBatchView(self.policy, rows, list(self.masters.named().values()), judged)

    def gradient(self, experience: Experience, step: int = 0) -> dict[str, Tensor]:
        """The gradient of the loss on a mini-batch by parameter name, without moving (for tests and probes)."""
        self.passes(self.weigh(experience, step))
        return {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for n, p in self.masters.named().items()
        }

    # -------------------------------------------------------------- weigh: once, on the whole mini-batch

    def weigh(self, experience: Experience, step: int) -> Weighed:
        """All that has to be known of a mini-batch as a whole, so that passes over its parts only have to sum."""
        active = self.objective.active(step)
        rows = self.objective.weighed(experience, active)
        asking = [term for term, _, _ in active if term.info.prepare is not None]
        prepared: dict[str, Any] = {}
        if asking:
            batch = Batch(self._beside(rows), self.scored(rows, active))
            prepared = self.objective.prepared(batch, asking)
        return Weighed(self.objective.awake(rows, active), active, prepared)

    @torch.no_grad()
    def scored(self, rows: Experience, active: Sequence[Active]) -> dict[str, Tensor]:
        """What the current policy says of all rows, without gradient, a micro-batch at a time.

        A judge says one thing of an episode, in the order of their numbers.
        """
        numbered = rows.with_columns(row=torch.arange(len(rows), device=rows["action"].device))
        found: dict[str, list[Tensor]] = defaultdict(list)
        for micro, counts in self._in_step(numbered):
            at = {"row": micro["row"], "episode": micro.by("episode").keys}
            said = self.now(micro, active)
            for name, column in {**said, **at}.items() if counts else ():
                found[name].append(column)
        return in_order({name: torch.cat(columns) for name, columns in found.items()})

    # -------------------------------------------------------------- pass: over any part of it

    def passes(self, weighed: Weighed) -> Totals:
        """Gradients from nothing, in passes that fit into memory."""
        self._size(weighed)
        while True:
            try:
                totals = self._summed(weighed)
            except torch.OutOfMemoryError:
                totals = None
            if totals is None:  # outside of the handler, which would keep the failed pass alive
                self.masters.clear()
                self.room.halve(weighed.rows, self.micro_batches)
            elif self.masters.scale == 1 or not self.masters.overflowed(totals.means()["loss"]):
                self.masters.unscale()
                return totals

    def _summed(self, weighed: Weighed) -> Totals:
        """Gradients from nothing, a micro-batch at a time."""
        totals = Totals()
        self.masters.clear()
        for micro, counts in self._in_step(weighed.rows):
            self._pass(weighed._replace(rows=micro), totals if counts else Totals())
        return totals

    def _in_step(self, rows: Experience) -> Iterator[tuple[Experience, bool]]:
        """Micro-batches, and whether they count: where all must make as many passes, some only keep step."""
        if self.together is None:
            yield from ((micro, True) for micro in self.micro_batches(rows))
            return
        micros = list(self.micro_batches(rows))
        idle = weightless(micros[0])
        yield from ((micro, True) for micro in micros)
        yield from ((idle, False) for _ in range(self.together(len(micros)) - len(micros)))

    def _pass(self, weighed: Weighed, totals: Totals) -> None:
        """Forward and backward over one micro-batch."""
        micro, active, prepared = weighed
        whole = frozenset(n for n in {t.info.stream for t, _, _ in active} if micro.holds_all(n))
        with self.masters.summing():
            with Offload(self._read()) if self.offload == "activations" else nullcontext():
                batch = Batch(self._beside(micro), self.now(micro, active), prepared, whole)
                loss = self.objective.loss(batch, active, totals, self.watch)
            if not loss.requires_grad:
                return
            scale = self.masters.scale
            (loss if scale == 1 else loss * scale).backward()  # type: ignore[no-untyped-call]
        self.masters.collect()

    def now(
        self, rows: Experience, active: Sequence[Active], but: frozenset[str] = frozenset()
    ) -> dict[str, Tensor]:
        """What the current policy says of the rows; `own`, where terms ask for both, is its own log-probability."""
        asked = {term.info.scores for term, _, _ in active if rows.altered} - {"none"}
        needs = self.objective.needs - but
        if asked == {"policy"}:
            return self.policy.score(rows.unaltered(), needs)
        found = self.policy.score(rows, needs)
        if "policy" in asked:
            found = {**found, "own": self.policy.score(rows.unaltered(), frozenset())["logp"]}
        return found

    def _read(self) -> Iterator[Tensor]:
        """All that a forward pass reads, whether it learns or not."""
        models = [model for model in models_of(self.policy) if isinstance(model, torch.nn.Module)]
        yield from chain.from_iterable(model.parameters() for model in models)
        yield from self.parameters.values()

    def _size(self, weighed: Weighed) -> None:
        """Before the first pass on a GPU: micro-batches as small as it has room for."""
        rows = weighed.rows
        if self.room.meter is None or not len(rows) or "tokens" not in rows.context:
            return
        longest = int(unit_tokens(rows, unit_labels(rows, self.terms)).max())
        coming = 0 if self.mover.optimiser.state else self.mover.will_keep()
        watch, self.watch = self.watch, None

        def rehearsed(rows: Experience) -> None:
            with self.masters.summing():
                rehearse(self.policy, self._beside(rows), self.objective.needs, self.masters.collect)
            self.masters.clear()

        def used(meter: Meter, rows: Experience) -> int:
            found = meter.used(partial(self._pass, weighed._replace(rows=rows), Totals()))
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

    # -------------------------------------------------------------- splitting

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
        return {**(self.mover.state() if self.keeps else {}), **remembered}

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        ours = {n.removeprefix(REMEMBERED): v for n, v in named.items() if n.startswith(REMEMBERED)}
        self.mover.load_state({n: v for n, v in named.items() if not n.startswith(REMEMBERED)})
        states = from_tensors(ours)
        check_states(states, self.states)
        self.objective.states = states


def weightless(rows: Experience) -> Experience:
    """The same rows, of which no term has a gradient."""
    names = (name for name in rows.decisions if name.startswith("weight:"))
    return rows.with_columns(**{name: torch.zeros_like(rows[name]) for name in names})


def in_order(joined: dict[str, Tensor]) -> dict[str, Tensor]:
    """Columns that were scored in parts, in the order of their `row`; what is said of episodes, of their `episode`."""
    rows, episodes = (joined.pop(name).argsort() for name in ("row", "episode"))
    return {
        name: column[(episodes if name.startswith("judged") else rows).to(column.device)]
        for name, column in joined.items()
    }


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
