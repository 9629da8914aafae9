"""Agent-RLVR: what fails is tried again with guidance, and its success is learned as if there had been none."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from panoply import data_folder
from panoply.evidence.claims import Ranks, Shows
from panoply.experience import Experience
from panoply.loops.making import ASKED
from panoply.parts import part
from panoply.recipes import Recipe, Stage
from panoply.registry import recipe
from panoply.rollout.collector import in_epochs
from panoply.slots.make.answers import LIMITS

if TYPE_CHECKING:
    from panoply.data_folder import Row
    from panoply.loops.making import Maker
    from panoply.rollout.text import Collector


Guidance = Literal["none", "plan", "feedback"]
KINDS: tuple[Guidance, ...] = get_args(Guidance)


def quoted(world: Any, task: Any, answer: Sequence[int]) -> float:
    """The share of an episode's turns in which nothing was said but what the hint in their prompt says."""
    turns = world.turns(task, answer)
    return sum(list(said) == hint_of(prompt, world.unguided(prompt)) for prompt, said in turns) / len(turns)


def hint_of(guided: Sequence[int], bare: Sequence[int]) -> list[int] | None:
    """What a prompt says more than the same one without guidance; None where it says nothing more."""
    if tuple(guided) == tuple(bare):
        return None
    first = next((i for i, (a, b) in enumerate(zip(guided, bare, strict=False)) if a != b), len(bare))
    pairs = zip(reversed(guided[first:]), reversed(bare[first:]), strict=False)
    last = next((i for i, (a, b) in enumerate(pairs) if a != b), len(bare) - first)
    return list(guided[first : len(guided) - last])


def paired(pairs: Iterable[tuple[Row, Row]], most: int, guidance: Guidance) -> Iterator[Row]:
    """Rows of (success, failure), at most so many of a task; the same success counts once."""
    seen: dict[int, set[tuple[int, ...]]] = {}
    for win, loss in pairs:
        said, known = tuple(win["answer"]), seen.setdefault(win["task"], set())
        if said in known or len(known) == most:
            continue
        known.add(said)
        yield {
            "task": win["task"],
            "id": win["id"],
            "prompt": loss["prompt"],
            "chosen": win["answer"],
            "rejected": loss["answer"],
            "text": win["text"],
            "numbers": {"guided": float(KINDS.index(guidance))},
        }


def right(row: Row) -> bool:
    return row["numbers"]["success"] == 1.0


