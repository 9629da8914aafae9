"""Workers for tests of clusters."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch

from panoply.errors import PanoplyError


class Adder:
    """Adds up arrays."""

    def __init__(self, start: float):
        if start < 0:
            raise PanoplyError("It begins below zero.")
        self.total = start

    def add(self, value: dict[str, np.ndarray[Any, Any]]) -> float:
        self.total += float(value["x"].sum())
        return self.total

    def wait(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def write(self, value: dict[str, np.ndarray[Any, Any]]) -> None:
        value["x"][0] = 1

    def refuse(self) -> None:
        raise PanoplyError("That cannot be.")

    def fault(self) -> float:
        return 1 / 0

    def die(self) -> None:
        os.kill(os.getpid(), 9)

    def where(self) -> tuple[int, int]:
        return os.getpid(), torch.get_num_threads()
