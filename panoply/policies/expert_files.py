"""Experts on disk: an expert's matrices by themselves, or all experts' in one tensor, as the layout has it.

In memory they are always `Experts`. Names and shapes are transformers', so that each opens the other's folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from panoply.policies.architectures import Sparse


def to_disk(weights: Mapping[str, Tensor], sparse: Sparse | None) -> dict[str, Tensor]:
    """A decoder's weights under the names, and in the shapes, of its folder; transformers calls a router gate."""
    if sparse is None:
        return dict(weights)
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        layer, _, inside = name.partition(".mlp.")
        part, _, rest = inside.partition(".")
        if part in ("router", "gate"):
            found[f"{layer}.{sparse.router}.{rest}"] = weight
        elif part == "experts":
            parts = _taken_apart(rest, weight, sparse)
            found |= {f"{layer}.{sparse.experts}.{part}": w for part, w in parts}
        else:
            found[name] = weight
    return found


def _taken_apart(name: str, weight: Tensor, sparse: Sparse) -> Iterator[tuple[str, Tensor]]:
    if not sparse.each:
        if name.startswith("gate_up"):
            weight = torch.stack(weight.chunk(2, dim=1), dim=2).flatten(1, 2)
        stem = name.removesuffix("_bias").removesuffix("_proj") + "_proj"
        yield (f"{stem}_bias", weight) if name.endswith("_bias") else (stem, weight.transpose(1, 2))
        return
    gate, up, down = sparse.each
    names, parts = ([gate, up], weight.chunk(2, dim=1)) if name == "gate_up_proj" else ([down], (weight,))
    for part, whole in zip(names, parts, strict=True):
        yield from ((f"{expert}.{part}.weight", w) for expert, w in enumerate(whole.unbind()))


def from_disk(weights: dict[str, Tensor], sparse: Sparse | None, experts: int) -> dict[str, Tensor]:
    """The other way round, of weights that are all there; what becomes part of another is let go at once."""
    if sparse is None:
        return weights
    found: dict[str, Tensor] = {}
    gate, up, down = sparse.each or ("", "", "")
    for name in list(weights):
        if name not in weights:
            continue
        layer, router, inside = name.partition(f".{sparse.router}.")
        if router:
            found[f"{layer}.mlp.router.{inside}"] = weights.pop(name)
            continue
        layer, there, inside = name.partition(f".{sparse.experts}.")
        if not there:
            found[name] = weights.pop(name)
        elif not sparse.each:
            part = inside.replace("_proj_bias", "_bias")
            found[f"{layer}.mlp.experts.{part}"] = _ours(part, weights.pop(name))
        else:
            rows = [f"{layer}{there}{e}." for e in range(experts)]
            kinds = (down,) if inside.endswith(f".{down}.weight") else (gate, up)
            whole = [torch.stack([weights.pop(f"{row}{kind}.weight") for row in rows]) for kind in kinds]
            part = "down_proj" if len(kinds) == 1 else "gate_up_proj"
            found[f"{layer}.mlp.experts.{part}"] = whole[0] if len(whole) == 1 else torch.cat(whole, dim=1)
    return found


def _ours(part: str, weight: Tensor) -> Tensor:
    """Inputs last, and gates first."""
    weight = weight if part.endswith("_bias") else weight.transpose(1, 2)
    if part.startswith("gate_up"):
        weight = torch.cat([weight[:, 0::2], weight[:, 1::2]], dim=1)
    return weight.contiguous()
