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
        self.steps.append(step)
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

    def state(self) -> dict[str, Tensor]:
        named = {"won": self._won, "played": self._played, "steps": torch.tensor(self.steps)}
        for number, member in enumerate(self._members):
            named |= {f"{number}:{name}": weight.clone() for name, weight in _weights(member).items()}
        return {f"{PREFIX}{name}": value for name, value in named.items()}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        named = {name.removeprefix(PREFIX): t for name, t in tensors.items() if name.startswith(PREFIX)}
        self._won, self._played = named["won"].clone(), named["played"].clone()
        self.steps = [int(step) for step in named["steps"]]
        self._members = [self._learner.copy() for _ in self.steps]
        for number, member in enumerate(self._members):
            for name, weight in _weights(member).items():
                weight.copy_(named[f"{number}:{name}"])


def _weights(policy: Any) -> dict[str, Tensor]:
    """All that a copy may differ in: weights, and what a normalisation has seen."""
    found: dict[str, Tensor] = policy.model.state_dict()
    return found
