"""Curves with bands as SVG: by Matplotlib where it is installed, and plainly drawn where it is not."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from panoply.checkpoint import write_atomically
from panoply.evidence import statistics
from panoply.report.pictures import COLOURS, STYLE

WIDTH, HEIGHT = 640, 360


@dataclass(frozen=True)
class Line:
    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def learning_line(label: str, curves: Sequence[Sequence[tuple[float, float]]], budget: float) -> Line:
    """Curves of several seeds as their interquartile mean with its 95 % band."""
    grid = np.linspace(0.0, budget, 41)
    stacked = np.stack([statistics.on_grid(curve, list(grid)) for curve in curves])
    middle, low, high = statistics.band(stacked)
    return Line(label, *([round(float(v), 5) for v in a] for a in (grid, middle, low, high)))


def draw(path: Path, lines: Sequence[Line], x: str, y: str) -> None:
    """Write a picture of some lines."""
    write_atomically(path, _drawn_by_matplotlib(lines, x, y) or _drawn_plainly(lines, x, y))


def _drawn_by_matplotlib(lines: Sequence[Line], x: str, y: str) -> str | None:
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        return None
    import io

    style: dict[Any, Any] = {**STYLE, "svg.fonttype": "none", "font.family": "sans-serif"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for line, colour in zip(lines, _cycle(len(lines)), strict=True):
            axes.plot(line.x, line.y, color=colour, label=line.label)
            if len(line.low):
                axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.legend()
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(text.rstrip() for text in out.getvalue().splitlines()) + "\n"


def _cycle(n: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(n)]


def _drawn_plainly(lines: Sequence[Line], x: str, y: str) -> str:
    """Axes from the least to the greatest value, lines, bands, and a legend."""
    left, top, right, bottom = 60, 16, WIDTH - 16, HEIGHT - 48
    across, up = (
        _span([line.x for line in lines]),
        _span([v for li in lines for v in (li.y, li.low, li.high)]),
    )

    def place(xs: ArrayLike, ys: ArrayLike) -> str:
        px = left + (np.asarray(xs, float) - across[0]) / (across[1] - across[0]) * (right - left)
        py = bottom - (np.asarray(ys, float) - up[0]) / (up[1] - up[0]) * (bottom - top)
        return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(px, py, strict=True))

    def text(at: tuple[float, float], words: str, anchor: str, more: str = "") -> str:
        return f'<text x="{at[0]:.0f}" y="{at[1]:.0f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'

    pieces = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<path d="M{left},{top} V{bottom} H{right}" fill="none" stroke="#888"/>',
        text((left, bottom + 16), f"{across[0]:g}", "start"),
        text((right, bottom + 16), f"{across[1]:g}", "end"),
        text((left - 6, bottom), f"{up[0]:.3g}", "end"),
        text((left - 6, top + 8), f"{up[1]:.3g}", "end"),
        text(((left + right) / 2, HEIGHT - 12), x, "middle"),
        text((16, (top + bottom) / 2), y, "middle", f' transform="rotate(-90 16 {(top + bottom) / 2:.0f})"'),
    ]
    for i, (line, colour) in enumerate(zip(lines, _cycle(len(lines)), strict=True)):
        if len(line.low):
            around = place([*line.x, *reversed(line.x)], [*line.low, *reversed(line.high)])
            pieces.append(f'<polygon points="{around}" fill="{colour}" fill-opacity="0.18"/>')
        pieces.append(
            f'<polyline points="{place(line.x, line.y)}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        pieces.append(text((right, bottom - 10 - 16 * i), line.label, "end", f' fill="{colour}"'))
    return "\n".join([*pieces, "</svg>"]) + "\n"


def _span(values: Sequence[Sequence[float]]) -> tuple[float, float]:
    found = [v for several in values for v in several]
    low, high = min(found, default=0.0), max(found, default=1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def draw_all(pictures: Sequence[tuple[Path, Sequence[Line], str, str]]) -> list[Path]:
    """Several pictures; one that cannot be written is left out, since what it shows is kept as numbers too."""
    made = []
    for path, lines, x, y in pictures:
        with contextlib.suppress(OSError):
            draw(path, lines, x, y)
            made.append(path)
    return made
