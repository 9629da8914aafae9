"""Trees of answers: what an edge is worth, which edges learn, and what a tree costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from kit import hand

from panoply.costs import cost
from panoply.errors import PanoplyError
from panoply.experience import OPEN, TERMINATED, TRUNCATED, Experience
from panoply.methods.reasoning_data.spo_tree import edge_gain
from panoply.planning import make_plan
from panoply.rollout.text import Collector
from panoply.slots.grow.shapes import levels
from panoply.slots.sample.tree import tree
from panoply.worlds.world import Task

SURE, DOUBT = math.log(0.95), math.log(0.5)


def grow(collect: Collector, tasks: Sequence[Task], branching: tuple[int, ...], segment: int) -> Experience:
    made = collect.tree(tasks)
    while branches := levels(branching=branching, segment=segment)(made):
        made.extend(branches)
    return made.experience()


def test_gains_golden() -> None:
    """Node 7 is worth ½: its edges lead to 1, ½ and 0. Node 8's edges are all worth ¼."""
    rows = hand(
        episode=[0, 0, 1, 2, 2, 3, 4],
        group=[7, 7, 7, 7, 7, 8, 8],
        task=[1, 1, 1, 1, 1, 1, 1],
        logp=[SURE, DOUBT, DOUBT, DOUBT, SURE, DOUBT, DOUBT],
        reward=[0.0, 1.0, 0.5, 0.0, 0.0, 0.25, 0.25],
    )
    found = edge_gain(whiten=False)(rows)
    assert found["advantage"].tolist() == pytest.approx([0.5, 0.5, 0.0, -0.5, -0.5, 0.0, 0.0])
    assert found["train"].tolist() == [False, True, False, True, False, False, False]
    scaled = edge_gain(scale="std", whiten=False)(rows)["advantage"]
    assert scaled.tolist() == pytest.approx([1.0, 1.0, 0.0, -1.0, -1.0, 0.0, 0.0])
    whitened = edge_gain()(rows)["advantage"]
    root = 0.5**0.5
    assert whitened.tolist() == pytest.approx([0.0, root, 0.0, -root, 0.0, 0.0, 0.0], abs=1e-6)


def test_at_most_so_many_edges_of_a_task_learn() -> None:
    """Six edges of task 1 and two of task 2, half of them without a gain: those are not drawn."""
    reward = [1.0, 0.0, 1.0, 0.0, 0.5, 0.5, 1.0, 0.0]
    rows = hand(
        episode=list(range(8)),
        group=[0, 0, 1, 1, 2, 2, 3, 3],
        task=[1] * 6 + [2] * 2,
        logp=[DOUBT] * 8,
        reward=reward,
    )
    for most, expected in ((0, [4, 2]), (3, [3, 2]), (1, [1, 1]), (9, [4, 2])):
        learns = edge_gain(most=most)(rows)["train"]
        assert [int(learns[:6].sum()), int(learns[6:].sum())] == expected
        assert not bool(learns[4:6].any())


@pytest.fixture
def grown(tiny_collector: Collector) -> Experience:
    return grow(tiny_collector, tiny_collector.tasks(3), (3, 2, 2), 2)


def test_a_tree_is_edges_after_prefixes(tiny_collector: Collector) -> None:
    """Every edge begins where its node's prefix ends; siblings share it, and their children begin with theirs."""
    tasks = tiny_collector.tasks(3)
    made = grow(tiny_collector, tasks, (3, 2, 2), 2)
    assert tiny_collector.state["decisions"] == len(made)
    prompt = len(tasks[0].prompt)
    tokens, shared = made.context.ragged("tokens").tolist(), made.context.tensor("shared").tolist()
    rows = made.by("context").first(made["group"]).tolist()
    assert [rows.count(g) for g in sorted(set(rows))[:3]] == [3, 3, 3]
    assert {rows.count(g) for g in rows[9:]} == {2}
    told = {tuple(t) for t in tokens}
    for row, start in zip(tokens, shared, strict=True):
        assert start == prompt or tuple(row[:start]) in told
        assert (start - prompt) % 2 == 0
    longest = tiny_collector.world.max_tokens
    assert all(len(row) - prompt <= longest for row in tokens)
    assert tiny_collector.state["episodes"] == len(tokens)
    assert tiny_collector.state["groups"] == len(set(rows))
    assert made["position"].tolist() == [
        i for row, start in zip(tokens, shared, strict=True) for i in range(start, len(row))
    ]


