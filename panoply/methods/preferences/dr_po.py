"""Dataset reset policy optimisation: episodes that begin inside of preferred answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panoply.costs import Lengths, Tokens
from panoply.evidence.claims import Learns, Shows
from panoply.experience import TRUNCATED, Experience
from panoply.methods.base.ppo import TINY as PPO_TINY
from panoply.methods.base.ppo import ppo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.rollout.windows import from_prefixes
from panoply.seeds import numpy_rng
from panoply.slots.credit.gae import gae
from panoply.slots.loss.values import squared_value
from panoply.slots.model.values import critic
from panoply.slots.reward.signals import signal
from panoply.slots.sample.windows import GIVEN_TOKENS
from panoply.slots.schedule.schedules import linear
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task

# ------------------------------------------------------------------ where episodes begin


def data_set_answer(collect: Collector, task: Task, teacher: str) -> list[int]:
    """The answer that the data set has to a prompt: always the same one in a run."""
    return collect.world.teach(task, teacher, numpy_rng("data set", collect.seed, task.id))


def roll_in(answer: list[int], share: float, rng: Any) -> list[int]:
    """With probability `share` the first k tokens of an answer, k uniform in 1 … L − 1, so that one is left to say.

    Otherwise nothing, and always nothing of an answer with fewer than two tokens.
    """
    resets, at = rng.random() < share, rng.random()
    if len(answer) < 2 or not resets:
        return []
    return answer[: 1 + int(at * (len(answer) - 1))]


def _needs(held: Any) -> frozenset[str]:
    whose = "reference" if held.answers == "reference" else "teacher"
    return frozenset({"world:verify", "world:one turn", f"world:{whose}", "engine:entropy"})


def _impossible(held: Any, method: Any, world: Any) -> list[Finding]:
    teachers = getattr(world, "teachers", ())
    if held.answers in teachers:
        return []
    return [("answers", f"the teachers of {world.name} are {', '.join(teachers) or 'none'}")]


def _cost(held: Any, of: Lengths) -> Tokens:
    drawn = of.answer * (1 - held.share / 2)
    return round(held.prompts * drawn), held.prompts * (of.prompt + of.context)


@part(
    "sample",
    equation=lambda held: (
        f"{held.prompts} episodes; {held.share:.0%} of them go on from k tokens of an answer of the {held.answers}, "
        "k uniform in 1 … L − 1"
    ),
    needs=_needs,
    gives={GIVEN_TOKENS},
    impossible=_impossible,
    inert=lambda held, method: [("answers", "nothing is reset (share=0)")] if held.share == 0 else [],
    cost=_cost,
    bounds={"prompts": "at least 1", "share": "from 0 to 1", "temperature": "above 0 to 100"},
)
def reset(
    collect: Collector,
    *,
    prompts: int = 512,
    share: float = 1.0,
    answers: str = "reference",
    temperature: float = 0.7,
) -> Experience:
    """Episodes of which a share begins after the first tokens of an answer in a data set.

    Those tokens are rows of the episode like others, so that credit and critic see all of it, but the policy does not
    learn them. Evaluations begin at the beginning.

    share     how many are reset (the paper's β); 1 never practises the beginning of an answer
    answers   whose answers are the data set: a teacher of the world's, by name
    """
    first: int = collect.state["tasks"]
    tasks = collect.numbered(range(first, first + prompts))
    rngs = [numpy_rng("reset", collect.seed, first + i) for i in range(prompts)]
    begun = [
        roll_in(data_set_answer(collect, task, answers), share, rng) if share else []
        for task, rng in zip(tasks, rngs, strict=True)
    ]
    collect.notes = {
        **collect.notes,
        "reset": sum(map(bool, begun)) / prompts,
        "rolled_in": sum(map(len, begun)) / prompts,
    }
    return from_prefixes(collect, begun, temperature)


# ------------------------------------------------------------------ what they earn

_SIGNAL = signal()


def _reward_needs(held: Any) -> frozenset[str]:
    return frozenset({f"logp@{held.to}"}) if held.beta else frozenset()


def _reward_inert(held: Any, method: Any) -> list[Finding]:
    found = [] if held.beta else [(name, "beta is 0") for name in ("to", "roll_in")]
    if held.beta and method.sample.settings().get("share", 0.0) == 0:
        found.append(("roll_in", "no episode begins with given tokens"))
    return found


def _reward_equation(held: Any) -> str:
    whose = "" if held.roll_in else " of own tokens"
    kl = f" − {held.beta:g}·log π/π_{held.to}{whose}" if held.beta else ""
    scaled = ", over its deviation" if held.whiten else ""
    return f"{held.reward.equation()}, {held.unended:g} without an end{kl}{scaled}"


@part(
    "reward",
    equation=_reward_equation,
    needs=_reward_needs,
    inert=_reward_inert,
    bounds={"beta": "at least 0", "unended": "any number"},
)
def summary_reward(
    experience: Experience,
    *,
    reward: Part = _SIGNAL,
    beta: float = 0.05,
    to: str = "reference",
    roll_in: bool = False,
    unended: float = -1.0,
    whiten: bool = True,
) -> Tensor:
    """A reward at an answer's end, less β·log π/π_ref on every token.

    roll_in   whether tokens that were given pay as well, though nobody chose them: their penalty is then part of the
              returns, as in the released code
    unended   what an answer earns that was cut off before its end
    whiten    divide by the deviation over all tokens of the step, and keep the mean
    """
    earned: Tensor = reward(experience).float()
    cut_off = experience.by("episode").rows(experience.by("episode").last(experience["end"]) == TRUNCATED)
    last = experience.by("episode").is_last()
    earned = torch.where(cut_off, unended * last, earned)
    if beta:
        pays = torch.ones_like(last) if roll_in else experience["train"].bool()
        gap = experience["logp"] - experience[f"logp@{to}"]
        earned = earned - beta * torch.where(pays, gap, 0.0)
    if not whiten:
        return earned
    mean = earned.mean()
    return (earned - mean) / (earned.var(unbiased=False) + 1e-8).sqrt() + mean


# ------------------------------------------------------------------ the method

TINY = {
    **PPO_TINY,
    "sample.prompts": 128,
    "sample.share": 0.5,
    "sample.temperature": 1.0,
    "reward.beta": 0.0,
    "reward.whiten": False,
    "reward.unended": 0.0,
    "update.schedule": "constant",
}
"""Half of the episodes begin at the beginning, which all of a run's success is about. Sparse rewards are not divided by
their deviation: it would be that of how rare they are."""

PUBLISHED: Published = {
    "Cornell-RL/drpo, src/tldr/drpo.py": {
        "sample.prompts": 512,
        "sample.share": 1.0,
        "sample.temperature": 0.7,
        "reward.beta": 0.05,
        "reward.unended": -1.0,
        "reward.whiten": True,
        "credit.gamma": 1.0,
        "credit.lam": 0.95,
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
        "update.lr": 3e-6,
        "update.epsilon": 1e-5,
        "update.epochs": 4,
        "update.minibatches": 1,
        "models.critic.loss.clip": 0.2,
    },
}

CLAIM = Learns(
    "On a lock that opens only when every place is right, resets into a data set's answers learn more than PPO does "
    "within as many decisions, asked from the beginning.",
    method="dr-po:sample.answers=labeller",
    over="ppo",
    world="lock",
    budget="decisions=30k",
    also=("success", "held_out_greedy", "total_episodes"),
    shows=(Shows("success", most=0.8),),
    reworded="it had said that PPO stays where it was; with the best of three rates PPO opens nearly half",
)


@method(
    "dr-po@1", paper=170, base="ppo", world="lock", presets={"tiny": TINY}, claim=CLAIM, published=PUBLISHED
)
def dr_po() -> OnPolicy:
    """Dataset Reset Policy Optimisation (arXiv 2404.08495). PPO whose episodes begin inside of preferred answers.

    Text can be reset to any prefix. With probability β an episode goes on from the first k tokens of an answer that
    people preferred, k uniform in 1 … L − 1; from there a good end is near, and what is learned there makes the states
    before it worth reaching. The loss is PPO's over the tokens that the policy said, Σ m·max(−A ρ, −A clip(ρ))/Σ m;
    values are learned at all tokens, the given ones included. As published every episode is reset. What is surprising:
    then the beginning itself is never practised, and where data are wrong, so are the states; a mixture is safer. The
    penalty for leaving the reference is of own tokens; in the released code given ones pay too (`reward.roll_in`). The
    reward is the world's verifier, or with `--reward-model` a model of preferences, as published. The paper's theory,
    mirror descent on states of the data, is not here, nor are its chain of states in a table and PPO after imitation of
    the same answers, with which it is not compared. Policy and critic are two networks, where the released code adds
    0.1 times the critic's loss to one.
    """
    return ppo().but(
        sample=reset(),
        reward=summary_reward(),
        credit=gae(gamma=1.0, lam=0.95),
        update=adam(lr=3e-6, epsilon=1e-5, epochs=4, minibatches=1, schedule=linear()),
        models=(
            critic(
                loss=squared_value(clip=0.2),
                update=adam(lr=3e-6, epsilon=1e-5, epochs=4, minibatches=1, schedule=linear()),
                finished=True,
            ),
        ),
    )
