"""SPO: self-play preference optimization towards the minimax winner."""

from __future__ import annotations

import torch
from torch import Tensor

from panoply.evidence.claims import Ahead, Learns
from panoply.experience import Experience
from panoply.methods.base.ppo import ppo
from panoply.methods.base.preference_ppo import CONTROL
from panoply.methods.base.rloo import TINY as RLOO_TINY
from panoply.methods.base.rloo import rloo
from panoply.parts import part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.seeds import torch_rng
from panoply.slots.sample.annotated import annotated, preference
from panoply.slots.sample.compared import compared


@part("reward", equation="(2·wins − 1)/H on each of an episode's H decisions", needs={"signal:wins"})
def wins(experience: Experience) -> Tensor:
    """How an episode did in comparisons, from −1 (lost all) to 1 (won all), in equal shares on its decisions.

    The shares add up to no more than 1 however long an episode is, so that values stay bounded.
    """
    episodes = experience.by("episode")
    won = 2 * episodes.sum(experience["signal:wins"].float()) - 1
    return episodes.rows(won / episodes.count)


# ------------------------------------------------------------------ exactly, in a bandit and in a zone

RANKINGS = ((0, 1, 2), (1, 2, 0), (2, 0, 1))
"""Three kinds of raters, best first: each option is first for one, and beats the next for two of them."""
ROUNDS, RATE = 4000, 0.1


def cyclic(shares: Tensor) -> Tensor:
    """[3, 3] P(a ≻ b) of a population with so many raters of each ranking: a circle where no share is above ½."""
    places = torch.tensor([[ranking.index(option) for option in range(3)] for ranking in RANKINGS])
    rank = -places.double().T
    before = preference(rank[:, None, :, None], rank[None, :, :, None])
    return before @ shares


def worst(game: Tensor, policy: Tensor) -> float:
    """How often a policy wins against the option it does worst against; ½ is the most there is."""
    return float((policy @ game).min())


def self_play(game: Tensor, rounds: int = ROUNDS, rate: float = RATE) -> tuple[Tensor, Tensor]:
    """SPO where every win rate is known: π ∝ exp(rate·Σ_t Pπ_t), the average of all rounds and the last of them."""
    logits = torch.zeros(len(game), dtype=game.dtype)
    total = torch.zeros_like(logits)
    for _ in range(rounds):
        policy = logits.softmax(0)
        total += policy
        logits = logits + rate * game @ policy
    return total / rounds, policy


def on_scores(game: Tensor, rounds: int = ROUNDS, rate: float = RATE) -> Tensor:
    """The same ascent on the scores that explain the preferences best (Bradley and Terry), in place of win rates."""
    scores = torch.zeros(len(game), dtype=game.dtype)
    for _ in range(200):
        scores = scores + (game - torch.sigmoid(scores[:, None] - scores[None])).mean(1)
    return (rounds * rate * scores).softmax(0)


STEPS, MOST, ASCENT = 10, 6, 400
"""Of the zone: how long an episode is, in how many of its steps it may be there, and steps of ascent on p's logit."""


def zone(fitted: bool) -> float:
    """How often an episode keeps out of a zone for long enough, by one who prefers more time there, up to a limit.

    In every step the policy is in the zone with one probability p, which begins at ½ and ascends SPO's win rate, or
    with `fitted` a reward of steps: Bradley and Terry's for episodes of the beginning.
    """
    k = torch.arange(STEPS + 1).double()
    binomial = (
        torch.lgamma(torch.tensor(STEPS + 1.0)) - torch.lgamma(k + 1) - torch.lgamma(STEPS + 1 - k)
    ).exp()
    valued = (k - 100 * (k > MOST))[:, None]
    game = preference(valued[:, None], valued[None])
    logit = torch.zeros((), dtype=torch.double)
    weight = 0.0
    for step in range(ASCENT):
        p = logit.sigmoid()
        chance = binomial * p**k * (1 - p) ** (STEPS - k)
        if step == 0 and fitted:
            weight = _per_step(game, k, chance)
        earned = weight * k if fitted else game @ chance
        logit = (logit + (chance * (k - STEPS * p) * earned).sum()).clamp(-8, 8)
    return float(chance[k <= MOST].sum())


def _per_step(game: Tensor, k: Tensor, chance: Tensor) -> float:
    """The reward of a step in the zone that is the likeliest for pairs of episodes, by Newton's method."""
    weight, apart = 0.0, k[:, None] - k[None]
    often = chance[:, None] * chance[None]
    for _ in range(50):
        p = torch.sigmoid(weight * apart)
        slope, bend = (often * (game - p) * apart).sum(), (often * p * (1 - p) * apart**2).sum()
        weight += float((slope / bend).clamp(-1, 1))
    return weight


