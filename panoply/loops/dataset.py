"""A step on a data set: draw a batch of given data, descend the losses."""

from __future__ import annotations

from panoply.experience import Experience
from panoply.loops.job import Job
from panoply.loops.learner import mean_metrics
from panoply.loops.seat import Seat, Stepped
from panoply.seeds import torch_rng


def dataset_step(job: Job, seat: Seat, step: int) -> Stepped:
    with job.phase("data"):
        batch: Experience = seat.parts["data"](seat.collect)
    with job.phase("score"):
        for annotate in seat.annotators:
            batch = annotate(batch)
        job.watch(seat, batch)
    with job.phase("learn"):
        metrics = seat.models.fit(batch, step) if seat.models.held else {}
        if step >= seat.models.warmup:
            order = torch_rng("minibatches", seat.options.seed, step)
            learned = [seat.learner.step(m, step) for m in seat.learner.minibatches(batch, order)]
            metrics |= mean_metrics(learned)
    metrics |= seat.collect.notes
    seat.collect.notes = {}
    return Stepped(batch, metrics)
