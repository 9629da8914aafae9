"""A job's checkpoints: where it is and what its seats hold, written down and taken up again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from panoply import checkpoint
from panoply.errors import PanoplyError
from panoply.ranges import MOST_THREADS

if TYPE_CHECKING:
    from panoply.loops.job import Job


def save(job: Job) -> None:
    """A checkpoint of now; older ones than are to be kept go."""
    states = {seat: seat.state() for seat in job.seats.values()}
    own, tensors = states.pop(job.seat)
    if states:
        own["seats"] = {seat.name: plain for seat, (plain, _) in states.items()}
        tensors |= {f"{seat.place}:{key}": v for seat, (_, kept) in states.items() for key, v in kept.items()}
    state = {
        **own,
        "step": job.step,
        "seconds": job.seconds,
        "best": job.best,
        "before": job.before,
        "after": job.after,
        "threads": torch.get_num_threads(),
    }

    def models(folder: Path) -> None:
        for seat in job.seats.values():
            seat.save(folder)

    job.run.sync()
    checkpoint.save(job.run.checkpoints, job.step, models, state, tensors)
    prune(job)


def prune(job: Job) -> None:
    """Leave as many checkpoints as are to be kept, and the best."""
    checkpoint.prune(job.run.checkpoints, job.plan.options.keep, job.best["step"])


def load(job: Job, found: checkpoint.Checkpoint) -> None:
    """Take up what a checkpoint holds: whole, as its manifest says, but perhaps of another method or version."""
    try:
        _take_up(job, found)
    except (
        PanoplyError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        AssertionError,
    ) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise PanoplyError(
            f"The checkpoint {found.folder} does not fit this run, so there is nothing to resume from: {said}."
        ) from error


def _take_up(job: Job, found: checkpoint.Checkpoint) -> None:
    state, tensors = found.state(), found.tensors()
    if not 1 <= state["threads"] <= MOST_THREADS:
        raise PanoplyError(f"threads are from 1 to {MOST_THREADS}, not {state['threads']}")
    if state["threads"] != torch.get_num_threads():
        torch.set_num_threads(state["threads"])
    for seat in job.seats.values():
        plain: Any = state if seat is job.seat else state["seats"][seat.name]
        seat.load(found.folder, plain, tensors)
        seat.collect.version = state["step"]
    if job.spread is not None:
        job.spread.resume(found.folder)
    job.step = state["step"]
    job.seconds, job.best = state["seconds"], state["best"]
    job.before, job.after = state["before"], state["after"]
