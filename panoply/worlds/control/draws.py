"""Random numbers for a batch of environments that depend on each one's seed and clock alone.

There is no generator to keep or save: a row draws the same numbers whatever its place in the batch and wherever a run
was interrupted. A number is a hash (splitmix64) of seed, clock and how many were drawn before it.
"""

from __future__ import annotations

import math

import numpy as np

from panoply.seeds import stable_hash
from panoply.worlds.control.world import Array

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Draws:
    """The random numbers of one step: of each row, the first, the second, and so on, as they are asked for."""

    def __init__(self, seeds: Array, clock: Array | int):
        self.seeds, self.clock = seeds, clock
        self.used = 0

    def of(self, name: str) -> Draws:
        """Another stream of the same rows, so that a wrapper draws without moving what the world draws."""
        salt = np.uint64(stable_hash(name))
        return Draws(self.seeds.astype(np.uint64) ^ salt, self.clock)

    def uniform(self, *shape: int, low: Array | float = 0.0, high: Array | float = 1.0) -> Array:
        """Numbers in [low, high), an array of `shape` for each row."""
        count = math.prod(shape)
        clock = np.atleast_1d(self.clock).astype(np.uint64)
        key = _mix(self.seeds.astype(np.uint64) + (clock + np.uint64(1)) * GOLDEN)
        index = np.arange(self.used + 1, self.used + count + 1, dtype=np.uint64)
        self.used += count
        bits = _mix(key[:, None] + index * GOLDEN) >> np.uint64(11)
        numbers = (bits.astype(np.float64) * 2.0**-53).reshape(len(key), *shape)
        scaled: Array = low + (high - low) * numbers
        return scaled

    def normal(self, *shape: int) -> Array:
        """Standard normal numbers (Box and Muller)."""
        pairs = self.uniform(*shape, 2)
        drawn: Array = np.sqrt(-2 * np.log1p(-pairs[..., 0])) * np.cos(2 * np.pi * pairs[..., 1])
        return drawn

    def below(self, n: Array | int, *shape: int) -> Array:
        """Whole numbers 0 … n−1."""
        drawn: Array = (self.uniform(*shape) * n).astype(np.int64)
        return drawn

    def chance(self, probability: Array | float) -> Array:
        """One coin a row."""
        thrown: Array = self.uniform() < probability
        return thrown

    def choice(self, probabilities: Array) -> Array:
        """For each row an index, by the row of probabilities."""
        drawn: Array = (self.uniform(1) >= np.cumsum(probabilities, -1)[:, :-1]).sum(-1)
        return drawn


def _mix(x: Array) -> Array:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = x ^ (x >> np.uint64(31))
    return mixed
