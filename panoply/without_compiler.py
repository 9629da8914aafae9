"""Starting without torch's compiler. Nothing here compiles with it, and importing it takes as long as torch itself.

Torch imports `torch._dynamo` in two places that every run comes by: when it fills weights on the device `meta`, and
when an optimiser is made, whose methods are marked as not to be compiled.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Unfilled(TorchFunctionMode):
    """Leaves tensors as they are, whatever `torch.nn.init` is asked to fill them with."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def unfilled(device: str = "meta") -> Iterator[None]:
    """Modules made in here have no numbers yet, and on `meta` no memory: they are about to be loaded or filled."""
    with torch.device(device), _Unfilled():
        yield


def plain_optimisers() -> None:
    """Let an optimiser's methods run as they are, where torch would import its compiler to mark them for it.

    Torch keeps what it calls instead as an attribute of the method. Where it has imported the compiler already, or
    looks different from the torch this was written for, nothing is changed.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None:
            method.__dict__.setdefault("__dynamo_disable", method)
