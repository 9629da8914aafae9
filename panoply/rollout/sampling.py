"""How a token is drawn: the processed distribution, a random stream per row, and what is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import Ragged
from panoply.kernels import host
from panoply.rollout.cuts import LISTED, Few, separated, truncated

Schedule = Callable[[Tensor], Tensor]
"""Positions within the turn (0 for its first sampled token) to temperatures."""
Heat = Callable[[Tensor], Tensor]
"""[B, V] logits to what each row's temperature is multiplied by."""


COLDEST = 1e-6
"""The least temperature but 0, and the least repetition penalty: logits that are divided by less leave float32."""


@dataclass(frozen=True)
class Sampling:
    """How to sample. Logits are penalised, masked, divided by the temperature, cut to `top_k`, `top_p`, then `min_p`.

    `repetition_penalty` divides logits of what the context holds already (see policies/penalties.py). `heat` looks at
    the penalised logits and multiplies the temperature; what came of it is recorded, and scored with.

    Temperature 0 takes the most likely allowed token. A greedy token is recorded with temperature 1, its
    log-probability is under the penalised and masked temperature-1 distribution, and no cut acts on it.

    A turn ends with a stop token or a stop string, both of which stay in the record, or after `max_tokens`.
    Before `min_tokens` stop tokens cannot be drawn, so those tokens record the rest of the vocabulary as
    allowed, and stop strings are overlooked.
    """

    temperature: float | Schedule = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int = 128
    min_tokens: int = 0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    heat: Heat | None = None

    def __post_init__(self) -> None:
        if not callable(self.temperature) and not 0 <= self.temperature < float("inf"):
            raise PanoplyError(f"temperature must be zero or more, not {self.temperature}.")
        if not callable(self.temperature) and 0 < self.temperature < COLDEST:
            raise PanoplyError(
                f"temperature must be 0, for the likeliest token, or at least {COLDEST:g}, not {self.temperature}."
            )
        if not 0 < self.top_p <= 1:
            raise PanoplyError(f"top_p must be above 0 and at most 1, not {self.top_p}.")
        if self.top_k is not None and not (self.top_k >= 1 and float(self.top_k).is_integer()):
            raise PanoplyError(
                f"top_k must be a whole number from 1 on, not {self.top_k}; leave it out to keep all tokens."
            )
        if not 0 <= self.min_p < 1:
            raise PanoplyError(f"min_p must be from 0 up to 1, not {self.min_p}.")
        if not COLDEST <= self.repetition_penalty < float("inf"):
            raise PanoplyError(
                f"repetition_penalty must be at least {COLDEST:g}, and finite, not {self.repetition_penalty}."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -100 <= getattr(self, name) <= 100:
                raise PanoplyError(f"{name} must be from -100 to 100, not {getattr(self, name)}.")
        if self.max_tokens < 1:
            raise PanoplyError(f"max_tokens must be at least 1, not {self.max_tokens}.")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise PanoplyError(
                f"min_tokens must be from 0 to max_tokens ({self.max_tokens}), not {self.min_tokens}."
            )
        strings = self.stop_strings
        if isinstance(strings, str) or not all(isinstance(one, str) and one for one in strings):
            raise PanoplyError("stop_strings must be a tuple of strings that are not empty.")

    @property
    def counts(self) -> bool:
        """Whether what a turn has said is penalised."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def truncates(self) -> bool:
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    def temperatures(self) -> Tensor | None:
        """The temperature at each position of a turn, [max_tokens]; None where it is 1 throughout."""
        within = torch.arange(self.max_tokens)
        given = self.temperature(within) if callable(self.temperature) else self.temperature
        table = torch.as_tensor(given, dtype=torch.float32).expand(within.shape)
        if not bool((((table == 0) | (table >= COLDEST)) & table.isfinite()).all()):
            raise PanoplyError(
                f"The temperature schedule gives values that are negative, not finite, or between 0 and {COLDEST:g}."
            )
        return None if bool((table == 1).all()) else table


@dataclass(frozen=True)
class Draw:
    """One token a row, and what it was drawn from; None where nothing was cut, or not asked for."""

    action: Tensor
    logp: Tensor
    temperature: Tensor | None = None
    entropy: Tensor | None = None
    allowed: Ragged | Few | None = None
    """The ids that could be drawn; none listed: all that `cut` leaves."""
    cut: Tensor | None = None
    """The log-probability, before the cut, that separates what could be drawn from what could not; −∞ if ids say it."""
    kept: Tensor | None = None
    """The mass of what could be drawn, before the cut."""
    logits: Tensor | None = None
    """All that it was drawn from, tempered and cut; not recorded."""


def draw(
    logits: Tensor,
    uniform: Tensor,
    sampling: Sampling,
    temperature: Tensor | None = None,
    mask: Tensor | None = None,
    entropy: bool = False,
) -> Draw:
    """Draw from [B, V] float32 logits with one uniform a row. `mask` is true where a token may be drawn.

    `entropy` asks for that of the tempered distribution that the mask leaves, before anything is cut.
    """
    if temperature is None and mask is None and not sampling.truncates and (fast := host.compiled(logits)):
        return _drawn(fast, logits, uniform, entropy)
    greedy = None if temperature is None else temperature == 0
    if temperature is not None and greedy is not None:
        temperature = temperature.masked_fill(greedy, 1.0)
        logits = logits / temperature[:, None]
    cut, kept = None, None
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    whole = logits.log_softmax(-1) if entropy else None
    if sampling.truncates:
        inside = truncated(logits, sampling.top_k, sampling.top_p, sampling.min_p)
        inside = inside if greedy is None else inside | (greedy[:, None] & (logits > -torch.inf))
        cut, kept = separated(logits, inside)
        logits = logits.masked_fill(~inside, -torch.inf)
        # A long list is that of the mask alone, and the cut says the rest.
        short = (inside.sum(-1) <= LISTED) | (cut == -torch.inf)
        mask = inside | ~short[:, None] & (True if mask is None else mask)
        cut = cut.masked_fill(short, -torch.inf)
    logp = logits.log_softmax(-1)
    action = invert(logp, uniform)
    if greedy is not None:
        action = torch.where(greedy, logits.argmax(-1), action)
    return Draw(
        action,
        logp.gather(-1, action[:, None])[:, 0],
        temperature,
        None if whole is None else torch.special.entr(whole.exp()).sum(-1),
        None if mask is None else listed(mask),
        cut,
        kept,
        logits,
    )


def listed(mask: Tensor) -> Ragged:
    """The ids that a mask leaves in each row; none where it leaves everything."""
    ids = mask & ~mask.all(-1, keepdim=True)
    counts = ids.sum(-1)
    return Ragged(ids.nonzero()[:, 1], torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


def _drawn(fast: ModuleType, logits: Tensor, uniform: Tensor, entropy: bool) -> Draw:
    """`draw` in one pass, where nothing acts on the logits."""
    action = uniform.new_empty(len(logits), dtype=torch.long)
    logp, spread = logits.new_empty(len(logits)), logits.new_empty(len(logits))
    fast.draw(*map(host.array, (logits, uniform, action, logp, spread)))
    return Draw(action, logp, None, spread if entropy else None, logits=logits)


def invert(logp: Tensor, uniform: Tensor) -> Tensor:
    """The token whose share of the cumulative distribution holds `uniform` < 1; never one of probability 0.

    The sum is taken in float64: in float32 the tail of a large vocabulary would be lost in rounding.
    """
    p = logp.exp()
    cumulative = p.cumsum(-1, dtype=torch.float64)
    target = uniform[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, target, right=True)
    if p.device.type != "cpu":
        # A parallel sum need not be monotone to the last bit, so the edge of a flat stretch may be hit.
        found = found.clamp_(max=p.shape[-1] - 1)
        found = torch.where(p.gather(-1, found) > 0, found, p.argmax(-1, keepdim=True))
    return found[:, 0]


def stream(seeds: Tensor) -> Tensor:
    """Int64 seeds to the starting points of their random streams."""
    return _mix(seeds + _GOLDEN)


def uniforms(streams: Tensor, positions: Tensor) -> Tensor:
    """Float64 strictly between 0 and 1: a hash of stream and position, whatever else is in the batch."""
    bits = _mix(streams + positions * _GOLDEN)
    # 40 bits, so that neither the half added here nor the product with a sum near 1 rounds up to 1.
    return (_shift(bits, 24).double() + 0.5) * 2.0**-40


def normals(streams: Tensor, positions: Tensor, width: int) -> Tensor:
    """[rows, width] normal numbers: a hash of stream and position, and of nothing that `uniforms` uses."""
    number = torch.arange(width, device=streams.device)
    own = stream(streams)[:, None]
    found: Tensor = torch.special.ndtri(uniforms(own, positions[:, None] * width + number))
    return found.float()


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014); int64 products wrap as unsigned ones do."""
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """A logical shift: torch's keeps the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
