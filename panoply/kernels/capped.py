"""Attention over packed rows whose scores are capped, forward and backward: torch's kernels know no cap.

A score is s = c · tanh(z / c) of z = scale · qᵀk, and ∂s/∂z = 1 − (s / c)². Nothing of [queries, keys] is kept: with
the logarithm of each query's sum, weights are computed again where a gradient needs them.
"""
# mypy: disable-error-code="import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from panoply.kernels.decode import capped
from panoply.policies.attention import Focus


@triton.jit
def _seen(query, key, count, WINDOW: tl.constexpr):
    """Which keys, by position in their piece, are seen from queries at positions."""
    seen = (key[None, :] <= query[:, None]) & (key < count)[None, :]
    if WINDOW > 0:
        seen = seen & (key[None, :] > query[:, None] - WINDOW)
    return seen


@triton.jit
def _rows(start, stride, row, count, column, D: tl.constexpr):
    """[rows, WIDE] of a head, zeros where there is nothing."""
    there = (row < count)[:, None] & (column < D)[None, :]
    return tl.load(start + row.to(tl.int64)[:, None] * stride + column[None, :], mask=there, other=0.0)


@triton.jit
def _forward(
    q, k, v, out, lse, first_query, first_key, total, scale, cap, q_stride, k_stride, v_stride, out_stride,
    SHARE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, WINDOW: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One head's M queries of a piece against all keys they see."""
    piece, head = tl.program_id(1), tl.program_id(2)
    begin, base = tl.load(first_query + piece), tl.load(first_key + piece)
    queries, keys = tl.load(first_query + piece + 1) - begin, tl.load(first_key + piece + 1) - base
    low = tl.program_id(0) * M
    if low < queries:
        row, column = low + tl.arange(0, M), tl.arange(0, WIDE)
        position = row + keys - queries
        mine = _rows(q + begin.to(tl.int64) * q_stride + head * D, q_stride, row, queries, column, D)
        k_head = k + base.to(tl.int64) * k_stride + head // SHARE * D
        v_head = v + base.to(tl.int64) * v_stride + head // SHARE * D
        best = tl.full([M], float("-inf"), tl.float32)
        sums = tl.zeros([M], tl.float32)
        mixed = tl.zeros([M, WIDE], tl.float32)
        start = low * 0
        if WINDOW > 0:
            start = tl.maximum(low + keys - queries - WINDOW + 1, 0) // N * N
        for at in range(start, tl.minimum(low + M, queries) + keys - queries, N):
            key = at + tl.arange(0, N)
            theirs = _rows(k_head, k_stride, key, keys, column, D)
            score = capped(tl.dot(mine, tl.trans(theirs)) * scale, cap)
            score = tl.where(_seen(position, key, keys, WINDOW), score, float("-inf"))
            higher = tl.maximum(tl.maximum(best, tl.max(score, axis=1)), -1e30)
            weight = tl.exp(score - higher[:, None])
            fade = tl.exp(best - higher)
            sums = sums * fade + tl.sum(weight, axis=1)
            value = _rows(v_head, v_stride, key, keys, column, D)
            mixed = mixed * fade[:, None] + tl.dot(weight.to(value.dtype), value)
            best = higher
        inside = row < queries
        sums = tl.where(inside, sums, 1.0)
        target = out + (begin + row).to(tl.int64)[:, None] * out_stride + head * D + column[None, :]
        there = inside[:, None] & (column < D)[None, :]
        tl.store(target, (mixed / sums[:, None]).to(out.dtype.element_ty), mask=there)
        tl.store(lse + head.to(tl.int64) * total + begin + row, best + tl.log(sums), mask=inside)


@triton.jit
def _slope(score_of, g, value, lse, delta, cap, seen):
    """The slope by z, and the weights, of capped scores."""
    weight = tl.where(seen, tl.exp(score_of - lse), 0.0)
    bent = score_of / cap
    return weight * (tl.dot(g, tl.trans(value)) - delta) * (1.0 - bent * bent), weight


@triton.jit
def _back_queries(
    g, q, k, v, lse, delta, d_q, first_query, first_key, total, scale, cap, g_stride, q_stride, k_stride, v_stride,
    d_stride, SHARE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, WINDOW: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    piece, head = tl.program_id(1), tl.program_id(2)
    begin, base = tl.load(first_query + piece), tl.load(first_key + piece)
    queries, keys = tl.load(first_query + piece + 1) - begin, tl.load(first_key + piece + 1) - base
    low = tl.program_id(0) * M
    if low < queries:
        row, column = low + tl.arange(0, M), tl.arange(0, WIDE)
        position, inside = row + keys - queries, row < queries
        mine = _rows(q + begin.to(tl.int64) * q_stride + head * D, q_stride, row, queries, column, D)
        slope = _rows(g + begin.to(tl.int64) * g_stride + head * D, g_stride, row, queries, column, D)
        at_row = head.to(tl.int64) * total + begin + row
        sums = tl.load(lse + at_row, mask=inside, other=0.0)[:, None]
        along = tl.load(delta + at_row, mask=inside, other=0.0)[:, None]
        k_head = k + base.to(tl.int64) * k_stride + head // SHARE * D
        v_head = v + base.to(tl.int64) * v_stride + head // SHARE * D
        found = tl.zeros([M, WIDE], tl.float32)
        start = low * 0
        if WINDOW > 0:
            start = tl.maximum(low + keys - queries - WINDOW + 1, 0) // N * N
        for at in range(start, tl.minimum(low + M, queries) + keys - queries, N):
            key = at + tl.arange(0, N)
            theirs = _rows(k_head, k_stride, key, keys, column, D)
            value = _rows(v_head, v_stride, key, keys, column, D)
            score = capped(tl.dot(mine, tl.trans(theirs)) * scale, cap)
            seen = _seen(position, key, keys, WINDOW) & inside[:, None]
            by_z, _ = _slope(score, slope, value, sums, along, cap, seen)
            found += tl.dot(by_z.to(theirs.dtype), theirs)
        target = d_q + (begin + row).to(tl.int64)[:, None] * d_stride + head * D + column[None, :]
        tl.store(
            target, (found * scale).to(d_q.dtype.element_ty), mask=inside[:, None] & (column < D)[None, :]
        )


@triton.jit
def _back_keys(
    g, q, k, v, lse, delta, d_k, d_v, first_query, first_key, total, scale, cap, g_stride, q_stride, k_stride, v_stride,
    d_stride, SHARE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, WINDOW: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """N keys of a piece, and all queries that see them, of all heads that share them."""
    piece, shared = tl.program_id(1), tl.program_id(2)
    begin, base = tl.load(first_query + piece), tl.load(first_key + piece)
    queries, keys = tl.load(first_query + piece + 1) - begin, tl.load(first_key + piece + 1) - base
    low = tl.program_id(0) * N
    if low < keys:
        key, column = low + tl.arange(0, N), tl.arange(0, WIDE)
        theirs = _rows(k + base.to(tl.int64) * k_stride + shared * D, k_stride, key, keys, column, D)
        value = _rows(v + base.to(tl.int64) * v_stride + shared * D, v_stride, key, keys, column, D)
        by_key, by_value = tl.zeros([N, WIDE], tl.float32), tl.zeros([N, WIDE], tl.float32)
        shift = keys - queries
        first, last = tl.maximum(low - shift, 0) // M * M, queries
        if WINDOW > 0:
            last = tl.minimum(queries, low + N - 1 + WINDOW - shift)
        for member in range(SHARE):
            head = shared * SHARE + member
            q_head = q + begin.to(tl.int64) * q_stride + head * D
            g_head = g + begin.to(tl.int64) * g_stride + head * D
            for at in range(first, last, M):
                row = at + tl.arange(0, M)
                inside = row < queries
                mine = _rows(q_head, q_stride, row, queries, column, D)
                slope = _rows(g_head, g_stride, row, queries, column, D)
                at_row = head.to(tl.int64) * total + begin + row
                sums = tl.load(lse + at_row, mask=inside, other=0.0)[:, None]
                along = tl.load(delta + at_row, mask=inside, other=0.0)[:, None]
                score = capped(tl.dot(mine, tl.trans(theirs)) * scale, cap)
                seen = _seen(row + shift, key, keys, WINDOW) & inside[:, None]
                by_z, weight = _slope(score, slope, value, sums, along, cap, seen)
                by_value += tl.dot(tl.trans(weight.to(slope.dtype)), slope)
                by_key += tl.dot(tl.trans(by_z.to(mine.dtype)), mine)
        there = (key < keys)[:, None] & (column < D)[None, :]
        target = (base + key).to(tl.int64)[:, None] * d_stride + shared * D + column[None, :]
        tl.store(d_k + target, (by_key * scale).to(d_k.dtype.element_ty), mask=there)
        tl.store(d_v + target, by_value.to(d_v.dtype.element_ty), mask=there)


def _constants(heads: int, shared: int, size: int, focus: Focus) -> dict[str, Any]:
    wide = max(16, triton.next_power_of_2(size))
    return {
        "SHARE": heads // shared, "D": size, "WIDE": wide, "WINDOW": focus.window,
        "num_warps": 4 if wide <= 128 else 8, "num_stages": 2 if wide <= 128 else 1,
    }  # fmt: skip


def capped_forward(
    q: Tensor, k: Tensor, v: Tensor, first_query: Tensor, first_key: Tensor, longest: int, focus: Focus
) -> tuple[Tensor, Tensor]:
    """[N, heads, size] queries and [K, kv_heads, size] keys and values to [N, heads, size], and [heads, N] logsumexp.

    Piece i has queries `first_query[i] : first_query[i + 1]`, and keys likewise, causal from its end.
    """
    (total, heads, size), shared = q.shape, k.shape[1]
    out, lse = q.new_empty(q.shape), torch.empty(heads, total, device=q.device)
    scale = size**-0.5 if focus.scale is None else focus.scale
    m, n = 64, 64 if size <= 128 else 32
    _forward[(triton.cdiv(longest, m), len(first_query) - 1, heads)](
        q, k, v, out, lse, first_query, first_key, total, scale, focus.cap, q.stride(0), k.stride(0), v.stride(0),
        out.stride(0), **_constants(heads, shared, size, focus), M=m, N=n,
    )  # fmt: skip
    return out, lse


def capped_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    first_query: Tensor,
    first_key: Tensor,
    longest: tuple[int, int],
    focus: Focus,
) -> tuple[Tensor, Tensor, Tensor]:
    """Slopes by queries, keys and values of what `capped_forward` gave, from the slope by its output."""
    (total, heads, size), shared = q.shape, k.shape[1]
    scale = size**-0.5 if focus.scale is None else focus.scale
    delta = (g.float() * out.float()).sum(-1).t().contiguous()
    d_q, d_k, d_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    pieces, constants = len(first_query) - 1, _constants(heads, shared, size, focus)
    m, n = (64, 64) if size <= 64 else (32, 64) if size <= 128 else (32, 32)
    _back_queries[(triton.cdiv(longest[0], m), pieces, heads)](
        g, q, k, v, lse, delta, d_q, first_query, first_key, total, scale, focus.cap, g.stride(0), q.stride(0),
        k.stride(0), v.stride(0), d_q.stride(0), **constants, M=m, N=n,
    )  # fmt: skip
    _back_keys[(triton.cdiv(longest[1], n), pieces, shared)](
        g, q, k, v, lse, delta, d_k, d_v, first_query, first_key, total, scale, focus.cap, g.stride(0), q.stride(0),
        k.stride(0), v.stride(0), d_k.stride(0), **constants, M=m, N=n,
    )  # fmt: skip
    return d_q, d_k, d_v
