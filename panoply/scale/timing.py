"""How long a step takes on so many GPUs: a simulation of its events, by rates of the machine and lengths of answers.

An engine writes one token of each of its answers at a time. That takes the reading of all weights and of the keys and
values that are held, and the arithmetic of its rows:

    seconds of a token = (weights + kv · context) / bandwidth + 2 · parameters · rows / arithmetic + launches

Answers are of very different lengths, so engines empty, and the longest answer is waited for. `sync` samples on all
GPUs and then learns on all. A constant lag samples the next batch while the last is learned from, with engines that are
drained before they get new weights. In flight they are never drained: batch b begins as soon as step b − lag is done.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from panoply.seeds import stable_hash

FEW = 64
"""Engines that are simulated where there are more: all draw from the same lengths."""
BATCHES = 8
"""Simulated, of which the first half is the beginning and does not count."""


@dataclass(frozen=True)
class Card:
    """A GPU: bytes a second, operations a second, bytes, and what is reached of them."""

    bandwidth: float = 4.3e12
    arithmetic: float = 790e12
    memory: float = 141e9
    decoding: float = 0.6
    """Of the time in which the bytes could be read."""
    learning: float = 0.5
    network: float = 8.25e9
    """Bytes a second that weights travel with from machine to machine."""
    token: float = 0.0005
    """Seconds of a token in which nothing is read: launches and the choice of tokens."""
    driver: float = 2.0
    """Seconds of a step in which all wait for what only one process does."""


@dataclass(frozen=True)
class Load:
    """What a step has to do."""

    parameters: float
    kv: float
    """Bytes of keys and values a token."""
    mixing: float
    """Layers × width: what attention costs a token of context."""
    answers: int
    mean: float
    """Tokens of an answer, and at most."""
    most: int
    prompt: int = 256
    """Tokens before an answer."""
    width: float = 2
    """Bytes of a weight."""
    recomputed: bool = False
    parallel: int = 1
    """GPUs that hold one engine together."""
    spread: float = 1.0
    """Of the logarithm of lengths; 0: all are the same."""

    def lengths(self, count: int, batch: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Lengths of answers: lognormal, cut off at the most, with the mean that is named before the cut."""
        draw = np.random.default_rng(stable_hash("lengths", count, batch) % 2**32)
        found = np.exp(draw.normal(math.log(self.mean) - self.spread**2 / 2, self.spread, count))
        return np.clip(np.rint(found), 1, self.most)


@dataclass(frozen=True)
class Expected:
    """Seconds of a step, and what they consist of; some of it happens at the same time."""

    seconds: float
    sampling: float
    learning: float
    publishing: float
    idle: float
    """Share of the step in which learners wait."""


