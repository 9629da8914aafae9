"""Games of several seats: coupled rows, pay that comes while one waits, and a policy that plays against itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from kit import dataset, learner, on_policy
from torch import Tensor
from toys import Pennies, Secrets, Take

from panoply import registry
from panoply.errors import PanoplyError
from panoply.experience import OPEN, OWN, TERMINATED, Experience, Segments
from panoply.loops.learner import Learner
from panoply.parts import part
from panoply.planning import make_plan
from panoply.policies.control import CentralNet, ControlPolicy, PolicySpec, ValueNet
from panoply.rollout.control import ControlCollector
from panoply.rollout.games import folded
from panoply.slots.credit.returns import to_go
from panoply.slots.loss.values import squared_value
from panoply.slots.model.values import central_critic
from panoply.slots.update.optimisers import sgd
from panoply.worlds.control.world import ControlWorld


def collector(world: ControlWorld, seed: int = 0) -> ControlCollector:
    spec = PolicySpec(hidden=())
    return ControlCollector(world, ControlPolicy.fresh(world.observation, world.action, spec, seed=1), seed)


def test_waiting_rows_are_folded_into_the_decision_before_them() -> None:
    """Two episodes: the first acts at 1 and 3 of five rows, the second never, a third at its first row only."""
    taken = {
        "episode": np.array([0, 0, 0, 0, 0, 1, 1, 2, 2]),
        "acting": np.array([0, 1, 0, 1, 0, 0, 0, 1, 0], dtype=bool),
        "reward": np.array([1.0, 2.0, 4.0, 8.0, 16.0, 3.0, 3.0, 5.0, 7.0]),
        "observation": np.arange(9),
        "after": np.arange(10, 19),
        "terminated": np.array([0, 0, 0, 0, 1, 0, 1, 0, 1], dtype=bool),
        "turn": np.array([0, 1, 2, 3, 4, 0, 1, 0, 1]),
    }
    found = {name: column.tolist() for name, column in folded(taken).items()}
    assert found["reward"] == [1 + 2 + 4, 8 + 16, 5 + 7]
    assert (found["episode"], found["turn"], found["observation"]) == ([0, 0, 2], [1, 3, 0], [1, 3, 7])
    assert (found["after"], found["terminated"]) == ([12, 14, 18], [False, True, True])


def test_a_seat_is_paid_after_the_others_move() -> None:
    """Zero-sum returns: what one seat wins the other loses, although the loser waits when it is paid."""
    collect = collector(Take())
    made = collect.episodes(collect.tasks(5), 3)
    episodes = made.by("episode")
    returns, games = episodes.sum(made["signal:reward"]), Segments(episodes.first(made["game"]))
    assert len(games) == 15
    assert games.count.tolist() == [2] * 15
    assert games.sum(returns).tolist() == [0.0] * 15
    assert returns.abs().tolist() == [1.0] * 30
    assert torch.equal(returns, episodes.last(made["earned"]))
    assert made["end"][episodes.is_last()].tolist() == [TERMINATED] * 30
    assert (made["end"][~episodes.is_last()] == OPEN).all()
    per_game = made.by("game")
    assert (per_game.max(made["step"]) + 1 == per_game.count).all(), "every step is one seat's decision"
    assert len(made.by("step")) == len(made)
    assert (Segments(made["group"]).count > 0).all()
    groups = Segments(episodes.first(made["group"]))
    assert groups.count.tolist() == [3] * 10, "a group for each start and seat"
    assert groups.constant(episodes.first(made["agent"])).all()


def test_what_comes_after_a_decision_is_the_seats_own_next_view() -> None:
    made = collector(Take(stones=6)).episodes(collector(Take()).tasks(2))
    seen, after = made.looked_up("observation"), made.looked_up("observation", by="next")
    for e in made.by("episode").keys.tolist():
        rows = (made["episode"] == e).nonzero().flatten()
        assert after[rows].tolist() == [*seen[rows[1:]].tolist(), 0]


def test_seats_that_move_at_once_and_leave_one_by_one() -> None:
    world = Pennies(rounds=(3, 1))
    collect = collector(world)
    made = collect.episodes(collect.tasks(200), 2)  # more than are played side by side
    assert made.by("episode").count.tolist() == [3, 1] * 400
    assert made.by("agent").count.tolist() == [1200, 400]
    steps = made.by("step")
    both = steps.count == 2
    assert int(both.sum()) == 400
    assert (steps.sum(made["signal:reward"])[both] == 0).all()


def test_games_left_open_go_on_after_a_resumption() -> None:
    world = Pennies(rounds=(5, 3))
    whole, stopped = collector(world), collector(world)
    first = whole.rollout(3, 4)
    assert first.by("agent").count.tolist() == [12, 9]
    stopped.rollout(3, 4)
    resumed = collector(world)
    resumed.state = stopped.state
    expected, found = whole.rollout(3, 4), resumed.rollout(3, 4)
    assert expected.by("agent").count.tolist() == [12, 9]
    for name in ("action", "episode", "turn", "earned", "end"):
        assert torch.equal(found[name], expected[name]), name


@part("credit", equation="A = G − mean of the seat's own")
def toy_by_agent(experience: Experience) -> Tensor:
    """What is earned from here on, against what decisions of the same seat earn."""
    returns, agents = to_go(experience, experience["reward"]), experience.by("agent")
    return returns - agents.rows(agents.mean(returns))


def test_a_policy_that_plays_itself_learns_to_win() -> None:
    """With two stones left both are taken; with four one, which leaves three, a lost place."""
    collect = collector(Take(stones=4))
    held: Learner = learner(collect.policy, on_policy())
    for step in range(60):
        made = collect.episodes(collect.tasks(16), 4)
        made = made.with_columns(reward=made["signal:reward"])
        assert torch.equal(made["reward"].sum(), torch.zeros(()))
        held.step(made.with_columns(advantage=toy_by_agent()(made)), step)
    greedy = collect.episodes(collect.tasks(1), temperature=0.0)
    by_step = greedy["step"].argsort()
    assert greedy["action"][by_step][0] == 0
    last = greedy.take(greedy["step"] == greedy["step"].max())
    assert float(last["signal:reward"]) == 1


def test_a_central_critic_knows_what_no_seat_does() -> None:
    """Who holds the higher card: all there is to say of it is in `joint`, and half of it in an observation."""
    collect = collector(Secrets())
    collect.needs = frozenset({"joint"})
    made = collect.episodes(collect.tasks(60))
    joint, seen = made.looked_up("joint"), made.looked_up("observation")
    assert torch.equal(joint[:, 0], seen)
    assert torch.equal(joint.reshape(-1, 2, 2)[:, 0], joint.reshape(-1, 2, 2)[:, 1].flip(1))
    assert torch.equal(made.looked_up("joint", by="next"), joint), "cards stay what they are"
    made = made.with_columns(target=made["signal:reward"])
    left = {}
    for name, critic in (("all", CentralNet.over(collect.policy, 2)), ("own", ValueNet.of(collect.policy))):
        held = learner(critic, dataset(squared_value(), update=sgd(lr=1.0, clip=0.0)))
        for step in range(300):
            held.step(made.with_columns(source=torch.full((len(made),), OWN)), step)
        found = critic.columns(made)["value"]
        assert isinstance(found, Tensor)
        left[name] = float((found.detach() - made["target"]).square().mean())
    assert left["all"] < 0.25 * left["own"]


@pytest.fixture
def _known() -> Iterator[None]:
    """The two games are registered while a test lasts."""
    registry.world("take@1")(Take)
    registry.world("pennies@1")(Pennies)
    yield
    for id in ("take@1", "pennies@1"):
        del registry.ENTRIES[id]


@pytest.mark.usefixtures("_known")
def test_a_run_in_a_game(tmp_path: Path) -> None:
    settings = {"run.held_out": 4, "sample.prompts": 2, "sample.group": 4}
    tiny.bare(tmp_path / "run", "grpo", world=Take(stones=3), steps=2, settings=settings)
    for row in tiny.metrics(tmp_path / "run"):
        assert (row["reward"], row["episodes"], row["groups_asked"]) == (0.0, 16, 2)
    for name, world, words in (
        ("ppo", "take", r"sample \(rollout\) needs a world with 'step', and take@1 has none"),
        ("dqn", "pennies", "a replay keeps one row an environment, and 2 play in one of pennies"),
    ):
        with pytest.raises(PanoplyError, match=words):
            make_plan(name, world)
    with pytest.raises(PanoplyError, match="needs a world with 'several seats', and cartpole@1 has none"):
        make_plan("ppo", "cartpole", slots={"models": [central_critic()]})
    held = {"models": [central_critic(update=None)], "settings": {"run.held_out": 4}}
    tiny.bare(tmp_path / "ppo", "ppo", world=Pennies(rounds=(3, 1)), steps=2, **held)
    assert "value" in tiny.metrics(tmp_path / "ppo")[-1]
    with pytest.raises(PanoplyError, match="Games of take are played to their end"):
        collector(Take()).rollout(2, 4)
