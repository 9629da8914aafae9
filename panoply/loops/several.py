"""A step of several learners: one game for all, or every seat for itself; whoever has the turn learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.loops.job import Job
from panoply.loops.seat import Seat, Stepped
from panoply.loops.steps import STEP
from panoply.regimes import Several


def several_step(job: Job, step: int) -> Stepped:
    """Metrics are those of the first seat; others' have their seat's name before them."""
    method, names = cast(Several, job.method), tuple(job.seats)
    turn: tuple[str, ...] = job.seat.parts["turn"](names, step, job.logged)
    _check(
        f"turn ({method.turn.info.name}) gives it to", turn, names, fine=bool(turn) and {*turn} <= {*names}
    )
    if method.game is not None:
        with job.phase("sample"):
            collectors = {name: seat.collect for name, seat in job.seats.items()}
            dealt: Mapping[str, Experience] = job.seat.parts["game"](collectors)
        _check(f"game ({method.game.info.name}) deals to", tuple(dealt), names, fine={*dealt} == {*names})
        for name, rows in dealt.items():
            collectors[name].dealt = rows
    done = {name: _one(job, job.seats[name], step) for name in names if name in turn}
    metrics: dict[str, float] = {}
    for name, stepped in done.items():
        before = "" if name == names[0] else f"{name}_"
        metrics |= {f"{before}{key}": value for key, value in stepped.metrics.items()}
    return next(iter(done.values()))._replace(metrics=metrics)


def _one(job: Job, seat: Seat, step: int) -> Stepped:
    return seat.conclude(step, STEP[seat.method.loop](job, seat, step))


def _check(says: str, given: tuple[str, ...], names: tuple[str, ...], *, fine: bool) -> None:
    if not fine:
        raise PanoplyError(
            f"{says} {', '.join(map(str, given)) or 'nobody'}: the seats are {', '.join(names)}."
        )
