"""Pictures of worlds: shapes in the world's own coordinates, drawn large and scaled down, so that edges are smooth."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from panoply.errors import needs_extra
from panoply.worlds.control.world import Array

PAPER, INK, FAINT = "#f7f6f2", "#2b2d42", "#d9d7ce"
BLUE, RED, GREEN, GOLD, VIOLET = "#3a6ea5", "#d1495b", "#5b9a68", "#e0a030", "#7d5ba6"
Point = Array | tuple[float, float]
SHARPNESS = 3
"""How many times larger than asked for a picture is drawn before it is scaled down."""


class Canvas:
    """A square or oblong sheet. x runs to the right, y up, within the given limits."""

    def __init__(
        self,
        width: int,
        x: tuple[float, float],
        y: tuple[float, float],
        paper: str = PAPER,
    ):
        try:
            image, draw = importlib.import_module("PIL.Image"), importlib.import_module("PIL.ImageDraw")
        except ImportError as missing:
            raise needs_extra("Pillow", "video", "Drawing a world") from missing
        self.x, self.y = x, y
        self.unit = width * SHARPNESS / (x[1] - x[0])
        self.size = (width, max(1, round(width * (y[1] - y[0]) / (x[1] - x[0]))))
        self.image: Any = image.new("RGB", (self.size[0] * SHARPNESS, self.size[1] * SHARPNESS), paper)
        self.draw: Any = draw.Draw(self.image)
        self.smooth: Any = image.Resampling.BOX

    def pixels(self) -> Array:
        """The finished picture."""
        return np.asarray(self.image.resize(self.size, self.smooth))

    def line(self, points: Iterable[Point], colour: str = INK, width: float = 0.02) -> None:
        at = [self._at(point) for point in points]
        self.draw.line(at, fill=colour, width=max(1, round(width * self.unit)), joint="curve")

    def rod(self, start: Point, end: Point, colour: str, width: float) -> None:
        """A line with round ends."""
        self.line([start, end], colour, width)
        for point in (start, end):
            self.disc(point, width / 2, colour)

    def disc(self, at: Point, radius: float, colour: str, edge: str | None = None) -> None:
        (x, y), r = self._at(at), radius * self.unit
        self.draw.ellipse((x - r, y - r, x + r, y + r), fill=colour, outline=edge, width=SHARPNESS)

    def box(self, low: Point, high: Point, colour: str, round_by: float = 0.0) -> None:
        (left, bottom), (right, top) = self._at(low), self._at(high)
        self.draw.rounded_rectangle((left, top, right, bottom), round_by * self.unit, fill=colour)

    def shape(self, points: Iterable[Point], colour: str) -> None:
        self.draw.polygon([self._at(point) for point in points], fill=colour)

    def arrow(self, start: Point, along: Point, colour: str, width: float) -> None:
        """From a point, as far as `along` says; nothing where that is nowhere."""
        reach = np.asarray(along, np.float64)
        if not np.hypot(*reach) > width:
            return
        ahead = reach / np.hypot(*reach) * 2.5 * width
        side = np.array([-ahead[1], ahead[0]]) * 0.6
        tip = np.asarray(start) + reach
        self.line([start, tip - ahead * 0.8], colour, width)
        self.shape([tip, tip - ahead + side, tip - ahead - side], colour)

    def _at(self, point: Point) -> tuple[float, float]:
        x, y = float(point[0]), float(point[1])
        return (x - self.x[0]) * self.unit, (self.y[1] - y) * self.unit
