"""What a network's output says about an action: categorical, factored, Gaussian, squashed Gaussian.

Noise is drawn beforehand, so acting is arithmetic: the same noise gives the same action, in any batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from panoply.errors import PanoplyError
from panoply.policies import divergence
from panoply.worlds.control.world import Box, Discrete, MultiDiscrete, Space

Array = NDArray[Any]
Std = Literal["free", "state", "fixed"]
EDGE = 1 - 1e-6
"""How close to its bounds a squashed action comes: nearer, float32 could not tell what it was before."""
LOG_STD = (-20.0, 2.0)
"""Where a standard deviation that depends on the state is kept, as a logarithm."""


LOG_2, LOG_ROOT_2PI = math.log(2), 0.5 * math.log(2 * math.pi)


class Drawn(NamedTuple):
    action: Array
    """As it is recorded and scored."""
    acted: Array
    """As the world takes it."""


class Head(nn.Module, ABC):
    """The distribution of actions. `width` numbers come out of the network for it."""

    width: int

    @abstractmethod
    def anything(self, noise: Array, mask: Array | None) -> Drawn:
        """Any action at all, uniformly where there are bounds: what the same noise makes without a policy."""

    @abstractmethod
    def unit(self, action: Tensor) -> Tensor:
        """Actions as critics take them, a row of numbers each: bounded ones from −1 to 1, choices one-hot."""

    def real(self, unit: Tensor) -> Tensor:
        """Continuous actions as the world takes them, from their units."""
        raise NotImplementedError

    @abstractmethod
    def noise(self, rng: np.random.Generator, count: int) -> Array:
        """[count, k] numbers that decide `count` actions."""

    @abstractmethod
    def act(self, out: Array, noise: Array, mask: Array | None, temperature: float | Array) -> Drawn:
        """Actions from outputs and noise. A temperature of 0 takes the likeliest."""

    @abstractmethod
    def score(
        self, out: Tensor, action: Tensor, mask: Tensor | None, temperature: Tensor | None, entropy: bool
    ) -> dict[str, Tensor]:
        """`logp` of actions, and `entropy` where asked."""

    def distribution(self, out: Tensor, mask: Tensor | None, temperature: Tensor | None) -> Tensor:
        """All there is to know of the distributions that actions are drawn from, a row of numbers each."""
        raise PanoplyError(f"{type(self).__name__} actions have no distribution to compare with another.")

    def divergence(self, distribution: Tensor, other: Tensor, q: float) -> Tensor:
        """E_π[ln_q π − ln_q π′] of each row, which at q = 1 is KL(π‖π′) (see policies/divergence.py)."""
        raise NotImplementedError

    def curved(self, distribution: Tensor, change: Tensor) -> Tensor:
        """The Fisher matrix of each row's distribution, in its own coordinates, times a change of them."""
        raise NotImplementedError


class Bounds:
    """The bounds of a continuous action, and the actions between them as numbers from −1 to 1."""

    def __init__(self, space: Box):
        self.shape, self.size = space.shape, space.size
        self.finite = bool(space.low) and bool(np.isfinite([*space.low, *space.high]).all())
        low, high = (np.asarray(b or d, np.float32) for b, d in ((space.low, -np.inf), (space.high, np.inf)))
        self.low, self.high = low, high

    def unit(self, action: Tensor) -> Tensor:
        flat = action.reshape(len(action), -1)
        if not self.finite:
            return flat
        low, high = (torch.as_tensor(b, device=action.device) for b in (self.low, self.high))
        return 2 * (flat - low) / (high - low) - 1

    def back(self, unit: Tensor) -> Tensor:
        """The inverse of `unit`."""
        low, high = (torch.as_tensor(b, device=unit.device) for b in (self.low, self.high))
        scaled = low + (high - low) * (unit + 1) / 2 if self.finite else unit
        return scaled.reshape(len(unit), *self.shape)

    def units(self, action: Array) -> Array:
        """`unit` for arrays."""
        flat = action.reshape(len(action), -1)
        return 2 * (flat - self.low) / (self.high - self.low) - 1 if self.finite else flat

    def real(self, unit: Array) -> Array:
        """`back` for arrays."""
        scaled: Array = self.low + (self.high - self.low) * (unit + 1) / 2 if self.finite else unit
        return scaled.reshape(len(unit), *self.shape)

    def anything(self, noise: Array) -> Drawn:
        """Normal noise as a uniform action; without bounds the noise itself."""
        unit = np.vectorize(math.erf, otypes=[np.float32])(noise / math.sqrt(2)) if self.finite else noise
        action = self.real(unit)
        return Drawn(action, action)

    @cached_property
    def volume(self) -> float:
        """How much larger the actions are than their units, as a logarithm."""
        return float(np.log((self.high - self.low) / 2).sum()) if self.finite else 0.0


