"""Curves and drawings as files: a PNG and an SVG for each, made by matplotlib."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panoply.errors import PanoplyError, needs_extra
from panoply.report.curves import Experiment, curve
from panoply.report.drawings import HEIGHT, WIDTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from panoply.report.drawings import Drawing, Shape

COLOURS = (
    "#2f6fde",
    "#d9611e",
    "#16876b",
    "#a63fb0",
    "#b8860b",
    "#c72c4b",
    "#0f8aa8",
    "#6a5acd",
    "#5d7a1f",
    "#7a4b2a",
)
QUIET = "#5a6478"
LOOKS = {"axis": "#e3e7ee", "guide": "#9aa3b2", "ink": "#1b2130"} | {
    f"{kind}{i}": colour for kind in "fl" for i, colour in enumerate(COLOURS[:2])
}
"""Colours of a drawing's classes."""
STYLE = {
    "axes.edgecolor": "#9aa3b2",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "font.size": 9,
    "grid.color": "#e3e7ee",
    "legend.frameon": False,
    "svg.hashsalt": "panoply",  # the same numbers give the same file
}


def draw(
    experiments: Sequence[Experiment],
    metrics: Sequence[str],
    folder: Path,
    drawings: Sequence[tuple[str, Drawing]] = (),
) -> list[Path]:
    """One picture a metric, in two formats. Lines are means over seeds, bands reach from the lowest to the highest.

    drawings: others, each with whose it is
    """
    pyplot, rc_context = _matplotlib()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PanoplyError(f"Cannot write pictures to {folder}: {error.strerror}.") from error
    made = []
    with rc_context(STYLE):
        for metric in metrics:
            figure, axes = pyplot.subplots(figsize=(5.6, 3.4), layout="constrained")
            plot(axes, experiments, metric)
            made += _saved(pyplot, figure, folder, metric)
        for label, drawing in drawings:
            figure, axes = pyplot.subplots(figsize=(5.6, 3.9), layout="constrained")
            paint(axes, drawing, label)
            made += _saved(pyplot, figure, folder, f"{drawing.title} {label}")
    return made


def _saved(pyplot: Any, figure: Any, folder: Path, name: str) -> list[Path]:
    made = []
    for kind in ("png", "svg"):
        file = folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}.{kind}"
        figure.savefig(file, dpi=150, metadata={"Date": None} if kind == "svg" else None)
        made.append(file)
    pyplot.close(figure)
    return made


def paint(axes: Axes, drawing: Drawing, label: str) -> None:
    """The shapes of a drawing, at the places they have in it."""
    axes.set_title(f"{drawing.title}, {label}")
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(HEIGHT + 16, 0)
    axes.axis("off")
    axes.text(44, HEIGHT + 14, drawing.note, fontsize=7, color=QUIET)
    for shape in drawing.shapes:
        _shape(axes, shape)


def _shape(axes: Axes, shape: Shape) -> None:
    tag, at, text = shape
    looks = str(at.get("class", "")).split()
    colour = next((LOOKS[look] for look in looks if look in LOOKS), QUIET)
    if tag == "text":
        turn = 90 if "transform" in at else 0
        where = {"middle": "center", "end": "right", "start": "left"}[at["text-anchor"]]
        middle = "center" if turn else "baseline"
        axes.text(at["x"], at["y"], text, fontsize=7, color=QUIET, ha=where, va=middle, rotation=turn)
    elif tag == "rect":
        axes.bar(at["x"], at["height"], at["width"], at["y"], align="edge", color=colour, zorder=2)
    elif tag == "circle":
        axes.plot([at["cx"]], [at["cy"]], "o", color=colour, markersize=1.6 * at["r"])
    else:
        points = [tuple(map(float, two.split(","))) for two in at.get("points", "").split()]
        points = points or [(at["x1"], at["y1"]), (at["x2"], at["y2"])]
        style = "--" if {"dashed", "guide"} & set(looks) else "-"
        width = 0.8 if {"thin", "guide", "axis"} & set(looks) else 1.6
        axes.plot(
            *zip(*points, strict=True),
            style,
            color=colour,
            linewidth=width,
            zorder=1 if "axis" in looks else 3,
        )


def plot(axes: Axes, experiments: Sequence[Experiment], metric: str) -> None:
    """The curves of one metric."""
    for i, experiment in enumerate(experiments):
        found = curve(experiment, metric)
        if not len(found.x):
            continue
        seeds = f" ({len(found.runs)} seeds)" if len(found.runs) > 1 else ""
        colour = COLOURS[i % len(COLOURS)]
        style = "-" if i < len(COLOURS) else "--"
        axes.plot(found.x, found.mean, style, color=colour, label=f"{found.label}{seeds}", linewidth=1.6)
        axes.fill_between(found.x, found.low, found.high, color=colour, alpha=0.16, linewidth=0)
    axes.set_title(metric)
    axes.set_xlabel("step")
    axes.set_ylabel(metric)
    axes.legend(fontsize=8)


def _matplotlib() -> tuple[Any, Any]:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise needs_extra("matplotlib", "report", "Drawing pictures") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot, rc_context

    return pyplot, rc_context
