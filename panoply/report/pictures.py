"""Curves as files: a PNG and an SVG for each metric, drawn by matplotlib."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panoply.errors import PanoplyError, needs_extra
from panoply.report.curves import Experiment, curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def draw(experiments: Sequence[Experiment], metrics: Sequence[str], folder: Path) -> list[Path]:
    """One picture a metric, in two formats. Lines are means over seeds, bands reach from the lowest to the highest."""
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
            for kind in ("png", "svg"):
                file = folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', metric)}.{kind}"
                figure.savefig(file, dpi=150, metadata={"Date": None} if kind == "svg" else None)
                made.append(file)
            pyplot.close(figure)
    return made


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
