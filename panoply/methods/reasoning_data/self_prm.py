"""Self-PRM: does learning to solve teach to judge, and may a policy choose among its own answers?"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panoply.errors import PanoplyError
from panoply.evaluation.best_of import ProcessF1, acceptance_by, association, majority, process_f1
from panoply.evidence.claims import Ahead
from panoply.registry import protocol
from panoply.seeds import numpy_rng

if TYPE_CHECKING:
    from panoply.evaluation.judged import Judged
    from panoply.policies.text import TextPolicy
    from panoply.worlds.text.proofread import Proofread
    from panoply.worlds.world import Task

SIZES = (4, 16, 64)
"""Numbers of answers out of which one is chosen."""


# ------------------------------------------------------------------ asking


def said(
    world: Proofread, policy: TextPolicy, tasks: Sequence[Task], times: int, seed: int, temperature: float
) -> list[list[list[int]]]:
    """What a policy answers to each task, so many times."""
    from panoply.rollout.text import Collector
    from panoply.slots.sample.answers import answers_of

    collect, found = Collector(world, policy, seed, split="test"), []
    size = max(1, 1024 // times)
    for some in (tasks[at : at + size] for at in range(0, len(tasks), size)):
        answers = answers_of(collect.episodes(some, times, temperature=temperature))
        found += [answers[at * times : (at + 1) * times] for at in range(len(some))]
    return found


def judging(
    world: Proofread, policy: TextPolicy, problems: int, seed: int = 0
) -> tuple[ProcessF1, list[bool]]:
    """How well a policy finds first wrong steps in given solutions, and on which of them it is right. Never sampled.

    What it is shown is a problem and a solution: neither the right one nor whether it is right.
    """
    tasks = world.checks(problems)
    named = [world.located(answers[0]) for answers in said(world, policy, tasks, 1, seed, 0.0)]
    first = [int(task.data["first"]) for task in tasks]
    return process_f1(first, named), [a == b for a, b in zip(first, named, strict=True)]


@dataclass(frozen=True)
class Chosen:
    """Many answers to each problem: which are right, which are accepted by the policy itself, and what they end on."""

    level: list[int]
    gold: list[str]
    ends: list[list[str]]
    right: list[list[bool]]
    """Whether the whole solution is."""
    votes: list[list[float]]
    """By how many of its verdicts the policy accepts an answer, from 0 to 1."""

    def accepted(self, at: int) -> list[bool]:
        return [share > 0.5 for share in self.votes[at]]

    def accuracy(self, rule: str, n: int, seed: int = 0) -> float:
        """How often the final result is right that is chosen out of the first `n` answers.

        `one` is any answer, `majority` the most frequent result, `self` that among accepted answers (of all, where none
        is), `votes` weighs every answer by the policy's verdicts, and `chance` accepts as many answers at random.
        """
        found = 0.0
        for at, (ends, gold) in enumerate(zip(self.ends, self.gold, strict=True)):
            some = ends[:n]
            if rule == "one":
                found += sum(end == gold for end in some) / len(some)
                continue
            kept = [float(a) for a in self.accepted(at)[:n]]
            if rule == "chance":
                kept = numpy_rng("chance", seed, at).permutation(kept).tolist()
            weights = {"majority": None, "votes": self.votes[at][:n]}.get(rule, kept)
            found += majority(some, weights) == gold
        return found / len(self.gold)

    def by_level(self) -> dict[int, Any]:
        """Precision and recall of what is accepted, for every difficulty."""
        rows = [
            (level, r, a)
            for at, level in enumerate(self.level)
            for r, a in zip(self.right[at], self.accepted(at), strict=True)
        ]
        level, right, accepted = zip(*rows, strict=True)
        return dict(acceptance_by(level, right, accepted))


def choosing(
    world: Proofread, policy: TextPolicy, problems: int, answers: int, votes: int = 1, seed: int = 0
) -> Chosen:
    """A policy's own answers to held-out problems, each of which it then checks itself, `votes` times.

    One vote is its likeliest verdict. An answer without the form of a solution is not accepted, and not asked about.
    """
    tasks = [task for task in world.held_out(problems * len(world.kinds)) if "trace" not in task.data][
        :problems
    ]
    given = said(world, policy, tasks, answers, seed, 1.0)
    asked = [
        (at, i, question)
        for at, task in enumerate(tasks)
        for i, answer in enumerate(given[at])
        if (question := world.referee(task, [answer])) is not None
    ]
    verdicts = [[0.0] * answers for _ in tasks]
    questions = [question for _, _, question in asked]
    for (at, i, question), words in zip(
        asked, said(world, policy, questions, votes, seed + 1, 0.0 if votes == 1 else 1.0), strict=True
    ):
        scores = [world.scores(question, word) or [0.0] for word in words]
        verdicts[at][i] = sum(score[0] for score in scores) / votes
    return Chosen(
        level=[task.level for task in tasks],
        gold=[_end(world, world.gold(task)) for task in tasks],
        ends=[[_end(world, answer) for answer in of] for of in given],
        right=[
            [bool(world.grade(task, a)["success"]) for a in of] for task, of in zip(tasks, given, strict=True)
        ],
        votes=verdicts,
    )


def _end(world: Proofread, answer: Sequence[int]) -> str:
    """The final result of an answer: its last digit, and nothing where it does not end."""
    text = world._text(answer)
    return text[-2] if text.endswith("$") and len(text) > 1 else ""


# ------------------------------------------------------------------ a run


def of_run(
    judged: Judged, *, problems: int = 100, answers: int = 16, votes: int = 1, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Solving and judging at every checkpoint of a run, and what choosing among own answers gives at the last."""
    world = judged.world
    if not hasattr(world, "located"):
        raise PanoplyError(
            f"{world.name} has no question for the first wrong step of a solution: train on --world proofread."
        )
    table: dict[str, dict[str, float]] = {}
    for step in judged.steps():
        table[f"step {step}"] = _row(world, judged.policy(step), problems, seed)
    last = judged.policy(judged.steps()[-1])
    return table | _reranked(choosing(world, last, problems, answers, votes, seed), answers, seed)


