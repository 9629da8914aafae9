"""A step on policy: collect, assign credit, ascend the surrogate for some epochs, forget."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch

from panoply.errors import PanoplyError
from panoply.experience import OWN, REPLAY, Experience
from panoply.loops.job import Job
from panoply.loops.learner import STOPPED, Learner, mean_metrics
from panoply.loops.seat import Seat, Stepped
from panoply.regimes import OnPolicy
from panoply.seeds import torch_rng

AGREEMENT = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 2e-1}
"""The largest mean |Δ log-probability| between sampler and scorer that is rounding and not a fault."""


def on_policy_step(job: Job, seat: Seat, step: int) -> Stepped:
    method, learner = cast(OnPolicy, seat.method), cast(Learner, seat.learner)
    with job.phase("sample"):
        asked = -seat.collect.state["tasks"]
        sample = seat.parts["sample"] if seat.ahead is None else partial(seat.ahead.batch, step)
        collected = learner.sampled(step, lambda: cast(Experience, sample(seat.collect)))
        asked += seat.collect.state["tasks"]
    with job.phase("score"):
        for annotate in seat.annotators:
            collected = annotate(collected)
    with job.phase("credit"):
        collected = collected.with_columns(reward=seat.parts["reward"](collected))
        job.watch(seat, collected)
        experience, learned = seat.models.instead(collected, step)
        other, trained = experience is not collected, 0
        for part in method.select:
            kept = seat.parts[f"select.{part.info.name}"](experience)
            experience = kept if isinstance(kept, Experience) else experience.take(kept)
        if len(experience):
            credited = seat.parts["credit"](experience)
            columns = credited if isinstance(credited, dict) else {"advantage": credited}
            experience = experience.with_columns(**columns)
            learns = experience.stream("own")
            trained = int((learns & (columns["advantage"] != 0) if "advantage" in columns else learns).sum())
    with job.phase("learn"):
        metrics = learned | seat.models.fit(experience, step)
        if step >= seat.models.warmup:
            metrics |= learn(seat, experience, step)
        metrics |= seat.models.learn(collected, step)
    metrics |= {"groups_asked": asked, "trained": trained, **seat.collect.notes}
    seat.collect.notes = {}
    whole = not other and bool(torch.isin(collected["episode"], experience["episode"]).all())
    return Stepped(experience if whole else collected, metrics, experience)


def learn(seat: Seat, experience: Experience, step: int) -> dict[str, float]:
    """Epochs of mini-batches. Metrics are the mean over them, and of the first one the agreement with the sampler."""
    found: list[dict[str, float]] = []
    now = seat.collect.version
    late = "version" in experience and bool((experience["version"] != now)[experience["source"] == OWN].any())
    others = late or "actor" in experience or bool((experience["source"] == REPLAY).any())
    gap = seat.snapshots.gap(experience, now) if others else None  # other selves, or earlier ones, acted too
    if gap is not None:
        check_agreement(seat.options.dtype, gap)
    order = torch_rng("minibatches", seat.options.seed, step)
    for minibatch in seat.learner.minibatches(experience, order):
        found.append(seat.learner.step(minibatch, step))
        if len(found) == 1 and "logp_gap" in found[0] and not others:
            check_agreement(seat.options.dtype, found[0]["logp_gap"])
        if found[-1].get(STOPPED):
            break
    seat.learner.settle()
    if not found:
        return {"loss": 0.0}
    metrics = mean_metrics(found)
    metrics["updates"] = len(found)
    if "logp_gap" in found[0]:
        if not late:
            metrics["step0_gap"] = found[0]["logp_gap"]
        elif gap is not None:
            metrics["step0_gap"] = gap
        metrics["step0_ratio_max"] = found[0]["ratio_max"]
        moved = [f for f in found if "ratio_off" in f]  # a mini-batch without any advantage has no ratios
        if len(found) > 1:
            metrics |= {f"end_{name}": moved[-1][name] for name in ("ratio_off", "ratio_max")}
    metrics.pop("logp_gap", None)
    return metrics


def check_agreement(dtype: str, gap: float) -> None:
    """At the first mini-batch sampler and scorer hold the same weights: their log-probabilities must agree."""
    if gap > AGREEMENT[dtype]:
        raise PanoplyError(
            f"Sampler and scorer disagree on unchanged weights: mean |Δ log-prob| is {gap:.2g}, more than "
            f"{AGREEMENT[dtype]:g}. The ratio would be wrong from the first step."
        )
