"""Small pictures as shapes, which the report writes as SVG and the page in the browser builds element by element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

WIDTH, HEIGHT = 340, 220
LEFT, TOP, BOTTOM = 44, 10, 40
Shape = tuple[str, dict[str, Any], str]
"""An SVG element: its tag, its attributes (colours by `class`), and its text."""
Range = tuple[float, float]


@dataclass
class Drawing:
    """A picture with two axes, and a third at the right where a second curve has a scale of its own."""

    title: str
    note: str
    x: str
    y: str
    xs: Range
    ys: Range
    right: str = ""
    rights: Range = (0.0, 1.0)
    named: bool = False
    """Whether places along x have names, and no numbers."""
    shapes: list[Shape] = field(default_factory=list)

    def __post_init__(self) -> None:
        for at in () if self.named else _ticks(self.xs):
            self._text(self._x(at), HEIGHT - BOTTOM + 14, show(at), "middle")
        for at in _ticks(self.ys):
            height = self._y(at)
            self._add("line", x1=LEFT, x2=self._end, y1=height, y2=height, **{"class": "axis"})
            self._text(LEFT - 6, height + 3, show(at), "end")
        for at in _ticks(self.rights) if self.right else ():
            self._text(self._end + 6, self._y(at, self.rights) + 3, show(at), "start")
        self._text((LEFT + self._end) / 2, HEIGHT - 8, self.x, "middle")
        self._turned(12, self.y)
        if self.right:
            self._turned(WIDTH - 6, self.right)

    def line(self, xs: Sequence[float], ys: Sequence[float], look: str, right: bool = False) -> None:
        """A curve through points, in the order given."""
        scale = self.rights if right else self.ys
        points = " ".join(f"{self._x(x):.1f},{self._y(y, scale):.1f}" for x, y in zip(xs, ys, strict=True))
        self._add("polyline", points=points, **{"class": look})

    def point(self, x: float, y: float, size: float, told: str, look: str = "f0") -> None:
        self._add("circle", told, cx=self._x(x), cy=self._y(y), r=size, **{"class": look})

    def bar(self, low: float, high: float, top: float, told: str, look: str = "f0") -> None:
        left, up = self._x(low), self._y(top)
        wide, tall = max(0.5, self._x(high) - left - 1), max(0.0, self._y(self.ys[0]) - up)
        self._add("rect", told, x=left, y=up, width=wide, height=tall, **{"class": look})

    def name(self, x: float, words: str) -> None:
        """What stands at a place along x."""
        self._text(self._x(x), HEIGHT - BOTTOM + 14, words, "middle")

    def svg(self) -> str:
        inside = "".join(_element(*shape) for shape in self.shapes)
        label = escape(f"{self.title}: {self.note}")
        return f'<svg class="drawn" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{inside}</svg>'

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "note": self.note,
            "size": [WIDTH, HEIGHT],
            "shapes": [list(s) for s in self.shapes],
        }

    # -------------------------------------------------------------- places

    @property
    def _end(self) -> float:
        """Where the axis along x ends."""
        return WIDTH - (44 if self.right else 10)

    def _x(self, at: float) -> float:
        low, high = self.xs
        return round(LEFT + (at - low) / ((high - low) or 1.0) * (self._end - LEFT), 1)

    def _y(self, at: float, scale: Range | None = None) -> float:
        low, high = scale or self.ys
        return round(HEIGHT - BOTTOM - (at - low) / ((high - low) or 1.0) * (HEIGHT - TOP - BOTTOM), 1)

    def _add(self, tag: str, text: str = "", **attributes: Any) -> None:
        self.shapes.append((tag, attributes, text))

    def _text(self, x: float, y: float, words: str, anchor: str) -> None:
        self._add("text", words, x=x, y=y, **{"text-anchor": anchor})

    def _turned(self, x: float, words: str) -> None:
        y = (TOP + HEIGHT - BOTTOM) / 2
        self._add("text", words, x=x, y=y, transform=f"rotate(-90 {x} {y})", **{"text-anchor": "middle"})


def show(value: float) -> str:
    return f"{value:.3g}".replace("-", "−")


def around(values: Sequence[float]) -> Range:
    """A range that holds all values, and a little more."""
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or 0.5
    return low - room, high + room


def _ticks(scale: Range) -> list[float]:
    """Round numbers within a range, six at most."""
    low, high = scale
    rough = (high - low) / 5 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _element(tag: str, attributes: dict[str, Any], text: str) -> str:
    """What a shape says is its text, or what is told where one points at it."""
    words = "".join(f' {name}="{escape(str(value))}"' for name, value in attributes.items())
    inside = escape(text) if tag == "text" else f"<title>{escape(text)}</title>" if text else ""
    return f"<{tag}{words}>{inside}</{tag}>"
