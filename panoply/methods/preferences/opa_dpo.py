"""OPA-DPO: make preferred answers likely by imitation first, then prefer them to one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from panoply import data_folder
from panoply.batch import Batch, Values
from panoply.evidence.claims import Ranks, Shows
from panoply.experience import DEMONSTRATION, Experience, Table
from panoply.methods.base.dpo import TINY as DPO_TINY
from panoply.methods.base.dpo import dpo
from panoply.parts import Part, part
from panoply.recipes import Recipe, Stage
from panoply.regimes import Dataset
from panoply.registry import Published, method, recipe
from panoply.rollout.collector import in_epochs
from panoply.seeds import numpy_rng
from panoply.slots.loss.pairs import pair_stats, snapshot_needs
from panoply.slots.make.answers import answered_by
from panoply.slots.sample.answers import answers_of, on_tokens
from panoply.slots.schedule.schedules import cosine
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from collections.abc import Sequence

    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task

TRUTH, EXPERT, TRUTH_SEEN, EXPERT_SEEN = range(4)
"""Kinds of pairs: over the own answer, the truth and the expert's; and each of these with its picture over without."""
SEVERITY = {1: 2.5, 2: 2.0, 3: 1.5, 4: 1.0}
"""The weight of a token by how wrong its sentence was."""
MISREAD = 3.0
"""The weight, before pictures, of a token that stands for what was misread."""
NEEDS = frozenset({"world:text", "world:one turn", "world:reference", "world:expert"})
LIMITS = {"batch": "at least 1", "blotted": "from 0 to 1"}


# ------------------------------------------------------------------ data


def _own(collect: Collector, folder: str, batch: int) -> list[tuple[Task, list[int]]]:
    """The next own answers: of a data folder, or without one those that the policy gives now."""
    if not folder:
        tasks = collect.tasks(batch)
        return list(zip(tasks, answers_of(collect.episodes(tasks)), strict=True))
    stored, first = data_folder.read(folder, "answer"), collect.state["tasks"]
    collect.state["tasks"] += batch
    rows = [stored[at] for at in in_epochs(collect.seed, first, batch, len(stored))]
    return [
        (task, row["answer"]) for task, row in zip(data_folder.tasks_of(rows, collect), rows, strict=True)
    ]


def _whose(held: Any) -> str:
    return f"of {held.folder}" if held.folder else "of now"


@part(
    "data",
    equation=lambda held: f"right answers and corrections of {held.batch} own answers {_whose(held)}",
    needs=NEEDS,
    bounds=LIMITS,
)
def truth_and_corrected(collect: Collector, *, folder: str = "", batch: int = 64) -> Experience:
    """What on-policy alignment imitates: to each problem the reference, and what an expert makes of the own answer.

    folder   own answers that an earlier stage has stored; without one, the policy answers anew in every step
    """
    own = _own(collect, folder, batch)
    said = [
        answer
        for task, answered in own
        for answer in (collect.world.gold(task), collect.world.corrected(task, answered).answer)
    ]
    return collect.answers([t for task, _ in own for t in (task, task)], said, source=DEMONSTRATION)


@part(
    "data",
    equation=lambda held: (
        f"{held.batch} own answers {_whose(held)}, each below the truth and below itself corrected; and both of these "
        f"before a picture of which {held.blotted:.0%} is blotted out"
    ),
    needs=NEEDS | {"world:picture"},
    gives={"pairs", "column:severity", "column:misread"},
    bounds=LIMITS,
)
def corrected_pairs(
    collect: Collector, *, folder: str = "", batch: int = 32, blotted: float = 0.3
) -> Experience:
    """Four kinds of pairs of every stored own answer; none has an answer against itself before the same picture.

    folder    as of `truth_and_corrected`
    blotted   the share of a picture's cells

    Columns `severity` and `misread` are weights of tokens, by how wrong the sentence was that they are of or stand for.
    """
    world = collect.world
    tasks: list[Task] = []
    said: list[list[int]] = []
    severity: list[list[float]] = []
    misread: list[list[float]] = []
    pairs: list[tuple[int, int, int]] = []

    def add(task: Task, answer: list[int], scores: Sequence[int], seen: Sequence[bool]) -> int:
        tasks.append(task)
        said.append(answer)
        severity.append([SEVERITY[score] for score in scores])
        misread.append([MISREAD if one else 1.0 for one in seen])
        return len(tasks) - 1

    for at, (task, own) in enumerate(_own(collect, folder, batch)):
        truth, found = world.gold(task), world.corrected(task, own)
        rng = numpy_rng("blotted", collect.seed, collect.state["episodes"], at)
        blank = world.blotted(task, blotted, rng)
        low = add(task, own, found.severity, [False] * len(own))
        for kind, answer, scores, seen in (
            (TRUTH, truth, [4] * len(truth), [False] * len(truth)),
            (EXPERT, found.answer, found.replaced, found.misread),
        ):
            high = add(task, answer, scores, seen)
            if answer != own:
                pairs.append((high, low, kind))
            if blank.prompt != task.prompt:
                pairs.append((high, add(blank, answer, scores, seen), kind + TRUTH_SEEN))
    first = collect.state["episodes"]
    experience = collect.answers(tasks, said, source=DEMONSTRATION)
    won, lost, kinds = torch.tensor(pairs, dtype=torch.long).view(-1, 3).T
    table = Table({"chosen": first + won, "rejected": first + lost, "kind": kinds})
    columns = {"severity": on_tokens(experience, severity), "misread": on_tokens(experience, misread)}
    return experience.with_columns(**columns).with_pairs(table)


