"""Decoding on a CPU: one token for all rows, in buffers whose views are made once per number of rows.

With small models a step is mostly the cost of calling operators, so there are as few as can be: layers that share an
input are one product, written where it is read, and what is between products is one compiled call where Numba is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from panoply.kernels import host
from panoply.policies.attention import Cache, Visibility, attend
from panoply.policies.decoder import Attention, Block, Decoder, Norm
from panoply.policies.fused import joined
from panoply.policies.low_rank import PLAIN
from panoply.rollout.requests import CachedModel


def host_decoder(model: CachedModel, cache: Cache) -> HostDecoder | None:
    """None where blocks are not plain: on another device, with adapters of PEFT, with experts, or of others."""
    if not isinstance(model, Decoder) or model.device.type != "cpu" or not model.fuses or model.config.mixing:
        return None
    layers = (m for block in model.model.layers for m in block.modules() if hasattr(m, "out_features"))
    if any(type(layer) not in PLAIN for layer in layers):
        return None
    kernels = host.compiled(model.head_weight)
    return HostDecoder(model, cache) if kernels is None else CompiledDecoder(model, cache, kernels)


@dataclass(frozen=True)
class _Weights:
    """A block's matrices as they are multiplied with, [inputs, outputs], and their biases."""

    qkv: tuple[Tensor, Tensor | None]
    out: tuple[Tensor, Tensor | None]
    both: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]

    @staticmethod
    def of(block: Block) -> _Weights:
        a, m = block.self_attn, block.mlp
        groups = (a.inputs, [a.o_proj], m.inputs, [m.down_proj])
        weights = (joined(layers) for layers in groups)
        return _Weights(*((weight.t(), bias) for weight, bias in weights))


class _Buffers:
    """Where a step over some rows puts what it computes, and views of it."""

    def __init__(self, model: Decoder, rows: int, weights: _Weights):
        config, size, like = model.config, model.config.head_dim, model.head_weight
        self.qkv, self.both = (like.new_empty(rows, w[0].shape[1]) for w in (weights.qkv, weights.both))
        self.heads, self.turning = self.qkv.view(rows, -1, size), config.heads + config.kv_heads
        spans = [config.heads, config.kv_heads, config.kv_heads]
        self.q, self.k, self.v = torch.split(self.heads, spans, dim=1)
        self.query = self.q[:, :, None]
        self.gate, self.up = self.both.chunk(2, dim=1)


class HostDecoder:
    """`logits` of what follows every row's newest token, which goes into the cache."""

    @torch.no_grad()
    def __init__(self, model: Decoder, cache: Cache):
        self.model, self.cache = model, cache
        self.weights = [_Weights.of(block) for block in self._blocks()]
        self._buffers: dict[int, _Buffers] = {}
        self._angles(cache.capacity)

    def _blocks(self) -> Iterator[Block]:
        return cast(Iterator[Block], iter(self.model.model.layers))

    def _angles(self, positions: int) -> None:
        self.cos, self.sin = host.angles(*self.model.rotation_tables(positions)[0].chunk(2, dim=-1))

    def logits(self, token: Tensor, position: Tensor, width: int) -> Tensor:
        """[B] tokens at [B] positions, none of which sees more than `width` slots, to [B, vocabulary]."""
        rows, stack = len(token), self.model.model
        if rows not in self._buffers:
            self._buffers[rows] = _Buffers(self.model, rows, self.weights[0])
        buffers = self._buffers[rows]
        self.cache.begin(position[:, None], width)
        if self.cache.capacity > len(self.cos):
            self._angles(self.cache.capacity)
        angles = self.cos.index_select(0, position), self.sin.index_select(0, position)
        sight = Visibility(position[:, None], None, True, self.model.dtype)
        x = stack.embed_tokens(token)
        for index, (block, weights) in enumerate(zip(self._blocks(), self.weights, strict=True)):
            x = self._block(index, block, weights, buffers, x, angles, sight)
        norm = stack.norm
        return self.model.logits(F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps))

    def _block(
        self,
        index: int,
        block: Block,
        weights: _Weights,
        buffers: _Buffers,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        sight: Visibility,
    ) -> Tensor:
        attention, norm = block.self_attn, cast(Norm, block.norms[0])
        y = F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
        _product(y, weights.qkv, buffers.qkv)
        if attention.qk_norm:
            buffers.q.copy_(attention.q_norm(buffers.q))
            buffers.k.copy_(attention.k_norm(buffers.k))
        host.turn(buffers.heads, buffers.turning, *angles)
        keys, values = self.cache.append(index, buffers.k[:, :, None], buffers.v[:, :, None])
        mixed = attend(buffers.query, keys, values, sight.mask(attention.focus.window, keys.shape[2])).view(
            len(x), -1
        )
        x = _product(mixed, weights.out).add_(x)
        norm = cast(Norm, block.norms[2])
        y = F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
        _product(y, weights.both, buffers.both)
        return _product(F.silu(buffers.gate).mul_(buffers.up), weights.down).add_(x)


