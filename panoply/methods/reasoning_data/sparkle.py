"""SPARKLE: what a reasoner gained by learning, along three axes, and hard problems that teach once they are opened."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from panoply import data_folder
from panoply.costs import own_episodes
from panoply.evaluation import axes as measured
from panoply.evidence import races
from panoply.evidence.claims import Diagnoses, Ranks, Shows
from panoply.experience import Experience
from panoply.methods.base.grpo import TINY as GRPO_TINY
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, part
from panoply.recipes import Recipe, Stage
from panoply.regimes import OnPolicy
from panoply.registry import Published, method, protocol, recipe
from panoply.seeds import numpy_rng
from panoply.slots.make.answers import bucket
from panoply.slots.regularise.terms import kl
from panoply.slots.sample.dynamic import varied_groups_of
from panoply.slots.sample.groups import greedy_groups
from panoply.slots.sample.hints import DRAWN
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from collections.abc import Sequence

    from panoply.evaluation.judged import Judged
    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task, TextWorld

# ------------------------------------------------------------------ the diagnosis


def student(world: TextWorld, kind: str, seed: int) -> measured.Ask:
    """One who succeeds four times in ten, and nine times after a plan or after knowledge, where it is of that `kind`.

    A `steps` student takes nine steps in ten, and so seldom all of them; one of no kind is helped by nothing.
    """
    dice, size = numpy_rng("sparkle student", kind, seed), world.step_tokens

    def answer(task: Task) -> list[int]:
        gold = world.gold(task)
        if kind == "steps":
            slips = dice.random((len(gold) - 1) // size) > 0.9
            return [0 if slips[min(at // size, len(slips) - 1)] else token for at, token in enumerate(gold)]
        told = [t for piece in world.aid(task, kind) for t in piece] if kind in measured.AIDS else []
        helped = bool(told) and list(task.prompt[: len(told)]) == told
        return gold if dice.random() < (0.9 if helped else 0.4) else [0] * size

    return lambda tasks: [answer(task) for task in tasks]


def flags(found: dict[str, float]) -> set[str]:
    """What stands out: an aid that helps more than its tokens do, or steps that succeed where the whole does not."""
    aids = {
        kind for kind in measured.AIDS if found[f"Δ {kind}"] - max(0.0, found[f"Δ shuffled {kind}"]) > 0.2
    }
    return aids | ({"steps"} if found["sub-problems"] - found["success"] > 0.2 else set())


def measure(seed: int, problems: int = 64) -> dict[str, float]:
    """How many planted students are found out, and nothing else of them, less how often one of no kind is suspected."""
    from panoply.worlds.text.chain import Chain

    world = Chain(operations=6, levels=(4, 6))
    tasks = [world.task("test", 64 * seed + i) for i in range(problems)]
    kinds = (*measured.AIDS, "steps", "none")
    said = {k: flags(measured.means(measured.axes(world, student(world, k, seed), tasks))) for k in kinds}
    hits = [said[kind] == {kind} for kind in kinds[:3]]
    return {"found − suspected": sum(hits) / 3 - bool(said["none"]), "found": sum(hits) / 3}


def of_run(judged: Judged, *, problems: int = 100, seed: int = 0) -> dict[str, dict[str, float]]:
    """The three axes of the policy that a run began with and of its last one, on held-out problems, by their level."""
    from panoply.kinds import kind_of
    from panoply.slots.sample.answers import answers_of

    world = judged.world
    measured.check(world)
    tasks = world.held_out(problems)
    table: dict[str, dict[str, float]] = {}
    for name, policy in (("start", judged.start()), ("trained", judged.policy(judged.steps()[-1]))):
        collect: Any = kind_of(world).collector(world, policy, seed)

        def ask(asked: Sequence[Task], collect: Any = collect) -> list[list[int]]:
            return answers_of(collect.episodes(asked))

        rows = measured.axes(world, ask, tasks)
        table[name] = measured.means(rows)
        levels: dict[int, list[dict[str, float]]] = defaultdict(list)
        for task, row in zip(tasks, rows, strict=True):
            levels[task.level].append(row)
        if len(levels) > 1:
            table |= {f"{name}, level {n}": measured.means(levels[n]) for n in sorted(levels)}
    return table


@protocol(
    "sparkle@1",
    paper=202,
    judge=of_run,
    claim=Diagnoses(
        "Of four students, the one who is helped by a plan, the one who is helped by knowledge and the one who takes "
        "every step but not all of them in a row are told apart, and one whom nothing helps is not suspected.",
        measure,
    ),
)
def sparkle(seed: int = 0) -> dict[str, float]:
    """SPARKLE's diagnosis (arXiv 2506.04723): success alone does not say what has been learned. Three axes do.

    Plan: Δ_plan = success after x ⊕ plan − success after x. Knowledge: Δ_knowledge, the same with the facts that are
    needed. Decomposition: the share of sub-problems that are solved, each after the right answers to those before it,
    and how often all of them are. `panoply eval RUN --by sparkle` prints them for the policy that a run began with and
    for its last one, by the level of problems (`panoply.evaluation.axes`).

    What the authors found is surprising: plans hurt on hard problems, less so after reinforcement learning; knowledge
    helps only after it; and sub-problems are solved far more often than whole problems. Any text before a problem
    makes it longer and unusual, so the same tokens in a random order are asked, too: a small model that never saw
    such prompts loses by both. The definitions are retold of the paper, whose scripts for it are not published.
    """
    return measure(seed)


# ------------------------------------------------------------------ training on hard problems


def _equation(held: Any) -> str:
    where = f"of {held.folder}" if held.folder else "of the world"
    versions = f"0 to {held.most}/{held.chunks} of the answer given" if held.most else "no hints"
    return f"{held.prompts} prompts {where} × {held.group} episodes, each prompt in versions: {versions}"


def _impossible(held: Any, method: Any) -> list[Finding]:
    if held.most > held.chunks:
        return [("most", f"an answer has {held.chunks} chunks (sample.chunks)")]
    return greedy_groups(held, method)


@part(
    "sample",
    equation=_equation,
    needs={"world:verify", "world:hint", "signal:success"},
    bounds={**DRAWN, "chunks": "at least 1", "most": "at least 0"},
    impossible=_impossible,
    inert=lambda held, method, world: [("chunks", "no hint is given (most=0)")] if held.most == 0 else [],
    cost=own_episodes,
)
def opened(
    collect: Collector,
    *,
    folder: str = "",
    prompts: int = 16,
    group: int = 8,
    temperature: float = 1.0,
    max_tokens: int | None = None,
    chunks: int = 4,
    most: int = 4,
) -> Experience:
    """Problems in versions that show 0, 1, … `most` of so many chunks of the answer; each version has its own group.

    All versions of all problems are asked once, then in another order. In metrics: `hint_share`, and of the versions
    that show all the chunks how many groups have no difference (`opened_degenerate`), since little is left to say.

    folder: of problems that an earlier stage has chosen (`make.bucket`); none: the world's next ones
    chunks: into how many parts of whole steps an answer is cut
    most: the most of them that a version shows
    """
    versions = most + 1
    if folder:
        rows = data_folder.read(folder, "task")
        drawn = collect.shuffled(prompts, len(rows) * versions)
        tasks = data_folder.tasks_of([rows[at // versions] for at in drawn], collect)
    else:
        first = collect.state["tasks"]
        drawn, tasks = list(range(first, first + prompts)), collect.tasks(prompts)
    shares = [at % versions / chunks for at in drawn]
    asked = [collect.world.hint(task, share) for task, share in zip(tasks, shares, strict=True)]
    found = collect.episodes(asked, group, temperature=temperature, max_tokens=max_tokens)
    collect.notes = {"hint_share": sum(shares) / prompts}
    if whole := [
        key for key, s in zip(found.by("group").keys.tolist(), shares, strict=True) if s == most / chunks
    ]:
        differ = set(varied_groups_of(found, "success").tolist())
        collect.notes |= {"opened_degenerate": 1 - len(differ & set(whole)) / len(whole)}
    return found


TINY = {
    **{path: value for path, value in GRPO_TINY.items() if path != "regularise.kl"},
    "sample.prompts": 16,
    "sample.temperature": 1.0,
    "update.minibatches": 1,
}
SCRIPT = "sparkle-reasoning/sparkle, scripts/train/stage_two_aug.sh"
PUBLISHED: Published = {
    SCRIPT: {
        "sample.prompts": 128,
        "sample.group": 32,
        "sample.temperature": 0.6,
        "regularise.kl.weight": 0.01,
        "regularise.kl.estimator": "k3",
        "update.lr": 1e-6,
        "update.minibatches": 2,
    },
    "sparkle-reasoning/sparkle, scripts/data/prepare_stage_two_data_aug.py": {
        "sample.chunks": 4,
        "sample.most": 4,
    },
    "sparkle-reasoning/sparkle, verl/verl/trainer/config/ppo_trainer.yaml": {
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
        "update.clip": 1.0,
        "update.epochs": 1,
    },
}


@method("sparkle-rl-alone@1", paper=202, base="grpo", presets={"tiny": TINY}, published=PUBLISHED)
def sparkle_rl_alone() -> OnPolicy:
    """The second stage of SparkleRL (arXiv 2506.04723): GRPO on problems that show 0 to 4 quarters of their answer.

    Versions of one problem are different prompts, each with a group of its own; what is shown is the beginning of the
    answer, which the policy goes on from, and has no loss. Nothing is adaptive: a version that shows all of it is kept,
    though its group seldom differs. `sample.most=2` stops at one half, which the authors found worse; in their code
    that option cuts the answer in two and shows all of it as well. The recipe `sparkle-rl` has the stages before it.
    """
    return grpo().but(
        sample=opened(prompts=128, group=32, temperature=0.6),
        regularise=(kl(weight=0.01, estimator="k3"),),
        update=adam(lr=1e-6, minibatches=2),
    )


ONLY_HARD = "second.sample.most=0"
CLAIM = Ranks(
    "After a first stage of GRPO, the problems that it never solves teach in a second once they are opened, each in "
    "versions that show more and more of its answer: in as many steps more problems are solved without a hint than "
    "after the same problems unopened, and than after easy and hard ones together.",
    (
        "",
        f"only hard=sparkle-rl:{ONLY_HARD}",
        f"easy and hard=sparkle-rl:{ONLY_HARD},hard.high=1",
    ),
    "chain:frontier",
    "second.steps=30",
    leads=True,
    metric="success",
    reworded="after a first stage of 25 steps half of what it never solved was solved soon after: it is 15 now, from "
    "the two sides that are compared with, alone",
    settings={"first.run.steps": 15, "hard.prompts": 192},
    tune={"second.update.lr": races.RATES["update.lr"]},
    also=("area", "hint_share", "opened_degenerate", "degenerate_groups", "total_decisions"),
    shows=(Shows("mean:degenerate_groups", least=0.5),),
)


@recipe("sparkle-rl@1", paper=202, world="chain", claim=CLAIM)
def sparkle_rl() -> Recipe:
    """SparkleRL (arXiv 2506.04723): GRPO, then more of it on what is never solved, opened by parts of the answer.

    Problems that are too hard are often thrown away, since groups that only fail teach nothing. Here they are what the
    second stage is made of: those of which not one of eight answers succeeds, in versions that show 0, ¼, ½, ¾ and all
    of the reference answer. Whoever gets stuck at one step sees what comes after it; all are judged without hints.

    The second stage keeps to the end of the first by a KL term of 0.01. Where the first has solved everything there is
    nothing to collect, and the recipe says so. The first stage is GRPO as it is here; the authors' has 128 prompts of
    32 answers at temperature 0.6 and a KL term of 0.001. They also cleaned the labels of hard problems by hand.
    """
    return Recipe(
        (
            Stage("first", "grpo"),
            Stage("hard", make=bucket(policy="@first", low=0.0, high=0.0)),
            Stage(
                "second",
                "sparkle-rl-alone",
                {"sample.folder": "@hard"},
                {"model": "@first", "reference": "@first"},
            ),
        )
    )
