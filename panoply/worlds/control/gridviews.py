"""What can be seen of a grid world: planes, coordinates, a number, categories, pixels; and pictures for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from panoply.worlds.control.drawing import BLUE, FAINT, GOLD, GREEN, INK, PAPER, RED, VIOLET, Canvas
from panoply.worlds.control.simulated import State
from panoply.worlds.control.world import Array, Box, Discrete, Space

if TYPE_CHECKING:
    from panoply.worlds.control.grid import Grid

FLOOR, WALL, HOLE, STRAY, AGENT, FIRST_KIND = range(6)
"""What can be in a cell; objects come after, by kind."""
COLOURS = (GREEN, VIOLET, RED, BLUE)
"""Of objects, by kind."""


def space(world: Grid) -> Space:
    if world.view == "state":
        times = (world.horizon or 0) + 1 if world.clock else 1
        return Discrete((world.cells << world.objects) * times)
    if world.view == "vector":
        return Box((2 + 3 * world.objects + world.clock + world.cells * world.history,))
    if world.view == "categories":
        return Box((2 + 4 + world.objects + world.distractors,))
    if world.view == "pixels":
        return Box((3, world.size * world.pixels, world.size * world.pixels))
    return Box((4 + len(world.counts) + bool(world.distractors), world.size, world.size))


def look(world: Grid, state: State) -> Array:
    return _VIEWS[world.view](world, state)


def _state(world: Grid, state: State) -> Array:
    bits = (state["present"] << np.arange(world.objects)).sum(-1)
    number: Array = state["at"] + world.cells * bits
    return number + (world.cells << world.objects) * state["time"] if world.clock else number


def _vector(world: Grid, state: State) -> Array:
    """The agent's row and column, and of each object its own relative to it, and whether it is left; in −1 … 1.

    After them the share of the time that is gone, and of each cell whether it is covered, where these are seen.
    """
    scale = world.size - 1
    own = np.stack(np.divmod(state["at"], world.size), -1) / scale
    places = np.stack(np.divmod(state["places"], world.size), -1) / scale - own[:, None]
    left = state["present"][..., None]
    things = np.concatenate([places * left, left], -1).reshape(len(own), -1)
    seen = [own, things]
    if world.clock:
        seen.append(state["time"][:, None] / world.horizon)
    if world.history:
        seen.append(state["covered"])
    return np.concatenate(seen, 1).astype(np.float32)


def _categories(world: Grid, state: State) -> Array:
    """Row, column, what is up, right, down and left, which objects are left, and noise: all whole numbers."""
    rows = np.arange(len(state["at"]))[:, None]
    contents = _contents(world, state, agent=False)
    ways = state["next"][rows[:, 0], state["at"]]
    around = np.where(ways == state["at"][:, None], WALL, contents[rows, ways])
    place = np.stack(np.divmod(state["at"], world.size), -1)
    return np.concatenate([place, around, state["present"], state["noise"]], 1).astype(np.float32)


def _planes(world: Grid, state: State) -> Array:
    """Walls, holes, the agent, the ground covered, objects by kind, the stray dot where there is one."""
    rows, n = np.arange(len(state["at"])), len(state["at"])
    planes = np.zeros((n, 4 + len(world.counts) + bool(world.distractors), world.cells), np.float32)
    planes[:, 0], planes[:, 1] = state["walls"], state["holes"]
    planes[rows, 2, state["at"]] = 1
    planes[:, 3] = state["covered"]
    for index, kind in enumerate(world.kinds):
        here = rows[state["present"][:, index]]
        planes[here, 4 + kind, state["places"][here, index]] = 1
    if world.distractors:
        planes[rows, -1, state["stray"]] = 1
    return planes.reshape(n, -1, world.size, world.size)


def _pixels(world: Grid, state: State) -> Array:
    """Each cell a square of one colour; red, green and blue from 0 to 1."""
    named = (PAPER, INK, "#9fc5e8", "#b0a990", GOLD, *COLOURS)
    palette = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in named], np.float32) / 255
    kinds = np.minimum(_contents(world, state, agent=True), len(named) - 1)
    cells = palette[kinds].reshape(-1, world.size, world.size, 3).transpose(0, 3, 1, 2)
    wide: Array = cells.repeat(world.pixels, 2).repeat(world.pixels, 3)
    return wide


def _contents(world: Grid, state: State, *, agent: bool) -> Array:
    """What is in each cell, [rows, cells]; the agent hides what it stands on."""
    rows = np.arange(len(state["at"]))
    contents = np.where(state["walls"], WALL, np.where(state["holes"], HOLE, FLOOR))
    for index, kind in enumerate(world.kinds):
        here = rows[state["present"][:, index]]
        contents[here, state["places"][here, index]] = FIRST_KIND + kind
    if world.distractors:
        contents[rows, state["stray"]] = STRAY
    if agent:
        contents[rows, state["at"]] = AGENT
    return contents


def picture(world: Grid, state: State, size: int) -> Array:
    sheet = Canvas(size, (0, world.size), (0, world.size), FAINT)
    contents = _contents(world, {name: column[:1] for name, column in state.items()}, agent=False)[0]
    for cell, what in enumerate(contents.tolist()):
        row, column = divmod(cell, world.size)
        x, y = column, world.size - 1 - row
        covered = world.reward != "objects" and state["covered"][0, cell]
        floor = {WALL: INK, HOLE: "#9fc5e8"}.get(what, "#f6e7c1" if covered else PAPER)
        sheet.box((x + 0.03, y + 0.03), (x + 0.97, y + 0.97), floor, 0.1)
        if what >= FIRST_KIND:
            colour = COLOURS[(what - FIRST_KIND) % len(COLOURS)]
            sheet.shape(
                [(x + 0.5, y + 0.85), (x + 0.85, y + 0.5), (x + 0.5, y + 0.15), (x + 0.15, y + 0.5)], colour
            )
        if what == STRAY:
            sheet.disc((x + 0.5, y + 0.5), 0.2, "#b0a990")
        if cell == int(state["at"][0]):
            sheet.disc((x + 0.5, y + 0.5), 0.33, GOLD, INK)
    return sheet.pixels()


_VIEWS = {
    "state": _state,
    "vector": _vector,
    "categories": _categories,
    "planes": _planes,
    "pixels": _pixels,
}
