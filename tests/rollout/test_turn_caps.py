"""Episodes that are cut off after some turns, by number or by schedule; and tasks that come again."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import TERMINATED, TRUNCATED
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.slots.schedule.schedules import staged
from panoply.worlds.text.keydoor import Keydoor
from panoply.worlds.text.tools import Tools
from panoply.worlds.world import TextWorld


def collector(world: TextWorld) -> Collector:
    return Collector(world, open_policy("start", world, 0, "cpu"), seed=1)


@pytest.mark.parametrize("world", [Keydoor(), Tools()], ids=["markov", "appended"])
def test_an_episode_is_cut_after_so_many_turns_and_marked_as_cut(world: TextWorld) -> None:
    """Up to there it is the episode that it would have been; one that is over by then has ended."""
    asked = {"tasks": [world.task("train", i) for i in range(6)], "group": 4}
    whole, cut = collector(world).episodes(**asked), collector(world).episodes(**asked, turns=2)
    assert int(whole["turn"].max()) > 1
    early = whole.take(whole["turn"] < 2)
    assert cut["action"].tolist() == early["action"].tolist()
    assert cut["logp"].tolist() == early["logp"].tolist()
    of, every = cut.by("episode"), whole.by("episode")
    longer = every.max(whole["turn"]) >= 2
    assert bool(longer.any())
    ends = of.last(cut["end"])
    assert set(ends[longer].tolist()) == {TRUNCATED}
    assert ends[~longer].tolist() == every.last(whole["end"])[~longer].tolist()
    if bool((~longer).any()):
        assert TERMINATED in ends[~longer].tolist()


def test_stages_follow_one_another_and_the_last_one_stays() -> None:
    caps = staged(values=(6, 13, 20), every=100)
    assert [caps.filled(step, 1000) for step in (0, 99, 100, 199, 200, 999)] == [6, 6, 13, 13, 20, 20]


def test_a_cap_follows_its_schedule(tmp_path: Path) -> None:
    few = {"sample.prompts": 2, "sample.group": 2, "run.held_out": 4}
    caps = {"sample.turns": "staged", "sample.turns.values": "1,3", "sample.turns.every": 2}
    run = tiny.bare(tmp_path / "run", "grpo", world="keydoor", settings=few | caps, steps=3).run
    rows = tiny.metrics(run)
    assert [m["episode_length"] for m in rows] == [1, 1, 3]
    assert [m["truncated"] for m in rows] == [1, 1, 1]


@pytest.mark.parametrize(
    ("world", "settings", "message"),
    [
        ("chain", {"sample.turns": 3}, "episodes of chain have one turn"),
        ("keydoor", {"sample.turns": 12}, "keydoor itself ends episodes after 12"),
        ("cartpole", {"sample.turns": 12}, "is cut by sample.max_tokens"),
        ("keydoor", {"sample.turns": 0}, "sample.turns must be at least 1"),
        ("chain", {"sample.pool": 3}, "a pool of 3 tasks is smaller than a batch of 16 prompts"),
    ],
)
def test_what_is_refused(world: str, settings: dict[str, int], message: str) -> None:
    with pytest.raises(PanoplyError, match=message):
        pp.plan("grpo", world, settings=settings)


def test_no_turn_at_all_is_refused() -> None:
    world = Keydoor()
    with pytest.raises(PanoplyError, match="at least one turn, not 0"):
        collector(world).episodes([world.task("train", 0)], turns=0)


def test_a_pool_comes_round_again_in_other_orders() -> None:
    collect = collector(Keydoor())
    epochs = [[task.id for _ in range(3) for task in collect.recurring(2, 6)] for _ in range(3)]
    assert len(set(epochs[0])) == 6
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1]
    again = collector(Keydoor())
    again.state["tasks"] = 6
    assert [task.id for task in again.recurring(6, 6)] == epochs[1], (
        "a resumed run goes on with the same ones"
    )


def test_a_pool_larger_than_the_world_is_refused() -> None:
    world = Keydoor(size=2, quest=(4, 4), cap=4)
    with pytest.raises(PanoplyError, match="too few problems for a pool of 500: .* Lower sample.pool"):
        collector(world).recurring(1, 500)
