"""The learning curve of the GPU benchmark as an SVG: success against seconds, Panoply's and TRL's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 340, 48, 16, 16, 40
PANOPLY, TRL, INK, GRID = "#2563eb", "#d97706", "#6b7280", "#d1d5db"
Points = Sequence[tuple[float, float]]


def draw(ours: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> str:
    """Thin lines are success in training, dots success on held-out problems."""
    mine = [(p["seconds"], p["success"]) for p in ours["curve"]]
    held = [(0.0, ours["before"]["sampled"])]
    held += [(p["seconds"], p["held_out_sampled"]) for p in ours["curve"] if "held_out_sampled" in p]
    other = [(p["seconds"], p["success"]) for p in theirs["curve"]] if theirs else []
    last = max(x for x, _ in [*mine, *other])

    def place(point: tuple[float, float]) -> str:
        x, y = point
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / last
        return f"{across:.1f},{HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y:.1f}"

    def line(points: Points, colour: str, width: float = 1.5) -> str:
        path = " ".join(map(place, points))
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    def dots(points: Points, colour: str) -> list[str]:
        places = (place(p).split(",") for p in points)
        return [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>' for x, y in places]

    def label(point: tuple[float, float], text: str, colour: str = INK, dx: int = 0, dy: int = 0) -> str:
        x, y = (float(c) for c in place(point).split(","))
        return f'<text x="{x + dx:.1f}" y="{y + dy:.1f}" fill="{colour}">{text}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tenths in range(0, 11, 2):
        parts.append(line([(0, tenths / 10), (last, tenths / 10)], GRID, 0.7))
        parts.append(label((0, tenths / 10), f"{tenths / 10:.1f}", dx=-30, dy=4))
    for second in range(0, int(last) + 1, 5):
        parts.append(label((second, 0), f"{second} s", dx=-8, dy=20))
    parts += [line(mine, PANOPLY), *dots(held, PANOPLY)]
    parts.append(label((0.55 * last, 0.28), "Panoply: in training (line), held out (dots)", PANOPLY))
    if theirs:
        ends = [(0.0, theirs["before"]["sampled"]), (other[-1][0], theirs["after"]["sampled"])]
        parts += [line(other, TRL), *dots(ends, TRL)]
        parts.append(label((0.55 * last, 0.2), f"TRL: its first {len(other)} steps", TRL))
    return "\n".join([*parts, "</svg>"]) + "\n"
