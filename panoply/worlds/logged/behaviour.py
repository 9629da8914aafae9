"""Who acted in logged data: a scripted expert who, with a stated probability, does anything at all instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from panoply.errors import PanoplyError
from panoply.seeds import stable_hash
from panoply.worlds.control.simulated import Draws, Simulated, Simulation
from panoply.worlds.control.world import Array, Box, Discrete
from panoply.worlds.logged.data import FINAL, LoggedData

Mix = Literal["random", "medium", "expert", "noisy", "mixed", "replay", "halves", "demonstrated"]
Expert = Callable[[Simulation], Array]
"""Actions for a batch of environments as it stands."""
Slip = float | Callable[[Array], Array]
"""How likely any action is taken instead of the expert's: always, or by what is seen."""
SIDE_BY_SIDE = 32
"""Episodes that run at a time, all to their ends, so that short ones are not too many."""


def scripted(envs: Simulation) -> Array:
    """The world's own expert."""
    return envs.dynamics.expert(envs.state)


def behave(world: Simulated, mix: Mix, size: int, seed: int, expert: Expert = scripted) -> LoggedData:
    """At least `size` steps, in whole episodes.

    - `random`: any action, uniformly. `expert`: the scripted one. `noisy`: it, but any action with probability 0.2.
    - `medium`: any action as often as makes the mean return half-way between random and expert.
    - `mixed`: four fifths of the steps random, the others expert.
    - `replay`: any action at first always, at the end never, in between ever less, as in a learner's buffer.
    - `halves`: expert (any action with probability 0.05) where the first number seen is below 0, random elsewhere.
    - `demonstrated`: one episode of the expert's, which the column `expert` marks, the others random.
    """
    if mix == "demonstrated":
        one = episodes(world, lambda done: 0.0, 1, seed, expert)
        rest = episodes(world, lambda done: 1.0, size, seed + 1, expert)
        return joined([_marked(one, True), _marked(rest, False)])
    if mix == "mixed":
        shares: list[tuple[Mix, int]] = [("random", size * 4 // 5), ("expert", size // 5)]
        return joined([behave(world, of, part, seed + i, expert) for i, (of, part) in enumerate(shares)])
    if mix == "halves":
        return episodes(world, lambda done: _by_half, size, seed, expert)
    if mix == "replay":
        return episodes(world, lambda done: 1 - min(done / size, 1.0), size, seed, expert)
    slip = {"random": 1.0, "expert": 0.0, "noisy": 0.2}.get(mix)
    constant = half_way(world, seed, expert) if slip is None else slip
    return episodes(world, lambda done: constant, size, seed, expert)


def _marked(data: LoggedData, expert: bool) -> LoggedData:
    return LoggedData({**data.columns, "expert": np.full(len(data), expert)})


def _by_half(seen: Array) -> Array:
    """Careful on one side of 0, careless on the other."""
    first: Array = seen.reshape(len(seen), -1)[:, 0]
    return np.where(first < 0, 0.05, 1.0)


def half_way(
    world: Simulated, seed: int, expert: Expert = scripted, rounds: int = 7, size: int = 64
) -> float:
    """The slip under which the mean return of `size` episodes is nearest the middle of random's and expert's."""
    low, high = 0.0, 1.0
    best, worst = (mean_return(world, slip, seed, expert, size) for slip in (low, high))
    for _ in range(rounds):
        middle = (low + high) / 2
        if mean_return(world, middle, seed, expert, size) > (best + worst) / 2:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def mean_return(world: Simulated, slip: float, seed: int, expert: Expert = scripted, size: int = 64) -> float:
    """Of `size` episodes under a slip."""
    return float(_wave(world.envs(size), slip, seed, 0, expert).returns.mean())


def episodes(
    world: Simulated, slip: Callable[[int], Slip], size: int, seed: int, expert: Expert = scripted
) -> LoggedData:
    """Whole episodes until there are `size` steps; `slip` says how careless after so many steps."""
    envs, found, steps = world.envs(SIDE_BY_SIDE), list[LoggedData](), 0
    while steps < size:
        found.append(_wave(envs, slip(steps), seed, len(found) * SIDE_BY_SIDE, expert))
        steps += len(found[-1])
    return _first(joined(found), size)


def _first(data: LoggedData, size: int) -> LoggedData:
    """The first episodes that have `size` steps between them."""
    ends = np.flatnonzero(data.last) + 1
    kept = int(np.searchsorted(ends, size)) + 1
    count = {name: kept if name in FINAL else ends[kept - 1] for name in data.columns}
    return LoggedData({name: column[: count[name]] for name, column in data.columns.items()})


def _wave(envs: Simulation, slip: Slip, seed: int, first: int, expert: Expert) -> LoggedData:
    """One episode in each row."""
    n = envs.size
    seeds = np.array([stable_hash("logged", seed, first + i) >> 1 for i in range(n)])
    envs.reset(np.arange(n), seeds)
    live, kept, t = np.ones(n, bool), [], 0
    finals: dict[str, Array] = {"final": np.zeros_like(envs.observations)}
    if envs.masks is not None:
        finals["final_legal"] = np.ones_like(envs.masks)
    while live.any():
        seen, legal = envs.observations.copy(), envs.masks
        careless = slip(seen) if callable(slip) else np.full(n, slip)
        action, logp = _act(envs, careless, Draws(seeds, t).of("behaviour"), expert)
        step = envs.step(action)
        row = {"observation": seen, "action": action, "reward": step.reward, "episode": np.arange(n)}
        row |= {"terminated": step.terminated, "truncated": step.truncated, "turn": np.full(n, t)}
        row |= {} if logp is None else {"logp": logp}
        row |= {} if legal is None else {"legal": legal}
        kept.append({name: column[live] for name, column in row.items()})
        ended = live & (step.terminated | step.truncated)
        for name, shown in zip(FINAL, (envs.observations, envs.masks), strict=True):
            if shown is not None:
                finals[name][ended] = shown[ended]
        live, t = live & ~ended, t + 1
        if envs.horizon is None and t > 100_000:
            raise PanoplyError("An episode without an end cannot be logged: give the world a horizon.")
    columns = {name: np.concatenate([row[name] for row in kept]) for name in kept[0]}
    order = np.argsort(columns["episode"], kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    columns["reward"] = columns["reward"].astype(np.float32)
    return LoggedData(columns | finals)


def _act(envs: Simulation, slip: Array, draws: Draws, expert: Expert) -> tuple[Array, Array | None]:
    """An action for each row, and its log-probability; of continuous ones the log-density, where there is one.

    An expert who sometimes does anything has none: all of his chance lies on one action.
    """
    takes = envs.dynamics.takes
    careless, blind = draws.chance(slip), bool((slip == 1.0).all())
    if isinstance(takes, Box):
        low, high = (np.asarray(side, np.float64).reshape(takes.shape) for side in (takes.low, takes.high))
        anything = draws.uniform(*takes.shape, low=low, high=high)
        if blind:
            return anything.astype(np.float32), np.full(envs.size, -np.log(high - low).sum())
        wanted = expert(envs)
        careless = careless.reshape(-1, *(1,) * len(takes.shape))
        return np.where(careless, anything, wanted).astype(np.float32), None
    if not isinstance(takes, Discrete):
        raise PanoplyError("Logged data is made of worlds with one action at a time, discrete or continuous.")
    if envs.masks is None:
        anything, choices = draws.below(takes.n), np.full(envs.size, takes.n)
    else:
        anything = np.where(envs.masks, draws.uniform(takes.n), -1).argmax(-1)
        choices = envs.masks.sum(-1)
    wanted = anything if blind else expert(envs)
    action = np.where(careless, anything, wanted)
    chance = slip / choices + (1 - slip) * (action == wanted)
    return action, np.log(chance)


def joined(several: list[LoggedData]) -> LoggedData:
    """Data sets one after the other, episodes numbered anew."""
    names = set.intersection(*(set(one.columns) for one in several))
    columns: dict[str, Array] = {n: np.concatenate([one.columns[n] for one in several]) for n in names}
    begins = columns["turn"] == 0
    return LoggedData(columns | {"episode": np.cumsum(begins) - 1})
