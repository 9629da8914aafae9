"""ReTool: a cold start on traces with code in them, then PPO that is paid for the answer alone."""

from __future__ import annotations

from panoply.evidence.claims import Learns, Shows
from panoply.methods.base.ppo import TINY as PPO_TINY
from panoply.methods.base.ppo import ppo
from panoply.recipes import Recipe, Stage
from panoply.regimes import OnPolicy
from panoply.registry import Published, method, recipe
from panoply.slots.make.answers import solved_for
from panoply.slots.reward.shaping import verdict
from panoply.slots.sample.groups import groups
from panoply.slots.update.optimisers import adam

TINY = {**PPO_TINY, "sample.prompts": 64, "run.steps": 20}

PUBLISHED: Published = {
    "reported of arXiv 2504.11536, its training": {
        "reward": "verdict",
        "reward.right": 1.0,
        "reward.wrong": -1.0,
        "regularise.kl.weight": None,
    },
    "reported of arXiv 2504.11536, its experiments": {
        "sample.prompts": 512,
        "update.lr": 1e-6,
    },
}
"""512 is the size of a mini-batch there; how many of them a batch has is not said, and here it is one. ε, λ and the
critic are PPO's."""


@method(
    "retool-alone@1", paper=24, base="ppo", world="tools:code", presets={"tiny": TINY}, published=PUBLISHED
)
def retool_alone() -> OnPolicy:
    """The second stage of ReTool (arXiv 2504.11536): PPO on turns between which code is run, R = ±1 for the answer.

    An episode is t₁ ⊕ c₁ ⊕ f₁ ⊕ t₂ ⊕ …: what the policy writes, code among it, and what an interpreter in a sandbox
    gives back, f: what was printed, or the error. That is context and no decision: no loss, no ratio, no count, no
    place in the mean of advantages, and GAE goes from a token of the policy's to its next one. Nothing is paid for code
    that runs, nor for form. The recipe `retool` has the stage before it.
    """
    return ppo().but(
        sample=groups(prompts=512, group=1),
        reward=verdict(right=1.0, wrong=-1.0),
        update=adam(lr=1e-6, epochs=1, minibatches=1),
    )


CLAIM = Learns(
    "On questions of which seven in ten are sums of single digits and the others need two operations on larger "
    "numbers, PPO that may run Python between its turns solves more after as many episodes than the same PPO from the "
    "same start that has to answer at once.",
    method="with Python=retool-alone",
    over="text alone=retool-alone:world.budget=3",
    world="tools:code",
    budget="episodes=2560",
    settings={"world.easy": 0.7, "run.held_out": 100},
    also=("success", "invalid", "episode_length", "total_decisions"),
    shows=(Shows("success", least=0.15, most=0.85),),
    reworded="it held of a calculator of one operation, which is no interpreter; then text alone solved one question "
    "in a hundred and learned nothing, so that nobody could tell. Now the start can add some single digits, more of "
    "the questions are sums, and there are twice as many episodes.",
)
"""An answer has three tokens and a program more, so that who has three to spend can only answer. Some 130 sums are
among the problems of the test split: enough for 100 problems to be judged by and 100 to choose settings by."""


@recipe("retool@1", paper=24, world="tools:code", claim=CLAIM)
def retool() -> Recipe:
    """ReTool (arXiv 2504.11536): imitation of traces in which Python does the reckoning, then PPO, R = ±1.

    1. Traces in which steps of manual calculation are code and its output, kept where form and answer are right;
    imitation of what the policy is to write in them. 2. PPO, by outcomes alone: the end of a program ends a turn, what
    it prints, or its error, is shown, and the policy goes on, until it answers. What is surprising: nobody pays for
    code, and it becomes frequent, earlier and right (in the paper from about 40 % of answers to 98 %), and is mended
    after errors, while answers get shorter. Rewards of ±1 and of 0 and 1 are the same to groups that are standardised,
    but not to a critic, which begins at 0.

    Programs are expressions of up to 18 characters (`tools:code`), all of a round run at once in the sandbox that the
    plan names; one that fails or takes too long is answered in the prompt, never raised. With longer ones a tool is a
    function of yours (docs/agents.md), and with `world.kind=calculator` it does one operation a call. Loss on results,
    the ablation that harms there, cannot be asked for: what a policy did not draw never learns. Without a cold start it
    is `retool-alone`. Reconstructed: steps and rates of both stages.
    """
    return Recipe(
        (
            Stage("traces", make=solved_for(prompts=256)),
            Stage(
                "cold", "sft", {"data": "stored", "data.folder": "@traces", "data.batch": 64}, {"steps": 8}
            ),
            Stage("try", "retool-alone", {}, {"steps": 20, "model": "@cold"}),
        )
    )
