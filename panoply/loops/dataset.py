"""The data-set loop: draw a batch of given data, descend the losses."""

from __future__ import annotations

from collections.abc import Iterator

from panoply.experience import Experience
from panoply.handle import Step
from panoply.loops.job import Job
from panoply.loops.learner import mean_metrics
from panoply.regimes import Dataset, Offline
from panoply.seeds import torch_rng


def dataset(job: Job) -> Iterator[Step]:
    assert isinstance(job.method, Dataset | Offline)
    for step in job.steps():
        with job.phase("data"):
            batch: Experience = job.call("data", job.collect)
        with job.phase("score"):
            batch = job.snapshots.score(batch)
            job.watch(batch)
        with job.phase("learn"):
            order = torch_rng("minibatches", job.plan.options.seed, step)
            metrics = mean_metrics([job.learner.step(m, step) for m in job.learner.minibatches(batch, order)])
        yield job.finish_step(batch, metrics)