def exactly(seed: int) -> dict[str, float]:
    """How much better SPO's average does at worst than an ascent on scores, where raters prefer in a circle."""
    shares = 1 / 3 + 0.2 * (torch.rand(3, generator=torch_rng("shares of raters", seed)).double() - 0.5)
    game = cyclic(shares / shares.sum())
    average, last = self_play(game)
    scored = on_scores(game)
    return {
        "ahead": worst(game, average) - worst(game, scored),
        "average of self-play": worst(game, average),
        "last of self-play": worst(game, last),
        "on scores": worst(game, scored),
        "likeliest option on scores": float(scored.max()),
        "zone kept": zone(fitted=False),
        "zone kept, on a reward": zone(fitted=True),
    }


# ------------------------------------------------------------------ methods

NOISY = {"world.horizon": 200, "sample.flip": 0.2, "sample.opponents": 10, "run.held_out": 100}
"""An annotator who prefers the longer of two episodes, and says the opposite of what is meant one time in five."""


TINY = {name: value for name, value in RLOO_TINY.items() if name != "reward.beta"}
"""RLOO's; nothing is taken off the win rate."""


PUBLISHED: Published = {
    "arXiv 2401.04056, §4 (reconstructed)": {"sample.against": "past", "reward": "wins", "sample.group": 1},
}
"""No code is released. How long the queue is, and the numbers of PPO, are chosen here."""


@method(
    "spo-minimax@1",
    paper=143,
    base="ppo",
    world="cartpole",
    presets={"control": CONTROL},
    claim=Learns(
        "From as many comparisons, of which a fifth is answered wrongly, paying an episode its win rate against "
        "earlier ones learns more than paying it by a reward fitted to them.",
        over="preference-ppo:models.preferred.warmup=1",
        world="cartpole",
        budget="episodes=256",
        settings=NOISY,
        metric="area",
        also=("success", "worth", "mean:comparisons"),
        best=200.0,
        reworded="after 512 episodes the fitted reward had filled 94 % of the room",
    ),
    published=PUBLISHED,
)
def spo_minimax() -> OnPolicy:
    """SPO (arXiv 2401.04056) in control: an episode earns how often it is preferred to the agent's own earlier ones.

    r(ξ) = mean over the last B episodes ξ′ of P(ξ, ξ′), from −1 to 1, spread as r/H over its H steps, and PPO on that.
    There is no reward model: preferences may be noisy, go round in a circle, or be about whole episodes. Because a
    preference is antisymmetric, one player against itself finds the minimax winner, the policy that no other is
    preferred to more than half of the time.

    Surprising: the reward of an episode that stays as good falls while the agent improves, and is 0 on average once it
    is compared with its equals. Where preferences go round in a circle the policy of the last step cycles, too; only
    the average over all steps comes to rest, and is what is reported of such preferences (`spo-minimax-answers`).

    The paper also runs SAC, whose replay must keep the win rates of when they were asked for; here every step is
    learned from once, by PPO. Its preferences that are not Markov look at the last quarter of an episode;
    `sample.rater=spared` is about the time in a zone.
    """
    return ppo().but(sample=annotated(prompts=32, group=1, opponents=10), reward=wins())


@method(
    "spo-minimax-answers@1",
    paper=143,
    base="rloo",
    world="strings",
    presets={"tiny": TINY},
    claim=Ahead(
        "Where raters prefer three options in a circle, the average of self-play on win rates wins nearly half of the "
        "time against each of them; ascent on fitted scores goes to one option, which another beats.",
        exactly,
    ),
    published={
        "arXiv 2401.04056, §4 (reconstructed)": {
            "sample.asked": "all",
            "reward": "wins",
            "credit.baseline": "leave_one_out",
        }
    },
)
def spo_minimax_answers() -> OnPolicy:
    """SPO (arXiv 2401.04056) for answers: of n to a prompt, each earns its win rate among the n − 1 others.

    r_i = 1/(n−1)·Σ_{j≠i} P(y_i ≻ y_j), and any policy gradient: here REINFORCE leave-one-out, without a pull to the
    start. An answer is never compared with itself. Every pair of a group is asked about once, n(n − 1)/2 questions a
    prompt (`sample.soft` takes probabilities instead of answers).

    What is claimed is exact, in a bandit whose three kinds of raters go round in a circle: the average over rounds is
    the minimax winner, while the last round's policy cycles, away from it; ascent on Bradley and Terry's scores goes to
    the one option with the most. And for one who prefers to be in a zone, but for at most 6 of 10 steps: a reward of
    single steps that was fitted to episodes of the beginning leads into the zone for good. One that is fitted anew in
    every round would hover where SPO does.
    """
    return rloo().but(sample=compared(prompts=128, group=4, asked="all"), reward=wins())
