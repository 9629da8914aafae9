"""Success, or mean reward, on problems a policy was not trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.evaluation.intervals import bootstrap, wilson
from panoply.evaluation.pass_at_k import mean_pass_at_k
from panoply.experience import Experience, transcript
from panoply.policies.text import TextPolicy
from panoply.report.shown import Shown
from panoply.rollout.text import Collector
from panoply.worlds.world import Task, TextWorld

ROWS = 512
"""Answers written at a time."""


class Ungraded(PanoplyError):
    """Not one answer could be graded, so nothing was measured."""


@dataclass(frozen=True, repr=False)
class Evaluation(Shown):
    """Means measured on held-out problems. The last of them is the one that says which checkpoint is best."""

    problems: int
    rates: dict[str, float]
    attempts: int = 1
    pass_at: dict[int, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    """The sampled mean of each kind of problem, where a world has several."""
    samples: list[str] = field(default_factory=list)
    """A few answers as text, greedy ones where there are any."""
    of: str = "success"
    """What the means are of: `success`, `reward` (of own reward functions), `return` or `accuracy`."""
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of the means, 95 %. Where none is given the means are rates, whose intervals follow from them."""
    success: dict[str, float] = field(default_factory=dict)
    """How many rewards reached the world's threshold, where the means are of rewards."""
    ungraded: int = 0
    """Answers that could not be graded. They are in none of the means."""
    reliability: Mapping[str, Any] = field(default_factory=dict)
    """Of a reward model: whether it is as sure as it is right, its margins, and its accuracy by group."""
    model: str = ""
    """Which model was measured, in words, and of which step of its run."""
    step: int | None = None

    def _page(self) -> str:
        from panoply.report.text import evaluated

        return evaluated(self)

    @property
    def score(self) -> float:
        return list(self.rates.values())[-1]

    @property
    def greedy(self) -> float:
        return self.rates["greedy"]

    @property
    def sampled(self) -> float:
        return self.rates["sampled"]

    def interval(self, name: str) -> tuple[float, float]:
        return self.intervals[name] if name in self.intervals else wilson(self.rates[name], self.problems)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"problems": self.problems, "attempts": self.attempts, "of": self.of}
        for name, rate in self.rates.items():
            found |= {name: rate, f"{name}_interval": list(self.interval(name))}
        extras = {
            "parts": self.parts,
            "success": self.success,
            "ungraded": self.ungraded,
            "reliability": self.reliability,
            "model": self.model,
        }
        found |= {name: value for name, value in extras.items() if value}
        found |= {} if self.step is None else {"step": self.step}
        return {**found, **{f"pass@{k}": v for k, v in self.pass_at.items()}}


