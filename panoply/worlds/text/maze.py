"""A maze with a fixed layout: text in, moves out, and a log in which nobody goes a whole way."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar, Literal

import numpy as np

from panoply.policies.tokenizer import Tokenizer
from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.presets import Preset
from panoply.worlds.text.characters import END, CharacterWorld, Draws
from panoply.worlds.text.logs import Logged
from panoply.worlds.world import Lesson, Play, Reply, Task

Cell = tuple[int, int]
LAYOUT = ("...##..", ".#...#.", "...#...", "#.#..#.", "....#..")
CELLS: tuple[Cell, ...] = tuple(
    (r, c) for r, row in enumerate(LAYOUT) for c, mark in enumerate(row) if mark == "."
)
MOVES = {"U": (-1, 0), "R": (0, 1), "D": (1, 0), "L": (0, -1)}
WORDS = {"U": "up.", "R": "right.", "D": "down.", "L": "left."}
NAMES = "abcdefghijklmnopqrstuvwxyz"
"""Of the cells, row by row."""
GOALS = tuple(sorted(CELLS, key=lambda cell: stable_hash("goal", *cell)))
WALLS = "0123456789ABCDEF"
"""On which of the four sides are walls, as one digit: 1 above, 2 at the right, 4 below, 8 at the left, added up."""
PLAYERS = ("opener", "finisher", "opener", "finisher", "wanderer")
HABIT = "URRRRRDDDL"
"""Who wanders takes any of these: more often right and down, so that what is done most often is not what is best."""
NONE = "_"
"""What a partial view remembers of an illegal turn."""
LEGAL, ILLEGAL = -1.0, -4.0


@cache
def distances(goal: Cell) -> dict[Cell, int]:
    """Moves from every cell to a goal."""
    found, queue = {goal: 0}, deque([goal])
    while queue:
        cell = queue.popleft()
        for move in MOVES:
            if (there := moved(cell, move)) not in found:
                found[there] = found[cell] + 1
                queue.append(there)
    return found


@cache
def moved(cell: Cell, move: str) -> Cell:
    """Where a move leads: into a wall, nowhere."""
    there = (cell[0] + MOVES[move][0], cell[1] + MOVES[move][1])
    return there if there in CELLS else cell


@cache
def walls(cell: Cell) -> str:
    return WALLS[sum(2**i for i, move in enumerate(MOVES) if moved(cell, move) == cell)]


@cache
def good(cell: Cell, goal: Cell) -> tuple[str, ...]:
    """Moves of shortest ways."""
    left = distances(goal)
    return tuple(move for move in MOVES if left[moved(cell, move)] < left[cell])


@world("maze@1")
@dataclass(frozen=True)
class Maze(Logged, CharacterWorld):
    """`eDu` means: the goal is the cell e, the agent is in u, and has walls on the sides that D stands for. A turn is a
    move, `U` `R` `D` `L`; a move into a wall changes nothing, and what is no move is illegal.

    ```
    a  b  c  #  #  d  e
    f  #  g  h  i  #  j         from u to e: RRRURURRUU
    k  l  m  #  n  o  p
    #  q  #  r  s  #  t
    u  v  w  x  #  y  z
    ```

    The layout is the same in every task, which is a start and a goal, and half of them are held out. With
    `view=partial` a prompt does not say where one is, but what was seen before: `eDR4R5` is the goal, then up to
    `history` turns, each the walls there and the move, and the walls here.

    Signals: `success`, to be there within `cap` turns; `score`, 0 for the move that reaches the goal, −1 for any other
    and −4 for an illegal one; `invalid`, an illegal one.

    The log is of three kinds of players. An opener goes half of a shortest way and then wanders, a finisher wanders
    first and then goes the way from where it is, a wanderer does nothing else; who knows the way wanders in a share
    `slip` of its turns, too. Each makes at least one detour: no episode of the log goes a shortest way, and the pieces
    of all ways are in it. Imitation of the log is the warm start.
    """

    view: Literal["full", "partial"] = "full"
    cap: int = 16
    """Turns in an episode."""
    goals: int = 8
    """Cells that may be goals; 1 as in the paper, where only starts differ."""
    slip: float = 0.1
    """How often a player who knows the way moves anywhere."""
    history: int = 16
    """Turns that a partial view remembers."""
    words: bool = False
    """Whether moves are words, `up.` `right.` `down.` `left.`, one token a letter."""

    bounds: ClassVar[Mapping[str, str]] = {
        "cap": "from 1 to 1000",
        "goals": f"from 1 to {len(CELLS)}",
        "slip": "from 0 to 1",
        "history": "from 0 to 100",
    }
    presets: ClassVar[Mapping[str, Preset]] = {
        "hidden": Preset(
            {"view": "partial"},
            "where one is shows only in what one has seen: values and credit with a memory",
            0.27,
        ),
    }
    access: ClassVar[frozenset[str]] = frozenset(
        {"verify", "reference", "teacher", "pairs", "fork", "writers"}
    )
    markov: ClassVar[bool] = True
    imitation: ClassVar[Mapping[str, int]] = {"data.batch": 32, "run.steps": 600}
    """How its warm start is made."""

    @property
    def start(self) -> str:
        """Moves of one letter and moves in words, and the two views, are read by models of their own."""
        return "maze-start-of-words" if self.words else f"maze-{self.view}-start"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.of_characters(self._alphabet, specials=(END,))

    @property
    def _alphabet(self) -> str:
        letters = "".join(WORDS.values()) if self.words else ""
        return "".join(dict.fromkeys(f"{NAMES}{WALLS}{NONE}{''.join(MOVES)}{letters}"))

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {character: self.tokenizer.id(character) for character in self._alphabet + END}

    @property
    def max_tokens(self) -> int:
        return max(map(len, WORDS.values())) if self.words else 1

    @property
    def turn_cap(self) -> int:
        return self.cap

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return ()

    @property
    def least(self) -> float:
        return LEGAL * self.cap

    def complete(self, answer: Sequence[int]) -> bool:
        return len(answer) == self.max_tokens or (self.words and self.text(answer[-1:]) == ".")

    def move(self, answer: Sequence[int]) -> str | None:
        """The move that was said; None where it is none."""
        said = self.text(answer)
        return next((m for m in MOVES if (WORDS[m] if self.words else m) == said), None)

    # -------------------------------------------------------------- tasks

    def task(self, split: str, index: int) -> Task:
        def draw(draws: Draws) -> Task | None:
            goal, cell = GOALS[draws.below(self.goals)], CELLS[draws.below(len(CELLS))]
            return (
                None if cell == goal or _held_out(cell, goal) != (split == "test") else self._task(cell, goal)
            )

        return self._first(split, index, draw)

    def _task(self, cell: Cell, goal: Cell) -> Task:
        data = {"start": cell, "goal": goal}
        task = Task(_number(cell, goal), (), distances(goal)[cell], data)
        return Task(task.id, self.shown(Way(self, task)), task.level, data)

    def play(self, task: Task) -> Way:
        return Way(self, task)

    def shown(self, play: Way) -> tuple[int, ...]:
        """The prompt of an episode as it stands."""
        around = walls(play.cell)
        seen = "".join(play.trail) + around if self.view == "partial" else around + _named(play.cell)
        return tuple(self.tokens(f"{_named(play.goal)}{seen}"))

    # -------------------------------------------------------------- players

    def expert(self, play: Play) -> list[int]:
        """A move of a shortest way."""
        assert isinstance(play, Way)
        return self._said(good(play.cell, play.goal)[0])

    def careless(self, play: Play, rng: np.random.Generator) -> list[int]:
        """One who knows the way and wanders in every other turn."""
        return self._wandering(rng) if rng.random() < 0.5 else self.expert(play)

    def written_by(self, task: Task, number: int, rng: np.random.Generator) -> list[int]:
        """A whole episode of one of the players, who take turns."""
        kind, half = PLAYERS[number % len(PLAYERS)], task.level // 2
        wrong = {"opener": half, "finisher": 0, "wanderer": 0}[kind]

        def say(play: Play) -> list[int]:
            assert isinstance(play, Way)
            if play.turn == wrong:
                wrong_ones = [move for move in MOVES if move not in good(play.cell, play.goal)]
                return self._said(wrong_ones[int(rng.integers(len(wrong_ones)))])
            knows = {"opener": play.turn < half, "finisher": play.turn > task.level, "wanderer": False}[kind]
            return self.expert(play) if knows and rng.random() >= self.slip else self._wandering(rng)

        return [token for _, said in self._walk(task, say) for token in said]

    def lessons(self, task: Task, rng: np.random.Generator) -> list[Lesson]:
        """What a player said, where it was said."""
        return self.turns(task, self.demonstrate(task, rng))

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also: standing at a wall until it is too late."""
        start = task.data["start"]
        idle = [move for move in MOVES if moved(start, move) == start][:1] * self.cap
        return [*super().mistakes(task), *([[t for m in idle for t in self._said(m)]] if idle else [])]

    def _wandering(self, rng: np.random.Generator) -> list[int]:
        return self._said(HABIT[int(rng.integers(len(HABIT)))])

    def _said(self, move: str) -> list[int]:
        return self.tokens(WORDS[move] if self.words else move)


