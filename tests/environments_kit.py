"""An environment of a few lines, as a library of its own: it counts down, and breaks as it is asked to."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from panoply.environments.environment import known


def make(id: str, options: Mapping[str, Any]) -> Countdown:
    known("environment of kit", id, ["countdown", "dead"])
    if id == "dead":
        raise RuntimeError("it never lives")
    for name in options:
        known("option of kit", name, ["start"])
    return Countdown(options.get("start", 3))


class Countdown:
    """Say the number that is shown, until it is 1."""

    def __init__(self, start: int):
        self.start, self.now = start, 0

    def reset(self, seed: int) -> str:
        self.now = self.start + seed % 2
        return f"Count down. {self.now}"

    def step(self, said: str) -> tuple[Any, float, bool]:
        if said == "raise":
            raise ZeroDivisionError("as asked")
        if said == "hang":
            time.sleep(60)
        if said == "die":
            os._exit(1)
        if said == "nan":
            return "", float("nan"), False
        if said == "number":
            return 5, 0.0, False
        right = said == str(self.now)
        self.now -= right
        return ("" if not self.now else str(self.now)), right / self.start, not self.now

    def expert(self) -> str | None:
        return str(self.now)
