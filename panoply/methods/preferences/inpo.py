"""Iterative Nash Policy Optimization."""

from __future__ import annotations

from typing import Any

import torch

from panoply.batch import Batch, Values
from panoply.evidence.claims import Ahead
from panoply.methods.base.online_dpo import TINY as ONLINE_DPO_TINY
from panoply.methods.base.online_dpo import online_dpo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.loss.pairs import pair_stats, preferred_by
from panoply.slots.reward.signals import signal
from panoply.slots.sample.compared import compared
from panoply.slots.select.pairs import best_worst
from panoply.slots.surrogate.preferences import preference
from panoply.slots.update.optimisers import adam

# ------------------------------------------------------------------ the loss


def _equation(held: Any) -> str:
    share = held.tau / held.eta
    return (
        f"(h_chosen − h_rejected − {1 / (2 * held.eta):g})²,  "
        f"h = Σ log π − {share:g}·log π_reference − {1 - share:g}·log π_{held.start}"
    )


def _needs(held: Any) -> frozenset[str]:
    both = {"logp@reference": held.tau > 0, f"logp@{held.start}": held.tau < held.eta}
    return frozenset(name for name, asked in both.items() if asked)


def _impossible(held: Any, method: Any) -> list[Finding]:
    if held.tau > held.eta:
        return [("tau", f"the reference's share τ/η would be above 1 (eta is {held.eta:g})")]
    if held.start == "reference":
        return [("start", "it is the other anchor already: name the policy that a round began with")]
    return []


def _inert(held: Any, method: Any) -> list[Finding]:
    return [("start", "all of the anchor is the reference (tau is eta)")] if held.tau == held.eta else []


@part(
    "loss",
    equation=_equation,
    unit="pair",
    stream="imitation",
    needs=_needs,
    impossible=_impossible,
    inert=_inert,
    bounds={"weight": "above 0", "eta": "above 0", "tau": "at least 0"},
)
def two_anchors(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    eta: float = 0.0075,
    tau: float = 0.0025,
    start: str = "old",
) -> Values:
    """Regress a pair's log-ratio to π_ref^{τ/η}·π_t^{1−τ/η} on 1/2η, whoever of the two won.

    eta     the inverse of the mirror step's size: a large one is a small step
    tau     how much the game is regularised to the reference, at most eta; 0 is self-play alone, eta is Online IPO
    start   π_t, the policy that a round began with
    """
    anchors = {"reference": tau / eta, start: 1 - tau / eta}
    near = torch.stack(
        [share * batch.episode_log_ratio(to) for to, share in anchors.items() if share > 0]
    ).sum(0)
    chosen, rejected = batch.pair_rows(near)
    gap = chosen - rejected
    aim = preferred_by(batch, gap) / (2 * eta)
    return (gap - aim) ** 2, pair_stats(gap, chosen, rejected)


# ------------------------------------------------------------------ the game, exactly

GAME = {"tau": 0.05, "eta": 2.0}
ROUNDS = 500


def last_policies(seed: int) -> dict[str, float]:
    """In a random circle of preferences: by how much less INPO's last policy is exploited than iterative DPO's.

    Both take 500 rounds of one question each and steps of one size. Beside it SPPO's, and what the average over all
    rounds would do, which nobody deploys.
    """
    from panoply.evaluation import preference_games as games

    game, reference = games.random_circle(seed), games.random_reference(seed)
    nash = games.regularised_nash(game, reference, GAME["tau"])
    size = 1 / GAME["eta"]
    rounds = {
        "INPO": lambda p: games.inpo(game, reference, p, **GAME),
        "iterative DPO": lambda p: games.iterative_dpo(game, p, beta=1 / size),
        "SPPO": lambda p: games.multiplicative_weights(game, p, eta=size),
    }
    found = {name: games.course(step, reference, ROUNDS) for name, step in rounds.items()}
    last = {name: games.exploitability(game, course.last) for name, course in found.items()}
    return {
        "ahead": last["iterative DPO"] - last["INPO"],
        "KL to Nash": games.kl(nash, found["INPO"].last),
        **{f"exploited, {name}": value for name, value in last.items()},
        **{f"average, {name}": games.exploitability(game, course.average) for name, course in found.items()},
    }


CLAIM = Ahead(
    "Where preferences go round in a circle, the best answer wins less often against INPO's last policy than against "
    "that of iterative DPO, after as many rounds with steps of the same size.",
    last_policies,
)

# ------------------------------------------------------------------ the method

TINY = {
    **ONLINE_DPO_TINY,
    "surrogate.loss.eta": 0.3,
    "surrogate.loss.tau": 0.1,
    "update.minibatches": 4,
}
"""An answer has about eight tokens here and not hundreds, so that 1/2η is a value to reach."""
PUBLISHED: Published = {
    "a port that cites arXiv 2407.00617": {
        "surrogate.loss.eta": 0.0075,
        "surrogate.loss.tau": 0.0025,
        "surrogate.loss.start": "old",
    },
    "arXiv 2407.00617, by notes on it": {"sample.group": 8, "update.lr": 5e-7},
}
"""The authors' code was not found; the port has a rate of 1e-6. Rounds were three, of about 20,000 prompts each: here a
round is a step."""


@method(
    "inpo@1",
    paper=134,
    base="online-dpo",
    world="strings",
    presets={"tiny": TINY},
    claim=CLAIM,
    published=PUBLISHED,
)
def inpo() -> OnPolicy:
    """INPO (arXiv 2407.00617). (h(y_w) − h(y_l) − 1/2η)², h = log π − (τ/η)·log π_ref − (1−τ/η)·log π_t.

    A step is a round of self-play against π_t, the policy that it began with. On pairs of π_t's answers the loss has
    one minimum, the mirror step of the game that is regularised to π_ref,

        π_{t+1} ∝ exp(P(· ≻ π_t)/η)·π_ref^{τ/η}·π_t^{1−τ/η},

    although no win rate is estimated and its aim is a constant: over who wins, ±1/2η averages to (P(y ≻ y′) − ½)/η, and
    over y′ to what is needed. The pull to π_ref is what lets the last policy rest; SPPO's only rests on average.

    Surprising: η is the inverse of a step size, and the published one is tiny. 1/2η is 67 nats, a direction for answers
    of hundreds of tokens and not a value to reach. And where the proof wants two answers of π_t, the best and the worst
    of eight are taken, by how many of the others they beat, whose aim is the same and whose gap is larger
    (`sample.group=2` is the proof's). The paper orders the eight by a tournament; here each meets each.
    """
    return online_dpo().but(
        sample=compared(prompts=128, group=8, temperature=1.0, asked="all"),
        reward=signal(name="wins"),
        select=(best_worst(),),
        surrogate=preference(loss=two_anchors()),
        update=adam(lr=5e-7, minibatches=4),
    )
