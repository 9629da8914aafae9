"""The same numbers as Stable-Baselines3 on the same rollout: advantages, the loss, and one update of every weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import panoply as pp
from panoply.experience import OPEN, TERMINATED, TRUNCATED, Experience, Table
from panoply.loops.job import Job
from panoply.progress import Progress
from panoply.run import Run
from panoply.slots.credit.gae import gae

buffers = pytest.importorskip("stable_baselines3.common.buffers")


def rollout(rng: np.random.Generator, steps: int, envs: int) -> dict[str, Any]:
    """Rewards, values and ends at random; some episodes terminate, some are truncated, most go on."""
    ends = rng.choice([OPEN, TERMINATED, TRUNCATED], size=(steps, envs), p=[0.8, 0.1, 0.1])
    return {
        "reward": rng.normal(size=(steps, envs)).astype(np.float32),
        "value": rng.normal(size=(steps, envs)).astype(np.float32),
        "next_value": rng.normal(size=(steps, envs)).astype(np.float32),
        "end": ends,
    }


def test_advantages() -> None:
    """SB3 adds γ·V(final) to the reward of a truncated episode and then treats it as terminated."""
    import gymnasium

    steps, envs, gamma, lam = 40, 3, 0.97, 0.9
    made = rollout(np.random.default_rng(0), steps, envs)
    space = gymnasium.spaces.Box(-1, 1, (1,))
    buffer = buffers.RolloutBuffer(
        steps, space, gymnasium.spaces.Discrete(2), gae_lambda=lam, gamma=gamma, n_envs=envs
    )
    starts = np.ones(envs)
    for t in range(steps):
        reward = made["reward"][t] + gamma * made["next_value"][t] * (made["end"][t] == TRUNCATED)
        value = torch.from_numpy(made["value"][t])
        buffer.add(np.zeros((envs, 1)), np.zeros((envs, 1)), reward, starts, value, torch.zeros(envs))
        starts = (made["end"][t] != OPEN).astype(float)
    last = torch.from_numpy(made["next_value"][-1])
    buffer.compute_returns_and_advantage(last, starts)

    ended = made["end"] != OPEN
    episode = np.vstack([np.zeros((1, envs)), np.cumsum(ended, 0)[:-1]]) + 100 * np.arange(envs)
    columns = {name: torch.from_numpy(column.reshape(-1)) for name, column in made.items()}
    columns |= {
        "episode": torch.from_numpy(episode.reshape(-1)).long(),
        "context": torch.zeros(steps * envs).long(),
    }
    columns["action"] = torch.zeros(steps * envs)
    table = Experience(Table(columns), Table({"observation": torch.zeros(1, 1)}))
    found = gae(gamma=gamma, lam=lam, normalise=False)(table)
    advantage = found["advantage"].reshape(steps, envs).numpy()
    assert np.abs(advantage - buffer.advantages).max() < 1e-5
    assert np.abs(found["target"].reshape(steps, envs).numpy() - buffer.returns).max() < 1e-5


def test_one_update_moves_every_weight_alike(tmp_path: Path) -> None:
    """The same weights, the same 64 decisions, one update: clipping, critic, Adam and gradient norm included."""
    import gymnasium
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import configure

    choices = {"sample.envs": 1, "sample.length": 64, "update.epochs": 1, "update.schedule": "constant"}
    plan = pp.plan("ppo", "CartPole-v1", settings={**choices, "run.held_out": 1}, threads=1)
    job = Job(plan, Run.create(plan, tmp_path / "run"), Progress())
    model = PPO("MlpPolicy", gymnasium.make("CartPole-v1"), n_steps=64, batch_size=64, n_epochs=1, gamma=0.98,
                gae_lambda=0.8, learning_rate=1e-3, device="cpu")  # fmt: skip
    model.set_logger(configure(None, []))
    theirs = dict(model.policy.named_parameters())
    names = {}
    for i, (net, head) in enumerate((("policy_net", "action_net"), ("value_net", "value_net"))):
        own = ("layers.layers", "critic.layers.layers")[i]
        layers = [f"mlp_extractor.{net}.0", f"mlp_extractor.{net}.2", head]
        names |= {
            f"{own}.{k}.{p}": f"{layer}.{p}" for k, layer in enumerate(layers) for p in ("weight", "bias")
        }
    seat = job.seat
    mine = seat.learner.masters.named()
    assert set(names) == set(mine)
    with torch.no_grad():
        for own, other in names.items():
            theirs[other].copy_(mine[own])

    found = seat.models.annotate(seat.parts["sample"](seat.collect))
    found = found.with_columns(reward=seat.parts["reward"](found))
    found = found.with_columns(**seat.parts["credit"](found))
    buffer = model.rollout_buffer
    buffer.reset()
    buffer.observations[:, 0] = found.looked_up("observation").numpy()
    buffer.actions[:, 0, 0] = found["action"].numpy()
    buffer.log_probs[:, 0], buffer.values[:, 0] = found["logp"].numpy(), found["value"].numpy()
    buffer.returns[:, 0] = found["target"].numpy()
    buffer.advantages[:, 0] = (found["target"] - found["value"]).numpy()
    buffer.full, buffer.pos = True, 64
    model._update_current_progress_remaining(0, 1)
    model.train()
    seat.learner.step(found, 0)
    for own, other in names.items():
        torch.testing.assert_close(mine[own].detach(), theirs[other].detach(), atol=2e-6, rtol=1e-4)
    job.close()
