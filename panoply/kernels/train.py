"""What lies between the matrix products of a block while learning, forward and backward, each in one kernel."""
# mypy: disable-error-code="import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from panoply.kernels.decode import _add_norm


@triton.jit
def _norm_back(x, weight, g, more, out, partial, rows, width, eps, MORE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows in strides; each program sums the weight's gradient over its own."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        at = row * width + column
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + eps)
        normed = value * scale
        total += slope * normed
        slope = slope * gain
        back = scale * (slope - normed * (tl.sum(slope * normed, axis=0) / width))
        if MORE:
            back += tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, back.to(out.dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(0) * width + column, total, mask=inside)


class _AddNorm(torch.autograd.Function):
    """(x + change, RMSNorm of it)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, change: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        rows, width = x.shape
        total = x if change is None else x + change
        normed = torch.empty_like(total)
        block = triton.next_power_of_2(width)
        warps = 4 if block <= 2048 else 8
        _add_norm[(rows,)](total, total, weight, normed, width, eps, False, block, num_warps=warps)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.added = eps, change is not None
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_total: Tensor | None, g: Tensor | None) -> Any:
        x, weight = ctx.saved_tensors
        if g is None:
            return g_total, g_total if ctx.added else None, None, None
        rows, width = x.shape
        programs = min(rows, 1024)
        out, partial = torch.empty_like(x), torch.empty(programs, width, dtype=torch.float32, device=x.device)
        more = g if g_total is None else g_total.contiguous()
        block = triton.next_power_of_2(width)
        _norm_back[(programs,)](
            x, weight, g.contiguous(), more, out, partial, rows, width, ctx.eps, g_total is not None, block,
            num_warps=4 if block <= 2048 else 8,
        )  # fmt: skip
        return out, out if ctx.added else None, partial.sum(0).to(weight.dtype), None


def add_norm(x: Tensor, change: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[N, width] x + change, and its RMSNorm."""
    found: tuple[Tensor, Tensor] = _AddNorm.apply(x, change, weight, eps)
    return found


@triton.jit
def _turn(x, cos, sin, out, sign, heads, D: tl.constexpr, PAD: tl.constexpr):
    row, head, column = tl.program_id(0), tl.arange(0, PAD)[:, None], tl.arange(0, D // 2)[None, :]
    here = head < heads
    cosine = tl.load(cos + row * (D // 2) + column).to(tl.float32)
    sine = tl.load(sin + row * (D // 2) + column).to(tl.float32) * sign
    at = row.to(tl.int64) * heads * D + head * D + column
    first = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    second = tl.load(x + at + D // 2, mask=here, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + at, (first * cosine - second * sine).to(kind), mask=here)
    tl.store(out + at + D // 2, (second * cosine + first * sine).to(kind), mask=here)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    rows, heads, size = x.shape
    x = x.contiguous()
    out = torch.empty_like(x)
    _turn[(rows,)](x, cos, sin, out, sign, heads, size, triton.next_power_of_2(heads), num_warps=2)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _turned(g, cos, sin, -1.0), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on [N, heads, size], by [N, size / 2] angles. The way back is the turn the other way."""
    found: Tensor = _Rotate.apply(x, cos, sin)
    return found


@triton.jit
def _gate(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    value = x / (1.0 + tl.exp(-x)) * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_back(gate, up, g, out, g_gate, g_up, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-x))
    silu = x * share
    kind = out.dtype.element_ty
    tl.store(out + at, (silu * y).to(kind), mask=inside)
    tl.store(g_up + at, (slope * silu).to(kind), mask=inside)
    tl.store(g_gate + at, (slope * y * share * (1.0 + x * (1.0 - share))).to(kind), mask=inside)


class _GatedDown(torch.autograd.Function):
    """(silu(gate) · up) Wᵀ. The product in brackets, the widest tensor of a block, is computed again, not kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        wide = torch.empty_like(gate)
        _gate[(triton.cdiv(gate.numel(), 2048),)](gate, up, wide, gate.numel(), 2048, num_warps=8)
        return wide @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        gate, up, weight = ctx.saved_tensors
        slope = g @ weight
        wide, g_gate, g_up = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(up)
        grid = (triton.cdiv(gate.numel(), 2048),)
        _gate_back[grid](gate, up, slope, wide, g_gate, g_up, gate.numel(), 2048, num_warps=8)
        return g_gate, g_up, g.t() @ wide if ctx.needs_input_grad[2] else None


def gated_down(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """[N, inner] gate and up to [N, width]."""
    found: Tensor = _GatedDown.apply(gate, up, weight)
    return found
