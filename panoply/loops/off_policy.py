"""The off-policy loop: act, remember, and after every step learn from what is remembered, logged data included."""

from __future__ import annotations

from collections.abc import Iterator

from panoply.experience import Experience
from panoply.handle import Step
from panoply.loops.actor_critic import ActorCriticLearner
from panoply.loops.job import Job
from panoply.regimes import Offline, OffPolicy
from panoply.rollout.control import ControlCollector
from panoply.rollout.step_buffer import StepBuffer
from panoply.seeds import torch_rng


def off_policy(job: Job) -> Iterator[Step]:
    learner, collect, method = job.learner, job.collect, job.method
    assert isinstance(method, OffPolicy | Offline)
    assert isinstance(learner, ActorCriticLearner)
    assert isinstance(collect, ControlCollector)
    logged: Experience | None = None
    if method.data is not None:
        with job.phase("data"):
            logged = job.call("data", collect)
            learner.remember(logged)

    def after_each(buffer: StepBuffer) -> None:
        learner.replay.add(buffer)
        due = updates_due(method, learner.replay.written, learner.replay.envs)
        if due:
            with job.phase("learn"):
                learner.learn(due)

    collect.each = after_each
    alone = steps_alone(method, job.plan.options.steps)
    for step in job.steps():
        learner.begin(step, torch_rng("replay", job.plan.options.seed, step))
        learner.learned.acting = step >= alone
        if logged is not None and step < alone:
            experience = logged
            with job.phase("learn"):
                learner.learn(updates_a_step(method))
        else:
            with job.phase("sample"):
                experience = job.call("sample", collect)
        experience = experience.with_columns(reward=experience["signal:reward"])
        job.watch(experience)
        yield job.finish_step(experience, learner.metrics())


def steps_alone(method: OffPolicy | Offline, steps: int) -> int:
    """How many steps of a run learn from logged data alone, before the policy acts."""
    if method.data is None:
        return 0
    said = method.data.settings()["alone"]
    return int(said) if said is not None else steps // 2 if isinstance(method, Offline) else 0


def updates_a_step(method: OffPolicy | Offline) -> int:
    """How many updates a step of the run has."""
    replay = method.replay.settings()
    if isinstance(method, Offline):
        return int(replay["updates"])
    return int(method.sample.settings()["length"] // replay["every"] * replay["updates"])


def updates_due(method: OffPolicy | Offline, written: int, envs: int) -> int:
    """How many updates are due when so many steps of each environment have been written.

    A method for logged data has as many updates in a step of the run as it has without acting, spread evenly.
    """
    replay = method.replay.settings()
    if isinstance(method, Offline):
        assert method.sample is not None
        updates, length = replay["updates"], method.sample.settings()["length"]
        return int(written * updates // length - (written - 1) * updates // length)
    enough = method.data is not None or written * envs > replay["warmup"]
    return int(replay["updates"]) if enough and written % replay["every"] == 0 else 0
