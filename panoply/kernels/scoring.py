"""Log-probability and entropy of actions from logits read once, and the gradient on the logits written once.

Where a threshold cuts (see `policies.scoring.Head`), what lies above it needs a second reading: the threshold is a
log-probability, so the first one finds the normaliser. Rows whose set is listed are done again from their few ids.

Where the gradient is wanted at once (`weigh`), one reading does both: shares are written before their sum is known, and
whoever takes products with a row divides by it there.
"""
# mypy: disable-error-code="import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from panoply.kernels.decode import capped


@triton.jit
def _sums(
    line, temperature, cap, edge, action, vocab,
    CAPPED: tl.constexpr, CUT: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The log-normaliser of a row above the `edge`, and the mean logit there. A row of no length has none."""
    # Every lane keeps its own maximum and sums; they meet once, at the end.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for low in range(0, vocab, BLOCK):
        column = low + tl.arange(0, BLOCK)
        inside = column < vocab
        value = tl.load(line + column, mask=inside, other=float("-inf"))
        if CAPPED:
            value = tl.where(inside, capped(value, cap), float("-inf"))
        value = value / temperature
        if CUT:
            value = tl.where((value >= edge) | (column == action), value, float("-inf"))
        higher = tl.maximum(best, value)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        fade, share = tl.exp(best - safe), tl.exp(value - safe)
        total = total * fade + share
        if ENTROPY:
            weighted = weighted * fade + tl.where(share > 0.0, share * value, 0.0)
        best = higher
    summit = tl.max(best, axis=0)
    fade = tl.exp(best - tl.where(summit == float("-inf"), 0.0, summit))
    whole = tl.sum(total * fade, axis=0)
    return summit + tl.log(whole), tl.sum(weighted * fade, axis=0) / whole


@triton.jit
def _normalise(
    z, temperatures, actions, cuts, cap, out_lse, out_logp, out_entropy, out_edge, vocab,
    TEMPERED: tl.constexpr, CAPPED: tl.constexpr, CUT: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    line = z + row.to(tl.int64) * vocab
    temperature = 1.0
    if TEMPERED:
        temperature = tl.load(temperatures + row)
    action, edge = tl.load(actions + row), float("-inf")
    if CUT:
        cut = tl.load(cuts + row)
        # Rows without a cut are read once only.
        whole, _ = _sums(
            line,
            temperature,
            cap,
            edge,
            action,
            tl.where(cut > float("-inf"), vocab, 0),
            CAPPED,
            False,
            False,
            BLOCK,
        )
        edge = tl.where(cut > float("-inf"), cut + whole, float("-inf"))
        tl.store(out_edge + row, edge)
    lse, mean = _sums(line, temperature, cap, edge, action, vocab, CAPPED, CUT, ENTROPY, BLOCK)
    chosen = tl.load(line + action)
    if CAPPED:
        chosen = capped(chosen, cap)
    tl.store(out_lse + row, lse)
    tl.store(out_logp + row, chosen / temperature - lse)
    if ENTROPY:
        tl.store(out_entropy + row, lse - mean)


@triton.jit
def _listed(
    z, temperatures, actions, lists, counts, cap, out_lse, out_logp, out_entropy, g_logp, g_entropy, out, vocab,
    TEMPERED: tl.constexpr, CAPPED: tl.constexpr, SLOPE: tl.constexpr, LOGP: tl.constexpr, ENTROPY: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows with listed ids, from those alone: sums, or the gradient on their logits; all else was set to 0 before."""
    row, slot = tl.program_id(0), tl.arange(0, WIDTH)
    count = tl.load(counts + row)
    some, there = count > 0, slot < count
    at = row.to(tl.int64) * vocab + tl.load(lists + row * WIDTH + slot, mask=there, other=0)
    temperature, flat = 1.0, 1.0
    if TEMPERED:
        temperature = tl.load(temperatures + row)
    value = tl.load(z + at, mask=there, other=float("-inf"))
    action = tl.load(actions + row)
    chosen = tl.load(z + row.to(tl.int64) * vocab + action)
    if CAPPED:
        value, chosen = tl.where(there, capped(value, cap), float("-inf")), capped(chosen, cap)
        flat = tl.where(there, 1.0 - (value / cap) * (value / cap), 0.0)
    value, chosen = value / temperature, chosen / temperature
    if SLOPE:
        p = tl.where(there, tl.exp(value - tl.load(out_lse + row)), 0.0)
        slope = tl.zeros([WIDTH], tl.float32)
        if ENTROPY:
            spread = tl.where(p > 0.0, value - tl.load(out_lse + row) + tl.load(out_entropy + row), 0.0)
            slope -= tl.load(g_entropy + row) * p * spread
        if LOGP:
            g = tl.load(g_logp + row)
            chosen_here = tl.load(lists + row * WIDTH + slot, mask=there, other=-1) == action
            slope += tl.where(chosen_here, g, 0.0) - g * p
        tl.store(out + at, (slope * flat / temperature).to(out.dtype.element_ty), mask=there)
    else:
        summit = tl.max(value, axis=0)
        summit = tl.where(some, summit, 0.0)
        share = tl.where(there, tl.exp(value - summit), 0.0)
        whole = tl.sum(share, axis=0)
        lse = summit + tl.log(tl.where(some, whole, 1.0))
        tl.store(out_lse + row, lse, mask=some)
        member = (
            tl.sum((tl.load(lists + row * WIDTH + slot, mask=there, other=-1) == action).to(tl.int32), axis=0)
            > 0
        )
        tl.store(out_logp + row, tl.where(member, chosen - lse, float("-inf")), mask=some)
        if ENTROPY:
            mean = tl.sum(tl.where(share > 0.0, share * value, 0.0), axis=0) / tl.where(some, whole, 1.0)
            tl.store(out_entropy + row, lse - mean, mask=some)


@triton.jit
def _slope(
    z, temperatures, actions, edges, counts, cap, lse, entropies, g_logp, g_entropy, out, vocab,
    TEMPERED: tl.constexpr, CAPPED: tl.constexpr, CUT: tl.constexpr, LISTED: tl.constexpr, LOGP: tl.constexpr,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * vocab + column
    inside = column < vocab
    action = tl.load(actions + row)
    temperature = 1.0
    if TEMPERED:
        temperature = tl.load(temperatures + row)
    value = tl.load(z + at, mask=inside, other=float("-inf"))
    if CAPPED:
        value = capped(value, cap)
    logp = value / temperature - tl.load(lse + row)
    p = tl.exp(logp)
    if CUT:
        p = tl.where((value / temperature >= tl.load(edges + row)) | (column == action), p, 0.0)
    slope = tl.zeros([BLOCK], tl.float32)
    if ENTROPY:
        spread = tl.where(p > 0.0, logp + tl.load(entropies + row), 0.0)
        slope -= tl.load(g_entropy + row) * p * spread
    if LOGP:
        g = tl.load(g_logp + row)
        slope += tl.where(column == action, g, 0.0) - g * p
    if CAPPED:
        slope *= 1.0 - (value / cap) * (value / cap)
    if LISTED:
        slope = tl.where(tl.load(counts + row) > 0, 0.0, slope)
    tl.store(out + at, (slope / temperature).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _shares(
    line, room, temperature, cap, reference, edge, action, end, vocab,
    CAPPED: tl.constexpr, CUT: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of exp(logit − reference) above the `edge`, and into `room` each of them, times the cap's slope."""
    total = tl.zeros([BLOCK], tl.float32)
    for low in range(0, end, BLOCK):
        column = low + tl.arange(0, BLOCK)
        inside = column < vocab
        value, flat = _logit(line, column, inside, temperature, cap, CAPPED)
        share = tl.exp(value - reference)
        if CUT:
            share = tl.where((value >= edge) | (column == action), share, 0.0)
        total += share
        if WRITE:
            tl.store(room + column, (share * flat).to(room.dtype.element_ty), mask=inside)
    return tl.sum(total, axis=0)


@triton.jit
def _logit(line, column, inside, temperature, cap, CAPPED: tl.constexpr):
    """Logits after cap and temperature, −∞ outside, and the slope of the cap."""
    value = tl.load(line + column, mask=inside, other=float("-inf"))
    flat = tl.where(inside, 1.0, 0.0)
    if CAPPED:
        value = capped(value, cap)
        flat = tl.where(inside, 1.0 - (value / cap) * (value / cap), 0.0)
        value = tl.where(inside, value, float("-inf"))
    return value / temperature, flat


@triton.jit
def _highest(line, temperature, cap, end, vocab, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for low in range(0, end, BLOCK):
        column = low + tl.arange(0, BLOCK)
        value, _ = _logit(line, column, column < vocab, temperature, cap, CAPPED)
        best = tl.maximum(best, value)
    return tl.max(best, axis=0)


@triton.jit
def _weigh(
    z, temperatures, actions, cuts, counts, cap, out_logp, out_scale, out, vocab,
    TEMPERED: tl.constexpr, CAPPED: tl.constexpr, CUT: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    line, room = z + row.to(tl.int64) * vocab, out + row.to(tl.int64) * vocab
    temperature, end = 1.0, vocab
    if TEMPERED:
        temperature = tl.load(temperatures + row)
    listed = row < 0
    if LISTED:  # all zeros here: what is listed comes after
        listed = tl.load(counts + row) > 0
        end = tl.where(listed, 0, vocab)
        for low in range(0, vocab - end, BLOCK):
            column = low + tl.arange(0, BLOCK)
            tl.store(room + column, tl.zeros([BLOCK], out.dtype.element_ty), mask=column < vocab)
    action, edge = tl.load(actions + row), float("-inf")
    chosen, flat = _logit(line, action, action < vocab, temperature, cap, CAPPED)
    # Some logits will do for a reference, unless others lie 80 above: then the highest is looked for.
    reference = tl.maximum(_highest(line, temperature, cap, BLOCK, vocab, CAPPED, BLOCK), chosen)
    whole = _shares(
        line, room, temperature, cap, reference, edge, action, end, vocab, CAPPED, False, not CUT, BLOCK
    )
    if whole > 1e36:
        reference = _highest(line, temperature, cap, end, vocab, CAPPED, BLOCK)
        whole = _shares(
            line, room, temperature, cap, reference, edge, action, end, vocab, CAPPED, False, not CUT, BLOCK
        )
    if CUT:
        edge = tl.load(cuts + row) + reference + tl.log(whole)
        whole = _shares(
            line, room, temperature, cap, reference, edge, action, end, vocab, CAPPED, True, True, BLOCK
        )
    tl.debug_barrier()  # the action's share has been written by another thread
    there = end > 0
    slope = (tl.exp(chosen - reference) - whole) * flat
    rounded = slope.to(out.dtype.element_ty)
    tl.store(room + action, rounded, mask=there)
    tl.store(out_logp + row, chosen - reference - tl.log(whole), mask=there)
    # The largest number of a row, the action's, is made right again; the others are as far off as rounding leaves them.
    right = slope / tl.where(rounded == 0.0, 1.0, rounded.to(tl.float32))
    scale = tl.where(rounded == 0.0, 1.0, right) * (-1.0 / (whole * temperature))
    tl.store(out_scale + row, tl.where(there, scale, 1.0))


@dataclass(frozen=True)
class Drawn:
    """How some rows were drawn from their logits: what a `Head` says, as kernels read it."""

    actions: Tensor
    temperature: Tensor | None = None
    softcap: float = 0.0
    cut: Tensor | None = None
    lists: Tensor | None = None
    """[rows, a power of two]: the ids that could be drawn, of which the first `counts` are there."""
    counts: Tensor | None = None


@dataclass(frozen=True)
class Sums:
    """Log-normalisers, log-probabilities, entropies if asked, and the logits at which rows were cut, if they were."""

    lse: Tensor
    logp: Tensor
    entropy: Tensor | None
    edge: Tensor | None


def normalise(z: Tensor, drawn: Drawn, entropy: bool) -> Sums:
    """Of [N, V] float32 logits, before softcap and temperature."""
    rows, vocab = z.shape
    lse, logp = z.new_empty(rows), z.new_empty(rows)
    entropies = z.new_empty(rows) if entropy else None
    edge = None if drawn.cut is None else z.new_empty(rows)
    kinds = {"TEMPERED": drawn.temperature is not None, "CAPPED": drawn.softcap != 0, "ENTROPY": entropy}
    _normalise[(rows,)](
        z, _or(drawn.temperature, z), drawn.actions, _or(drawn.cut, z), drawn.softcap, lse, logp, _or(entropies, lse),
        _or(edge, lse), vocab,
        CUT=edge is not None, BLOCK=min(4096, triton.next_power_of_2(vocab)), num_warps=8, **kinds,
    )  # fmt: skip
    if drawn.lists is not None:
        _listed[(rows,)](
            z, _or(drawn.temperature, z), drawn.actions, drawn.lists, drawn.counts, drawn.softcap, lse, logp,
            _or(entropies, lse), lse, lse, lse, vocab,
            SLOPE=False, LOGP=False, WIDTH=drawn.lists.shape[1], num_warps=1, **kinds,
        )  # fmt: skip
    return Sums(lse, logp, entropies, edge)


def slope(
    z: Tensor, drawn: Drawn, sums: Sums, g_logp: Tensor | None, g_entropy: Tensor | None, out: Tensor
) -> None:
    """The gradient on the logits, into `out`, which may have fewer bits."""
    rows, vocab = z.shape
    block = min(4096, triton.next_power_of_2(vocab))
    kinds = {
        "TEMPERED": drawn.temperature is not None,
        "CAPPED": drawn.softcap != 0,
        "LOGP": g_logp is not None,
        "ENTROPY": g_entropy is not None,
    }
    temperature, entropies, on_logp, on_entropy = (
        _or(x, z) for x in (drawn.temperature, sums.entropy, g_logp, g_entropy)
    )
    _slope[(rows, triton.cdiv(vocab, block))](
        z, temperature, drawn.actions, _or(sums.edge, z), _or(drawn.counts, z), drawn.softcap, sums.lse, entropies,
        on_logp, on_entropy, out, vocab,
        CUT=sums.edge is not None, LISTED=drawn.lists is not None, BLOCK=block, num_warps=8, **kinds,
    )  # fmt: skip
    if drawn.lists is not None:
        _listed[(rows,)](
            z, temperature, drawn.actions, drawn.lists, drawn.counts, drawn.softcap, sums.lse, sums.lse, entropies,
            on_logp, on_entropy, out, vocab,
            SLOPE=True, WIDTH=drawn.lists.shape[1], num_warps=1, **kinds,
        )  # fmt: skip


def weigh(z: Tensor, drawn: Drawn, out: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and numbers that rows of `out` times are the gradients of these on the logits.

    Rows are not yet divided by their sums, so `out` needs the range of float32, which bfloat16 has and float16 has not.
    """
    rows, vocab = z.shape
    logp, scale = z.new_empty(rows), z.new_empty(rows)
    kinds = {"TEMPERED": drawn.temperature is not None, "CAPPED": drawn.softcap != 0}
    temperature = _or(drawn.temperature, z)
    _weigh[(rows,)](
        z, temperature, drawn.actions, _or(drawn.cut, z), _or(drawn.counts, z), drawn.softcap, logp, scale, out, vocab,
        CUT=drawn.cut is not None, LISTED=drawn.lists is not None, BLOCK=min(4096, triton.next_power_of_2(vocab)),
        num_warps=8, **kinds,
    )  # fmt: skip
    if drawn.lists is not None:
        lse, ones = torch.empty_like(logp), torch.ones_like(logp)
        for slope in (False, True):
            _listed[(rows,)](
                z, temperature, drawn.actions, drawn.lists, drawn.counts, drawn.softcap, lse, logp, lse, ones, lse, out,
                vocab, SLOPE=slope, LOGP=slope, ENTROPY=False, WIDTH=drawn.lists.shape[1], num_warps=1, **kinds,
            )  # fmt: skip
    return logp, scale


def _or(given: Tensor | None, other: Tensor) -> Tensor:
    """Something to point at where there is nothing to read; the gradient of a sum is one number, written out here."""
    return other if given is None else given.contiguous()
