"""What of a policy changes while it learns: taken off it, taken over by a copy, and told apart in sixteen digits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from panoply.policies.low_rank import merge

Weights = Mapping[str, Tensor]
"""By the names that they have in the model."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
AT_ONCE = 1 << 22
"""Words that are added up together, so that a sum takes little memory beside the weights."""
KEPT = 1 << 16
"""Places whose odd numbers are kept from one sum to the next."""


def moving(policy: Any) -> dict[str, Tensor]:
    """Weights that learn, and what a normalisation has seen: of a model with adapters, the adapters alone."""
    learning = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    return {name: weight.detach() for name, weight in (learning | dict(policy.model.named_buffers())).items()}


@torch.no_grad()
def take(model: Any, weights: Weights) -> None:
    """Write weights where those of their names lie, so that whoever reads those addresses has them from then on."""
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, weight in weights.items():
        own[name].copy_(weight)
    merge(model)


@torch.no_grad()
def checksum(weights: Weights) -> str:
    """Sixteen hex digits that change with any bit of any weight, computed where the weights are.

    The words of a tensor, each times an odd number of its place, added up modulo 2⁶⁴: whole numbers, so that neither
    the order nor the device matters, and much less to move than the weights themselves.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        weight = weights[name].detach()
        flat = weight.contiguous().view(-1).view(WORDS[weight.element_size()])
        total = torch.zeros((), dtype=torch.long, device=weight.device)
        for at in range(0, len(flat), AT_ONCE):
            words = flat[at : at + AT_ONCE].long()
            total += ((words + 1) * _odd(at, at + len(words), weight.device)).sum()
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}{int(total)}".encode())
    return digest.hexdigest()[:16]


def _odd(low: int, high: int, device: torch.device) -> Tensor:
    """The odd numbers of some places; those of the first are kept, since small tensors are many."""
    if high <= KEPT:
        return _first_odd(device)[low:high]
    return 2 * torch.arange(low, high, device=device) * 0x5851F42D4C957F2D + 1


@cache
def _first_odd(device: torch.device) -> Tensor:
    return 2 * torch.arange(KEPT, device=device) * 0x5851F42D4C957F2D + 1


def laid_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """A tensor as a parameter lies: itself, or where that is in pieces (FSDP) the same pieces of it."""
    if not hasattr(parameter, "device_mesh"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(whole.to(parameter.device), mesh, placements)


def piece(parameter: Tensor) -> Tensor:
    """What of a parameter lies here: all of it, or where it is in pieces this process's."""
    found: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return found
