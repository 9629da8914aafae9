"""Other selves of the policy that a method's terms compare it with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from panoply.experience import Experience
from panoply.kinds import Policy

if TYPE_CHECKING:
    from panoply.loops.job import Job


class Snapshots:
    """Frozen or earlier selves of the policy, and the columns `logp@NAME` they give.

    `reference` is a frozen copy of the start, or the model named by `--reference`; `old` is the policy as it is before
    the step's first update.
    """

    def __init__(self, job: Job):
        options = job.plan.options
        self.policy = job.policy
        self.names = sorted(n.removeprefix("logp@") for n in job.method.needs() if n.startswith("logp@"))
        self.reference: Policy | None = None
        if "reference" in self.names:
            self.reference = job.open(options.model if options.reference == "start" else options.reference)

    def score(self, experience: Experience) -> Experience:
        """Add the columns the method's terms compare with."""
        columns: dict[str, Any] = {}
        with torch.no_grad():
            for name in self.names:
                acting = self.reference if name == "reference" else self.policy
                assert acting is not None
                scored = acting.score(experience, frozenset())["logp"]
                columns[f"logp@{name}"] = scored.to(experience["action"].device)
        return experience.with_columns(**columns)
