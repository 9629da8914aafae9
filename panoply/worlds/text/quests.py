"""What `keydoor` is played on: a grid with rooms, keys and a door, its shortest ways, and an episode under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from panoply.seeds import stable_hash
from panoply.worlds.world import Play, Reply, Task

if TYPE_CHECKING:
    from panoply.worlds.text.keydoor import Keydoor

Cell = tuple[int, int]
STEPS = {"N": (0, 1), "S": (0, -1), "E": (1, 0), "W": (-1, 0)}
PICK, OPEN = "P", "O"
NONE = -1
"""In hand: no key."""


@dataclass(frozen=True)
class Layout:
    """Where things are: the agent at first, keys of which one fits, the door, and gaps in the walls between rooms.

    Rooms lie side by side. The wall before the i-th of them stands at the left of column `walls[i − 1]` and has one
    gap, in row `gaps[i − 1]`.
    """

    agent: Cell
    keys: tuple[Cell, ...]
    fits: int
    door: Cell
    walls: tuple[int, ...] = ()
    gaps: tuple[int, ...] = ()

    def left(self, agent: Cell, has: int) -> int:
        """Turns left on a shortest way, with that key in hand."""
        if has == self.fits:
            return self.distance(agent, self.door) + 1
        return self.distance(agent, self.key) + 1 + self.distance(self.key, self.door) + 1

    @property
    def key(self) -> Cell:
        """Where the key lies that fits."""
        return self.keys[self.fits]

    def distance(self, a: Cell, b: Cell) -> int:
        """Steps between two cells. Rooms are in a row, so that a shortest way goes from gap to gap."""
        if self._room(a) > self._room(b):
            a, b = b, a
        steps = 0
        for i in range(self._room(a), self._room(b)):
            gap = (self.walls[i], self.gaps[i])
            steps, a = steps + _apart(a, gap), gap
        return steps + _apart(a, b)

    def towards(self, agent: Cell, goal: Cell, there: str) -> str:
        """A step of a shortest way to a cell, first east or west, then north or south; or what is to be done there."""
        here, aim = self._room(agent), self._room(goal)
        if here != aim:
            wall = here if aim > here else here - 1
            gap = (self.walls[wall] - (aim > here), self.gaps[wall])
            goal, there = gap, "E" if aim > here else "W"
        if agent[0] != goal[0]:
            return "E" if goal[0] > agent[0] else "W"
        if agent[1] != goal[1]:
            return "N" if goal[1] > agent[1] else "S"
        return there

    def open_between(self, a: Cell, b: Cell) -> bool:
        """Whether no wall stands between two cells that lie side by side."""
        return self._room(a) == self._room(b) or a[1] == self.gaps[min(self._room(a), self._room(b))]

    def _room(self, cell: Cell) -> int:
        return sum(cell[0] >= wall for wall in self.walls)


def _apart(a: Cell, b: Cell) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


class Quest(Play):
    """An episode: where the agent is, which key it has, and where it was in the last turns; its state knows no turn."""

    def __init__(self, world: Keydoor, task: Task):
        self.world, self.task = world, task
        self.layout: Layout = task.data["layout"]
        self.agent, self.has, self.turn = self.layout.agent, NONE, 0
        self.trail: tuple[Cell, ...] = ()
        """Where it was in the last turns, as many as the world shows."""
        super().__init__(task.prompt, self._state())

    @property
    def held(self) -> bool:
        """Whether the key that fits is in hand."""
        return self.has == self.layout.fits

    @property
    def subgoal(self) -> str:
        """What is to be done next that is no step: P to pick the key up, O to open the door."""
        return OPEN if self.held else PICK

    def act(self, answer: Sequence[int]) -> Reply:
        action = self.world.action(answer)
        before, at = self._left(), self.agent
        possible = self._possible(action)
        opened = possible and action == OPEN and not self._sticks()
        if possible:
            self._do(action)
        self.turn += 1
        self.trail = ((*self.trail, at) if self.world.history else ())[-self.world.history :]
        self.state = self._state()
        progress = (before - (0 if opened else self._left())) / self.task.level
        signals = {"success": float(opened), "progress": progress, "invalid": float(not possible)}
        late = not opened and self.turn == self.world.cap
        return Reply(signals, self.world.shown(self), done=opened or late, truncated=late)

    @property
    def restricts(self) -> bool:
        return self.world.legal

    def allowed(self, said: Sequence[int]) -> Sequence[int] | None:
        """Tokens by which an action that can be done goes on."""
        before = self.world.text(said)
        words = (self.world.word(a) for a in (*STEPS, PICK, OPEN) if self._possible(a))
        going = [word[len(before)] for word in words if word.startswith(before) and len(word) > len(before)]
        return self.world.tokens("".join(dict.fromkeys(going)))

    def _possible(self, action: str) -> bool:
        if action == PICK:
            return any(key == self.agent for i, key in enumerate(self.layout.keys) if i != self.has)
        if action == OPEN:
            return self.held and self.agent == self.layout.door
        if action not in STEPS:
            return False
        beside = self._beside(action)
        inside = all(0 <= i < self.world.size for i in beside)
        return inside and self.layout.open_between(self.agent, beside)

    def _sticks(self) -> bool:
        """By chance, which a task and the turn decide, so that an answer is always graded alike."""
        return (
            self.world.chance > 0
            and stable_hash("sticks", self.task.id, self.turn) % 2**32 < self.world.chance * 2**32
        )

    def _beside(self, action: str) -> Cell:
        (x, y), (right, up) = self.agent, STEPS[action]
        return x + right, y + up

    def _do(self, action: str) -> None:
        """What can be done. A key that is taken in the place of another leaves that one where it lay."""
        if action == PICK:
            self.has = self.layout.keys.index(self.agent)
        elif action in STEPS:
            self.agent = self._beside(action)

    def _left(self) -> int:
        return self.layout.left(self.agent, self.has)

    def _state(self) -> int:
        """What can be seen of how things are. With `alias`, that is not what is in hand."""
        if self.world.alias:
            return stable_hash(self.task.id, self.agent)
        if self.world.objects > 1:
            return stable_hash(self.task.id, self.agent, self.has)
        return stable_hash(self.task.id, self.agent, self.held)
