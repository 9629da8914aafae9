"""A run as a protocol gets to see it: its world, its data, and its checkpoints as policies.

    def spread(judged: Judged, *, problems: int = 20, seed: int = 0) -> dict[str, float]:
        scores = [judged.score(judged.policy(step), problems, seed) for step in judged.steps()]
        return {"best": max(scores), "worst": min(scores)}

    @pp.protocol("spread@1", judge=spread)
    def shown() -> dict[str, float]: ...

Then `panoply eval RUN --by spread --set problems=50` judges a run by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from panoply import checkpoint, functions, registry
from panoply.errors import PanoplyError
from panoply.index import Kind
from panoply.kinds import kind_of
from panoply.planning import Options
from panoply.registry import Entry
from panoply.run import Run


@dataclass(frozen=True)
class Judged:
    """A finished or unfinished run with whole checkpoints."""

    run: Run
    world: Any
    """The one it was trained on."""

    def steps(self) -> list[int]:
        """The steps of which a whole checkpoint is kept, from the start on."""
        return [found.step for found in checkpoint.listed(self.run.checkpoints) if found.problem() is None]

    def policy(self, step: int) -> Any:
        """The policy as it was after a step."""
        found = next((c for c in checkpoint.listed(self.run.checkpoints) if c.step == step), None)
        if found is None or found.problem() is not None:
            raise PanoplyError(f"Step {step} of {self.run.folder} is not kept, or not whole.")
        return kind_of(self.world).open_policy(str(found.model), self.world, Options(device="cpu"), {})

    def start(self) -> Any:
        """The policy that the run began with."""
        plan = self.run.plan()
        options = dataclasses.replace(plan.options, device="cpu")
        return kind_of(self.world).open_policy(options.model, self.world, options, plan.policy_options)

    def score(self, policy: Any, problems: int, seed: int = 0) -> float:
        """What a policy really does: the mean of sampled answers, or of returns, on held-out problems or starts."""
        found = kind_of(self.world).evaluate(
            self.world, policy, problems, seed=seed, watch=lambda done, total: None
        )
        return float(found.rates["sampled"])


KINDS: tuple[Kind, ...] = ("protocol", "survey")
"""Which works may judge."""


def find(name: str) -> Entry:
    """The protocol, or the survey, of that name, if it judges runs."""
    entry = registry.find_any(name)
    if entry is None or entry.kind not in KINDS:
        entry = registry.find("protocol", name)
    if entry.judge is None:
        able = [e.name for kind in KINDS for e in registry.entries(kind) if e.judge is not None]
        shown = "run" if entry.kind == "protocol" else "show"
        raise PanoplyError(
            f"'{name}' judges no runs, it only shows itself: panoply {shown} {entry.name}. "
            f"These do: {', '.join(able) or 'none yet'}."
        )
    return entry


def judge(
    run: Run, name: str, words: Mapping[str, Any] | None = None, seed: int | None = None
) -> Mapping[str, Any]:
    """What a protocol says of a run: a table."""
    entry = find(name)
    assert entry.judge is not None
    known = functions.settings(entry, entry.judge, skip=1)
    given = functions.given(entry, words or {}, known, seed if "seed" in known else None)
    found: Mapping[str, Any] = functions.called(entry, entry.judge, Judged(run, run.plan().world()), **given)
    return found
