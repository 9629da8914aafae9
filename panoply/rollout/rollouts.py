"""What an engine sampled, as flat columns; the recorder that builds them; and the batch that is running."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import OPEN, TERMINATED, TRUNCATED, Column, Ragged, Table
from panoply.rollout import cuts
from panoply.rollout.cuts import Few
from panoply.rollout.sampling import Draw
from panoply.tables import in_order, picked

STOP, LENGTH, CONTEXT = 1, 2, 3
"""Why a turn ended: a stop token or string, its own length limit, or the model's context."""
HELD = 1 << 24
"""Listed ids that may wait on a device."""
PLACES = 1 << 32
"""More than there are positions in a row."""


@dataclass(frozen=True)
class Rollouts:
    """Rows in the order of the requests and, within one, of its seeds. Everything is on the CPU.

    `decisions` has one row a sampled token, ordered by row and position: `context` (the row), `position`,
    `turn`, `action`, `logp`, `end`, and where they apply `temperature`, `allowed`, `cut`, `kept`,
    penalties and `within`, `entropy`. `context` has one row each: `tokens` (prompt, samples and observations), `prompt`
    (equal for equal prompts) and `shared` (its length), and where rows were fed vectors those, `vectors` and
    `vectors_at`. They are an Experience's tables but for the keys that only a collector knows.
    """

    decisions: Table
    context: Table
    request: Tensor
    """Which request a row belongs to."""
    keys: tuple[Any, ...]
    """That request's key."""
    reasons: Ragged
    """Why each turn of a row ended: STOP, LENGTH or CONTEXT."""
    end: Tensor
    """How a row ended: TERMINATED, or TRUNCATED when it ran out of tokens."""

    def __len__(self) -> int:
        return self.context.rows

    @property
    def sampled(self) -> Ragged:
        """Each row's sampled tokens, without prompt and observations."""
        counts = self.decisions.tensor("context").bincount(minlength=len(self))
        return Ragged(self.decisions.tensor("action"), _offsets(counts))

    def completions(self) -> list[list[int]]:
        """Each row's tokens after the prompt, observations included."""
        tokens = self.context.ragged("tokens")
        values, ends = tokens.values.tolist(), tokens.offsets.tolist()
        starts = (tokens.offsets[:-1] + self.context.tensor("shared")).tolist()
        return [values[a:b] for a, b in zip(starts, ends[1:], strict=True)]


class Recorder:
    """Collects what happens in the order it happens; `result` sorts it by row once."""

    version: int | None = None
    """Of the weights that draw, where they change in the midst of answers."""

    def __init__(self) -> None:
        self._steps: dict[str, list[Tensor]] = {}
        self._allowed: list[Ragged] = []
        self._few: list[Few] = []
        """Lists that came after those, and are still where they were made."""
        self._ids = 0
        self._turns: list[tuple[Tensor, Tensor, Tensor]] = []
        self._rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def step(
        self,
        row: Tensor,
        position: Tensor,
        turn: Tensor,
        live: Tensor,
        draw: Draw,
        start: Tensor | None = None,
    ) -> None:
        """One draw a slot; those that are not live are dropped at the end. `start` is where its turn began."""
        columns = {"context": row, "position": position, "turn": turn, "live": live}
        columns |= {} if start is None else {"within": position - start}
        columns |= {"action": draw.action, "logp": draw.logp}
        columns |= {} if self.version is None else {"version": torch.full_like(row, self.version)}
        for name in ("temperature", "entropy", "cut", "kept"):
            if (column := getattr(draw, name)) is not None:
                columns[name] = column
        for name, column in columns.items():
            self._steps.setdefault(name, []).append(column)
        if draw.allowed is not None:
            self._list(draw.allowed)

    def _list(self, allowed: Ragged | Few) -> None:
        if isinstance(allowed, Few):
            self._few.append(allowed)
            if sum(few.ids.numel() for few in self._few) < HELD:
                return
        self._fetch()
        if isinstance(allowed, Ragged):
            self._add(allowed)

    def _fetch(self) -> None:
        """Lists that are on the device, from there."""
        few, self._few = self._few, []
        if few:
            self._add(Few.cat(few).ragged())

    def _add(self, allowed: Ragged) -> None:
        self._allowed.append(allowed.to("cpu"))
        self._ids += len(allowed.values)
        if self._ids * 8 > (room := cuts.most_listed()):
            decisions = sum(map(len, self._allowed))
            raise PanoplyError(
                f"The ids that could be drawn take {self._ids * 8 / 2**30:.1f} GiB after {decisions} decisions, "
                f"{self._ids / decisions:.0f} each, and {room / 2**30:.1f} GiB may be used: sample fewer or shorter "
                "episodes, let masks allow less, or leave out top_k, top_p and min_p."
            )

    def turn(self, row: Tensor, turn: Tensor, reason: Tensor) -> None:
        self._turns.append((row, turn, reason))

    def finish(self, row: Tensor, end: Tensor, history: Tensor, length: Tensor) -> None:
        inside = torch.arange(history.shape[1], device=history.device) < length[:, None]
        self._rows.append((row, end, history[inside], length))

    def result(
        self,
        constants: Mapping[str, float],
        prompt: Tensor,
        shared: Tensor,
        request: Tensor,
        keys: tuple[Any, ...],
        beside: Mapping[str, Column],
    ) -> Rollouts:
        """All of it; `constants` are columns of decisions that are the same in every row, `beside` are of contexts."""
        tokens, end = self._contexts()
        context = Table({"tokens": tokens, "prompt": prompt, "shared": shared, **beside})
        decisions = self._decisions(end)
        logp = decisions.tensor("logp")
        same = {name: torch.full_like(logp, value) for name, value in constants.items()}
        return Rollouts(decisions.plus(same), context, request, keys, self._reasons(len(prompt)), end)

    def _decisions(self, end: Tensor) -> Table:
        # Sorted where they were recorded: on a GPU that is nothing, on the host it is not.
        steps = {name: torch.cat(parts) for name, parts in self._steps.items()}
        if not steps:
            none = torch.zeros(0, dtype=torch.long)
            whole = dict.fromkeys(("context", "position", "turn", "action", "end"), none)
            return Table({**whole, "logp": torch.zeros(0)})
        live = steps.pop("live").nonzero().flatten()
        order = live[(steps["context"][live] * PLACES + steps["position"][live]).argsort()]
        sorted_steps = _fetched({name: column[order] for name, column in steps.items()})
        columns: dict[str, Column] = {**sorted_steps}
        row = sorted_steps["context"]
        last = torch.ones_like(row, dtype=torch.bool)
        last[:-1] = row[1:] != row[:-1]
        columns["end"] = picked(end, row).masked_fill_(~last, OPEN)
        if "temperature" in columns and bool((sorted_steps["temperature"] == 1).all()):
            del columns["temperature"]
        self._fetch()
        if self._allowed:
            columns["allowed"] = Ragged.cat(self._allowed).take(order.cpu())
        return Table(columns)

    def _contexts(self) -> tuple[Ragged, Tensor]:
        if not self._rows:
            return Ragged.from_lists([]), torch.zeros(0, dtype=torch.long)
        row, end, values, length = (torch.cat(parts).cpu() for parts in zip(*self._rows, strict=True))
        tokens = Ragged(values, _offsets(length))
        if in_order(row):
            return tokens, end
        order = row.argsort()
        return tokens.take(order), end[order]

    def _reasons(self, rows: int) -> Ragged:
        if not self._turns:
            return Ragged.from_lists([])
        row, turn, reason = (torch.cat(parts).cpu() for parts in zip(*self._turns, strict=True))
        order = (row * (int(turn.max()) + 1) + turn).argsort()
        return Ragged(reason[order], _offsets(row.bincount(minlength=rows)))


