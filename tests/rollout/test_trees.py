"""Trees of episodes: forks that leave each other alone, what an edge is worth, and where trees grow."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from panoply.errors import PanoplyError
from panoply.experience import OPEN, TERMINATED, Experience
from panoply.methods.base.grpo import grpo
from panoply.parts import Part, part
from panoply.planning import make_plan
from panoply.policies.build import open_policy
from panoply.policies.control import open_policy as open_control
from panoply.rollout.control import ControlCollector
from panoply.rollout.text import Collector
from panoply.rollout.tree import Branch, Node, Tree
from panoply.slots.grow.shapes import frontier, levels, surprised
from panoply.slots.sample.tree import tree
from panoply.worlds.control.pendulum import Pendulum
from panoply.worlds.text.keydoor import Keydoor
from panoply.worlds.text.tools import Tools
from panoply.worlds.world import TextWorld


@part("grow", equation="{first} episodes, and {more} ways on after a first call of the tool")
def toy_after_a_call(tree: Tree, *, first: int = 2, more: int = 3) -> list[Branch]:
    """Episodes go on in several ways after their first call, and in one way after everything else."""
    found = []
    for i in tree.open():
        node = tree.nodes[i]
        called = node.turn == 1 and (node.earned or {})["calls"] > 0
        found.append(Branch(i, first if node.depth == 0 else more if called else 1))
    return found


def test_a_grow_part_of_ones_own(tools: Collector) -> None:
    found = tree(prompts=3, grow=toy_after_a_call())(fresh(tools))
    called = found.by("episode").keys[found.by("episode").sum(found["signal:calls"]) > 0]
    first = [e for e in called.tolist() if int(found["segment"][found["episode"] == e][0]) == 0]
    assert first
    for e in found.by("episode").keys.tolist():
        below = found.take(found["parent"] == e)
        expected = 3 if e in first else 1
        assert not len(below) or len(below.by("episode")) == expected


@pytest.fixture(scope="module")
def keydoor() -> Collector:
    world = Keydoor()
    return Collector(world, open_policy("start", world, 0, "cpu"), seed=2)


@pytest.fixture(scope="module")
def tools() -> Collector:
    world = Tools(easy=0.0)
    return Collector(world, open_policy("start", world, 0, "cpu"), seed=2)


def fresh(collect: Collector) -> Collector:
    return Collector(collect.world, collect.policy, collect.seed)


class Grown(Tree):
    """A tree written out by hand."""

    def __init__(self, *edges: Node):
        super().__init__(None, [0], 1.0)
        self.nodes += edges
        for edge in edges:
            self.nodes[edge.parent].branches += 1

    def _together(self, branch: Branch) -> Any: ...

    def _continue(self, at: Any) -> None: ...

    def experience(self) -> Experience:
        raise NotImplementedError


def leaf(parent: int, success: float | None) -> Node:
    return Node(parent, 0, end=TERMINATED, earned=None if success is None else {"success": success})


def test_an_edge_is_worth_its_own_and_the_mean_below() -> None:
    """1 has one answer and 2 three: each child has one vote. Edge 2 has itself earned a tenth."""
    made = Grown(leaf(0, 1.0), Node(0, 0, earned={"success": 0.1}), leaf(2, 0.0), leaf(2, 0.0), leaf(2, 1.0))
    worth = [w and w["success"] for w in made.worth()]
    assert worth == pytest.approx([(1 + 0.1 + 1 / 3) / 2, 1.0, 0.1 + 1 / 3, 0.0, 0.0, 1.0])


def test_what_could_not_be_graded_or_has_no_end_has_no_vote() -> None:
    made = Grown(leaf(0, None), leaf(0, 1.0), Node(0, 0, earned={"success": 9.0}), Node(0, 0), leaf(4, None))
    assert made.worth() == [{"success": 1.0}, None, {"success": 1.0}, None, None, None]


def test_nothing_branches_from_an_end() -> None:
    with pytest.raises(PanoplyError, match="episode's end"):
        Grown(leaf(0, 1.0)).extend([Branch(1, 2)])


@pytest.mark.parametrize("world", [Keydoor(), Tools(easy=0.0)], ids=lambda w: w.name)
def test_a_fork_and_its_play_leave_each_other_alone(world: TextWorld) -> None:
    task = world.task("train", 0)
    play, whole = world.play(task), world.play(task)
    first = world.expert(play)
    play.act(first)
    whole.act(first)
    fork = play.fork()
    fork.act(world.expert(fork))
    assert play.state == whole.state != fork.state
    assert world.expert(play) == world.expert(whole)
    assert play.act(world.expert(play)) == whole.act(world.expert(whole))


def test_a_tree_of_turns_is_what_playing_gives(keydoor: Collector) -> None:
    """Every edge is played again from the start of its task: what it earned, where it stood, when it ended."""
    collect = fresh(keydoor)
    tasks = collect.tasks(2)
    made = collect.tree(tasks)
    while branches := levels(branching=(3, 2), segment=0)(made):
        made.extend(branches)
    found, worth = made.experience(), made.worth()
    edges = found.by("episode").keys.tolist()
    assert edges == list(range(len(made.nodes) - 2)), "all are there, in the order in which they grew"
    for i in edges:
        path = [i + 2]
        while made.nodes[path[0]].parent >= 2:
            path.insert(0, made.nodes[path[0]].parent)
        play = collect.world.play(tasks[made.nodes[i + 2].task])
        for edge in path:
            mine = found.take(found["episode"] == edge - 2)
            assert mine["state"].unique().tolist() == [play.state]
            reply = play.act(mine["action"].tolist())
        node, own = made.nodes[i + 2], worth[i + 2]
        assert own is not None
        assert node.earned == dict(reply.signals)
        assert node.ended == reply.done
        assert float(mine["signal:success"].sum()) == pytest.approx(own["success"])
        assert mine["segment"].unique().tolist() == [len(path) - 1] == mine["turn"].unique().tolist()
        assert mine["parent"].unique().tolist() == [path[-2] - 2 if len(path) > 1 else -1 - node.task]
    torch.testing.assert_close(collect.policy.score(found)["logp"], found["logp"], atol=1e-4, rtol=1e-4)
    assert collect.state["groups"] == len(found.by("group"))


def test_more_from_where_a_reply_surprised(tools: Collector) -> None:
    """With a bar that every turn passes the first two turns are followed, with one that none passes none is."""
    grown = {}
    for above in (-99.0, 99.0):
        collect = fresh(tools)
        made = collect.tree(collect.tasks(1))
        while branches := surprised(first=2, more=3, above=above, most=2)(made):
            made.extend(branches)
        grown[above] = sorted((node.branches for node in made.nodes if node.branches), reverse=True)
        assert all(node.ended for node in made.nodes if not node.branches)
    assert grown[-99.0][:4] == [4, 4, 2, 1]
    assert grown[99.0][:2] == [2, 1]


def test_the_frontier_branches_where_the_policy_is_least_sure(tiny_collector: Collector) -> None:
    made = tiny_collector.tree(tiny_collector.tasks(2))
    grow, seen = frontier(branches=3, segment=2, expansions=3), 0
    while branches := grow(made):
        for branch in branches:
            node = made.nodes[branch.node]
            if branch.times > 1 and node.depth:
                rivals = [made.nodes[i].entropy for i in made.open() if made.nodes[i].task == node.task]
                assert node.entropy == max(rivals)
                seen += 1
        made.extend(branches)
    assert seen == 4
    forks = [[n.branches for n in made.nodes if n.task == t and n.branches > 1] for t in (0, 1)]
    assert forks == [[3, 3, 3], [3, 3, 3]]
    assert made.open() == []


def test_a_method_on_trees_of_turns(tmp_path: Path) -> None:
    method = grpo().but(sample=tree(prompts=2, grow=levels(branching=(4, 2), segment=0)))
    settings = {"run.held_out": 4, "run.device": "cpu", "reward.name": "progress"}
    done = tiny.bare(tmp_path / "run", method, world="keydoor", settings=settings, steps=1)
    assert tiny.metrics(done.run)[0]["gradient_norm"] > 0


@pytest.mark.parametrize(
    "grow", [levels(branching=(3, 2), segment=5), frontier(branches=2, segment=4, expansions=3)]
)
def test_a_tree_in_control(grow: Part) -> None:
    """An edge goes on from the last observation of its parent, and its return is that of all below it on average."""
    world = dataclasses.replace(Pendulum(), horizon=12)
    collect = ControlCollector(world, open_control("fresh", world, 0, "cpu", {}), seed=0)
    found = tree(prompts=2, grow=grow)(collect)
    seen, episodes = found.looked_up("observation"), found.by("episode")
    after = found.looked_up("observation", by="next")
    total = dict(zip(episodes.keys.tolist(), episodes.sum(found["signal:reward"]).tolist(), strict=True))
    first = {e: (found["episode"] == e).nonzero()[0].item() for e in total}
    last = {e: (found["episode"] == e).nonzero()[-1].item() for e in total}
    below: dict[int, list[int]] = {}
    for e in total:
        below.setdefault(int(found["parent"][first[e]]), []).append(e)
    for parent, children in below.items():
        assert len({int(found["group"][first[c]]) for c in children}) == 1
        assert len({found["action"][first[c]].item() for c in children}) == len(children)
        if parent < 0:
            continue
        for child in children:
            assert torch.equal(seen[first[child]], after[last[parent]])
            assert found["turn"][first[child]] == found["turn"][last[parent]] + 1
        above = int(found["parent"][first[parent]])
        own = found["earned"][last[parent]] - (found["earned"][last[above]] if above >= 0 else 0.0)
        assert total[parent] == pytest.approx(
            float(own) + sum(total[c] for c in children) / len(children), rel=1e-4
        )
        assert found["end"][last[parent]] == OPEN
    assert collect.state["decisions"] == len(found)
    scored = collect.policy.score(found)["logp"]
    torch.testing.assert_close(scored, found["logp"], atol=1e-4, rtol=1e-4)


def test_trees_are_refused_where_nothing_can_be_forked() -> None:
    sample: Any = tree()
    with pytest.raises(PanoplyError, match=r"sample \(tree\) needs a world with 'fork', and .* has none"):
        make_plan("grpo", "CartPole-v1", slots={"sample": sample})
    with pytest.raises(PanoplyError, match="episodes have a single turn"):
        make_plan("grpo", slots={"sample": tree(grow=surprised())})
