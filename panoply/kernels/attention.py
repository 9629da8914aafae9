"""Attention over packed rows of unequal length, forward and backward, for learning.

A score is s = scale · qᵀk, or with a cap c it is c · tanh(scale · qᵀk / c), of which the slope is 1 − (s / c)². Nothing
of [queries, keys] is kept: with the logarithm of each query's sum, weights are computed again where a gradient needs
them. Sequences of learning are short, a few hundred tokens after a shared prompt, so that most of a program's blocks
lie away from the diagonal and need no mask: each loop has a part with and a part without. Keys of a prefix are read
where the prefix stands, by all of its suffixes.
"""
# mypy: disable-error-code="import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from panoply.kernels.decode import capped
from panoply.kernels.launching import Often, parts_of, power_above

if TYPE_CHECKING:
    from panoply.policies.attention import Focus
    from panoply.policies.packing import Packing

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(start, stride, row, there, column, D: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr):
    """[rows, WIDE] of a head, zeros where there is nothing; WHOLE where all rows are there."""
    at = start + row.to(tl.int64)[:, None] * stride + column[None, :]
    if WHOLE and D == WIDE:
        return tl.load(at)
    if WHOLE:
        return tl.load(at, mask=(column < D)[None, :], other=0.0)
    return tl.load(at, mask=there[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def _tokens(key, shift, prefix, begin):
    """The tokens of a piece's keys: of `shift` that stand at its prefix, then of its own."""
    return tl.where(key < shift, prefix + key, begin - shift + key)


@triton.jit
def _scores(product, scale, cap, CAPPED: tl.constexpr):
    """Scores by base 2, so that a weight is 2 to the power of them."""
    if CAPPED:
        return capped(product * scale, cap) * LOG2E
    return product * (scale * LOG2E)


@triton.jit
def _seen(query, key, count, WINDOW: tl.constexpr):
    """Which keys, by position in their piece, are seen from queries at positions; the two broadcast."""
    seen = (key <= query) & (key < count)
    if WINDOW > 0:
        seen = seen & (key > query - WINDOW)
    return seen


@triton.jit
def _look(
    best, sums, mixed, mine, position, k_head, v_head, stride, at, keys, shift, prefix, begin, scale, cap, column,
    D: tl.constexpr, WIDE: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Go on with N keys more; ALL where every query sees all of them."""
    key = at + tl.arange(0, N)
    token = _tokens(key, shift, prefix, begin)
    theirs = _rows(k_head, stride, token, key < keys, column, D, WIDE, ALL)
    score = _scores(tl.dot(mine, tl.trans(theirs)), scale, cap, CAPPED)
    if not ALL:
        score = tl.where(_seen(position[:, None], key[None, :], keys, WINDOW), score, float("-inf"))
    higher = tl.maximum(best, tl.max(score, axis=1))
    if not ALL:
        higher = tl.maximum(higher, -1e30)
    weight = tl.exp2(score - higher[:, None])
    fade = tl.exp2(best - higher)
    sums = sums * fade + tl.sum(weight, axis=1)
    value = _rows(v_head, stride, token, key < keys, column, D, WIDE, ALL)
    mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None])
    return higher, sums, mixed


@triton.jit
def _bounds(low, queries, keys, WINDOW: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Of M queries: the first key that any sees, from which on a block may be masked, and one past the last."""
    shift = keys - queries
    start, whole = low * 0, (low + shift + 1) // N * N
    if WINDOW > 0:
        start = tl.maximum(low + shift - WINDOW + 1, 0) // N * N
        whole = start
    return start, whole, tl.minimum(low + M, queries) + shift


@triton.jit(do_not_specialize=["total"])
def _forward(
    q, k, v, out, lse, first_query, first_key, prefixes, total, scale, cap, stride, out_stride,
    SHARE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One head's M queries of a piece against all keys they see; the last ones, which see most, come first."""
    head, piece = tl.program_id(0), tl.program_id(1)
    low = (tl.num_programs(2) - 1 - tl.program_id(2)) * M
    begin, base = tl.load(first_query + piece), tl.load(first_key + piece)
    queries, keys = tl.load(first_query + piece + 1) - begin, tl.load(first_key + piece + 1) - base
    if low < queries:
        row, column = low + tl.arange(0, M), tl.arange(0, WIDE)
        shift, prefix = keys - queries, tl.load(prefixes + piece)
        position = row + shift
        mine = _rows(q + head * D, stride, begin + row, row < queries, column, D, WIDE, False)
        k_head, v_head = k + head // SHARE * D, v + head // SHARE * D
        best = tl.full([M], float("-inf"), tl.float32)
        sums = tl.zeros([M], tl.float32)
        mixed = tl.zeros([M, WIDE], tl.float32)
        start, whole, end = _bounds(low, queries, keys, WINDOW, M, N)
        for at in range(start, whole, N):
            best, sums, mixed = _look(
                best, sums, mixed, mine, position, k_head, v_head, stride, at, keys, shift, prefix, begin, scale, cap,
                column, D, WIDE, CAPPED, WINDOW, N, True,
            )  # fmt: skip
        for at in range(whole, end, N):
            best, sums, mixed = _look(
                best, sums, mixed, mine, position, k_head, v_head, stride, at, keys, shift, prefix, begin, scale, cap,
                column, D, WIDE, CAPPED, WINDOW, N, False,
            )  # fmt: skip
        inside = row < queries
        sums = tl.where(inside, sums, 1.0)
        target = out + (begin + row).to(tl.int64)[:, None] * out_stride + head * D + column[None, :]
        there = inside[:, None] & (column < D)[None, :]
        tl.store(target, (mixed / sums[:, None]).to(out.dtype.element_ty), mask=there)
        at_row = head.to(tl.int64) * total + begin + row
        tl.store(lse + at_row, (best + tl.log2(sums)) / LOG2E, mask=inside)


@triton.jit
def _bend(slope, score, cap, CAPPED: tl.constexpr):
    """The slope by a score as the slope by the product under it, but for `scale`."""
    if CAPPED:
        bent = score / (cap * LOG2E)
        slope = slope * (1.0 - bent * bent)
    return slope


@triton.jit
def _back_to_queries(
    found, mine, slope, sums, along, position, k_head, v_head, stride, at, keys, shift, prefix, begin, scale, cap,
    column,
    D: tl.constexpr, WIDE: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    key = at + tl.arange(0, N)
    token = _tokens(key, shift, prefix, begin)
    theirs = _rows(k_head, stride, token, key < keys, column, D, WIDE, ALL)
    value = _rows(v_head, stride, token, key < keys, column, D, WIDE, ALL)
    score = _scores(tl.dot(mine, tl.trans(theirs)), scale, cap, CAPPED)
    weight = tl.exp2(score - sums[:, None])
    if not ALL:
        weight = tl.where(_seen(position[:, None], key[None, :], keys, WINDOW), weight, 0.0)
    by_score = _bend(weight * (tl.dot(slope, tl.trans(value)) - along[:, None]), score, cap, CAPPED)
    return tl.dot(by_score.to(theirs.dtype), theirs, found)


@triton.jit(do_not_specialize=["total"])
def _queries_back(
    g, q, k, v, out, lse, delta, d_q, first_query, first_key, prefixes, total, scale, cap, stride, out_stride, d_stride,
    SHARE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Slopes by M queries, and `delta`, Σ g · out of each, which the slopes by keys need as well."""
    head, piece = tl.program_id(0), tl.program_id(1)
    low = (tl.num_programs(2) - 1 - tl.program_id(2)) * M
    begin, base = tl.load(first_query + piece), tl.load(first_key + piece)
    queries, keys = tl.load(first_query + piece + 1) - begin, tl.load(first_key + piece + 1) - base
    if low < queries:
        row, column = low + tl.arange(0, M), tl.arange(0, WIDE)
        shift, prefix = keys - queries, tl.load(prefixes + piece)
        position, inside = row + shift, row < queries
        mine = _rows(q + head * D, stride, begin + row, inside, column, D, WIDE, False)
        slope = _rows(g + head * D, out_stride, begin + row, inside, column, D, WIDE, False)
        gave = _rows(out + head * D, out_stride, begin + row, inside, column, D, WIDE, False)
        at_row = head.to(tl.int64) * total + begin + row
        sums = tl.load(lse + at_row, mask=inside, other=0.0) * LOG2E
        along = tl.sum(slope.to(tl.float32) * gave.to(tl.float32), axis=1)
        tl.store(delta + at_row, along, mask=inside)
        k_head, v_head = k + head // SHARE * D, v + head // SHARE * D
        found = tl.zeros([M, WIDE], tl.float32)
        start, whole, end = _bounds(low, queries, keys, WINDOW, M, N)
        for at in range(start, whole, N):
            found = _back_to_queries(
                found, mine, slope, sums, along, position, k_head, v_head, stride, at, keys, shift, prefix, begin,
                scale, cap, column, D, WIDE, CAPPED, WINDOW, N, True,
            )  # fmt: skip
        for at in range(whole, end, N):
            found = _back_to_queries(
                found, mine, slope, sums, along, position, k_head, v_head, stride, at, keys, shift, prefix, begin,
                scale, cap, column, D, WIDE, CAPPED, WINDOW, N, False,
            )  # fmt: skip
        target = d_q + (begin + row).to(tl.int64)[:, None] * d_stride + head * D + column[None, :]
        there = inside[:, None] & (column < D)[None, :]
        tl.store(target, (found * scale).to(d_q.dtype.element_ty), mask=there)


@triton.jit
def _back_to_keys(
    by_key, by_value, theirs, value, key, q_head, g_head, lse_head, delta_head, stride, g_stride, at, begin, queries,
    keys, scale, cap, column,
    D: tl.constexpr, WIDE: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr, M: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """What is past the last query is 0, and so is its slope: it adds nothing."""
    row = at + tl.arange(0, M)
    inside = row < queries
    mine = _rows(q_head, stride, begin + row, inside, column, D, WIDE, False)
    slope = _rows(g_head, g_stride, begin + row, inside, column, D, WIDE, False)
    sums = tl.load(lse_head + row, mask=inside, other=0.0) * LOG2E
    along = tl.load(delta_head + row, mask=inside, other=0.0)
    score = _scores(tl.dot(theirs, tl.trans(mine)), scale, cap, CAPPED)
    weight = tl.exp2(score - sums[None, :])
    if not ALL:
        seen = _seen((row + keys - queries)[None, :], key[:, None], keys, WINDOW)
        weight = tl.where(seen & inside[None, :], weight, 0.0)
    by_value = tl.dot(weight.to(slope.dtype), slope, by_value)
    by_score = _bend(weight * (tl.dot(value, tl.trans(slope)) - along[None, :]), score, cap, CAPPED)
    return tl.dot(by_score.to(mine.dtype), mine, by_key), by_value


@triton.jit(do_not_specialize=["total"])
def _keys_back(
    g, q, k, v, lse, delta, d_k, d_v, first_query, first_key, prefixes, total, scale, cap, stride, g_stride, d_stride,
    SHARE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Slopes by N keys and values of a piece from one head's queries; the first keys, which most see, come first."""
    head, piece = tl.program_id(0), tl.program_id(1)
    begin, base = tl.load(first_query + piece), tl.load(first_key + piece)
    queries, keys = tl.load(first_query + piece + 1) - begin, tl.load(first_key + piece + 1) - base
    low = tl.program_id(2) * N
    if low < keys:
        key, column, shift = low + tl.arange(0, N), tl.arange(0, WIDE), keys - queries
        token = _tokens(key, shift, tl.load(prefixes + piece), begin)
        theirs = _rows(k + head // SHARE * D, stride, token, key < keys, column, D, WIDE, False)
        value = _rows(v + head // SHARE * D, stride, token, key < keys, column, D, WIDE, False)
        by_key, by_value = tl.zeros([N, WIDE], tl.float32), tl.zeros([N, WIDE], tl.float32)
        q_head, g_head = q + head * D, g + head * D
        of_head = head.to(tl.int64) * total + begin
        first, last = tl.maximum(low - shift, 0) // M * M, queries
        whole = tl.minimum((tl.maximum(low + N - 1 - shift, 0) + M - 1) // M * M, last)
        if WINDOW > 0:
            last = tl.minimum(queries, low + N - 1 + WINDOW - shift)
            whole = last
        for at in range(first, whole, M):
            by_key, by_value = _back_to_keys(
                by_key, by_value, theirs, value, key, q_head, g_head, lse + of_head, delta + of_head, stride,
                g_stride, at, begin, queries, keys, scale, cap, column, D, WIDE, CAPPED, WINDOW, M, False,
            )  # fmt: skip
        for at in range(whole, last, M):
            by_key, by_value = _back_to_keys(
                by_key, by_value, theirs, value, key, q_head, g_head, lse + of_head, delta + of_head, stride,
                g_stride, at, begin, queries, keys, scale, cap, column, D, WIDE, CAPPED, WINDOW, M, True,
            )  # fmt: skip
        there = (key < keys)[:, None] & (column < D)[None, :]
        target = (base + key).to(tl.int64)[:, None] * d_stride + head * D + column[None, :]
        tl.store(d_k + target, (by_key * scale).to(d_k.dtype.element_ty), mask=there)
        tl.store(d_v + target, by_value.to(d_v.dtype.element_ty), mask=there)


_FORWARD, _QUERIES_BACK, _KEYS_BACK = Often(_forward), Often(_queries_back), Often(_keys_back)


class Tile(NamedTuple):
    """Queries and keys of a block, and how a program works on it."""

    m: int
    n: int
    warps: int
    stages: int


TILES: dict[int, tuple[Tile, Tile, Tile]] = {
    64: (Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(32, 64, 4, 2)),
    128: (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
    256: (Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
}
"""By the padded size of a head: of the forward pass, of slopes by queries, and by keys."""


OWN_SIZE = 128
"""The largest heads for which these kernels are quicker than torch's."""


def suits(size: int, focus: Focus) -> bool:
    """Whether these kernels are to be taken, and not torch's, which know no cap."""
    return focus.cap > 0 or size <= OWN_SIZE


def _tiles(wide: int) -> tuple[Tile, Tile, Tile]:
    return TILES[max(64, wide)]


def _asked(qkv: Tensor, heads: int, focus: Focus) -> tuple[float, tuple[Any, ...]]:
    """The scale of scores, and a kernel's constants but for its tile."""
    size, shared = qkv.shape[2], (qkv.shape[1] - heads) // 2
    scale = size**-0.5 if focus.scale is None else focus.scale
    return scale, (heads // shared, size, max(16, power_above(size)), focus.window, focus.cap > 0)


def forward(qkv: Tensor, heads: int, packing: Packing, focus: Focus) -> tuple[Tensor, Tensor]:
    """[N, heads + 2 · kv_heads, size] queries, keys and values to [N, heads, size], and [heads, N] logsumexp."""
    total, _, size = qkv.shape
    out, lse = qkv.new_empty(total, heads, size), torch.empty(heads, total, device=qkv.device)
    scale, constants = _asked(qkv, heads, focus)
    tile = _tiles(constants[2])[0]
    strides = qkv.stride(0), out.stride(0)
    _FORWARD(
        (heads, packing.pieces, parts_of(packing.longest[0], tile.m)), (qkv.dtype, qkv.device, strides, constants),
        *_split(qkv, heads), out, lse, packing.queries, packing.keys, packing.prefixes, total, scale, focus.cap,
        *strides, *constants, tile.m, tile.n, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


def backward(
    g: Tensor, qkv: Tensor, heads: int, out: Tensor, lse: Tensor, packing: Packing, focus: Focus, d_q: Tensor
) -> tuple[Tensor, Tensor]:
    """Slopes by queries, keys and values of what `forward` gave, from the slope by its output.

    Those by queries are written into `d_q`. Those by keys and values are [K, heads, size]: of every key in a packing's
    list and of every head by itself, for whoever sums them with others.
    """
    total, _, size = qkv.shape
    scale, constants = _asked(qkv, heads, focus)
    _, by_queries, by_keys = _tiles(constants[2])
    delta = torch.empty_like(lse)
    d_k, d_v = (qkv.new_empty(len(packing.source), heads, size) for _ in range(2))
    given = g, *_split(qkv, heads)
    rest = (
        packing.queries,
        packing.keys,
        packing.prefixes,
        total,
        scale,
        focus.cap,
        qkv.stride(0),
        out.stride(0),
    )
    kind = (qkv.dtype, qkv.device, qkv.stride(0), out.stride(0), d_q.stride(0), constants)
    _QUERIES_BACK(
        (heads, packing.pieces, parts_of(packing.longest[0], by_queries.m)), kind,
        *given, out, lse, delta, d_q, *rest, d_q.stride(0), *constants, by_queries.m, by_queries.n,
        num_warps=by_queries.warps, num_stages=by_queries.stages,
    )  # fmt: skip
    _KEYS_BACK(
        (heads, packing.pieces, parts_of(packing.longest[1], by_keys.n)), kind,
        *given, lse, delta, d_k, d_v, *rest, d_k.stride(0), *constants, by_keys.m, by_keys.n,
        num_warps=by_keys.warps, num_stages=by_keys.stages,
    )  # fmt: skip
    return d_k, d_v


def _split(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    shared = (qkv.shape[1] - heads) // 2
    return qkv[:, :heads], qkv[:, heads : heads + shared], qkv[:, heads + shared :]
