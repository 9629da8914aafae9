"""ReLIFT: by trial and error, and now and then a lesson on what was too hard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from panoply.batch import Batch, Values
from panoply.costs import Lengths, Tokens, own_episodes
from panoply.episodes import as_tensors, from_tensors
from panoply.evidence.claims import Learns, Shows
from panoply.experience import DEMONSTRATION, Experience
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, Part, part
from panoply.regimes import Dataset, Several
from panoply.registry import Published, method
from panoply.slots.credit.groups import group
from panoply.slots.data.dealt import dealt as dealt_data
from panoply.slots.reduce.averages import constant, token_mean
from panoply.slots.regularise.terms import entropy
from panoply.slots.sample.dealt import dealt
from panoply.slots.sample.groups import LIMITS, greedy_groups
from panoply.slots.sample.repair import failed, tasks_of
from panoply.slots.sample.taught import verified
from panoply.slots.surrogate.ratios import ratio
from panoply.slots.turn.turns import filled
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.rollout.text import Collector


def _cost(held: Any, of: Lengths) -> Tokens:
    sampled, trained = own_episodes(held, of)
    return sampled, trained + held.lesson * (of.prompt + of.context)


def _seats(held: Any, method: Any) -> list[Finding]:
    if {"solver", "lessons"} != set(method.seated()):
        return [("prompts", "it deals to seats called solver and lessons")]
    return greedy_groups(held, method)


@part(
    "game",
    equation="{prompts} prompts × {group} episodes; of what all fail, right answers, {lesson} at a time",
    needs=lambda held: frozenset({"world:verify", "world:reference", f"signal:{held.name}"}),
    bounds={**LIMITS, "lesson": "at least 1"},
    impossible=_seats,
    state=lambda: {"given": 0},
    cost=_cost,
)
def hard_ones(
    state: dict[str, Any],
    collectors: Mapping[str, Collector],
    *,
    prompts: int = 128,
    group: int = 8,
    lesson: int = 128,
    temperature: float = 1.0,
    name: str = "success",
) -> tuple[dict[str, Any], dict[str, Experience]]:
    """The solver's episodes; a prompt on which all of its group fail waits, with a right answer, for the next lesson.

    A prompt waits once, however often it is asked. A lesson has exactly so many answers, the latest ones; the others
    wait on. Metrics: `unsolved`, the share of groups that fail, `waiting`, and `demonstrations`, all that were given.

    lesson   answers of a lesson: fewer would make small steps of chance
    name     the signal without which an episode has failed
    """
    solver, lessons = collectors["solver"], collectors["lessons"]
    tasks = solver.tasks(prompts)
    found = solver.episodes(tasks, group, temperature=temperature)
    hard = failed(found, name)
    waits = from_tensors(state) if len(state) > 1 else lessons.answers([], [], source=DEMONSTRATION)
    known = set(waits["task"].tolist())
    new = {task.id: task for task in tasks_of(found, hard, tasks) if task.id not in known}
    right = [(task, answers[0]) for task in new.values() if (answers := verified(solver.world, task))]
    waits = Experience.mix(
        [waits, lessons.answers([t for t, _ in right], [a for _, a in right], source=DEMONSTRATION)]
    )
    keys = waits.by("episode").keys
    due = keys[-lesson:] if len(keys) >= lesson else keys[:0]
    taken = torch.isin(waits["episode"], due)
    given = state["given"] + len(due)
    solver.notes = {
        "unsolved": len(hard) / prompts,
        "waiting": float(len(keys) - len(due)),
        "demonstrations": float(given),
    }
    left = waits.take(~taken)
    kept = {"given": given, **(as_tensors(left) if len(left) else {})}
    return kept, {"solver": found, "lessons": waits.take(taken)}


@part(
    "loss",
    equation="−log π − {entropy}·H",
    stream="imitation",
    needs={"entropy"},
    bounds={"entropy": "at least 0", "weight": "above 0"},
)
def lesson(batch: Batch, *, entropy: float = 0.001, weight: float | Part = 1.0) -> Values:
    """Imitation that leaves the policy a little random: minus the log-likelihood, minus some of the entropy."""
    logp = batch.now["logp"]
    return -logp - entropy * batch.now["entropy"], {"nll": -logp.detach()}


TINY = {
    "game.prompts": 16,
    "game.lesson": 16,
    "solver.reduce.length": 32,
    **{
        f"{seat}.{path}": value
        for seat in ("solver", "lessons")
        for path, value in {
            "update.lr": 3e-4,
            "update.beta2": 0.95,
            "update.schedule.warmup": 10,
            "update.minibatches": 1,
        }.items()
    },
    "run.steps": 150,
}

CLAIM = Learns(
    "Of three kinds of problem GRPO learns the one that sometimes succeeds and never the one that never does; with a "
    "lesson whenever sixteen failed prompts have come together, the third is learned as well, from a small share of "
    "all demonstrations.",
    over="grpo",
    world="chain:kinds",
    budget="episodes=15360",
    tune={},
    fixed="the two learners of ReLIFT have a rate each and GRPO has one: all are 3e-4, GRPO's own for such a model",
    also=("success", "held_out_sampled_differences", "held_out_sampled_products", "demonstrations"),
    shows=(Shows("held_out_sampled_differences", most=0.3),),
)

PUBLISHED: Published = {
    "TheRoadQaQ/ReLIFT, examples/math-7b/train.sh": {
        "game.prompts": 128,
        "game.group": 8,
        "game.lesson": 128,
        "game.temperature": 1.0,
        "solver.credit.scale": "none",
        "solver.surrogate": "ratio",
        "solver.regularise.entropy.weight": 0.001,
        "solver.reduce": "constant",
        "solver.reduce.length": 8192,
        "solver.update.lr": 1e-6,
        "solver.update.clip": 0.7,
        "solver.update.minibatches": 2,
        "lessons.losses.lesson.entropy": 0.001,
        "lessons.update.lr": 1e-6,
        "lessons.update.epochs": 1,
        "lessons.update.minibatches": 1,
    },
}


@method(
    "relift@1",
    paper=200,
    base="grpo",
    presets={"tiny": TINY},
    claim=CLAIM,
    published=PUBLISHED,
    tags=("teachers", "source=self", "source=expert"),
)
def relift() -> Several:
    """ReLIFT (arXiv 2506.07527). GRPO without clip or deviations; 128 failed prompts together make a step of imitation.

    A prompt on which all eight answers fail teaches trial and error nothing. It waits, with a right answer, until 128
    of them have come together; then one step of −mean log π − 0.001·H is taken on these, and trial and error goes on.
    Demonstrations are spent on nothing that can be found without them.

    What is surprising: the two learners move the same weights, and each has an optimiser of its own. Moments of one
    would make the other's first steps after a lesson go where the lesson went. Settings are `solver.PATH` and
    `lessons.PATH`. A failed prompt is one without `success`; that an answer had the right format counts for nothing.
    Answers that the world finds wrong are not taught.
    """
    solver = grpo().but(
        sample=dealt(),
        credit=group(baseline="mean", scale="none"),
        surrogate=ratio(),
        regularise=(entropy(weight=0.001),),
        reduce=constant(length=8192),
        update=adam(lr=1e-6, clip=0.7, minibatches=2),
    )
    lessons = Dataset(dealt_data(), (lesson(),), token_mean(), adam(lr=1e-6, clip=0.7))
    both = (("solver", solver), ("lessons", lessons))
    return Several(both, filled(episodes=(1, 1)), hard_ones(), share=True, apart=True)