class Way(Play):
    """An episode: where the agent is, and in a partial view what it has seen; its state knows no turn."""

    def __init__(self, world: Maze, task: Task):
        self.world, self.task, self.turn = world, task, 0
        self.cell: Cell = task.data["start"]
        self.goal: Cell = task.data["goal"]
        self.trail: tuple[str, ...] = ()
        super().__init__(task.prompt, _number(self.cell, self.goal))

    def act(self, answer: Sequence[int]) -> Reply:
        move = self.world.move(answer)
        if self.world.history:
            self.trail = (*self.trail, walls(self.cell) + (move or NONE))[-self.world.history :]
        if move is not None:
            self.cell = moved(self.cell, move)
        self.turn += 1
        there = self.cell == self.goal
        self.state = _number(self.cell, self.goal)
        signals = {
            "success": float(there),
            "score": 0.0 if there else LEGAL if move else ILLEGAL,
            "invalid": float(move is None),
        }
        late = not there and self.turn == self.world.cap
        return Reply(signals, self.world.shown(self), done=there or late, truncated=late)


@cache
def _number(cell: Cell, goal: Cell) -> int:
    return stable_hash("maze", cell, goal)


@cache
def _held_out(cell: Cell, goal: Cell) -> bool:
    """Every other problem with that goal, in an order that tells nothing."""
    order = sorted((c for c in CELLS if c != goal), key=lambda c: _number(c, goal))
    return (order.index(cell) + GOALS.index(goal)) % 2 == 0


@cache
def _named(cell: Cell) -> str:
    return NAMES[CELLS.index(cell)]
