"""From logged data to own experience: what is drawn from where, how updates are spread, what is refused."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import panoply as pp
from panoply.planning import Plan
from panoply.policies.heads import head_for
from panoply.progress import Progress
from panoply.replay import Mixture, Replay
from panoply.run import Run
from panoply.transitions import Transitions, joined
from panoply.worlds.control.world import Box

SEES, ACTS = Box((1,)), Box((1,), (-2.0,), (2.0,))
DATA = "logged:pendulum-mixed"


def replay(rows: int, seen: float, room: int = 100) -> Replay:
    made = Replay(SEES, ACTS, head_for(ACTS), size=room, gamma=0.9)
    made._flat["observation"][:rows] = seen
    made.written = rows
    return made


def counts(mixture: Mixture, count: int) -> tuple[int, int]:
    """How many rows of a batch are logged (seen 1) and own (seen 2)."""
    seen = mixture.draw(count, torch.Generator().manual_seed(0)).observation
    return int((seen == 1).sum()), int((seen == 2).sum())


def test_a_stated_share() -> None:
    logged, own = replay(50, 1.0), replay(2, 2.0)
    assert counts(Mixture(logged, own, 0.25), 64) == (16, 48)
    assert counts(Mixture(logged, own, 1.0), 64) == (64, 0)
    assert counts(Mixture(logged, own, 0.0), 64) == (0, 64)
    assert counts(Mixture(logged, replay(0, 2.0), 0.25), 64) == (64, 0)  # nothing of its own yet


def test_every_row_alike() -> None:
    """30 logged rows and 10 own ones: three quarters, 3000 ± 27 of 4000."""
    given, own = counts(Mixture(replay(30, 1.0), replay(10, 2.0)), 4000)
    assert given + own == 4000
    assert 2890 < given < 3110


def test_what_is_written_is_ones_own() -> None:
    logged, own = replay(3, 1.0), replay(5, 2.0)
    both = Mixture(logged, own)
    assert len(both) == 8
    assert both.written == 5
    assert both.state()["replay:written"] == 5
    assert len(both.state()["replay:reward"]) == 5


def test_windows_of_several_steps_stay_where_they_are() -> None:
    """Three-step returns of either side are those it has alone, in whatever order rows are drawn."""
    sides = []
    for seen in (1.0, 2.0):
        made = Replay(SEES, ACTS, head_for(ACTS), size=10, steps=3, gamma=0.5)
        made._flat["observation"][:6], made._flat["reward"][:6] = seen, seen
        made._flat["end"][5], made.written = 1, 6
        sides.append(made)
    drawn = Mixture(sides[0], sides[1], 0.5).draw(200, torch.Generator().manual_seed(0))
    for seen in (1.0, 2.0):
        mine = drawn.reward[drawn.observation[:, 0] == seen]
        assert set((mine / seen).tolist()) == {1.75, 1.5, 1.0}


def test_masks_of_one_side() -> None:
    """Where the data does not say what could be done and the world does, all could."""
    column = torch.zeros(1)
    plain = Transitions(column[None], column, column, column, column[None])
    masked = dataclasses.replace(plain, legal=torch.tensor([[True, False]]))
    assert joined(plain, masked).legal.tolist() == [[True, True], [True, False]]  # type: ignore[union-attr]
    assert joined(plain, plain).legal is None
    assert joined(masked, masked).next_legal is None


def method(name: str, world: str = DATA, **choices: Any) -> Any:
    return pp.plan(name, world, **choices).method


def test_updates_are_spread_evenly() -> None:
    """Three updates over two steps, 1 and then 2; 500 over 300, and never more than 2 at once."""
    made = method("iql", sample="explore", settings={"replay.updates": 3, "sample.length": 2})
    assert [made.rhythm(20).due(n) for n in range(1, 7)] == [1, 2, 1, 2, 1, 2]
    made = method("iql", sample="explore", settings={"replay.updates": 500, "sample.length": 300})
    due = [made.rhythm(20).due(n) for n in range(1, 301)]
    assert (sum(due), min(due), max(due)) == (500, 1, 2)
    assert made.rhythm(20).a_step == 500


def test_off_policy_updates_need_no_warmup_with_data() -> None:
    plain, given = method("sac", "pendulum"), method("sac", data="logged")
    assert [plain.rhythm(20).due(n) for n in (1, 100, 101)] == [0, 0, 1]
    wide = method("sac", "pendulum", settings={"sample.envs": 8, "replay.warmup": 96})
    assert [wide.rhythm(20).due(n) for n in (12, 13)] == [0, 1]  # more than 96 steps of all of them together
    assert given.rhythm(20).due(1) == 1
    seldom = method("sac", data="logged", settings={"sample.length": 100, "replay.every": 4})
    assert seldom.rhythm(20).a_step == 25
    assert [seldom.rhythm(20).due(n) for n in range(1, 9)] == [0, 0, 0, 1, 0, 0, 0, 1]


def test_how_long_the_data_is_alone() -> None:
    assert method("sac", "pendulum").rhythm(20).alone == 0
    assert method("sac", data="logged").rhythm(20).alone == 0
    assert method("iql", sample="explore").rhythm(20).alone == 10
    assert method("iql", sample="explore", settings={"data.alone": 3}).rhythm(20).alone == 3


TINY = {"policy.hidden": "8", "replay.batch": 8, "replay.updates": 6, "world.size": 400}
RUN = {"steps": 3, "threads": 1, "checkpoint_every": 1, "keep": 9, "evaluate_every": 0}


def mixed(name: str) -> Plan:
    settings = {**TINY, "run.held_out": 2, "sample.length": 20, "data.alone": 1, "replay.logged": 0.5}
    slot = {"data": "logged"} if name == "sac" else {"sample": "explore"}
    return pp.plan(name, DATA, settings=settings, **RUN, **slot)


@pytest.mark.parametrize("name", ["iql", "cql", "td3+bc", "a2pr", "sac"])
def test_a_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step on the data alone, then two that act; stopped after the second it goes on bit for bit."""
    monkeypatch.setenv("PANOPLY_CACHE", str(tmp_path / "cache"))
    plan = mixed(name)
    assert Plan.from_json(plan.to_json()) == plan
    done = pp.train(plan, run=tmp_path / "whole", progress=Progress())
    records = Run.open(done.run).metrics()
    assert [r["total_decisions"] for r in records] == [0, 20, 40]
    each = 20 * 6 if name == "sac" else 6
    assert [r["updates"] for r in records] == [each, 2 * each, 3 * each]
    stopped = tmp_path / "stopped"
    shutil.copytree(done.run, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step-0000003")
    (stopped / "result.json").unlink()
    assert pp.train(resume=stopped, progress=Progress()).fingerprint == done.fingerprint


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"method": "sac", "world": "pendulum", "data": "logged"}, "--world logged:pendulum-mixed"),
        ({"method": "awr", "world": DATA, "sample": "explore"}, "whole logged episodes"),
        ({"method": "iql", "world": DATA, "sample": "groups"}, "sample=explore"),
        ({"method": "iql", "world": DATA, "settings": {"replay.logged": 0.5}}, "from one place"),
        ({"method": "iql", "world": DATA, "settings": {"data.alone": 3}}, "never acts"),
        ({"method": "iql", "world": DATA, "settings": {"sample.length": 3}}, "The slot 'sample' is empty"),
        ({"method": "sac", "world": DATA, "data": "logged", "settings": {"replay.warmup": 3}}, "at once"),
        ({"method": "sac", "world": DATA, "data": "iql", "settings": {"replay.logged": 1.5}}, "from 0 to 1"),
        ({"method": "ppo", "world": "pendulum", "data": "logged"}, "slot of the on_policy regime 'data'"),
        ({"method": "iql", "world": DATA, "sample": "cql"}, "nothing in its slot 'sample'"),
    ],
)
def test_refused(choices: dict[str, Any], says: str) -> None:
    with pytest.raises(pp.PanoplyError, match=says):
        pp.plan(**choices)


def test_an_emptied_slot() -> None:
    made = method("sac", data="logged")
    assert "from the world's logged data and then" in made.equation()[-1]
    assert pp.plan("sac", DATA, data="logged", settings={"data": "none"}).method == method("sac")


def test_rewards_are_scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both halves of a mixture alike."""
    from panoply.kinds import kind_of
    from panoply.loops.actor_critic import ActorCriticLearner

    monkeypatch.setenv("PANOPLY_CACHE", str(tmp_path))
    plan = pp.plan("iql", DATA, sample="explore", settings={**TINY, "replay.scale": 10.0})
    world: Any = plan.world()
    policy: Any = kind_of(world).open_policy("start", world, plan.options, plan.policy_options)
    learner = ActorCriticLearner(policy, plan.method, seed=0, total_steps=1)  # type: ignore[arg-type]
    logged = world.data.experience()
    learner.remember(logged)
    assert isinstance(learner.replay.held, Mixture)
    torch.testing.assert_close(
        learner.replay.held.logged.rows(torch.arange(5)).reward, 10 * logged["signal:reward"][:5]
    )
    assert learner.replay.held.own.scale == 10.0
