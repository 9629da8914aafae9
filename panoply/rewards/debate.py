"""A judge that sees part of a state, and debaters who choose which part.

Two actions are argued for by turns; each turn shows one more feature of the state. After `evidence` of them the judge
says which action it would rather see, from those alone: +1 for the side it prefers, −1 for the other, 0 if neither.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, softplus

from panoply.loops.compiler import leave_unloaded
from panoply.slots.update.optimisers import adam

HIDDEN = 64


@dataclass(frozen=True)
class Disputes:
    """States with an action that was preferred and another."""

    state: Tensor
    preferred: Tensor
    other: Tensor

    def some(self, count: int, dice: torch.Generator) -> Disputes:
        rows = torch.randint(len(self.state), (count,), generator=dice)
        return Disputes(self.state[rows], self.preferred[rows], self.other[rows])


# ------------------------------------------------------------------ the judge


class Judge(nn.Module):
    """J(a, e): how much an action is to be preferred, by the features shown. It sees which are shown, too: a feature
    that is 0 is not one that is missing."""

    def __init__(self, features: int, actions: int, hidden: int = HIDDEN):
        super().__init__()
        self.actions = actions
        self.net = nn.Sequential(
            nn.Linear(2 * features + actions, hidden),
            nn.PReLU(hidden),
            nn.BatchNorm1d(hidden),
            nn.Linear(hidden, hidden),
            nn.PReLU(hidden),
            nn.BatchNorm1d(hidden),
            nn.Linear(hidden, 1),
        )

    def forward(self, state: Tensor, shown: Tensor, action: Tensor) -> Tensor:
        sees = torch.cat([state * shown, shown, one_hot(action, self.actions).to(state)], -1)
        scores: Tensor = self.net(sees)[:, 0]
        return scores

    @torch.no_grad()
    def verdict(self, state: Tensor, shown: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """+1 where the first action is preferred, −1 where the second is, 0 where none; an action ties with itself."""
        ahead: Tensor = self(state, shown, first) - self(state, shown, second)
        return ahead.sign() * (first != second)  # equal rows of a batch need not be equal to the last bit


def random_evidence(count: int, features: int, evidence: int, dice: torch.Generator) -> Tensor:
    """Masks of so many features each, any."""
    order = torch.rand(count, features, generator=dice).argsort(-1).argsort(-1)
    return (order < evidence).float()


def judge_of(
    disputes: Disputes,
    actions: int,
    evidence: int,
    dice: torch.Generator,
    *,
    steps: int = 400,
    batch: int = 256,
    lr: float = 2e-3,
) -> Judge:
    """Bradley–Terry on disputes, of which other features are shown each time: −log σ(J(preferred, e) − J(other, e)).

    Both actions are scored in one pass: normalised apart, the batches' own means would tell which of them is preferred.
    """
    leave_unloaded()
    judge = Judge(disputes.state.shape[1], actions)
    optimiser = adam(lr=lr)(judge.parameters())
    for _ in range(steps):
        some = disputes.some(batch, dice)
        shown = random_evidence(batch, some.state.shape[1], evidence, dice)
        both = judge(some.state.repeat(2, 1), shown.repeat(2, 1), torch.cat([some.preferred, some.other]))
        optimiser.zero_grad()
        loss: Tensor = softplus(both[batch:] - both[:batch]).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return judge.eval()


# ------------------------------------------------------------------ debaters


class Debater(nn.Module):
    """Which feature to show next, for one's own action, and what that promises; the whole state is known to it."""

    def __init__(self, features: int, actions: int, hidden: int = HIDDEN):
        super().__init__()
        self.actions = actions
        sizes = (2 * features + actions, hidden)
        self.actor, self.critic = (
            nn.Sequential(
                nn.Linear(*sizes), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, n)
            )
            for n in (features, 1)
        )

    def forward(self, state: Tensor, shown: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities over features, none for those that are shown already, and values."""
        sees = torch.cat([state, shown, one_hot(action, self.actions).to(state)], -1)
        logits = self.actor(sees).masked_fill(shown > 0, -torch.inf)
        return logits.log_softmax(-1), self.critic(sees)[:, 0]

    @torch.no_grad()
    def pick(self, state: Tensor, shown: Tensor, action: Tensor, dice: torch.Generator | None) -> Tensor:
        """A feature each: drawn, or without dice the most probable."""
        logp, _ = self(state, shown, action)
        return logp.argmax(-1) if dice is None else torch.multinomial(logp.exp(), 1, generator=dice)[:, 0]


def debated(
    state: Tensor,
    actions: tuple[Tensor, Tensor],
    sides: tuple[Debater, Debater | None],
    evidence: int,
    dice: torch.Generator,
) -> Tensor:
    """What is shown in the end. Who begins is drawn for each debate; against nobody (None) one shows everything.

    Debaters show what they think best; chance only says who begins.
    """
    shown = torch.zeros_like(state)
    begins = torch.randint(2, (len(state),), generator=dice)
    for turn in range(evidence):
        pick = sides[0].pick(state, shown, actions[0], None)
        if sides[1] is not None:
            reply = sides[1].pick(state, shown, actions[1], None)
            pick = torch.where((begins + turn) % 2 == 0, pick, reply)
        shown = shown.scatter(1, pick[:, None], 1.0)
    return shown


@dataclass(frozen=True)
class Played:
    """What one side saw and did in its turns, [turns, debates], and what it won in the end, [debates]."""

    state: Tensor
    action: Tensor
    shown: Tensor
    pick: Tensor
    won: Tensor


def played(
    learner: Debater,
    opponent: Debater | None,
    judge: Judge,
    disputes: Disputes,
    swapped: Tensor,
    evidence: int,
    dice: torch.Generator,
) -> Played:
    """Debates in which the learner argues for the preferred action, or where `swapped` for the other one."""
    own = torch.where(swapped, disputes.other, disputes.preferred)
    theirs = torch.where(swapped, disputes.preferred, disputes.other)
    state, shown = disputes.state, torch.zeros_like(disputes.state)
    begins = torch.randint(2, (len(own),), generator=dice)
    turns = evidence if opponent is None else evidence // 2
    seen, picks = torch.zeros(turns, *state.shape), torch.zeros(turns, len(own), dtype=torch.long)
    for turn in range(evidence):
        pick = learner.pick(state, shown, own, dice)
        at = turn if opponent is None else turn // 2
        mine = (begins + turn) % 2 == 0 if opponent is not None else torch.ones_like(swapped)
        seen[at] = torch.where(mine[:, None], shown, seen[at])
        picks[at] = torch.where(mine, pick, picks[at])
        if opponent is not None:
            pick = torch.where(mine, pick, opponent.pick(state, shown, theirs, dice))
        shown = shown.scatter(1, pick[:, None], 1.0)
    return Played(state, own, seen, picks, judge.verdict(state, shown, own, theirs))


class Trainer:
    """A debater that learns by PPO from debates that a judge decides."""

    def __init__(
        self, judge: Judge, disputes: Disputes, evidence: int, dice: torch.Generator, lr: float = 1e-3
    ):
        leave_unloaded()
        self.judge, self.disputes, self.evidence, self.dice = judge, disputes, evidence, dice
        self.learner = Debater(disputes.state.shape[1], judge.actions)
        self.optimiser = adam(lr=lr, epsilon=1e-5)(self.learner.parameters())

    def learn(
        self, opponent: Debater | None, rounds: int, side: str = "preferred", debates: int = 256
    ) -> None:
        """Rounds of debates and updates, for the `preferred` action, the `other` one, or `either` at random."""
        for _ in range(rounds):
            some = self.disputes.some(debates, self.dice)
            coin = torch.randint(2, (debates,), generator=self.dice).bool()
            swapped = coin if side == "either" else torch.full_like(coin, side == "other")
            self.update(played(self.learner, opponent, self.judge, some, swapped, self.evidence, self.dice))

    def update(self, of: Played, clip: float = 0.1, entropy: float = 1e-2, repeats: int = 2) -> None:
        """PPO's, with what is won at the end, γ = 0.9 and λ = 0.7; two passes in mini-batches of 128."""
        turns = len(of.pick)
        state, action = of.state.repeat(turns, 1), of.action.repeat(turns)
        shown, pick = of.shown.flatten(0, 1), of.pick.flatten()[:, None]
        with torch.no_grad():
            logp, value = self.learner(state, shown, action)
            before = logp.gather(1, pick)[:, 0]
            ahead = advantages(of.won, value.view(turns, -1)).flatten()
            goal = ahead + value
            ahead = (ahead - ahead.mean()) / (ahead.std() + 1e-8)
        for _ in range(repeats):
            for rows in torch.split(torch.randperm(len(pick), generator=self.dice), 128):
                logp, value = self.learner(state[rows], shown[rows], action[rows])
                ratio = (logp.gather(1, pick[rows])[:, 0] - before[rows]).exp()
                gain = torch.minimum(ratio * ahead[rows], ratio.clamp(1 - clip, 1 + clip) * ahead[rows])
                spread = -(logp.exp() * logp.masked_fill(shown[rows] > 0, 0.0)).sum(-1)
                loss = 0.5 * (value - goal[rows]).square().mean() - gain.mean() - entropy * spread.mean()
                self.optimiser.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.learner.parameters(), 1.0)
                self.optimiser.step()


def advantages(won: Tensor, value: Tensor, gamma: float = 0.9, lam: float = 0.7) -> Tensor:
    """GAE over one's own turns, [turns, debates]; only the last is followed by a reward."""
    after, ahead, found = torch.zeros_like(won), torch.zeros_like(won), []
    for turn in reversed(range(len(value))):
        reward = won if turn == len(value) - 1 else torch.zeros_like(won)
        ahead = reward + gamma * after - value[turn] + gamma * lam * ahead
        found.append(ahead)
        after = value[turn]
    return torch.stack(found[::-1])


def self_play(trainer: Trainer, generations: int, rounds: int) -> Debater:
    """Against a frozen copy, which is renewed every generation; it argues for either action, as it will have to."""
    for _ in range(generations):
        trainer.learn(copy.deepcopy(trainer.learner), rounds, "either")
    return trainer.learner


def max_min(trainer: Trainer, confuser: Trainer, generations: int, rounds: int, replies: int) -> Debater:
    """A confuser learns, for many rounds, to have the other action preferred; the debater then replies for a few."""
    for _ in range(generations):
        confuser.learn(trainer.learner, rounds, "other")
        trainer.learn(confuser.learner, replies)
    return trainer.learner
