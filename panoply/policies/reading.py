"""Reading prompts on a GPU: blocks as plain tensors, and a pass through them that keeps keys and values alone.

The same functions as those of `fused.py`, called without modules and autograd: a prompt is short, and to ask them takes
longer than the work itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from panoply.experience import moved
from panoply.kernels.low_rank import Weight, linear
from panoply.policies.attention import Focus
from panoply.policies.decoder import Block, Decoder
from panoply.policies.experts import Mixture
from panoply.policies.fused import one_matrix
from panoply.policies.low_rank import PLAIN
from panoply.policies.packing import attended, pack

if TYPE_CHECKING:
    from panoply.kernels.decode import Stream
    from panoply.policies.decoder import FeedForward

Matrix = tuple[Weight, Tensor | None]
"""A weight and a bias, of layers that share their input."""


def product(x: Tensor, by: Matrix) -> Tensor:
    return linear(x, *by)


@dataclass(frozen=True)
class Gated:
    """The weights of a feed-forward layer."""

    both: Matrix
    gelu: bool
    down: Matrix

    @classmethod
    def of(cls, mlp: FeedForward) -> Gated:
        return cls(one_matrix(mlp.inputs), mlp.activation != "silu", one_matrix([mlp.down_proj]))

    def __call__(self, y: Tensor) -> Tensor:
        from panoply.kernels.decode import gated

        return product(gated(product(y, self.both), self.gelu), self.down)


@dataclass(frozen=True)
class Layer:
    """A block's weights, with those of products that share their input joined."""

    norms: tuple[Tensor | None, ...]
    """Before and after attention, before and after the feed-forward layer."""
    qkv: Matrix
    qk_norms: tuple[Tensor, Tensor] | None
    whole: bool
    """Whether these are of whole projections, not of single heads."""
    out: Matrix
    sinks: Tensor | None
    mlp: Gated | Mixture
    focus: Focus
    table: int
    interleaved: bool

    @classmethod
    def of(cls, block: Block) -> Layer:
        a, m = block.self_attn, block.mlp
        return cls(
            tuple(None if norm is None else norm.weight.detach() for norm in block.norms),
            one_matrix(a.inputs),
            (a.q_norm.weight.detach(), a.k_norm.weight.detach()) if a.qk_norm else None,
            a.qk_norm == "whole",
            one_matrix([a.o_proj]),
            None if a.sinks is None else a.sinks.detach(),
            m if isinstance(m, Mixture) else Gated.of(m),
            a.focus,
            a.table,
            a.interleaved,
        )


def plain(model: nn.Module) -> bool:
    """Whether all matrices of a model can be taken out of their modules: none is PEFT's."""
    layers = (m for m in model.modules() if isinstance(m, nn.Linear) or hasattr(m, "base_layer"))
    return all(type(layer) in PLAIN for layer in layers)


@dataclass(frozen=True)
class Plain:
    """All blocks of a model, and how their stream is added to and normed."""

    layers: tuple[Layer, ...]
    stream: Stream

    @classmethod
    def of(cls, model: Decoder) -> Plain:
        from panoply.kernels.decode import Stream

        config = model.config
        stream = Stream(config.norm_eps, config.layout.norm_offset, config.residual_scale)
        return cls(tuple(Layer.of(block) for block in model.blocks if isinstance(block, Block)), stream)


Read = Callable[[Sequence[Sequence[int]]], tuple[Tensor, Tensor]]
"""What reads rows of tokens, from their beginning: [layers, tokens, kv_heads, size] keys and values, end to end."""


def reader(model: object, blocks: Plain | None = None) -> Read | None:
    """None where a model is not read so: on a CPU, in full precision, by others, with matrices of PEFT.

    blocks   the model's, where they are known
    """
    if not isinstance(model, Decoder) or not model.fuses or model.device.type == "cpu":
        return None
    if blocks is None and not plain(model):
        return None
    return partial(_read, model, blocks or Plain.of(model))


@torch.no_grad()
def _read(model: Decoder, blocks: Plain, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    layers, stream = blocks.layers, blocks.stream
    lengths = torch.tensor([len(row) for row in rows])
    packing = pack(lengths, torch.zeros_like(lengths), torch.arange(len(rows))).to(model.device)
    position = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    token = torch.tensor([token for row in rows for token in row])
    token, position = moved(torch.stack([token, position]), model.device)
    x, config = model.embed(token), model.config
    rotations = [(cos[0, :, 0], sin[0, :, 0]) for cos, sin in model.rotations(position[None], x.dtype)]
    kept = x.new_empty(config.layers, len(x), 2 * config.kv_heads, config.head_dim)
    change: Tensor | None = None
    for layer, room in zip(layers, kept, strict=True):
        before, after, before_mlp, after_mlp = layer.norms
        x, y = _added(x, change, before, stream)
        qkv = _rotated(layer, y, rotations[layer.table], config.heads, config.kv_heads, stream)
        room.copy_(qkv[:, config.heads :])
        if layer is layers[-1]:
            break
        mixed, *_ = attended(qkv, config.heads, packing, layer.focus, layer.sinks)
        x, y = _added(x, _normed(product(mixed.flatten(1), layer.out), after, stream), before_mlp, stream)
        change = _normed(layer.mlp(y), after_mlp, stream)
    keys, values = kept.chunk(2, dim=2)
    return keys, values


def _rotated(
    layer: Layer, y: Tensor, rotation: tuple[Tensor, Tensor], heads: int, shared: int, stream: Stream
) -> Tensor:
    """[N, heads + 2 · kv_heads, size] queries, keys and values; the first two turned, and normed where layouts do."""
    from panoply.kernels.decode import norm_heads, norm_spans
    from panoply.kernels.train import turn

    products = product(y, layer.qkv)
    if layer.qk_norms is not None and layer.whole:
        norm_spans(products, *layer.qk_norms, stream)
    qkv = products.view(len(y), heads + 2 * shared, -1)
    if layer.qk_norms is not None and not layer.whole:
        norm_heads(qkv, heads, *layer.qk_norms, stream)
    turning = qkv[:, : heads + shared]
    turn(turning, *rotation, turning, interleaved=layer.interleaved)
    return qkv


def _added(x: Tensor, change: Tensor | None, norm: Tensor | None, stream: Stream) -> tuple[Tensor, Tensor]:
    """The stream after a change, and its norm; without a norm the stream itself."""
    from panoply.kernels.train import add_norm

    if change is not None and stream.factor != 1.0:
        change = change * stream.factor
    if norm is not None:
        return add_norm(x, change, norm, stream.eps, stream.offset)
    x = x if change is None else x + change
    return x, x


def _normed(x: Tensor, norm: Tensor | None, stream: Stream) -> Tensor:
    """What a layout norms before it is added to the stream."""
    return x if norm is None else _added(x, None, norm, stream)[1]
