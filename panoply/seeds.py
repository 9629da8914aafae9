"""Random numbers that depend on names alone, so that a resumed run draws what an uninterrupted one would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch


def stable_hash(*parts: object) -> int:
    """A 63-bit number, the same in every process and on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def numpy_rng(*names: object) -> np.random.Generator:
    return np.random.default_rng(stable_hash(*names))


def torch_rng(*names: object) -> torch.Generator:
    return torch.Generator().manual_seed(stable_hash(*names))


@contextmanager
def drawing(*names: object) -> Iterator[torch.Generator]:
    """Weights of networks that are made inside, and the dice handed out, depend on names alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stable_hash(*names))
        yield torch_rng("dice", *names)
