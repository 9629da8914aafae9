"""The steps of a run: which function makes them, by the method's regime."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from panoply.handle import Step
from panoply.loops.dataset import dataset_step
from panoply.loops.job import Job
from panoply.loops.off_policy import off_policy_step
from panoply.loops.on_policy import on_policy_step
from panoply.loops.seat import Seat, Stepped

STEP: dict[str, Callable[[Job, Seat, int], Stepped]] = {
    "on_policy": on_policy_step,
    "dataset": dataset_step,
    "off_policy": off_policy_step,
}


def steps(job: Job) -> Iterator[Step]:
    """All steps that are left, one after another."""
    if len(job.seats) > 1:
        from panoply.loops.several import several_step

        for step in job.steps():
            yield job.finish_step(several_step(job, step))
        return
    seat, made = job.seat, STEP[job.method.loop]
    for step in job.steps():
        yield job.finish_step(seat.conclude(step, made(job, seat, step)))
