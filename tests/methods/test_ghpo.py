"""GHPO: whole groups are redone with the least hint that helps, no loss on hints, and none in an evaluation."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hinting import Scripted, given_steps, outcomes
from kit import hand
from tiny import bare, metrics, resume

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.reasoning_data.ghpo import ghpo, rescued
from panoply.slots.sample.hints import hinted, shown, steps_of
from panoply.worlds.text.chain import Chain
from panoply.worlds.world import TextWorld

WANTED = (0, 2, 4, 6, 8)
"""How many steps each of five tasks needs before half of its answers are right; of the last no hint is enough."""


def needs(number: int, steps: int, at: int) -> bool:
    return steps >= WANTED[number] and at % 2 == 1


def collected(version: int = 100, **settings: Any) -> tuple[Scripted, Experience]:
    collect = Scripted(needs, version)
    return collect, rescued(prompts=5, group=4, **settings)(collect)


def test_whole_groups_are_redone_until_somebody_succeeds() -> None:
    """¼, ½ and ¾ of eight steps are 2, 4 and 6. Nobody gets more than he needs, and who needs none gets none."""
    collect, found = collected()
    assert [sorted(set(call)) for call in collect.asked] == [
        [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0)],
        [(1, 2), (2, 2), (3, 2), (4, 2)],
        [(2, 4), (3, 4), (4, 4)],
        [(3, 6), (4, 6)],
    ]
    assert given_steps(found, collect.world) == {0: [0] * 4, 1: [2] * 4, 2: [4] * 4, 3: [6] * 4, 4: [6] * 4}
    assert outcomes(found) == {**{at: [0.0, 1.0] * 2 for at in range(4)}, 4: [0.0] * 4}
    assert collect.notes == pytest.approx({"hinted": 4 / 5, "hint_share": 18 / 32, "unsolved": 1 / 5})


def test_hints_are_in_the_prompt_and_are_no_decisions() -> None:
    """Every decision stands behind its prompt, and the tokens of an answer are the rest of the reference."""
    collect, found = collected()
    prompts = found.context["shared"][found["context"]]
    assert bool((found["position"] >= prompts).all())
    world = collect.world
    for at, row in enumerate(found.context["tokens"].tolist()):
        size = int(found.context["shared"][at])
        task = next(t for t in collect.numbered(range(5)) if row[: len(t.prompt)] == list(t.prompt))
        assert row[:size] == list(world.hint(task, (size - len(task.prompt)) / 24).prompt)
        said = found["action"][found["context"] == at].tolist()
        assert row[size:] == said
    assert "logp" in found
    assert bool(torch.isfinite(found["logp"]).all()), (
        "all are the policy's own answers, after the prompt they had"
    )


def test_what_was_drawn_is_what_is_counted() -> None:
    collect, found = collected()
    assert collect.state["decisions"] > len(found), "groups that were thrown away have cost something"
    assert collect.state["tasks"] == 5


def test_a_pool_without_a_failing_prompt_is_asked_once() -> None:
    collect = Scripted(lambda number, steps, at: at == 0)
    found = rescued(prompts=1, group=4)(collect)
    assert len(collect.asked) == 1
    assert outcomes(found) == {0: [1.0, 0.0, 0.0, 0.0]}
    assert collect.notes == {"hinted": 0.0, "hint_share": 0.0, "unsolved": 0.0}


@pytest.mark.parametrize(
    ("version", "settings", "calls"),
    [
        (0, {}, [0, 4]),
        (19, {}, [0, 4]),
        (20, {}, [0, 2, 4, 6]),
        (0, {"cold": 0}, [0, 2, 4, 6]),
        (2, {"first": 0.25}, [0, 2]),
        (2, {"start": 3}, [0]),
        (3, {"start": 3, "cold": 0}, [0, 2, 4, 6]),
        (50, {"levels": (0.5, 0.51, 0.9)}, [0, 4, 7]),
    ],
)
def test_a_cold_start_and_a_start_without_hints(
    version: int, settings: dict[str, Any], calls: list[int]
) -> None:
    """A level that, in whole steps, gives no more than the one before is not asked."""
    collect, _ = collected(version, **settings)
    assert [max(steps for _, steps in call) for call in collect.asked] == calls


def test_advantages_are_the_published_trainer_s() -> None:
    """R = accuracy + ½·format, less the group's mean, over its deviation (of n − 1) and 1e-4, written out."""
    right, ended = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    made = hand(group=[0, 0, 0, 1, 1, 1], **{"signal:success": right, "signal:ended": ended})
    published = ghpo()
    found = published.credit(made.with_columns(reward=published.reward(made)))
    wanted = []
    for rewards in ([1.5, 0.5, 0.0], [1.5, 0.5, 0.5]):
        mean = sum(rewards) / 3
        deviation = (sum((r - mean) ** 2 for r in rewards) / 2) ** 0.5
        wanted += [(r - mean) / (deviation + 1e-4) for r in rewards]
    assert found.tolist() == pytest.approx(wanted)


