"""AMPO: several teachers, asked only where all own answers fail, and heard where they are understood."""

from __future__ import annotations

from panoply.evidence.claims import Learns, Shows
from panoply.methods.base.grpo import grpo
from panoply.methods.reasoning_data.rl_plus import TINY
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import constant
from panoply.slots.regularise.terms import entropy
from panoply.slots.sample.taught import taught
from panoply.slots.surrogate.hybrid import hybrid
from panoply.slots.surrogate.ratios import clip
from panoply.slots.update.optimisers import adam

CLAIM = Learns(
    "Where all own answers fail and four teachers know how, one of them in a style that is foreign, those whose "
    "reasoning the policy understands best teach it more than any two of them do.",
    over="any teachers=ampo:sample.choose=random",
    world="styles:wall",
    budget="decisions=150k",
    also=("success", "distinct@32", "taught", "understood"),
    shows=(Shows("mean:taught", least=0.3),),
)

PUBLISHED: Published = {
    "SII-Enigma/AMPO, exp_scripts/train_ampo.sh": {
        "sample.prompts": 128,
        "sample.group": 8,
        "sample.answers": 2,
        "sample.when": "failed",
        "sample.choose": "understood",
        "sample.temperature": 1.0,
        "credit.baseline": "mean",
        "credit.scale": "none",
        "surrogate.shape": "shaped",
        "surrogate.gamma": 0.1,
        "surrogate.own.low": 0.2,
        "surrogate.own.high": 0.2,
        "surrogate.own.dual": 10.0,
        "regularise.entropy.weight": 0.001,
        "regularise.kl.weight": None,
        "reduce": "constant",
        "reduce.length": 8192,
        "update.lr": 1e-6,
        "update.weight_decay": 0.1,
        "update.clip": 1.0,
        "update.minibatches": 2,
    },
}


@method(
    "ampo@1",
    paper=4,
    base="grpo",
    presets={"tiny": TINY},
    claim=CLAIM,
    published=PUBLISHED,
    tags=("teachers",),
)
def ampo() -> OnPolicy:
    """AMPO (arXiv 2510.02227). Where all own answers fail, two make room for teachers', which learn by p/(p + 0.1)·A.

    A group with one right answer is left alone: plain GRPO without division by deviations. In one without, two answers
    at random are replaced by right ones of teachers, and the advantages are against the mean of the mixed group. Which
    teachers: the two after whose reasoning the policy finds the right final answer most likely, by the mean probability
    of that answer's tokens and not by how likely the reasoning is. A teacher who is more skilled but cannot be followed
    comes last.

    What is surprising: a teacher's rows have no ratio, and nothing is clipped there: the gradient of p/(p + γ) is
    largest near p = γ, so unlikely tokens count without running away. Sums over tokens are divided by a constant, or
    long teachers would outweigh the others.

    The code adds a tenth of a format score to what teachers are chosen by, and counts a teacher's answer that is graded
    low as 1. Here an answer that the world finds wrong is left out, so that both change nothing.
    """
    return grpo().but(
        sample=taught(prompts=128, group=8, answers=2, when="failed", choose="understood"),
        credit=group(baseline="mean", scale="none"),
        surrogate=hybrid(own=clip(low=0.2, high=0.2, dual=10.0), shape="shaped", gamma=0.1),
        regularise=(entropy(weight=0.001),),
        reduce=constant(length=8192),
        update=adam(lr=1e-6, weight_decay=0.1, minibatches=2),
    )