# ------------------------------------------------------------------ loss


def _weighed(batch: Batch, kind: Tensor, ratios: Tensor) -> tuple[Tensor, Tensor]:
    """Σ w·log π/π_ref of both sides of each pair, and the same of the chosen side by position: [pairs, longest].

    w is 1 for the truth, the severity for the expert's against the own answer, and `misread` before two pictures.
    """
    grid = batch.by("episode").grid()
    keys, there = batch.by("episode").keys, grid >= 0
    at = grid.clamp(min=0)
    by_kind = torch.stack(
        [
            torch.where(there, column[at], 0.0)
            for column in (ratios, ratios * batch["severity"], ratios, ratios * batch["misread"])
        ]
    )
    sides = (torch.searchsorted(keys, batch.pairs.tensor(side)) for side in ("chosen", "rejected"))
    chosen, rejected = (by_kind[kind, side] for side in sides)
    return chosen, rejected


def _equation(held: Any) -> str:
    per = "Σ" if held.form == "sequence" else "position by position, "
    return (
        f"−log σ(β·(ℓ_truth − ℓ_own)) − log σ(β·(ℓ_expert − ℓ_own)), + {held.picture:g} times the same with and "
        f"without the picture, − {held.anchor:g}·log σ(β·ℓ_chosen − {held.margin:g}),  ℓ = {per} w·log π/π_{held.to},  "
        f"β = {held.beta:g}"
    )


@part(
    "loss",
    equation=_equation,
    unit="pair",
    stream="imitation",
    needs=lambda held: snapshot_needs(held) | {"column:severity", "column:misread"},
    bounds={
        "weight": "above 0",
        "beta": "above 0",
        "picture": "at least 0",
        "anchor": "at least 0",
        "margin": "any number",
    },
    inert=lambda held, method: [("margin", "there is no anchor (anchor=0)")] if not held.anchor else [],
)
def corrected_preference(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 0.1,
    picture: float = 0.2,
    anchor: float = 1.0,
    margin: float = 0.0,
    form: Literal["sequence", "token"] = "sequence",
    to: str = "reference",
) -> Values:
    """DPO over own answers with tokens weighed by severity, the same before a blotted picture, and an anchor.

    picture   weight of pairs of one answer, before its picture and before what is left of it
    anchor    weight of −log σ(β·ℓ_chosen − margin), which keeps the better answer from falling below the reference
    form      `sequence`: of sums over an answer. `token`, as the released code has it: the t-th token of one answer
              against the t-th of the other, a mean over positions (here of each pair; there over the padded batch), and
              anchors of all four kinds of pairs, of which those of the expert's answers have the opposite sign
    """
    kind = batch.pairs.tensor("kind")
    chosen, rejected = _weighed(batch, kind, batch.log_ratio(to))
    times = torch.where(kind >= TRUTH_SEEN, picture, 1.0)
    if form == "sequence":
        gap = beta * (chosen.sum(1) - rejected.sum(1))
        plain = _weighed(batch, torch.zeros_like(kind), batch.log_ratio(to))[0].sum(1)
        held = torch.where(kind < TRUTH_SEEN, -F.logsigmoid(beta * plain - margin), 0.0)
        value = -times * F.logsigmoid(gap) + anchor * held
    else:
        sizes = batch.by("episode").count
        longest = torch.maximum(*batch.pair_rows(sizes))[:, None]
        inside = (torch.arange(chosen.shape[1], device=kind.device) < longest) / longest
        gap = beta * (chosen - rejected)
        side = torch.where((kind == EXPERT) | (kind == EXPERT_SEEN), -1.0, 1.0)[:, None]
        each = -times[:, None] * F.logsigmoid(gap) - anchor * F.logsigmoid(side * (beta * chosen - margin))
        value, gap = (each * inside).sum(1), gap.sum(1)
    stats = pair_stats(gap, chosen.sum(1), rejected.sum(1))
    return value, {name: column[kind < TRUTH_SEEN] for name, column in stats.items()}


