"""SMART: what is tried, what of it is kept, and after which prompt it stands."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny

from panoply.errors import PanoplyError
from panoply.methods.reasoning_data.smart import Attempts, first_attempts, smart
from panoply.worlds.text.modes import Modes
from panoply.worlds.world import Task

WORLD = Modes()


class Answering:
    """A policy that begins with N and knows its answers by heart: G always right, T never, N on sums alone."""

    def __init__(self, first: str = "N"):
        self.first, self.asked = first, []
        self.policy = SimpleNamespace(tokenizer=SimpleNamespace(decode=WORLD.text))

    def place(self, i: int) -> int:
        return i

    def task(self, place: int) -> Task:
        problem = ("3+4", "3*4", "9*9+1")[place % 3]
        return Task(place, tuple(WORLD.tokens(problem + "=")), len(problem) // 2, {"problem": problem})

    def episodes(self, tasks: list[Task], group: int, temperature: float) -> Any:
        from kit import hand

        self.asked.append([(t.id, WORLD.text(t.given)) for t in tasks])
        rows, actions = [], []
        for e, task in enumerate(tasks):
            way = WORLD.text(task.given) or self.first
            right = WORLD.text(WORLD.gold(WORLD.in_mode(Task(0, (), task.level, task.data), way)))
            knows = way == "G" or (way == "N" and "*" not in task.data["problem"])
            said = ("" if task.given else way) + (right if knows else "$")
            rows += [e] * len(said)
            actions += WORLD.tokens(said)
        return hand(episode=rows, action=actions)


def made(collect: Answering, **settings: Any) -> list[Any]:
    maker: Any = SimpleNamespace(
        collect=lambda policy: collect,
        world=WORLD,
        seed=0,
        row=lambda place, task, decode: {"task": place, "id": task.id, "prompt": decode(list(task.prompt))},
    )
    return list(first_attempts(**settings)(maker))


def test_what_finally_worked_stands_after_the_bare_problem() -> None:
    """N solves 3+4 at once; the others are tried again in T or G, until it was G."""
    collect = Answering()
    rows = made(collect, prompts=3)
    assert [row["prompt"] for row in rows] == ["3+4=", "3*4=", "9*9+1="], "nothing of what failed is in it"
    assert [row["text"] for row in rows] == ["N7$", "G2$", "G12$"]
    assert rows[0]["numbers"] == {"attempt": 1.0}
    assert all(row["numbers"]["attempt"] in (2.0, 3.0) for row in rows[1:])
    assert collect.asked[0] == [(0, ""), (1, ""), (2, "")]
    assert {i for i, _ in collect.asked[1]} == {1, 2}, "what is solved is not tried again"
    tried = [pair for step in collect.asked[1:] for pair in step]
    assert len(tried) == len(set(tried)), "no way twice"
    assert {way for _, way in tried} <= {"T", "G"}


def test_only_first_attempts_are_kept_on_demand() -> None:
    rows = made(Answering(), prompts=6, tries=1)
    assert [row["text"] for row in rows] == ["N7$", "N7$"]


def test_where_every_way_is_tried_none_is_preferred() -> None:
    collect = Answering()
    rows = made(collect, prompts=900, every=True)
    assert len(rows) == 900
    assert Counter(row["text"][0] for row in rows if row["prompt"] == "3*4=") == {"G": 300}
    both = Counter(row["text"] for row in rows if row["prompt"] == "3+4=")
    assert both["N7$"] / 300 == pytest.approx(0.5, abs=0.1)
    assert both["G7$"] / 300 == pytest.approx(0.5, abs=0.1)
    assert len(collect.asked) == 4 * 3, "three ways, 256 tasks at a time"


def test_an_answer_in_no_way_uses_up_none() -> None:
    attempts = Attempts(WORLD, [Answering().task(0)])
    attempts.note(0, WORLD.tokens("7$"), 1)
    assert attempts.untried(0) == ["N", "T", "G"]
    attempts.note(0, WORLD.tokens("T+48$"), 2)
    assert attempts.untried(0) == ["N", "G"]
    assert attempts.open(every=False) == [0]
    attempts.note(0, WORLD.tokens("G7$"), 3)
    assert attempts.right == [{"G": (WORLD.tokens("G7$"), 3)}]
    assert attempts.open(every=False) == []
    assert attempts.open(every=True) == [0]


SMALL = {
    "run.device": "cpu",
    "run.held_out": 4,
    "run.evaluate_every": 0,
    "attempts.prompts": 8,
    "imitate.run.steps": 1,
    "imitate.data.batch": 4,
}


def test_rounds_imitate_from_the_start_anew(tmp_path: Path) -> None:
    tiny.bare(tmp_path / "run", "smart", world="modes", settings=SMALL)
    names = sorted(path.name for path in (tmp_path / "run").glob("0*"))
    assert names == ["01-attempts", "02-imitate", "03-attempts", "04-imitate"]
    rows = [json.loads(line) for line in (tmp_path / "run/03-attempts/data.jsonl").read_text().splitlines()]
    assert rows
    assert all(row["text"][0] in "NTG" for row in rows)
    plans = [json.loads((tmp_path / f"run/{n}/run.json").read_text())["plan"] for n in names]
    assert plans[3]["run"]["model"] == "start"
    assert "02-imitate" in json.dumps(plans[2]), "the second data are of the policy of the first round"


def test_stages_and_refusals(tmp_path: Path) -> None:
    attempts, imitate = smart().stages
    assert attempts.again == {"every": False}
    assert imitate.again == {"model": "start"}
    with pytest.raises(PanoplyError, match="modes"):
        tiny.bare(tmp_path / "run", "smart", world="chain")
    with pytest.raises(PanoplyError, match="every way is tried"):
        tiny.bare(tmp_path / "run", "smart", world="modes", settings={"attempts.tries": 2})
