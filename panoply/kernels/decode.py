"""One decoding step in few kernels: what lies between the matrix products of a block.

Everything is per row, so that a row's result does not depend on the others, and lengths are read on the device,
so that one captured graph serves every length.
"""
# mypy: disable-error-code="import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from panoply.kernels.launching import Often, parts_of, room
from panoply.policies.attention import Focus

LOOKS = {64: (64, 4, 4), 128: (32, 2, 4), 256: (64, 4, 3)}
"""By the padded size of a head: keys at a time that a program of `decode_attention` looks at, its warps, and how many
loads are under way. The best of 13 tried on an H200, the last one excepted."""
MANY, MANY_LOOK = 256, (128, 4, 2)
"""Of so many rows or more with heads of at most 64."""
ROOMY, SMALL_LOOK = 160 * 1024, (32, 4, 2)
"""Bytes of shared memory that tiles of `part_product` take, and heads of more than 128; of such heads with less."""
TILE = (32, 128)
PARTS = 4
"""Columns and depth of a tile of `part_product`, and how many parts it has: the best of 24 tried on an H200."""


@functools.cache
def chained() -> bool:
    """Whether the GPU can start a kernel while the one before it ends (from Hopper on)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def begin(CHAIN: tl.constexpr):
    """In a chain of kernels each starts while the one before it ends: it waits here for what that one wrote."""
    if CHAIN:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["rows"])
def _add_norm(
    x, delta, total, after, weight, out, rows, width, eps, offset, factor,
    ADD: tl.constexpr, PARTS: tl.constexpr, AFTER: tl.constexpr, NORM: tl.constexpr, CHAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    begin(CHAIN)
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < width
    at = row.to(tl.int64) * width + column
    value = tl.load(x + at, mask=inside, other=0.0)
    if ADD:
        change = tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        for part in range(1, PARTS):
            change += tl.load(delta + part * rows * width + at, mask=inside, other=0.0)
        change = change.to(value.dtype).to(tl.float32)
        if AFTER:
            gain = tl.load(after + column, mask=inside, other=0.0).to(tl.float32) + offset
            change = change * (1.0 / tl.sqrt(tl.sum(change * change, axis=0) / width + eps)) * gain
            change = change.to(value.dtype).to(tl.float32)
        change = (change * factor).to(value.dtype).to(tl.float32)
        added = value.to(tl.float32) + change
        value = added.to(value.dtype)
        tl.store(total + at, value, mask=inside)
    if NORM:
        wide = value.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
        tl.store(out + at, (wide * scale * gain).to(value.dtype), mask=inside)


@dataclass(frozen=True)
class Stream:
    """How a layout's stream is added to and normed: norms' epsilon and offset, and the factor of what is added."""

    eps: float
    offset: float = 0.0
    factor: float = 1.0


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor | None, stream: Stream, after: Tensor | None = None
) -> Tensor:
    """Add `delta`, normed itself where there is an `after`, to [rows, width] `x` in place, and give the sum's RMSNorm.

    A `delta` of [parts, rows, width] is the sum of its parts. Without a weight the sum is not normed.
    """
    rows, width = x.shape
    if delta is None and weight is None:
        return x
    out = x if weight is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    warps = 4 if block <= 2048 else 8
    added = x if delta is None else delta
    parts = 1 if delta is None or delta.ndim == 2 else len(delta)
    _add_norm[(rows,)](
        x, added, x, x if after is None else after, x if weight is None else weight, out, rows, width, stream.eps,
        stream.offset, stream.factor, delta is not None, parts, after is not None, weight is not None, chained(), block,
        num_warps=warps, launch_pdl=chained(),
    )  # fmt: skip
    return out


@triton.jit
def _embed_norm(
    token, embedding, weight, total, out, width, eps, offset, factor,
    NORM: tl.constexpr, CHAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin(CHAIN)
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < width
    at = row.to(tl.int64) * width + column
    value = tl.load(embedding + tl.load(token + row) * width + column, mask=inside, other=0.0)
    value = (value.to(tl.float32) * factor).to(value.dtype)
    tl.store(total + at, value, mask=inside)
    if NORM:
        wide = value.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
        tl.store(out + at, (wide * scale * gain).to(value.dtype), mask=inside)


def embed_norm(
    token: Tensor, embedding: Tensor, factor: float, weight: Tensor | None, stream: Stream
) -> tuple[Tensor, Tensor]:
    """[rows, width] embeddings of tokens, times a factor, and their RMSNorm; without a weight themselves."""
    width = embedding.shape[1]
    total = embedding.new_empty(len(token), width)
    out = total if weight is None else torch.empty_like(total)
    block = triton.next_power_of_2(width)
    _embed_norm[(len(token),)](
        token, embedding, total if weight is None else weight, total, out, width, stream.eps, stream.offset, factor,
        weight is not None, chained(), block, num_warps=4 if block <= 2048 else 8, launch_pdl=chained(),
    )  # fmt: skip
    return total, out


@triton.jit
def gelu_parts(x):
    """x · s(x), the approximation of gelu that is a gate of x's own: the gate s, and its slope."""
    inside = 1.5957691216057308 * (
        x + 0.044715 * x * x * x
    )  # 2 · √(2 / π): ½ (1 + tanh y) is the sigmoid of 2y
    share = 1.0 / (1.0 + tl.exp(-inside))
    return share, share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)


