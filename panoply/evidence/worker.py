"""A process that runs plans one after another: `python -m panoply.evidence.worker`.

Orders come in on the standard input and news go out on the standard output, one JSON object a line. With the words
`MODULE FUNCTION SEED` it calls that function instead, and prints what was measured.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from panoply.errors import PanoplyError
from panoply.progress import Progress

if TYPE_CHECKING:
    from panoply.evaluation.held_out import Evaluation
    from panoply.experience import Experience
    from panoply.loops.job import Job


class News(Progress):
    """Tells the process that ordered a run how far it is."""

    def __init__(self, out: TextIO):
        self.out = out
        self._next = 0.0
        self._score: float | None = None

    def tell(self, **news: Any) -> None:
        self.out.write(json.dumps(news) + "\n")
        self.out.flush()

    def evaluated(self, job: Job, found: Evaluation) -> None:
        self._score = found.score
        self._tell(job)

    def step(self, job: Job, record: Mapping[str, Any], experience: Experience) -> None:
        if time.monotonic() >= self._next:
            self._tell(job)

    def _tell(self, job: Job) -> None:
        self._next = time.monotonic() + 0.5
        self.tell(done=share(job), score=self._score)


def share(job: Job) -> float:
    """How much of its budget a run has spent."""
    options, spent = job.plan.options, job.spent
    shares = [job.step / options.steps]
    shares += [spent[of] / most for of in spent if (most := getattr(options, of))]
    if options.minutes is not None:
        shares.append(job.seconds / 60 / options.minutes)
    return min(1.0, max(shares))


def carry_out(plan: Mapping[str, Any], folder: Path, measures: Sequence[str], news: News) -> None:
    """Train a plan in a folder, or go on there; then measure what is asked for of its policy."""
    from panoply import api
    from panoply.evidence import cache, scores
    from panoply.planning import Plan

    _wait_for_others(folder)
    run = cache.finished(folder)
    if run is None:
        try:
            if (folder / "run.json").is_file():
                api.train(resume=folder, progress=news)
            else:
                api.train(Plan.from_json(plan), run=folder, progress=news)
        except PanoplyError:
            run = cache.finished(folder)
            if run is None or run.status() != "diverged":
                raise
    scores.measure(folder, measures)


def _wait_for_others(folder: Path) -> None:
    """Another comparison may be making the same run just now."""
    from panoply.run import Run

    while (folder / "run.json").is_file() and Run.open(folder).status() == "running":
        time.sleep(0.5)


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # what a reward function prints is not news
    import torch

    torch.set_num_threads(1)
    if sys.argv[1:]:
        module, name, seed = sys.argv[1:]
        found = getattr(importlib.import_module(module), name)(int(seed))
        json.dump({word: float(value) for word, value in found.items()}, out)
        return
    news = News(out)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            carry_out(order["plan"], Path(order["folder"]), order["measures"], news)
        except PanoplyError as error:
            news.tell(ended="failed", why=str(error))
        except KeyboardInterrupt:
            return
        else:
            news.tell(ended="finished")


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # nobody listens any more; the run can be resumed
        os._exit(1)
