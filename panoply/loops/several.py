"""A step of several learners: one game for all, or every seat for itself; whoever has the turn learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from panoply.episodes import as_tensors, earlier, from_tensors
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.loops.job import Job
from panoply.loops.on_policy import check_agreement
from panoply.loops.seat import WAITING, Stepped
from panoply.loops.steps import STEP
from panoply.regimes import Several


def several_step(job: Job, step: int) -> Stepped:
    """Metrics are those of the first seat; others' have their seat's name before them."""
    method, names = cast(Several, job.method), tuple(job.seats)
    waits = _deal(job, method, names) if method.game is not None else {}
    turn: tuple[str, ...] = job.seat.parts["turn"](names, step, {**job.logged, **waits})
    _check(
        f"turn ({method.turn.info.name}) gives it to", turn, names, fine=bool(turn) and {*turn} <= {*names}
    )
    learning = [seat for name, seat in job.seats.items() if name in turn]
    if method.one_model and method.game is not None:
        for seat in learning[1:]:  # before the first of them moves the weights that they share
            if (gap := seat.snapshots.gap(seat.collect.dealt, seat.collect.version)) is not None:
                check_agreement(seat.options.dtype, gap)
    done: dict[str, Stepped] = {}
    for seat in learning:
        if method.one_model and method.game is not None and done:
            seat.collect.dealt = earlier(seat.collect.dealt)
        done[seat.name] = seat.conclude(step, STEP[seat.method.loop](job, seat, step))
        if WAITING in seat.states:
            seat.states[WAITING] = {}
    metrics: dict[str, float] = dict(waits)
    for name, stepped in done.items():
        before = "" if name == names[0] else f"{name}_"
        metrics |= {f"{before}{key}": value for key, value in stepped.metrics.items()}
    return next(iter(done.values()))._replace(metrics=metrics)


def _deal(job: Job, method: Several, names: tuple[str, ...]) -> dict[str, float]:
    """Let the game deal out rows. Where the turn lets them wait: how many episodes each seat has by now.

    Own rows that have waited are of an earlier self, when a seat learns from them.
    """
    assert method.game is not None
    with job.phase("sample"):
        dealt: Mapping[str, Experience] = job.seat.parts["game"](
            {name: seat.collect for name, seat in job.seats.items()}
        )
    _check(f"game ({method.game.info.name}) deals to", tuple(dealt), names, fine={*dealt} == {*names})
    for name, rows in dealt.items():
        seat = job.seats[name]
        if method.turn_waits:
            kept = seat.states[WAITING]
            rows = Experience.mix([earlier(from_tensors(kept)), rows]) if kept else rows
            seat.states[WAITING] = as_tensors(rows)
        seat.collect.dealt = rows
    waiting = job.seats.items() if method.turn_waits else ()
    return {f"waiting_{name}": len(seat.collect.dealt.by("episode")) for name, seat in waiting}


def _check(says: str, given: tuple[str, ...], names: tuple[str, ...], *, fine: bool) -> None:
    if not fine:
        raise PanoplyError(
            f"{says} {', '.join(map(str, given)) or 'nobody'}: the seats are {', '.join(names)}."
        )
