"""What parts remember: plain JSON and tensors, checked when a part returns it, and saved with the run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from panoply.errors import PanoplyError

State = dict[str, Any]


def handed_back(who: str, returned: Any) -> tuple[State, Any]:
    """What a part that remembers returns: its next state and its result. A state that cannot be saved is refused."""
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], dict)):
        raise PanoplyError(f"{who} remembers, so it has to return (state, result), its state being a dict.")
    state, result = returned
    for key, value in state.items():
        if not isinstance(key, str) or not (isinstance(value, Tensor) or _is_json(value)):
            raise PanoplyError(
                f"{who} returned a state that cannot be saved: {key!r:.40} is {_shown(value)}. A state is a dict of "
                "names to tensors, finite numbers, words, none, and lists or dicts of those without tensors."
            )
    return state, result


def _is_json(value: Any) -> bool:
    """Whether a value is the same when written as JSON and read again: a tuple, say, would become a list."""
    if isinstance(value, list):
        return all(_is_json(v) for v in value)
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_json(v) for k, v in value.items())
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return str(value)
    return f"a {type(value).__name__}" + (
        " with something else inside" if isinstance(value, list | dict) else ""
    )


def as_tensors(states: Mapping[str, State]) -> dict[str, Tensor]:
    """States by name as named tensors; what is not a tensor is kept as the bytes of its JSON."""
    named: dict[str, Tensor] = {}
    for name, state in states.items():
        rest = json.dumps({k: v for k, v in state.items() if not isinstance(v, Tensor)})
        named[f"{name}:"] = torch.frombuffer(bytearray(rest.encode()), dtype=torch.uint8)
        named |= {f"{name}:{k}": v for k, v in state.items() if isinstance(v, Tensor)}
    return named


def from_tensors(named: Mapping[str, Tensor]) -> dict[str, State]:
    """The reverse of `as_tensors`."""
    states: dict[str, State] = {}
    for full, value in named.items():
        name, _, key = full.partition(":")
        kept = {key: value} if key else json.loads(bytes(value.tolist()).decode())
        states.setdefault(name, {}).update(kept)
    return states
