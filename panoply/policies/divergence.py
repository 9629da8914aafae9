"""How far one distribution of actions is from another, from all of both: E_π[ln_q π − ln_q π′].

ln_q x = (x^{q−1} − 1)/(q − 1) is Tsallis' logarithm. At q = 1 it is the logarithm, and the divergence KL(π‖π′).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from panoply.policies.scoring import NEVER, Head, add_product, chunk_of, chunks

NEED = "divergence:"
"""A part that needs `divergence:Q@SNAPSHOT` finds it in `batch.now` under that name."""


def need(q: float, to: str) -> str:
    return f"{NEED}{q:g}@{to}"


@functools.cache
def parse(needs: frozenset[str]) -> tuple[tuple[str, float, str], ...]:
    """The divergences among needs: name, q and snapshot."""
    found = []
    for name in sorted(n for n in needs if n.startswith(NEED)):
        q, _, to = name.removeprefix(NEED).partition("@")
        found.append((name, float(q), to))
    return tuple(found)


def q_log(logp: Tensor, q: float) -> Tensor:
    """ln_q π from log π."""
    return logp if q == 1 else torch.expm1((q - 1) * logp) / (q - 1)


def categorical(logp: Tensor, other: Tensor, q: float = 1.0) -> Tensor:
    """Of rows of log-probabilities; what neither can draw is −∞ in both."""
    logp, other = logp.clamp(min=NEVER), other.clamp(min=NEVER)
    return (logp.exp() * (q_log(logp, q) - q_log(other, q))).sum(-1)


def normal(mean: Tensor, log_std: Tensor, mean2: Tensor, log_std2: Tensor, q: float = 1.0) -> Tensor:
    """Of rows of independent normals.

    ∫π^q and ∫π·π′^{q−1} are Gaussian integrals, and those of independent dimensions multiply.
    """
    gap = (mean - mean2) ** 2
    if q == 1:
        spread = ((2 * (log_std - log_std2)).exp() + gap * (-2 * log_std2).exp() - 1) / 2
        return (log_std2 - log_std + spread).sum(-1)
    p, log_root_2pi = q - 1, 0.5 * math.log(2 * math.pi)
    variance, variance2 = (2 * log_std).exp(), (2 * log_std2).exp()
    own = -p * (log_root_2pi + log_std) - 0.5 * math.log(q)
    wide = variance2 + p * variance
    cross = -p * (log_root_2pi + log_std2) - 0.5 * (wide / variance2).log() - p * gap / (2 * wide)
    return (own.sum(-1).exp() - cross.sum(-1).exp()) / p


def independent(pairs: Iterable[tuple[Tensor, Tensor]], q: float = 1.0) -> Tensor:
    """Of several choices that are made side by side: KLs add up, E[ln_q] of a product is a product."""
    pairs = list(pairs)
    if q == 1 or len(pairs) == 1:
        return torch.stack([categorical(logp, other, q) for logp, other in pairs]).sum(0)
    own = torch.stack([(q * logp).exp().sum(-1) for logp, _ in pairs])
    cross = torch.stack([(logp + (q - 1) * other).exp().sum(-1) for logp, other in pairs])
    return (own.prod(0) - cross.prod(0)) / (q - 1)


def _both(
    head: Head, rows: slice, hidden: Tensor, weight: Tensor, other: Tensor, other_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probabilities of some rows under both, over one set of tokens, and the slope of the first's logits."""
    z, slope = head.whole_logits(hidden, weight, rows)
    then, _ = head.whole_logits(other, other_weight, rows)
    if (barred := head.barred(z, rows)) is not None:
        z, then = (x.masked_fill_(barred, float("-inf")) for x in (z, then))
    return z.log_softmax(-1), then.log_softmax(-1), slope


class _OfTokens(torch.autograd.Function):
    """Logits are computed twice. With D = Σ p·(ln_q p − ln_q p′): ∂D/∂z = p·(f − Σ p·f), f = ∂D/∂p."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, other: Tensor, other_weight: Tensor, head: Head, q: float
    ) -> Tensor:
        found = [hidden.new_zeros(0, dtype=torch.promote_types(hidden.dtype, torch.float32))]
        for rows in chunks(len(hidden), chunk_of(hidden, weight)):
            logp, then, _ = _both(head, rows, hidden, weight, other, other_weight)
            found.append(categorical(logp, then, q))
        ctx.save_for_backward(hidden, weight, other, other_weight)
        ctx.head, ctx.q = head, q
        return torch.cat(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        hidden, weight, other, other_weight = ctx.saved_tensors
        head, q = ctx.head, ctx.q
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=g.dtype) if need_weight else None
        for rows in chunks(len(hidden), chunk_of(hidden, weight)):
            logp, then, slope = _both(head, rows, hidden, weight, other, other_weight)
            logp, then = logp.clamp_(min=NEVER), then.clamp_(min=NEVER)
            p = logp.exp()
            f = q_log(logp, q) - q_log(then, q) + (0.0 if q == 1 else ((q - 1) * logp).exp())
            dz = p * (f - (p * f).sum(-1, keepdim=True)) * g[rows, None]
            dz = dz if (divisor := head.divisor(rows)) is None else dz / divisor[:, None]
            dz = (dz if slope is None else dz * slope).to(weight.dtype)
            if d_hidden is not None:
                d_hidden[rows] = dz @ weight
            if d_weight is not None:
                add_product(d_weight, dz.t(), hidden[rows])
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None, None


def of_tokens(
    hidden: Tensor, weight: Tensor, other: Tensor, other_weight: Tensor, head: Head, q: float = 1.0
) -> Tensor:
    """Over a whole vocabulary, from the states and weights both distributions are made of.

    A chunk of rows at a time: no [decisions, vocabulary] tensor is ever kept.
    """
    found: Tensor = _OfTokens.apply(hidden, weight, other, other_weight, head, q)  # type: ignore[no-untyped-call]
    return found
