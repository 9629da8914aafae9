"""DED: few examples, of the teacher that suits the pupil, on what it fails, in ways that differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from panoply.errors import PanoplyError
from panoply.evidence.claims import Ranks, Shows
from panoply.parts import Finding, part
from panoply.recipes import Recipe, Stage
from panoply.registry import recipe
from panoply.seeds import numpy_rng
from panoply.slots.make.answers import LIMITS
from panoply.slots.make.curating import corpus_entropy, farthest_point, select_teacher
from panoply.which import run_of

if TYPE_CHECKING:
    from panoply.data_folder import Row
    from panoply.loops.making import Maker


def _taught(maker: Maker, task: Any, place: int, teacher: str, times: int) -> list[list[int]]:
    """Different answers that a teacher gives in so many times, those that the world finds right."""
    world: Any = maker.world
    said = (world.teach(task, teacher, numpy_rng("taught", maker.seed, place, i)) for i in range(times))
    every = list({tuple(answer): answer for answer in said}.values())
    graded = world.grade_all([task] * len(every), every)
    return [answer for answer, g in zip(every, graded, strict=True) if g is not None and g["success"]]


@part(
    "make",
    equation="an answer of {teacher} to each of {prompts} tasks",
    needs={"world:text", "world:verify", "world:reference"},
    bounds=LIMITS,
)
def taught_by(maker: Maker, *, teacher: str = "reference", prompts: int = 64) -> Iterator[Row]:
    """A teacher's answers to tasks as they come, the same ones whoever teaches; wrong ones are left out.

    Of each answer the number `entropy` says how uncertain the pupil is along it, before it learns anything.
    """
    collect = maker.collect("start")
    places = [collect.place(i) for i in range(prompts)]
    asked = [(place, collect.task(place)) for place in places]
    found = [(p, t, a) for p, t in asked for a in _taught(maker, t, p, teacher, 1)]
    if not found:
        return
    corpus = collect.answers([t for _, t, _ in found], [a for *_, a in found])
    for (place, task, answer), doubt in zip(
        found, corpus_entropy(collect.policy, corpus).tolist(), strict=True
    ):
        yield maker.answer(place, task, answer, entropy=doubt)


def _two(held: Any, method: Any) -> list[Finding]:
    return [] if len(held.teachers) == 2 else [("teachers", "two are tried: name both")]


@part(
    "make",
    equation="of {prompts} tasks, where at most {most} of {answers} answers of {policy} are right: {keep} answers of "
    "the better of {teachers}, far from one another",
    needs={"world:text", "world:verify", "world:reference"},
    bounds={**LIMITS, "most": "from 0 to 1", "traces": "at least 1", "keep": "at least 1"},
    impossible=_two,
)
def curated(
    maker: Maker,
    *,
    teachers: tuple[str, ...] = ("reference", "careless"),
    first: str = "",
    second: str = "",
    policy: str = "start",
    prompts: int = 256,
    answers: int = 8,
    most: float = 0.5,
    traces: int = 8,
    keep: int = 2,
    temperature: float = 1.0,
) -> Iterator[Row]:
    """Examples of the teacher whose pupil did better in a trial, to problems that the pupil does not solve already.

    teachers        two, by name (`world.teachers`)
    first, second   the runs in which the pupil learned from each
    most            the largest share of its own answers that may be right
    traces          how often the teacher answers a problem; right answers are kept, each once
    keep            how many of these, by farthest points; a problem that the teacher fails is left out
    """
    scores = {name: _score(run) for name, run in zip(teachers, (first, second), strict=True)}
    chosen = select_teacher(scores)
    for rows in maker.answered(policy, prompts, answers, temperature):
        rate = sum(row["numbers"]["success"] for row in rows) / len(rows)
        if rate > most:
            continue
        place = rows[0]["task"]
        task = cast(Any, maker.world).task("train", place)
        right = _taught(maker, task, place, chosen, traces)
        for i in farthest_point(right, keep):
            yield maker.answer(place, task, right[i], rate=rate, teacher=float(teachers.index(chosen)))


def _score(folder: str) -> float:
    """What a trial came to on problems that settings are chosen by."""
    result = run_of(folder).result() if folder else None
    after: Any = {} if result is None else result["after"]
    if "sampled" not in after:
        raise PanoplyError(f"A trial is a finished run that was evaluated, unlike '{folder}'.")
    return float(after["sampled"])


LEARN = {"data": "stored", "data.batch": 32, "update.lr": 1e-3, "update.schedule": "constant"}
TEACHERS = ("D", "native")
"""Of `styles`: who is always right, in letters that the pupil has never read; and who writes as it does, and slips."""


def _trial(name: str, teacher: str) -> tuple[Stage, Stage]:
    """The pupil learns from one teacher, and is judged by problems that nothing else is judged by."""
    settings = {**LEARN, "data.folder": f"@{name}", "run.split": "validation"}
    return (
        Stage(name, make=taught_by(teacher=teacher)),
        Stage(f"try_{name}", "sft", settings, {"steps": 20}),
    )


CLAIM = Ranks(
    "Sixty steps of imitation on examples of the teacher that suits the pupil, to problems it fails and in ways that "
    "differ, get it further than as many on answers of the teacher who is always right, and than as many on answers of "
    "the suitable one to problems as they come.",
    ("", "the most accurate=uncurated:any.teacher=D", "any problems=uncurated"),
    "styles",
    "imitate.steps=60",
    metric="success",
    leads=True,
    tune={},
    fixed="all sides imitate at the same rate, from the same start",
    also=("held_out_sampled_trapped", "held_out_sampled_plain", "distinct@32"),
    shows=(Shows("success", most=0.8),),
)


@recipe("ded@1", paper=6, world="styles", claim=CLAIM, tags=("teachers",))
def ded() -> Recipe:
    """DED (arXiv 2508.09883): a teacher by trial, problems the pupil fails, a few answers each that differ; then SFT.

    Two teachers answer the same few problems; the pupil learns from each apart, and who made it better, on problems of
    their own, teaches. Problems of which the pupil solves more than half are dropped. The teacher answers each of the
    rest eight times; of its right answers two are kept, by farthest points: the first, then the one whose nearest of
    those kept is the farthest, by edit distance over the longer length. Plain imitation of these ends it.

    What is surprising: the best teacher is not the one who is best. One who is always right, in a way that the pupil
    cannot follow, teaches less than one who errs and writes as the pupil does. It shows before any training as the
    entropy of the pupil along the answers (`entropy` in the trial's data; `corpus_entropy`), and afterwards as how far
    its hidden states have moved (`latent_shift`; both in panoply/slots/make/curating.py).

    The paper's numbers are about 0.8 thousand examples for a model of 32 billion weights. The share of one half, eight
    answers, two kept, steps and rates are reconstructed. The trials' steps come on top of those of imitation.
    """
    first, second = TEACHERS
    chosen = curated(teachers=TEACHERS, first="@try_a", second="@try_b")
    return Recipe(
        (
            *_trial("a", first),
            *_trial("b", second),
            Stage("curate", make=chosen),
            Stage("imitate", "sft", {**LEARN, "data.folder": "@curate"}, {"steps": 60}),
        )
    )


@recipe("uncurated@1", world="styles")
def uncurated() -> Recipe:
    """What DED is compared with: one teacher's answers to problems as they come."""
    return Recipe(
        (
            Stage("any", make=taught_by(teacher=TEACHERS[1], prompts=256)),
            Stage("imitate", "sft", {**LEARN, "data.folder": "@any"}, {"steps": 60}),
        )
    )
