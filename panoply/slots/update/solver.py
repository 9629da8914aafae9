"""What an optimiser may want beside a gradient: to look at the mini-batch again, or to have trajectories elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from panoply.batch import Batch
from panoply.experience import Experience


class Solver:
    """The second base of an optimiser that wants more than a gradient: what it does not override, it does not want.

    `class Natural(Solver, torch.optim.Optimizer)` looks at its mini-batch: `step` is then called with a view of it.
    """

    looks: bool = False
    """Whether the next `step` wants a `MiniBatchView` of the mini-batch whose gradient it is given."""

    def visits(self, generator: torch.Generator) -> Iterator[bool]:
        """Go where trajectories are wanted, and say before each time whether they are taken aside, only to look at."""
        yield False

    def settle(self) -> None:
        """Be back at the weights that are learned, from wherever `visits` has led."""


class MiniBatchView:
    """What a solver may ask of the mini-batch whose gradient it was given.

    leaves   the weights, in the order in which the optimiser moves them
    judged   the loss at the weights as they are, and the batch that it was computed of
    """

    def __init__(
        self,
        policy: Any,
        rows: Experience,
        leaves: list[Tensor],
        judged: Callable[[], tuple[Tensor, Batch]],
    ):
        self.policy, self.rows, self.leaves, self._judged = policy, rows, leaves, judged

    def logp(self) -> Tensor:
        """Log-probabilities of the decisions, with their graph."""
        found: Tensor = self.policy.score(self.rows, frozenset())["logp"]
        return found

    def aside(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the decisions that were taken aside: log-probabilities with their graph, credit, episode."""
        rows = self.rows.take(~self.rows["train"].bool())
        return self.policy.score(rows, frozenset())["logp"], rows["advantage"], rows["episode"]

    def distribution(self) -> tuple[Any, Tensor]:
        """The policy's head, and all of the distributions that decisions were drawn from, with their graph."""
        policy = getattr(self.policy, "policy", self.policy)  # without models that learn with it
        return policy.head, policy.distribution(self.rows)

    @torch.no_grad()
    def judge(self, before: Tensor | None = None) -> tuple[float, float]:
        """At the weights as they are: the loss, and how far the policy is from the one that acted (KL).

        before: the distributions of the one that acted, for KL(then‖now) in full; without, it is estimated
        """
        loss, batch = self._judged()
        if before is not None:
            head, distribution = self.distribution()
            return float(loss), float(head.divergence(before, distribution, 1.0).mean())
        gap = batch.log_ratio("behaviour")
        return float(loss), float((gap.exp() - 1 - gap).mean())
