"""BRAIn: the posterior given that an answer is good, fitted with a baseline that is the policy's own weights."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panoply.evidence.claims import Ahead, Ranks, Shows
from panoply.evidence.races import SIX_PROMPTS
from panoply.methods.base.dpo import TINY as DPO_TINY
from panoply.methods.base.dpo import dpo
from panoply.regimes import Dataset
from panoply.registry import Published, algorithm, method
from panoply.seeds import numpy_rng
from panoply.slots.data.lists import lists
from panoply.slots.loss.lists import self_normalised

# ------------------------------------------------------------------ the gradient's variance, exactly

Array = NDArray[np.float64]
ANSWERS, DRAWN = 8, 4


def draws(proposals: Array, n: int = DRAWN) -> tuple[Array, Array]:
    """How often each answer is among n that are drawn, for all that can happen, and how likely that is."""
    counts = np.array(
        [
            np.bincount(several, minlength=len(proposals))
            for several in itertools.combinations_with_replacement(range(len(proposals)), n)
        ],
        dtype=np.float64,
    )
    orders = [math.factorial(n) / math.prod(math.factorial(int(c)) for c in row) for row in counts]
    return counts, np.array(orders) * np.exp(counts @ np.log(proposals))


def spread(
    prior: Array, law: Array, proposals: Array, rewards: Array, gamma: float = 1.0
) -> dict[str, float]:
    """Total variance and length of the mean of both estimates of the gradient by a softmax policy's logits."""
    counts, chances = draws(proposals)
    alpha = counts * (prior * np.exp(rewards / gamma) / proposals)
    alpha = alpha / alpha.sum(1, keepdims=True)
    own = counts * (law / proposals)
    own = own / own.sum(1, keepdims=True)
    found = {}
    for name, slopes in (("with baseline", alpha - own), ("without", alpha - law)):  # Σα·∇log π = Σα·(e − π)
        mean = chances @ slopes
        found[f"variance {name}"] = float(chances @ ((slopes - mean) ** 2).sum(1))
        found[f"mean {name}"] = float(np.linalg.norm(mean))
    return found


def _drawn(rng: np.random.Generator) -> dict[str, float]:
    """Rewards and a policy at random, which proposes by itself; the prior is uniform."""
    rewards, logits = rng.normal(size=ANSWERS), 2 * rng.random(ANSWERS)
    law = np.exp(logits) / np.exp(logits).sum()
    return spread(np.full(ANSWERS, 1 / ANSWERS), law, law, rewards)


def less_variance(seed: int) -> dict[str, float]:
    """By what factor the variance is larger without the baseline, as a logarithm, and how far the means are apart."""
    found = _drawn(numpy_rng("brain", seed))
    factor = found["variance without"] / found["variance with baseline"]
    return {
        "less variance": math.log(factor),
        "means": abs(found["mean without"] - found["mean with baseline"]),
    }


@algorithm(
    "brain-variance@1",
    paper=84,
    tags=("exact",),
    claim=Ahead(
        "Of eight answers, four drawn from the policy at a time: with the self-normalised baseline the gradient has "
        "the same mean and less variance than that of distributional policy gradient.",
        less_variance,
    ),
)
def brain_variance(*, seed: int = 2) -> dict[str, float]:
    """BRAIn (arXiv 2402.02479): the variance of its gradient with and without the self-normalised baseline.

    Exact, over all that four draws of eight answers can be, for rewards and a policy at random. Where the policy itself
    proposes, both estimates have the same mean; of other proposals both are biased a little, and not alike.
    """
    return _drawn(np.random.default_rng(seed))


# ------------------------------------------------------------------ the method

TINY: dict[str, Any] = {
    **DPO_TINY,
    "data.batch": 16,
    "data.prompts": 256,
    "data.answers": 8,
    "data.used": 0,
    "data.refresh": 50,
    "data.name": "true",
    "losses.self_normalised.gamma": 0.2,
    "update.lr": 1e-4,
}

CLAIM = Ranks(
    "On eight fixed answers a prompt BRAIn comes to a larger reward less 0.2·KL to the start than DPO on the better of "
    "two of them, and than distributional policy gradient, which has no baseline.",
    (
        "",
        "dpo-sft=brain:losses.self_normalised.target=best,data.used=2",
        "dpg=brain:losses.self_normalised.baseline=false",
    ),
    world="strings",
    budget="steps=100",
    metric="world:regularised@5",
    settings={"world.judged": "true", "data.refresh": 0},
    leads=True,
    best=1.0,
    tune={},
    fixed="a rate chosen by success is one that drifts, and drift is what is counted: all have the preset's",
    also=("success", "world:kl", "mean:gradient_norm"),
    shows=(Shows("world:kl", least=0.1), Shows("success", most=0.95)),
    waives={"problems": SIX_PROMPTS},
)


PUBLISHED: Published = {
    "arXiv 2402.02479, by notes on it": {
        "data.answers": 32,
        "data.used": 8,
        "losses.self_normalised.target": "posterior",
        "losses.self_normalised.baseline": True,
        "losses.self_normalised.to": "reference",
    },
}
"""γ was tuned, and is about the deviation of the reward. Proposals were refreshed a few times; how often, and rates and
batches, could not be read."""


@method(
    "brain@1",
    paper=84,
    base="dpo",
    world="strings",
    presets={"tiny": TINY},
    claim=CLAIM,
    published=PUBLISHED,
    tags=("data=scores", "feedback=offline", "feedback=program", "reward=rule", "optimisation=direct"),
)
def brain() -> Dataset:
    """BRAIn (arXiv 2402.02479). −Σ α_i·log b_i, α = softmax(log p/q + r/γ), b = softmax(log π/q) over n answers.

    By Bayes' rule answers that are good have the probability p·P(good), and with a Bradley–Terry reward model that is
    p·exp(r/γ): what RLHF is after, too. It is fitted as distributional policy gradient does, with weights α that make
    up for who wrote the answers (q), and one thing is new: the policy's own weights b are subtracted from them. The
    gradient Σ (b − α)·∇log π has far less variance, and is that of a plain cross-entropy between two softmaxes.

    With two answers, all weight on the better one and q = p it is DPO with β = 1 (`target=best`); `baseline=false` is
    distributional policy gradient. After a refresh q is the policy as it was then, and the prior p stays the start: the
    weights follow. Log-probabilities are sums over tokens. γ should be about the deviation of the reward.
    """
    return dpo().but(
        data=lists(batch=64, answers=32, used=8, prompts=1024, whose="policy", refresh=100),
        losses=(self_normalised(gamma=1.0),),
    )
