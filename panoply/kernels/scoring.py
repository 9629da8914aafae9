"""Log-probability and entropy of actions from logits read once, and the gradient on the logits written once."""
# mypy: disable-error-code="import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from panoply.kernels.decode import capped


@triton.jit
def _normalise(
    z, temperatures, actions, out_lse, out_logp, out_entropy, vocab, cap,
    TEMPERED: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    line = z + row.to(tl.int64) * vocab
    temperature = 1.0
    if TEMPERED:
        temperature = tl.load(temperatures + row)
    # Every lane keeps its own maximum and sums; they meet once, at the end.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for low in range(0, vocab, BLOCK):
        column = low + tl.arange(0, BLOCK)
        value = tl.load(line + column, mask=column < vocab, other=float("-inf"))
        if CAPPED:
            value = tl.where(column < vocab, capped(value, cap), float("-inf"))
        value = value / temperature
        higher = tl.maximum(best, value)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        fade, share = tl.exp(best - safe), tl.exp(value - safe)
        total = total * fade + share
        if ENTROPY:
            weighted = weighted * fade + tl.where(share > 0.0, share * value, 0.0)
        best = higher
    summit = tl.max(best, axis=0)
    fade = tl.exp(best - summit)
    whole = tl.sum(total * fade, axis=0)
    lse = summit + tl.log(whole)
    tl.store(out_lse + row, lse)
    chosen = tl.load(line + tl.load(actions + row))
    if CAPPED:
        chosen = capped(chosen, cap)
    tl.store(out_logp + row, chosen / temperature - lse)
    if ENTROPY:
        tl.store(out_entropy + row, lse - tl.sum(weighted * fade, axis=0) / whole)


@triton.jit
def _slope(
    z, temperatures, actions, lse, entropies, g_logp, g_entropy, out, vocab, cap,
    TEMPERED: tl.constexpr, CAPPED: tl.constexpr, LOGP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * vocab + column
    inside = column < vocab
    temperature = 1.0
    if TEMPERED:
        temperature = tl.load(temperatures + row)
    value = tl.load(z + at, mask=inside, other=float("-inf"))
    rise = 1.0 / temperature
    if CAPPED:
        value = capped(value, cap)
        rise = rise * (1.0 - value / cap * (value / cap))
        value = tl.where(inside, value, float("-inf"))
    logp = value / temperature - tl.load(lse + row)
    p = tl.exp(logp)
    slope = tl.zeros([BLOCK], tl.float32)
    if ENTROPY:
        spread = tl.where(p > 0.0, logp + tl.load(entropies + row), 0.0)
        slope -= tl.load(g_entropy + row) * p * spread
    if LOGP:
        g = tl.load(g_logp + row)
        slope += tl.where(column == tl.load(actions + row), g, 0.0) - g * p
    tl.store(out + at, (slope * rise).to(out.dtype.element_ty), mask=inside)


def normalise(
    z: Tensor, actions: Tensor, temperature: Tensor | None, entropy: bool, cap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of [N, V] float32 logits, capped and divided by `temperature`: log-normalisers, log-probabilities, entropies.

    The last only if asked.
    """
    rows, vocab = z.shape
    lse, logp = z.new_empty(rows), z.new_empty(rows)
    entropies = z.new_empty(rows) if entropy else None
    _normalise[(rows,)](
        z, z if temperature is None else temperature, actions, lse, logp, lse if entropies is None else entropies,
        vocab, cap,
        TEMPERED=temperature is not None, CAPPED=cap > 0, ENTROPY=entropy,
        BLOCK=min(4096, triton.next_power_of_2(vocab)), num_warps=8,
    )  # fmt: skip
    return lse, logp, entropies


def slope(
    z: Tensor,
    actions: Tensor,
    temperature: Tensor | None,
    lse: Tensor,
    entropies: Tensor | None,
    g_logp: Tensor | None,
    g_entropy: Tensor | None,
    out: Tensor,
    cap: float = 0.0,
) -> None:
    """The gradient on the logits before their cap, into `out`, which may have fewer bits."""
    rows, vocab = z.shape
    block = min(4096, triton.next_power_of_2(vocab))
    _slope[(rows, triton.cdiv(vocab, block))](
        z, z if temperature is None else temperature, actions, lse, z if entropies is None else entropies,
        z if g_logp is None else g_logp, z if g_entropy is None else g_entropy, out, vocab, cap,
        TEMPERED=temperature is not None, CAPPED=cap > 0, LOGP=g_logp is not None, ENTROPY=g_entropy is not None,
        BLOCK=block, num_warps=8,
    )  # fmt: skip