@triton.jit
def _gated(both, out, inner, GELU: tl.constexpr, CHAIN: tl.constexpr, BLOCK: tl.constexpr):
    begin(CHAIN)
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    at = row.to(tl.int64) * 2 * inner + column
    gate = tl.load(both + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + at + inner, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        share, _ = gelu_parts(gate)
        value = gate * share * up
    else:
        value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row.to(tl.int64) * inner + column, value.to(out.dtype.element_ty), mask=inside)


_GATED = Often(_gated)


def gated(both: Tensor, gelu: bool = False, chain: bool = False) -> Tensor:
    """silu(gate) · up, or gelu's approximation in silu's place, of [rows, 2 · inner] in which the gates come first."""
    rows, inner = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, inner)
    grid, kind = (rows, parts_of(inner, 1024)), (both.dtype, both.device, inner, gelu, chain)
    _GATED(grid, kind, both, out, inner, gelu, chain, 1024, num_warps=4, launch_pdl=chain)
    return out


@triton.jit
def _part_product(
    x, weight, out, rows, columns, WIDTH: tl.constexpr, SPAN: tl.constexpr, CHAIN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    begin(CHAIN)
    part = tl.program_id(1)
    column, row = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, M)
    mine, here = row < rows, column < columns
    total = tl.zeros([M, N], tl.float32)
    for low in range(0, SPAN, K):
        depth = part * SPAN + low + tl.arange(0, K)
        inside = depth < WIDTH
        a = tl.load(
            x + row[:, None] * WIDTH + depth[None, :], mask=mine[:, None] & inside[None, :], other=0.0
        )
        b = tl.load(
            weight + column[None, :] * WIDTH + depth[:, None], mask=here[None, :] & inside[:, None], other=0.0
        )
        total = tl.dot(a, b, total)
    target = out + (part * rows + row)[:, None] * columns + column[None, :]
    tl.store(target, total, mask=mine[:, None] & here[None, :])