class Continuous(Head):
    """What all heads of continuous actions share: their bounds and units, and normal noise."""

    def __init__(self, space: Box):
        super().__init__()
        self.bounds, self.size, self.width = Bounds(space), space.size, space.size

    def noise(self, rng: np.random.Generator, count: int) -> Array:
        return rng.standard_normal((count, self.size), dtype=np.float32)

    def anything(self, noise: Array, mask: Array | None) -> Drawn:
        return self.bounds.anything(noise)

    def unit(self, action: Tensor) -> Tensor:
        return self.bounds.unit(action)

    def real(self, unit: Tensor) -> Tensor:
        return self.bounds.back(unit)


def head_for(
    action: Space, squash: bool = False, std: Std = "free", log_std: float = 0.0, **more: Any
) -> Head:
    """The distribution of actions of a space; `more` says where it is something else (see PolicySpec)."""
    from panoply.policies.deterministic import ActionValues, Certain, Deterministic

    if more.get("head") == "values":
        if not isinstance(action, Discrete):
            raise PanoplyError("Values of actions (policy.head=values) are for worlds with one choice of n.")
        return ActionValues(action.n, more["epsilon"], more["atoms"], more["span"])
    if more.get("head") == "bounded" and isinstance(action, Box):
        return Deterministic(action, std, log_std)
    if more.get("head") == "certain":
        if not isinstance(action, Box):
            raise PanoplyError(
                "One certain action (policy.head=certain) is for worlds with continuous actions."
            )
        return Certain(action)
    if std == "fixed":
        raise PanoplyError("A fixed deviation (policy.std=fixed) is for policy.head=bounded.")
    if isinstance(action, Discrete):
        return Categorical((action.n,))
    if isinstance(action, MultiDiscrete):
        return Categorical(action.nvec)
    return Gaussian(action, squash, std, log_std)


