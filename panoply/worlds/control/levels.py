"""Levels of grid worlds from a number: walls, holes, where to start, where things lie. Every one can be solved."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import numpy as np

from panoply.errors import PanoplyError
from panoply.seeds import numpy_rng
from panoply.worlds.control.world import Array

Layout = Literal["open", "rooms", "maze", "scatter", "lake"]
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))
"""Up, right, down, left, in rows and columns."""
LAKE = "....", ".O.O", "...O", "O..."
"""FrozenLake's own map of 4 × 4: start top left, goal bottom right."""


class Level(NamedTuple):
    """Cells are numbered row by row."""

    walls: Array
    holes: Array
    start: int
    places: Array
    """Of each object."""
    next: Array
    """[cells, 4]: where a move leads; where there is a wall, it stays."""
    distance: Array
    """[objects, cells]: steps of the shortest way without holes; −1 where there is none."""


@functools.lru_cache(maxsize=4096)
def level(layout: Layout, size: int, objects: int, density: float, number: int) -> Level:
    """Level `number`: the first of its draws in which the start reaches every object."""
    for attempt in range(200):
        rng = numpy_rng("grid", layout, size, objects, density, number, attempt)
        walls, holes = _LAYOUTS[layout](size, density, rng)
        free = np.flatnonzero(~walls & ~holes)
        if len(free) <= objects:
            continue
        start, *places = rng.permutation(free)[: objects + 1].tolist()
        if layout == "lake":
            start, places = 0, [size * size - 1, *places[1:]][:objects]
        leads = _next(walls, size)
        distance = np.array([_distances(leads, holes, place) for place in places]).reshape(objects, size**2)
        if (distance[:, start] > 0).all():
            return Level(walls, holes, start, np.array(places, np.int64), leads, distance)
    raise PanoplyError(
        f"No level of {size} × {size} cells with {objects} objects could be made that has a way to each; "
        "fewer walls or objects would help."
    )


def _next(walls: Array, size: int) -> Array:
    rows, columns = np.divmod(np.arange(size * size), size)
    leads = np.empty((size * size, 4), np.int64)
    for action, (down, right) in enumerate(MOVES):
        row, column = rows + down, columns + right
        inside = (row >= 0) & (row < size) & (column >= 0) & (column < size)
        to = np.where(inside, row * size + column, 0)
        leads[:, action] = np.where(inside & ~walls[to], to, np.arange(size * size))
    return leads


def _distances(leads: Array, holes: Array, goal: int) -> Array:
    """Breadth first from the goal; a hole can be left for nothing, so it is never on a way."""
    far = np.full(len(leads), -1)
    far[goal], steps = 0, 0
    while True:
        steps += 1
        reached = (far[leads] == steps - 1).any(-1) & (far < 0) & ~holes
        if not reached.any():
            return far
        far[reached] = steps


# ------------------------------------------------------------------ layouts: size, density, rng → walls, holes


def _open(size: int, density: float, rng: np.random.Generator) -> tuple[Array, Array]:
    return np.zeros(size * size, bool), np.zeros(size * size, bool)


def _scatter(size: int, density: float, rng: np.random.Generator) -> tuple[Array, Array]:
    return rng.random(size * size) < density, np.zeros(size * size, bool)


def _rooms(size: int, density: float, rng: np.random.Generator) -> tuple[Array, Array]:
    """Four rooms with a door in each of the four walls between them."""
    walls, middle = np.zeros((size, size), bool), size // 2
    walls[middle], walls[:, middle] = True, True
    for half in (range(middle), range(middle + 1, size)):
        walls[middle, rng.choice(half)] = False
        walls[rng.choice(half), middle] = False
    return walls.reshape(-1), np.zeros(size * size, bool)


def _maze(size: int, density: float, rng: np.random.Generator) -> tuple[Array, Array]:
    """Corridors between the even cells, dug depth first, then a share `density` of the walls left opened."""
    walls = np.ones((size, size), bool)
    stack = [(0, 0)]
    walls[0, 0] = False
    while stack:
        row, column = stack[-1]
        ways = [(row + 2 * down, column + 2 * right) for down, right in MOVES]
        ways = [(r, c) for r, c in ways if 0 <= r < size and 0 <= c < size and walls[r, c]]
        if not ways:
            stack.pop()
            continue
        r, c = ways[rng.integers(len(ways))]
        walls[r, c] = walls[(row + r) // 2, (column + c) // 2] = False
        stack.append((r, c))
    walls &= rng.random((size, size)) >= density
    return walls.reshape(-1), np.zeros(size * size, bool)


def _lake(size: int, density: float, rng: np.random.Generator) -> tuple[Array, Array]:
    """Holes in the ice; 4 × 4 is FrozenLake's own map."""
    if size == 4:
        return np.zeros(16, bool), np.array([cell == "O" for row in LAKE for cell in row])
    holes = rng.random(size * size) < density
    holes[0] = holes[-1] = False
    return np.zeros(size * size, bool), holes


_LAYOUTS = {"open": _open, "scatter": _scatter, "rooms": _rooms, "maze": _maze, "lake": _lake}
