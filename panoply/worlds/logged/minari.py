"""Minari's data sets, read and written through its own library."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import numpy as np

from panoply.errors import PanoplyError, needs_extra, plain
from panoply.worlds.control.world import Array, Box, Discrete, Space
from panoply.worlds.logged.data import LoggedData


def read(id: str) -> LoggedData:
    """A data set that Minari has stored on this machine, such as `pendulum/mixed-v0`."""
    minari = _library()
    try:
        return _read(minari.load_dataset(id), id)
    except PanoplyError:
        raise
    except FileNotFoundError as problem:
        raise PanoplyError(
            f"Minari has no data set '{plain(id)}' on this machine: `minari download {plain(id)}`."
        ) from problem
    except Exception as problem:  # its library asserts, or fails in HDF5, on files that are something else
        said = (str(problem).splitlines() or [""])[0] or type(problem).__name__
        raise PanoplyError(
            f"Minari's data set '{plain(id)}' cannot be read: {plain(said).rstrip('.')}."
        ) from problem


def _read(stored: Any, id: str) -> LoggedData:
    kept: list[dict[str, Array]] = []
    for number, episode in enumerate(stored.iterate_episodes()):
        seen, steps = episode.observations, len(episode.rewards)
        if isinstance(seen, dict | tuple) or isinstance(episode.actions, dict | tuple):
            raise PanoplyError(f"'{id}' has observations or actions of several parts; one array is needed.")
        kept.append(
            {
                "observation": _numbers(seen[:steps]),
                "action": _numbers(episode.actions),
                "reward": np.asarray(episode.rewards, np.float32),
                "terminated": np.asarray(episode.terminations, bool),
                "truncated": np.asarray(episode.truncations, bool),
                "episode": np.full(steps, number),
                "turn": np.arange(steps),
                "final": _numbers(seen[steps : steps + 1]),
            }
        )
    if not kept:
        raise PanoplyError(f"Minari's data set '{id}' has no episodes.")
    columns = {name: np.concatenate([one[name] for one in kept]) for name in kept[0]}
    return LoggedData(columns, {"name": id})


def write(data: LoggedData, id: str, observation: Space, action: Space) -> None:
    """Store a data set where Minari looks for it, under an id such as `pendulum/mixed-v0`."""
    minari = _library()
    buffer = importlib.import_module("minari.data_collector").EpisodeBuffer
    ends = np.flatnonzero(data.last) + 1
    episodes = []
    for number, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        rows = {name: column[start:end] for name, column in data.columns.items() if name != "final"}
        seen = np.concatenate([rows["observation"], data.columns["final"][number : number + 1]])
        truncated = rows["truncated"].copy()
        truncated[-1] |= not rows["terminated"][-1]  # Minari has no open episodes
        episodes.append(
            buffer(
                id=number,
                observations=seen,
                actions=rows["action"],
                rewards=rows["reward"].tolist(),
                terminations=rows["terminated"].tolist(),
                truncations=truncated.tolist(),
            )
        )
    try:
        with warnings.catch_warnings():  # about authors and links that nobody asked for
            warnings.simplefilter("ignore", UserWarning)
            minari.create_dataset_from_buffers(
                dataset_id=id,
                buffer=episodes,
                observation_space=_space(observation),
                action_space=_space(action),
                algorithm_name=str(data.about.get("name", "panoply")),
                description=str(data.about.get("mix", "logged by Panoply")),
            )
    except ValueError as problem:
        raise PanoplyError(f"Minari does not store '{id}': {str(problem).rstrip('.')}.") from problem


def _library() -> Any:
    try:
        return importlib.import_module("minari")
    except ImportError as missing:
        raise needs_extra("Minari", "minari", "Its data format") from missing


def _numbers(values: Any) -> Array:
    array = np.asarray(values)
    return array.astype(np.int64 if np.issubdtype(array.dtype, np.integer) else np.float32)


def _space(space: Space) -> Any:
    spaces = importlib.import_module("gymnasium.spaces")
    if isinstance(space, Discrete):
        return spaces.Discrete(space.n)
    if not isinstance(space, Box):
        return spaces.MultiDiscrete(space.nvec)
    low, high = space.low or (-np.inf,) * space.size, space.high or (np.inf,) * space.size
    bounds = (np.asarray(side, np.float32).reshape(space.shape) for side in (low, high))
    return spaces.Box(*bounds, dtype=np.float32)