def _own(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Each success of a task with another of its failures, as far as there are some."""
    wrong = [row for row in rows if not right(row)]
    return list(zip(filter(right, rows), itertools.cycle(wrong), strict=False))


@part(
    "make",
    equation="pairs (success, failure) of {attempts} attempts of {policy} at each of {prompts} tasks, where all fail "
    "each once more with guidance ({guidance}); at most {most} a task",
    needs={"world:text", "world:verify", "world:guided"},
    bounds={
        "prompts": LIMITS["prompts"],
        "attempts": "at least 1",
        "most": LIMITS["most"],
        "quotes": "from 0 to 1",
        "temperature": LIMITS["temperature"],
    },
)
def retried(
    maker: Maker,
    *,
    policy: str = "start",
    prompts: int = 128,
    attempts: int = 2,
    guidance: Guidance = "plan",
    most: int = 2,
    quotes: float = 0.5,
    temperature: float = 1.0,
) -> Iterator[Row]:
    """Attempts; where all at a task fail, each is made again with guidance; pairs of what succeeded and what failed.

    guidance   `plan`: the next subgoal, in every turn; `feedback`: by what the failed attempt missed; `none`: the same
               attempts without any
    most       pairs of a task, or the few that are often solved would be most of the data
    quotes     a guided success is dropped if in more than this share of its turns it said but what the hint said
    """
    collect, world = maker.collect(policy), maker.world
    for first in range(0, prompts, ASKED):
        places = [collect.place(i) for i in range(first, min(first + ASKED, prompts))]
        tried = maker.attempts(collect, places, [collect.task(p) for p in places], attempts, temperature)
        for rows in tried:
            yield from paired(_own(rows), most, "none")
        failed = [row for rows in tried if not any(map(right, rows)) for row in rows]
        told = [asked(world, collect.task(row["task"]), guidance, row["answer"]) for row in failed]
        again = maker.attempts(collect, [row["task"] for row in failed], told, 1, temperature)
        won = [
            (row, loss)
            for loss, task, rows in zip(failed, told, again, strict=True)
            for row in rows
            if right(row) and quoted(world, task, row["answer"]) <= quotes
        ]
        yield from paired(won, most, guidance)


def asked(world: Any, task: Any, guidance: Guidance, failed: Sequence[int]) -> Any:
    """A task as it is asked again after an attempt that failed."""
    if guidance == "none":
        return task
    return world.guided(task, failed) if guidance == "feedback" else world.guided(task)


@part(
    "data",
    equation=lambda held: (
        f"{held.batch} stored pairs a step, of {held.folder or 'a folder'}, "
        + ("after prompts with the hint" if held.hint else "after prompts without a hint")
    ),
    needs={"world:text", "world:guided"},
    gives={"pairs"},
    bounds={"batch": "at least 1"},
)
def guided_pairs(collect: Collector, *, folder: str = "", batch: int = 64, hint: bool = False) -> Experience:
    """Pairs that `retried` made, said again turn by turn to the task as it is asked when it counts.

    hint: whether both sides of a pair that guidance has won are said to the task as it was guided instead
    """
    found = data_folder.read(folder, "chosen")
    rows = [found[at] for at in in_epochs(collect.seed, collect.state["episodes"] // 2, batch, len(found))]
    tasks: list[Any] = data_folder.tasks_of(rows, collect)
    if hint:
        kinds = [KINDS[int(row["numbers"]["guided"])] for row in rows]
        tasks = [
            asked(collect.world, task, kind, row["rejected"])
            for task, kind, row in zip(tasks, kinds, rows, strict=True)
        ]
    return collect.preferred(tasks, [row["chosen"] for row in rows], [row["rejected"] for row in rows])


CLAIM = Ranks(
    "Where one attempt in a hundred succeeds, and one in ten with the next subgoal in sight, DPO on guided successes "
    "against unguided failures, said after prompts without the hint, gets further without hints than GRPO does from at "
    "least as many episodes, and than the same DPO after prompts that keep the hint.",
    (
        "",
        "grpo=grpo:sample.prompts=16,sample.group=4",
        "the hint kept=agent-rlvr:learn.data.hint=true",
    ),
    world="keydoor:guided",
    budget="steps=32",
    settings={"run.held_out": 128},
    metric="success",
    leads=True,
    also=("area",),
    shows=(Shows("success", most=0.5),),
    waives={
        "room": "one attempt in a hundred succeeds, so that outcomes alone hardly teach: guidance is for such a regime"
    },
    reworded="GRPO filled 6 % of the room, so that the gate of room is waived.",
)
"""GRPO has 32 steps of 64 episodes, 2,048 in all. Four rounds have 8 steps each and at most 128 · 2 · 2 episodes."""


@recipe("agent-rlvr@1", paper=176, world="keydoor:guided", claim=CLAIM)
def agent_rlvr() -> Recipe:
    """Agent-RLVR (arXiv 2506.11425): attempt, try again with guidance what failed, learn by DPO what then succeeded.

    1. Unguided attempts at a task, τ ~ π(·|x), which a verifier grades. 2. Where all of them fail, each is made again
    with guidance that a teacher gives, τ' ~ π(·|x, g). 3. DPO on pairs of a success and a failure of one task,

        −log σ( β·[ log π/π_ref(τ_w|x) − log π/π_ref(τ_l|x) ] ),

    with sums over the agent's own tokens, and again from 1 with what was learned, which is the next π_ref.

    What is surprising: g made the success and stands nowhere in the loss. Said after prompts with the hint
    (`learn.data.hint=true`) the same pairs teach to follow hints, and there is none when it counts. To π(·|x) a guided
    success is unlikely, and no ratio to the policy that drew it would be of use: the loss has none. So that tasks which
    are often solved are not most of the data, a task has at most `try.most` pairs; so that nobody learns to recite,
    successes that mostly repeat the hint are dropped (`try.quotes`).

    The paper has three kinds of guidance. Here `try.guidance=plan` tells the next subgoal in every turn, and `feedback`
    what the very attempt missed that had failed: the first subgoal it did not reach, and no other. The third, where to
    look, is not here, since prompts of `keydoor` show all there is; nor is the reward model by which the paper
    chooses among several answers at test time. Any world with access `guided` will do.

    Reconstructed, no code being released: that the loss leaves the hint out, pairs, β (that of DPO), rates, rounds,
    attempts, and both limits on what is kept. The paper has 817 tasks and a model of 72 billion weights.
    """
    pairs = {
        "data": "guided_pairs",
        "data.folder": "@try",
        "data.batch": 16,
        "update.schedule.warmup": 2,
    }
    return Recipe(
        (
            Stage("try", make=retried(), again={"policy": "@last"}),
            Stage("learn", "dpo", pairs, {"steps": 8}),
        ),
        rounds=4,
    )
