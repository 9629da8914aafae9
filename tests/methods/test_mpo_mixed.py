"""MPO: which pairs are easy and which hard, by whose margin, and what each stage begins with and is held to."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch

import panoply as pp
from panoply import registry
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.kinds import kind_of
from panoply.methods.preferences.mpo_mixed import by_margin, distance, easy_and_hard, threshold
from panoply.policies.build import open_policy
from panoply.policies.value import ValueModel
from panoply.recipes import Recipe
from panoply.rollout.text import Collector
from panoply.slots.data.preferences import preferences
from panoply.slots.data.stored import stored_pairs
from panoply.worlds.text.strings import Strings


def collector(seed: int = 0) -> Any:
    world = Strings(sharpness=4.0)
    return kind_of(world).collector(world, open_policy("fresh", world, 0, "cpu", "float32"), seed)


UNITS = {"metres": 1.0, "feet": 3.0}


class Asked:
    """A maker whose reward models say how long an answer is, in units of their own."""

    def __init__(self, seed: int = 0):
        self.seed, self.asked = seed, []  # type: ignore[var-annotated]

    def collect(self, _: str) -> Any:
        return collector(self.seed)

    def row(self, place: int, task: Any, decode: Any) -> dict[str, Any]:
        return {"task": place, "id": task.id, "prompt": decode(list(task.prompt))}

    def judged(self, judge: str, rows: list[dict[str, Any]]) -> list[float]:
        self.asked.append((judge, len(rows)))
        return [UNITS[judge] * len(row["answer"]) for row in rows]


def answers_of(experience: Experience) -> list[list[int]]:
    order = experience.by("episode").grid().tolist()
    return [[int(experience["action"][row]) for row in rows if row >= 0] for rows in order]


# ------------------------------------------------------------------ the split


def test_a_margin_decides_and_pairs_that_contradict_their_label_are_dropped() -> None:
    margins = torch.tensor([3.0, -2.5, 0.5, -0.5, 1.0, 2.0, -1.0])
    assert easy_and_hard(margins, 1.0) == ([0, 5], [2, 3, 4, 6])
    assert easy_and_hard(-margins, 1.0)[0] == [1]
    assert threshold(margins, 0.5, None) == pytest.approx(1.0)
    assert threshold(margins, 0.0, None) == pytest.approx(0.5)
    assert threshold(10 * margins, 0.5, None) == pytest.approx(10.0)  # whatever the reward model's scale is
    assert threshold(margins, 0.5, 0.25) == 0.25


def test_the_pairs_are_those_that_the_reward_model_learned_from(tmp_path: Path) -> None:
    maker: Any = Asked(seed=3)
    easy = list(by_margin(judge="metres", pairs=12, quantile=0.5)(maker))
    hard = list(by_margin(judge="metres", pairs=12, quantile=0.5, keep="hard")(maker))
    collect = collector(3)
    _, learned = preferences(batch=12, pairs=12)({}, collect)
    said = answers_of(learned)
    pairs = {(tuple(a), tuple(b)) for a, b in zip(said[::2], said[1::2], strict=True)}
    assert {(tuple(row["chosen"]), tuple(row["rejected"])) for row in easy} <= pairs
    margins = [row["numbers"]["margin"] for row in easy]
    assert margins == [len(row["chosen"]) - len(row["rejected"]) for row in easy]
    assert margins == sorted(margins, reverse=True)
    assert min(margins) > max(abs(row["numbers"]["margin"]) for row in hard)
    assert all("chosen" not in row for row in hard)
    assert len(easy) + len(hard) < 12  # some labels are contradicted
    assert all(collect.task(row["task"]).id == row["id"] for row in (*easy, *hard))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in easy))
    held = stored_pairs(folder=str(tmp_path), batch=2, shuffled=False)
    seen = [answers_of(held(collect))[::2] for _ in range(2)]
    first = collect.state["episodes"]
    assert first > 0
    start = (24 // 2) % len(easy)  # as many pairs were taken before
    expected = [easy[(start + i) % len(easy)]["chosen"] for i in range(4)]
    assert [*seen[0], *seen[1]] == expected


def test_of_two_reward_models_each_judges_what_it_has_not_seen() -> None:
    maker: Any = Asked()
    rows = list(by_margin(judge="metres", second="feet", pairs=8, gamma=1e9, keep="hard")(maker))
    assert maker.asked == [("metres", 4)] * 2 + [("feet", 4)] * 2
    once = list(by_margin(judge="metres", pairs=8, gamma=1e9, keep="hard")(maker))
    for number, (both, one) in enumerate(zip(rows, once, strict=True)):
        assert both["numbers"]["margin"] == (3.0 if number % 2 else 1.0) * one["numbers"]["margin"]
    state: dict[str, Any] = {}
    collect, held = collector(), preferences(batch=4, pairs=8, without=(0, 2))
    for _ in range(3):
        state, learned = held(state, collect)
        assert learned.pairs is not None
        assert set(learned.pairs.tensor("pair").tolist()) == {1, 3, 5, 7}


def test_how_far_it_is_from_another_policy(tiny_collector: Collector) -> None:
    rows = tiny_collector.episodes(tiny_collector.tasks(2))
    for other, apart in ((tiny_collector.policy.copy(), False), (tiny_collector.policy.copy(), True)):
        if apart:
            with torch.no_grad():
                next(other.model.parameters()).mul_(1.3)
        seat: Any = SimpleNamespace(open=lambda _, other=other: other)
        made = distance(folder="there")(seat)
        assert made.columns is not None
        with torch.no_grad():
            far = made.columns(made.model, rows)["signal:from_imitator"]
            expected = rows["logp"] - other.score(rows)["logp"]
        assert torch.equal(far, expected)
        assert (float(far.abs().max()) > 1e-3) == apart
    with pytest.raises(PanoplyError, match="name the run or folder of a policy"):
        distance()(SimpleNamespace())


# ------------------------------------------------------------------ the recipe


def stage(recipe: str, name: str) -> Any:
    made: Recipe = registry.find("recipe", recipe).build()
    return next(stage for stage in made.stages if stage.name == name)


def test_ppo_begins_with_and_is_held_to_what_dpo_has_left() -> None:
    assert stage("mpo-mixed", "optimise").options == {"model": "@prefer", "reference": "@prefer"}
    held = stage("mpo-mixed-sft-reference", "optimise").options
    assert held == {"model": "@prefer", "reference": "@imitate"}
    assert stage("mpo-mixed", "prefer").options == {"model": "@imitate", "reference": "@imitate"}
    folds = stage("mpo-mixed-folds", "easy").make
    assert (folds.judge, folds.second) == ("@odd", "@even")
    assert stage("mpo-mixed-folds", "odd").settings["data.without"] == (0, 2)
    assert stage("mpo-mixed-folds", "hard").make.second == "@even"


def test_all_stages_run(tmp_path: Path) -> None:
    settings = {
        "run.held_out": 6, "imitate.run.steps": 1, "imitate.data.batch": 4, "judge.run.steps": 2, "judge.data.batch": 8,
        "judge.data.pairs": 16, "easy.pairs": 16, "hard.pairs": 16, "prefer.run.steps": 2, "prefer.data.batch": 4,
        "optimise.run.steps": 1, "optimise.sample.prompts": 4, "optimise.models.critic.warmup": 0,
    }  # fmt: skip
    done = tiny.bare(tmp_path / "mpo", "mpo-mixed", settings=settings)
    plan = json.loads((done.run / "run.json").read_text())["plan"]
    left = str(tmp_path / "mpo" / "04-prefer" / "checkpoints" / "step-0000002")
    assert plan["run"]["model"] == plan["run"]["reference"] == left
    metrics = json.loads((done.run / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["from_imitator"] != 0
    judge = ValueModel.load(tmp_path / "mpo" / "02-judge" / "checkpoints" / "step-0000002" / "model")
    assert bool(judge.head.weight.any())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"easy.gamma": -1.0}, "at least 0"),
        ({"easy.quantile": 1.5}, "from 0 to 1"),
        ({"easy.gamma": 1.0, "easy.quantile": 0.3}, "quantile.*gamma is given"),
        ({"judge.data.pairs": 16, "judge.data.without": (2, 2)}, "without"),
    ],
)
def test_splits_that_cannot_be_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PanoplyError, match=sentence):
        pp.plan_recipe("mpo-mixed", "strings", settings=settings)
