"""Contrastive Policy Gradient: from anybody's answers, with any reward."""

from __future__ import annotations

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
from panoply.slots.loss.lists import contrastive

# ------------------------------------------------------------------ eight arms, exactly

Array = NDArray[np.float64]
ARMS, BETA, STEPS, RATE = 8, 0.5, 5000, 4.0


def arms(rng: np.random.Generator) -> tuple[Array, Array]:
    """What each arm pays, and the reference policy."""
    rewards = rng.normal(size=ARMS)
    return rewards, _softmax(0.5 * rng.normal(size=ARMS))


def value(law: Array, rewards: Array, reference: Array, beta: float = BETA) -> float:
    """E R − β·KL(π‖π_ref)."""
    return float((law * (rewards - beta * np.log(law / reference))).sum())


def best(rewards: Array, reference: Array, beta: float = BETA) -> Array:
    """π* ∝ π_ref·exp(R/β), whose value is the largest."""
    return _softmax(np.log(reference) + rewards / beta)


RULES = ("copg", "no baseline", "mean reward", "policy's mean")
"""What is subtracted from R_β = R − β·log π/π_ref: the data's mean of it, which is what two answers of the data stand
for when each is the other's baseline; nothing; the data's mean of plain R; or the policy's own mean of R_β."""


def learned(rewards: Array, reference: Array, data: Array, beta: float = BETA) -> dict[str, Array]:
    """Where expected gradients of answers by `data`, E_data (R_β − baseline)·∇log π, lead a softmax policy."""
    logits = np.tile(np.log(reference), (len(RULES), 1))
    for _ in range(STEPS):
        law = _softmax(logits)
        regularised = rewards - beta * np.log(law / reference)
        baseline = (
            (data * regularised[0]).sum(),
            0.0,
            (data * rewards).sum(),
            (law[3] * regularised[3]).sum(),
        )
        slope = data * (regularised - np.array(baseline)[:, None])
        logits = logits + RATE * (slope - law * slope.sum(-1, keepdims=True))
    return dict(zip(RULES, _softmax(logits), strict=True))


def _softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    found: Array = weights / weights.sum(-1, keepdims=True)
    return found


def _values(rng: np.random.Generator) -> dict[str, float]:
    rewards, reference = arms(rng)
    data = _softmax(-2 * rewards)
    laws = learned(rewards, reference, data)
    found = {name: value(law, rewards, reference) for name, law in laws.items()}
    return {"optimum": value(best(rewards, reference), rewards, reference), **found}


def ahead(seed: int) -> dict[str, float]:
    """How much of E R − β·KL off-policy gradients without a baseline leave, and how far CoPG is from the optimum."""
    found = _values(numpy_rng("copg", seed))
    return {
        "ahead": found["copg"] - found["no baseline"],
        "ahead of mean reward": found["copg"] - found["mean reward"],
        "left by copg": found["optimum"] - found["copg"],
    }


@algorithm(
    "copg-arms@1",
    paper=124,
    tags=("exact",),
    claim=Ahead(
        "On eight arms, from answers of which the worst are the most frequent, CoPG comes to a larger reward less β·KL "
        "than the policy gradient without a baseline.",
        ahead,
    ),
)
def copg_arms(*, seed: int = 1) -> dict[str, float]:
    """Contrastive Policy Gradient (arXiv 2406.19185) on eight arms: exact gradients on data μ ∝ exp(−2R), β = ½.

    What each rule comes to of E R − β·KL(π‖π_ref), and the optimum. CoPG reaches it from data of any kind; so does the
    exact mean of R_β under the policy, which nobody has on fixed answers. Without a baseline, or with the mean of
    plain rewards, the policy ends elsewhere: off policy a baseline is no longer free.
    """
    return _values(np.random.default_rng(seed))


# ------------------------------------------------------------------ the method

TINY: dict[str, Any] = {
    **DPO_TINY,
    "data.batch": 16,
    "data.prompts": 256,
    "data.answers": 4,
    "data.name": "true",
    "update.lr": 1e-4,
}

ON_PAIRS = "dpo on best and worst=copg:losses=list_pairs,losses.list_pairs.pairs=best_worst,losses.list_pairs.beta=0.1"
"""The same answers, of which only the order of two is looked at."""
CLAIM = Ranks(
    "On four fixed answers a prompt with known rewards CoPG comes to a larger reward less 0.1·KL to the start than DPO "
    "on the best over the worst of them, and than the policy gradient without a baseline.",
    ("", ON_PAIRS, "no baseline=copg:losses.contrastive.baseline=none"),
    world="strings",
    budget="steps=150",
    metric="world:regularised@10",
    settings={"world.judged": "true"},
    leads=True,
    best=1.0,
    tune={},
    fixed="a rate chosen by success is one that drifts, and drift is what is counted: all have the preset's",
    also=("success", "world:kl"),
    shows=(Shows("world:kl", least=0.1), Shows("success", most=0.95)),
    waives={"problems": SIX_PROMPTS},
)


PUBLISHED: Published = {
    "arXiv 2406.19185, by notes on it": {
        "data.answers": 2,
        "losses.contrastive.baseline": "others",
        "losses.contrastive.to": "reference",
        "losses.contrastive.beta": 0.1,
    },
}
"""β was varied between 0.01 and 0.1. Rates and batches could not be read, and are DPO's."""


@method(
    "copg@1",
    paper=124,
    base="dpo",
    world="strings",
    presets={"tiny": TINY},
    claim=CLAIM,
    published=PUBLISHED,
    tags=("data=scores", "feedback=offline", "feedback=program", "reward=rule", "optimisation=direct"),
)
def copg() -> Dataset:
    """Contrastive Policy Gradient (arXiv 2406.19185). ½·(R_β(y) − R_β(y′))², R_β = r − β·log π/π_ref.

    Two answers to a prompt, of anybody, and any reward: their regularised rewards are made equal. If all are, π is
    π_ref·exp(r/β) up to a factor, which is what KL-regularised reinforcement learning is after, and no weights for
    importance, no clip and no critic are needed to get there. Each answer is the other's baseline: on the policy's own
    answers (`data.prompts=0`) it is RLOO, and with rewards ¼ for the preferred answer and −¼ for the other it is IPO.

    Here k answers a prompt are compared with one another (`data.answers`), those of the policy before its first step;
    `data.whose=teacher` takes another's, and `data.refresh` lets the policy answer anew now and then. Log-probabilities
    are sums over tokens, or the optimum would be another one; r/β should be between 1 and 10.
    """
    return dpo().but(
        data=lists(batch=64, answers=2, prompts=1024, whose="policy"), losses=(contrastive(beta=0.1),)
    )
