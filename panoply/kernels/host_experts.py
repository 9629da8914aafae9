"""Products with a weight for each expert, on a CPU: a loop over the experts that have tokens.

The functions are those of `kernels/experts.py`, which says how pairs are numbered.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class Plan:
    """Each expert's pairs."""

    def __init__(self, chosen: Tensor, experts: int):
        flat = chosen.flatten()
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=experts).tolist()
        self.pairs = [(e, p) for e, p in enumerate(torch.split(order, counts)) if len(p)]

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        return iter(self.pairs)


def plan(chosen: Tensor, experts: int) -> Plan:
    """The plan of [k, N] choices."""
    return Plan(chosen, experts)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, pairs: int, scale: Tensor | None = None
) -> Tensor:
    """[pairs, columns]: row `p % N` of [N, depth] x by the [columns, depth] weight of p's expert.

    Its bias is added, times the pair's `scale` where there is one.
    """
    out = x.new_empty(pairs, weight.shape[1])
    for expert, mine in plan:
        found = x.index_select(0, mine % len(x)) @ weight[expert].t()
        if bias is not None:
            found += bias[expert] if scale is None else (bias[expert] * scale[mine, None]).to(x.dtype)
        out.index_copy_(0, mine, found)
    return out


def slope(g: Tensor, x: Tensor, plan: Plan, weight: Tensor) -> Tensor:
    """[experts, columns, depth]: each expert's sum over its pairs of g ⊗ x, rows read as in `product`."""
    out = torch.zeros_like(weight)
    for expert, mine in plan:
        torch.mm(g.index_select(0, mine % len(g)).t(), x.index_select(0, mine % len(x)), out=out[expert])
    return out


def gated(both: Tensor, scale: Tensor, alpha: float, limit: float) -> Tensor:
    """[pairs, inner]: each pair's weight times its activation, of [pairs, 2 · inner] in which the gates come first."""
    gate, up, _, _ = _clamped(both, limit)
    return (gate * torch.sigmoid(alpha * gate) * up * scale[:, None]).to(both.dtype)


def gated_back(
    both: Tensor, scale: Tensor, g: Tensor, alpha: float, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`gated` again, and the slopes by `both` and by `scale`."""
    gate, up, inside, between = _clamped(both, limit)
    share = torch.sigmoid(alpha * gate)
    bent = gate * share
    value = bent * up
    steep = g * scale[:, None]
    g_gate = steep * up * share * (1 + alpha * gate * (1 - share)) * inside
    g_both = torch.cat([g_gate, steep * bent * between], dim=1)
    return (value * scale[:, None]).to(both.dtype), g_both.to(both.dtype), (g * value).sum(1).to(scale.dtype)


def _clamped(both: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is multiplied, of gates and of the others, and 1 where it follows what was given."""
    gate, up = both.chunk(2, dim=1)
    one = torch.ones((), dtype=both.dtype)
    if not limit:
        return gate, up, one, one
    inside, between = gate <= limit, (up >= -limit) & (up <= limit)
    return gate.clamp(max=limit), up.clamp(-limit, limit) + 1, inside.to(both.dtype), between.to(both.dtype)
