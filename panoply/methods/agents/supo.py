"""Summarization-augmented policy optimization."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from panoply.evidence.claims import Ranks, Shows
from panoply.experience import TRUNCATED, Experience, Segments
from panoply.methods.base.grpo import TINY, grpo
from panoply.parts import part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import episode_returns
from panoply.slots.reduce.averages import token_mean
from panoply.slots.sample.groups import groups
from panoply.slots.surrogate.ratios import clip


@part(
    "select",
    equation=lambda held: "dropped rounds" + (" and cut-off episodes" * held.overlong) + " do not learn",
    needs={"signal:dropped"},
)
def in_context(experience: Experience, *, overlong: bool = True) -> Experience:
    """Only what stands in some context learns: a round that was dropped when the context was full stands in none.

    overlong   whether episodes that were cut off, by their turns or their summaries, do not learn either. They stay in
               their group's mean and deviation: leaving them out would move the baseline of the others
    """
    turns, episodes = experience.by("turn"), experience.by("episode")
    learns = turns.rows(turns.max(experience["signal:dropped"]) == 0)
    if overlong:
        learns = learns & episodes.rows(episodes.max(experience["end"]) != TRUNCATED)
    return experience.with_columns(train=learns & experience["train"] if "train" in experience else learns)


def _equation(held: object) -> str:
    return f"A = (R − mean_group(R)) / (std_group(R) + ε), a vote a {getattr(held, 'votes', '')}"


@part("credit", equation=_equation, needs={"signal:summaries"}, bounds={"epsilon": "from 0 to 1"})
def by_rollout(
    experience: Experience, *, votes: Literal["rollout", "trajectory"] = "rollout", epsilon: float = 1e-6
) -> Tensor:
    """One advantage an episode, for all contexts that it went through: its return against its group's.

    votes   `rollout`: every episode has one; `trajectory`: every context has one, so that an episode of I summaries has
            I + 1, and the mean leans to long ones (the variant that the paper found worse)
    """
    returns, groups = episode_returns(experience)
    if votes == "rollout":
        mean, std, equal = groups.mean(returns), groups.std(returns), groups.constant(returns)
    else:
        resets = experience.by("episode").sum(experience["signal:summaries"]).round().long()
        voters = Segments(groups.index.repeat_interleave(resets + 1))
        voiced = returns.repeat_interleave(resets + 1)
        mean, std, equal = voters.mean(voiced), voters.std(voiced), voters.constant(voiced)
    advantage = (returns - mean[groups.index]) / (std[groups.index] + epsilon)
    return experience.by("episode").rows(advantage.masked_fill(equal[groups.index], 0.0))


CLAIM = Ranks(
    "Where a stream is two to four times as long as the context, summaries that are learned with the task get "
    "more streams right than the last number kept by rule, and that more than keeping nothing.",
    ("", "last number=grpo:world.keep=last", "nothing=grpo:world.keep=nothing"),
    "stream",
    "episodes=3840",
    also=("success", "summaries", "truncated"),
    shows=(Shows("summaries", least=2.0),),
    waives={
        "room": "a rule that keeps one number forgets the others, and no training brings them back: how little that "
        "learns is what summaries are to change"
    },
    reworded="The rule that keeps the last number filled 10 % of the room, so that the gate of room is waived.",
)


PUBLISHED: Published = {
    "reported of arXiv 2510.06727, CodeGym": {
        "sample.prompts": 128,
        "sample.group": 8,
        "sample.temperature": 1.0,
        "surrogate.low": 0.2,
        "surrogate.high": 0.28,
        "update.lr": 1e-6,
    },
    "reported of arXiv 2510.06727, the objective": {
        "reduce": "token_mean",
        "regularise.kl.weight": None,
        "credit.votes": "rollout",
        "select.in_context.overlong": True,
    },
}
DONE = {"reduce", "regularise.kl", "surrogate.high", "sample.group"}
"""What GRPO takes over for tiny models is so here from the start."""


@method(
    "supo@1",
    paper=16,
    base="grpo",
    world="stream",
    presets={"tiny": {**{k: v for k, v in TINY.items() if k not in DONE}, "sample.prompts": 16}},
    claim=CLAIM,
    published=PUBLISHED,
)
def supo() -> OnPolicy:
    """SUPO: agents that sum up their own context (arXiv 2510.06727).

    When the context of an episode is full, the policy is asked for a summary, and goes on with that and the prompt
    alone. The gradient of such an episode is a sum over the contexts it went through, each an ordinary one:

        ∇J = E[Σ_i Σ_t A·∇log π(a_t | s_t of context i)],   A = (R − mean_group(R)) / std_group(R)

    So nothing but the outcome teaches what to keep in mind: words of a summary are decisions like any others. R is one
    number for the whole episode, and group statistics count episodes, not contexts. Episodes that end by a limit stay
    in the statistics and do not learn. Without summaries and limits it is GRPO with a token mean and clip-higher.
    Long episodes have more tokens, and so more weight; a group of which all are cut off learns nothing.

    What resets contexts is the world (`stream`, and any play inside of a `Windowed`, panoply/worlds/windows.py): its
    limits W, H and S are `world.window`, `world.cap` and `world.summaries`. In the paper they are 4,096 tokens (of
    which 95 % may be full), 100 turns and 7 summaries. The paper pads batches with empty rows; mini-batches here may
    differ in size.
    """
    return grpo().but(
        sample=groups(prompts=128, group=8),
        select=in_context(),
        credit=by_rollout(),
        surrogate=clip(low=0.2, high=0.28),
        regularise=(),
        reduce=token_mean(),
    )
