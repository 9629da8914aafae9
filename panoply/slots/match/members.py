"""Which member of a pool one plays against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from panoply.parts import part

if TYPE_CHECKING:
    from panoply.loops.pool import Pool


@part("match", equation="the newest member")
def latest(pool: Pool, rng: np.random.Generator) -> int:
    """The member that was added last."""
    return len(pool)


@part("match", equation="any member")
def uniform(pool: Pool, rng: np.random.Generator) -> int:
    """All members are equally likely."""
    return int(rng.integers(1, len(pool) + 1))


@part("match", equation="member m in proportion to P(m wins)^{power}", bounds={"power": "at least 0"})
def pfsp(pool: Pool, rng: np.random.Generator, *, power: float = 2.0) -> int:
    """Prioritised fictitious self-play (AlphaStar): the more often a member wins, the more often it is met.

    power   of its share of games won; 0 makes all equally likely
    """
    chance = pool.payoff()[1:, 0].double().numpy() ** power
    if chance.sum() == 0:
        chance[:] = 1.0
    return 1 + int(rng.choice(len(pool), p=chance / chance.sum()))
