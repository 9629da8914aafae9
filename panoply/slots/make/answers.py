"""Data made of a policy's own answers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, cast

from panoply import data_folder
from panoply.parts import Finding, part
from panoply.slots.sample.taught import verified

if TYPE_CHECKING:
    from panoply.data_folder import Row
    from panoply.loops.making import Maker

LIMITS = {
    "prompts": "at least 1",
    "answers": "at least 1",
    "most": "at least 1",
    "temperature": "from 0 to 100",
}

SIDES: tuple[Literal["chosen"], Literal["rejected"]] = ("chosen", "rejected")


@part(
    "make",
    equation="{answers} answers of {policy} to each of {prompts} tasks",
    needs={"world:text", "world:verify"},
    bounds=LIMITS,
)
def answered_by(
    maker: Maker, *, policy: str = "start", prompts: int = 256, answers: int = 4, temperature: float = 1.0
) -> Iterator[Row]:
    """Every answer of a policy, right or wrong, with the signals it earned."""
    for rows in maker.answered(policy, prompts, answers, temperature):
        yield from rows


@part(
    "make",
    equation="of {answers} answers of {policy} to each of {prompts} tasks at most {most} different right ones",
    needs={"world:text", "world:verify"},
    bounds=LIMITS,
)
def solved_by(
    maker: Maker,
    *,
    policy: str = "start",
    prompts: int = 256,
    answers: int = 4,
    most: int = 1,
    temperature: float = 1.0,
) -> Iterator[Row]:
    """What a policy got right, as data to imitate: rejection sampling. The same answer is kept once a task."""
    for rows in maker.answered(policy, prompts, answers, temperature):
        right = {tuple(row["answer"]): row for row in rows if row["numbers"].get("success", 0.0) == 1.0}
        yield from list(right.values())[:most]


@part(
    "make",
    equation="of {answers} episodes of {policy} on each of {prompts} tasks those whose {name} is at least {least}",
    needs=lambda held: frozenset({"world:text", "world:verify", f"signal:{held.name}"}),
    bounds={**LIMITS, "least": "any number"},
)
def kept_by(
    maker: Maker,
    *,
    policy: str = "start",
    prompts: int = 256,
    answers: int = 4,
    name: str = "success",
    least: float = 1.0,
    temperature: float = 1.0,
) -> Iterator[Row]:
    """The episodes of a policy that earned enough, as data to imitate, as often as they came: filtered imitation.

    A task that is solved often has the more rows. `solved_by` has each right answer once.

    name    the signal of the world that is summed over an episode
    least   the smallest sum that is enough
    """
    for rows in maker.answered(policy, prompts, answers, temperature):
        yield from (row for row in rows if row["numbers"].get(name, 0.0) >= least)


@part(
    "make",
    equation="a teacher's answer to each of {prompts} tasks",
    needs={"world:text", "world:reference"},
    bounds=LIMITS,
)
def solved_for(maker: Maker, *, prompts: int = 256) -> Iterator[Row]:
    """Right answers of the world's teacher to tasks as they come, whether a policy needs them or not."""
    collect = maker.collect("start")
    for place in (collect.place(i) for i in range(prompts)):
        task = collect.task(place)
        for answer in verified(maker.world, task)[:1]:
            yield maker.answer(place, task, answer)


def _range(held: Any, method: Any) -> list[Finding]:
    return [("low", "it is above bucket.high")] if held.low > held.high else []


@part(
    "make",
    equation="of {prompts} tasks those of whose {answers} answers by {policy} from {low} to {high} are right",
    needs={"world:text", "world:verify"},
    bounds={**LIMITS, "low": "from 0 to 1", "high": "from 0 to 1"},
    impossible=_range,
)
def bucket(
    maker: Maker,
    *,
    policy: str = "start",
    prompts: int = 256,
    answers: int = 8,
    low: float = 0.1,
    high: float = 0.9,
    temperature: float = 1.0,
) -> Iterator[Row]:
    """Tasks by how often a policy solves them, for `sample.among`; each row's number `rate` says how often it did."""
    for rows in maker.answered(policy, prompts, answers, temperature):
        right = [row["numbers"].get("success", 0.0) for row in rows]
        rate = sum(right) / max(1, len(right))
        if rows and low <= rate <= high:
            first = rows[0]
            yield {
                "task": first["task"],
                "id": first["id"],
                "prompt": first["prompt"],
                "numbers": {"rate": rate},
            }


@part(
    "make",
    equation="of the answers in {data} to a task the best and the worst, as {judge} sees them",
    needs={"world:text"},
)
def relabel(maker: Maker, *, data: str = "", judge: str = "") -> Iterator[Row]:
    """Pairs for preference losses, of stored answers that are judged anew; tasks on which all are equal are left out.

    data    the folder of an earlier stage with several answers a task (`answered_by`)
    judge   a run of `reward-model`, or the name of a number that the rows have, such as `success`
    """
    rows = data_folder.read(data, "answer")
    known = all(judge in row.get("numbers", {}) for row in rows)
    worth = [row["numbers"][judge] for row in rows] if known else maker.judged(judge, rows)
    by_task = sorted(zip(rows, worth, strict=True), key=lambda pair: pair[0]["task"])
    for _, same in groupby(by_task, key=lambda pair: pair[0]["task"]):
        told = sorted(same, key=lambda pair: pair[1])
        (bad, least), (good, best) = told[0], told[-1]
        if best > least:
            yield {
                "task": good["task"],
                "id": good["id"],
                "prompt": good["prompt"],
                "chosen": good["answer"],
                "rejected": bad["answer"],
                "numbers": {"gap": best - least},
            }


@part(
    "make",
    equation="the pairs in {data}, each up to the first turn in which they differ",
    needs={"world:text"},
)
def first_difference(maker: Maker, *, data: str = "") -> Iterator[Row]:
    """Pairs of single turns, made of pairs of episodes: both are cut after the first turn that differs.

    What comes before is the same in both, so that a loss on the difference of their log-ratios sees that turn alone. An
    episode that another begins with differs in no turn, and that pair is left out.

    data    the folder of an earlier stage with pairs (`relabel`)
    """
    rows, world = data_folder.read(data, "chosen"), cast(Any, maker.world)
    for row, task in zip(rows, data_folder.tasks_of(rows, maker.collect("start")), strict=True):
        good, bad = ([said for _, said in world.turns(task, row[side])] for side in SIDES)
        same = next((i for i, (a, b) in enumerate(zip(good, bad, strict=False)) if list(a) != list(b)), None)
        if same is not None:
            yield {
                **row,
                "chosen": [token for said in good[: same + 1] for token in said],
                "rejected": [token for said in bad[: same + 1] for token in said],
            }