# ------------------------------------------------------------------ the stages

TINY = {**DPO_TINY, "update.schedule": "constant", "update.lr": 1e-4, "run.steps": 60}

PUBLISHED: Published = {
    "zhyang2226/OPA-DPO, run/train_opa_dpo.sh": {
        "data.batch": 32,
        "data.blotted": 0.3,
        "losses.corrected_preference.beta": 0.1,
        "losses.corrected_preference.picture": 0.2,
        "losses.corrected_preference.anchor": 1.0,
        "losses.corrected_preference.margin": 0.0,
        "update.lr": 1e-6,
        "update.schedule": "cosine",
        "update.schedule.warmup": 5,
        "update.clip": 1.0,
    },
}


@method(
    "corrected-dpo@1",
    base="dpo",
    world="grids",
    presets={"tiny": TINY},
    published=PUBLISHED,
    tags=("failures=contrast", "failures=correct"),
)
def corrected_dpo() -> Dataset:
    """The last stage of OPA-DPO by itself: own answers below the truth, and below what an expert made of them."""
    return dpo().but(
        data=corrected_pairs(),
        losses=(corrected_preference(),),
        update=adam(lr=1e-6, clip=1.0, schedule=cosine(warmup=5)),
    )


OWN = Stage("own", make=answered_by(prompts=2048, answers=1))
IMITATE = {
    "data": "truth_and_corrected",
    "data.folder": "@own",
    "update.lr": 1e-3,
    "update.schedule": "constant",
}
STEPS = {"align": 100, "prefer": 60}
ALIGN = Stage("align", "sft", IMITATE, {"steps": STEPS["align"]})

CLAIM = Ranks(
    "Where an expert writes as the policy never does, imitating its corrections for 100 steps and only then preferring "
    "them to own answers, with that imitator as reference, gets further than preferring them from the start, and than "
    "imitation alone for as many steps.",
    ("", "preferences alone=expert-dpo", "imitation alone=expert-sft"),
    "grids:foreign",
    "prefer.steps=60",
    metric="success",
    leads=True,
    tune={},
    fixed="all sides imitate and prefer at the same two rates, the same 2048 own answers and their corrections",
    also=("world:reference", "held_out_greedy"),
    shows=(Shows("world:reference", most=0.01),),
)


@recipe("opa-dpo@1", paper=116, world="grids", claim=CLAIM)
def opa_dpo() -> Recipe:
    """OPA-DPO (arXiv 2501.09695). Imitate the truth and corrected own answers, then DPO with the imitator as reference.

    The optimum under a KL term is π ∝ π_ref·e^{r/β}: what the reference never says, no reward brings about. DPO on an
    expert's corrections of own answers therefore lowers the own ones and hardly raises the corrections; a little
    imitation first makes them on-policy, and own answers still are. The policy answers once (`own`); an expert rewrites
    only the sentences that are wrong and says how wrong each was; reference answers and corrections are imitated
    (`align`); then −log σ(β·[ℓ(truth) − ℓ(own)]) − log σ(β·[w·ℓ(expert) − w·ℓ(own)]), tokens weighed 2.5, 2, 1.5 or 1
    by the severity of their sentence, a fifth of the same for each better answer before its picture against a picture
    of which 30 % is blotted out (weight 3 on what was misread), and an anchor −log σ(β·ℓ(better)) (`prefer`).

    Pictures are cells among the prompt's tokens (`grids`); a blotted cell is a blank, as a pixel's mean is neither
    light nor dark. The equations are of sums over answers, reconstructed from the released code's intent; the released
    code compares tokens position by position, and its anchor pushes the expert's answers down: both are there
    (`prefer.losses.corrected_preference.form=token`). The loss is a mean over pairs, a quarter of the sum above. The
    authors train adapters (`--lora`), imitate for 2 epochs of 4.8 thousand answers and prefer for 4.
    """
    return Recipe(
        (
            OWN,
            ALIGN,
            Stage(
                "prefer",
                "corrected-dpo",
                {"data.folder": "@own"},
                {"model": "@align", "reference": "@align", "steps": STEPS["prefer"]},
            ),
        )
    )


@recipe("expert-dpo@1", world="grids")
def expert_dpo() -> Recipe:
    """What OPA-DPO is compared with: the same pairs, from the start, which is the reference."""
    return Recipe(
        (OWN, Stage("prefer", "corrected-dpo", {"data.folder": "@own"}, {"steps": STEPS["prefer"]}))
    )


@recipe("expert-sft@1", world="grids")
def expert_sft() -> Recipe:
    """What OPA-DPO is compared with: imitation of the same answers for as many steps as both of its stages have."""
    again = Stage("prefer", "sft", IMITATE, {"model": "@align", "steps": STEPS["prefer"]})
    return Recipe((OWN, ALIGN, again))
