"""What lies between matrix products on a CPU, compiled by Numba where it is installed: one pass over memory each.

float32 only; `host.py` and `hosted.py` say in torch what these compute, and are used without Numba. The first run on a
machine compiles for some seconds, later ones read the result from Numba's cache.
"""
# mypy: disable-error-code="import-not-found,no-untyped-def,untyped-decorator,no-untyped-call,call-arg"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

_f = np.float32
_compiled = njit(
    cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz", "arcp", "nnan"}
)

# ------------------------------------------------------------------ numbers


@intrinsic
def _from_bits(typing: Any, bits: Any) -> Any:
    """The float32 whose bits these are."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@njit(cache=True, nogil=True, fastmath={"contract"})
def _exp(x):
    """e^x, for x cut to −87…88, to two roundings, in arithmetic done for several x at once.

    It is 2^n · e^r with |r| ≤ log 2 / 2; n · log 2 is taken away in two parts, the first of which is exact, so nothing
    here may be reordered.
    """
    x = min(max(x, _f(-87.0)), _f(88.0))
    n = np.floor(x * _f(1.44269504) + _f(0.5))
    r = (x - n * _f(0.693359375)) - n * _f(-2.12194440e-4)
    p = _f(1.0 / 5040.0)
    for inverse in (720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0):
        p = p * r + _f(1.0) / _f(inverse)
    return p * _from_bits(np.int32((np.int32(n) + 127) << 23))


# ------------------------------------------------------------------ learning


@_compiled
def add_norm(x, change, weight, eps, total, normed, scale):
    """total = x + change (or x), scale = 1 / √(mean total² + eps), normed = total · scale · weight."""
    width = x.shape[1]
    for n in range(x.shape[0]):
        squares = _f(0.0)
        for i in range(width):
            t = x[n, i] if change is None else x[n, i] + change[n, i]
            total[n, i] = t
            squares += t * t
        s = _f(1.0) / np.sqrt(squares / _f(width) + _f(eps))
        scale[n] = s
        for i in range(width):
            normed[n, i] = total[n, i] * s * weight[i]


@_compiled
def add_norm_back(total, scale, weight, g, g_total, out, on_weight):
    """The slope by `total` (and so by `x` and `change`), of both results, and the one by `weight`."""
    width = total.shape[1]
    for n in range(total.shape[0]):
        s, along = scale[n], _f(0.0)
        for i in range(width):
            y = g[n, i] * total[n, i] * s
            on_weight[i] += y
            along += y * weight[i]
        share = along / _f(width) * s * s
        for i in range(width):
            slope = g[n, i] * weight[i] * s - total[n, i] * share
            out[n, i] = slope if g_total is None else slope + g_total[n, i]


@_compiled
def turn(x, heads, cos, sin, sign):
    """Rotary positions on the first heads of [N, heads, size], in place, by angles as `host.angles` gives them."""
    half = x.shape[2] // 2
    for n in range(x.shape[0]):
        for h in range(heads):
            for i in range(half):
                a, b = x[n, h, i], x[n, h, half + i]
                c, s = cos[n, 0, i], _f(sign) * sin[n, 0, half + i]
                x[n, h, i], x[n, h, half + i] = a * c - b * s, b * c + a * s


@_compiled
def gated(both, wide):
    """silu(gate) · up of [N, gates and ups]."""
    inner = wide.shape[1]
    for n in range(both.shape[0]):
        for i in range(inner):
            gate = both[n, i]
            wide[n, i] = gate / (_f(1.0) + _exp(-gate)) * both[n, inner + i]


@_compiled
def gated_back(both, slope, g_both, wide):
    """The slope by `both`, from that by silu(gate) · up, which is computed again."""
    inner = wide.shape[1]
    for n in range(both.shape[0]):
        for i in range(inner):
            gate, up, d = both[n, i], both[n, inner + i], slope[n, i]
            share = _f(1.0) / (_f(1.0) + _exp(-gate))
            silu = gate * share
            wide[n, i] = silu * up
            g_both[n, i] = d * up * (share + silu * (_f(1.0) - share))
            g_both[n, inner + i] = d * silu


@_compiled
def unlay(token, before, g_query, g_key, g_value, out):
    """Add slopes by the queries, keys and values of padded pieces to those by their tokens, [N, heads, size]."""
    pieces, width, shared, size = g_key.shape
    heads = g_query.shape[2]
    for piece in range(pieces):
        for place in range(width):
            at = token[piece * width + place]
            if place >= before:
                for h in range(heads):
                    for i in range(size):
                        out[at, h, i] += g_query[piece, place - before, h, i]
            for h in range(shared):
                for i in range(size):
                    out[at, heads + h, i] += g_key[piece, place, h, i]
                    out[at, heads + shared + h, i] += g_value[piece, place, h, i]


# ------------------------------------------------------------------ sampling


@_compiled
def place(qkv, heads, cos, sin, position, keys, values):
    """Rotate the newest token's queries where they are, and its keys into the cache, with the values.

    A cache is [rows, kv_heads, capacity, size].
    """
    half, kv_heads = qkv.shape[2] // 2, keys.shape[1]
    for row in range(qkv.shape[0]):
        at = position[row]
        for h in range(heads + kv_heads):
            for i in range(half):
                a, b = qkv[row, h, i], qkv[row, h, half + i]
                c, s = cos[at, 0, i], sin[at, 0, half + i]
                if h < heads:
                    qkv[row, h, i], qkv[row, h, half + i] = a * c - b * s, b * c + a * s
                else:
                    key = keys[row, h - heads, at]
                    key[i], key[half + i] = a * c - b * s, b * c + a * s
        for h in range(kv_heads):
            values[row, h, at, :] = qkv[row, heads + kv_heads + h]


@_compiled
def draw(logits, uniform, action, logp, entropy):
    """A token a row by `uniform`, its log-probability, and the distribution's entropy; see `sampling.invert`."""
    vocabulary = logits.shape[1]
    p = np.empty(vocabulary, _f)
    for row in range(logits.shape[0]):
        most = logits[row, 0]
        for i in range(vocabulary):
            most = max(most, logits[row, i])
        total, mean = 0.0, 0.0
        for i in range(vocabulary):
            p[i] = _exp(logits[row, i] - most) if logits[row, i] > -np.inf else _f(0.0)
        for i in range(vocabulary):
            total += p[i]
            mean += np.float64(p[i]) * max(logits[row, i] - most, _f(-87.0))
        normaliser = np.log(total)
        target, reached, found = uniform[row] * total, 0.0, 0
        for i in range(vocabulary):
            reached += p[i]
            if p[i] > _f(0.0):
                found = i
                if reached > target:
                    break
        action[row] = found
        logp[row] = logits[row, found] - most - normaliser
        entropy[row] = normaliser - mean / total
