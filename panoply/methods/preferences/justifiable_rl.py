"""Debate as a reward: actions that can be justified by a few features of the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from panoply.errors import PanoplyError
from panoply.evidence.claims import Ahead
from panoply.registry import algorithm
from panoply.rewards.debate import (
    Debater,
    Disputes,
    Judge,
    Trainer,
    debated,
    judge_of,
    max_min,
    random_evidence,
    self_play,
)
from panoply.seeds import drawing
from panoply.slots.update.optimisers import adam

Policy = Callable[[Tensor], Tensor]
Training = Literal["self-play", "max-min", "isolated"]
FEATURES, ACTIONS, REASONS, HORIZON = 12, 4, 3, 8
GENERATIONS, ROUNDS = 20, 4
"""Of self-play: how often the frozen copy is renewed, and rounds of 256 debates in between."""
CONFUSED = (8, 2)
"""Rounds a generation of the confuser and of the debater that replies to it (150 and 5 epochs in the paper)."""
THRESHOLD = 20.0
"""What values may not exceed, up or down."""

# ------------------------------------------------------------------ a world of twelve features


@dataclass(frozen=True)
class Logged:
    """Episodes [episodes, steps, …]; states have one step more, what came after the last."""

    state: Tensor
    action: Tensor
    reward: Tensor


class Ward:
    """Twelve features, four actions, eight steps. What an expert would do follows from the first three features alone;
    what is earned follows from the other nine, in which actions are alike by twos."""

    def __init__(self, seed: int):
        with drawing("ward", seed):
            self.reasons = torch.randn(REASONS, ACTIONS)
            pays = torch.randn(FEATURES - REASONS, 2).repeat_interleave(2, 1)
            self.pays = (pays + 0.3 * torch.randn(FEATURES - REASONS, ACTIONS)) / 3
            self.effects = 0.3 * torch.randn(ACTIONS, FEATURES)

    def expert(self, state: Tensor) -> Tensor:
        return (state[..., :REASONS] @ self.reasons).argmax(-1)

    def earned(self, state: Tensor, action: Tensor) -> Tensor:
        return (state[..., REASONS:] @ self.pays).gather(-1, action[..., None])[..., 0]

    def play(self, policy: Policy, episodes: int, dice: torch.Generator) -> Logged:
        """Episodes side by side. The same dice make the same patients, whatever is done to them."""
        noise = torch.randn(HORIZON + 1, episodes, FEATURES, generator=dice)
        states, actions, rewards = [0.8 * noise[0]], [], []
        for step in range(HORIZON):
            actions.append(policy(states[-1]))
            rewards.append(self.earned(states[-1], actions[-1]))
            states.append(0.8 * states[-1] + self.effects[actions[-1]] + 0.5 * noise[step + 1])
        return Logged(torch.stack(states, 1), torch.stack(actions, 1), torch.stack(rewards, 1))

    def logged(self, episodes: int, dice: torch.Generator) -> Logged:
        """What is known to begin with: someone who does what the expert would half of the time, and else anything."""

        def someone(state: Tensor) -> Tensor:
            anything = torch.randint(ACTIONS, (len(state),), generator=dice)
            return torch.where(torch.rand(len(state), generator=dice) < 0.5, self.expert(state), anything)

        return self.play(someone, episodes, dice)

    def disputes(self, state: Tensor, dice: torch.Generator) -> Disputes:
        """The expert's action, and any other one."""
        preferred = self.expert(state)
        shift = torch.randint(1, ACTIONS, preferred.shape, generator=dice)
        return Disputes(state, preferred, (preferred + shift) % ACTIONS)


# ------------------------------------------------------------------ the policy


class Dueling(nn.Module):
    """Q(s, a) = V(s) + A(s, a) − mean A(s, ·)."""

    def __init__(self, hidden: int = 64):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(FEATURES, hidden), nn.LeakyReLU(), nn.Linear(hidden, hidden), nn.LeakyReLU()
        )
        self.value, self.ahead = nn.Linear(hidden, 1), nn.Linear(hidden, ACTIONS)

    def forward(self, state: Tensor) -> Tensor:
        inside = self.body(state)
        ahead = self.ahead(inside)
        q: Tensor = self.value(inside) + ahead - ahead.mean(-1, keepdim=True)
        return q

    @torch.no_grad()
    def act(self, state: Tensor) -> Tensor:
        q: Tensor = self(state)
        return q.argmax(-1)


