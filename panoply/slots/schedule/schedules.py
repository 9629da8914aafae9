"""Schedules: factors that change from step to step of a run whose budget is `total` steps."""

from __future__ import annotations

import math
from typing import Any

from panoply.errors import PanoplyError
from panoply.parts import Part, options, part


def _rise(step: int, total: int, warmup: int | float) -> float:
    """A line from 1/warmup at the first step to 1."""
    steps = warm_steps(warmup, total)
    return min(1.0, (step + 1) / steps) if steps > 0 else 1.0


def warm_steps(warmup: int | float, total: int) -> float:
    """Steps of warm-up: as many as given, or, below 1, that share of the budget."""
    return warmup * total if 0 < warmup < 1 else warmup


def _fall(step: int, total: int, start: float) -> float:
    """The share of the way from `start` (a share of the budget) to the end of the budget."""
    return min(1.0, max(0.0, step - start * total) / max(1e-12, (1.0 - start) * total))


@part("schedule", equation="constant after {warmup} steps", bounds={"warmup": "at least 0"})
def constant(step: int, total: int, *, warmup: int | float = 0) -> float:
    """1, after a warm-up of so many steps."""
    return _rise(step, total, warmup)


@part(
    "schedule",
    equation="linear to {end} after {warmup} steps",
    bounds={"end": "at least 0", "warmup": "at least 0", "start": "at least 0"},
)
def linear(step: int, total: int, *, end: float = 0.0, warmup: int | float = 0, start: float = 0.0) -> float:
    """1 until the share `start` of the budget, then in a line to `end`."""
    return _rise(step, total, warmup) * (1.0 + (end - 1.0) * _fall(step, total, start))


@part(
    "schedule",
    equation="{first} to {last} in a line",
    bounds={"first": "any number", "last": "any number"},
)
def ramp(step: int, total: int, *, first: float = 0.0, last: float = 1.0) -> float:
    """In a line over the whole budget, from `first` at the first step to `last` at the last one."""
    return first + (last - first) * min(1.0, step / max(1, total - 1))


@part(
    "schedule",
    equation="1/t, t = {start}·(1 − k/N), at least {floor}",
    bounds={"start": "above 0", "floor": "above 0"},
)
def inverse(step: int, total: int, *, start: float = 1.0, floor: float = 0.05) -> float:
    """1/t, where t falls in a line from `start` to 0 over the budget of N steps, but not below `floor`."""
    return 1.0 / max(floor, start * (1.0 - step / max(1, total)))


@part(
    "schedule",
    equation="cosine to {end} after {warmup} steps",
    bounds={"end": "at least 0", "warmup": "at least 0"},
)
def cosine(step: int, total: int, *, end: float = 0.0, warmup: int | float = 0) -> float:
    """From 1 to `end` along half a cosine."""
    fall = _fall(step, total, min(1.0, warm_steps(warmup, total) / max(1, total)))
    return _rise(step, total, warmup) * (end + (1.0 - end) * 0.5 * (1.0 + math.cos(math.pi * fall)))


@part(
    "schedule",
    equation="{first} to {last} along half a cosine of {steps} steps",
    bounds={"first": "any number", "last": "any number", "steps": "above 0"},
)
def half_cosine(
    step: int, total: int, *, first: float = 0.0, last: float = 1.0, steps: int | float = 1.0
) -> float:
    """From `first` to `last` along half a cosine, and then `last`.

    steps: how long it takes; up to 1, a share of the budget
    """
    length = steps * total if steps <= 1 else steps
    return last + (first - last) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / max(1e-12, length))))


@part("schedule", equation="√(warmup/step) after {warmup} steps", bounds={"warmup": "at least 1"})
def inverse_sqrt(step: int, total: int, *, warmup: int = 200) -> float:
    """Up in a line, then down with the root of the steps taken, whatever the budget."""
    return min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))


@part("schedule", equation="(2/(t + 2))^{power}", bounds={"power": "at least 0"})
def decaying(step: int, total: int, *, power: float = 1.0) -> float:
    """1 at first, then down with a power of the steps taken, whatever the budget."""
    return float((2 / (step + 2)) ** power)


@part(
    "schedule",
    equation=lambda held: f"{', '.join(f'{v:g}' for v in held.values)}, {held.every} steps each",
    bounds={"values": "any number", "every": "at least 1"},
)
def staged(step: int, total: int, *, values: tuple[float, ...] = (1.0, 0.5), every: int = 100) -> float:
    """Values in stages of so many steps, v[min(⌊step/every⌋, K − 1)]; the last one stays."""
    if not values:
        raise PanoplyError("schedule.staged has no values: it takes one or more, such as 6,13,20.")
    return values[min(step // every, len(values) - 1)]


def at(value: float | Part, step: int, total: int) -> float:
    """A number, or a schedule's value at `step` of `total`."""
    return float(value.filled(step, total)) if isinstance(value, Part) else value


def scheduled(held: Part) -> bool:
    """Whether a number of a part follows a schedule, or one of a part of the same slot in its settings."""
    return any(_is_schedule(inner) or scheduled(inner) for inner in _inner(held).values())


def in_step(held: Part, step: int, total: int) -> Part:
    """The part with what its schedules say in a step, and those of parts of the same slot in its settings.

    A setting that counts something is then the whole number below.
    """
    changed: dict[str, Any] = {}
    for name, inner in _inner(held).items():
        counts = float not in options(held.annotations()[name])
        value = at(inner, step, total) if _is_schedule(inner) else in_step(inner, step, total)
        changed[name] = math.floor(value) if counts and isinstance(value, float) else value
    return held.but(**changed)


def _inner(held: Part) -> dict[str, Part]:
    """Settings of a part that are schedules, or parts as it is one itself."""
    own = held.info.slot
    return {
        name: value
        for name, value in held.settings().items()
        if isinstance(value, Part) and (_is_schedule(value) or value.info.slot == own)
    }


def _is_schedule(held: Part) -> bool:
    return held.info.slot == "schedule"


def settled(value: float | Part, total: int) -> list[float]:
    """What a value is in the first steps, the last of which it stays at; none where it goes on changing.

    So is a number, and the schedule `constant` with its warm-up.
    """
    if not isinstance(value, Part):
        return [value]
    if value.info.id != "schedule.constant":
        return []
    rising = math.ceil(warm_steps(value.settings()["warmup"], total))
    return [at(value, step, total) for step in range(max(1, rising))]