class Categorical(Head):
    """One of n, or several such choices side by side, independent given the state."""

    def __init__(self, sizes: tuple[int, ...]):
        super().__init__()
        self.sizes, self.width = sizes, sum(sizes)

    def noise(self, rng: np.random.Generator, count: int) -> Array:
        """Gumbel noise: the largest of log π + noise is a draw from π."""
        return rng.gumbel(size=(count, self.width)).astype(np.float32)

    def anything(self, noise: Array, mask: Array | None) -> Drawn:
        return self.act(np.zeros_like(noise), noise, mask, 1.0)

    def unit(self, action: Tensor) -> Tensor:
        columns = action.reshape(len(action), len(self.sizes)).long().unbind(-1)
        hot = [nn.functional.one_hot(a, n) for a, n in zip(columns, self.sizes, strict=True)]
        return torch.cat(hot, -1).float()

    def act(self, out: Array, noise: Array, mask: Array | None, temperature: float | Array) -> Drawn:
        logits = out if mask is None else np.where(mask, out, -np.inf)
        noisy = logits + np.asarray(temperature, np.float32)[..., None] * noise
        if len(self.sizes) == 1:
            action = noisy.argmax(-1)
        else:
            parts = np.split(noisy, np.cumsum(self.sizes)[:-1], axis=-1)
            action = np.stack([part.argmax(-1) for part in parts], axis=-1)
        return Drawn(action, action)

    def score(
        self, out: Tensor, action: Tensor, mask: Tensor | None, temperature: Tensor | None, entropy: bool
    ) -> dict[str, Tensor]:
        logits = self._logits(out, mask, temperature)
        if len(self.sizes) == 1:
            return _categorical(logits, action, entropy)
        parts = [_categorical(part, action[:, i], entropy) for i, part in enumerate(self._split(logits))]
        return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}

    def distribution(self, out: Tensor, mask: Tensor | None, temperature: Tensor | None) -> Tensor:
        """The log-probability of every choice."""
        return torch.cat(
            [part.log_softmax(-1) for part in self._split(self._logits(out, mask, temperature))], -1
        )

    def divergence(self, distribution: Tensor, other: Tensor, q: float) -> Tensor:
        return divergence.independent(zip(self._split(distribution), self._split(other), strict=True), q)

    def curved(self, distribution: Tensor, change: Tensor) -> Tensor:
        """Σ_a p(a)·(∂log p(a))²: each log-probability counts as much as it is likely."""
        return distribution.exp() * change

    def _logits(self, out: Tensor, mask: Tensor | None, temperature: Tensor | None) -> Tensor:
        logits = out if temperature is None else out / temperature[:, None]
        return logits if mask is None else logits.masked_fill(~mask, -torch.inf)

    def _split(self, columns: Tensor) -> tuple[Tensor, ...]:
        return torch.split(columns, list(self.sizes), -1)


