"""Models beside the policy: critics, reward models, probes. Each annotates experience, and may learn from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from panoply.experience import Column, Experience
from panoply.loops.learner import Learner, Scorer, mean_metrics
from panoply.regimes import Fit
from panoply.seeds import torch_rng

if TYPE_CHECKING:
    from panoply.loops.job import Job


class Annotator(Scorer, Protocol):
    """A model that says something about decisions."""

    def save(self, folder: Path) -> None: ...

    def load_weights(self, folder: Path) -> None: ...


class Companion:
    """A model, the columns it adds, and how it learns (`fit`), if it does.

    What a `model` part returns when it is called with a job. `warmup` is the number of steps in which only the model
    learns.
    """

    def __init__(
        self,
        model: Annotator,
        columns: Callable[[Annotator, Experience], Mapping[str, Column]],
        fit: Fit | None = None,
        warmup: int = 0,
    ):
        self.model, self.columns, self.fit, self.warmup = model, columns, fit, warmup


class Companions:
    """All of a method's models, by the name of their part."""

    def __init__(self, job: Job):
        options = job.plan.options
        self.seed = options.seed
        self.held: dict[str, Companion] = {
            part.info.name: part(job) for part in getattr(job.method, "models", ())
        }
        self.learners = {
            name: Learner(c.model, c.fit, total_steps=options.steps, micro_tokens=options.micro_tokens)
            for name, c in self.held.items()
            if c.fit is not None
        }
        self.warmup = max((c.warmup for c in self.held.values()), default=0)

    def annotate(self, experience: Experience) -> Experience:
        """Add every model's columns."""
        with torch.no_grad():
            for companion in self.held.values():
                experience = experience.with_columns(**companion.columns(companion.model, experience))
        return experience

    def fit(self, experience: Experience, step: int) -> dict[str, float]:
        """Let every model that learns do so; its metrics carry its name."""
        found: dict[str, float] = {}
        for name, learner in self.learners.items():
            order = torch_rng("fit", name, self.seed, step)
            metrics = mean_metrics([learner.step(m, step) for m in learner.minibatches(experience, order)])
            found |= {f"{name}_{key}": value for key, value in metrics.items()}
        return found

    # -------------------------------------------------------------- saving

    def save(self, folder: Path) -> None:
        for name in self.learners:
            self.held[name].model.save(folder / name)

    def state(self) -> dict[str, Tensor]:
        return {
            f"model:{n}:{k}": v for n, learner in self.learners.items() for k, v in learner.state().items()
        }

    def load(self, folder: Path, named: Mapping[str, Any]) -> None:
        for name, learner in self.learners.items():
            self.held[name].model.load_weights(folder / name)
            prefix = f"model:{name}:"
            learner.load_state({k.removeprefix(prefix): v for k, v in named.items() if k.startswith(prefix)})
