"""SePPO: preferences from winners alone, whose rivals are drawn from the model's own past."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from panoply.errors import PanoplyError
from panoply.evidence.claims import Ahead
from panoply.loops.compiler import leave_unloaded
from panoply.registry import algorithm
from panoply.seeds import drawing
from panoply.slots.update.optimisers import adam

Arm = Literal["seppo", "indicator", "always loser", "sft"]
ARMS: tuple[Arm, ...] = ("seppo", "indicator", "always loser", "sft")
Reference = Literal["random", "first", "latest"]
MODES, GOOD, WIDTH, STEPS = 8, 2, 0.1, 25
"""Of how many modes, how wide each, and steps of the diffusion."""


@dataclass(frozen=True)
class Ring:
    """Eight modes on a circle of radius 1.4, of which two are good."""

    good: tuple[int, ...]

    @classmethod
    def of(cls, seed: int) -> Ring:
        with drawing("good modes", seed) as dice:
            return cls(tuple(torch.randperm(MODES, generator=dice)[:GOOD].tolist()))

    @property
    def centres(self) -> Tensor:
        angle = torch.arange(MODES) * (2 * math.pi / MODES)
        return 1.4 * torch.stack([angle.cos(), angle.sin()], -1)

    def draw(self, count: int, dice: torch.Generator, winners: bool = False) -> Tensor:
        """Points of all modes, or of the good ones."""
        among = torch.tensor(self.good if winners else range(MODES))
        mode = among[torch.randint(len(among), (count,), generator=dice)]
        return self.centres[mode] + WIDTH * torch.randn(count, 2, generator=dice)

    def share(self, points: Tensor) -> float:
        """How many of the points lie in a good mode: within four of its deviations."""
        near = torch.cdist(points, self.centres[list(self.good)]).amin(-1)
        return float((near < 4 * WIDTH).float().mean())


def energy_distance(one: Tensor, two: Tensor) -> float:
    """2·E|X − Y| − E|X − X′| − E|Y − Y′|: 0 only between equal distributions."""
    within = [torch.cdist(of, of).sum() / (len(of) * (len(of) - 1)) for of in (one, two)]
    return float(2 * torch.cdist(one, two).mean() - within[0] - within[1])


class Denoiser(nn.Module):
    """ε_θ(x_t, t): the noise in a point, by a small network; x_t = α_t·x + σ_t·ε on a cosine schedule."""

    def __init__(self, hidden: int = 64):
        super().__init__()
        wide = nn.Linear(hidden, hidden), nn.SiLU()
        self.net = nn.Sequential(nn.Linear(5, hidden), nn.SiLU(), *wide, nn.Linear(hidden, 2))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        when = t.to(x)[:, None] / STEPS
        sees = torch.cat([x, when, (math.pi * when).cos(), (math.pi * when).sin()], -1)
        noise: Tensor = self.net(sees)
        return noise

    def error(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """‖ε − ε_θ(x_t, t)‖², the mean over dimensions, of each point."""
        alpha, sigma = schedule(t)
        noisy = alpha[:, None] * x + sigma[:, None] * noise
        missed: Tensor = noise - self(noisy, t)
        return missed.square().mean(-1)

    @torch.no_grad()
    def sample(self, count: int, dice: torch.Generator) -> Tensor:
        """Points from noise, by DDPM's ancestral steps."""
        x = torch.randn(count, 2, generator=dice)
        for step in reversed(range(1, STEPS + 1)):
            now, before = (torch.full((count,), at) for at in (step, step - 1))
            (alpha, sigma), (alpha0, sigma0) = schedule(now), schedule(before)
            clean = ((x - sigma[:, None] * self(x, now)) / alpha[:, None]).clamp(-2.5, 2.5)
            ratio = alpha / alpha0
            mean = (ratio * sigma0**2)[:, None] * x + (alpha0 * (sigma**2 - (ratio * sigma0) ** 2))[
                :, None
            ] * clean
            spread = sigma0 / sigma * (1 - ratio**2).sqrt()
            x = mean / sigma[:, None] ** 2 + spread[:, None] * torch.randn(count, 2, generator=dice)
        return x


def schedule(t: Tensor) -> tuple[Tensor, Tensor]:
    """α_t and σ_t, with α² + σ² = 1; nearly all is noise at the end, and nothing is at 0."""
    angle = t / STEPS * (0.98 * math.pi / 2)
    return angle.cos(), angle.sin()


