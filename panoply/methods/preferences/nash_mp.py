"""Nash Mirror Prox, and Nash Prox."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from panoply.evidence.claims import Ahead
from panoply.experience import Experience
from panoply.methods.base.rloo import TINY as RLOO_TINY
from panoply.methods.base.rloo import rloo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.selves import LEARNER
from panoply.slots.reward.shaping import minus_kl
from panoply.slots.reward.signals import signal
from panoply.slots.sample.compared import compared
from panoply.slots.schedule.schedules import constant
from panoply.slots.update.optimisers import LIMITS, SHARES, Adam, adam
from panoply.slots.update.solver import Solver

# ------------------------------------------------------------------ two prox steps from one anchor


def _impossible(held: Any, method: Any) -> list[Finding]:
    met = method.sample.settings().get("against", LEARNER)
    return [("", "all answers are the learner's own (sample.against is learner)")] if met == LEARNER else []


@part("select", equation="the learner's own answers", impossible=_impossible)
def own_answers(experience: Experience) -> Tensor:
    """Opponents' answers are compared with, and teach nothing."""
    return experience["actor"] == 0


class Returning(Solver, Adam):
    """Adam that goes back to where it was 2·every steps ago, every second time that `every` steps are over.

    Weights, averages and their count go back alike: the second prox step begins as the first one did.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], every: int, **settings: float):
        super().__init__(parameters, **settings)
        self.every = every

    @torch.no_grad()
    def visits(self, generator: torch.Generator) -> Iterator[bool]:
        """Before a step's answers are sampled: remember the anchor, or go back to it."""
        for weight in self.param_groups[0]["params"]:
            kept = self.state[weight] or self._begin(weight)
            taken = int(kept.get("taken", 0))
            if taken % (2 * self.every) == 0:
                kept |= {"anchor": weight.detach().clone(), "anchor_step": float(kept["step"])}
                kept |= {f"anchor_{name}": kept[name].clone() for name in ("exp_avg", "exp_avg_sq")}
            elif taken % self.every == 0:
                weight.copy_(kept["anchor"])
                kept["step"] = float(kept["anchor_step"])
                for name in ("exp_avg", "exp_avg_sq"):
                    kept[name].copy_(kept[f"anchor_{name}"])
            kept["taken"] = taken + 1
        yield False


_FLAT = constant()


def _in_step(held: Any, method: Any) -> list[Finding]:
    wanted = {"sample.against": f"behind:{held.every}", "reward.to": f"behind:{2 * held.every}"}
    given = method.settings()
    wrong = [f"{path}={name}" for path, name in wanted.items() if given.get(path) != name]
    if not wrong:
        return []
    return [
        (
            "every",
            f"the opponent is renewed after each prox step and the anchor after two: {' and '.join(wrong)}",
        )
    ]


@part(
    "update",
    equation="Adam, lr {lr}, two prox steps of {every} steps each from one anchor",
    bounds={**LIMITS, **SHARES, "every": "at least 2", "epsilon": "above 0"},
    cost=lambda held: 5,
    impossible=_in_step,
)
def from_the_anchor(
    parameters: Iterable[torch.nn.Parameter],
    *,
    every: int = 10,
    lr: float = 1e-6,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    clip: float = 1.0,
    schedule: Part = _FLAT,
    epochs: int = 1,
    minibatches: int = 1,
) -> torch.optim.Optimizer:
    """Adam that begins every second prox step where the first one began, and not where that one ended.

    every: how many steps of a run a prox step has
    """
    settings = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": epsilon, "weight_decay": 0.0}
    return Returning(parameters, every, **settings)


# ------------------------------------------------------------------ the game, exactly

BETA, ITERATIONS = 0.05, 50
SIZES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Nash-MD's step sizes, of which it may choose the best in every game."""


def to_nash(seed: int) -> dict[str, float]:
    """In a random circle of preferences, after as many queries: how many powers of ten Nash-MP is nearer to Nash.

    Of its rivals the nearest counts: Nash-MD with the step size that is best in this very game, and the same prox step
    without extrapolation. An iteration of Nash-MP asks twice for the win rates of all answers, theirs once.
    """
    from panoply.evaluation import preference_games as games

    game, reference = games.random_circle(seed), games.random_reference(seed)
    nash = games.regularised_nash(game, reference, BETA)

    def kl(update: games.Update, steps: int) -> float:
        return games.kl(nash, games.course(update, reference, steps).last)

    def prox(plays: int) -> games.Update:
        return lambda p: games.proximal(game, reference, p, tau=BETA, plays=plays)

    def nash_md(size: float) -> games.Update:
        return lambda p: games.nash_md(game, reference, p, tau=BETA, eta=size)

    queries = 2 * ITERATIONS
    mirror, plain = kl(prox(2), ITERATIONS), kl(prox(1), queries)
    best = min(kl(nash_md(size), queries) for size in SIZES)
    return {
        "powers of ten": float(torch.tensor(min(best, plain) / mirror, dtype=torch.float64).log10()),
        "queries": float(queries),
        f"KL to Nash after {ITERATIONS} iterations": mirror,
        "Nash-MD at its best": best,
        "Nash-MD, step 1": kl(nash_md(1.0), queries),
        "no extrapolation": plain,
        "no extrapolation, 400": kl(prox(1), 400),
    }


