"""Signals on single decisions: of a judge of steps, or of a grade that lists a number a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from kit import hand
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.base.grpo import grpo
from panoply.parts import part
from panoply.rollout.text import Collector
from panoply.seeds import numpy_rng
from panoply.slots.credit.groups import token_group
from panoply.slots.sample.answers import answers_of, on_tokens
from panoply.worlds.text.chain import Chain
from panoply.worlds.world import Signals, Task


@part("sample", equation="{votes} judges of every step", needs={"world:judge"}, gives={"signal:wrong"})
def toy_judged(collect: Collector, *, prompts: int = 16, group: int = 8, votes: int = 3) -> Experience:
    """Tokens of steps that most judges find wrong are marked."""
    tasks = collect.tasks(prompts)
    found = collect.episodes(tasks, group)
    asked, keys = {t.id: t for t in tasks}, found.by("episode").keys.tolist()
    problems = found.by("episode").first(found["task"]).tolist()
    marks = []
    for key, task, said in zip(keys, (asked[i] for i in problems), answers_of(found), strict=True):
        rngs = [numpy_rng("judge", collect.seed, key, vote) for vote in range(votes)]
        right = np.mean([collect.world.judge(task, said, rng) for rng in rngs], axis=0)
        marks.append([0.0] * len(said))
        for (start, end), share in zip(collect.world.spans(task, said), right.tolist(), strict=True):
            marks[-1][start:end] = [float(share < 0.5)] * (end - start)
    return found.with_columns(**{"signal:wrong": on_tokens(found, marks)})


@part("reward", equation="{right}·success − {wrong}·[its step is wrong]", needs={"signal:wrong"})
def toy_by_step(experience: Experience, *, right: float = 2.0, wrong: float = 1.0) -> Tensor:
    """On every token: what the answer earned, less what its step was blamed for."""
    episodes = experience.by("episode")
    outcome = episodes.rows(episodes.sum(experience["signal:success"]))
    return right * outcome - wrong * experience["signal:wrong"]


def test_a_method_that_blames_steps(tmp_path: Path) -> None:
    """All answers of new weights are wrong, and still there is something to learn."""
    method = grpo().but(sample=toy_judged(prompts=2, group=4), reward=toy_by_step(), credit=token_group())
    settings = {"world.operations": 2, "world.judge_noise": 0.1, "run.held_out": 4, "run.device": "cpu"}
    done = tiny.bare(tmp_path / "run", method, settings=settings, model="fresh", steps=1)
    (row,) = tiny.metrics(done.run)
    assert row["gradient_norm"] > 0


def test_tokens_of_wrong_steps_are_marked(tiny_collector: Collector) -> None:
    found = toy_judged(prompts=3, group=4, votes=1)(tiny_collector)
    world, tasks = tiny_collector.world, Collector(tiny_collector.world, tiny_collector.policy, 0).tasks(3)
    blank = numpy_rng("none")
    for i, said in enumerate(answers_of(found)):
        marks = found["signal:wrong"][found["episode"] == i].tolist()
        spans, verdicts = world.spans(tasks[i // 4], said), world.judge(tasks[i // 4], said, blank)
        expected = [0.0] * len(said)
        for (start, end), fine in zip(spans, verdicts, strict=True):
            expected[start:end] = [float(not fine)] * (end - start)
        assert marks == expected


def test_each_decision_against_all_of_its_group() -> None:
    rows = hand(episode=[0, 0, 0, 1, 2, 2], group=[0, 0, 0, 0, 1, 1], reward=[2.0, 2.0, 1.0, -1.0, 0.7, 0.7])
    plain = token_group(scale="none")(rows)
    assert plain.tolist() == pytest.approx([1.0, 1.0, 0.0, -2.0, 0.0, 0.0])
    scaled = token_group(epsilon=0.0)(rows)
    assert scaled.tolist() == pytest.approx([x / 2**0.5 for x in (1.0, 1.0, 0.0, -2.0)] + [0.0, 0.0])


@dataclass(frozen=True)
class Marked(Chain):
    """A grade of every token: 1 where it is the reference's. One number too few where `short`."""

    short: bool = False

    def grade(self, task: Task, answer: Sequence[int]) -> Signals:
        gold = self.gold(task)
        same = [float(a == b) for a, b in zip(answer, [*gold, *[-1] * len(answer)], strict=False)]
        return {**super().grade(task, answer), "same": same[: len(same) - self.short]}


def test_a_grade_that_lists_a_number_a_token(tiny_collector: Collector) -> None:
    world = Marked(operations=2)
    collect = Collector(world, tiny_collector.policy, seed=0)
    tasks = collect.tasks(3)
    found = collect.episodes(tasks, 2)
    given = collect.answers(tasks[:1], [world.gold(tasks[0])])
    for i, said in enumerate(answers_of(found)):
        expected = [float(a == b) for a, b in zip(said, world.gold(tasks[i // 2]), strict=False)]
        assert found["signal:same"][found["episode"] == i].tolist()[: len(expected)] == expected
    assert 0 < float(found["signal:same"].sum()) < len(found)
    assert given["signal:same"].tolist() == [1.0] * len(given)
    with pytest.raises(PanoplyError, match="'same' has 6 numbers for 7 tokens of an answer"):
        Collector(Marked(operations=2, short=True), collect.policy, 0).answers(
            tasks[:1], [world.gold(tasks[0])]
        )
    assert torch.equal(
        on_tokens(found, [[float(t) for t in said] for said in answers_of(found)]), found["action"]
    )
