"""Environments stepped side by side: which episode each is in, what a policy does in them, and what is written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from panoply.rollout.games import views
from panoply.seeds import numpy_rng
from panoply.worlds.control.world import Envs, Start

if TYPE_CHECKING:
    from panoply.rollout.control import ControlCollector

Array = NDArray[Any]
Temperature = float | Callable[[Tensor], Tensor]
BLOCK = 64
"""Decisions whose noise is drawn at once."""


class StepBuffer:
    """Arrays [steps, size, …], one a name, that grow where more steps are written than were foreseen."""

    def __init__(self, size: int, steps: int):
        self.size, self.length = size, 0
        self._room = steps
        self._columns: dict[str, Array] = {}

    @classmethod
    def of(cls, columns: dict[str, Array]) -> StepBuffer:
        """What was written elsewhere, [steps, size, …] each."""
        steps, size = next(iter(columns.values())).shape[:2]
        made = cls(size, steps)
        made._columns, made.length = dict(columns), steps
        return made

    def write(self, name: str, values: Array) -> None:
        """A value for every row at the current step."""
        column = self._columns.get(name)
        if column is None:
            column = np.zeros((self._room, *values.shape), dtype=values.dtype)
            self._columns[name] = column
        column[self.length] = values

    def advance(self) -> None:
        """Go on to the next step."""
        self.length += 1

    def make_room(self) -> None:
        """Before a step: more arrays where these are full."""
        if self.length == self._room:
            self._room *= 2
            doubled = {name: np.concatenate([c, np.zeros_like(c)]) for name, c in self._columns.items()}
            self._columns = doubled

    def names(self) -> list[str]:
        return list(self._columns)

    def has(self, name: str) -> bool:
        return name in self._columns

    def latest(self, name: str) -> Array:
        """What was written at the last step."""
        latest: Array = self._columns[name][self.length - 1]
        return latest

    def column(self, name: str) -> Array:
        """What was written, [steps, size, …]."""
        return self._columns[name][: self.length]

    def kept(self) -> dict[str, Array]:
        """Every column with steps and rows in one, of the rows that were `live`, in the order of time."""
        live = self.column("live").reshape(-1)
        found = {}
        for name, column in self._columns.items():
            flat = column[: self.length].reshape(self.length * self.size, *column.shape[2:])
            found[name] = flat if live.all() else flat[live]
        return found


class Episode:
    def __init__(self, number: int, group: int, task: Start):
        self.number, self.group, self.task = number, group, task


class Rows:
    """Environments side by side, and which episode each is in."""

    def __init__(self, collector: ControlCollector, envs: Envs):
        self.collector, self.envs = collector, envs
        size = envs.size
        self.current: list[Episode | None] = [None] * size
        self.seen: list[Episode] = []
        self.live = np.zeros(size, dtype=bool)
        self.episode = np.zeros(size, dtype=np.int64)
        self.turn = np.zeros(size, dtype=np.int64)
        self.earned = np.zeros(size)
        self.past: list[Array | None] = [None] * size
        self.at: Any = None
        self._noise: Array | None = None
        self._fresh = 0
        """Steps for which every row has noise; a new episode draws for its own row alone, so it adds none."""
        self._index = np.arange(size)
        self._views = views(size, collector.world.seats) if "joint" in collector.needs else None
        self.refresh()

    def refresh(self) -> None:
        """Act from here on by what the policy has seen so far and, on a GPU, by a fresh copy of its weights."""
        self._forward, self.head = self.collector.policy.model.on_host()
        self._others = {seat: other.model.numpy() for seat, other in self.collector._others.items()}

    def begin(self, where: Array, episodes: Sequence[Episode]) -> None:
        """Start episodes in some rows."""
        if not episodes:
            return
        self.envs.reset(where, np.array([e.task.seed for e in episodes]))
        for row, episode in zip(where.tolist(), episodes, strict=True):
            self.current[row], self.past[row] = episode, None
            self.episode[row] = episode.number
            self._draw(row, episode, 0)
        self.live[where], self.turn[where], self.earned[where] = True, 0, 0.0
        self.seen += episodes

    def go_on(self, episodes: Sequence[Episode], turn: Array, earned: Array) -> None:
        """Episodes that begin where the environments of all rows stand, after so many turns of others."""
        self.turn[:], self.earned[:], self.live[:] = turn, earned, True
        for row, episode in enumerate(episodes):
            self.current[row], self.episode[row] = episode, episode.number
            self._draw(row, episode, int(turn[row]))
        self.seen += episodes

    def step(
        self, buffer: StepBuffer, temperature: Temperature, limit: int | None = None, blind: bool = False
    ) -> Array | None:
        """Act once in every row and write it down; the rows that are free now, if any are, since their game is over.

        blind   take any action instead of the policy's
        """
        if self._fresh == 0:
            self._refill()
        self._fresh -= 1
        envs, head = self.envs, self.head
        seen, mask, turn = envs.observations, envs.masks, self.turn
        moving = None if envs.acting is None else envs.acting.copy()
        buffer.make_room()
        buffer.write("observation", seen)
        if mask is not None:
            buffer.write("legal", mask)
        if self._views is not None:
            buffer.write("joint", seen[self._views])
        out = self._forward(seen, turn)
        for seat, forward in self._others.items():
            theirs = slice(seat, None, self.collector.world.seats)
            out[theirs] = forward(seen[theirs], turn[theirs])
        assert self._noise is not None
        noise = self._noise[self._index, turn % BLOCK]
        sampled_at = temperature(torch.from_numpy(turn)).numpy() if callable(temperature) else temperature
        action, acted = head.anything(noise, mask) if blind else head.act(out, noise, mask, sampled_at)
        step = envs.step(acted)
        truncated = step.truncated
        if limit is not None:
            truncated = truncated | (turn + 1 >= limit) & ~step.terminated
        self.earned += step.reward
        buffer.write("out", out)
        buffer.write("action", action)
        buffer.write("acted", acted)
        buffer.write("after", envs.observations)
        if self._views is not None:
            buffer.write("joint_after", envs.observations[self._views])
        buffer.write("reward", step.reward)
        buffer.write("terminated", step.terminated)
        buffer.write("truncated", truncated)
        buffer.write("episode", self.episode)
        buffer.write("turn", turn)
        buffer.write("earned", self.earned)
        buffer.write("live", self.live)
        if moving is not None:
            buffer.write("acting", moving)
        for name, signal in step.signals.items():
            buffer.write(f"signal:{name}", signal)
        if envs.masks is not None:
            buffer.write("legal_after", envs.masks)
        buffer.advance()
        self.turn += 1
        ended = (step.terminated | truncated) & self.live
        return self._free(ended) if ended.any() else None

    def _free(self, ended: Array) -> Array:
        """Rows whose episodes have ended live no more; free are those of games in which nobody lives."""
        self.live &= ~ended
        seats = self.collector.world.seats
        over = ended.reshape(-1, seats).any(1) & ~self.live.reshape(-1, seats).any(1)
        return np.repeat(over, seats).nonzero()[0]

    # -------------------------------------------------------------- noise

    def _draw(self, row: int, episode: Episode, turn: int) -> None:
        """The noise of a row's next `BLOCK` decisions."""
        collector = self.collector
        rng = numpy_rng("draw", collector.seed, collector.split, episode.number, turn // BLOCK)
        drawn = collector.policy.head.noise(rng, BLOCK)
        if self._noise is None:
            self._noise = np.zeros((self.envs.size, *drawn.shape), dtype=drawn.dtype)
        self._noise[row] = drawn

    def _refill(self) -> None:
        """Draw for the rows at which a block ends, and count the steps until the next one does."""
        for row in ((self.turn % BLOCK == 0) & (self.turn > 0) & self.live).nonzero()[0].tolist():
            episode = self.current[row]
            assert episode is not None
            self._draw(row, episode, int(self.turn[row]))
        self._fresh = BLOCK - int((self.turn % BLOCK).max())

    # -------------------------------------------------------------- open episodes

    def remember(self, buffer: StepBuffer) -> None:
        """Keep what was done in the episodes that are still open, and forget the others."""
        acted, length = buffer.column("acted"), buffer.length
        for row in range(self.envs.size):
            turn = int(self.turn[row])
            new, past = acted[max(0, length - turn) : length, row], self.past[row]
            self.past[row] = new.copy() if past is None else np.concatenate([past, new])
        self.seen = [episode for episode in self.current if episode is not None]

    def record(self) -> tuple[list[list[int]], Tensor]:
        """The open episodes as JSON and a tensor."""
        past = [p for p in self.past if p is not None]
        facts = [
            [e.number, e.group, e.task.id, e.task.seed, len(p)] for e, p in zip(self.seen, past, strict=True)
        ]
        return facts, torch.from_numpy(np.concatenate(past))

    def replay(self, episodes: Sequence[Episode], lengths: Sequence[int], actions: Array) -> None:
        """Play episodes again up to where they were; rows that are there already are begun last."""
        size, starts = len(episodes), np.cumsum([0, *lengths])
        self.begin(np.arange(size), episodes)
        rows = np.arange(size)
        longest = max(lengths)
        for t in range(longest):
            late = np.array(lengths) >= longest - t  # rows start one after another and arrive together
            if t and (begun := late & (np.array(lengths) == longest - t)).any():
                self.envs.reset(rows[begun], np.array([episodes[r].task.seed for r in rows[begun]]))
            at = [starts[r] + max(0, lengths[r] - (longest - t)) for r in range(size)]
            step = self.envs.step(actions[np.minimum(at, len(actions) - 1)])
            self.earned = np.where(late, self.earned + step.reward, 0.0)
            self.live &= ~(late & (step.terminated | step.truncated))
        for row, episode in enumerate(episodes):
            self.past[row] = actions[starts[row] : starts[row + 1]]
            self.turn[row] = lengths[row]
            self._draw(row, episode, lengths[row])
        fresh = np.array(lengths) == 0
        if fresh.any():
            self.envs.reset(rows[fresh], np.array([episodes[r].task.seed for r in rows[fresh]]))
