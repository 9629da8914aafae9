"""The off-policy loop: act, remember, and after every step learn from what is remembered."""

from __future__ import annotations

from panoply.experience import Experience
from panoply.loops.agents import AgentLearner
from panoply.loops.job import Job
from panoply.regimes import OffPolicy
from panoply.rollout.control import ControlCollector
from panoply.rollout.tape import Tape
from panoply.seeds import torch_rng


def off_policy(job: Job) -> None:
    learner, collect = job.learner, job.collect
    assert isinstance(job.method, OffPolicy)
    assert isinstance(learner, AgentLearner)
    assert isinstance(collect, ControlCollector)
    when = job.method.replay.settings()

    def after_each(tape: Tape) -> None:
        learner.replay.add(tape)
        written = learner.replay.written
        if written * learner.replay.envs > when["warmup"] and written % when["every"] == 0:
            with job.phase("learn"):
                learner.learn(when["updates"])

    collect.each = after_each
    for step in job.steps():
        learner.begin(step, torch_rng("replay", job.plan.options.seed, step))
        with job.phase("sample"):
            experience: Experience = job.call("sample", collect)
            experience = experience.with_columns(reward=experience["signal:reward"])
        job.watch(experience)
        job.finish_step(experience, learner.metrics())