def n_step(reward: Tensor, n: int, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """Discounted sums of the next n rewards, as far as the episode goes, [episodes, steps]; the step after them; and
    the discount of what is expected there, 0 where the episode is over."""
    steps = reward.shape[1]
    total = torch.zeros_like(reward)
    for ahead in range(min(n, steps)):
        total[:, : steps - ahead] += gamma**ahead * reward[:, ahead:]
    after = (torch.arange(steps) + n).clamp(max=steps).expand_as(reward)
    return total, after, gamma**n * (after < steps)


def q_learned(
    data: Logged,
    reward: Tensor,
    dice: torch.Generator,
    *,
    steps: int = 600,
    lr: float = 2e-3,
    tau: float = 0.01,
) -> Dueling:
    """Dueling double DQN on logged episodes: six steps, prioritised replay (α = 0.6, β = 0.9), values within ±20."""
    n, gamma = 6, 0.99
    net, target = Dueling(), Dueling()
    target.load_state_dict(net.state_dict())
    optimiser = adam(lr=lr)(net.parameters())
    total, after, going = n_step(reward, n, gamma)
    state, action = data.state[:, :-1].flatten(0, 1), data.action.flatten()
    later = data.state.gather(1, after[..., None].expand(*after.shape, FEATURES)).flatten(0, 1)
    total, going = total.flatten(), going.flatten()
    priority = torch.ones(len(action))
    for _ in range(steps):
        chance = priority**0.6
        rows = torch.multinomial(chance, 256, replacement=True, generator=dice)
        weight = (chance[rows] / chance.sum() * len(chance)) ** -0.9
        with torch.no_grad():
            best = net(later[rows]).argmax(-1, keepdim=True)
            worth = target(later[rows]).gather(1, best)[:, 0].clamp(-THRESHOLD, THRESHOLD)
        q = net(state[rows]).gather(1, action[rows, None])[:, 0]
        error = total[rows] + going[rows] * worth - q
        loss = (weight / weight.max() * error.square()).mean() + 5 * (q.abs() - THRESHOLD).clamp(min=0).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        priority[rows] = error.detach().abs() + 1e-6
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
                slow.lerp_(fast, tau)
    return net


# ------------------------------------------------------------------ the court


@dataclass(frozen=True)
class Court:
    """Logged episodes of a world, what its expert prefers in them, a judge of that, and how much it is shown."""

    ward: Ward
    data: Logged
    disputes: Disputes
    judge: Judge
    evidence: int

    @classmethod
    def of(cls, seed: int, evidence: int = 6, episodes: int = 1000, steps: int = 400) -> Court:
        with drawing("court", seed) as dice:
            ward = Ward(seed)
            data = ward.logged(episodes, dice)
            disputes = ward.disputes(data.state[:, :-1].flatten(0, 1), dice)
            return cls(
                ward, data, disputes, judge_of(disputes, ACTIONS, evidence, dice, steps=steps), evidence
            )

    def debater(self, seed: int, training: Training, generations: int) -> Debater:
        """Someone who shows features. `isolated` learns against nobody, from as many debates as `max-min` takes."""
        with drawing("debater", seed) as dice:
            trainer, confuser = (Trainer(self.judge, self.disputes, self.evidence, dice) for _ in range(2))
            if training == "self-play":
                return self_play(trainer, generations, ROUNDS)
            if training == "max-min":
                return max_min(trainer, confuser, generations, *CONFUSED)
            trainer.learn(None, generations * sum(CONFUSED))
            return trainer.learner

    def wins(
        self, state: Tensor, first: Tensor, second: Tensor, debater: Debater | None, dice: torch.Generator
    ) -> Tensor:
        """The verdict between two actions by what a debater shows who argues for both, or by any features."""
        if debater is None or self.evidence == FEATURES:
            shown = random_evidence(len(state), FEATURES, self.evidence, dice)
        else:
            shown = debated(state, (first, second), (debater, debater), self.evidence, dice)
        return self.judge.verdict(state, shown, first, second)

    def held(self, seed: int, debater: Debater, rounds: int, count: int = 2000) -> dict[str, float]:
        """How often the expert's action is preferred: when the debater alone shows features, and when half of them are
        shown by a confuser that has learnt, against this very debater, to have the other action preferred."""
        with drawing("confuser", seed) as dice:
            confuser = Trainer(self.judge, self.disputes, self.evidence, dice)
            confuser.learn(debater, rounds, "other")
            fresh = self.ward.disputes(
                self.ward.logged(count // HORIZON, dice).state[:, :-1].flatten(0, 1), dice
            )
            found = {}
            for name, against in (("alone", None), ("against a confuser", confuser.learner)):
                sides = (fresh.preferred, fresh.other)
                shown = debated(fresh.state, sides, (debater, against), self.evidence, dice)
                verdict = self.judge.verdict(fresh.state, shown, *sides)
                found[name] = float((verdict > 0).float().mean())
            return found


def relabelled(reward: Tensor, verdict: Tensor, weight: float, worth: float) -> Tensor:
    """(1 − λ)·r + λ·c·1[the action is preferred to the baseline's]: winning is worth c, losing and a tie nothing."""
    return (1 - weight) * reward + weight * worth * (verdict > 0)


def policies(
    seed: int,
    court: Court,
    debater: Debater,
    kinds: Mapping[str, tuple[Court, Debater | None]],
    weight: float = 0.5,
    worth: float = 1.0,
    steps: int = 600,
) -> dict[str, dict[str, float]]:
    """What policies earn that learnt from rewards of each kind, and how often they win debates against the baseline.

    Win rates are over held-out states in which the two act differently, as published; λ = 0 is the baseline, learnt
    again.
    """
    data, flat = court.data, court.data.state[:, :-1].flatten(0, 1)

    def learnt(name: str, reward: Tensor) -> Dueling:
        with drawing("policy", name, seed) as dice:
            return q_learned(data, reward, dice, steps=steps)

    baseline = learnt("baseline", data.reward)
    found = {"λ = 0": learnt("again", data.reward)}
    with drawing("debates", seed) as dice:
        for name, (judged, speaker) in kinds.items():
            verdict = judged.wins(flat, data.action.flatten(), baseline.act(flat), speaker, dice)
            found[name] = learnt(name, relabelled(data.reward, verdict.view_as(data.reward), weight, worth))
        fresh = court.ward.logged(500, dice).state[:, :-1].flatten(0, 1)
        table = {"baseline": {"return": _earned(court.ward, baseline, seed)}}
        for name, policy in found.items():
            acts, usual = policy.act(fresh), baseline.act(fresh)
            other = acts != usual
            verdict = court.wins(fresh[other], acts[other], usual[other], debater, dice)
            table[name] = {
                "return": _earned(court.ward, policy, seed),
                "wins": float((verdict > 0).float().mean()),
                "differs": float(other.float().mean()),
                "as the expert": float((acts == court.ward.expert(fresh)).float().mean()),
            }
    return table


def _earned(ward: Ward, policy: Dueling, seed: int) -> float:
    """The mean return of held-out episodes, the same patients for all."""
    with drawing("patients", seed) as dice:
        return float(ward.play(policy.act, 1000, dice).reward.sum(1).mean())


# ------------------------------------------------------------------ what is measured


def justified(seed: int) -> dict[str, float]:
    """By how much λ = ½ wins more debates than λ = 0, or how far its return is above nine tenths, if that is less."""
    court = Court.of(seed)
    debater = court.debater(seed, "self-play", GENERATIONS)
    table = policies(seed, court, debater, {"debate": (court, debater), "random evidence": (court, None)})
    usual = (table["baseline"]["return"] + table["λ = 0"]["return"]) / 2
    wins, kept = table["debate"]["wins"] - table["λ = 0"]["wins"], table["debate"]["return"] / usual
    each = {f"{name}: {of}": value for name, row in table.items() for of, value in row.items()}
    return {"least of wins and return kept": min(wins, kept - 0.9), "wins": wins, "return kept": kept, **each}


def withstood(seed: int, generations: int = 12, rounds: int = 40) -> dict[str, float]:
    """How much oftener max-min's debater than an isolated one has the expert's action preferred against a confuser."""
    found = evidence_table(seed, 2, generations, rounds, ("max-min", "isolated"))
    ahead = found["max-min"]["against a confuser"] - found["isolated"]["against a confuser"]
    return {"ahead": ahead} | {f"{name}, {how}": v for name, of in found.items() for how, v in of.items()}


def evidence_table(
    seed: int, evidence: int, generations: int, rounds: int, kinds: tuple[Training, ...]
) -> dict[str, dict[str, float]]:
    """How often the judge prefers the expert's action by what each kind of debater shows."""
    court = Court.of(seed, evidence)
    return {kind: court.held(seed, court.debater(seed, kind, generations), rounds) for kind in kinds}


CLAIM = Ahead(
    "A policy that learns half from the environment's reward and half from debates before a judge wins more debates "
    "against the policy of the environment's reward than that policy learnt again does, and loses at most a tenth of "
    "its return.",
    justified,
)
EVIDENCE = Ahead(
    "Evidence of a debater that has learnt against a confuser keeps the judge's verdict more often, against a new "
    "confuser, than that of one which has learnt alone from as many debates.",
    withstood,
)


@algorithm("justifiable-rl@1", paper=30, claim=CLAIM)
def justifiable_rl(
    weight: float = 0.5,
    worth: float = 1.0,
    evidence: int = 6,
    training: Training = "self-play",
    generations: int = GENERATIONS,
    episodes: int = 1000,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Debate reward (arXiv 2402.15826): an action is paid for what can be said for it, as well as for what it earns.

    A judge learns a Bradley–Terry score of actions from `evidence` random features of a state. Two debaters, trained by
    PPO in `generations` of self-play, take turns in showing features, each for its own action. Logged steps get

        r = (1 − λ)·r_env + λ·c·1[the judge prefers the action to the baseline policy's after their debate],

    with λ = `weight` and c = `worth`, and a dueling double DQN learns from that. The game is worth ±1, the reward 1 or
    0, and the baseline's own action ties, so it gets nothing. The table has returns, win rates against the baseline
    where the two differ, how often they do, and how often a policy does what the expert would; beside debates, what
    random evidence and a judge that sees all twelve features make of the same λ. About half a minute of one core.

    Surprising: the two actions of a pair must be scored in one pass. Normalised apart, as batches, their means give
    away which was preferred, and the judge is then no better than chance. Small networks and rates here, and c = 1 for
    a reward at every step; published are 44 features, 25 actions, c = 5 and 15 for the last reward. Debaters see the
    state, what is shown and their action, as in the released code; there the one that learns always argues for the
    preferred action, here for either. Returns are of the simulator; there is no estimate off policy (WIS), no clipping
    of values and no lower bound on PPO's ratio.
    """
    _check(evidence, generations)
    if not 0 <= weight <= 1 or not worth > 0 or episodes < 50:
        raise PanoplyError("weight is from 0 to 1, worth above 0, and episodes at least 50.")
    if weight == 0:
        raise PanoplyError(
            "With weight 0 there is no debate in the reward, and all rows of the table would be λ = 0."
        )
    court, sees_all = (Court.of(seed, shown, episodes) for shown in (evidence, FEATURES))
    debater = court.debater(seed, training, generations)
    kinds = {"debate": (court, debater), "random evidence": (court, None), "judge sees all": (sees_all, None)}
    return policies(seed, court, debater, kinds, weight, worth)


@algorithm("justifiable-rl-evidence@1", paper=30, claim=EVIDENCE)
def justifiable_rl_evidence(
    evidence: int = 2, generations: int = 12, rounds: int = 40, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Debate evidence (arXiv 2402.15826): how often the judge's verdict survives someone who shows what misleads.

    Debaters learn alone (`isolated`: they show everything), against a frozen copy (`self-play`), or by turns with a
    confuser that argues for the other action (`max-min`: 8 rounds of it to 2 of theirs; 150 to 5 in the paper). Then a
    new confuser learns for `rounds` against each of them. The table has the share of states in which the judge prefers
    the expert's action, when the debater alone shows the `evidence`, and when the confuser shows half of it. One
    feature each leaves room: with two, a debater that learnt alone loses less than a tenth to a confuser.
    """
    _check(evidence, generations)
    if rounds < 1:
        raise PanoplyError(f"rounds is at least 1, not {rounds}.")
    return evidence_table(seed, evidence, generations, rounds, ("isolated", "self-play", "max-min"))


def _check(evidence: int, generations: int) -> None:
    if not 2 <= evidence < FEATURES or evidence % 2:
        raise PanoplyError(
            f"evidence is an even number from 2 to {FEATURES - 2}, half for each side, not {evidence}."
        )
    if generations < 1:
        raise PanoplyError(f"generations is at least 1, not {generations}.")
