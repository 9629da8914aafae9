"""Metis-RISE: trial and error first, then imitation of what it left undone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from panoply.evidence.claims import Ranks, Shows
from panoply.parts import Part, part
from panoply.recipes import Recipe, Stage
from panoply.registry import recipe
from panoply.slots.make.answers import LIMITS, solved_for
from panoply.slots.sample.taught import verified

if TYPE_CHECKING:
    from panoply.data_folder import Row
    from panoply.loops.making import Maker


@part(
    "make",
    equation="of {prompts} tasks, those that {policy} solves in up to {high} of {answers} answers: its own right ones; "
    "those it never solves: a teacher's",
    needs={"world:text", "world:verify", "world:reference"},
    bounds={**LIMITS, "high": "from 0 to 1"},
)
def targeted(
    maker: Maker,
    *,
    policy: str = "start",
    prompts: int = 256,
    answers: int = 8,
    high: float = 0.75,
    most: int = 2,
    temperature: float = 1.0,
) -> Iterator[Row]:
    """What a policy lacks: where it succeeds at times its own right answers, where it never does a teacher's.

    Of its own the shortest, each once. A teacher's answer that the world finds wrong is left out. The numbers of a row
    are `rate`, how often the policy was right, and `own`.

    high   the largest rate of a task that is still worth imitating
    most   own answers of a task at most
    """
    for rows in maker.answered(policy, prompts, answers, temperature):
        right = {tuple(row["answer"]): row for row in rows if row["numbers"]["success"] == 1.0}
        rate = sum(row["numbers"]["success"] for row in rows) / len(rows)
        if not right:
            place = rows[0]["task"]
            task = cast(Any, maker.world).task("train", place)
            for answer in verified(maker.world, task)[:1]:
                yield maker.answer(place, task, answer, rate=0.0, own=0.0)
        elif rate <= high:
            for row in sorted(right.values(), key=lambda row: len(row["answer"]))[:most]:
                yield {**row, "numbers": {"rate": rate, "own": 1.0}}


IMITATE = {"data": "stored", "data.batch": 64, "update.lr": 3e-4, "update.schedule": "constant"}
"""A low rate and few steps: imitation after trial and error can erase what that has gained."""


def _stages(made: Part) -> Recipe:
    return Recipe(
        (
            Stage("try", "dapo", options={"steps": 30}),
            Stage("target", make=made),
            Stage("imitate", "sft", {**IMITATE, "data.folder": "@target"}, {"model": "@try", "steps": 20}),
        )
    )


CLAIM = Ranks(
    "After trial and error has learned what sometimes succeeds, imitating own right answers there and a teacher's "
    "where nothing ever did gets further in as many steps than more trial and error, and than the teacher's answers to "
    "problems as they come.",
    (
        "metis-rise=metis-rise:try.sample.prompts=8",
        "trial and error=dapo:sample.prompts=8",
        "any problems=untargeted:try.sample.prompts=8",
    ),
    "chain:frontier",
    "steps=50",
    metric="success",
    leads=True,
    tune={},
    fixed="recipes have a rate for each stage: that of trial and error is the same on all sides, and that of imitation "
    "on both that imitate",
    also=("area", "pass@16", "entropy"),
    shows=(Shows("success", most=0.7),),
)


@recipe(
    "metis-rise@1",
    paper=173,
    world="chain:frontier",
    claim=CLAIM,
    tags=("teachers", "optimisation=critic-free", "optimisation=rejection", "optimisation=hybrid"),
)
def metis_rise() -> Recipe:
    """Metis-RISE (arXiv 2506.13056): DAPO without a cold start, then imitation of own and of a teacher's answers.

    First trial and error from the start model. Then eight answers to each task by what came of it, p̂ of them right:
    tasks with 0 < p̂ ≤ ¾ keep own right answers, the shortest; those with p̂ = 0 get a teacher's; the others are dropped.
    Imitation of both, from the weights that trial and error left, ends it; no more trial and error follows.

    What is surprising: tasks are sorted by the policy that has already tried, not by the one it began as, so that
    teachers are asked only for what trial and error cannot find; and the own answers are there so that its own way of
    writing stays the most frequent, or imitation would undo what was gained.

    The order of stages, what goes into the data, and DAPO's changes (no KL term, groups that differ, a wider upper
    bound, a mean over tokens, a penalty for long answers) are published. How many answers a task, the bound ¾, steps
    and rates are reconstructed. In the paper a teacher of text reads a description of each image; here worlds have no
    images, and their own teachers are asked. Rewards for a format are the world's affair.
    """
    return _stages(targeted(policy="@try"))


@recipe("untargeted@1", world="chain:frontier")
def untargeted() -> Recipe:
    """What Metis-RISE is compared with: the same stages, and a teacher's answers to problems as they come."""
    return _stages(solved_for(prompts=256))
