"""Random numbers that depend on names alone, so that a resumed run draws what an uninterrupted one would."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch

ALONE = threading.RLock()
"""Held by the thread that changes what a process has once: torch's global generator, switches of transformers."""


def stable_hash(*parts: object) -> int:
    """A 63-bit number, the same in every process and on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def numpy_rng(*names: object) -> np.random.Generator:
    return np.random.default_rng(stable_hash(*names))


def torch_rng(*names: object) -> torch.Generator:
    return torch.Generator().manual_seed(stable_hash(*names))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's global generator begins from a seed for a while, as one thread's alone."""
    with ALONE, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def drawing(*names: object) -> Iterator[torch.Generator]:
    """Weights of networks that are made inside, and the dice handed out, depend on names alone."""
    with seeded(stable_hash(*names)):
        yield torch_rng("dice", *names)
