"""The control collector: draws that belong to episodes, ends told apart, open episodes that survive a resumption."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from panoply.checkpoint import join_tensors, split_tensors
from panoply.experience import OPEN, TERMINATED, TRUNCATED, Experience
from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.rollout.control import ControlCollector
from panoply.seeds import numpy_rng
from panoply.worlds.control.cartpole import Cartpole
from panoply.worlds.control.gymnasium import Gymnasium
from panoply.worlds.control.world import Array, Box, ControlWorld, Discrete, Envs, Space, Step


@dataclass(frozen=True)
class Walk(ControlWorld):
    """x goes up by one whatever is done. At `goal` the episode terminates, after `limit` steps it is truncated."""

    goal: int = 100
    limit: int = 100

    @property
    def observation(self) -> Space:
        return Box((1,))

    @property
    def action(self) -> Space:
        return Discrete(2)

    def envs(self, size: int) -> Envs:
        return _Walk(self, size)


class _Walk(Envs):
    def __init__(self, world: Walk, size: int):
        self.world, self.size = world, size
        self.observations = np.zeros((size, 1), dtype=np.float32)
        self.elapsed = np.zeros(size, dtype=int)

    def reset(self, where: Array, seeds: Array) -> None:
        self.observations[where], self.elapsed[where] = 0, 0

    def step(self, actions: Array) -> Step:
        self.observations = self.observations + 1
        self.elapsed += 1
        over = self.observations[:, 0] >= self.world.goal
        late = self.elapsed >= self.world.limit
        return Step(self.observations[:, 0].astype(float), over, late & ~over, {"even": actions % 2 == 0})


def collector(world: ControlWorld, seed: int = 0) -> ControlCollector:
    return ControlCollector(world, ControlPolicy.fresh(world.observation, world.action, seed=1), seed)


def same(a: Experience, b: Experience) -> bool:
    names = set(a.decisions) | set(b.decisions)
    tables = torch.equal(a.context.tensor("observation"), b.context.tensor("observation"))
    return tables and all(torch.equal(a[n], b[n]) for n in names)


def test_final_observations_are_context_without_decisions() -> None:
    """Two episodes of three steps: each has its states 0, 1, 2 and, as what came next, the final 3."""
    for world, end in ((Walk(goal=3), TERMINATED), (Walk(limit=3), TRUNCATED)):
        collect = collector(world)
        found = collect.episodes(collect.tasks(2))
        assert found["end"].tolist() == [OPEN, OPEN, end] * 2
        assert found.looked_up("observation").flatten().tolist() == [0, 1, 2] * 2
        assert found.looked_up("observation", "next").flatten().tolist() == [1, 2, 3] * 2
        assert found.context.rows == 8
        assert found["turn"].tolist() == [0, 1, 2] * 2
        assert found["signal:reward"].tolist() == [1, 2, 3] * 2
        assert found["earned"].tolist() == [1, 3, 6] * 2
        assert found["signal:even"].tolist() == (found["action"] % 2 == 0).float().tolist()


def test_a_rollout_leaves_episodes_open_and_goes_on_with_them() -> None:
    collect = collector(Walk(goal=5))
    first, second = collect.rollout(2, 3), collect.rollout(2, 3)
    assert first["end"].tolist() == [OPEN] * 6
    assert first.looked_up("observation", "next").flatten().tolist() == [1, 2, 3] * 2
    assert second["episode"].tolist() == [0, 0, 1, 1, 2, 3]
    assert second["turn"].tolist() == [3, 4, 3, 4, 0, 0]
    assert second["end"].tolist() == [OPEN, TERMINATED] * 2 + [OPEN] * 2
    assert second["earned"].tolist() == [10, 15, 10, 15, 1, 1]
    assert second.looked_up("observation", "next").flatten().tolist() == [4, 5, 4, 5, 1, 1]


def test_max_tokens_truncates() -> None:
    collect = collector(Walk())
    found = collect.episodes(collect.tasks(2), max_tokens=2)
    assert found["end"].tolist() == [OPEN, TRUNCATED] * 2


def test_a_group_starts_alike_and_draws_apart() -> None:
    collect = collector(Gymnasium())
    found = collect.episodes(collect.tasks(3), 4)
    episodes = found.by("episode")
    starts = found.looked_up("observation")[episodes.first(torch.arange(len(found)))]
    assert episodes.first(found["group"]).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for group in range(3):
        assert (starts[4 * group : 4 * group + 4] == starts[4 * group]).all()
    assert len(set(starts[:, 0].tolist())) == 3
    assert len(set(episodes.count.tolist())) > 3


def test_draws_belong_to_episodes_and_not_to_rows() -> None:
    """Whole episodes in 6 environments, and the same ones two at a time."""
    whole = collector(Cartpole())
    together = whole.episodes(whole.tasks(6))
    apart = collector(Cartpole())
    pieces = [apart.episodes(apart.tasks(2)) for _ in range(3)]
    assert together["action"].tolist() == [a for p in pieces for a in p["action"].tolist()]
    torch.testing.assert_close(together["logp"], torch.cat([p["logp"] for p in pieces]), atol=1e-6, rtol=0)


def test_the_sampler_agrees_with_the_scorer() -> None:
    for world in (Gymnasium(), Gymnasium(env="Pendulum-v1"), Gymnasium(env="FrozenLake-v1")):
        collect = collector(world)
        found = collect.rollout(3, 20, temperature=0.7)
        scored = collect.policy.score(found, frozenset({"entropy"}))
        torch.testing.assert_close(scored["logp"], found["logp"], atol=1e-5, rtol=0)
        torch.testing.assert_close(scored["entropy"], found["entropy"], atol=1e-5, rtol=0)


def test_open_episodes_go_on_with_what_has_been_seen_since() -> None:
    world = Cartpole()
    policy = ControlPolicy.fresh(world.observation, world.action, PolicySpec(normalise=True), seed=1)
    collect = ControlCollector(world, policy, seed=0)
    for _ in range(3):
        found = collect.rollout(4, 8)
        torch.testing.assert_close(policy.score(found)["logp"], found["logp"], atol=1e-5, rtol=1e-5)
        policy.learn_statistics(found)


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """A state as a checkpoint stores it."""
    import json

    plain, tensors = split_tensors({"collector": state})
    return join_tensors(json.loads(json.dumps(plain)), tensors)["collector"]


def test_open_episodes_resume_bit_for_bit() -> None:
    for world in (Gymnasium(), Gymnasium(env="Pendulum-v1"), Cartpole()):
        whole, resumed = collector(world), collector(world)
        for _ in range(4):
            whole.rollout(3, 17)
        resumed.state = saved(copy.deepcopy(whole.state))
        for _ in range(3):
            assert same(whole.rollout(3, 17), resumed.rollout(3, 17))
        assert same(whole.rollout(3, 17), resumed.rollout(3, 17))


@dataclass(frozen=True)
class Uneven(ControlWorld):
    """Episodes of 40 to 199 steps, as their seed says: rows end at odd times, often where another's block turns."""

    @property
    def observation(self) -> Space:
        return Box((1,))

    @property
    def action(self) -> Space:
        return Discrete(2)

    def envs(self, size: int) -> Envs:
        return _Uneven(size)


