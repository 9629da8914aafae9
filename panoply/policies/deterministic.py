"""Heads without a distribution of their own: one action for a state, and noise beside it when exploring."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from panoply.errors import PanoplyError
from panoply.policies.heads import LOG_ROOT_2PI, Array, Continuous, Drawn, Head, Std
from panoply.worlds.control.world import Box


class Deterministic(Continuous):
    """tanh of the network's output as an action between its bounds, with normal noise when it acts.

    The deviation is in units of half the range: fixed (TD3's exploration noise), or learned (IQL's policy). The noisy
    action is recorded as drawn and cut to the bounds when acting.
    """

    log_std: Tensor

    def __init__(self, space: Box, std: Std, log_std: float):
        super().__init__(space)
        start = torch.full((self.size,), float(log_std))
        if std == "free":
            self.log_std = nn.Parameter(start)
        else:
            self.register_buffer("log_std", start)

    def action(self, out: Tensor) -> Tensor:
        """The action itself, in its units."""
        return out.tanh()

    def draw(self, out: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Noisy actions in their units, cut to the bounds, with gradients, and log-densities of before the cut."""
        logp = (-0.5 * noise**2 - self.log_std - LOG_ROOT_2PI).sum(-1)
        return (out.tanh() + self.log_std.exp() * noise).clamp(-1, 1), logp

    def act(self, out: Array, noise: Array, mask: Array | None, temperature: float | Array) -> Drawn:
        spread = (
            np.exp(self.log_std.detach().numpy()) * np.sqrt(np.asarray(temperature, np.float32))[..., None]
        )
        drawn = np.tanh(out) + spread * noise
        return Drawn(self.bounds.real(drawn), self.bounds.real(np.clip(drawn, -1, 1)))

    def score(
        self, out: Tensor, action: Tensor, mask: Tensor | None, temperature: Tensor | None, entropy: bool
    ) -> dict[str, Tensor]:
        log_std = self.log_std if temperature is None else self.log_std + 0.5 * temperature.log()[:, None]
        z = (self.unit(action) - out.tanh()) * (-log_std).exp()
        around = (log_std + LOG_ROOT_2PI).sum(-1) + self.bounds.volume
        found = {"logp": -0.5 * z.square().sum(-1) - around}
        if entropy:
            found["entropy"] = (around + 0.5 * self.size).expand(len(out))
        return found


class Certain(Continuous):
    """The network's output as the action itself, or softplus(output + 1) where an action cannot be negative.

    It is cut at its bounds and has no noise, so what was done has probability 1. Gradients reach it through a world
    that is differentiable, and never through its log-probability.
    """

    positive: Tensor

    def __init__(self, space: Box):
        super().__init__(space)
        low = torch.as_tensor(np.broadcast_to(self.bounds.low, (self.size,)).copy())
        self.register_buffer("positive", low >= 0, persistent=False)

    def action(self, out: Tensor) -> Tensor:
        """The action as the world takes it, before it is cut at its bounds."""
        return torch.where(self.positive, nn.functional.softplus(out + 1), out)

    def act(self, out: Array, noise: Array, mask: Array | None, temperature: float | Array) -> Drawn:
        chosen = np.where(self.positive.numpy(), np.logaddexp(out + 1, np.float32(0)), out)
        acted = np.clip(chosen, self.bounds.low, self.bounds.high).reshape(len(out), *self.bounds.shape)
        return Drawn(acted, acted)

    def score(
        self, out: Tensor, action: Tensor, mask: Tensor | None, temperature: Tensor | None, entropy: bool
    ) -> dict[str, Tensor]:
        if torch.is_grad_enabled():
            raise PanoplyError(
                "A policy of one certain action (policy.head=certain) has no log-probabilities to learn by."
            )
        nothing = out.new_zeros(len(out))
        return {"logp": nothing, "entropy": nothing} if entropy else {"logp": nothing}


class ActionValues(Head):
    """What each of n actions is worth. The best is taken, or any with probability ε (times the temperature).

    With several `atoms` an action's value is a distribution over that many points of `span` (Bellemare, Dabney and
    Munos 2017), and its mean counts.
    """

    points: Tensor

    def __init__(self, n: int, epsilon: float, atoms: int, span: tuple[float, float]):
        super().__init__()
        self.n, self.epsilon, self.atoms, self.width = n, epsilon, atoms, n * atoms
        self.register_buffer("points", torch.linspace(*span, atoms), persistent=False)

    def noise(self, rng: np.random.Generator, count: int) -> Array:
        """Whether to take any action, and a number for each of which the largest decides."""
        return rng.random((count, 1 + self.n), dtype=np.float32)

    def anything(self, noise: Array, mask: Array | None) -> Drawn:
        chances = noise[:, 1:] if mask is None else np.where(mask, noise[:, 1:], -1)
        action = chances.argmax(-1)
        return Drawn(action, action)

    def unit(self, action: Tensor) -> Tensor:
        return nn.functional.one_hot(action.long(), self.n).float()

    def log_chances(self, out: Tensor) -> Tensor:
        """[rows, n, atoms] log-probabilities of each action's points."""
        return out.view(-1, self.n, self.atoms).log_softmax(-1)

    def values(self, out: Tensor) -> Tensor:
        """[rows, n]"""
        return out if self.atoms == 1 else (self.log_chances(out).exp() * self.points).sum(-1)

    def act(self, out: Array, noise: Array, mask: Array | None, temperature: float | Array) -> Drawn:
        worth = out if self.atoms == 1 else self.values(torch.from_numpy(out)).numpy()
        best = (worth if mask is None else np.where(mask, worth, -np.inf)).argmax(-1)
        anything = noise[:, 0] < self.epsilon * np.asarray(temperature, np.float32)
        action = np.where(anything, self.anything(noise, mask).action, best)
        return Drawn(action, action)

    def score(
        self, out: Tensor, action: Tensor, mask: Tensor | None, temperature: Tensor | None, entropy: bool
    ) -> dict[str, Tensor]:
        worth = self.values(out)
        legal = torch.ones_like(worth, dtype=torch.bool) if mask is None else mask
        worth = worth.masked_fill(~legal, -torch.inf)
        epsilon = torch.full_like(worth[:, :1], self.epsilon)
        if temperature is not None:
            epsilon = (epsilon * temperature[:, None]).clamp(max=1)
        best = nn.functional.one_hot(worth.argmax(-1), self.n)
        chances = epsilon * legal / legal.sum(-1, keepdim=True) + (1 - epsilon) * best
        found = {"logp": chances.gather(-1, action.long()[:, None])[:, 0].log()}
        if entropy:
            found["entropy"] = torch.special.entr(chances).sum(-1)
        return found
