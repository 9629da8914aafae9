"""The learner: one mini-batch, one optimiser step. It sees terms and counts, and is blind to methods.

Every sum is weighted by numbers computed once on the whole mini-batch, so any split into micro-batches gives the same
gradient; micro-batches never cut a term's unit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from panoply.batch import LOG_RATIO_LIMIT, Batch
from panoply.errors import PanoplyError
from panoply.experience import Experience, Segments, Table, Unit
from panoply.parts import Part
from panoply.regimes import Method
from panoply.slots.schedule.schedules import at

DESCENT = {"surrogate": -1.0, "regularise": 1.0, "loss": 1.0}
"""Surrogates are ascended, everything else descended."""


class Diverged(PanoplyError):
    """The loss, the gradient or the policy's movement is not a sane number; the weights were left as they were."""


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
    def __init__(self, policy: Scorer, method: Method, *, total_steps: int, micro_tokens: int):
        self.policy = policy
        self.terms = method.terms()
        self.reduce: Part = method.slots()["reduce"]  # type: ignore[assignment]
        self.update: Part = method.slots()["update"]  # type: ignore[assignment]
        self.needs = frozenset(
            n for t in self.terms for n in t.needs() if not n.startswith(("logp@", "world:"))
        )
        self.total_steps = total_steps
        self.micro_tokens = micro_tokens
        self.settings = self.update.settings()
        self.parameters = {n: p for n, p in policy.named_parameters() if p.requires_grad}
        self.optimiser: torch.optim.Optimizer = self.update(self.parameters.values())

    def step(self, experience: Experience, step: int) -> dict[str, float]:
        """Move the weights once by the gradient on this mini-batch; returns metrics."""
        metrics = self._accumulate(experience, step)
        metrics["gradient_norm"] = self._clip_gradient()
        _guard(metrics)
        metrics["lr"] = self._set_rate(step)
        self.optimiser.step()
        return metrics

    def gradient(self, experience: Experience, step: int = 0) -> dict[str, Tensor]:
        """The gradient of the loss on a mini-batch by parameter name, without moving (for tests and probes)."""
        self._accumulate(experience, step)
        return {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in self.parameters.items()
        }

    def _accumulate(self, experience: Experience, step: int) -> dict[str, float]:
        active = self._active(step)
        rows = self._with_weights(experience, active)
        prepared = self._prepare(rows, active)
        totals = _Totals()
        self.optimiser.zero_grad(set_to_none=True)
        for micro in self.micro_batches(self._awake(rows, active)):
            batch = Batch(micro, self.policy.score(micro, self.needs), prepared)
            loss = self._loss(batch, active, totals)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        return totals.means()

    # -------------------------------------------------------------- the objective

    def _active(self, step: int) -> list[_Active]:
        """The terms whose weight is not 0 at this step."""
        weights = [at(t.settings().get("weight", 1.0), step, self.total_steps) for t in self.terms]
        return [
            _Active(t, f"weight:{i}", w)
            for i, (t, w) in enumerate(zip(self.terms, weights, strict=True))
            if w
        ]

    def _with_weights(self, experience: Experience, active: Sequence[_Active]) -> Experience:
        """Add each term's weights, normalised once over the mini-batch by its stream's own count."""
        columns: dict[str, Tensor] = {}
        for term, column, _ in active:
            mask = experience.stream(term.info.stream)
            if term.info.unit == "decision":
                columns[column] = self.reduce(experience, mask)
                if term.info.slot == "surrogate" and "weight" in experience:
                    columns[column] = columns[column] * experience["weight"]
            else:
                columns[column] = mask.float() / max(1, _units(experience.take(mask), term.info.unit))
        return experience.with_columns(**columns)

    def _loss(self, batch: Batch, active: Sequence[_Active], totals: _Totals) -> Tensor:
        """The weighted sum of the terms, each on the decisions of its own stream."""
        loss = next(iter(batch.now.values())).new_zeros(())
        for term, column, weight in active:
            view = batch.of_stream(term.info.stream)
            if _units(view.experience, term.info.unit) == 0:
                continue
            values, stats = term(view)
            shares = view[column] if term.info.unit == "decision" else view[column][0]
            term_loss = (values * shares.to(values.dtype)).sum()
            loss = loss + DESCENT[term.info.slot] * weight * term_loss
            totals.add(term, float(term_loss.detach()), stats)
        totals.loss += float(loss.detach())
        if "entropy" in batch.now:
            totals.add_stats({"entropy": batch.now["entropy"].detach()})
        return loss

    def _prepare(self, rows: Experience, active: Sequence[_Active]) -> dict[str, Any]:
        """Detached numbers of the whole mini-batch at current weights, for terms that ask for them."""
        asking = [term for term, _, _ in active if term.info.prepare is not None]
        if not asking:
            return {}
        batch = Batch(rows, self._score(rows))
        found: dict[str, Any] = {}
        with torch.no_grad():
            for term in asking:
                assert term.info.prepare is not None
                view = batch.of_stream(term.info.stream)
                found[term.info.name] = dict(term.info.prepare(view, **term.settings()))
        return found

    @torch.no_grad()
    def _score(self, rows: Experience) -> dict[str, Tensor]:
        """What the current policy says of all rows, without gradient, a micro-batch at a time."""
        numbered = rows.with_columns(row=torch.arange(len(rows), device=rows["action"].device))
        found: dict[str, list[Tensor]] = defaultdict(list)
        for micro in self.micro_batches(numbered):
            for name, column in {**self.policy.score(micro, self.needs), "row": micro["row"]}.items():
                found[name].append(column)
        joined = {name: torch.cat(columns) for name, columns in found.items()}
        order = joined.pop("row").argsort()
        return {name: column[order.to(column.device)] for name, column in joined.items()}

    # -------------------------------------------------------------- splitting

    def _awake(self, rows: Experience, active: Sequence[_Active]) -> Experience:
        """Leave out units on which no term has a gradient (every advantage exactly 0): same gradient, less work."""
        if any(term.info.idle is None for term, _, _ in active):
            return rows
        awake = torch.zeros(len(rows), dtype=torch.bool, device=rows["action"].device)
        for term, _, _ in active:
            awake |= (rows[str(term.info.idle)] != 0) & rows.stream(term.info.stream)
        units = Segments(unit_labels(rows, self.terms))
        keep = units.rows(units.sum(awake) > 0)
        return rows if bool(keep.all()) else rows.take(keep)

    def micro_batches(self, rows: Experience) -> Iterator[Experience]:
        """Whole units, in order, up to `micro_tokens` context tokens at a time (one unit may exceed it)."""
        if len(rows) == 0:
            return
        if "tokens" not in rows.context:
            yield rows
            return
        tokens = rows.context.ragged("tokens").lengths
        if int(tokens.sum()) <= self.micro_tokens:
            yield rows
            return
        label = unit_labels(rows, self.terms)
        sequences = rows.by("context")
        cost = torch.zeros(int(label.max()) + 1, dtype=torch.long, device=label.device)
        cost = cost.index_add(0, sequences.first(label), tokens[sequences.keys])
        bins = torch.tensor(_fill(cost.tolist(), self.micro_tokens), device=label.device)[label]
        for b in range(int(bins.max()) + 1):
            yield rows.take(bins == b)

    def minibatches(self, experience: Experience, generator: torch.Generator) -> Iterator[Experience]:
        """Every epoch, the units in a fresh order, in `minibatches` parts of about equal number."""
        if len(experience) == 0:
            return
        for _ in range(self.settings["epochs"]):
            if self.settings["minibatches"] == 1:
                yield experience
                continue
            label = unit_labels(experience, self.terms)
            units = int(label.max()) + 1
            place = torch.randperm(units, generator=generator).to(label.device)
            part = place[label] * self.settings["minibatches"] // units
            for i in range(self.settings["minibatches"]):
                if bool((part == i).any()):
                    yield experience.take(part == i)

    # -------------------------------------------------------------- moving

    def _clip_gradient(self) -> float:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not gradients:
            return 0.0
        norm = torch.nn.utils.get_total_norm(gradients)
        limit = self.settings["clip"]
        if limit > 0:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), limit, norm)
        return float(norm)

    def _set_rate(self, step: int) -> float:
        rate = self.settings["lr"] * at(self.settings["schedule"], step, self.total_steps)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        return float(rate)

    # -------------------------------------------------------------- saving

    def state(self) -> dict[str, Tensor]:
        """The optimiser's state as plain named tensors."""
        named: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            for key, value in self.optimiser.state.get(parameter, {}).items():
                named[f"{name}:{key}"] = torch.as_tensor(value).detach()
        return named

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        for full, value in named.items():
            name, _, key = full.rpartition(":")
            parameter = self.parameters[name]
            fused = self.optimiser.defaults.get("fused")  # whose scalars live beside the parameter
            device = parameter.device if value.dim() or fused else value.device
            self.optimiser.state[parameter][key] = value.clone().to(device)


