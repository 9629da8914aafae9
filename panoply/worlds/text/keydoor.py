"""A quest on a small grid: fetch the key, then open the door."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from panoply.errors import PanoplyError
from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.episodic import Episodic
from panoply.worlds.presets import Preset
from panoply.worlds.text.characters import DIGITS, CharacterWorld, Draws
from panoply.worlds.world import Play, Reply, Task

Cell = tuple[int, int]
STEPS = {"N": (0, 1), "S": (0, -1), "E": (1, 0), "W": (-1, 0)}
PICK, OPEN = "P", "O"
HELD_OUT = 8
"""One layout in so many is in the test split."""


@world("keydoor@1")
@dataclass(frozen=True)
class Keydoor(Episodic, CharacterWorld):
    """`240031_>` means: agent at (2, 4), key at (0, 0), door at (3, 1), key not in hand (`k` if it is).

    Such an observation is the whole prompt of a turn, and a turn is one token: a step `N` `S` `E` `W`, `P` to pick
    the key up, `O` to open the door. Success is opening the door with the key within `cap` turns. What cannot be
    done changes nothing and is counted (`invalid`). An episode's clones start in the same layout, its task.

    Rewards: `success` is sparse, 1 on the turn that opens the door; `progress` is dense, the turn's share of the
    shortest way, negative for a step away from it. Both sum to 1 in an episode that succeeds.

    The careless teacher, without the key and with probability `slip`, heads for the door and opens it in vain.
    """

    size: int = 5
    cap: int = 12
    """Turns in an episode."""
    quest: tuple[int, int] = (5, 10)
    """Fewest and most turns of the shortest way."""
    slip: float = 0.5
    legal: bool = False
    """Whether only actions that can be done may be drawn."""

    bounds: ClassVar[Mapping[str, str]] = {
        "size": "from 2 to 10",
        "cap": "from 1 to 1000000",
        "quest": "from 1 to 1000",
        "slip": "from 0 to 1",
    }

    presets: ClassVar[Mapping[str, Preset]] = {
        "far": Preset(
            {"quest": (8, 10)},
            "the longest ways, where one early turn decides late: credit over turns, recurring states",
            0.26,
            budget="steps=12",
        )
    }

    alphabet: ClassVar[str] = DIGITS + "k_>" + "".join(STEPS) + PICK + OPEN
    access: ClassVar[frozenset[str]] = frozenset({"verify", "reference", "teacher", "pairs", "fork"})
    markov: ClassVar[bool] = True
    imitation: ClassVar[Mapping[str, int]] = {"data.batch": 32, "run.steps": 600}
    """How its warm start is made: a demonstration has several turns, so fewer of them are enough."""

    def __post_init__(self) -> None:
        super().__post_init__()
        shortest, longest = self.quest
        if not shortest <= longest <= self.cap:
            raise PanoplyError(
                f"keydoor.quest is a range of turns within keydoor.cap ({self.cap}), not {shortest} to {longest}."
            )

    @property
    def max_tokens(self) -> int:
        return 1

    @property
    def turn_cap(self) -> int:
        return self.cap

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return ()

    def complete(self, answer: Sequence[int]) -> bool:
        return len(answer) == 1

    def task(self, split: str, index: int) -> Task:
        return self._first(split, index, lambda draws: self._layout(draws, split))

    def _layout(self, draws: Draws, split: str) -> Task | None:
        agent, key, door = ((draws.below(self.size), draws.below(self.size)) for _ in range(3))
        turns = shortest(agent, key, door, held=False)
        id = stable_hash("keydoor", self.size, agent, key, door)
        fits = len({agent, key, door}) == 3 and self.quest[0] <= turns <= self.quest[1]
        if not fits or (id % HELD_OUT == 0) != (split == "test"):
            return None
        data = {"agent": agent, "key": key, "door": door}
        return Task(id, self._prompt(agent, key, door, held=False), turns, data)

    def play(self, task: Task) -> Quest:
        return Quest(self, task)

    def expert(self, play: Play) -> list[int]:
        """A shortest way: first east or west, then north or south."""
        assert isinstance(play, Quest)
        return self.tokens(_towards(play.agent, play.door, OPEN) if play.held else self._fetch(play))

    def careless(self, play: Play, rng: np.random.Generator) -> list[int]:
        assert isinstance(play, Quest)
        slips = bool(rng.random() < self.slip)
        return self.tokens(_towards(play.agent, play.door, OPEN)) if slips else self.expert(play)

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also: leaving the key, opening before the end, and waiting until there are too few turns left."""
        gold, picked = self.gold(task), self.tokens(PICK)[0]
        at = gold.index(picked)
        idle = [picked] * (self.cap - task.level + 1)
        left = [[*gold[:at], *gold[at + 1 :]], [*gold[:at], *self.tokens(OPEN), *gold[at + 1 :]]]
        return [*super().mistakes(task), *left, [*idle, *gold] if at else [*gold[:1], *idle, *gold[1:]]]

    def _fetch(self, play: Quest) -> str:
        return _towards(play.agent, play.key, PICK)

    def _prompt(self, agent: Cell, key: Cell, door: Cell, *, held: bool) -> tuple[int, ...]:
        cells = "".join(DIGITS[i] for cell in (agent, key, door) for i in cell)
        return tuple(self.tokens(cells + ("k>" if held else "_>")))


