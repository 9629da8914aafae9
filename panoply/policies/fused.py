"""A decoder's blocks over packed rows on a GPU: matrix products, torch's flash attention, and a kernel between two.

The same function as `Block.forward`, with fewer passes over memory and nothing kept that is cheap to compute again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from panoply.policies.packing import Packing

if TYPE_CHECKING:
    from panoply.policies.decoder import Block, Decoder

Rotation = tuple[Tensor, Tensor]


def run_blocks(
    model: Decoder, x: Tensor, rotation: Rotation, packing: Packing, taps: Collection[int]
) -> tuple[Tensor, dict[int, Tensor]]:
    """[1, N, width] embeddings to final states after the norm, and the states after `taps` blocks."""
    from panoply.kernels.train import add_norm

    cos, sin = (r[0, :, 0].contiguous() for r in rotation)
    total, change = x[0], None
    tapped = {0: x} if 0 in taps else {}
    recompute = model.checkpointing and torch.is_grad_enabled()
    for depth, block in enumerate(model.model.layers, start=1):
        if recompute:
            total, change = checkpoint(_block, block, total, change, cos, sin, packing, use_reentrant=False)
        else:
            total, change = _block(block, total, change, cos, sin, packing)  # type: ignore[arg-type]
        if depth in taps:
            tapped[depth] = (total + change)[None]
    norm = model.model.norm
    _, normed = add_norm(total, change, norm.weight, norm.eps)
    if model.config.layers in taps:
        tapped[model.config.layers] = normed[None]
    return normed[None], tapped


def _block(
    block: Block, total: Tensor, change: Tensor | None, cos: Tensor, sin: Tensor, packing: Packing
) -> tuple[Tensor, Tensor]:
    """The stream and what is to be added to it, before a block and after it."""
    from panoply.kernels.train import add_norm, gated_down, rotate

    attention, mlp = block.self_attn, block.mlp
    norm = block.input_layernorm
    total, y = add_norm(total, change, norm.weight, norm.eps)
    q, k, v = (
        p(y).view(len(y), -1, attention.head_dim)
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if attention.qk_norm:
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    mixed = packing.attend(q[None], k[None], v[None], attention.window)[0].flatten(1)
    norm = block.post_attention_layernorm
    total, y = add_norm(total, attention.o_proj(mixed), norm.weight, norm.eps)
    gate, up, down = mlp.gate_proj(y), mlp.up_proj(y), mlp.down_proj
    if type(down) is nn.Linear and down.bias is None:
        return total, gated_down(gate, up, down.weight)
    wide: Tensor = nn.functional.silu(gate) * up
    return total, down(wide)
