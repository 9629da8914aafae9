"""RA3: what a mark sees, what it earns, who says how likely a line is, and what is imitated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from kit import hand

from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.reasoning_data.ra3 import marked, marks, next_line, next_token, ra3, ra3_intents
from panoply.policies.build import open_policy
from panoply.rollout.lines import read_through
from panoply.worlds.text import registers
from panoply.worlds.text.registers import Registers
from panoply.worlds.world import Task

WORLD = Registers()


def problem(value: int) -> Task:
    data = {"held": (3, 1, value, 0), "register": "c", "missing": 10 - value}
    return Task(value, tuple(WORLD.tokens(f"31>{value}0=")), 0, data)


TASKS = [problem(6), problem(9)]
"""The expert writes .CBx.cDA$ and .cDA$."""


class Believes:
    """Every token of a line has log-probability −2, or after a comment, wherever that stands, `after`."""

    def __init__(self, after: float):
        self.after, self.asked = after, list[str]()

    def score(self, experience: Experience) -> dict[str, torch.Tensor]:
        tokens = experience.context.ragged("tokens")
        texts = [WORLD.text(tokens[i].tolist()) for i in range(experience.context.rows)]
        self.asked += texts
        rows = zip(experience["context"].tolist(), experience["position"].tolist(), strict=True)
        return {"logp": torch.tensor([self.after if "#" in texts[c][:at] else -2.0 for c, at in rows])}


class Marking:
    """A collector whose policy draws the marks that it is given, in turn."""

    def __init__(self, drawn: Sequence[str]):
        self.world, self.left = WORLD, list(drawn)
        self.learner, self.reference = Believes(-0.5), Believes(-1.0)
        self.policy = self.learner
        self.seen: list[str] = []
        self.state = {"episodes": 0}

    def tasks(self, n: int) -> list[Task]:
        return TASKS[:n]

    def place(self, i: int) -> int:
        return i

    def task(self, place: int) -> Task:
        return TASKS[place]

    @contextmanager
    def acted_by(self, who: str) -> Iterator[None]:
        self.policy = self.reference if who == "reference" else self.learner
        yield
        self.policy = self.learner

    def episodes(self, tasks: Sequence[Task], group: int, temperature: float) -> Experience:
        self.seen += [WORLD.text(task.prompt) for task in tasks]
        said = [self.left.pop(0) + "$" for _ in range(len(tasks) * group)]
        first = self.state["episodes"]
        self.state["episodes"] += len(said)
        rows = [(first + e, token) for e, text in enumerate(said) for token in WORLD.tokens(text)]
        thought = [float(text[0] == "#" and i == len(text) - 1) for text in said for i in range(len(text))]
        columns: dict[str, Any] = {"episode": [e for e, _ in rows], "action": [token for _, token in rows]}
        columns["group"] = [e // group for e, _ in rows]
        return hand(**columns, **{"signal:commented": thought})


def worth(experience: Experience, column: str) -> list[float]:
    return experience.by("episode").sum(experience[column]).tolist()


def test_a_mark_earns_how_likely_the_next_line_is_and_nothing_after_it() -> None:
    """Two marks a line. CBx has 3 tokens, cDA$ 4; −2 each, or −1 by the frozen policy after a comment."""
    collect: Any = Marking([".", "#4.", ".", "#7.", "#1.", "."])
    read = read_through(collect, TASKS, 2, by="reference")
    assert [worth(found, "signal:likelihood") for found in read.found] == [[-6, -3, -8, -4], [-4, -8]]
    on_last = read.found[0]["signal:likelihood"]
    assert on_last.tolist() == [0, -6, 0, 0, 0, -3, 0, -8, 0, 0, 0, -4]
    assert collect.learner.asked == [], "the policy that learns is not asked"
    assert collect.reference.asked[:2] == ["31>60=.CBx", "31>60=#4.CBx"]


def test_a_mark_never_sees_its_line_and_the_first_of_a_group_stays() -> None:
    collect: Any = Marking(["#4.", ".", ".", "#1.", ".", "#1."])
    read = read_through(collect, TASKS, 2)
    assert collect.seen == ["31>60=", "31>90=", "31>60=#4.CBx"]
    assert [WORLD.text(text) for text in read.texts] == ["#4.CBx.cDA$", ".cDA$"]
    assert worth(read.found[1], "signal:likelihood") == [-2, -2], "an earlier comment may help, too"


def test_thinking_costs_and_is_compared_in_its_own_state() -> None:
    collect: Any = Marking([".", "#4.", ".", "#7.", "#1.", "."])
    found = marks(prompts=2, group=2)(collect)
    assert [round(r, 6) for r in worth(found.with_columns(r=next_line()(found)), "r")] == [
        -6, -3.05, -8, -4.05, -4.05, -8,
    ]  # fmt: skip
    dear = next_line(cost=5.0)(found)
    credit = ra3_intents().credit(found.with_columns(reward=dear))
    advantage = found.by("episode").mean(credit).tolist()
    assert advantage == [1, -1, 0.5, -0.5, -0.5, 0.5], "−6 against −3 − 5, −8 against −4 − 5"


def rows_of(**settings: Any) -> tuple[Marking, list[dict[str, Any]]]:
    collect = Marking(["#4.", ".", "#1."])
    maker: Any = SimpleNamespace(
        collect=lambda policy: collect,
        world=WORLD,
        answer=lambda place, task, answer, **numbers: {
            "task": place,
            "text": WORLD.text(answer),
            **numbers,
        },
    )
    return collect, list(marked(prompts=2, **settings)(maker))


def test_texts_with_marks_and_as_they_are() -> None:
    collect, rows = rows_of()
    assert [(row["text"], row["commented"]) for row in rows] == [("#4.CBx#1.cDA$", 1.0), (".cDA$", 0.0)]
    assert collect.learner.asked
    collect, rows = rows_of(marks=False)
    assert [(row["text"], row["commented"]) for row in rows] == [(".CBx.cDA$", 0.0), (".cDA$", 0.0)]
    assert not collect.seen


def test_two_rounds_each_from_the_one_before_then_trial_and_error() -> None:
    """E from the start or the last M, texts marked by E, M from E on these texts, and at last GRPO from the last M."""
    stages = {stage.name: stage for stage in ra3().stages}
    assert list(stages) == ["intents", "mark", "imitate", "intents-2", "mark-2", "imitate-2", "try"]
    models = {name: stage.options.get("model") for name, stage in stages.items() if stage.method}
    assert models == {
        "intents": None,
        "imitate": "@intents",
        "intents-2": "@imitate",
        "imitate-2": "@intents-2",
        "try": "@imitate-2",
    }
    makes = {name: stage.make.settings() for name, stage in stages.items() if stage.make}
    assert [made["policy"] for made in makes.values()] == ["@intents", "@intents-2"]
    assert [stages[f"imitate{n}"].settings["data.folder"] for n in ("", "-2")] == ["@mark", "@mark-2"]
    both = [sum(stage.options.get("steps", 0) for stage in made().stages) for made in (ra3, next_token)]
    assert both == [40, 40]


def test_the_experts_lines_stay_as_they_are(tmp_path: Path) -> None:
    """By the shipped start: every text begins with a mark, and without marks it is the expert's."""
    tiny.bare(tmp_path / "run", marked(prompts=24), world="registers", settings={"run.device": "cpu"})
    rows = [json.loads(line) for line in (tmp_path / "run/data.jsonl").read_text().splitlines()]
    assert len(rows) == 24
    for row in rows:
        task = WORLD.task("train", row["task"])
        lines = registers._lines(row["text"])
        assert "".join(f".{line}" for _, line in lines) + "$" == WORLD.text(WORLD.gold(task))
        assert WORLD.grade(task, row["answer"])["success"] == 1
    commented = sum(row["numbers"]["commented"] for row in rows) / len(rows)
    assert 0.2 < commented < 0.65


def test_what_a_policy_makes_of_the_experts_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registers, "LOOKED_AT", 64)
    policy = open_policy("start", WORLD, 0, "cpu")
    found = {name: WORLD.measure(name, policy) for name in ("nats", "thinks", "informs")}
    assert 0.05 < found["nats"] < 1.0
    assert 0.3 < found["thinks"] < 0.5, "the teacher comments on 0.4 of its lines"
    assert 0.0 < found["informs"] < 2.08


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(PanoplyError, match="lines"):
        tiny.bare(tmp_path / "run", "ra3", world="chain")
    with pytest.raises(PanoplyError, match="texts stay as they are"):
        tiny.bare(
            tmp_path / "run",
            "ra3",
            world="registers",
            settings={"mark.marks": False, "mark.temperature": 0.5},
        )
    with pytest.raises(PanoplyError, match="at least 0"):
        next_line(cost=-1.0)
