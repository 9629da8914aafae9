"""A pool: frozen selves of a policy, and who won against whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.kinds import Policy

PREFIX = "pool:"
"""Of the names under which a run saves it."""


class Pool:
    """Members are numbered 1, 2, … from the oldest on; number 0 is the policy that learns.

    A part that needs `members` finds it as `collect.members`. It is saved with the run.
    """

    def __init__(self, policy: Policy):
        self._learner = policy
        self._members: list[Policy] = []
        self.steps: list[int] = []
        """The step that each member is of."""
        self._won, self._played = torch.zeros(1, 1), torch.zeros(1, 1)

    def __len__(self) -> int:
        return len(self._members)

    def add(self, step: int) -> int:
        """Freeze the policy as it is now; the new member has played what the policy has, and so won as often."""
        self._members.append(self._learner.copy())
        self.steps = [*self.steps, step]
        size = len(self)
        like = torch.tensor([*range(size), 0])
        self._won, self._played = self._won[like][:, like], self._played[like][:, like]
        return size

    def policy(self, number: int) -> Policy:
        if not 0 <= number <= len(self):
            raise PanoplyError(f"A pool of {len(self)} has no member {number}.")
        return self._members[number - 1] if number else self._learner

    def record(self, row: int, column: int, won: float, games: int = 1, fade: float = 0.0) -> None:
        """Of some games, `row` won so many (half of one counts as a draw) against `column`.

        fade   how much of what was known of these two is forgotten, which suits a policy that learns
        """
        for table, more, back in ((self._won, won, games - won), (self._played, games, games)):
            table[row, column] = (1 - fade) * table[row, column] + more
            table[column, row] = (1 - fade) * table[column, row] + back

    def payoff(self) -> Tensor:
        """[all, all] the share of games that row won against column, one half where they never met."""
        return torch.where(self._played > 0, self._won / self._played.clamp(min=1e-9), 0.5)

    # -------------------------------------------------------------- saving

    @property
    def memory(self) -> dict[str, Any]:
        """All but the members' weights."""
        return {"won": self._won, "played": self._played, "steps": self.steps}

    @memory.setter
    def memory(self, kept: Mapping[str, Any]) -> None:
        """What it was before; members that have come since are gone."""
        self._won, self._played, self.steps = kept["won"], kept["played"], list(kept["steps"])
        del self._members[len(self.steps) :]

    def state(self) -> dict[str, Tensor]:
        """The members' weights."""
        return {
            f"{PREFIX}{number}:{name}": weight.clone()
            for number, member in enumerate(self._members)
            for name, weight in _weights(member).items()
        }

    @torch.no_grad()
    def load_state(self, named: Mapping[str, Tensor]) -> None:
        count = len({name.split(":")[1] for name in named if name.startswith(PREFIX)})
        self._members = [self._learner.copy() for _ in range(count)]
        for number, member in enumerate(self._members):
            for name, weight in _weights(member).items():
                weight.copy_(named[f"{PREFIX}{number}:{name}"])


def _weights(policy: Any) -> dict[str, Tensor]:
    """All that a copy may differ in: weights, and what a normalisation has seen."""
    found: dict[str, Tensor] = policy.model.state_dict()
    return found