# ------------------------------------------------------------------ the loss


def flips(theta: Tensor, reference: Tensor, arm: Arm = "seppo") -> Tensor:
    """s of each pair, from errors on its winner: +1 where θ models it better than the reference, −1 where worse.

    At first both are equal, and s is 0. `indicator` drops the rival where SePPO flips it. No gradient goes through s.
    """
    better = (reference - theta).detach().sign()
    return {"indicator": better.clamp(min=0), "always loser": torch.ones_like(better)}.get(arm, better)


def pair_loss(
    theta: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor], beta: float, arm: Arm = "seppo"
) -> Tensor:
    """−log σ(−β·(Δ(x^w) − s·Δ(x^r))), Δ = error of θ − error of the reference; errors of (winner, rival)."""
    winner, rival = (mine - fixed.detach() for mine, fixed in zip(theta, reference, strict=True))
    return softplus(beta * (winner - flips(theta[0], reference[0], arm) * rival)).mean()


# ------------------------------------------------------------------ training


@dataclass
class Pool:
    """The last `most` checkpoints of a model; the reference, who also draws the rivals, is one of them."""

    most: int
    kept: list[Denoiser] = field(default_factory=list)
    first: Denoiser | None = None

    def push(self, model: Denoiser) -> None:
        self.kept = [*self.kept, copy.deepcopy(model).requires_grad_(False)][-self.most :]
        self.first = self.first or self.kept[0]

    def choose(self, which: Reference, dice: torch.Generator) -> Denoiser:
        if which == "first" and self.first is not None:
            return self.first
        at = int(torch.randint(len(self.kept), (1,), generator=dice)) if which == "random" else -1
        return self.kept[at]


@dataclass(frozen=True)
class Settings:
    beta: float = 5.0
    """βTω: all factors of the error gap at once."""
    lr: float = 2e-3
    updates: int = 600
    every: int = 30
    pool: int = 7
    batch: int = 256
    winners: int = 500
    reference: Reference = "random"