def part_product(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ in [parts, rows, columns] float32 parts that `add_norm` sums, for at most 128 rows.

    The depth is cut because [rows, columns] alone has too few tiles for all multiprocessors.
    """
    (rows, width), columns = x.shape, len(weight)
    n, k = TILE
    span = triton.cdiv(triton.cdiv(width, k), PARTS) * k
    parts = triton.cdiv(width, span)
    out = torch.empty(parts, rows, columns, device=x.device)
    _part_product[(triton.cdiv(columns, n), parts)](
        x, weight, out, rows, columns, width, span, chained(), max(16, triton.next_power_of_2(rows)), n, k,
        num_warps=4, num_stages=4, launch_pdl=chained(),
    )  # fmt: skip
    return out


def in_parts(x: Tensor, weight: Tensor) -> bool:
    """Whether `part_product` is quicker than the library's: measured with 128 rows, by columns of 896 and of 1,536."""
    return len(x) <= 128 and len(weight) <= 1024 and x.element_size() == 2 and room() >= ROOMY


@triton.jit
def capped(score, cap):
    """cap · tanh(score / cap), where a cap is above 0; 1 − 2 / (e²ʸ + 1) is tanh y for every y."""
    return cap * (1.0 - 2.0 / (tl.exp(2.0 * score / cap) + 1.0))


@triton.jit
def _head(
    start, count, cosine, sine, other, weight, eps, offset,
    NORM: tl.constexpr, PAD: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`count` heads at `start`, normed if asked and turned with `other` columns, in float32; `sine` has its sign."""
    head, column = tl.arange(0, PAD)[:, None], tl.arange(0, WIDE)
    here = (head < count) & (column < D)[None, :]
    first = tl.load(start + head * D + column[None, :], mask=here, other=0.0).to(tl.float32)
    second = tl.load(start + head * D + other[None, :], mask=here, other=0.0).to(tl.float32)
    if NORM:
        dtype = start.dtype.element_ty
        real = column < D
        scale = 1.0 / tl.sqrt(tl.sum(first * first, axis=1) / D + eps)[:, None]
        gain = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)[None, :] + offset
        across = tl.load(weight + other, mask=real, other=0.0).to(tl.float32)[None, :] + offset
        first = (first * scale * gain).to(dtype).to(tl.float32)
        second = (second * scale * across).to(dtype).to(tl.float32)
    return first * cosine[None, :] + second * sine[None, :]


@triton.jit
def _attention(
    qkv,
    angles,
    keys,
    values,
    positions,
    holders,
    held,
    out,
    q_weight,
    k_weight,
    sinks,
    eps,
    offset,
    scale,
    cap,
    capacity,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    TURNING: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAD: tl.constexpr,
    NORM: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    begin(CHAIN)
    row, kv = tl.program_id(0), tl.program_id(1)
    share: tl.constexpr = HEADS // KV_HEADS
    dtype = keys.dtype.element_ty
    position = tl.load(positions + row)
    column, head = tl.arange(0, WIDE), tl.arange(0, PAD)
    real, half = column < D, TURNING // 2
    if TURNING == 0:
        other, cosine, sine = column, tl.full([WIDE], 1.0, tl.float32), tl.zeros([WIDE], tl.float32)
    else:
        if INTERLEAVED:
            angle, other, negative = column // 2, column ^ 1, column % 2 == 0
        else:
            angle, other, negative = column % half, (column + half) % TURNING, column < half
        turning = column < TURNING
        other = tl.where(turning, other, column)
        cosine = tl.load(angles + position * TURNING + angle, mask=turning, other=1.0).to(tl.float32)
        sine = tl.load(angles + position * TURNING + half + angle, mask=turning, other=0.0).to(tl.float32)
        sine = tl.where(negative, -sine, sine)

    start = qkv + row * (HEADS + 2 * KV_HEADS) * D
    q = _head(
        start + kv * share * D, share, cosine, sine, other, q_weight, eps, offset, NORM, PAD, D, WIDE
    ).to(dtype)
    k = _head(start + (HEADS + kv) * D, 1, cosine, sine, other, k_weight, eps, offset, NORM, 1, D, WIDE).to(
        dtype
    )
    v = tl.load(start + (HEADS + KV_HEADS + kv) * D + column, mask=real, other=0.0)[None, :]
    base = (row.to(tl.int64) * capacity) * KV_HEADS * D + kv * D
    theirs = (tl.load(holders + row) * capacity) * KV_HEADS * D + kv * D
    shared = tl.load(held + row)
    own = base + position * KV_HEADS * D + column[None, :]
    tl.store(keys + own, k, mask=real[None, :])
    tl.store(values + own, v, mask=real[None, :])

    # The row's own key comes from registers; the others were written by earlier steps.
    best = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale
    if CAPPED:
        best = capped(best, cap)
    total = tl.full([PAD], 1.0, tl.float32)
    mixed = tl.zeros([PAD, WIDE], tl.float32) + v.to(tl.float32)
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    for low in range(first, position, BLOCK):
        at = low + tl.arange(0, BLOCK)
        seen = at < position
        place = tl.where(at < shared, theirs, base)[:, None] + at[:, None] * (KV_HEADS * D) + column[None, :]
        there = seen[:, None] & real[None, :]
        key = tl.load(keys + place, mask=there, other=0.0)
        score = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        if CAPPED:
            score = capped(score, cap)
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, axis=1))
        weight = tl.exp(score - higher[:, None])
        fade = tl.exp(best - higher)
        total = total * fade + tl.sum(weight, axis=1)
        value = tl.load(values + place, mask=there, other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weight.to(dtype), value, input_precision="ieee")
        best = higher
    if SINKS:
        sink = tl.load(sinks + kv * share + head, mask=head < share, other=0.0).to(tl.float32)
        higher = tl.maximum(best, sink)
        fade = tl.exp(best - higher)
        total = total * fade + tl.exp(sink - higher)
        mixed = mixed * fade[:, None]
    target = out + row * HEADS * D + (kv * share + head)[:, None] * D + column[None, :]
    tl.store(target, (mixed / total[:, None]).to(dtype), mask=(head < share)[:, None] & real[None, :])


def decode_attention(
    qkv: Tensor,
    angles: Tensor | None,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    holders: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    stream: Stream,
    focus: Focus,
    interleaved: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one new token a row, [rows, heads · size], from its [rows, (heads + 2 kv_heads) · size] products.

    Norms and rotates queries and keys, and writes keys and values at `positions` of the cache's
    [slots, capacity, kv_heads, size] on the way. `angles` is [positions, turning]: cosines, then sines; None where
    products are rotated already.
    `holders` are a row and a number of positions for each row: these hold the same as its own there, and are read in
    their place, so that rows with one prompt read one copy, from the GPU's cache but for the first of them.
    """
    rows, (_, capacity, kv_heads, size) = len(qkv), keys.shape
    heads = qkv.shape[1] // size - 2 * kv_heads
    out = qkv.new_empty(rows, heads * size)
    pad = max(16, triton.next_power_of_2(heads // kv_heads))
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    wide = max(16, triton.next_power_of_2(size))
    block, warps, stages = MANY_LOOK if rows >= MANY and wide <= 64 else LOOKS[max(64, wide)]
    if wide > 128 and room() < ROOMY:
        block, warps, stages = SMALL_LOOK
    block = block if qkv.element_size() == 2 else block // 2
    scale = size**-0.5 if focus.scale is None else focus.scale
    table, turning = (qkv, 0) if angles is None else (angles, angles.shape[1])
    _attention[(rows, kv_heads)](
        qkv, table, keys, values, positions, *holders, out, q_norm, k_norm, qkv if sinks is None else sinks,
        stream.eps, stream.offset, scale, focus.cap,
        capacity, HEADS=heads, KV_HEADS=kv_heads, D=size, WIDE=wide,
        TURNING=turning, INTERLEAVED=interleaved, PAD=pad, NORM=norms is not None, CAPPED=focus.cap > 0,
        SINKS=sinks is not None, WINDOW=focus.window,
        CHAIN=chained(), BLOCK=block, num_warps=warps, num_stages=stages, launch_pdl=chained(),
    )  # fmt: skip
    return out


@triton.jit
def _norm_spans(x, first, second, eps, offset, A, B, stride, CHAIN: tl.constexpr, BLOCK: tl.constexpr):
    begin(CHAIN)
    column = tl.arange(0, BLOCK)
    later = tl.program_id(1) > 0
    width = tl.where(later, B, A)
    inside = column < width
    at = x + tl.program_id(0).to(tl.int64) * stride + tl.where(later, A, 0) + column
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + eps)
    gain = tl.load(first + column, mask=inside & (column < A) & ~later, other=0.0).to(tl.float32)
    gain += tl.load(second + column, mask=inside & later, other=0.0).to(tl.float32)
    tl.store(at, (value * scale * (gain + offset)).to(x.dtype.element_ty), mask=inside)


def norm_spans(x: Tensor, first: Tensor, second: Tensor, stream: Stream) -> None:
    """RMSNorm, in place, of the first columns of [rows, …], as many as `first` has, and of `second`'s after them."""
    block = triton.next_power_of_2(max(len(first), len(second)))
    _norm_spans[(len(x), 2)](
        x, first, second, stream.eps, stream.offset, len(first), len(second), x.stride(0), chained(), block,
        num_warps=4 if block <= 2048 else 8, launch_pdl=chained(),
    )  # fmt: skip


@triton.jit
def _norm_heads(
    x, first, second, eps, offset, heads, shared, stride, D: tl.constexpr, WIDE: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    head, column = tl.arange(0, PAD)[:, None], tl.arange(0, WIDE)[None, :]
    real = column < D
    here = (head < heads + shared) & real
    at = x + tl.program_id(0).to(tl.int64) * stride + head * D + column
    value = tl.load(at, mask=here, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
    of_queries = tl.load(first + column, mask=real, other=0.0).to(tl.float32)
    of_keys = tl.load(second + column, mask=real, other=0.0).to(tl.float32)
    gain = tl.where(head < heads, of_queries, of_keys) + offset
    tl.store(at, (value * scale * gain).to(x.dtype.element_ty), mask=here)


def norm_heads(x: Tensor, heads: int, first: Tensor, second: Tensor, stream: Stream) -> None:
    """RMSNorm, in place, of the first `heads` of [rows, heads + 2 · kv_heads, size], and of the kv_heads after them."""
    shared, size = (x.shape[1] - heads) // 2, x.shape[2]
    _norm_heads[(len(x),)](
        x, first, second, stream.eps, stream.offset, heads, shared, x.stride(0),
        size, triton.next_power_of_2(size), triton.next_power_of_2(heads + shared), num_warps=4,
    )  # fmt: skip


@triton.jit
def _cap_all(x, cap, count, CHAIN: tl.constexpr, BLOCK: tl.constexpr):
    begin(CHAIN)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(x + at, capped(tl.load(x + at, mask=inside, other=0.0), cap), mask=inside)


def cap_all(x: Tensor, cap: float) -> Tensor:
    """Logits capped in place, in one pass."""
    _cap_all[(triton.cdiv(x.numel(), 4096),)](
        x, cap, x.numel(), chained(), 4096, num_warps=8, launch_pdl=chained()
    )
    return x
