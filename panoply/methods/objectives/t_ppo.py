"""Truncated Proximal Policy Optimization."""

from __future__ import annotations

import torch
from torch import Tensor

from panoply.evidence.claims import Learns, Shows
from panoply.experience import OPEN, Experience
from panoply.methods.base.ppo import TINY as PPO_TINY
from panoply.methods.base.ppo import ppo
from panoply.parts import part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.gae import generalised_advantage
from panoply.slots.credit.returns import in_time
from panoply.slots.loss.values import squared_value
from panoply.slots.model.values import critic
from panoply.slots.sample.windows import OPEN_ANSWERS, windows
from panoply.slots.update.optimisers import adam


@part(
    "credit",
    equation=lambda held: (
        f"A = Σ_k (γλ)^k·δ_k,  δ = r + γV′ − V,  V′ = V at an open end,  γ = {held.gamma:g}, λ = {held.lam:g}, "
        f"for the critic λ = {held.critic_lam:g}"
    ),
    needs={"column:value"},
    gives={"column:target", OPEN_ANSWERS},
    bounds=dict.fromkeys(("gamma", "lam", "critic_lam"), "from 0 to 1"),
)
def egae(
    experience: Experience,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    critic_lam: float = 1.0,
    normalise: bool = True,
) -> dict[str, Tensor]:
    """Extended generalised advantage estimation (arXiv 2506.15050): GAE over what there is of an unfinished answer.

    After the last token of a finished answer nothing follows, V(s_T) = 0, and A is GAE's. An answer that goes on in
    another step is taken to be worth after its last token what it was worth before it, V(s_l) = V(s_{l−1}): with
    γ = 1 that token's own surprise δ is then 0, and earlier ones are as they are. Advantages are normalised over
    the rows that learn.

    critic_lam   λ of the critic's `target` A + V: with 1 it is what was really earned
    """
    order, end = in_time(experience), experience["end"]
    value, reward = experience["value"][order], experience["reward"].float()[order]
    episode, bootstrap = experience["episode"][order], value.masked_fill(end[order] != OPEN, 0.0)
    advantage, target = torch.empty_like(value), torch.empty_like(value)
    advantage[order] = generalised_advantage(reward, value, bootstrap, episode, gamma, lam)
    target[order] = generalised_advantage(reward, value, bootstrap, episode, gamma, critic_lam) + value
    learns = experience["train"] if "train" in experience else torch.ones_like(end, dtype=torch.bool)
    if normalise and int(learns.sum()) > 1:
        own = advantage[learns]
        advantage = (advantage - own.mean()) / (own.std() + 1e-8)
    return {"advantage": advantage, "target": target}


TINY = {
    **{path: value for path, value in PPO_TINY.items() if path != "run.steps"},
    "sample.window": 24,
    "models.critic.warmup": 20,
    "run.steps": 400,
}
PUBLISHED: Published = {
    "the paper, second-hand (reviews)": {
        "credit.gamma": 1.0,
        "credit.critic_lam": 1.0,
        "models.critic.finished": True,
    },
    "the paper, reconstructed": {
        "sample.window": 8192,
        "credit.lam": 0.95,
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
        "models.critic.loss.clip": None,
    },
}
"""No code was released. The window is a third of the longest answer, 24,576 tokens."""


BUSY = "total_decisions/total_decode_steps"
"""How many answers of a batch are being written, on average, while it is decoded."""
CLAIM = Learns(
    "At equal numbers of decoding steps, learning from windows of 16 tokens gets further than PPO on batches of as "
    "many answers, which wait for the longest.",
    method="t-ppo:sample.slots=32:sample.window=16:models.critic.warmup=6",
    over="ppo:sample.prompts=32:models.critic.warmup=3",
    world="copies",
    budget="decode_steps=1300",
    shows=(Shows(BUSY, most=16),),
    also=("success", "total_decisions", BUSY),
)
"""Critics learn alone for about as many decoding steps on both sides."""


@method(
    "t-ppo@1",
    paper=31,
    base="ppo",
    world="copies",
    presets={"tiny": TINY},
    claim=CLAIM,
    published=PUBLISHED,
)
def t_ppo() -> OnPolicy:
    """Truncated Proximal Policy Optimization (arXiv 2506.15050): learn from answers before they are over.

    Where a few answers are much longer than the rest, most of a batch waits for them. Here a step samples only a window
    of tokens of each answer, learns from it at once, and goes on with what is unfinished in the next step; finished
    answers make room for new prompts, so that nothing ever waits. Every token is learned from once, in the step that
    drew it, against the policy that drew it. Advantages over an open end are estimated (`credit.egae`); the critic
    learns from whole finished answers alone, of what they really earned. What is surprising: until the critic knows
    something, all unfinished windows have an advantage of 0, so it learns alone for some steps
    (`models.critic.warmup`). `total_decode_steps` in the metrics counts tokens that were decoded one after another,
    which is what it saves. No code was released; the settings are reconstructed, but for what `show` says.
    """
    return ppo().but(
        sample=windows(slots=128, window=8192),
        credit=egae(),
        models=(
            critic(
                loss=squared_value(),
                update=adam(lr=1e-5, epochs=4, minibatches=4),
                warmup=50,
                finished=True,
            ),
        ),
    )
