"""SMART: what finally worked is imitated as if it had been the first attempt, so that it will be the first attempt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from panoply.evidence.claims import Learns, Shows
from panoply.parts import Finding, part
from panoply.recipes import Recipe, Stage
from panoply.registry import recipe
from panoply.seeds import numpy_rng

if TYPE_CHECKING:
    from panoply.data_folder import Row
    from panoply.loops.making import Maker

AT_ONCE = 256
"""Tasks that are attempted together."""


class Attempts:
    """Of some tasks, which ways were tried, and which of them were right with what answer."""

    def __init__(self, world: Any, tasks: Sequence[Any]):
        self.world, self.tasks = world, tasks
        self.tried: list[set[str]] = [set() for _ in tasks]
        self.right: list[dict[str, tuple[list[int], int]]] = [{} for _ in tasks]
        """By the way: the answer, and the number of the attempt."""

    def open(self, every: bool) -> list[int]:
        """Tasks with a way that is left to try; unless all are to be tried, those that nothing has solved."""
        left = (i for i in range(len(self.tasks)) if len(self.tried[i]) < len(self.world.ways))
        return [i for i in left if every or not self.right[i]]

    def untried(self, i: int) -> list[str]:
        return [way for way in self.world.ways if way not in self.tried[i]]

    def note(self, i: int, answer: Sequence[int], attempt: int) -> None:
        """Write down an answer from its very beginning. One that begins in no way at all uses up none."""
        way = self.world.mode(self.tasks[i], answer)
        if way:
            self.tried[i].add(way)
        if way and self.world.grade(self.tasks[i], answer)["success"] == 1:
            self.right[i][way] = list(answer), attempt


def _inert(held: Any, method: Any) -> list[Finding]:
    return [("tries", "every way is tried")] if held.every else []


@part(
    "make",
    equation=lambda held: (
        f"of {held.prompts} tasks one answer of {held.policy} that was right, "
        + ("of all ways" if held.every else f"found in at most {held.tries} attempts")
    ),
    needs={"world:text", "world:verify", "world:modes"},
    bounds={"prompts": "at least 1", "tries": "at least 1", "temperature": "above 0 to 100"},
    inert=_inert,
)
def first_attempts(
    maker: Maker,
    *,
    policy: str = "start",
    prompts: int = 1024,
    tries: int = 3,
    every: bool = False,
    temperature: float = 1.0,
) -> Iterator[Row]:
    """A policy answers in the way it chooses; where that fails, in others until one is right, which is kept.

    What is kept stands after the bare task, as if it had been said first, whatever was tried before it; the number
    `attempt` says how many attempts it took. One answer a task, so that easy tasks do not outnumber the others.

    tries   attempts at a task, no way twice; 1 keeps what was right at first alone
    every   whether all ways are tried on every task, and one of those that were right is kept by chance: no way is then
            preferred for having been tried first
    """
    collect, world = maker.collect(policy), cast(Any, maker.world)
    decode = collect.policy.tokenizer.decode
    for first in range(0, prompts, AT_ONCE):
        places = [collect.place(i) for i in range(first, min(first + AT_ONCE, prompts))]
        attempts = Attempts(world, [collect.task(place) for place in places])
        rng = numpy_rng("ways", maker.seed, first)
        for attempt in range(1, 1 + (len(world.ways) if every else tries)):
            asked = attempts.open(every)
            begun = [attempts.tasks[i] for i in asked]
            if attempt > 1 or every:
                chosen = [str(rng.choice(attempts.untried(i))) for i in asked]
                begun = [world.in_mode(task, way) for task, way in zip(begun, chosen, strict=True)]
            for i, answer in zip(asked, _answers(collect, begun, temperature), strict=True):
                attempts.note(i, answer, attempt)
        for place, task, right in zip(places, attempts.tasks, attempts.right, strict=True):
            if right:
                answer, attempt = right[str(rng.choice(sorted(right)))]
                row = maker.row(place, task, decode)
                yield {
                    **row,
                    "answer": answer,
                    "text": decode(answer),
                    "numbers": {"attempt": float(attempt)},
                }


def _answers(collect: Any, tasks: Sequence[Any], temperature: float) -> list[list[int]]:
    """An answer to each task from its very beginning, what stands in the prompt already included."""
    if not tasks:
        return []
    with torch.no_grad():
        found = collect.episodes(tasks, 1, temperature=temperature)
    grid = found.by("episode").grid().tolist()
    said = [[int(found["action"][row]) for row in rows if row >= 0] for rows in grid]
    return [[*task.given, *answer] for task, answer in zip(tasks, said, strict=True)]


CLAIM = Learns(
    "Imitating what finally worked, as if it had been the first attempt, is right at the first attempt more often "
    "after as many steps and rounds than imitating what was right at first alone.",
    over="first alone=smart:attempts.every=false,attempts.tries=1",
    world="modes",
    budget="steps=80",
    metric="success",
    tune={},
    fixed="both imitate at the same rate and for as many steps; what differs is what they imitate",
    also=("area", "world:thinks@1", "world:thinks@4", "world:thinks@6"),
    shows=(Shows("success", least=0.2, most=0.9),),
)


@recipe("smart@1", paper=217, world="modes", claim=CLAIM, tags=("reward=rule", "optimisation=rejection"))
def smart() -> Recipe:
    """SMART (arXiv 2410.16128): learn which way to go about a problem. L = −E[Σ over right (a, o) of log π(a, o | x)].

    The policy chooses a way a and answers o; where that is wrong it tries the others; and it imitates the pair that was
    right after the bare problem x, refinements left out, so that next time it begins with it. Round after round: data
    of the latest policy, imitation from the start anew.

    What is surprising: it is imitation of one's own successes and knows no negative signal, and yet it moves the
    choice, since every problem that some way solves puts its weight on such a way. Which way is tried first would be
    preferred for that alone: in the first round all are tried, and of the right ones chance takes one.

    Reconstructed from reviews and a summary, rounds and numbers of prompts included; its code is not released as a
    whole. Adapters are an option (`--lora`). A later attempt is drawn from the ways that are left, without the failed
    ones before it in the prompt. Rounds end after their number, and not when a gain is small (`until` may say when).
    """
    return Recipe(
        (
            Stage("attempts", make=first_attempts(policy="@last", every=True), again={"every": False}),
            Stage(
                "imitate",
                "sft",
                {"data": "stored", "data.folder": "@attempts"},
                {"steps": 40},
                again={"model": "start"},
            ),
        ),
        rounds=2,
    )
