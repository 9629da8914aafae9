"""The sides of `control.py`: each learns for so many steps and hands back what that took, and how to act."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATA = "logged:pendulum-mixed"
ZOO = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gae_lambda": 0.8, "gamma": 0.98}
Spent = dict[str, Any]
Act = Callable[[Any], Any]


class Clock:
    """Seconds by the clock, and of the processor."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self) -> Spent:
        return {"seconds": time.perf_counter() - self.wall, "cpu_seconds": time.process_time() - self.cpu}


def floor(env: str | None, steps: int) -> Spent:
    """Seconds that the environment takes for so many steps, and the rate of a large matrix product."""
    import torch

    torch.set_num_threads(1)
    a = torch.randn(1024, 1024)
    a @ a
    clock = Clock()
    for _ in range(20):
        a @ a
    rate, seconds = 20 * 2 * 1024**3 / clock.read()["seconds"], 0.0
    if env is not None:
        made = _environment(env)
        made.reset(seed=0)
        actions = [made.action_space.sample() for _ in range(64)]
        count = min(steps, 4_000)
        clock = Clock()
        for t in range(count):
            _, _, terminated, truncated, _ = made.step(actions[t % 64])
            if terminated or truncated:
                made.reset()
        seconds = clock.read()["seconds"] * steps / count
    return {"environment_seconds": seconds, "flops_per_second": rate}


def _environment(env: str) -> Any:
    import gymnasium

    return gymnasium.make(env, disable_env_checker=True)


# ------------------------------------------------------------------ the others


def sb3_ppo(
    env: str, steps: int, seed: int, envs: int = 1, schedule: bool = False, compiled: bool = False, **settings: Any
) -> tuple[Spent, Act]:  # fmt: skip
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    torch.set_num_threads(1)
    batch = DummyVecEnv([lambda: _environment(env)] * envs)
    if schedule:
        settings["learning_rate"] = lambda left: 1e-3 * left
    model = PPO("MlpPolicy", batch, seed=seed, device="cpu", **settings)
    more: Spent = {}
    if compiled:
        os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # as the first time
        policy: Any = model.policy
        policy.forward, policy.evaluate_actions = map(
            torch.compile, (policy.forward, policy.evaluate_actions)
        )
        clock = Clock()
        model.learn(2 * envs * model.n_steps)
        more["compile_seconds"] = clock.read()["seconds"]
    clock = Clock()
    model.learn(steps)
    return clock.read() | more, lambda seen: model.predict(seen, deterministic=True)[0]


def sb3_sac(env: str, steps: int, seed: int) -> tuple[Spent, Act]:
    import torch
    from stable_baselines3 import SAC

    torch.set_num_threads(1)
    model = SAC("MlpPolicy", _environment(env), seed=seed, device="cpu", learning_rate=1e-3)
    clock = Clock()
    model.learn(steps)
    return clock.read(), lambda seen: model.predict(seen, deterministic=True)[0]


def d3rlpy_iql(env: str, steps: int, seed: int) -> tuple[Spent, Act]:
    import d3rlpy
    import numpy as np
    import torch

    from panoply import registry

    torch.set_num_threads(1)
    d3rlpy.seed(seed)
    columns = registry.find("world", DATA).build().data.columns
    low_high = d3rlpy.preprocessing.MinMaxActionScaler(minimum=np.array([-2.0]), maximum=np.array([2.0]))
    data = d3rlpy.dataset.MDPDataset(
        observations=columns["observation"],
        actions=columns["action"],
        rewards=columns["reward"],
        terminals=columns["terminated"].astype(np.float32),
        timeouts=columns["truncated"].astype(np.float32),
    )
    model = d3rlpy.algos.IQLConfig(batch_size=256, action_scaler=low_high).create(device="cpu:0")
    model.build_with_dataset(data)
    clock = Clock()
    model.fit(
        data,
        n_steps=steps,
        n_steps_per_epoch=steps,
        show_progress=False,
        logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
    )
    return clock.read(), lambda seen: model.predict(np.asarray(seen)[None])[0]