def evaluate(
    world: TextWorld,
    policy: TextPolicy,
    problems: int,
    *,
    attempts: int = 1,
    ks: Sequence[int] = (1,),
    temperature: float = 1.0,
    seed: int = 0,
    shown: int = 4,
    split: str = "test",
    greedy: bool = True,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Greedy answers, and `attempts` sampled ones a problem with the unbiased pass@k.

    What is averaged is the world's `judged_by`: success, or the reward of functions of one's own. Answers that could
    not be graded are counted and left out.

    split    `test`, or `validation`: other problems, to choose settings by
    greedy   whether greedy answers are written at all; those shown are sampled then
    watch    is told now and then how many of all answers have been written
    """
    tasks = world.validation(problems) if split == "validation" else world.held_out(problems)
    problems = len(tasks)
    total, done = problems * (greedy + attempts), 0

    def tick(answers: int) -> None:
        nonlocal done
        done += answers
        watch(done, total)

    watch(0, total)
    found = {"greedy": _answer(world, policy, tasks, 1, 0.0, seed, shown, tick)} if greedy else {}
    sampled = _answer(world, policy, tasks, attempts, temperature, seed, 0 if greedy else shown, tick)
    both, rates = {**found, "sampled": sampled}, world.judged_by == "success"
    return Evaluation(
        problems,
        {name: given.mean() for name, given in both.items()},
        attempts,
        {k: rate for k in ks if (rate := sampled.pass_at(k)) is not None},
        sampled.by_part(world, tasks),
        next(iter(both.values())).texts,
        of=world.judged_by,
        intervals={name: given.interval(rates) for name, given in both.items()},
        success={} if rates else {name: given.success() for name, given in both.items()},
        ungraded=sum(given.ungraded(1) for given in found.values()) + sampled.ungraded(attempts),
    )


@dataclass(frozen=True)
class _Answers:
    """What a policy's answers to each task came to."""

    graded: Tensor
    """How many of a task's answers could be graded."""
    successes: Tensor
    worth: Tensor
    """The sum over them of what the world judges by."""
    texts: list[str]

    def mean(self) -> float:
        return float(self.worth.sum() / self.graded.sum())

    def success(self) -> float:
        return float(self.successes.sum() / self.graded.sum())

    def interval(self, rates: bool) -> tuple[float, float]:
        """Over the tasks that have a graded answer."""
        known = self.graded > 0
        if rates:
            return wilson(self.mean(), int(known.sum()))
        return bootstrap(self.worth[known] / self.graded[known])

    def ungraded(self, attempts: int) -> int:
        return int((attempts - self.graded).sum())

    def pass_at(self, k: int) -> float | None:
        """Over the tasks with k graded answers; None where there is none."""
        enough = self.graded >= k
        counts = self.successes[enough].round().long().tolist()
        return mean_pass_at_k(counts, self.graded[enough].long().tolist(), k) if counts else None

    def by_part(self, world: TextWorld, tasks: list[Task]) -> dict[str, float]:
        names = [world.part_of(task) for task in tasks]
        rows = {part: [i for i, name in enumerate(names) if name == part] for part in sorted(set(names))}
        return {
            part: float(self.worth[of].sum() / graded)
            for part, of in rows.items()
            if part and (graded := float(self.graded[of].sum()))
        }


def _answer(
    world: TextWorld,
    policy: TextPolicy,
    tasks: list[Task],
    attempts: int,
    temperature: float,
    seed: int,
    shown: int,
    tick: Callable[[int], None],
) -> _Answers:
    """Some hundred answers at a time: the draws belong to the episodes, so they do not depend on it."""
    collector = Collector(world, policy, seed, split="test")
    sums: list[Tensor] = []
    texts: list[str] = []
    size = max(1, ROWS // attempts)
    for some in (tasks[i : i + size] for i in range(0, len(tasks), size)):
        first = collector.state["groups"]
        experience = collector.episodes(some, attempts, temperature=temperature)
        sums.append(_sums(world, experience, experience["group"] - first, len(some)))
        episodes = experience.by("episode").keys[::attempts].tolist()
        for task, episode in zip(some[: max(0, shown - len(texts))], episodes, strict=False):
            tokens, _ = transcript(experience, episode)
            texts.append(world.render(task, tokens[len(task.prompt) :]))
        tick(len(some) * attempts)
    graded, successes, worth = torch.cat(sums, 1).double().unbind()
    found = _Answers(graded, successes, worth, texts)
    if not bool(found.graded.any()):
        why = "; ".join(world.failures())
        raise Ungraded(f"Not one of {len(tasks) * attempts} held-out answers could be graded: {why}.")
    return found


def _sums(world: TextWorld, experience: Experience, task: Tensor, tasks: int) -> Tensor:
    """Of each task: how many answers were graded, their successes, and what they were worth."""
    graded = experience["graded"] if "graded" in experience else torch.ones(len(task))
    columns = [experience.by("episode").is_last().float()]
    for name in ("success", world.judged_by):
        if f"signal:{name}" not in experience:
            if not bool(graded.any()):
                return torch.zeros(3, tasks)
            raise PanoplyError(
                f"The world {world.name} grades answers without '{name}', so none can be measured."
            )
        columns.append(experience[f"signal:{name}"])
    return torch.stack([torch.zeros(tasks).index_add(0, task, column * graded) for column in columns])