class _Arrays:
    """Buffers of the compiled decoder: tensors for the products, and the same memory for what is between them."""

    def __init__(self, model: Decoder, rows: int, weights: _Weights):
        config, like = model.config, model.head_weight
        shapes = {
            "x": (rows, config.width), "y": (rows, config.width), "change": (rows, config.width),
            "scale": (rows,), "qkv": (rows, weights.qkv[0].shape[1]), "both": (rows, weights.both[0].shape[1]),
            "wide": (rows, config.inner),
        }  # fmt: skip
        self.tensor = {name: like.new_empty(shape) for name, shape in shapes.items()}
        self.array = {name: tensor.numpy() for name, tensor in self.tensor.items()}
        heads = self.tensor["qkv"].view(rows, -1, config.head_dim)
        self.array["heads"] = heads.numpy()
        self.q, self.k, _ = torch.split(heads, [config.heads, config.kv_heads, config.kv_heads], dim=1)
        self.query = self.q[:, :, None]


class CompiledDecoder(HostDecoder):
    """The same with compiled kernels (`kernels/compiled.py`)."""

    @torch.no_grad()
    def __init__(self, model: Decoder, cache: Cache, kernels: ModuleType):
        super().__init__(model, cache)
        self.kernels = kernels
        self._arrays: dict[int, _Arrays] = {}
        self._placed = 0

    def _angles(self, positions: int) -> None:
        super()._angles(positions)
        self.turns = self.cos.numpy(), self.sin.numpy()

    def logits(self, token: Tensor, position: Tensor, width: int) -> Tensor:
        rows, stack = len(token), self.model.model
        if rows not in self._arrays:
            self._arrays[rows] = _Arrays(self.model, rows, self.weights[0])
        at = self._arrays[rows]
        self.cache.begin(position[:, None], width)
        if self._placed != self.cache.capacity:
            self._place()
        sight = Visibility(position[:, None], None, True, self.model.dtype)
        torch.index_select(stack.embed_tokens.weight, 0, token, out=at.tensor["x"])
        change = None
        for index, (block, weights) in enumerate(zip(self._blocks(), self.weights, strict=True)):
            self._norm(at, change, block.norms[0])
            _product(at.tensor["y"], weights.qkv, at.tensor["qkv"])
            mixed = self._mixed(index, block.self_attn, at, position, sight)
            _product(mixed, weights.out, at.tensor["change"])
            change = at.array["change"]
            self._norm(at, change, block.norms[2])
            _product(at.tensor["y"], weights.both, at.tensor["both"])
            self.kernels.gated(at.array["both"], at.array["wide"])
            _product(at.tensor["wide"], weights.down, at.tensor["change"])
        self._norm(at, change, stack.norm)
        return self.model.logits(at.tensor["y"])

    def _place(self) -> None:
        """What is kept for a cache of this size: its memory, and angles of all its positions."""
        self._placed = self.cache.capacity
        if self._placed > len(self.cos):
            self._angles(self._placed)
        layers = (self.cache.layer(index) for index in range(len(self.weights)))
        self.places = [(k.transpose(1, 2).numpy(), v.transpose(1, 2).numpy()) for k, v in layers]

    def _norm(self, at: _Arrays, change: Any, norm: Norm | None) -> None:
        """x += change, y = its norm."""
        held = at.array
        assert norm is not None
        self.kernels.add_norm(
            held["x"], change, norm.weight.detach().numpy(), norm.eps, held["x"], held["y"], held["scale"]
        )

    def _mixed(
        self, index: int, attention: Attention, at: _Arrays, position: Tensor, sight: Visibility
    ) -> Tensor:
        if attention.qk_norm:
            at.q.copy_(attention.q_norm(at.q))
            at.k.copy_(attention.k_norm(at.k))
        memory = (*self.turns, position.numpy(), *self.places[index])
        self.kernels.place(at.array["heads"], at.q.shape[1], *memory)
        keys, values = self.cache.seen(index, len(position))
        return attend(at.query, keys, values, sight.mask(attention.focus.window, keys.shape[2])).view(
            len(keys), -1
        )


def _product(x: Tensor, weights: tuple[Tensor, Tensor | None], out: Tensor | None = None) -> Tensor:
    weight, bias = weights
    if bias is None:
        return torch.mm(x, weight, out=out)
    return torch.addmm(bias, x, weight, out=out)
