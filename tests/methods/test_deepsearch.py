"""DeepSearch: outcomes backed up, what is expanded next, what is kept, tokens' values, rounds with cached answers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from kit import hand

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import OPEN, REPLAY, TERMINATED, Segments
from panoply.methods.reasoning_data.deepsearch import node_value, searched
from panoply.rollout.text import Collector
from panoply.rollout.tree import Node
from panoply.slots.sample.searching import Search, backed_up
from panoply.slots.task_memory import TaskMemory
from panoply.worlds.text.chain import Chain
from panoply.worlds.world import Task

# ------------------------------------------------------------------ values


def test_a_node_above_zero_never_falls() -> None:
    dice = random.Random(0)
    for _ in range(200):
        value = 0.0
        for _ in range(12):
            outcome, gamma = dice.choice((-1.0, 1.0)), dice.uniform(0.1, 1)
            after = backed_up(value, outcome, gamma)
            assert after >= value or (value <= 0 and outcome < 0)
            assert after > 0 or outcome < 0
            value = after


def test_back_up_by_hand() -> None:
    """Up from 0 and from above; a failure stops at a node above 0; a success wipes out failures; failures add up."""
    assert backed_up(0.0, 1.0, 0.5) == 0.5
    assert backed_up(0.5, 1.0, 0.75) == 1.25
    assert backed_up(0.5, -1.0, 0.75) == 0.5
    assert backed_up(-3.0, 1.0, 0.25) == 0.25
    assert backed_up(-0.5, -1.0, 0.25) == -0.75


def grown(*edges: tuple[int, float, bool | None]) -> SimpleNamespace:
    """A tree of one task: of each edge the node it leaves, the log-probability of its two tokens, and how it ended."""
    nodes = [Node(-1, 0)]
    for parent, logp, right in edges:
        end = OPEN if right is None else TERMINATED
        made = Node(parent, 0, nodes[parent].depth + 1, end=end, earned={"success": float(bool(right))})
        made.logp, made.decisions = logp, 2
        nodes.append(made)
    return SimpleNamespace(nodes=nodes)


def search(tree: Any, **changes: Any) -> Search:
    settings: dict[str, Any] = {"explore": 2.0, "weights": (0.4, 0.4, 0.01), "bonus": "sqrt", "floor": 0.1}
    settings |= {"after": "frontier", "group": 2, "deepest": 4} | changes
    return Search(tree, 0, **settings)


def test_a_search_by_hand() -> None:
    """Two levels without an end, then one answer right, and one wrong below the other node."""
    tree = grown(
        (0, -1.0, None), (0, -4.0, None),  # 1, 2
        (1, -1.0, None), (1, -1.0, True),  # 3, 4
        (2, -1.0, False), (2, -3.0, False),  # 5, 6
    )  # fmt: skip
    one = search(tree)
    one.expanded([1, 2])
    assert one.at == 1, "unvisited children are alike, and the first is taken"
    assert one.visits == {0: 0, 1: 1, 2: 1}
    one.expanded([3, 4])
    assert one.kept == [4]
    assert one.value == pytest.approx({0: 1 / 3, 1: 2 / 3, 2: 0.0, 3: 0.0, 4: 1.0})
    assert one.visits == {0: 1, 1: 2, 2: 1, 3: 1, 4: 1}
    assert one.mean(1) == pytest.approx(1 / 3)
    worth = {
        n: 0.4 * math.tanh(q) + 0.4 * h + 0.01 * math.sqrt(d / 4)
        for n, q, h, d in ((2, 1 / 3, 2.0, 1), (3, 1 / 3, 0.5, 2))
    }
    assert [one.priority(2), one.priority(3)] == pytest.approx([worth[2], worth[3]])
    assert one.at == 2, "the less sure of two open nodes"
    before = dict(one.value)
    one.expanded([5, 6])
    assert one.kept == [4, 5], "of two wrong answers the surer: its whole path counts"
    assert one.others == [6]
    assert one.at is None, "there are enough"
    assert one.value[0] == before[0], "a failure does not lower what a success has passed"
    assert one.value[2] == pytest.approx(-2 / 3)
    assert one.value[5] == -1.0


def test_right_answers_are_kept_before_surer_wrong_ones() -> None:
    one = search(grown((0, -0.1, False), (0, -5.0, True), (0, -3.0, True)), group=1)
    one.expanded([1, 2, 3])
    assert one.kept == [3]


def test_early_nodes_count_at_least_the_floor() -> None:
    chain = [(0, -1.0, None), (1, -1.0, None), (2, -1.0, None), (3, -1.0, True)]
    one = search(grown(*chain), group=1, floor=0.5)
    for new in ([1], [2], [3], [4]):
        one.expanded(new)
    assert one.value == pytest.approx({0: 0.5, 1: 0.5, 2: 0.6, 3: 0.8, 4: 1.0})


def test_where_nothing_is_left_ends_beside_others_are_taken() -> None:
    one = search(grown((0, -0.1, False), (0, -5.0, False), (0, -3.0, True)), group=3)
    one.expanded([1, 2, 3])
    assert one.kept == [3, 1, 2]
    assert one.at is None


def test_from_the_root_by_upper_bounds() -> None:
    """After an answer below node 1 its mean is high, and it is left for node 2 only where nothing is open below it."""
    tree = grown((0, -1.0, None), (0, -1.0, None), (1, -1.0, None), (1, -1.0, True))
    one = search(tree, after="root", explore=0.0)
    one.expanded([1, 2])
    one.expanded([3, 4])
    assert one.at == 3, "down to the best child, and on to the one that is open"
    assert one.puct(1) == pytest.approx(1 / 3)
    keen = search(tree, explore=2.0)
    keen.expanded([1, 2])
    keen.expanded([3, 4])
    assert keen.puct(3) == pytest.approx(0.0 + 2 * math.sqrt(math.log(2) / 1))


def test_bonus_of_depth() -> None:
    tree = grown((0, 0.0, None), (0, 0.0, None), (1, 0.0, None))
    for bonus, expected in (("sqrt", math.sqrt(2 / 4)), ("log", math.log(3)), ("linear", 2.0)):
        one = search(tree, bonus=bonus, weights=(0.0, 0.0, 1.0))
        one.expanded([1, 2])
        one.expanded([3])
        assert one.priority(3) == pytest.approx(expected)


# ------------------------------------------------------------------ of a policy

SMALL: dict[str, Any] = {"prompts": 2, "group": 3, "width": 2, "segment": 3}


def test_answers_of_a_tree_are_whole_episodes(tiny_collector: Collector) -> None:
    _, made = searched(**SMALL)({}, tiny_collector)
    episodes = made.by("episode")
    assert Segments(episodes.first(made["group"])).count.tolist() == [3, 3]
    scored = tiny_collector.policy.score(made)["logp"]
    assert torch.allclose(scored, made["logp"], atol=1e-5), "each token as it was drawn in its piece"
    tokens, prompt = made.context.ragged("tokens"), made.context.tensor("shared")
    for e in range(len(episodes)):
        mine = (episodes.index == e).nonzero().flatten()
        row = int(made["context"][mine[0]])
        assert made["action"][mine].tolist() == tokens[row][int(prompt[row]) :].tolist()
        assert made["position"][mine].tolist() == list(range(int(prompt[row]), len(tokens[row])))
        graded = tiny_collector.world.grade(
            tiny_collector.numbered([e // 3])[0], made["action"][mine].tolist()
        )
        assert float(made["signal:ended"][mine].sum()) == graded["ended"]
    last = episodes.last(made["node_value"])
    assert last.abs().tolist() == [1.0] * 6
    assert bool((made["node_value"].abs() <= 1).all())
    assert tiny_collector.state["decisions"] > len(made), (
        "what was searched and not kept has been sampled too"
    )


# ------------------------------------------------------------------ credit


def test_credit_is_the_releases() -> None:
    """Values less the mean of the last ones, over their deviation among all answers where asked."""
    values = [0.2, 0.5, 1.0, -0.3, -1.0, 0.1, 0.4, 1.0]
    made = hand(
        episode=[0, 0, 0, 1, 1, 2, 2, 2], group=[0] * 8, node_value=values,
        reward=[0.0, 0, 1.0, 0, -1.0, 0, 0, 1.0], position=[0, 1, 2, 0, 1, 0, 1, 2],
    )  # fmt: skip
    mean, deviation = 1 / 3, math.sqrt(8 / 9)
    assert node_value()(made).tolist() == pytest.approx([v - mean for v in values], abs=1e-6)
    scaled = node_value(scale="std")(made).tolist()
    assert scaled == pytest.approx([(v - mean) / deviation for v in values], abs=1e-4)
    long = made.with_columns(reward=made["reward"] - torch.tensor([0, 0, 0.5, 0, 0, 0, 0, 0]).double())
    mean = (0.5 - 1 + 1) / 3
    expected = [v - 0.5 * (i < 3) - mean for i, v in enumerate(values)]
    assert node_value()(long).tolist() == pytest.approx(expected, abs=1e-6), "a penalty is on all tokens"
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    mixed = made.take(order)
    assert torch.allclose(node_value()(mixed), node_value()(made)[order])


# ------------------------------------------------------------------ rounds


@dataclass(frozen=True)
class Ends(Chain):
    """Success is to end at once, which new weights do now and then."""

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        found = super().grade(task, answer)
        return {**found, "success": float(found["ended"] and task.id % 2 == 0)}


def test_rounds(tiny_collector: Collector) -> None:
    """Odd tasks are never solved: searched in every round. Even ones come back with what was right, if rare."""
    collect = Collector(Ends(operations=2), tiny_collector.policy, seed=0)
    part = searched(**{**SMALL, "prompts": 6, "group": 4}, pool=6, rare=1.0)
    state, first = part({}, collect)
    assert collect.notes["searched"] == 6
    state, second = part(state, collect)
    assert state["round"] == 1
    ids = [task.id for task in collect.numbered(range(6))]
    solved = {int(t) for t in first["task"][first["signal:success"] > 0]}
    assert solved, "some are solved, or nothing is tested"
    assert [ids[i] for i in state["recall"].tolist()] == [i for i in ids if i in solved]
    assert [ids[i] for i in state["search"].tolist()] == [i for i in ids if i not in solved]
    cached = second.take(second["source"] == REPLAY)
    assert set(cached["task"].tolist()) == solved
    assert bool((cached["node_value"] == 1).all())
    scored = collect.policy.score(cached)["logp"]
    assert torch.allclose(scored, cached["logp"], atol=1e-6)
    groups = Segments(second.by("episode").first(second["group"]))
    assert groups.count.tolist() == [4] * 6, "cached answers stand in the place of own ones"
    kept = TaskMemory.of(state).look(torch.tensor(sorted(solved)), answers=())["answers"]
    assert all(len(row) > 0 for row in kept.tolist())
    often = {
        **state,
        "at": 6,
        **TaskMemory.of(state).write(torch.tensor(ids), won=torch.full((6,), 0.9)).state(),
    }
    state, _ = searched(**{**SMALL, "prompts": 6, "group": 4}, pool=6, rare=0.25)(often, collect)
    assert len(state["recall"]) == 0, "what is solved often is dropped"


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    settings = {f"sample.{name}": value for name, value in SMALL.items()} | {"sample.pool": 3}
    settings |= {"world.operations": 2, "run.held_out": 2, "run.device": "cpu", "run.checkpoint_every": 3}
    for name in ("whole", "cut"):
        tiny.bare(tmp_path / name, "deepsearch", model="fresh", steps=5, settings=settings)
    for folder in (tmp_path / "cut" / "checkpoints").glob("step-*5"):
        for file in sorted(folder.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        folder.rmdir()
    (tmp_path / "cut" / "result.json").unlink()
    tiny.resume(tmp_path / "cut")
    assert tiny.model_bytes(tmp_path / "cut", 5) == tiny.model_bytes(tmp_path / "whole", 5)
    assert tiny.metrics(tmp_path / "cut") == tiny.metrics(tmp_path / "whole")


def test_what_cannot_be_is_refused() -> None:
    for settings, why in (
        ({"sample.temperature": 0.0}, "branches of a node would be the same"),
        ({"sample.pool": 8}, "a step takes 16 prompts"),
        ({"sample.rare": 0.5}, "prompts never come again"),
        ({"sample.explore": 1.0}, "only from the root"),
        ({"sample.after": "root", "sample.doubt": 0.1}, "begins at the root"),
        ({"credit.epsilon": 0.1}, "nothing divides"),
    ):
        with pytest.raises(PanoplyError, match=why):
            pp.plan("deepsearch", "chain", settings=settings)
    with pytest.raises(PanoplyError, match="turn"):
        pp.plan("deepsearch", "keydoor")
