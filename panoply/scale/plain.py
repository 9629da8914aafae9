"""What learners are told beside rows, and say: any values, with tensors in them as arrays. Rows: see `wire.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Array(NamedTuple):
    """A tensor on its way: numpy has no bfloat16, which travels as its bits."""

    values: NDArray[Any]
    narrow: bool


def to_array(tensor: Tensor) -> Array:
    held = tensor.detach().cpu()
    narrow = held.dtype == torch.bfloat16
    return Array((held.view(torch.int16) if narrow else held).contiguous().numpy(), narrow)


def to_tensor(array: Array) -> Tensor:
    """A tensor of its own: what arrived may be shared, and must not be written to."""
    found = torch.from_numpy(np.array(array.values))
    return found.view(torch.bfloat16) if array.narrow else found


def told(value: Any) -> Any:
    """A value with all tensors in it as arrays."""
    if isinstance(value, Tensor):
        return to_array(value)
    if isinstance(value, Mapping):
        return {key: told(held) for key, held in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(map(told, value))
    return value


def heard(value: Any) -> Any:
    """The reverse of `told`."""
    if isinstance(value, Array):
        return to_tensor(value)
    if isinstance(value, dict):
        return {key: heard(held) for key, held in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(map(heard, value))
    return value
