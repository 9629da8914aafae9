"""Logged data of a real run: what it collected while it learned, and what its policy does in the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from panoply.errors import PanoplyError
from panoply.experience import TERMINATED, TRUNCATED
from panoply.policies.control import ControlPolicy
from panoply.run import Run
from panoply.seeds import numpy_rng
from panoply.which import model_folder
from panoply.worlds.control.simulated import Simulation
from panoply.worlds.control.world import Array
from panoply.worlds.logged.data import FINAL, LoggedData


class Learned:
    """A run's best policy as the expert: the action it takes when it takes no chances."""

    def __init__(self, folder: str):
        self.policy = ControlPolicy.load(model_folder(folder))
        self._forward = self.policy.model.numpy()

    def __call__(self, envs: Simulation) -> Array:
        out = self._forward(envs.observations, envs.clock)
        noise = np.zeros((envs.size, *self.policy.head.noise(numpy_rng("unused"), 1).shape[1:]), np.float32)
        return self.policy.head.act(out, noise, envs.masks, 0.0).acted


def collected(folder: str, size: int) -> LoggedData:
    """Whole episodes of a run's replay with `size` steps between them, drawn from all of its time.

    Episodes that the end of the run, or of the replay's room, has cut are left out, as a mean return must leave them.
    """
    of = Run.open(Path(folder))
    latest = of.latest()
    kept = {} if latest is None else latest.tensors()
    if "replay:end" not in kept:
        raise PanoplyError(f"{folder} has no replay: data comes from a run of an off-policy method.")
    policy = ControlPolicy.load(model_folder(folder))
    steps = len(kept["replay:end"])
    if int(kept["replay:written"]) > steps:
        raise PanoplyError(f"The replay of {folder} has been overwritten: give it room (replay.size).")
    columns = {name: kept[f"replay:{name}"].transpose(0, 1).flatten(0, 1) for name in _names(kept)}
    if columns["action"].is_floating_point():
        columns["action"] = policy.head.real(columns["action"])
    arrays: dict[str, Array] = {name: column.numpy() for name, column in columns.items()}
    arrays["reward"] = arrays["reward"] / of.plan().method.settings()["replay.scale"]
    end = arrays.pop("end")
    closing = end != 0
    closing[steps - 1 :: steps] = True
    number = np.cumsum(closing) - closing
    whole = np.flatnonzero(end[closing] != 0)
    order = numpy_rng("logged", "replay", size).permutation(whole)
    lengths = np.bincount(number)[order]
    chosen = np.sort(order[: int(np.searchsorted(np.cumsum(lengths), size)) + 1])
    rows = np.flatnonzero(np.isin(number, chosen))
    last = rows[closing[rows]]
    made = {name: arrays[name][rows] for name in arrays if not name.startswith("next_")}
    made |= {"terminated": end[rows] == TERMINATED, "truncated": end[rows] == TRUNCATED}
    made |= {"episode": np.searchsorted(chosen, number[rows])}
    begins = np.append(True, closing[rows][:-1])
    place = np.arange(len(rows))
    made["turn"] = place - np.maximum.accumulate(np.where(begins, place, 0))
    for final, seen in zip(FINAL, ("next_observation", "next_legal"), strict=True):
        if seen in arrays:
            made[final] = arrays[seen][last]
    return LoggedData(made)


def fingerprint(folder: str) -> str:
    """Of the policy and of how much was collected: what data of a run depends on."""
    latest = Run.open(Path(folder)).latest()
    return f"{ControlPolicy.load(model_folder(folder)).fingerprint()}-{latest.step if latest else 0}"


def _names(kept: Mapping[str, object]) -> list[str]:
    return [
        name.removeprefix("replay:")
        for name in kept
        if name.startswith("replay:") and name != "replay:written"
    ]
