"""Any Gymnasium environment as a world: `--world CartPole-v1`."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from panoply.errors import PanoplyError, needs_extra
from panoply.registry import Entry, world
from panoply.worlds.control.world import (
    Array,
    Box,
    ControlWorld,
    Discrete,
    Envs,
    MultiDiscrete,
    Space,
    Step,
)

SOLVED = {
    "CartPole-v1": 475.0,
    "Pendulum-v1": -200.0,
    "MountainCarContinuous-v0": 90.0,
    "Acrobot-v1": -100.0,
    "LunarLander-v3": 200.0,
}
"""Marks of our own or the field's where Gymnasium's registry names none, or one that says nothing."""


@world("gymnasium@1")
@dataclass(frozen=True)
class Gymnasium(ControlWorld):
    """Any environment registered with Gymnasium, by its id; each is also a world of that name.

    Environments are stepped one after another in this process, or by `workers` processes side by side, with the same
    numbers. One that raises, or gives numbers that are not finite, has its episode cut there (truncated), and so have
    those of a process that dies or hangs; what happened is counted and said once.
    """

    env: str = "CartPole-v1"
    time_limit: int | None = None
    """Steps after which an episode is cut; the environment's own limit where none is given."""
    options: str = ""
    """More arguments of the environment as YAML, such as `{gravity: 5.0}`."""
    workers: int = 0
    """Processes that step the environments, which pays where a step takes milliseconds; 0 means this process."""
    patience: float = 60.0
    """Seconds in which a worker process must have made its step."""

    bounds: ClassVar[Mapping[str, str]] = {
        "time_limit": "from 1 to 10000000",
        "workers": "from 0 to 1000",
        "patience": "above 0",
    }

    @property
    def name(self) -> str:
        return self.env

    @property
    def observation(self) -> Space:
        return _spaces(self)[0]

    @property
    def action(self) -> Space:
        return _spaces(self)[1]

    @property
    def horizon(self) -> int | None:  # type: ignore[override]
        return self.time_limit or spec_of(self.env).max_episode_steps

    @property
    def solved(self) -> float | None:  # type: ignore[override]
        threshold: float | None = SOLVED.get(self.env, spec_of(self.env).reward_threshold)
        return threshold

    def make(self, render: bool = False) -> Any:
        """One environment."""
        import gymnasium

        from panoply.values import yaml_value

        more = yaml_value(self.options) if self.options else {}
        if not isinstance(more, dict):
            raise PanoplyError(f"world.options are arguments such as {{gravity: 5.0}}, not '{self.options}'.")
        more |= {} if self.time_limit is None else {"max_episode_steps": self.time_limit}
        if render:
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pictures are wanted, and no window
            more |= {"render_mode": "rgb_array"}
        try:
            return gymnasium.make(self.env, disable_env_checker=True, **more)
        except gymnasium.error.DependencyNotInstalled as error:
            package = "MuJoCo" if "mujoco" in str(error).lower() else "another library"
            raise needs_extra(package, "mujoco", self.env) from error
        except ModuleNotFoundError as error:
            extra = "mujoco" if "mujoco" in str(spec_of(self.env).entry_point) else "video"
            raise needs_extra(str(error.name), extra, self.env) from error
        except (TypeError, ValueError, gymnasium.error.Error) as error:
            raise PanoplyError(f"Gymnasium cannot make {self.env}: {error}.") from error

    def shown(self) -> GymnasiumEnvs:
        return GymnasiumEnvs(self, [self.make(render=True)])

    def envs(self, size: int) -> Envs:
        if self.workers:
            from panoply.worlds.control.workers import WorkerEnvs

            return WorkerEnvs(self, size, self.workers, self.patience)
        return GymnasiumEnvs(self, [self.make() for _ in range(size)])


