"""A process that runs plans one after another: `python -m panoply.evidence.worker`.

Orders come in on the standard input and news go out on the standard output, one JSON object a line. With the words
`MODULE FUNCTION SEED` it calls that function instead, and prints what was measured.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from panoply.checkpoint import write_atomically
from panoply.errors import PanoplyError
from panoply.progress import Progress

if TYPE_CHECKING:
    from panoply.evaluation.held_out import Evaluation
    from panoply.experience import Experience
    from panoply.handle import Course
    from panoply.loops.job import Job


class News(Progress):
    """Tells the process that ordered a run how far it is."""

    def __init__(self, out: TextIO):
        self.out = out
        self._next = 0.0
        self.stage, self.stages = 0, 1
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
        self.tell(done=(self.stage + share(job)) / self.stages, score=self._score)


def share(job: Job) -> float:
    """How much of its budget a run has spent."""
    options, spent = job.plan.options, job.spent
    shares = [job.step / options.steps]
    shares += [spent[of] / most for of, most in options.budget().items()]
    if options.minutes is not None:
        shares.append(job.seconds / 60 / options.minutes)
    return min(1.0, max(shares))


def carry_out(plan: Mapping[str, Any], folder: Path, measures: Sequence[str], news: News) -> None:
    """Train a plan in a folder, or go on there; then measure what is asked for of its policy."""
    from panoply import api
    from panoply.evidence import cache, scores
    from panoply.planning import Plan

    with cache.only_one(folder):
        cache.tidy(folder)
        _wait_for_others(folder)
        if cache.finished(folder) is None:
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


def carry_out_recipe(plan: Mapping[str, Any], folder: Path, measures: Sequence[str], news: News) -> None:
    """Make the runs of a recipe, each in a cached folder of its own, where other arms with the same stage find it."""
    from panoply import api, extensions
    from panoply.evidence import cache, scores
    from panoply.loops.recipe import run_turns
    from panoply.recipes import Recipe, Turn
    from panoply.run import Run
    from panoply.values import part_from_json

    for plugin in plan["choices"].get("plugins") or ():
        extensions.load_plugin(plugin)
    recipe = Recipe.from_json(plan["recipe"], part_from_json)
    news.stages = recipe.rounds * len(recipe.stages)
    places: dict[str, str] = {}

    def stage(turn: Turn, asked: dict[str, Any]) -> Course:
        yield from ()
        news.stage = turn.number - 1
        made = api.plan(turn.stage.method or asked.pop("make"), **asked)
        at = cache.place(made, folder.parent)
        carry_out(made.to_json(), at, (), news)
        places[turn.folder] = at.name
        if Run.open(at).status() == "diverged":
            raise _Diverged
        return api.Trained.of(Run.open(at))

    with contextlib.suppress(_Diverged):
        for _ in run_turns(recipe, plan["choices"], stage):
            pass
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(
        folder / cache.STAGES, json.dumps({"counted": plan["counted"], "stages": places}, indent=1)
    )
    scores.measure(list(cache.stages(folder).values())[-1], measures)


class _Diverged(Exception):
    """A stage has diverged, and nothing can follow."""


def _wait_for_others(folder: Path) -> None:
    """Somebody may be going on with the same run by hand just now."""
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
        news.stage, news.stages = 0, 1
        carry = carry_out_recipe if "recipe" in order["plan"] else carry_out
        try:
            carry(order["plan"], Path(order["folder"]), order["measures"], news)
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
