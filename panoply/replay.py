"""The replay: what is remembered of steps, in tensors made once, from which transitions are drawn.

`Memory` is what a `replay` part returns; `Uniform` the memory of `replay.uniform`, `Replay` the tensors in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from panoply.experience import TERMINATED, TRUNCATED, Experience
from panoply.policies.heads import Bounds, Head
from panoply.rollout.stepping import StepBuffer
from panoply.transitions import Chunk, Transitions, joined
from panoply.worlds.control.world import Box, Space

MASKS = {"legal": "legal", "next_legal": "legal_after"}
"""What could be done at s and at s′, in worlds that say so, and where a buffer has it."""


class Rhythm(NamedTuple):
    """When an agent learns from what is remembered."""

    alone: int
    """First steps of the run that learn from logged data alone, before the policy acts."""
    a_step: int
    """Updates in a step of the run."""
    updates: int
    """Updates for every so many steps of each environment:"""
    every: int
    first: int = 1
    """The first step of each environment after which there are any."""
    spread: bool = False
    """Whether they come evenly in between, and not all at once."""

    def due(self, written: int) -> int:
        """How many updates are due when so many steps of each environment have been written."""
        if self.spread:
            return written * self.updates // self.every - (written - 1) * self.updates // self.every
        return self.updates if written >= self.first and written % self.every == 0 else 0


class Replay:
    """The last `size` steps (of all environments together), the oldest overwritten first, on the device of the weights.

    Drawn with n steps, a transition earns Σ_{i<k} γ^i·r_{t+i} of the k ≤ n steps that its episode went on for (or that
    have been written so far) and then counts on γ^k·V of what was seen next: nothing where it terminated, all of it
    where it was truncated. Drawn in chunks, it brings the steps that follow it, up to the end of its episode.
    """

    def __init__(
        self,
        observation: Space,
        action: Space,
        head: Head,
        *,
        size: int,
        envs: int = 1,
        steps: int = 1,
        chunk: int = 1,
        gamma: float,
        scale: float = 1.0,
        device: torch.device | str = "cpu",
    ):
        self.device = torch.device(device)
        self.head, self.envs, self.gamma, self.scale = head, envs, gamma, scale
        self.steps, self.chunk = steps, chunk
        self.room = max(1, size // envs)
        self.experts = 0.0
        """Share of every draw that is of an expert's steps, where the data says which those are."""
        self._theirs = torch.zeros(0, dtype=torch.long)
        self.written = 0
        """Steps of each environment since the beginning."""
        seen = torch.float32 if isinstance(observation, Box) else torch.int64
        self._continuous = isinstance(action, Box)
        self._bounds = Bounds(action) if isinstance(action, Box) else None
        act_shape = (action.size,) if isinstance(action, Box) else action.shape
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "observation": (observation.shape, seen),
            "action": (act_shape, torch.float32 if self._continuous else torch.int64),
            "reward": ((), torch.float32),
            "end": ((), torch.int64),
            "next_observation": (observation.shape, seen),
        }
        self._columns: dict[str, Tensor] = {}
        self._lines: dict[str, NDArray[Any] | _Lines] = {}
        self._flat: dict[str, Tensor] = {}
        for name, (shape, dtype) in shapes.items():
            self._make(name, shape, dtype)
        self.more: dict[str, Tensor] = {}
        """Other numbers of every transition, where losses annotate them."""
        self._powers = gamma ** torch.arange(steps + 1, dtype=torch.float32, device=self.device)

    def _make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        column = torch.zeros((self.room, self.envs, *shape), dtype=dtype, device=self.device)
        self._columns[name], self._flat[name] = column, column.flatten(0, 1)
        self._lines[name] = column.numpy() if self.device.type == "cpu" else _Lines(column)

    def _make_masks(self, actions: int) -> None:
        """Make room for masks of legal actions: the world has turned out to give some."""
        for name in MASKS:
            if name not in self._columns:
                self._make(name, (actions,), torch.bool)

    def __len__(self) -> int:
        """Transitions that can be drawn."""
        return min(self.written, self.room) * self.envs

    # -------------------------------------------------------------- writing

    def add(self, buffer: StepBuffer) -> None:
        """The step that was just written."""
        at, into = self.written % self.room, self._lines
        into["observation"][at] = buffer.latest("observation")
        acted = buffer.latest("acted")
        into["action"][at] = self._bounds.units(acted) if self._bounds is not None else acted
        into["reward"][at] = self.scale * buffer.latest("reward")
        terminated, truncated = buffer.latest("terminated"), buffer.latest("truncated")
        into["end"][at] = TERMINATED * terminated + TRUNCATED * (truncated & ~terminated)
        into["next_observation"][at] = buffer.latest("after")
        if buffer.has("legal"):
            self._make_masks(buffer.latest("legal").shape[-1])
            for name, written in MASKS.items():
                into[name][at] = buffer.latest(written)
        self.written += 1

    @torch.no_grad()
    def fill(self, experience: Experience, reward: str = "signal:reward") -> None:
        """Write the steps of some experience that learn; episodes stand one after the other."""
        if "train" in experience:
            experience = experience.take(experience["train"])
        columns = {
            "observation": experience.looked_up("observation"),
            "action": self.head.unit(experience["action"]) if self._continuous else experience["action"],
            "reward": self.scale * experience[reward],
            "end": _closed(experience),
            "next_observation": experience.looked_up("observation", by="next"),
        }
        if "legal" in experience.context:
            columns["legal"] = experience.looked_up("legal")
            columns["next_legal"] = experience.looked_up("legal", by="next")
            self._make_masks(columns["legal"].shape[-1])
        for name, column in columns.items():
            self._flat[name][: len(experience)] = column
        if "expert" in experience:
            self.more["expert"] = experience["expert"].to(self.device)
            self._theirs = experience["expert"].nonzero()[:, 0].cpu()
        self.written = len(experience)

    # -------------------------------------------------------------- drawing

    def draw(self, count: int, generator: torch.Generator) -> Transitions:
        """Rows drawn uniformly, with replacement; as many of an expert's as are wanted."""
        rows = torch.randint(len(self), (count,), generator=generator)
        if self.experts:
            theirs, some = self._theirs, round(self.experts * count)
            rows[:some] = theirs[torch.randint(len(theirs), (some,), generator=generator)]
        return self.rows(rows)

    def rows(self, rows: Tensor) -> Transitions:
        """The transitions at some places; a place is step · environments + environment."""
        flat, rows = self._flat, rows.to(self.device)
        if self.steps == 1:
            last, reward = rows, flat["reward"][rows]
            discount = self.gamma * (flat["end"][rows] != TERMINATED)
        else:
            last, reward, discount = self._several(rows)
        return Transitions(
            flat["observation"].index_select(0, rows),
            flat["action"].index_select(0, rows),
            reward,
            discount,
            flat["next_observation"].index_select(0, last),
            {name: column[rows] for name, column in self.more.items()},
            flat["legal"][rows] if "legal" in flat else None,
            flat["next_legal"][last] if "next_legal" in flat else None,
            self._chunk(rows) if self.chunk > 1 else None,
        )

    def episodes(self) -> Tensor:
        """A number for each transition's episode, of a replay that was filled with whole ones."""
        closed = self._flat["end"][: len(self)] != 0
        return closed.cumsum(0) - closed.long()

    def _window(self, rows: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Places of the steps from each row on, [rows, steps], and which of them are written and of its episode."""
        step, env = rows // self.envs, rows % self.envs
        at = (step[:, None] + torch.arange(steps, device=self.device)) % self.room
        window = at * self.envs + env[:, None]
        newest = (self.written - 1) % self.room
        closing = (self._flat["end"][window] != 0) | (at == newest)
        return window, closing.cumsum(1) - closing.long() == 0

    def _several(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The last row of each n-step window, what was earned in it, and the weight of what comes after."""
        window, counted = self._window(rows, self.steps)
        length = counted.sum(1)
        last = window.gather(1, length[:, None] - 1)[:, 0]
        reward = (self._flat["reward"][window] * self._powers[:-1] * counted).sum(1)
        return last, reward, self._powers[length] * (self._flat["end"][last] != TERMINATED)

    def _chunk(self, rows: Tensor) -> Chunk:
        flat, (window, inside) = self._flat, self._window(rows, self.chunk)
        last = window.gather(1, inside.sum(1, keepdim=True) - 1)
        at = torch.where(inside, window, last)
        return Chunk(
            flat["observation"][at],
            flat["action"][at],
            flat["reward"][at] * inside,
            self.gamma * (flat["end"][at] != TERMINATED),
            flat["next_observation"][at],
            inside,
            flat["next_legal"][at] if "next_legal" in flat else None,
        )

    # -------------------------------------------------------------- saving

    def state(self) -> dict[str, Tensor]:
        filled = min(self.written, self.room)
        kept = {f"replay:{name}": column[:filled] for name, column in self._columns.items()}
        return {**kept, "replay:written": torch.tensor(self.written)}

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        self.written = int(named["replay:written"])
        if "replay:legal" in named:
            self._make_masks(named["replay:legal"].shape[-1])
        for name, column in self._columns.items():
            kept = named[f"replay:{name}"]
            column[: len(kept)] = kept


class Mixture:
    """Logged data and own experience as one replay; what is written and saved is the latter's.

    share   of logged rows in every batch; none: every row of both is as likely as any other
    """

    def __init__(self, logged: Replay, own: Replay, share: float | None = None):
        self.logged, self.own, self.share = logged, own, share
        self.envs, self.gamma, self.more = own.envs, own.gamma, own.more
        self.add, self.state, self.load_state = own.add, own.state, own.load_state

    @property
    def written(self) -> int:
        return self.own.written

    def __len__(self) -> int:
        return len(self.logged) + len(self.own)

    def draw(self, count: int, generator: torch.Generator) -> Transitions:
        if not len(self.own):
            return self.logged.draw(count, generator)
        if self.share is None:
            place = torch.randint(len(self), (count,), generator=generator)
            given = place < len(self.logged)
            return joined(self.logged.rows(place[given]), self.own.rows(place[~given] - len(self.logged)))
        given_rows = round(self.share * count)
        if given_rows in (0, count):
            return (self.logged if given_rows else self.own).draw(count, generator)
        return joined(self.logged.draw(given_rows, generator), self.own.draw(count - given_rows, generator))


class Memory(Protocol):
    """What a `replay` part makes, called with the policy and the run's seed."""

    @property
    def written(self) -> int:
        """Steps of each environment so far."""

    def __len__(self) -> int:
        """What can be drawn."""

    def begin(self, envs: int, most: int) -> None:
        """Before the policy acts: in how many environments it does, and how many steps the run may take in all."""

    def add(self, rows: StepBuffer | Experience) -> None:
        """The step that was just taken, or logged data, which comes once."""

    def draw(self, count: int, generator: torch.Generator) -> Transitions: ...

    def annotate(self, columns: Callable[[Replay], Mapping[str, Tensor]]) -> None:
        """Add columns of all that was logged, for losses that compute some (`annotate` of `@part`)."""

    def state(self) -> dict[str, Tensor]:
        """What was written, under names that begin with `replay:`."""

    def load_state(self, named: Mapping[str, Tensor]) -> None: ...


class Uniform:
    """Every remembered step is as likely as any other; of logged data and own steps, each has its share.

    empty     makes a replay of a size, for so many environments
    size      own steps that are kept at most
    share     of logged rows in every draw, where there are own ones too (see `Mixture`)
    experts   share of a draw of logged rows that is of an expert's
    """

    def __init__(
        self, empty: Callable[[int, int], Replay], size: int, share: float | None = None, experts: float = 0.0
    ):
        self.empty, self.size, self.share, self.experts = empty, size, share, experts
        self._own: Replay | None = None
        self.hold(empty(1, 1))

    def hold(self, held: Replay | Mixture) -> None:
        self.held = held
        self.draw, self.state, self.load_state = held.draw, held.state, held.load_state

    @property
    def written(self) -> int:
        return self.held.written

    def __len__(self) -> int:
        return len(self.held)

    def begin(self, envs: int, most: int) -> None:
        self._own = self.empty(min(self.size, most), envs)
        self.hold(self._own)

    def add(self, rows: StepBuffer | Experience) -> None:
        if not isinstance(rows, Experience):
            self.held.add(rows)
            return
        logged = self.empty(len(rows), 1)
        logged.fill(rows)
        logged.experts = self.experts
        self.hold(logged if self._own is None else Mixture(logged, self._own, self.share))

    def annotate(self, columns: Callable[[Replay], Mapping[str, Tensor]]) -> None:
        assert isinstance(self.held, Replay)
        self.held.more |= columns(self.held)


class _Lines:
    """Lines of a tensor on a GPU, written from arrays; on the host, NumPy's own way costs a tenth."""

    def __init__(self, column: Tensor):
        self.column = column

    def __setitem__(self, at: int, line: NDArray[Any]) -> None:
        self.column[at] = torch.as_tensor(line)


def _closed(experience: Experience) -> Tensor:
    """The column `end` of each row; an episode that is still open where the data ends counts as truncated there."""
    end = experience["end"].clone()
    end[experience.by("episode").is_last() & (end == 0)] = TRUNCATED
    return end