class GymnasiumEnvs(Envs):
    """A list of Gymnasium environments. An episode that has ended is not stepped until it is reset."""

    def __init__(self, world: Gymnasium, envs: list[Any]):
        self.world, self.inner, self.size = world, envs, len(envs)
        space = world.observation
        kind = np.int64 if isinstance(space, Discrete) else np.float32
        self.observations = np.zeros((self.size, *space.shape), dtype=kind)
        self._reward = np.zeros(self.size)
        self._terminated = np.zeros(self.size, dtype=bool)
        self._truncated = np.zeros(self.size, dtype=bool)
        self._ended = np.ones(self.size, dtype=bool)
        self._whole = isinstance(world.action, Discrete)
        self._offset = getattr(envs[0].action_space, "start", 0)
        self._failures: dict[str, int] = {}

    def reset(self, where: Array, seeds: Array) -> None:
        for row, seed in zip(where.tolist(), seeds.tolist(), strict=True):
            self.observations[row], info = self.inner[row].reset(seed=seed)
            self._ended[row] = False
            self._note_mask(row, info)

    def step(self, actions: Array) -> Step:
        chosen = (actions + self._offset).tolist() if self._whole else actions
        reward, terminated, truncated = self._reward, self._terminated, self._truncated
        ended = self._ended.tolist()
        for row, env in enumerate(self.inner):
            if ended[row]:
                continue
            try:
                seen, reward[row], terminated[row], truncated[row], info = env.step(chosen[row])
                self.observations[row] = seen
                if self.masks is not None:
                    self._note_mask(row, info)
            except Exception as error:
                self._fail(row, f"{type(error).__name__}: {error}")
        if not (np.isfinite(reward).all() and np.isfinite(self.observations).all()):
            self._cut()
        np.logical_or(terminated, truncated, out=self._ended)
        return Step(reward.copy(), terminated.copy(), truncated & ~terminated)

    def _note_mask(self, row: int, info: dict[str, Any]) -> None:
        """Which actions are legal, where an environment says so in its info (`action_mask`, as Taxi does)."""
        if "action_mask" not in info or not isinstance(self.world.action, Discrete):
            return
        if self.masks is None:
            self.masks = np.ones((self.size, self.world.action.n), dtype=bool)
        self.masks[row] = np.asarray(info["action_mask"], dtype=bool)

    def _cut(self) -> None:
        """Where numbers are not finite the episode ends as it was, with nothing earned in this step."""
        whole = np.isfinite(self.observations.reshape(self.size, -1)).all(1) & np.isfinite(self._reward)
        for row in (~whole).nonzero()[0].tolist():
            self._fail(row, "it gave a number that is not finite")

    def _fail(self, row: int, why: str) -> None:
        said = f"{self.world.env}: {why}"
        self._failures[said] = self._failures.get(said, 0) + 1
        self._reward[row], self._terminated[row], self._truncated[row] = 0.0, False, True
        np.nan_to_num(self.observations, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        self.inner[row] = self.world.make()

    def render(self, row: int) -> NDArray[np.uint8] | None:
        import gymnasium

        try:
            shown = self.inner[row].render()
        except gymnasium.error.DependencyNotInstalled as error:
            raise needs_extra("pygame", "video", f"Watching {self.world.env}") from error
        return np.asarray(shown, dtype=np.uint8) if shown is not None else None

    def failures(self) -> dict[str, int]:
        return dict(self._failures)

    def told(self) -> dict[str, int]:
        """What failed since the last time this was asked."""
        found, self._failures = self._failures, {}
        return found

    def close(self) -> None:
        for env in self.inner:
            env.close()


# ------------------------------------------------------------------ ids and spaces


def known_ids() -> list[str]:
    """Every id in Gymnasium's registry."""
    import gymnasium

    return sorted(gymnasium.registry)


def spec_of(id: str) -> Any:
    import gymnasium

    try:
        return gymnasium.spec(id)
    except gymnasium.error.Error as error:
        near = difflib.get_close_matches(id, known_ids(), n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else " gymnasium.registry lists those it knows."
        raise PanoplyError(f"Gymnasium has no environment '{id}'.{hint}") from error


def entry_for(id: str) -> Entry | None:
    """The world that a Gymnasium id stands for, if it is one."""
    try:
        spec = spec_of(id)
    except PanoplyError:
        return None
    return Entry(f"{spec.id}@1", "world", _of_id(spec.id))


@functools.cache
def _of_id(id: str) -> type[Gymnasium]:
    """The world with its id filled in: a class, since a world's fields are its options."""
    import dataclasses

    made = dataclasses.make_dataclass(
        "Gymnasium", [("env", str, dataclasses.field(default=id))], bases=(Gymnasium,), frozen=True
    )
    made.__doc__, made.__module__ = f"Gymnasium's {id}.", __name__
    return made


@functools.cache
def _spaces(world: Gymnasium) -> tuple[Space, Space]:
    env = world.make()
    try:
        return (
            _space(env.observation_space, world.env, "observations"),
            _space(env.action_space, world.env, "actions"),
        )
    finally:
        env.close()


def _space(given: Any, id: str, what: str) -> Space:
    """Gymnasium's space as one of ours."""
    from gymnasium import spaces

    if isinstance(given, spaces.Discrete):
        return Discrete(int(given.n))
    if isinstance(given, spaces.MultiDiscrete) and given.nvec.ndim == 1:
        return MultiDiscrete(tuple(int(n) for n in given.nvec))
    if isinstance(given, spaces.MultiBinary):
        return MultiDiscrete((2,) * int(np.prod(given.shape)))
    if isinstance(given, spaces.Box):
        low, high = ([float(x) for x in bound.flatten()] for bound in (given.low, given.high))
        return Box(given.shape, tuple(low), tuple(high))
    raise PanoplyError(
        f"The {what} of {id} are a {type(given).__name__}; there is room for Discrete, MultiDiscrete, MultiBinary "
        "and Box: wrap the environment."
    )