def mean_metrics(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the steps that have it."""
    names = dict.fromkeys(name for metrics in found for name in metrics)
    having = {name: [m[name] for m in found if name in m] for name in names}
    return {name: sum(values) / len(values) for name, values in having.items()}


class _Totals:
    """Metrics summed over micro-batches: means over rows, or maxima where the name ends in `/max`."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.values: dict[str, float] = defaultdict(float)
        self.sums: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)
        self.maxima: dict[str, float] = {}

    def add(self, term: Part, value: float, stats: Mapping[str, Tensor]) -> None:
        self.values[term.info.name] += value
        self.add_stats(stats)

    def add_stats(self, stats: Mapping[str, Tensor]) -> None:
        for name, column in stats.items():
            if len(column) == 0:
                continue
            if name.endswith("/max"):
                name = name.removesuffix("/max")
                self.maxima[name] = max(self.maxima.get(name, -math.inf), float(column.max()))
            else:
                self.sums[name] += float(column.double().sum())
                self.counts[name] += len(column)

    def means(self) -> dict[str, float]:
        means = {name: total / self.counts[name] for name, total in self.sums.items()}
        return {"loss": self.loss, **self.values, **means, **self.maxima}


def _units(experience: Experience, unit: Unit) -> int:
    """How many units there are."""
    if unit == "decision":
        return len(experience)
    if unit == "pair":
        return experience.pairs.rows if experience.pairs is not None else 0
    return len(experience.by(unit))


def unit_labels(rows: Experience, terms: Sequence[Part]) -> Tensor:
    """A label per decision, 0…n−1, of what must stay together: the largest unit of the terms.

    At least a context row, since cutting one only repeats work; episodes joined by a pair stay together too.
    """
    units = {t.info.unit for t in terms}
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


def _fill(costs: Sequence[int], limit: int) -> list[int]:
    """First-come bins: the bin of each item, a new one whenever the limit would be passed."""
    bins, current, used = [], 0, 0
    for cost in costs:
        if used and used + cost > limit:
            current, used = current + 1, 0
        bins.append(current)
        used += cost
    return bins


def _guard(metrics: Mapping[str, float]) -> None:
    for name in ("loss", "gradient_norm"):
        if not math.isfinite(metrics[name]):
            raise Diverged(f"Stopped: {name} is {metrics[name]}; the weights of the last good step are kept.")
    if metrics.get("ratio_max", 1.0) >= math.exp(LOG_RATIO_LIMIT - 1e-3):
        raise Diverged(
            "Stopped: the policy has moved e²⁰-fold on some decision; the last good weights are kept."
        )
