"""Rewards that know whom they are for: a user's comparisons are read into a latent, by which states are judged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from panoply.seeds import torch_rng

Judge = Literal["reward", "classifier"]
Reader = Literal["joined", "attention"]


class Labelled(NamedTuple):
    """Pairs of pieces of episodes as users labelled them."""

    first: Tensor
    """[users, pairs, steps, numbers]"""
    second: Tensor
    label: Tensor
    """[users, pairs]: 1 where the first is preferred"""

    def of(self, users: Tensor) -> Labelled:
        return Labelled(self.first[users], self.second[users], self.label[users])


class UserReward(nn.Module):
    """q(z | a user's pairs), and what a state is worth given z. With `latent` 0 there is no z: Bradley and Terry's.

    judge    `reward`: r(s, z), and a pair is judged by the difference of sums; `classifier`: P(s ≻ s′ | z) at once
    reader   `joined`: all pairs of a user after one another into one network, as for control; `attention`: a network
             reads each pair with the preferred side first, pairs attend to one another and are averaged, so that their
             number and order do not matter; then mean and log-variance stay within ±1 and z has the length √latent, as
             for language models
    scale    by which sums over a piece's steps are divided
    """

    def __init__(
        self,
        numbers: int,
        pairs: int,
        *,
        steps: int = 1,
        latent: int = 32,
        hidden: int = 256,
        judge: Judge = "reward",
        reader: Reader = "joined",
        scale: float = 1.0,
        seed: int = 0,
    ):
        super().__init__()
        self.latent, self.judge, self.reader, self.scale = latent, judge, reader, scale
        dice = torch_rng("user rewards", seed)
        sides = 1 if judge == "reward" else 2
        self.decoder = _layers([sides * numbers + latent, hidden, hidden, hidden, 1], dice)
        read = 2 * steps * numbers
        if latent and reader == "joined":
            self.encoder = _layers([pairs * (read + 1), hidden, hidden, hidden], dice, ends=False)
            self.heads = _layers([hidden, 2 * latent], dice)
        elif latent:
            self.encoder = _layers([read, hidden, hidden], dice, ends=False)
            self.attending = _layers([hidden, 3 * hidden], dice)
            self.heads = _layers([hidden, 2 * latent], dice)

    # -------------------------------------------------------------- whose pairs they are

    def encode(self, pairs: Labelled) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of z, [users, latent] each."""
        first, second = pairs.first.flatten(2), pairs.second.flatten(2)
        if not self.latent:
            return (first.new_zeros(len(first), 0),) * 2
        if self.reader == "joined":
            rows = torch.cat([first, second, pairs.label[..., None]], -1).flatten(1)
            mean, log_variance = self.heads(self.encoder(rows)).chunk(2, -1)
            return mean, log_variance
        turned = pairs.label[..., None] < 0.5
        sides = torch.cat([torch.where(turned, second, first), torch.where(turned, first, second)], -1)
        query, key, value = self.attending(self.encoder(sides)).chunk(3, -1)
        pooled = functional.scaled_dot_product_attention(query, key, value).mean(1)
        mean, log_variance = self.heads(pooled).clamp(-1, 1).chunk(2, -1)
        return mean, log_variance

    def drawn(self, mean: Tensor, log_variance: Tensor, noise: Tensor) -> Tensor:
        """One z for each user, for all of their pairs."""
        return self.placed(mean + (log_variance / 2).exp() * noise)

    def placed(self, z: Tensor) -> Tensor:
        """z as it is used: as it is, or of the length √latent."""
        if self.reader == "joined" or not self.latent:
            return z
        return functional.normalize(z, dim=-1) * math.sqrt(self.latent)

    # -------------------------------------------------------------- what they prefer

    def ahead(self, first: Tensor, second: Tensor, z: Tensor) -> Tensor:
        """[users, pairs] log-odds that the first piece of a pair is preferred."""
        z = z[:, None, None].expand(*first.shape[:3], -1)
        if self.judge == "classifier":
            each = self.decoder(torch.cat([first, second, z], -1))[..., 0]
        else:
            each = self.decoder(torch.cat([first, z], -1))[..., 0]
            each = each - self.decoder(torch.cat([second, z], -1))[..., 0]
        total: Tensor = each.sum(-1) / self.scale
        return total

    def rewards(self, states: Tensor, z: Tensor, compared: Tensor | None = None) -> Tensor:
        """[users, states] rewards given z [users, latent]; by a classifier, the mean chance to be preferred.

        compared   [others, numbers]: the states that a classifier compares with
        """
        users, count = len(z), len(states)
        beside = z[:, None].expand(users, count, self.latent)
        mine = states.expand(users, count, -1)
        if self.judge == "reward":
            found: Tensor = self.decoder(torch.cat([mine, beside], -1))[..., 0]
            return found
        assert compared is not None
        total = torch.zeros(users, count)
        for other in compared:
            row = torch.cat([mine, other.expand(users, count, -1), beside], -1)
            total += self.decoder(row)[..., 0].sigmoid()
        return total / len(compared)


def elbo(model: UserReward, pairs: Labelled, weight: float, noise: Tensor) -> tuple[Tensor, Tensor]:
    """−ELBO, the mean over users of Σ_pairs cross-entropy + weight·KL(q(z | pairs) ‖ N(0, I)), and that KL."""
    mean, log_variance = model.encode(pairs)
    logits = model.ahead(pairs.first, pairs.second, model.drawn(mean, log_variance, noise))
    wrong = functional.binary_cross_entropy_with_logits(logits, pairs.label, reduction="none").sum(-1)
    apart = divergence(mean, log_variance)
    return (wrong + weight * apart).mean(), apart.mean()


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL of a normal with a diagonal to the standard one, ½·Σ(μ² + σ² − 1 − log σ²), one for each row."""
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1)


def annealed(step: int, steps: int, cycles: int) -> float:
    """The share of the KL's weight: from 0 to 1 along half a cosine, over and over; always 1 without cycles."""
    if not cycles:
        return 1.0
    within = (step * cycles / steps) % 1.0
    return (1 - math.cos(math.pi * within)) / 2


# ------------------------------------------------------------------ scales of different z


def min_max(rewards: Tensor) -> Tensor:
    """Rewards [users, states] of every user from 0 to 1."""
    low, high = rewards.amin(-1, keepdim=True), rewards.amax(-1, keepdim=True)
    return (rewards - low) / (high - low).clamp(min=1e-8)


def log_mean_exp(rewards: Tensor) -> Tensor:
    """Rewards less log(mean exp r) of the user's states, by which users no longer differ in the level of rewards."""
    return rewards - (rewards.logsumexp(-1, keepdim=True) - math.log(rewards.shape[-1]))


# ------------------------------------------------------------------ what to ask


@torch.no_grad()
def informative(model: UserReward, first: Tensor, second: Tensor, z: Tensor) -> Tensor:
    """[sets] mutual information of answers and z: Σ over pairs of the mean answer's entropy less the mean entropy.

    first, second   [sets, pairs, steps, numbers] of questions;  z   [draws, latent] of the prior
    """
    p = torch.stack([model.ahead(first, second, row.expand(len(first), -1)).sigmoid() for row in z])
    return (_entropy(p.mean(0)) - _entropy(p).mean(0)).sum(-1)


def _entropy(p: Tensor) -> Tensor:
    p = p.clamp(1e-7, 1 - 1e-7)
    return -(p * p.log() + (1 - p) * (1 - p).log())


def _layers(widths: Sequence[int], dice: torch.Generator, ends: bool = True) -> nn.Sequential:
    """Linear layers with LeakyReLU(0.2) between them, after the last one too unless it `ends` there."""
    made: list[nn.Module] = []
    for wide, to in itertools.pairwise(widths):
        layer, bound = nn.Linear(wide, to), 1 / math.sqrt(wide)
        with torch.no_grad():
            layer.weight.uniform_(-bound, bound, generator=dice)
            layer.bias.uniform_(-bound, bound, generator=dice)
        made += [layer, nn.LeakyReLU(0.2)]
    return nn.Sequential(*(made[:-1] if ends else made))