def test_only_leaves_end(grown: Experience) -> None:
    tokens, shared = grown.context.ragged("tokens").tolist(), grown.context.tensor("shared").tolist()
    begun = {tuple(row[:start]) for row, start in zip(tokens, shared, strict=True)}
    ends = grown.by("episode").last(grown["end"]).tolist()
    for row, end in zip(tokens, ends, strict=True):
        assert end == OPEN if tuple(row) in begun else end in (TERMINATED, TRUNCATED)


def test_the_mean_of_a_group_is_the_worth_of_its_node(tiny_collector: Collector) -> None:
    collect = Collector(tiny_collector.world, tiny_collector.policy, 1)
    made = grow(collect, collect.tasks(4), (3, 3, 3), 2)
    worth = made.by("episode").sum(made["signal:ended"])
    tokens, shared = made.context.ragged("tokens").tolist(), made.context.tensor("shared").tolist()
    below: dict[tuple[int, ...], list[float]] = {}
    for row, start, value in zip(tokens, shared, worth.tolist(), strict=True):
        below.setdefault(tuple(row[:start]), []).append(value)
    checked = 0
    for row, value in zip(tokens, worth.tolist(), strict=True):
        if tuple(row) in below and tokens.count(row) == 1:
            inside = below[tuple(row)]
            assert value == pytest.approx(sum(inside) / len(inside))
            checked += 1
    assert checked > 3
    assert 0 < float(worth.mean()) < 1


def test_recorded_log_probabilities_are_those_of_scoring(
    tiny_collector: Collector, grown: Experience
) -> None:
    with torch.no_grad():
        scored = tiny_collector.policy.score(grown)["logp"]
    torch.testing.assert_close(scored, grown["logp"], atol=1e-4, rtol=1e-4)


def test_one_level_is_a_plain_group(tiny_collector: Collector) -> None:
    other = Collector(tiny_collector.world, tiny_collector.policy, tiny_collector.seed)
    made = tree(prompts=2, grow=levels(branching=(3,), segment=99))(tiny_collector)
    plain = other.episodes(other.tasks(2), 3)
    for name in ("action", "logp", "episode", "task", "group", "end", "signal:success", "position"):
        assert torch.equal(made[name], plain[name]), name


def test_it_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(PanoplyError, match="a turn of keydoor cannot be cut"):
        make_plan("spo-tree", "keydoor")
    with pytest.raises(PanoplyError, match="nothing to compare"):
        make_plan("spo-tree", settings={"sample.grow.branching": "1,1"})
    with pytest.raises(PanoplyError, match="must be from 1 to 1000, not 0"):
        make_plan("spo-tree", settings={"sample.grow.branching": "3,0"})


def test_cost() -> None:
    """Prompts of 6 tokens, answers of 7: two levels of 3 tokens, and one token is left for the third."""
    settings = {
        "world.operations": 2,
        "sample.prompts": 5,
        "sample.grow.segment": 3,
        "sample.grow.branching": (3, 2, 2),
    }
    found = cost(make_plan("spo-tree", settings=settings, model="fresh"))
    assert found.sampled_tokens == 5 * (3 * 3 + 6 * 3 + 12 * 1)
    assert found.trained_tokens == found.sampled_tokens + 5 * (6 + 3 * (6 + 3) + 6 * (6 + 6))


def test_a_tree_is_no_deeper_than_its_answers_are_long(tiny_collector: Collector) -> None:
    """Answers have at most 7 tokens: after three levels of 2 one is left, and the fourth is the last."""
    task = tiny_collector.tasks(1)[0]
    made = grow(tiny_collector, [task], (2,) * 6, 2)
    begins = made.context.tensor("shared") - len(task.prompt)
    assert tiny_collector.world.max_tokens == 7
    assert int(begins.max()) <= 6
    assert int(made.context.ragged("tokens").lengths.max()) <= len(task.prompt) + 7
