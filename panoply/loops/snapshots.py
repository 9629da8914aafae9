"""Other selves of the policy that a method's terms compare it with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from panoply.experience import Experience
from panoply.kinds import Policy
from panoply.policies import divergence
from panoply.regimes import Method


class Snapshots:
    """Frozen or earlier selves of the policy, and their columns `logp@NAME`, `own@NAME` and `distribution@NAME`.

    `reference` is a frozen copy of the start, or the model named by `--reference`; `old` is the policy as it is before
    the step's first update. `own@NAME` is what terms of the policy itself compare with where a temperature or a cut
    made the distribution sampled from another one.
    """

    def __init__(self, method: Method, policy: Policy, reference: Callable[[], Policy]):
        self.policy = policy
        self.sampled, self.own = (method.snapshots(scores) for scores in ("sampled", "policy"))
        self.distributions = sorted({to for _, _, to in divergence.parse(method.needs())})
        self.reference: Policy | None = None
        if "reference" in (*self.sampled, *self.own, *self.distributions):
            self.reference = reference()

    def score(self, experience: Experience) -> Experience:
        """Add the columns the method's terms compare with."""
        columns: dict[str, Any] = {}
        with torch.no_grad():
            for name in self.sampled if experience.altered else sorted({*self.sampled, *self.own}):
                columns[f"logp@{name}"] = self._acting(name).score(experience, frozenset())["logp"]
            for name in self.own if experience.altered else ():
                columns[f"own@{name}"] = self._acting(name).score(experience.unaltered(), frozenset())["logp"]
            for name in self.distributions:
                columns[f"distribution@{name}"] = self.policy.remember(name, self._acting(name), experience)
        beside = experience["action"].device
        return experience.with_columns(**{name: column.to(beside) for name, column in columns.items()})

    def _acting(self, name: str) -> Policy:
        acting = self.reference if name == "reference" else self.policy
        assert acting is not None
        return acting
