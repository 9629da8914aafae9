"""Policy Optimization with Action Decomposition."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.evidence.claims import Ahead, Identity
from panoply.experience import TERMINATED, Experience, Segments, Table
from panoply.methods.base.ppo import TINY as PPO_TINY
from panoply.methods.base.ppo import ppo
from panoply.regimes import OnPolicy
from panoply.registry import Published, algorithm, method
from panoply.seeds import numpy_rng, torch_rng
from panoply.slots.credit.gae import gae
from panoply.slots.loss.values import squared_value
from panoply.slots.model.values import critic
from panoply.slots.regularise.terms import entropy
from panoply.slots.update.near import adam_near
from panoply.slots.update.optimisers import adam
from panoply.worlds.control.mdp import MDP
from panoply.worlds.control.world import Array

# ------------------------------------------------------------------ values of words, letter by letter

END = "."


def spelled(number: int, dice: np.random.Generator) -> list[str]:
    """Different words of one letter to eight over a and b, so that many begin alike; each ends with a full stop."""
    words: list[str] = []
    while len(words) < number:
        word = "".join(dice.choice(list("ab"), dice.integers(1, 9))) + END
        words += [word] if word not in words else []
    return words


def token_values(mdp: MDP, words: list[str], gamma: float, inside: float) -> dict[str, Array]:
    """V[state] of every beginning of a word, by value iteration over letters; the empty one is the state itself.

    V(s, w) = max over letters of R + γ·E V(s′, ·) where the letter ends an action, and of inside·V(s, w + letter) where
    it does not.
    """
    begun = sorted({word[:j] for word in words for j in range(len(word))}, key=lambda w: (-len(w), w))
    values: dict[str, Array] = {prefix: np.zeros(mdp.states) for prefix in begun}
    action = {word: a for a, word in enumerate(words)}
    letters = sorted({letter for word in words for letter in word})
    while True:
        moved = 0.0
        for prefix in begun:
            after = mdp.backup(values[""], gamma)
            spelt = [prefix + letter for letter in letters]
            worth = [after[:, action[w]] for w in spelt if w in action]
            worth += [inside * values[w] for w in spelt if w in values]
            found = np.max(worth, axis=0)
            moved = max(moved, float(np.abs(found - values[prefix]).max()))
            values[prefix] = found
        if moved < 1e-12:
            return values


def differences(seed: int, gamma: float = 0.9, states: int = 5, words: int = 6) -> dict[str, float]:
    """How far values of beginnings are from what the best word that begins so is worth, in a random MDP."""
    from panoply.worlds.control.tabular import Tabular

    mdp = Tabular("random", size=states, actions=words, branching=min(2, states), seed=seed).mdp
    spelt = spelled(words, numpy_rng("words of poad", seed))
    exact = mdp.optimal(gamma)
    found = {}
    for name, inside in (("at borders", 1.0), ("at every letter", gamma)):
        values = token_values(mdp, spelt, gamma, inside)
        best = {w: exact[:, [a for a, word in enumerate(spelt) if word.startswith(w)]].max(1) for w in values}
        found[f"largest difference, γ {name}"] = max(float(np.abs(values[w] - best[w]).max()) for w in values)
    return found


@algorithm(
    "poad-values@1",
    paper=51,
    claim=Identity(
        "Value iteration over the letters of words, with γ between words and 1 inside them, gives every beginning of a "
        "word the value of the best action that begins so, and every state its value in the MDP of whole actions.",
        differences,
        within=1e-8,
    ),
)
def poad_values(gamma: float = 0.9, states: int = 5, words: int = 6, seed: int = 0) -> dict[str, float]:
    """POAD's backup (arXiv 2405.15821): are values of letters those of actions? Where γ is only between actions, yes.

    A random MDP of `states`, whose actions are `words` of one letter to eight. The first row is POAD's backup, the
    second the naive one, which discounts every letter, so that an action is worth less the longer its word is.
    """
    if not 0 <= gamma <= 0.99 or not 1 <= states <= 100 or not 1 <= words <= 100:
        raise PanoplyError("poad-values has gamma from 0 to 0.99, 1 to 100 states, and 1 to 100 words.")
    return differences(seed, gamma, states, words)


# ------------------------------------------------------------------ three states, a short word or a long one

LONG, PAYS, SHORT = 6, 1.0, (0.9, 0.7, 0.5)
"""Letters of the long word and what it pays, and what a word of one letter pays in each of three states."""
GAMMA, LAM, STEPS, EPISODES = 0.9, 0.95, 100, 64


def best_words(gamma: float, inside: float) -> tuple[list[float], list[bool]]:
    """In each of the three states: its value, and whether the long word is the better one."""
    after, values, long = 0.0, [], []
    for pays in reversed(SHORT):
        few, many = pays + gamma * after, inside ** (LONG - 1) * (PAYS + gamma * after)
        after = max(few, many)
        values.append(after)
        long.append(many > few)
    return values[::-1], long[::-1]


def played(chance: Tensor, episodes: int, generator: torch.Generator) -> Experience:
    """Episodes through the three states, a row a letter; `chance` is that of the long word in each.

    The first letter decides which word it is; those that follow are the only ones that a word has left.
    """
    states = len(SHORT)
    drawn = torch.rand(episodes, states, 1, generator=generator, dtype=chance.dtype)
    long = (drawn < chance[:, None]).expand(episodes, states, LONG)
    episode, state, letter = torch.meshgrid(*map(torch.arange, (episodes, states, LONG)), indexing="ij")
    said = long | (letter == 0)
    last = torch.where(long, letter == LONG - 1, letter == 0)
    paid = torch.where(long, PAYS, torch.tensor(SHORT, dtype=chance.dtype)[state]) * last
    end = torch.where(last & (state == states - 1), TERMINATED, 0)
    columns = {"episode": episode, "turn": state, "position": letter, "action": long.long()}
    columns |= {"reward": paid, "end": end, "context": episode}
    return Experience(Table({name: column[said] for name, column in columns.items()}), Table({}))


def practised(seed: int, inside: float | None, by: Literal["decision", "turn"]) -> tuple[Tensor, Tensor]:
    """PPO on the three states from a coin's toss, with tables for policy and critic: the chance of the long word in
    each state, and V of each state and letter."""
    generator = torch_rng("short and long words", seed)
    logit = torch.zeros(len(SHORT), dtype=torch.float64, requires_grad=True)
    value = torch.zeros(len(SHORT), LONG, dtype=torch.float64)
    optimiser = torch.optim.Adam([logit], lr=0.05)
    credit = gae(gamma=GAMMA, lam=LAM, by=by, inside=inside)
    for _ in range(STEPS):
        rows = played(logit.detach().sigmoid(), EPISODES, generator)
        state, letter = rows["turn"], rows["position"]
        found = credit(rows.with_columns(value=value[state, letter]))
        places = Segments(state * LONG + letter)
        mean = places.mean(found["target"])
        value.view(-1)[places.keys] += 0.5 * (mean - value.view(-1)[places.keys])
        chosen = letter == 0
        sign, advantage = 2.0 * rows["action"][chosen] - 1, found["advantage"][chosen]
        before = F.logsigmoid(sign * logit.detach()[state[chosen]])
        for _ in range(4):
            ratio = (F.logsigmoid(sign * logit[state[chosen]]) - before).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            optimiser.zero_grad()
            (-gain.sum() / len(rows)).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return logit.detach().sigmoid(), value


def long_words(seed: int) -> dict[str, float]:
    """How much more often POAD ends up with the long word, which is the better action in all states, than token-γ PPO.

    V off: how far V of the first state is from its value in the MDP of whole actions.
    """
    exact, _ = best_words(GAMMA, 1.0)
    found: dict[str, float] = {}
    arms: dict[str, tuple[float | None, Literal["decision", "turn"]]] = {
        "POAD": (1.0, "decision"),
        "γ at every token": (None, "decision"),
        "whole actions": (None, "turn"),
    }
    for name, (inside, by) in arms.items():
        chance, value = practised(seed, inside, by)
        found |= {name: float(chance.mean()), f"V off, {name}": abs(float(value[0, 0]) - exact[0])}
    return {"ahead": found["POAD"] - found["γ at every token"], **found}


CLAIM = Ahead(
    "Of three states in which a word of six letters is the better action and a word of one letter pays nearly as much, "
    "PPO over letters with γ = 0.9 between words alone comes to say the long word in a larger share than PPO that "
    "discounts every letter.",
    long_words,
)


# ------------------------------------------------------------------ the method

TINY = {**PPO_TINY, "models.critic.update.epochs": 4}
PUBLISHED: Published = {
    "arXiv 2405.15821": {"credit.inside": 1.0, "credit.by": "decision"},
    "morning9393/ADRL, mappo/config.py": {
        "credit.gamma": 0.95,
        "credit.lam": 0.95,
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
        "regularise.entropy.weight": 0.01,
        "update.lr": 1e-6,
        "update.clip": 0.5,
        "update.epochs": 1,
        "update.minibatches": 4,
        "models.critic.loss.weight": 0.5,
        "models.critic.loss.clip": 0.2,
        "models.critic.update.lr": 5e-5,
        "models.critic.update.clip": 0.5,
        "models.critic.update.epochs": 1,
        "models.critic.update.minibatches": 4,
    },
    "morning9393/ADRL, mappo/trainers/llm_trainer_tppo.py": {
        "update.skip_kl": 0.02,
        "update.epsilon": 1e-5,
        "update.weight_decay": 0.0,
        "models.critic.update.epsilon": 1e-5,
        "credit.normalise": True,
        "reduce": "token_mean",
    },
}
"""What VirtualHome was run with; the command for Overcooked has γ 0.99, an entropy weight of 1e-4, five epochs and two
mini-batches."""


@method(
    "poad@1",
    paper=51,
    base="ppo",
    world="tools",
    claim=CLAIM,
    presets={"tiny": TINY},
    published=PUBLISHED,
)
def poad() -> OnPolicy:
    """Policy Optimization with Action Decomposition (arXiv 2405.15821): γ between actions, none between their tokens.

    PPO over tokens that discounts each of them pays an action less the longer it takes to say: with γ = 0.9, six tokens
    cost four tenths. So γ counts turns:

        inside an action   δ = V_next − V,              A = δ + λ·A_next
        its last token     δ = R + γ·V(next turn) − V,  A = δ + γλ·A_next

    where V(next turn) is that of its prompt, before any token. The best policy over tokens is then the best over
    actions, while each token still has a credit of its own. λ counts tokens all the same. With γ = 1 nothing differs
    from PPO. The naive way is `credit.inside=none`, and actions as wholes `credit.by=turn`.

    A mini-batch on which the policy has moved by more than 0.02 nats a token moves the critic alone (`update.skip_kl`).

    Whole episodes are drawn here, `sample.prompts` a step; the authors cut rollouts after a number of turns and go on
    from the value there. Their critic is a head on the frozen model, and here has weights of its own. They normalise
    advantages within a mini-batch and leave out exact zeros, taken for padding; here over all tokens that were drawn,
    of which none is padding. Their code picks actions from a list of allowed ones by likelihood per word, though tokens
    learn by their plain probabilities; here what is drawn is what learns. Their Huber loss of values, off by default,
    is not here.
    """
    return ppo().but(
        credit=gae(gamma=0.95, lam=0.95, inside=1.0),
        regularise=(entropy(weight=0.01),),
        update=adam_near(epsilon=1e-5, clip=0.5, skip_kl=0.02, minibatches=4),
        models=(
            critic(
                loss=squared_value(weight=0.5, clip=0.2),
                update=adam(lr=5e-5, epsilon=1e-5, clip=0.5, minibatches=4),
            ),
        ),
    )
