"""What runs environments inside a confined process: episodes by number, each a seed and what was said in it."""

from __future__ import annotations

import importlib
import math
import os
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

from panoply.environments.environment import Environment

Answer = dict[str, Any]
IDLE = 64
"""Environments kept for the next episode; more are thrown away."""


def serve(module: str, id: str, options: Mapping[str, Any]) -> Callable[[dict[str, Any]], Answer]:
    """Questions in, answers out: `begin` (an episode by its number and seed, and what was said in it already), `say`,
    `expert`, `forget`, and `left` (episodes that nobody goes on with)."""
    if not module.endswith((".own", ".agent")):  # what a user's own file prints is meant to be seen
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    make = importlib.import_module(module).make
    open_episodes: dict[int, Environment] = {}
    idle: list[Environment] = [
        make(id, options)
    ]  # what is wrong with a name is said before the first question

    def begin(number: int, seed: int, said: list[str]) -> Answer:
        forget(number)
        environment = idle.pop() if idle else make(id, options)
        random.seed(seed)  # for those that draw from the library's own dice
        shown = _shown(environment.reset(seed))
        open_episodes[number] = environment
        for words in said:
            environment.step(words)
        return {"shown": shown}

    def say(number: int, words: str) -> Answer:
        shown, reward, done = open_episodes[number].step(words)
        if not math.isfinite(reward):
            raise ValueError(f"it gave the reward {reward}")
        return {"shown": _shown(shown), "reward": float(reward), "done": bool(done)}

    def forget(number: int) -> None:
        environment = open_episodes.pop(number, None)
        if environment is not None and len(idle) < IDLE:
            idle.append(environment)

    def answer(asked: dict[str, Any]) -> Answer:
        number, found = asked["episode"], Answer()
        for left in asked["left"]:
            forget(left)
        try:
            if "begin" in asked:
                found |= begin(number, asked["begin"], asked["said"])
            if "say" in asked:
                found |= say(number, asked["say"])
            if "expert" in asked:
                found["expert"] = open_episodes[number].expert()
        except BaseException:
            open_episodes.pop(number, None)  # who knows in which state it is
            raise
        if found.get("done") or "forget" in asked:
            forget(number)
        return found

    return answer


def _shown(shown: object) -> Any:
    """Text; or, of an agent, messages and the tools it offers."""
    if isinstance(shown, dict) and "messages" in shown:
        return shown
    if not isinstance(shown, str):
        raise TypeError(f"it showed {type(shown).__name__} and not text")
    return shown.encode("utf-8", "replace").decode()
