"""A run in the user's hands: step by step, to look at, to stop, or to leave for another day."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from panoply.errors import PanoplyError

if TYPE_CHECKING:
    from panoply.experience import Experience
    from panoply.kinds import Policy
    from panoply.loops.job import Job
    from panoply.training import Trained


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a run that has just been done.

    metrics      what was logged of it, by name (docs/metrics.md); `held_out_…` where it was evaluated
    experience   the decisions it was made of, with all their columns
    """

    metrics: Mapping[str, Any]
    experience: Experience
    job: Job

    @property
    def number(self) -> int:
        return int(self.metrics["step"])

    @property
    def of(self) -> int:
        """How many steps were planned."""
        return self.job.plan.options.steps

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.job.run.folder

    @property
    def policy(self) -> Policy:
        """As it is now; it learns on with the next step."""
        return self.job.policy

    def stop(self) -> None:
        """End the run here: it is evaluated, stored and finished, as if no more steps had been planned."""
        self.job.stopping = True

    def __repr__(self) -> str:
        from panoply.progress import summary

        return summary(self.job, self.metrics)


Course = Generator[Step, None, "Trained"]
"""The steps of a run, or of a recipe's runs one after another, and then what came of it."""


class Steps(Iterator[Step]):
    """A run to be iterated over; nothing happens before the first step is asked for.

    When the loop has come to its end, or `step.stop()` was called, the run is finished and `result` holds it. A loop
    that is left before (`break`, an exception, a handle thrown away) saves the last step, says so, and leaves a run
    that `train(resume=…)` goes on with. `with panoply.steps(…) as steps:` closes it at a time that does not depend on
    Python's garbage collection.
    """

    def __init__(self, course: Course):
        self._course = course
        self._result: Trained | None = None
        self.run: Path | None = None
        """The run's folder, once it has begun."""

    def __next__(self) -> Step:
        try:
            step = next(self._course)
        except StopIteration as ended:
            if ended.value is not None:
                self._result = ended.value
            raise
        self.run = step.run
        return step

    @property
    def result(self) -> Trained:
        if self._result is None:
            raise PanoplyError(
                "The run has not ended: go through all its steps, or call stop() in one of them."
            )
        return self._result

    def close(self) -> None:
        """Leave the run where it is; it can be resumed."""
        self._course.close()

    def __enter__(self) -> Steps:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