def _categorical(logits: Tensor, action: Tensor, entropy: bool) -> dict[str, Tensor]:
    logp = logits.log_softmax(-1)
    found = {"logp": logp.gather(-1, action[:, None])[:, 0]}
    if entropy:
        found["entropy"] = -(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(-1)
    return found


def _squashed(u: Tensor, z: Tensor, log_std: Tensor) -> Tensor:
    """The log-density of tanh u, u = μ + σ·z.

    log(1 − tanh² u) is 2·(log 2 − u − softplus(−2u)), which does not round to −∞ at the bounds.
    """
    volume = 2 * (LOG_2 - u - nn.functional.softplus(-2 * u))
    return (-0.5 * z**2 - log_std - volume).sum(-1) - u.shape[-1] * LOG_ROOT_2PI


class _Squashed(torch.autograd.Function):
    """a = tanh u, u = μ + σ·ε, and log π(a), differentiated by hand: ∂a/∂u = 1 − a² and ∂log π/∂u = 2a."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        swing = log_std.exp() * noise
        u = mean + swing
        action = u.tanh()
        ctx.save_for_backward(action, swing)
        ctx.free = log_std.shape != mean.shape
        return action, _squashed(u, noise, log_std)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_action: Tensor, by_logp: Tensor) -> tuple[Tensor, Tensor, None]:
        action, swing = ctx.saved_tensors
        by_logp = by_logp.unsqueeze(-1)
        by_u = by_action * (1 - action * action) + 2 * action * by_logp
        by_log_std = by_u * swing - by_logp
        return by_u, by_log_std.flatten(0, -2).sum(0) if ctx.free else by_log_std, None


class Gaussian(Continuous):
    """Independent normals, bounded by the world (recorded as drawn, cut to the bounds when acting) or squashed.

    Squashed, an action is low + (high − low)·(tanh u + 1)/2 with u normal, and its density that of the action. Its
    entropy has no closed form; the estimate is −log π of the action at hand.
    """

    def __init__(self, space: Box, squash: bool, std: Std, log_std: float):
        super().__init__(space)
        self.squash, self.state_std = squash, std == "state"
        if squash and not self.bounds.finite:
            raise PanoplyError("Actions without bounds cannot be squashed: set policy.squash=false.")
        self.shape = space.shape
        self.width = self.size * (2 if self.state_std else 1)
        if not self.state_std:
            self.log_std = nn.Parameter(torch.full((self.size,), float(log_std)))
        self.low, self.high = self.bounds.low, self.bounds.high

    def draw(self, out: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Squashed actions in their units, through which gradients flow, and their log-density in those units."""
        found: tuple[Tensor, Tensor] = _Squashed.apply(*self.moments(out), noise)  # type: ignore[no-untyped-call]
        return found

    def density(self, out: Tensor, u: Tensor) -> Tensor:
        """The log-density, in their units, of squashed actions tanh u."""
        mean, log_std = self.moments(out)
        return _squashed(u, (u - mean) * (-log_std).exp(), log_std)

    def act(self, out: Array, noise: Array, mask: Array | None, temperature: float | Array) -> Drawn:
        if self.state_std:
            mean, log_std = out[:, : self.size], np.clip(out[:, self.size :], *LOG_STD)
        else:
            mean, log_std = out, self.log_std.detach().numpy()
        spread = np.exp(log_std) * np.sqrt(np.asarray(temperature, np.float32))[..., None]
        drawn = mean + spread * noise
        if self.squash:
            unit = np.clip(np.tanh(drawn), -EDGE, EDGE)
            acted = self.low + (self.high - self.low) * (unit + 1) / 2
            return Drawn(self._shaped(acted), self._shaped(acted))
        return Drawn(self._shaped(drawn), self._shaped(np.clip(drawn, self.low, self.high)))

    def _shaped(self, action: Array) -> Array:
        return action.reshape(len(action), *self.shape)

    def moments(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-deviation [rows, size] of the normal, before any squashing."""
        if self.state_std:
            return out[:, : self.size], nn.functional.hardtanh(out[:, self.size :], *LOG_STD)
        return out, self.log_std

    def distribution(self, out: Tensor, mask: Tensor | None, temperature: Tensor | None) -> Tensor:
        """Means and log-deviations of the normals, before any squashing."""
        mean, log_std = self._tempered(out, temperature)
        return torch.cat([mean, log_std.expand_as(mean)], -1)

    def divergence(self, distribution: Tensor, other: Tensor, q: float) -> Tensor:
        if self.squash and q != 1:
            raise PanoplyError(
                f"A squashed policy's divergence with q = {q:g} has no closed form: set its divergence to sampled, "
                "or q to 1."
            )
        (mean, log_std), (mean2, log_std2) = distribution.chunk(2, -1), other.chunk(2, -1)
        return divergence.normal(mean, log_std, mean2, log_std2, q)

    def curved(self, distribution: Tensor, change: Tensor) -> Tensor:
        """1/σ² of a mean and 2 of a log-deviation; squashing changes nothing."""
        log_std = distribution.chunk(2, -1)[1]
        by_mean, by_log_std = change.chunk(2, -1)
        return torch.cat([by_mean * (-2 * log_std).exp(), 2 * by_log_std], -1)

    def _tempered(self, out: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
        mean, log_std = self.moments(out)
        return mean, log_std if temperature is None else log_std + 0.5 * temperature.log()[:, None]

    def score(
        self, out: Tensor, action: Tensor, mask: Tensor | None, temperature: Tensor | None, entropy: bool
    ) -> dict[str, Tensor]:
        mean, log_std = self._tempered(out, temperature)
        flat = action.reshape(len(action), -1)
        volume: Tensor | float = 0.0
        if self.squash:
            low, high = (torch.as_tensor(b, device=out.device) for b in (self.low, self.high))
            unit = (2 * (flat - low) / (high - low) - 1).clamp(-EDGE, EDGE)
            flat = unit.atanh()
            volume = ((1 - unit**2).log() + ((high - low) / 2).log()).sum(-1)
        z = (flat - mean) * (-log_std).exp()
        logp = -0.5 * (z**2).sum(-1) - log_std.sum(-1) - 0.5 * self.size * math.log(2 * math.pi) - volume
        found = {"logp": logp}
        if entropy:
            normal = log_std.sum(-1) + 0.5 * self.size * (1 + math.log(2 * math.pi))
            found["entropy"] = -logp if self.squash else normal.expand(len(logp))
        return found