def expected(
    load: Load, card: Card, learners: int, samplers: int, staleness: int = 0, inflight: bool = False
) -> Expected:
    """A step on so many GPUs; with 0 samplers, or 0 learners, all do both by turns."""
    learn = learning(load, card, learners or samplers)
    publish = load.parameters * load.width / card.network
    engines = max(1, (samplers or learners) // load.parallel)
    alone = _drained(load, card, engines)
    if not staleness:
        whole = alone + learn + publish + card.driver
    elif not inflight:
        whole = max(alone + publish, learn + card.driver)
    else:
        whole = _flowing(load, card, engines, learn + card.driver, publish, staleness)
    return Expected(whole, alone, learn, publish, max(0.0, 1 - learn / whole))


def learning(load: Load, card: Card, learners: int) -> float:
    """Seconds of an update: 6 operations a weight and token (8 where blocks are computed again), attention, and one
    exchange of gradients and weights, 6 bytes a parameter, where there is anyone to exchange with."""
    lengths = load.prompt + load.lengths(load.answers, 0)
    passes = 8 if load.recomputed else 6
    work = passes * (load.parameters * lengths.sum() + load.mixing * (lengths**2).sum())
    exchange = 6 * load.parameters / card.network if learners > 1 else 0.0
    return float(work / (learners * card.arithmetic * card.learning) + exchange)


class _Engine:
    """Some rows that grow by a token at a time. Rows end in the order of the tick at which they will be complete."""

    def __init__(self, load: Load, card: Card):
        rate = card.bandwidth * card.decoding
        self.base = load.parameters * load.width / load.parallel / rate + card.token
        self.by_context = load.kv / load.parallel / rate
        self.by_row = 2 * load.parameters / (load.parallel * card.arithmetic * card.decoding)
        room = load.parallel * 0.9 * card.memory - load.parameters * load.width
        self.slots = max(1, int(room / max(1e-9, load.kv * load.mean)))
        self.now, self.tick, self.context, self.prompt = 0.0, 0.0, 0.0, load.prompt
        self.rows: list[tuple[float, int, float]] = []
        """When each ends, in ticks; its batch; and at which tick it began."""
        self.waiting: list[tuple[float, int]] = []
        self.left: dict[int, int] = defaultdict(int)

    def take(self, batch: int, lengths: Sequence[float]) -> None:
        self.waiting += [(length, batch) for length in lengths]
        self.left[batch] += len(lengths)
        self._fill()

    def _fill(self) -> None:
        while self.waiting and len(self.rows) < self.slots:
            length, batch = self.waiting.pop(0)
            heapq.heappush(self.rows, (self.tick + length, batch, self.tick))
            self.context += self.prompt

    def seconds(self, ticks: float) -> float:
        """Of the next ticks, in which no row ends."""
        rows = len(self.rows)
        each = self.base + self.by_row * rows + self.by_context * (self.context + rows * ticks / 2)
        return ticks * each

    def move(self, ticks: float) -> None:
        self.now += self.seconds(ticks)
        self.tick += ticks
        self.context += len(self.rows) * ticks

    def end_one(self) -> None:
        ends, batch, began = heapq.heappop(self.rows)
        self.context -= ends - began + self.prompt
        self.left[batch] -= 1
        self._fill()

    def until(self, batch: int, takes: tuple[float, int, Sequence[float]] | None = None) -> float:
        """Go on until the rows of a batch are done; another batch comes at a moment on the way, or after it."""
        while self.left[batch]:
            if takes is not None and self.now >= takes[0]:
                self.take(takes[1], takes[2])
                takes = None
            ticks = self.rows[0][0] - self.tick
            if takes is not None and self.now + self.seconds(ticks) > takes[0]:
                self.move(max(1.0, self._ticks(takes[0] - self.now)))
                self.now = max(self.now, takes[0])
                continue
            self.move(ticks)
            self.end_one()
        if takes is not None:
            self.later = takes
        return self.now

    later: tuple[float, int, Sequence[float]] | None = None

    def _ticks(self, seconds: float) -> float:
        """How many ticks fit into so many seconds: a root of what `seconds` says."""
        rows = len(self.rows)
        a, b = self.by_context * rows / 2, self.base + self.by_row * rows + self.by_context * self.context
        return (math.sqrt(b * b + 4 * a * seconds) - b) / (2 * a) if a else seconds / b


def _drained(load: Load, card: Card, engines: int) -> float:
    """Seconds of sampling one batch with engines that begin and end empty; the mean of some batches."""
    took = []
    for batch in range(4):
        shares = _shares(load, engines, batch)
        found = []
        for share in shares:
            engine = _Engine(load, card)
            engine.take(0, share)
            found.append(engine.until(0))
        took.append(max(found))
    return sum(took) / len(took)


def _flowing(load: Load, card: Card, engines: int, learn: float, publish: float, ahead: int) -> float:
    """Seconds a step where engines get the next batch as soon as the weights are young enough."""
    held = [_Engine(load, card) for _ in range(min(engines, FEW))]
    for batch in range(ahead + 1):
        for engine, share in zip(held, _shares(load, engines, batch), strict=True):
            engine.take(batch, share)
    free, done, comes = 0.0, [], None
    for batch in range(BATCHES + 2 * ahead):
        coming = _shares(load, engines, batch + ahead) if comes is not None else [()] * len(held)
        ends = []
        for engine, share in zip(held, coming, strict=True):
            ends.append(engine.until(batch, None if comes is None else (comes, batch + ahead, share)))
        for engine in held:  # who was done before the next batch came gets it when it comes
            if engine.later is not None:
                engine.now = max(engine.now, engine.later[0]) if not engine.rows else engine.now
                engine.take(engine.later[1], engine.later[2])
                engine.later = None
        free = max(free, max(ends)) + learn
        done.append(free)
        comes = free + publish
        for engine in held:
            engine.now += publish if engine.rows else 0.0
    half = len(done) // 2
    return (done[-1] - done[half - 1]) / (len(done) - half)


def _shares(load: Load, engines: int, batch: int) -> list[Sequence[float]]:
    """Lengths of the rows that each engine gets of a batch; of more than `FEW` engines those of the first."""
    lengths = load.lengths(load.answers, batch)
    return [list(lengths[e::engines]) for e in range(min(engines, FEW))]
