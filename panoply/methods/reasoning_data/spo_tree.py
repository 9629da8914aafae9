"""Segment Policy Optimization on trees."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from panoply.evidence.claims import Learns
from panoply.experience import Experience, Segments
from panoply.methods.base.grpo import TINY, grpo
from panoply.methods.reasoning_data.spo_segment import KL, PPO, doubtful, whitened
from panoply.parts import part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.seeds import torch_rng
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import token_mean
from panoply.slots.regularise.terms import kl
from panoply.slots.sample.tree import tree
from panoply.slots.schedule.schedules import constant
from panoply.slots.update.optimisers import adam


def _equation(held: Any) -> str:
    over = (" / std of siblings" if held.scale == "std" else "") + (", whitened" if held.whiten else "")
    return f"A = (V̂(end of an edge) − V̂(its start)){over}, where the probability is below {held.threshold:g}"


@part("credit", equation=_equation, bounds={"most": "at least 0", "threshold": "from 0 to 1"})
def edge_gain(
    experience: Experience,
    *,
    threshold: float = 0.9,
    scale: Literal["none", "std"] = "none",
    most: int = 32,
    whiten: bool = True,
) -> dict[str, Tensor]:
    """What an edge changed in the expected success. Edges that changed nothing do not learn and are not counted.

    Neither do decisions that were hardly decisions, nor edges beyond `most` of a task, which are drawn by lot.

    threshold   the probability from which on a decision does not learn
    scale       `std` divides by the siblings' deviation, which is tiny where they hardly differ
    most        edges of a task that learn in a step; 0 means all
    whiten      subtract the mean of what learns in the step, and divide by its deviation
    """
    advantage = group(baseline="mean", scale=scale, epsilon=1e-8)(experience)
    learns = doubtful(experience, threshold) & (advantage != 0)
    learns = learns & _drawn(experience, advantage, most) if most else learns
    return {"advantage": whitened(advantage, learns) if whiten else advantage, "train": learns}


def _drawn(experience: Experience, advantage: Tensor, most: int) -> Tensor:
    """Marks at most so many edges of each task that have an advantage."""
    edges = experience.by("episode")
    gain, task = edges.first(advantage), edges.first(experience["task"])
    lots = torch.randperm(len(gain), generator=torch_rng("edges", int(edges.keys.min()))).to(gain.device)
    order = torch.where(gain == 0, lots + len(gain), lots).argsort()
    order = order[task[order].argsort(stable=True)]
    tasks = Segments(task[order])
    place = torch.arange(len(order), device=order.device) - tasks.rows(tasks.count.cumsum(0) - tasks.count)
    kept = torch.zeros(len(gain), dtype=torch.bool, device=gain.device)
    kept[order] = place < most
    return edges.rows(kept)


TREE = {
    **{path: value for path, value in TINY.items() if path != "sample.group"},
    "sample.prompts": 8,
    "sample.grow.branching": (4, 4, 2),
    "sample.grow.segment": 6,
    "sample.temperature": 1.0,
    "update.minibatches": 1,
}

CLAIM = Learns(
    "Where one early mistake ruins an answer, credit for the branches of a tree of answers learns more than credit for "
    "whole answers from as many sampled tokens.",
    method="spo-tree=spo-tree:sample.prompts=16,sample.grow.branching=2,2,2,run.evaluate_every=5",
    race="chain",
    reworded="it failed with trees of eight prompts a step, half as many as its baseline had; now both have sixteen "
    "prompts and eight answers to each.",
)


PUBLISHED: Published = {
    "AIFrameResearch/SPO, configs/polIter_qwen1b_spo_tree_MATH.jsonnet": {
        "sample.prompts": 32,
        "sample.grow.branching": (6, 6, 6),
        "sample.grow.segment": 600,
        "update.epochs": 1,
        "update.minibatches": 4,
    },
    "AIFrameResearch/SPO, configs/polIter_qwen1b_spo_chain_MATH.jsonnet": {"sample.temperature": 0.6},
    PPO: {
        "credit.whiten": True,
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
        "update.lr": 1e-6,
        "update.weight_decay": 0.0,
        "update.schedule.warmup": 0.03,
        "update.clip": 1.0,
    },
    KL: {"regularise.kl.weight": 1e-4, "regularise.kl.estimator": "k3"},
    "AIFrameResearch/SPO, hybrid_episode_generator.py": {"credit.most": 32},
    "arXiv 2505.23564, eq. 6": {"credit.threshold": 0.9, "reduce": "token_mean"},
}


@method(
    "spo-tree@1",
    paper=44,
    base="grpo",
    claim=CLAIM,
    presets={"tiny": TREE},
    published=PUBLISHED,
    tags=("granularity=turn",),
)
def spo_tree() -> OnPolicy:
    """Segment Policy Optimization, SPO-tree (arXiv 2505.23564). A(edge) = V̂(child) − mean of its siblings' V̂.

    Segments of fixed length that branch; leaves are graded, means backed up, and each edge is one example after its
    prefix. Where SPO-chain pays for continuations that do not learn, here every token sampled is an edge's. The
    released code keeps edges beyond 32 a question for later steps; here they are forgotten.
    """
    return grpo().but(
        sample=tree(temperature=0.6),
        credit=edge_gain(),
        regularise=(kl(weight=1e-4, estimator="k3"),),
        reduce=token_mean(),
        update=adam(lr=1e-6, minibatches=4, schedule=constant(warmup=0.03)),
    )