class _Uneven(Envs):
    def __init__(self, size: int):
        self.size = size
        self.observations = np.zeros((size, 1), dtype=np.float32)
        self.left = np.zeros(size, dtype=int)

    def reset(self, where: Array, seeds: Array) -> None:
        self.left[where] = 40 + seeds % 160

    def step(self, actions: Array) -> Step:
        self.left -= 1
        return Step(np.ones(self.size), self.left == 0, np.zeros(self.size, dtype=bool), {})


class Listening(ControlCollector):
    """Writes down the noise that every decision was taken with, by episode and turn."""

    def __init__(self) -> None:
        world = Uneven()
        super().__init__(world, ControlPolicy.fresh(world.observation, world.action, seed=1), seed=3)
        self.heard: list[Array] = []
        self.found: dict[tuple[int, int], Array] = {}
        act = self.policy.head.act  # blind actions of choices come by here too

        def heard(out: Array, noise: Array, *more: Any) -> Any:
            self.heard.append(noise)
            return act(out, noise, *more)

        self.policy.head.act = heard  # type: ignore[method-assign]

    def _experience(self, buffer: Any, rows: Any, temperature: Any) -> Experience:
        live, episode, turn = (buffer.column(name) for name in ("live", "episode", "turn"))
        for step, row in zip(*live.nonzero(), strict=True):
            key = int(episode[step, row]), int(turn[step, row])
            assert key not in self.found
            self.found[key] = self.heard[step][row]
        self.heard = []
        return super()._experience(buffer, rows, temperature)

    def check(self, decisions: int) -> None:
        """Every decision had the noise that seed, split, episode and turn decide."""
        assert len(self.found) >= decisions
        blocks: dict[tuple[int, int], Any] = {}
        for (episode, turn), noise in self.found.items():
            block = episode, turn // 64
            if block not in blocks:
                rng = numpy_rng("draw", 3, "train", *block)
                blocks[block] = self.policy.head.noise(rng, 64)
            assert (noise == blocks[block][turn % 64]).all(), f"episode {episode}, turn {turn}"


def test_noise_belongs_to_seed_episode_and_turn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whole episodes, in open ones, while a replay is filled (at first blindly), and after a resumption."""
    monkeypatch.setattr("panoply.rollout.control.MOST", 24)
    groups = Listening()
    groups.episodes(groups.tasks(30), 4)
    groups.check(30 * 4 * 40)

    going_on = Listening()
    for _ in range(4):
        going_on.rollout(24, 200)
    going_on.check(4 * 24 * 200)

    resumed = Listening()
    resumed.state = saved(copy.deepcopy(going_on.state))
    for _ in range(2):
        resumed.rollout(24, 200)
    resumed.check(2 * 24 * 200)

    filling = Listening()
    acting = filling.steps(24, 400, random=24 * 100)
    assert [buffer.length for buffer in acting] == list(range(1, 401))
    assert "logp" not in acting.experience()
    filling.check(24 * 400)
