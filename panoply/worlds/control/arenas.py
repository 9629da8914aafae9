"""Where a point may go: walls in a square from −1 to 1, and the ways around them."""

from __future__ import annotations

import functools
from typing import Literal

import numpy as np

from panoply.worlds.control.world import Array

Arena = Literal["open", "umaze", "rooms", "routes", "upper", "lower"]
Wall = tuple[float, float, float, float]
"""Left, bottom, right, top."""
CELLS = 25
"""The square is cut into so many rows and columns to find ways."""

WALLS: dict[str, tuple[Wall, ...]] = {
    "open": (),
    "umaze": ((-1.0, -0.12, 0.4, 0.12),),
    "rooms": (
        (-0.08, -1.0, 0.08, -0.64),
        (-0.08, -0.36, 0.08, 0.36),
        (-0.08, 0.64, 0.08, 1.0),
        (-1.0, -0.08, -0.64, 0.08),
        (-0.36, -0.08, 0.36, 0.08),
        (0.64, -0.08, 1.0, 0.08),
    ),
    "routes": ((-0.3, -0.6, 0.3, 0.4),),
    "upper": ((-0.3, -1.0, 0.3, 0.4),),
    "lower": ((-0.3, -0.6, 0.3, 1.0),),
}
"""`upper` and `lower` are `routes` with one of the two ways barred: what an expert who takes the other believes."""


def blocked(arena: Arena, points: Array, margin: float = 0.0) -> Array:
    """Which points […, 2] lie in a wall, or nearer to one than the margin."""
    x, y = points[..., 0], points[..., 1]
    inside = np.zeros(x.shape, bool)
    for left, bottom, right, top in WALLS[arena]:
        inside |= (x > left - margin) & (x < right + margin) & (y > bottom - margin) & (y < top + margin)
    return inside


def slide(arena: Arena, at: Array, by: Array) -> Array:
    """Points moved, in two halves, each coordinate on its own where a wall is in the way of both."""
    for _ in range(2):
        for axis in (0, 1):
            to = at.copy()
            to[:, axis] = np.clip(to[:, axis] + by[:, axis] / 2, -1.0, 1.0)
            at = np.where(blocked(arena, to)[:, None], at, to) if WALLS[arena] else to
    return at


def aim(arena: Arena, at: Array, goal: Array) -> Array:
    """A point in sight to head for, on a shortest way to the goal."""
    if not WALLS[arena]:
        return goal
    ways, here, target = _next_cells(arena), _cell(at), _cell(goal)
    two_on = here
    for _ in range(2):
        two_on = ways[target, two_on]
    rows, columns = np.divmod(two_on, CELLS)
    centre = np.stack([(columns + 0.5) / CELLS * 2 - 1, (rows + 0.5) / CELLS * 2 - 1], -1)
    return np.where((two_on == target)[:, None], goal, centre)


def _cell(points: Array) -> Array:
    columns, rows = np.clip(((points + 1) / 2 * CELLS).astype(np.int64), 0, CELLS - 1).T
    number: Array = rows * CELLS + columns
    return number


@functools.lru_cache(maxsize=8)
def _next_cells(arena: Arena) -> Array:
    """[goal, cell]: the neighbour on a shortest way, straight or across a corner that is free on both sides."""
    middles = (np.arange(CELLS) + 0.5) / CELLS * 2 - 1
    y, x = np.meshgrid(middles, middles, indexing="ij")
    free = ~blocked(arena, np.stack([x, y], -1).reshape(-1, 2), margin=0.03)
    rows, columns = np.divmod(np.arange(CELLS**2), CELLS)
    to, length = [], []
    for down, right in ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1)):
        row, column = rows + down, columns + right
        inside = (row >= 0) & (row < CELLS) & (column >= 0) & (column < CELLS)
        cell = np.where(inside, row * CELLS + column, 0)
        corners = (
            free[np.where(inside, rows * CELLS + column, 0)]
            & free[np.where(inside, row * CELLS + columns, 0)]
        )
        to.append(cell)
        length.append(np.where(inside & free[cell] & corners, np.hypot(down, right), np.inf))
    neighbours, steps = np.stack(to, -1), np.stack(length, -1)
    steps[:, 0] = 0.0
    far = np.where(np.eye(CELLS**2, dtype=bool), 0.0, np.inf)
    while True:  # distances to every goal at once, [cell, goal]
        nearer = far
        for direction in range(1, neighbours.shape[1]):
            nearer = np.minimum(nearer, steps[:, direction, None] + far[neighbours[:, direction]])
        if (nearer == far).all():
            break
        far = nearer
    ways = np.stack([steps[:, d, None] + far[neighbours[:, d]] for d in range(1, neighbours.shape[1])])
    best = neighbours[:, 1:][np.arange(CELLS**2)[:, None], ways.argmin(0)]
    arrived = np.eye(CELLS**2, dtype=bool)
    return np.where(arrived, np.arange(CELLS**2)[:, None], best).T.copy()
