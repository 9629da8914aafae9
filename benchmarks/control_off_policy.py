"""The cells of off-policy and offline learning: SAC against Stable-Baselines3, IQL against d3rlpy.

They are a part of `control.py`, which runs them. Both sides of SAC step one Gymnasium environment and update after
every step with batches of 256 on two hidden layers of 256; both sides of IQL make as many updates on the same data.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATA = "logged:pendulum-mixed"


def sb3_sac(env: str, steps: int, seed: int) -> tuple[float, Callable[[Any], Any]]:
    import gymnasium
    import torch
    from stable_baselines3 import SAC

    torch.set_num_threads(1)
    model = SAC("MlpPolicy", gymnasium.make(env), seed=seed, device="cpu", learning_rate=1e-3)
    start = time.perf_counter()
    model.learn(steps)
    return time.perf_counter() - start, lambda seen: model.predict(seen, deterministic=True)[0]


def d3rlpy_iql(steps: int, seed: int) -> tuple[float, Callable[[Any], Any]]:
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
    start = time.perf_counter()
    model.fit(
        data,
        n_steps=steps,
        n_steps_per_epoch=steps,
        show_progress=False,
        logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
    )
    return time.perf_counter() - start, lambda seen: model.predict(np.asarray(seen)[None])[0]


def panoply_side(
    method: str, world: str, steps: int, seed: int, **settings: Any
) -> tuple[float, Any, dict[str, float]]:
    """Seconds of learning, the policy, and where the time went; `settings` beside those that keep it quiet."""
    import panoply as pp
    from panoply.progress import Progress
    from panoply.run import Run

    length = steps // max(1, steps // 500)
    quiet = {"run.evaluate_every": 0, "run.held_out": 1, "run.episodes_every": 0}
    quiet |= {"run.checkpoint_every": 10**9, "run.steps": -(-steps // length)}
    of = "sample.length" if method == "sac" else "replay.updates"
    plan = pp.plan(method, world, seed=seed, threads=1, settings={**quiet, of: length, **settings})
    with tempfile.TemporaryDirectory() as folder:
        done = pp.train(plan, run=Path(folder) / "run", progress=Progress())
        policy = pp.load_policy(Path(folder) / "run" / "checkpoints" / f"step-{plan.options.steps:07d}")
        rows = Run.open(done.run).metrics()
    phases = {k: sum(r.get(k, 0.0) for r in rows) for k in rows[-1] if k.startswith("seconds_")}
    return done.seconds, policy, phases
