"""A decoder's blocks over packed rows: matrix products, attention, and one function, forward and backward, between two.

The same function as `Block.forward`, with fewer passes over memory and nothing kept that is cheap to compute again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from panoply.kernels import host, summing
from panoply.kernels.low_rank import Weight, matrix
from panoply.policies import low_rank
from panoply.policies.adjoining import adjoin
from panoply.policies.config_reading import ACTIVATE
from panoply.policies.packing import Packing, rotate_and_attend

if TYPE_CHECKING:
    from panoply.policies.decoder import Attention, Block, Decoder, Norm

Rotation = tuple[Tensor, Tensor]


def _kernels(device: torch.device) -> ModuleType:
    if device.type == "cpu":
        return host
    return import_module("panoply.kernels.train")


def run_blocks(
    model: Decoder,
    x: Tensor,
    rotations: Sequence[Rotation],
    packing: Packing,
    taps: Collection[int] = (),
) -> tuple[Tensor, dict[int, Tensor]]:
    """[1, N, width] embeddings to final states after the norm, and the states after `taps` blocks."""
    flat = [(cos[0, :, 0].contiguous(), sin[0, :, 0].contiguous()) for cos, sin in rotations]
    turns = [host.angles(*pair) for pair in flat] if x.device.type == "cpu" else flat
    total, change = x[0], None
    tapped = {0: x} if 0 in taps else {}
    recompute = model.checkpointing and torch.is_grad_enabled()
    for depth, block in enumerate(model.model.layers, start=1):
        turn = turns[block.self_attn.table]  # type: ignore[union-attr,index]
        if recompute:
            total, change = checkpoint(_block, block, total, change, *turn, packing, use_reentrant=False)
        else:
            total, change = _block(block, total, change, *turn, packing)  # type: ignore[arg-type]
        if depth in taps:
            tapped[depth] = _add_norm(total, change, None, block)[0][None]  # type: ignore[arg-type]
    _, normed = _add_norm(total, change, model.model.norm, block)  # type: ignore[arg-type]
    normed = model.divided(normed)
    if model.config.layers in taps:
        tapped[model.config.layers] = normed[None]
    return normed[None], tapped


def _projected(attention: Attention, y: Tensor) -> tuple[Tensor, int]:
    """[N, heads + 2 · kv_heads, size] queries, keys and values, not yet rotated, and how many heads ask."""
    size, heads, shared = attention.head_dim, attention.heads, attention.kv_heads
    products = _products(y, attention.inputs)
    if attention.qk_norm == "whole":
        q, k, v = torch.split(products, [heads * size, shared * size, shared * size], dim=1)
        products = torch.cat([attention.q_norm(q), attention.k_norm(k), v], dim=1)
    qkv = products.view(len(y), -1, size)
    if attention.qk_norm == "head":
        q, k, v = torch.split(qkv, [heads, shared, shared], dim=1)
        qkv = torch.cat([attention.q_norm(q), attention.k_norm(k), v], dim=1)
    return qkv, heads


def _add_norm(total: Tensor, change: Tensor | None, norm: Norm | None, block: Block) -> tuple[Tensor, Tensor]:
    """The stream after a change, and its norm; without a norm the stream itself."""
    scale = block.residual_scale
    if change is not None and scale != 1.0:
        change = change * scale
    if norm is None:
        total = total if change is None else total + change
        return total, total
    kernels = _kernels(total.device)
    found: tuple[Tensor, Tensor] = kernels.add_norm(total, change, norm.weight, norm.eps, norm.offset)
    return found


def _block(
    block: Block,
    total: Tensor,
    change: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    packing: Packing,
) -> tuple[Tensor, Tensor]:
    """The stream and what is to be added to it, before a block and after it."""
    attention = block.self_attn
    before, after, before_mlp, after_mlp = block.norms
    total, y = _add_norm(total, change, before, block)
    qkv, heads = _projected(attention, y)
    mixed = rotate_and_attend(
        qkv, (cos, sin), heads, packing, attention.focus, attention.interleaved, attention.sinks
    ).flatten(1)
    added = _products(mixed, [attention.o_proj])
    total, y = _add_norm(total, _normed(after, added), before_mlp, block)
    return total, _normed(after_mlp, _fed(block.mlp, y))


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    """What a layout norms before it is added to the stream."""
    if norm is None:
        return x
    found: Tensor = _kernels(x.device).add_norm(x, None, norm.weight, norm.eps, norm.offset)[1]
    return found


def _fed(mlp: Any, y: Tensor) -> Tensor:
    """[N, width] through the feed-forward layer: fused where it is gated, as it is of any other kind."""
    inputs = getattr(mlp, "inputs", None)
    if inputs is None:
        whole: Tensor = mlp(y)
        return whole
    both, down, kind = _products(y, inputs), mlp.down_proj, mlp.activation
    if type(down) in (*low_rank.PLAIN, *low_rank.FEW) and down.bias is None:
        stack = low_rank.stacked([down]) if isinstance(down, low_rank.LowRank) else None
        weight = low_rank.in_few_bits([down]) if isinstance(down, low_rank.FEW) else down.weight
        gelu = () if kind == "silu" else (True,)
        added: Tensor = _kernels(y.device).gated_down(both, weight, stack, *gelu)
        return added
    gate, up = both.chunk(2, dim=1)
    found: Tensor = down(ACTIVATE[kind](gate) * up)
    return found


def _products(x: Tensor, layers: list[nn.Linear]) -> Tensor:
    """The layers' outputs side by side: one product where they are plain, so that their weights can be joined."""
    if any(type(layer) not in (*low_rank.PLAIN, *low_rank.FEW) for layer in layers):
        return torch.cat([layer(x) for layer in layers], dim=1)
    weight, bias = one_matrix(layers)
    if not torch.is_grad_enabled():
        return (
            nn.functional.linear(x, weight, bias) if isinstance(weight, Tensor) else weight.product(x, bias)
        )
    if any(isinstance(layer, low_rank.LowRank) for layer in layers):
        return low_rank.product(x, weight, bias, low_rank.stacked(layers))
    if not isinstance(weight, Tensor) or not any(layer.weight.requires_grad for layer in layers):
        return nn.functional.linear(x, matrix(weight), bias)
    biases = [] if bias is None else [layer.bias for layer in layers]
    return product(x, weight, bias, [layer.weight for layer in layers], biases)


