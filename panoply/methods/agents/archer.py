"""ArCHer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from panoply.evidence.claims import Learns
from panoply.experience import Experience
from panoply.parts import part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.model.utterances import utterance_critic
from panoply.slots.reduce.averages import sequence_sum
from panoply.slots.reward.signals import signal
from panoply.slots.sample.groups import groups
from panoply.slots.surrogate.ratios import log_likelihood
from panoply.slots.update.optimisers import adam

MOST = 100.0
"""The largest weight of a turn that was said before, as of AWR."""


def _equation(held: Any) -> str:
    if held.beta is not None:
        return f"A = exp({held.beta:g}·(min Q(s, a) − min V(s))) at most {MOST:g}, on all tokens of a"
    return "A = min Q(s, a) − min V(s), on all tokens of a" + (", less v(token)" if held.baseline else "")


@part(
    "credit",
    equation=_equation,
    needs=lambda held: frozenset({"column:q", "column:v"} | ({"column:value"} if held.baseline else set())),
    gives={"column:target"},
    inert=lambda held, method: (
        [("baseline", "weights have none (credit.beta)")] if held.beta is not None else []
    ),
    bounds={"beta": "above 0"},
)
def q_minus_v(
    experience: Experience, *, baseline: bool = False, beta: float | None = None
) -> Tensor | dict[str, Tensor]:
    """How much better an utterance is than what the policy says there on average, by a critic of utterances.

    baseline   less a token's own value v(s, a¹…aʰ⁻¹), which a `critic` beside it regresses on the same A: what tokens
               before it have already decided is then no merit of this one
    beta       turns are weighed by exp(β·A) in place of A, which imitates the better ones of those that were said
               before (advantage-weighted regression): none is unlearned
    """
    advantage = experience["q"] - experience["v"]
    if beta is not None:
        return (beta * advantage).exp().clamp(max=MOST)
    return {"advantage": advantage - experience["value"], "target": advantage} if baseline else advantage


CLAIM = Learns(
    "Where a guess is worth what was asked before it, a critic of whole turns that learns from old ones, and a policy "
    "that learns inside of turns from it, learn more from as many episodes than PPO does, token by token.",
    race="questions",
    also=("success", "seconds"),
)
TINY = {
    "sample.prompts": 64,
    "models.utterance_critic.lr": 1e-3,
    "models.utterance_critic.updates": 10,
    "models.utterance_critic.batch": 64,
    "models.utterance_critic.states": 192,
    "models.utterance_critic.warmup": 2,
    "update.lr": 1e-4,
    "update.beta2": 0.95,
    "run.steps": 60,
}
PUBLISHED: Published = {
    "YifeiZhou02/ArCHer, scripts/config/archer_20q.yaml": {
        "sample.prompts": 128,
        "models.utterance_critic.updates": 50,
        "models.utterance_critic.batch": 256,
        "models.utterance_critic.states": 768,
        "models.utterance_critic.warmup": 20,
        "models.utterance_critic.lr": 2e-5,
        "update.lr": 1e-6,
        "update.minibatches": 3,
    },
    "YifeiZhou02/ArCHer, scripts/config/default.yaml": {
        "models.utterance_critic.gamma": 0.95,
        "models.utterance_critic.tau": 0.1,
        "models.utterance_critic.clip": 1.0,
        "models.utterance_critic.size": 100_000,
        "sample.temperature": 1.0,
        "update.clip": 1.0,
        "credit.baseline": False,
    },
    "reported of arXiv 2402.19446": {"models.utterance_critic.expectile": None},
}


@method(
    "archer@1",
    paper=193,
    base="ppo",
    world="guess",
    presets={"tiny": TINY},
    claim=CLAIM,
    tags=("data=rules", "feedback=environment", "reward=rule", "granularity=turn"),
    published=PUBLISHED,
)
def archer(gamma: float = 0.95) -> OnPolicy:
    """ArCHer: Actor-Critic with a Hierarchical structure (arXiv 2402.19446).

    Two levels. Above, a turn is one action: twin critics Q(s, a) and V(s) of whole utterances learn off policy, from a
    replay of all turns so far, by Q → r + γ·V̄(s′) and V → Q̄(s, a), where a is what the policy would say *now*. Below,
    a turn is an episode of tokens: in states of the replay the policy says something new, and the sum of its
    log-probabilities follows A = min Q − min V. Old turns teach the critic and are never imitated, so that there is no
    ratio anywhere; and a reward has to travel over turns, of which there are few, and not over tokens.

    The critic must be warm before the policy listens to it (`warmup`). A turn here earns `score`, −1 a question.

    Where this differs from the released code: a decoder reads the context and the utterance after it, and Q's head sees
    both readings, where RoBERTa read the two apart; the three updates of the policy in a step share one draw of new
    utterances, a third each, where each drew its own after the one before. The token baseline is `credit.baseline` with
    a `critic` among the models. Learning without new utterances, by IQL's critic and the loss −exp(β·A)·log π on what
    the replay has, is `--set models.utterance_critic.expectile=0.7 --set models.utterance_critic.says=replay --set
    credit.beta=1`. PPO's clip below is `surrogate=clip`.
    """
    return OnPolicy(
        sample=groups(prompts=128, group=1),
        reward=signal(name="score"),
        credit=q_minus_v(),
        surrogate=log_likelihood(),
        reduce=sequence_sum(),
        update=adam(lr=1e-6, minibatches=3),
        models=(utterance_critic(gamma=gamma),),
    )
