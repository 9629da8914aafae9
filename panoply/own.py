"""The user's own: a data file and reward functions become a world."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from panoply.errors import PanoplyError
from panoply.run import model_folder


def is_data_file(data: Any) -> bool:
    """Whether `--data` names a file and not a part."""
    return isinstance(data, str) and data.endswith((".jsonl", ".json"))


def own_data(world: str | None, choices: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """A data file and reward functions as the world `jsonl`, or the choices as they are."""
    found = dict(choices)
    named = found.get("reward") or []
    named = [named] if isinstance(named, str) else list(named)
    functions = [word for word in named if ".py:" in word]
    data = found.get("data")
    if not (isinstance(data, str) and is_data_file(data)):
        if functions:
            raise PanoplyError(
                "A reward function judges answers to your own prompts: name them with --data FILE.jsonl."
            )
        if len(named) > 1:
            raise PanoplyError("Only reward functions, FILE.py:NAME, can be several.")
        return world, {**found, "reward": named[0]} if named else found
    if world not in ("jsonl", "jsonl@1", None):
        raise PanoplyError(f"--data {data} is a world of its own: leave --world {world} out.")
    if not found.get("model"):
        raise PanoplyError("Your own data needs a model of your own: name its folder with --model.")
    split = [word.rpartition("=") if "=" in word else (word, "", "1") for word in functions]
    try:
        weights = tuple(float(weight) for _, _, weight in split)
    except ValueError as error:
        raise PanoplyError("A reward's weight is a number: --reward FILE.py:NAME=0.5.") from error
    made = {
        "world.data": os.path.abspath(data),
        "world.model": str(model_folder(found["model"]).resolve()),
        "world.rewards": tuple(os.path.abspath(source) for source, _, _ in split),
        "world.weights": weights,
    }
    others = [word for word in named if word not in functions]
    kept = {k: v for k, v in found.items() if k not in ("data", "reward")}
    return "jsonl", {
        **kept,
        "reward": others[0] if others else None,
        "settings": {**made, **(found.get("settings") or {})},
    }