def _row(world: Any, policy: Any, problems: int, seed: int) -> dict[str, float]:
    """Solving and judging of one policy, and whether they go together: of a problem it solves, does it judge right?"""
    f1, right = judging(world, policy, problems, seed)
    tasks = [task for task in world.held_out(problems * len(world.kinds)) if "trace" not in task.data]
    solved = [
        world.grade(t, a[0])["success"] == 1
        for t, a in zip(tasks, said(world, policy, tasks, 1, seed, 0.0), strict=True)
    ]
    together = association(solved[: len(right)], right)
    return {
        "solved": sum(solved) / len(solved),
        "F1": f1.f1,
        "erroneous": f1.erroneous,
        "sound": f1.sound,
        "odds ratio": together.odds_ratio,
        "chi²": together.chi_squared,
    }


def _reranked(chosen: Chosen, answers: int, seed: int) -> dict[str, dict[str, float]]:
    rules = ("one", "majority", "self", "votes", "chance")
    table = {
        f"of {n}": {rule: chosen.accuracy(rule, n, seed) for rule in rules}
        for n in sorted({*(n for n in SIZES if n <= answers), answers})
    }
    levels = chosen.by_level().items()
    return table | {
        f"level {level}": {"precision": of.precision, "recall": of.recall} for level, of in levels
    }


# ------------------------------------------------------------------ the claim

TRAINING: Mapping[str, Any] = {
    "sample.prompts": 16, "sample.group": 8, "update.lr": 1e-3, "run.steps": 60, "run.held_out": 64,
    "run.evaluate_every": 0,
}  # fmt: skip


def measure(seed: int) -> dict[str, float]:
    """By how much F1 of judging rises while a policy learns to solve, and then what choosing gives."""
    from panoply.api import train
    from panoply.evaluation.judged import Judged
    from panoply.policies.build import open_policy
    from panoply.progress import Progress
    from panoply.run import Run
    from panoply.worlds.text.proofread import Proofread

    world = Proofread()
    before = _row(world, open_policy("start", world, 0, "cpu"), 200, seed)
    with tempfile.TemporaryDirectory() as kept:
        settings = dict(TRAINING)
        done = train(
            "grpo",
            "proofread",
            run=Path(kept) / "run",
            settings=settings,
            seed=seed,
            threads=1,
            progress=Progress(),
        )
        after = Judged(Run.open(done.run), world)
        policy = after.policy(after.steps()[-1])
    judged = _row(world, policy, 200, seed)
    chosen = choosing(world, policy, 60, 16, seed=seed)
    gains = {f"{name} after": judged[name] for name in ("solved", "F1", "erroneous", "sound", "odds ratio")}
    table = _reranked(chosen, 16, seed)
    ranks = {f"{rule} of 16": table["of 16"][rule] for rule in table["of 16"]}
    hard = {f"precision, {name}": of["precision"] for name, of in table.items() if "precision" in of}
    known = {name: value for name, value in hard.items() if value == value}
    return {
        "F1 gained": judged["F1"] - before["F1"],
        "solved before": before["solved"],
        "F1 before": before["F1"],
        **gains,
        **ranks,
        **known,
    }


CLAIM = Ahead(
    "A policy that has seen how solutions are checked before, and then learns to solve problems from outcomes alone, "
    "finds the first wrong step of given solutions better afterwards than before.",
    measure,
)


@protocol("self-prm@1", paper=212, claim=CLAIM, judge=of_run)
def self_prm(seed: int = 0) -> dict[str, float]:
    """Self-PRM (arXiv 2505.11227): who learns to solve learns to judge, and may judge its own answers.

    Solving is success. Judging is F1 = 2·a_err·a_cor/(a_err + a_cor) of naming the first wrong step of given solutions:
    a_err on those with a fault, a_cor on those without, so that a judge who accepts everything gets 0. Choosing: of N
    own answers the policy keeps those in which it finds nothing wrong, and the most frequent result among them counts;
    where it keeps none, among all. Beside it: plain majority, votes weighted by verdicts, and a judge who accepts as
    many by chance. `panoply eval RUN --by self-prm` shows all that of a run on `--world proofread`: solving and judging
    at every checkpoint, their odds ratio over problems, results chosen of 4, 16 and up to `answers`, and by difficulty
    how many of the accepted answers are right.

    What the paper found: judging rises with solving though no step was ever labelled; the policy chooses better than
    the majority from 16 or 32 answers on; and of the answers it accepts to its hardest problems less than a tenth are
    right. Not there: reward models of others, which it chose better than, and its sets of problems. The protocol is
    reconstructed from the abstract, the measure from ProcessBench.
    """
    return measure(seed)