def test_the_same_hint_for_all_and_one_that_fades() -> None:
    world = Chain(operations=8)
    task = world.task("train", 0)
    assert (steps_of(world, task), steps_of(world, world.hint(task, 0.5))) == (8, 8)
    assert shown(world, world.hint(task, 0.5)) == 0.5
    for version, until, steps in (
        (0, None, 4),
        (7, None, 4),
        (0, 10, 4),
        (5, 10, 2),
        (10, 10, 0),
        (99, 10, 0),
    ):
        collect = Scripted(lambda number, steps, at: True, version)
        hinted(prompts=2, group=2, share=0.5, until=until)(collect)
        assert {given for _, given in collect.asked[0]} == {steps}
        assert collect.notes == {"hint_share": steps / 8}


TINY = {
    "run.device": "cpu",
    "world.operations": 3,
    "run.held_out": 4,
    "sample.prompts": 2,
    "sample.group": 4,
    "sample.cold": 1,
    "reward.name": "ended",
    "sample.name": "final",
}


def test_no_hint_in_an_evaluation_and_resume_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all that is asked, prompts of the test split have no answer in them; hints are of the train split alone."""
    asked: list[tuple[int, int]] = []
    plain, hint = TextWorld.grade_all, TextWorld.hint
    graded: list[tuple[int, int]] = []

    def grade_all(self: Any, tasks: Any, answers: Any) -> Any:
        graded.extend((task.id % 8 == 0, len(task.given)) for task in tasks)
        return plain(self, tasks, answers)

    def hinting(self: Any, task: Any, share: float) -> Any:
        asked.append((task.id % 8 == 0, 1))
        return hint(self, task, share)

    monkeypatch.setattr(TextWorld, "grade_all", grade_all)
    monkeypatch.setattr(TextWorld, "hint", hinting)
    choices = {"model": "fresh", "steps": 2, "settings": {**TINY, "run.checkpoint_every": 1}}
    whole = bare(tmp_path / "run", "ghpo", **choices)
    logged = metrics(whole.run)
    assert asked
    assert not any(held_out for held_out, _ in asked)
    assert any(held_out for held_out, _ in graded)
    assert all(given == 0 for held_out, given in graded if held_out)
    assert any(given for held_out, given in graded if not held_out)
    assert all(row["step0_gap"] < 1e-4 for row in logged if "step0_gap" in row)
    shutil.rmtree(whole.run / "checkpoints/step-0000002")
    (whole.run / "result.json").unlink()
    assert resume(whole.run).fingerprint == whole.fingerprint
    assert metrics(whole.run) == logged


@pytest.mark.parametrize(
    ("world", "settings", "said"),
    [
        ("manyanswers", {}, "'hint'"),
        ("cartpole", {}, "text|hint|verify"),
        ("chain", {"sample.levels": (0.5, 1.5)}, "sample.levels must be from 0 up to 1, not 1.5"),
        ("chain", {"sample.levels": (0.5, -0.5)}, "from 0 up to 1"),
        ("chain", {"sample.levels": (0.5, 0.25)}, "each larger"),
        ("chain", {"sample.levels": ()}, "above 0"),
        ("chain", {"sample.levels": (0.0, 0.5)}, "above 0"),
        ("chain", {"sample.first": 1.0}, "from 0 up to 1"),
        ("chain", {"sample.cold": 0, "sample.first": 0.3}, "no cold start"),
        ("chain", {"sample.cold": 3, "sample.start": 3}, "sample.cold has no effect"),
        ("chain", {"sample.temperature": 0.0}, "would be the same"),
        ("chain", {"sample.name": "luck"}, "luck"),
        ("chain", {"sample": "hinted", "sample.share": 0.0}, "no hint is given"),
        ("chain", {"sample": "hinted", "sample.share": 1.2}, "from 0 up to 1"),
    ],
)
def test_refusals(world: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        pp.plan("ghpo", world, settings=settings)