CLAIM = Ahead(
    "Where preferences go round in a circle, Nash-MP is nearer to the regularised Nash policy than Nash-MD with its "
    "best step size, and than the same prox step without extrapolation, after as many preference queries.",
    to_nash,
)

# ------------------------------------------------------------------ the methods

RATES = {path: value for path, value in RLOO_TINY.items() if path.startswith("update.")}
TINY = {"sample.prompts": 16, "sample.group": 4, **RATES, "run.steps": 160}
PUBLISHED: Published = {
    "arXiv 2505.19731, the two proximal steps": {
        "sample.temperature": 1.0,
        "reward.beta": 0.5,
        "credit.baseline": "leave_one_out",
        "credit.scale": "none",
        "surrogate": "log_likelihood",
        "reduce": "sequence_sum",
    }
}
"""η = 2β follows from the published rate, and then β/η, the pull to the anchor, is ½ whatever β is. β, rates and how
often an anchor moves could not be read: they are chosen here."""


def _regularised(anchor: str) -> Part:
    """Wins less β·log π/π_ref and ½·log π/π_anchor: what a prox step maximises, divided by nothing."""
    return minus_kl(reward=minus_kl(reward=signal(name="wins"), beta=BETA), beta=0.5, to=anchor)


@method(
    "nash-mp@1",
    paper=156,
    base="rloo",
    world="strings",
    presets={"tiny": TINY},
    claim=CLAIM,
    published=PUBLISHED,
)
def nash_mp() -> OnPolicy:
    """Nash Mirror Prox (arXiv 2505.19731, v1): play, look at what came of it, and play again from the same place.

        π_{k+½} = argmin_q P(π_k ≻ q)/β + KL(q‖π_ref) + KL(q‖π_k)/η
        π_{k+1} = argmin_q P(π_{k+½} ≻ q)/β + KL(q‖π_ref) + KL(q‖π_k)/η,   η = 2β

    Where preferences go round in a circle, a policy that only answers the one before it circles, too. Answered is here
    what the policy would become, and the last iterate comes to the Nash policy of the regularised game at a rate of
    1/(1+2β) an iteration, however many answers there are.

    Surprising: the second step begins at π_k again and not at π_{k+½}, which is only an opponent: half of the learning
    is thrown away. With a language model each prox step is ten steps of policy gradient on
    P(y ≻ y′) − ½ − β·log π/π_ref(y) − (β/η)·log π/π_k(y) with y′ of the opponent; then the weights, and what Adam has
    kept, go back to the anchor. Opponent and anchor are the policy as it was after the last prox step (`behind:10`) and
    the last two (`behind:20`); the three numbers go together. Held-out numbers of odd tens of steps are the half-way
    policy's. A sampled gradient hides the linear rate: `panoply run preference-games` shows it exactly. In games
    without a strong circle the same prox step without extrapolation, at half the queries, is the nearer one to Nash.
    The paper's runs keep a moving mean of weights as anchor, as far as could be read; so does `nash-prox`.
    """
    return rloo().but(
        sample=compared(prompts=128, group=4, temperature=1.0, against="behind:10"),
        reward=_regularised("behind:20"),
        select=(own_answers(),),
        update=from_the_anchor(every=10, lr=1e-6),
    )


@method("nash-prox@1", paper=156, base="nash-mp", world="strings", published=PUBLISHED)
def nash_prox() -> OnPolicy:
    """Nash Prox (arXiv 2505.19731, v2): self-play, held back by a mean of its own past.

    The proximal point is its own opponent: π_{k+1} = argmin_q P(π_{k+1} ≻ q)/β + KL(q‖π_ref) + KL(q‖π_k)/η. So answers
    of the policy are compared with one another, there is no half-way policy, and the anchor is a moving mean of weights
    that follows slowly (`reward.to=ema:0.05`); one that follows fast holds nothing back. Without an anchor it is
    Online IPO, by another road to the same gradient.
    """
    return nash_mp().but(
        sample=compared(prompts=128, group=4, temperature=1.0),
        reward=_regularised("ema:0.05"),
        select=(),
        update=adam(lr=1e-6),
    )
