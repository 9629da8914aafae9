"""A step off policy: act, remember, and after every action learn from what is remembered, logged data included."""

from __future__ import annotations

from typing import cast

from panoply.experience import Experience
from panoply.loops.actor_critic import ActorCriticLearner
from panoply.loops.job import Job
from panoply.loops.seat import Seat, Stepped
from panoply.regimes import OffPolicy
from panoply.rollout.control import Acting
from panoply.seeds import torch_rng


def off_policy_step(job: Job, seat: Seat, step: int) -> Stepped:
    method, learner = cast(OffPolicy, seat.method), cast(ActorCriticLearner, seat.learner)
    experience: Experience
    if method.data is not None:
        with job.phase("data"):
            experience = seat.parts["data"](seat.collect)
            learner.remember(experience)
    alone = step < learner.rhythm.alone
    learner.begin(step, torch_rng("replay", seat.options.seed, step))
    learner.learned.acting = not alone
    if alone:
        with job.phase("learn"):
            learner.learn(learner.rhythm.a_step)
    else:
        with job.phase("sample"):
            acting: Acting = seat.parts["sample"](seat.collect)
            for buffer in acting:
                learner.replay.add(buffer)
                if due := learner.rhythm.due(learner.replay.written):
                    with job.phase("learn"):
                        learner.learn(due)
            experience = acting.experience()
    experience = experience.with_columns(reward=experience["signal:reward"])
    job.watch(seat, experience)
    return Stepped(experience, learner.metrics())
