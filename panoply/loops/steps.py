"""The steps of a run: which function makes one, by the method's regime."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from panoply.handle import Step
from panoply.loops.dataset import dataset_step
from panoply.loops.job import Job, Stepped
from panoply.loops.off_policy import off_policy_step
from panoply.loops.on_policy import on_policy_step
from panoply.loops.seat import Seat

STEP: dict[str, Callable[[Job, Seat, int], Stepped]] = {
    "on_policy": on_policy_step,
    "dataset": dataset_step,
    "off_policy": off_policy_step,
}


def steps(job: Job) -> Iterator[Step]:
    """All steps that are left, one after another."""
    if len(job.seats) == 1:
        for step in job.steps():
            yield job.finish_step(seat_step(job, job.seat, step))
        return
    from panoply.loops.several import several_step

    for step in job.steps():
        yield job.finish_step(several_step(job, step))


def seat_step(job: Job, seat: Seat, step: int) -> Stepped:
    """One learner's step; the weights must be sound after it."""
    stepped = STEP[seat.method.loop](job, seat, step)
    described = seat.conclude(step + 1, stepped.experience)
    return stepped._replace(metrics=described | dict(stepped.metrics))