def _fetched(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Columns of one length on the host, all of one kind in one copy: for each the host waits."""
    found = dict(columns)
    for kind in {column.dtype for column in columns.values() if column.device.type != "cpu"}:
        names = [name for name, column in columns.items() if column.dtype == kind]
        found |= zip(names, torch.stack([columns[name] for name in names]).cpu(), strict=True)
    return found


def ends(reason: Tensor, more: Tensor) -> Tensor:
    """How a row ends: one that stopped and was asked for no `more` is terminated."""
    return torch.where((reason == STOP) & ~more, TERMINATED, TRUNCATED)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


# ------------------------------------------------------------------ the running batch

RUNNING, DEAD = 0, -1
"""Values of `status` besides a turn's reasons to end, which a slot has until the host has seen it."""


@dataclass(frozen=True)
class Slots:
    """One entry a slot, [n]. Never changed in place, so a recorder may keep any column without copying it."""

    row: Tensor
    stream: Tensor
    """The start of the row's random stream."""
    token: Tensor
    """The row's newest token, which is not in the cache yet."""
    position: Tensor
    """Where that token is."""
    start: Tensor
    """Where the turn's first sampled token is."""
    turn: Tensor
    limit: Tensor
    """The length at which the turn ends."""
    status: Tensor

    def __len__(self) -> int:
        return len(self.row)

    @property
    def live(self) -> Tensor:
        return self.status == RUNNING

    def take(self, at: Tensor) -> Slots:
        return Slots(*(getattr(self, field.name)[at] for field in fields(self)))

    def put(self, at: Tensor, rows: Slots) -> Slots:
        """With `rows` at slots `at`, which may lie past the end."""
        size = max(len(self), int(at.max()) + 1)
        columns = []
        for field in fields(self):
            old, new = getattr(self, field.name), getattr(rows, field.name)
            columns.append(torch.cat([old, old.new_full((size - len(old),), DEAD)]).index_copy(0, at, new))
        return Slots(*columns)

    def advance(self, action: Tensor, reason: Tensor) -> Slots:
        """Move live slots on by one token, to `reason` where that ends the turn."""
        live = self.live
        return replace(
            self,
            token=torch.where(live, action, self.token),
            position=self.position + live,
            status=torch.where(live, reason, self.status),
        )

    def marked(self, at: Tensor, status: int) -> Slots:
        return replace(self, status=self.status.index_fill(0, at, status))

    def vacated(self, at: Tensor) -> Slots:
        """Without the rows at `at`. Dead slots go on at the start of a row, within every bound."""
        start, position = self.start.index_fill(0, at, 0), self.position.index_fill(0, at, 0)
        return replace(self.marked(at, DEAD), start=start, position=position)

    def filled_up(self, size: int) -> Slots:
        """With dead slots at the end, at the start of a row."""
        zeros = self.row.new_zeros(size - len(self))
        more = Slots(*(torch.cat([getattr(self, field.name), zeros]) for field in fields(self)))
        return replace(more, status=torch.cat([self.status, zeros + DEAD]))

    @staticmethod
    def empty(device: torch.device) -> Slots:
        return Slots(*(torch.zeros(0, dtype=torch.long, device=device) for _ in fields(Slots)))


def holders(label: Tensor, length: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """For every slot one that holds the same at the beginning of its row, and how many positions of it.

    Of live slots with equal labels `length` positions are the same, and the first holds them for all. A slot that is
    not live holds for none: whatever it draws next is written into the beginning of its row.
    """
    same = (label[:, None] == label) & live
    return torch.where(
        live, same.int().argmax(1), torch.arange(len(label), device=label.device)
    ), length * live
