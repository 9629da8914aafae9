"""ARPO by entropy: where episodes branch, what they share, and one gradient of hard and soft advantages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kit import assert_same, gradient, hand, on_policy

import panoply as pp
from panoply.errors import PanoplyError
from panoply.evidence.arms import Arm, Budget
from panoply.experience import OPEN, Experience
from panoply.methods.agents.arpo_entropy import Growth, arpo_entropy, branched, branches, hard, hard_and_soft
from panoply.planning import Options
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.rollout.tree import Branch, Node
from panoply.run import Run
from panoply.slots.credit.groups import group
from panoply.slots.surrogate.ratios import clip
from panoply.worlds.text.tools import Tools

# ------------------------------------------------------------------ where


def test_the_chance_is_the_released_codes() -> None:
    # score = clip(u − w·ΔH, 0, 1), branch where it is at most p: u ≤ p + w·ΔH.
    assert branches(0.59, rise=0.5, chance=0.5, weight=0.2)
    assert not branches(0.61, rise=0.5, chance=0.5, weight=0.2)
    assert branches(0.39, rise=-0.5, chance=0.5, weight=0.2)
    assert not branches(0.41, rise=-0.5, chance=0.5, weight=0.2)
    assert branches(1.0, rise=9.0, chance=0.0, weight=0.2), "a score is at least 0"
    assert branches(0.7, rise=-9.0, chance=1.0, weight=0.2), "and at most 1"


class Pretended:
    """A tree whose turns have entropies that are written down, by depth, and end after three."""

    def __init__(self, tasks: int, entropies: list[float], ends: int = 3):
        self.tasks, self.nodes = list(range(tasks)), [Node(-1, i) for i in range(tasks)]
        self.entropies, self.ends, self._first, self.rounds = entropies, ends, 0, list[list[Branch]]()
        self.collect = Collector.__new__(Collector)
        self.collect.world, self.collect.seed = Tools(), 0

    def open(self) -> list[int]:
        return [i for i, n in enumerate(self.nodes) if not n.ended and not n.branches]

    def extend(self, at: list[Branch]) -> None:
        self.rounds.append(at)
        for branch in at:
            before = self.nodes[branch.node]
            for _ in range(branch.times):
                depth = before.depth + 1
                node = Node(branch.node, before.task, depth, depth, self.entropies[depth - 1])
                node.end = 1 if depth == self.ends else OPEN
                self.nodes.append(node)
            before.branches += branch.times


def grown(entropies: list[float], ends: int = 3, **settings: Any) -> Pretended:
    tree = Pretended(2, entropies, ends)
    chosen = {
        "total": 4,
        "initial": 2,
        "factor": 2,
        "chance": 0.0,
        "weight": 100.0,
        "when": "after",
        **settings,
    }
    Growth(tree, **chosen).grow()  # type: ignore[arg-type]
    for task in range(2):
        assert sum(n.ended and n.task == task for n in tree.nodes) == chosen["total"]
    return tree


def shape(tree: Pretended) -> list[tuple[int, int]]:
    """Depth and number of edges of nodes of the first task from which more than one leaves."""
    return [(n.depth, n.branches) for n in tree.nodes if n.task == 0 and n.branches > 1]


def test_episodes_branch_where_the_turn_after_a_reply_is_less_sure_than_the_first() -> None:
    assert shape(grown([0.1, 0.9, 0.1])) == [(0, 2), (1, 2), (1, 2)], "both, before their second turn"
    assert shape(grown([0.1, 0.1, 0.9])) == [(0, 2), (2, 2), (2, 2)]


def test_the_released_code_looks_at_the_turn_before_the_reply() -> None:
    assert shape(grown([0.1, 0.9, 0.1], when="before")) == [(0, 2), (2, 2), (2, 2)]
    # After the first turn ΔH is 0 and p decides alone; what branched off begins anew with its own next turn.
    assert shape(grown([0.5, 0.5, 0.5], when="before", chance=1.0)) == [(0, 2), (1, 2), (1, 2)]


def test_where_nothing_branches_the_rest_begins_at_the_start() -> None:
    assert shape(grown([0.9, 0.1, 0.1])) == [(0, 4)]
    assert [len(r) for r in grown([0.9, 0.1, 0.1]).rounds] == [2, 4, 4, 2, 4, 4]


def test_a_group_has_room_for_no_more_than_its_size() -> None:
    found = grown([0.1, 0.9, 0.9], total=3)
    assert shape(found) == [(0, 2), (1, 2)]
    assert shape(grown([0.1, 0.9, 0.9], total=6, factor=4)) == [(0, 2), (1, 4), (1, 2)]


# ------------------------------------------------------------------ what is learned from


@pytest.fixture(scope="module")
def made() -> tuple[Collector, Experience]:
    world = Tools(easy=0.0)
    collect = Collector(world, open_policy("start", world, 0, "cpu"), 4)
    collect.counted = "calls"
    return collect, branched(prompts=3, group=6, initial=2, chance=0.9)(collect)


def test_every_task_has_one_group_of_whole_episodes(made: tuple[Collector, Experience]) -> None:
    collect, rows = made
    assert rows.by("group").first(rows["task"]).unique().numel() == 3
    episodes = rows.by("episode")
    assert len(episodes) == 18
    assert (episodes.first(rows["turn"]) == 0).all()
    assert (episodes.last(rows["end"]) != OPEN).all()
    assert collect.notes["branched"] > 0
    for episode in episodes.keys.tolist():
        turns = rows["turn"][rows["episode"] == episode]
        assert turns.unique().tolist() == list(range(int(turns.max()) + 1))


def test_shared_turns_are_copies_and_were_played_once(made: tuple[Collector, Experience]) -> None:
    collect, rows = made
    shared = 0
    for node in rows["node"].unique().tolist():
        mine = rows.take(rows["node"] == node)
        said = [mine["action"][mine["episode"] == e].tolist() for e in mine["episode"].unique().tolist()]
        shared += len(said) > 1
        assert all(each == said[0] for each in said)
    assert shared > 0
    calls = rows["signal:calls"]
    once = {int(n): float(calls[rows["node"] == n].max()) for n in rows["node"].unique().tolist()}
    assert collect.state["signal:calls"] == sum(once.values()) < float(calls.sum())


def test_tokens_are_scored_as_they_were_drawn(made: tuple[Collector, Experience]) -> None:
    collect, rows = made
    with torch.no_grad():
        now = collect.policy.score(rows)["logp"]
    assert torch.allclose(now, rows["logp"], atol=1e-5)


def test_entropy_is_of_the_first_tokens() -> None:
    world = Tools(easy=0.0)
    collect = Collector(world, open_policy("start", world, 0, "cpu"), 4)
    tree = collect.tree(collect.tasks(1))
    tree.looked_at = 1
    tree.extend([Branch(0, 2)])
    decisions = tree._tables[0][0]
    first = decisions.tensor("entropy")[decisions.tensor("context").diff(prepend=torch.tensor([-1])) != 0]
    assert [n.entropy for n in tree.nodes[1:]] == pytest.approx(first.tolist())


# ------------------------------------------------------------------ credit

# Episodes 1 and 2 share node 7; 1 earns 1, 2 and 3 nothing: A = ⅔, −⅓, −⅓ without a scale.
TREE: dict[str, Any] = {
    "group": [5] * 5,
    "episode": [1, 1, 2, 2, 3],
    "node": [7, 8, 7, 9, 10],
    "state": [0, 1, 0, 2, 3],
    "action": [0, 1, 0, 2, 3],
    "reward": [0.0, 1.0, 0.0, 0.0, 0.0],
}


def test_hard_advantages_are_means_over_the_episodes_through_a_decision() -> None:
    found = hard(inner=group(scale="none"))(hand(**TREE)).tolist()
    assert found == pytest.approx([1 / 6, 2 / 3, 1 / 6, -1 / 3, -1 / 3])


def test_hard_and_soft_have_one_gradient_at_ratio_one_and_not_beyond_bounds() -> None:
    rows = hand(**TREE, logp=[0.0] * 5)
    rows = rows.with_columns(logp=torch.zeros(5, dtype=torch.float64))

    def learned(credit: Any, surrogate: Any = None) -> torch.Tensor:
        slots = {} if surrogate is None else {"surrogate": surrogate}
        return gradient(on_policy(**slots), rows.with_columns(advantage=credit(rows).double()))

    assert_same(learned(hard()), learned(group()))
    assert hard_and_soft(5)["largest relative difference"] < 1e-6
    far = clip(
        low=0.2, high=0.2
    )  # ratios are far below 1: the bound holds back what has a negative advantage
    assert not torch.allclose(learned(hard(), far), learned(group(), far))


def test_a_malformed_episode_earns_less_than_nothing() -> None:
    rows = hand(episode=[1, 1, 2], **{"signal:success": [0.0, 1, 1], "signal:invalid": [1.0, 0, 0]})
    assert arpo_entropy().reward(rows).tolist() == [0, -1, 1]


def test_where_all_begin_at_the_start_nothing_else_has_an_effect() -> None:
    with pytest.raises(PanoplyError, match="none branches off"):
        pp.plan("arpo-entropy", "tools", settings={"sample.initial": 16, "sample.chance": 0.9})


# ------------------------------------------------------------------ budgets counted by a signal


def test_a_run_ends_when_a_signal_has_come_to_so_much(tmp_path: Path) -> None:
    settings = {
        "sample.prompts": 2,
        "sample.group": 4,
        "run.held_out": 4,
        "run.device": "cpu",
        "run.greedy": False,
    }
    trained = tiny.bare(
        tmp_path / "run", "grpo", world="tools", steps=9, settings={**settings, "run.signal": "calls=8"}
    )
    records = Run.open(trained.run).metrics()
    totals = [r["total_signal:calls"] for r in records]
    assert totals[-1] >= 8 > totals[-2]
    assert len(records) < 9


def test_a_budget_may_be_a_signal() -> None:
    budget = Budget.parse("signal:calls=20k")
    assert str(budget) == "20,000 signal:calls"
    made = Arm.parse("grpo").plan("tools", 0, budget)
    assert made.options.budget() == {"signal:calls": 20000}
    for word, said in (("signal:=5", "unit"), ("signal:calls=x", "number")):
        with pytest.raises(PanoplyError, match=said):
            Budget.parse(word)
    with pytest.raises(PanoplyError, match="whole number"):
        Options(signal="calls")
    with pytest.raises(PanoplyError, match="calls"):
        pp.plan("grpo", "tools", settings={"run.signal": "cals=5"})
    with pytest.raises(PanoplyError, match="not counted"):
        pp.plan("ppo", "cartpole", settings={"run.signal": "calls=5"})