class Quest(Play):
    """An episode. Its state is the layout, where the agent is, and whether it has the key; not the turn."""

    def __init__(self, world: Keydoor, task: Task):
        self.world, self.task = world, task
        self.agent, self.key, self.door = task.data["agent"], task.data["key"], task.data["door"]
        self.held, self.turn = False, 0
        super().__init__(task.prompt, self._state())

    def act(self, answer: Sequence[int]) -> Reply:
        action = self.world.text(answer)
        before = self._left()
        opened = action == OPEN and self._possible(action)
        valid = opened or self._move(action)
        self.turn += 1
        self.state = self._state()
        progress = (before - (0 if opened else self._left())) / self.task.level
        signals = {"success": float(opened), "progress": progress, "invalid": float(not valid)}
        late = not opened and self.turn == self.world.cap
        prompt = self.world._prompt(self.agent, self.key, self.door, held=self.held)
        return Reply(signals, prompt, done=opened or late, truncated=late)

    @property
    def restricts(self) -> bool:
        return self.world.legal

    def allowed(self, said: Sequence[int]) -> Sequence[int] | None:
        """Actions that can be done here."""
        return self.world.tokens("".join(a for a in (*STEPS, PICK, OPEN) if self._possible(a)))

    def _possible(self, action: str) -> bool:
        if action in (PICK, OPEN):
            return self.held == (action == OPEN) and self.agent == (self.door if self.held else self.key)
        return action in STEPS and all(0 <= i < self.world.size for i in self._beside(action))

    def _beside(self, action: str) -> Cell:
        (x, y), (right, up) = self.agent, STEPS[action]
        return x + right, y + up

    def _move(self, action: str) -> bool:
        """Whether the action, other than to open, could be done; if so, it is."""
        if action == OPEN or not self._possible(action):
            return False
        self.held = self.held or action == PICK
        self.agent = self._beside(action) if action in STEPS else self.agent
        return True

    def _left(self) -> int:
        return shortest(self.agent, self.key, self.door, held=self.held)

    def _state(self) -> int:
        return stable_hash(self.task.id, self.agent, self.held)


def shortest(agent: Cell, key: Cell, door: Cell, *, held: bool) -> int:
    """Turns left on a shortest way."""
    if held:
        return _distance(agent, door) + 1
    return _distance(agent, key) + 1 + _distance(key, door) + 1


def _distance(a: Cell, b: Cell) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _towards(agent: Cell, goal: Cell, there: str) -> str:
    """A step to a cell, or what is to be done there."""
    if agent[0] != goal[0]:
        return "E" if goal[0] > agent[0] else "W"
    if agent[1] != goal[1]:
        return "N" if goal[1] > agent[1] else "S"
    return there