def moved(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()


def pretrained(ring: Ring, seed: int, updates: int = 1500, batch: int = 256) -> Denoiser:
    """A denoiser of all eight modes."""
    leave_unloaded()
    with drawing("denoiser", seed) as dice:
        model = Denoiser()
        optimiser = adam(lr=2e-3)(model.parameters())
        for _ in range(updates):
            t = torch.randint(1, STEPS + 1, (batch,), generator=dice)
            loss = model.error(ring.draw(batch, dice), t, torch.randn(batch, 2, generator=dice)).mean()
            moved(optimiser, loss)
    return model


def tuned(start: Denoiser, ring: Ring, seed: int, arm: Arm, of: Settings) -> list[dict[str, float]]:
    """Preference training of a copy of a model on winners; what it draws is looked at after every `every` updates."""
    leave_unloaded()
    model, pool = copy.deepcopy(start), Pool(of.pool)
    optimiser = adam(lr=of.lr)(model.parameters())
    pool.push(model)
    found = []
    with drawing("tuned", seed) as dice:
        winners = ring.draw(of.winners, dice, winners=True)
        for update in range(of.updates):
            if update % of.every == 0 and arm != "sft":
                reference = pool.choose(of.reference, dice)
                rivals = reference.sample(4 * of.batch, dice)
            t = torch.randint(1, STEPS + 1, (of.batch,), generator=dice)
            won, drawn = torch.randint(1 << 30, (2, of.batch), generator=dice)
            noise = torch.randn(2, of.batch, 2, generator=dice)
            winner = winners[won % len(winners)]
            if arm == "sft":
                loss = model.error(winner, t, noise[0]).mean()
            else:
                pair = (winner, rivals[drawn % len(rivals)])
                mine, fixed = (
                    (who.error(pair[0], t, noise[0]), who.error(pair[1], t, noise[1]))
                    for who in (model, reference)
                )
                loss = pair_loss(mine, fixed, of.beta, arm)
            moved(optimiser, loss)
            if (update + 1) % of.every == 0:
                pool.push(model)
                found.append(looked_at(model, ring, seed))
    return found


def looked_at(model: Denoiser, ring: Ring, seed: int, count: int = 1000) -> dict[str, float]:
    """The share of what a model draws that lies in good modes, and its distance from fresh winners."""
    with drawing("looked at", seed) as dice:
        drawn, winners = model.sample(count, dice), ring.draw(count, dice, winners=True)
    return {"good": ring.share(drawn), "distance": energy_distance(drawn, winners)}


# ------------------------------------------------------------------ what is measured


def compared(seed: int, of: Settings | None = None, start: int = 1500) -> dict[str, dict[str, float]]:
    """Every arm from the same start, on the same winners: how it ends, and how much farther it was at its nearest.

    good       share of samples in good modes, the mean of the last third of training
    distance   from winners, the same; 0 where samples are distributed as winners are
    rises      by how much the distance is above its least at any time
    """
    of, ring = of or Settings(), Ring.of(seed)
    model = pretrained(ring, seed, start)
    table: dict[str, dict[str, float]] = {}
    for arm in ARMS:
        course = tuned(model, ring, seed, arm, of)
        late = course[-max(1, len(course) // 3) :]
        good, distance = (sum(at[name] for at in late) / len(late) for name in ("good", "distance"))
        least = min(at["distance"] for at in course)
        table[arm] = {"good": good, "distance": distance, "rises": distance - least}
    return table


def stays(seed: int) -> dict[str, float]:
    """The lesser of what SePPO has more in good modes than imitation, and is nearer to winners than always-loser."""
    table = compared(seed)
    more = table["seppo"]["good"] - table["sft"]["good"]
    nearer = table["always loser"]["distance"] - table["seppo"]["distance"]
    each = {f"{arm}: {name}": value for arm, row in table.items() for name, value in row.items()}
    return {"least of the stated differences": min(more, nearer), **each}


CLAIM = Ahead(
    "Late in training, SePPO draws good modes more often than imitation of the winners does after as many updates, and "
    "is nearer to the winners than training in which samples of the past always lose.",
    stays,
)


@algorithm("seppo@1", paper=2, claim=CLAIM)
def seppo(
    beta: float = 5.0,
    lr: float = 2e-3,
    updates: int = 600,
    every: int = 30,
    pool: int = 7,
    batch: int = 256,
    winners: int = 500,
    reference: Reference = "random",
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """SePPO (arXiv 2410.05255): Diffusion-DPO from winners alone; rivals are drawn by an earlier checkpoint.

    With Δ(x) = ‖ε − ε_θ(x_t)‖² − ‖ε − ε_ref(x_t)‖², winners x^w and samples x^r of the reference,

        L = −log σ(−βTω·(Δ(x^w) − s·Δ(x^r))),   s = −sign Δ(x^w), without gradient.

    Where θ models the winner better than the reference does (s = +1), the reference's sample loses; where it does not
    yet (s = −1), it is pulled up as a second winner. The reference is any of the last `pool` checkpoints; there is a
    new one every `every` updates, and then it and its samples are drawn anew. θ and the reference get the same noise
    and time, the winner and the rival noise of their own.

    A small denoiser of eight modes in two dimensions learns to draw two of them, from `winners` points. Rows are SePPO,
    its variant that drops the rival where s = −1, the one whose rival always loses, and imitation of winners; columns
    are how often good modes are drawn and the energy distance from winners, both late in training, and by how much that
    distance is above its least. About a quarter of a minute of one core.

    Surprising: to begin with θ is the reference, all gaps are 0, s is 0, and only the winner acts. `beta` is β, T and ω
    in one; the paper's rate and β are not known, and 5 and 0.002 are the best of 5, 50, 500 and of 0.0005, 0.002 for
    each of three arms, on a seed of no claim. Checkpoints and pool are as published, the rest is chosen here. No
    trainer is released. s is the sign of one draw of noise and time; averaging it over several is not built. It
    becomes a method of the library, on any world, when there are flow policies.
    """
    if not beta > 0 or not lr > 0:
        raise PanoplyError("beta and lr are above 0.")
    if min(updates, every, pool, batch, winners) < 1:
        raise PanoplyError("updates, every, pool, batch and winners are at least 1.")
    if updates < every:
        raise PanoplyError(f"updates is at least every, {every}, so that there is something to look at.")
    if reference != "random" and pool != Settings.pool:
        raise PanoplyError(f"pool has no effect while reference is {reference}: only random draws from it.")
    of = Settings(beta, lr, updates, every, pool, batch, winners, reference)
    return compared(seed, of)
