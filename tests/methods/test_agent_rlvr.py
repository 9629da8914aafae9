"""Agent-RLVR: who is tried again, what is kept of it, and that no hint is left when it is learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import panoply as pp
from panoply import data_folder
from panoply.data_folder import Row
from panoply.errors import PanoplyError
from panoply.loops.making import Maker
from panoply.methods.agents.agent_rlvr import agent_rlvr, guided_pairs, hint_of, paired, quoted, retried
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.worlds.text.keydoor import GUIDED, Keydoor

WORLD = Keydoor(**GUIDED)


# ------------------------------------------------------------------ what is kept


@pytest.mark.parametrize(
    ("guided", "bare", "hint"),
    [
        ("12P>", "12_>", "P"),
        ("12>", "12>", None),
        ("1get3>", "13>", "get"),
        ("aab", "ab", "a"),
        ("1", "123", ""),
    ],
)
def test_a_hint_is_what_a_prompt_says_more(guided: str, bare: str, hint: str | None) -> None:
    found = hint_of(list(map(ord, guided)), list(map(ord, bare)))
    assert found == (None if hint is None else list(map(ord, hint)))


def test_turns_that_only_repeat_the_hint() -> None:
    task = WORLD.task("train", 0)
    gold = WORLD.gold(task)
    assert quoted(WORLD, WORLD.guided(task), gold) == 2 / len(gold), "P at the key and O at the door"
    assert quoted(WORLD, WORLD.guided(task), WORLD.tokens("PPPP")) == 1.0
    assert quoted(WORLD, task, WORLD.tokens("PPPP")) == 0.0, "nobody was told"


def row(task: int, answer: str, success: float = 1.0) -> Row:
    said = WORLD.tokens(answer)
    found = {"task": task, "id": task, "prompt": "bare", "answer": said, "text": answer}
    return cast(Row, {**found, "numbers": {"success": success}})


def test_a_task_has_few_pairs_and_a_success_counts_once() -> None:
    wins = [row(0, "N"), row(0, "N"), row(1, "N"), row(0, "S"), row(0, "E")]
    made = list(paired([(win, row(win["task"], "O")) for win in wins], 2, "plan"))
    assert [(pair["task"], pair["text"]) for pair in made] == [(0, "N"), (1, "N"), (0, "S")]
    assert made[0]["rejected"] == WORLD.tokens("O")
    assert made[0]["numbers"] == {"guided": 1.0}


# ------------------------------------------------------------------ who is tried again


class Asked:
    """Stands for a maker whose policy knows the way where it is told, and else at the second of three tasks only."""

    world = WORLD

    def __init__(self, guided: str = "") -> None:
        self.calls: list[list[Any]] = []
        self.guided = guided

    def collect(self, policy: str) -> Any:
        return SimpleNamespace(place=lambda i: i, task=lambda place: WORLD.task("train", place))

    def attempts(
        self, _: Any, places: Sequence[int], tasks: Sequence[Any], answers: int, heat: float
    ) -> list[list[Row]]:
        self.calls.append([task.data["guided"] for task in tasks])
        return [
            [self._row(place, task, attempt) for attempt in range(answers)]
            for place, task in zip(places, tasks, strict=True)
        ]

    def _row(self, place: int, task: Any, attempt: int) -> Row:
        way = WORLD.text(WORLD.gold(task))
        if task.data["guided"] or (place == 1 and attempt == 1):
            return row(place, self.guided + way)
        return row(place, "OP"[attempt] * 3, 0.0)


@pytest.mark.parametrize(("guidance", "told"), [("plan", "PO"), ("feedback", "P"), ("none", "")])
def test_only_tasks_without_a_success_are_tried_again(guidance: str, told: str) -> None:
    maker = Asked()
    made = list(retried(prompts=3, attempts=2, guidance=guidance)(maker))
    assert maker.calls == [["", "", ""], [told] * 4]
    pairs = [(pair["task"], WORLD.text(pair["rejected"]), pair["numbers"]["guided"]) for pair in made]
    kind = {"plan": 1.0, "feedback": 2.0}.get(guidance)
    assert pairs == [(1, "OOO", 0.0), *([(0, "OOO", kind), (2, "OOO", kind)] if kind else [])]
    for pair in made:
        task = WORLD.task("train", pair["task"])
        assert WORLD.grade(task, pair["chosen"])["success"] == 1.0
        assert WORLD.grade(task, pair["rejected"])["success"] == 0.0


def test_who_repeats_the_hint_is_left_out() -> None:
    made = [len(list(retried(prompts=1, quotes=most)(Asked("P" * 20)))) for most in (0.5, 1.0)]
    assert made == [0, 1]


# ------------------------------------------------------------------ what is learned


@pytest.fixture(scope="module")
def collect() -> Collector:
    return Collector(WORLD, open_policy("start", WORLD, 0, "cpu"), seed=3)


@pytest.fixture
def folder(tmp_path: Path, collect: Collector) -> str:
    rows: list[Row] = []
    for number, kind in enumerate((0.0, 1.0, 2.0)):
        place = collect.place(number)
        task = collect.task(place)
        pair = {"chosen": WORLD.gold(task), "rejected": WORLD.tokens("OOO")}
        named = {"task": place, "id": task.id, "prompt": WORLD.text(task.prompt)}
        rows.append(cast(Row, {**named, **pair, "numbers": {"guided": kind}}))
    data_folder.write(tmp_path, rows)
    return str(tmp_path)


def hints(experience: pp.Experience) -> dict[int, str]:
    """What stood in the place of the hint, turn by turn, by task and side."""
    found: dict[int, str] = {}
    tokens = experience.context.ragged("tokens").tolist()
    for at, episode in zip(experience["context"].tolist(), experience["episode"].tolist(), strict=True):
        found[episode] = found.get(episode, "") + WORLD.text(tokens[at][:-1])[-2]
    return found


def test_no_prompt_that_is_learned_from_has_a_hint(collect: Collector, folder: str) -> None:
    bare = guided_pairs(folder=folder, batch=3)(collect)
    assert set("".join(hints(bare).values())) == {"_"}
    kept = guided_pairs(folder=folder, batch=3, hint=True)(collect)
    told = {frozenset(said) for said in hints(kept).values()}
    plain, feedback, plan = ({"_"}, {"P", "_"}, {"P", "O"})
    assert {frozenset(way) for way in (plain, feedback, plan)} <= told
    assert told <= {frozenset(way) for way in (plain, feedback, plan, {"P"})}, "failures never had the key"
    assert bare.pairs is not None
    assert bare.pairs.rows == 3
    episodes = bare.by("episode")
    won = episodes.sum(bare["signal:success"])
    assert won.tolist() == [1.0, 0.0] * 3, "the better side first, verified anew"


def test_saying_it_again_is_taking_the_hint_out(collect: Collector) -> None:
    """The prompts of a guided episode without their hints are those of the same episode without guidance."""
    task = collect.task(collect.place(0))
    gold = WORLD.gold(task)
    told, bare = collect.answers([WORLD.guided(task)], [gold]), collect.answers([task], [gold])
    tokens, shared = told.context.ragged("tokens").tolist(), told.context.tensor("shared").tolist()
    prompts = {i: WORLD.unguided(row[:n]) for i, (row, n) in enumerate(zip(tokens, shared, strict=True))}
    again = told.reprompted(prompts)
    assert again.context.ragged("tokens").tolist() == bare.context.ragged("tokens").tolist()
    assert told.context.ragged("tokens").tolist() != bare.context.ragged("tokens").tolist()


class Real(Maker):
    """Asks the shipped start."""

    def __init__(self, collect: Collector):
        self.world, self.collector = WORLD, collect

    def collect(self, policy: str) -> Collector:
        return self.collector


def test_attempts_of_a_policy(collect: Collector) -> None:
    """Some of the start's attempts succeed with guidance; what is kept of them was never said with the hint."""
    fresh = Collector(WORLD, collect.policy, seed=3)
    made = list(retried(prompts=4)(Real(fresh)))
    assert fresh.state["episodes"] == 4 * 2 * 2, "all failed, and each was made again: no round spends more"
    assert made
    assert {pair["numbers"]["guided"] for pair in made} == {1.0}
    assert all(pair["prompt"].endswith("_>") for pair in made), (
        "the prompt that readers see has no hint either"
    )
    for pair in made:
        task = data_folder.tasks_of([pair], collect)[0]
        graded = [WORLD.grade(task, side)["success"] for side in (pair["chosen"], pair["rejected"])]
        assert graded == [1.0, 0.0]


def test_rounds_go_on_from_what_was_learned() -> None:
    first, learn, second, again = list(agent_rlvr().turns())[:4]
    assert first.stage.make is not None
    assert second.stage.make is not None
    assert first.stage.make.settings()["policy"] == "start"
    assert second.stage.make.settings()["policy"] == "@last"
    assert "model" not in learn.stage.options
    assert again.stage.options["model"] == "@last"


def test_a_world_without_guidance_is_refused() -> None:
    with pytest.raises(PanoplyError, match="guided"):
        pp.plan_recipe("agent-rlvr", "keydoor")