# ------------------------------------------------------------------ Panoply


def panoply_ppo(
    env: str, steps: int, seed: int, preset: str | None = None, world: str = ""
) -> tuple[Spent, Act]:
    import panoply as pp

    made = pp.plan("ppo", world or env, preset=preset)
    sample = made.method.slots()["sample"].settings()  # type: ignore[union-attr]
    each = sample["envs"] * sample["length"]
    return _panoply("ppo", world or env, seed, preset, {"run.steps": -(-steps // each)})


def panoply_agent(method: str, world: str, of: str) -> Callable[[str, int, int], tuple[Spent, Act]]:
    def run(env: str, steps: int, seed: int) -> tuple[Spent, Act]:
        length = steps // max(1, steps // 500)
        return _panoply(method, world, seed, None, {"run.steps": -(-steps // length), of: length})

    return run


def _panoply(
    method: str, world: str, seed: int, preset: str | None, settings: dict[str, Any]
) -> tuple[Spent, Act]:
    import panoply as pp
    from panoply.progress import Progress
    from panoply.run import Run

    class Watch(Progress):
        """Reads the clock after every step; it starts when the beginning has been evaluated."""

        clock: Clock | None = None
        spent: Spent

        def evaluated(self, job: Any, found: Any) -> None:
            self.clock = self.clock or Clock()

        def step(self, job: Any, record: Any, experience: Any) -> None:
            assert self.clock is not None
            self.spent = self.clock.read()

    quiet = {"run.evaluate_every": 0, "run.held_out": 1, "run.episodes_every": 0}
    quiet["run.checkpoint_every"] = 10**9
    plan = pp.plan(method, world, seed=seed, threads=1, preset=preset, settings={**quiet, **settings})
    with tempfile.TemporaryDirectory() as folder:
        watch = Watch()
        done = pp.train(plan, run=Path(folder) / "run", progress=watch)
        policy = pp.load_policy(Path(folder) / "run" / "checkpoints" / f"step-{plan.options.steps:07d}")
        rows = Run.open(done.run).metrics()
    phases = {k: sum(r.get(k, 0.0) for r in rows) for k in rows[-1] if k.startswith("seconds_")}
    spent = {name: taken - phases.get("seconds_evaluate", 0.0) for name, taken in watch.spent.items()}
    return {**spent, "phases": phases}, greedy(policy)


def greedy(policy: Any) -> Act:
    """A policy's likeliest action for one observation."""
    import numpy as np

    forward = policy.model.numpy()

    def act(seen: Any) -> Any:
        out = forward(np.asarray(seen)[None], np.zeros(1, int))
        noise = np.zeros_like(policy.head.noise(np.random.default_rng(0), 1))
        return policy.head.act(out, noise, None, 0.0).acted[0]

    return act


OTHERS: dict[str, Callable[..., tuple[Spent, Act]]] = {
    "ppo-cartpole": lambda env, steps, seed, **more: sb3_ppo(env, steps, seed, 8, True, **ZOO, **more),
    "ppo-cartpole-defaults": sb3_ppo,
    "ppo-halfcheetah": sb3_ppo,
    "sac-pendulum": sb3_sac,
    "iql-pendulum": d3rlpy_iql,
}
PANOPLY: dict[str, Callable[..., tuple[Spent, Act]]] = {
    "ppo-cartpole": panoply_ppo,
    "ppo-cartpole-defaults": lambda env, steps, seed: panoply_ppo(env, steps, seed, "control"),
    "ppo-halfcheetah": lambda env, steps, seed: panoply_ppo(env, steps, seed, "control"),
    "sac-pendulum": panoply_agent("sac", "Pendulum-v1", "sample.length"),
    "iql-pendulum": panoply_agent("iql", DATA, "replay.updates"),
}
