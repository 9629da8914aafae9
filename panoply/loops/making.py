"""Stages that make data: a `make` part is called once, with what it needs to ask policies, judges and earlier data."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from panoply import data_folder
from panoply.data_folder import Row
from panoply.errors import machine_errors
from panoply.kinds import kind_of

if TYPE_CHECKING:
    from panoply.planning import Plan
    from panoply.progress import Progress
    from panoply.rollout.text import Collector
    from panoply.run import Run

ASKED = 64
"""Tasks that are answered at a time."""


class Maker:
    """What a `make` part is called with. Policies and data are named by folders, `start` is the run's own start."""

    def __init__(self, plan: Plan):
        self.plan, self.world, self.seed = plan, plan.world(), plan.options.seed
        self.kind = kind_of(self.world)

    def collect(self, policy: str) -> Collector:
        """A collector with this policy, which takes the same tasks whoever the policy is."""
        from panoply.which import model_folder

        options = self.plan.options
        source = options.model if policy == "start" else str(model_folder(policy))
        opened = self.kind.open_policy(source, self.world, options, self.plan.policy_options)
        collect: Any = self.kind.collector(self.world, opened, self.seed)
        return collect  # type: ignore[no-any-return]

    def answered(
        self, policy: str, prompts: int, answers: int, temperature: float = 1.0
    ) -> Iterator[list[Row]]:
        """Of each of so many training tasks a policy's answers, with the world's signals as numbers."""
        collect = self.collect(policy)
        for first in range(0, prompts, ASKED):
            places = [collect.place(i) for i in range(first, min(first + ASKED, prompts))]
            yield from self.attempts(
                collect, places, [collect.task(place) for place in places], answers, temperature
            )

    def attempts(
        self,
        collect: Collector,
        places: Sequence[int],
        tasks: Sequence[Any],
        answers: int,
        temperature: float = 1.0,
    ) -> list[list[Row]]:
        """Of each task, which may be asked otherwise than at its place, so many answers as rows."""
        first = collect.state["episodes"]
        decode = collect.policy.tokenizer.decode
        found: list[list[Row]] = [[] for _ in tasks]
        with torch.no_grad():
            experience = collect.episodes(tasks, answers, temperature=temperature)
        episodes = experience.by("episode")
        names = [c.removeprefix("signal:") for c in experience.decisions if c.startswith("signal:")]
        worth = {name: episodes.sum(experience[f"signal:{name}"]).tolist() for name in names}
        numbers = episodes.first(experience["episode"]).tolist()
        for at, (number, rows) in enumerate(zip(numbers, episodes.grid().tolist(), strict=True)):
            said = [int(experience["action"][row]) for row in rows if row >= 0]
            which = (number - first) // answers
            found[which].append(
                {
                    **self.row(places[which], tasks[which], decode),
                    "answer": said,
                    "text": decode(said),
                    "numbers": {name: worth[name][at] for name in names},
                }
            )
        return found

    def row(self, place: int, task: Any, decode: Any) -> Row:
        return {"task": place, "id": task.id, "prompt": decode(list(task.prompt))}

    def answer(self, place: int, task: Any, answer: Sequence[int], **numbers: float) -> Row:
        """A given answer to a task, as a row of data."""
        decode, said = cast(Any, self.world).tokenizer.decode, list(answer)
        return {
            **self.row(place, task, decode),
            "answer": said,
            "text": decode(said),
            "numbers": dict(numbers),
        }

    def judged(self, judge: str, rows: Sequence[Row]) -> list[float]:
        """What a reward model (a run of `reward-model`, or a folder) gives for the answer of each row."""
        from panoply.policies.build import DTYPE, pick_device
        from panoply.policies.classifier import open_judge
        from panoply.which import model_folder

        options, collect = self.plan.options, self.collect("start")
        device, words = pick_device(options.device), collect.policy.tokenizer
        context = self.plan.policy_options.get("context", 0)
        model = open_judge(model_folder(judge), DTYPE[options.dtype], device, words, context)
        found: list[float] = []
        for first in range(0, len(rows), 8 * ASKED):
            some = rows[first : first + 8 * ASKED]
            said = collect.answers(data_folder.tasks_of(some, collect), [row["answer"] for row in some])
            with torch.no_grad():
                found += model.judge(said).tolist()
        return found


def make_data(plan: Plan, run: Run, progress: Progress) -> None:
    """Call the part and write what it makes; a stage that was killed on the way is done again from its beginning."""
    started = time.monotonic()
    part = plan.method.slots()["make"]
    assert not isinstance(part, tuple)
    progress.say(f"Making data: {part.equation()}.")
    if plan.options.threads:
        torch.set_num_threads(plan.options.threads)
    with machine_errors():
        rows = list(part(Maker(plan)))
    fingerprint = data_folder.write(run.folder, rows)
    progress.say(f"{len(rows)} rows of data in {run.folder / data_folder.FILE}.")
    seconds = round(time.monotonic() - started, 2)
    run.rewind(0)
    run.log({"step": 1, "seconds": seconds, "rows": len(rows)})
    threads = torch.get_num_threads()
    run.finish(
        {
            "steps": 1,
            "seconds": seconds,
            "before": {},
            "after": {"rows": len(rows)},
            "threads": threads,
            "fingerprint": fingerprint,
        }
    )
