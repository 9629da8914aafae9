"""The learner: one mini-batch, one optimiser step. It sees terms and counts, and is blind to methods.

Every sum is weighted by numbers computed once on the whole mini-batch, so any split into micro-batches gives the same
gradient; micro-batches never cut a term's unit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from panoply.batch import LOG_RATIO_LIMIT, Batch
from panoply.errors import PanoplyError
from panoply.experience import Experience
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
        rows = self._with_weights(experience)
        prepared = self._prepare(rows)
        totals = _Totals()
        self.optimiser.zero_grad(set_to_none=True)
        for micro in self.micro_batches(self._awake(rows)):
            loss = self._loss(Batch(micro, self.policy.score(micro, self.needs), prepared), step, totals)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        return totals.means()

    # -------------------------------------------------------------- the objective

    def _with_weights(self, experience: Experience) -> Experience:
        """Add each decision-unit term's weights, normalised once over the mini-batch by its stream's own count."""
        columns = {
            f"weight:{i}": self.reduce(experience, experience.stream(t.info.stream))
            for i, t in enumerate(self.terms)
            if t.info.unit == "decision"
        }
        for i, term in enumerate(self.terms):
            if term.info.unit != "decision":
                share = 1.0 / max(1, _units(experience, term))
                columns[f"weight:{i}"] = torch.full(
                    (len(experience),), share, device=experience["action"].device
                )
        return experience.with_columns(**columns)

    def _loss(self, batch: Batch, step: int, totals: _Totals) -> Tensor:
        loss = batch.now["logp"].new_zeros(())
        for i, term in enumerate(self.terms):
            weight = at(term.settings().get("weight", 1.0), step, self.total_steps)
            if weight == 0:
                continue
            values, stats = term(batch)
            shares = batch[f"weight:{i}"]
            if term.info.unit != "decision":
                shares = shares[:1].expand(len(values))
            term_loss = (values * shares.to(values.dtype)).sum()
            loss = loss + DESCENT[term.info.slot] * weight * term_loss
            counted = shares > 0
            totals.add(term, float(term_loss.detach()), {k: v[counted] for k, v in stats.items()})
        totals.loss += float(loss.detach())
        if "entropy" in batch.now:
            totals.add_stats({"entropy": batch.now["entropy"].detach()})
        return loss

    def _prepare(self, rows: Experience) -> dict[str, Any]:
        """Detached numbers of the whole mini-batch at current weights, for terms that ask for them."""
        asking = [t for t in self.terms if t.info.prepare is not None]
        if not asking:
            return {}
        with torch.no_grad():
            batch = Batch(rows, self.policy.score(rows, self.needs))
            found: dict[str, Any] = {}
            for term in asking:
                assert term.info.prepare is not None
                found[term.info.name] = dict(term.info.prepare(batch, **term.settings()))
        return found

    # -------------------------------------------------------------- splitting

    def _awake(self, rows: Experience) -> Experience:
        """Leave out sequences on which no term has a gradient (every advantage exactly 0): same gradient, less work."""
        active = [t for t in self.terms if at(t.settings().get("weight", 1.0), 0, 1) != 0 or _scheduled(t)]
        if any(t.info.idle is None for t in active):
            return rows
        awake = torch.zeros(len(rows), dtype=torch.bool, device=rows["action"].device)
        for term in active:
            awake |= (rows[str(term.info.idle)] != 0) & rows.stream(term.info.stream)
        sequence = rows.by("context")
        keep = sequence.rows(sequence.sum(awake.long()) > 0)
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
            device = parameter.device if value.dim() else value.device
            self.optimiser.state[parameter][key] = value.clone().to(device)


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


def _scheduled(term: Part) -> bool:
    return isinstance(term.settings().get("weight"), Part)


def _units(experience: Experience, term: Part) -> int:
    """How many of a term's units the mini-batch holds."""
    if term.info.unit == "pair":
        return experience.pairs.rows if experience.pairs is not None else 0
    mask = experience.stream(term.info.stream)
    return len(torch.unique(experience[term.info.unit][mask]))


COARSER = ("decision", "turn", "episode", "group")


def unit_labels(rows: Experience, terms: Sequence[Part]) -> Tensor:
    """A label per decision, 0…n−1 in order of first appearance, of the unit that must stay together.

    At least a context row, since cutting one only repeats work; episodes joined by a pair stay together.
    """
    units = {t.info.unit for t in terms}
    key = "group" if "group" in units else "episode" if units & {"episode", "turn", "pair"} else "context"
    label = rows.by(key).index
    if "pair" in units and rows.pairs is not None:
        label = _join_pairs(rows, label)
    sequences = rows.by("context")
    label = sequences.rows(sequences.min(label))
    _, first_seen = torch.unique(label, return_inverse=True)
    return first_seen


def _join_pairs(rows: Experience, label: Tensor) -> Tensor:
    """Give episodes that are connected by pairs one label: the smallest, spread until nothing changes."""
    assert rows.pairs is not None
    episodes = rows.by("episode")
    per_episode = episodes.first(label)
    chosen = torch.searchsorted(episodes.keys, rows.pairs.tensor("chosen"))
    rejected = torch.searchsorted(episodes.keys, rows.pairs.tensor("rejected"))
    while True:
        low = torch.minimum(per_episode[chosen], per_episode[rejected])
        joined = per_episode.scatter_reduce(0, chosen, low, "amin").scatter_reduce(0, rejected, low, "amin")
        if torch.equal(joined, per_episode):
            return episodes.rows(joined)
        per_episode = joined


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
    if metrics.get("ratio_max", 1.0) >= math.exp(LOG_RATIO_LIMIT):
        raise Diverged(
            "Stopped: the policy has moved e²⁰-fold on some decision; the last good weights are kept."
        )
