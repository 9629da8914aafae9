"""torch's compiler is left unloaded: nothing here is compiled by it, and loading it takes as long as torch itself.

torch keeps its compiler out of some methods of optimisers, and loads it to do so when one of them is first called.
Where nothing compiles, what is left of such a method is the method as it is; that is put where torch would look for it.
A torch that looks elsewhere, or has no such method, is left alone.
"""

from __future__ import annotations

import sys

import torch

GUARDED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def leave_unloaded() -> None:
    """Where it is loaded already, somebody may want it: then all stays as it is."""
    if "torch._dynamo" in sys.modules:
        return
    for name in GUARDED:
        plain = getattr(getattr(torch.optim.Optimizer, name, None), "__wrapped__", None)
        if plain is not None:
            setattr(plain, "__dynamo_disable", plain)