# ------------------------------------------------------------------ layers that share their input


def one_matrix(layers: Sequence[Any]) -> tuple[Weight, Tensor | None]:
    """`joined`, or its few bits where there are any."""
    if not any(isinstance(layer, low_rank.FEW) for layer in layers):
        return joined(layers)
    biases = [layer.bias for layer in layers]
    return low_rank.in_few_bits(layers), None if biases[0] is None else adjoin(biases)


_joints: WeakKeyDictionary[nn.Linear, tuple[tuple[object, ...], Tensor, Tensor | None]] = WeakKeyDictionary()
"""By the first of some layers: where all of them lay when they were joined, and what they were joined to."""


def joined(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The layers' weights and biases as one tensor each, of which the layers' own become views.

    That is done once; from then on an update of either is an update of both.
    """
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    known = _joints.get(layers[0])
    if known is None or known[0] != _lying(weights, biases):
        weight = adjoin(weights)
        bias = None if biases[0] is None else adjoin(biases)
        known = _lying(weights, biases), weight, bias
        _joints[layers[0]] = known
    return known[1:]


def _lying(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[object, ...]:
    return weights[0].dtype, *(x.data_ptr() for x in (*weights, *biases) if x is not None)


class _Product(torch.autograd.Function):
    """One product for layers that share their input: `whole` is a tensor over all their weights, which follow."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, whole: Tensor, bias: Tensor | None, biases: int, *parts: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, whole)
        ctx.lengths, ctx.biases = [len(p) for p in parts[biases:]], biases
        ctx.sums = summing.sums_of(parts[biases:]) if summing.noted else None
        ctx.bias_sums = summing.sums_of(parts[:biases]) if ctx.sums else None
        return torch.nn.functional.linear(x, whole, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        x, whole = ctx.saved_tensors
        on_biases: Sequence[Tensor | None] = [None] * ctx.biases
        on_weights: Sequence[Tensor | None] = [None] * len(ctx.lengths)
        if ctx.biases:
            wide = _kernels(g.device).column_sums(g)
            if ctx.bias_sums is not None:
                summing.sum_parts(ctx.bias_sums, wide)
            else:
                on_biases = torch.split(wide.to(g.dtype), ctx.lengths)
        if ctx.sums is not None:
            summing.sum_product(ctx.sums, g.t(), x)
        else:
            on_weights = torch.split(g.t() @ x, ctx.lengths)
        return g @ whole, None, None, None, *on_biases, *on_weights


def product(
    x: Tensor, whole: Tensor, bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """x · wholeᵀ + bias, where `whole` and `bias` lie over `weights` and `biases`, which get the gradients."""
    found: Tensor = _Product.apply(x, whole, bias, len(biases), *biases, *weights)  # type: ignore[no-untyped-call]
    return found
