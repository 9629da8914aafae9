"""The on-policy loop: collect, assign credit, ascend the surrogate for some epochs, forget."""

from __future__ import annotations

from collections.abc import Iterator

from panoply.experience import Experience
from panoply.handle import Step
from panoply.loops.health import check_agreement
from panoply.loops.job import Job
from panoply.loops.learner import mean_metrics
from panoply.regimes import OnPolicy
from panoply.seeds import torch_rng


def on_policy(job: Job) -> Iterator[Step]:
    method = job.method
    assert isinstance(method, OnPolicy)
    for step in job.steps():
        with job.phase("sample"):
            asked = -job.collect.state["tasks"]
            collected = job.sample()
            asked += job.collect.state["tasks"]
        with job.phase("score"):
            collected = job.models.annotate(job.snapshots.score(collected))
        with job.phase("credit"):
            collected = collected.with_columns(reward=job.call("reward", collected))
            job.watch(collected)
            experience = collected
            for part in method.select:
                kept = job.call(f"select.{part.info.name}", experience, part=part)
                experience = kept if isinstance(kept, Experience) else experience.take(kept)
            if len(experience):
                credited = job.call("credit", experience)
                columns = credited if isinstance(credited, dict) else {"advantage": credited}
                experience = experience.with_columns(**columns)
        with job.phase("learn"):
            metrics = job.models.fit(experience, step)
            if step >= job.models.warmup:
                metrics |= learn(job, experience, step)
        metrics["groups_asked"] = asked
        yield job.finish_step(
            collected if len(experience) < len(collected) else experience, metrics, learned=experience
        )


def learn(job: Job, experience: Experience, step: int) -> dict[str, float]:
    """Epochs of mini-batches. Metrics are the mean over them, and of the first one the agreement with the sampler."""
    found: list[dict[str, float]] = []
    method = job.method
    stale = isinstance(method, OnPolicy) and "stale" in method.sample.info.gives
    order = torch_rng("minibatches", job.plan.options.seed, step)
    for minibatch in job.learner.minibatches(experience, order):
        found.append(job.learner.step(minibatch, step))
        if len(found) == 1 and "logp_gap" in found[0] and not stale:
            check_agreement(job.plan, found[0]["logp_gap"])
    if not found:
        return {"loss": 0.0}
    metrics = mean_metrics(found)
    metrics["updates"] = len(found)
    if "logp_gap" in found[0]:
        metrics["step0_gap"] = found[0]["logp_gap"]
        metrics["step0_ratio_max"] = found[0]["ratio_max"]
        moved = [f for f in found if "ratio_off" in f]  # a mini-batch without any advantage has no ratios
        if len(found) > 1:
            metrics |= {f"end_{name}": moved[-1][name] for name in ("ratio_off", "ratio_max")}
    metrics.pop("logp_gap", None)
    return metrics
