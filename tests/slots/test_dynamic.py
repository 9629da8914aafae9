"""Asking until groups vary, and pairs of a group's extremes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kit import hand

from panoply.experience import Experience, Ragged, Table
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.slots.sample.dynamic import dynamic, varied_groups_of
from panoply.slots.select.pairs import best_worst
from panoply.worlds.text.chain import Chain


class Scripted:
    """A collector whose tasks end as written: each task is the successes of its group."""

    def __init__(self, script: Sequence[Sequence[int]]):
        self.script, self.asked, self.groups = list(script), 0, 0

    def acted_by(self, who: str) -> Any:
        assert who == "learner"
        return nullcontext()

    def tasks(self, n: int) -> list[Sequence[int]]:
        self.asked += n
        return [self.script.pop(0) for _ in range(n)]

    def episodes(self, tasks: Sequence[Sequence[int]], group: int, **settings: Any) -> Experience:
        assert settings["temperature"] == 0.7
        flat = [s for task in tasks for s in task]
        first = self.groups * group
        self.groups += len(tasks)
        made = hand(
            episode=[first + i for i in range(len(flat))],
            group=[(first + i) // group for i in range(len(flat))],
            **{"signal:success": [float(s) for s in flat]},
        )
        tokens = Ragged.from_lists([[first + i] for i in range(len(flat))])
        prompt = torch.arange(len(flat)) // group
        return Experience(made.decisions, Table({"tokens": tokens, "prompt": prompt}))


def test_it_asks_until_enough_groups_vary() -> None:
    collect = Scripted([(0, 1), (0, 0), (1, 1), (0, 0), (1, 0), (0, 1)])
    made = dynamic(prompts=2, group=2, temperature=0.7)(collect)
    assert collect.asked == 6
    assert made["group"].tolist() == [0, 0, 4, 4], "the second of the last round is one too many"
    assert made.context.ragged("tokens").tolist() == [[0], [1], [8], [9]]
    prompt = made.context.tensor("prompt")
    assert len(prompt.unique()) == 2, "prompts of different rounds are different prompts"


def test_it_gives_up() -> None:
    collect = Scripted([(0, 0), (0, 1), (1, 1), (0, 0), (1, 0), (0, 1)])
    made = dynamic(prompts=2, group=2, temperature=0.7, rounds=2)(collect)
    assert collect.asked == 4
    assert made["group"].tolist() == [1, 1]
    collect = Scripted([(0, 0), (1, 1)])
    made = dynamic(prompts=1, group=2, temperature=0.7, rounds=2)(collect)
    assert made["group"].tolist() == [1, 1], "nothing varies: the last round as it is"


def test_on_a_world() -> None:
    """Scores agree with the sampler's after rounds are stacked, which they would not if prompts were mixed up."""
    world = Chain(operations=2)
    collect = Collector(world, open_policy("start", world, 0, "cpu", "float32"), seed=0)
    rounds = [collect.episodes(collect.tasks(3), 2) for _ in range(2)]
    made = Experience.cat(rounds)
    scored = collect.policy.score(made)["logp"]
    torch.testing.assert_close(scored, made["logp"], atol=1e-4, rtol=0)
    assert len(made) == sum(map(len, rounds))
    assert set(varied_groups_of(made, "success").tolist()) <= set(made["group"].tolist())


def returns(values: Sequence[float], groups: Sequence[int]) -> Experience:
    n = range(len(values))
    return hand(episode=[20 + i for i in n], group=list(groups), reward=[float(v) for v in values])


def test_best_over_worst() -> None:
    made = best_worst()(returns([1, 3, 3, 0, 2, 2, 5], [7, 7, 7, 7, 8, 8, 9]))
    assert made.pairs is not None
    assert made.pairs.tensor("chosen").tolist() == [21], "the first of equals; 8 and 9 do not vary"
    assert made.pairs.tensor("rejected").tolist() == [23]
    assert made["episode"].tolist() == [21, 23]


@pytest.mark.parametrize("values", [[1.0, 1.0], []])
def test_nothing_to_compare(values: list[float]) -> None:
    made = returns([1.0, 1.0], [0, 0])
    made = best_worst()(made if values else made.take(torch.zeros(2, dtype=torch.bool)))
    assert len(made) == 0
    assert made.pairs is not None
    assert made.pairs.rows == 0
