"""Any simulated world as a data set: `--world logged:pendulum-mixed`."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

from panoply import registry
from panoply.errors import PanoplyError, unknown
from panoply.kinds import is_control
from panoply.registry import Entry, world
from panoply.seeds import stable_hash
from panoply.values import yaml_value
from panoply.worlds.control.simulated import Simulated
from panoply.worlds.control.world import ControlWorld, Envs, Space
from panoply.worlds.logged import behaviour, minari, online, statistics
from panoply.worlds.logged.behaviour import Mix
from panoply.worlds.logged.data import LoggedData

FORMAT = 1
"""A change of how data is made changes it, so that nothing old is found in the cache."""


@world("logged@1", paper=135)
@dataclass(frozen=True)
class Logged(ControlWorld):
    """A data set of stated quality from another world; each is also a world `logged:WORLD-MIX`.

    `mix` is random, medium, expert, noisy (ε = 0.2), mixed (four fifths random, the rest expert) or replay (careless at
    first, then ever less). It is made once by the world's scripted expert, and kept with its statistics: returns, TQ
    and SACo. Policies learn from `data` and are evaluated in the world itself. With `run` the expert is the policy of
    an off-policy run, and `replay` is what it collected while it learned. With `file` the data comes from a folder that
    Panoply wrote, with `minari` from Minari's store.
    """

    of: str = "pendulum"
    """The world."""
    mix: Mix = "mixed"
    size: int = 20_000
    """Steps, at least."""
    seed: int = 0
    options: str = ""
    """Settings of the world as YAML, such as `{variant: umaze}`."""
    run: str | None = None
    """The folder of an off-policy run in this world."""
    file: str | None = None
    minari: str | None = None

    bounds: ClassVar[Mapping[str, str]] = {
        "size": "from 1 to 100000000",
        "seed": "any whole number",
    }

    @property
    def name(self) -> str:
        return f"logged:{self.of}-{self.mix}"

    @functools.cached_property
    def world(self) -> ControlWorld:
        """The world the data is from."""
        more = yaml_value(self.options) if self.options else {}
        if not isinstance(more, dict):
            raise PanoplyError(
                f"logged.options are settings such as {{variant: umaze}}, not '{self.options}'."
            )
        build: Any = registry.find("world", self.of).build
        known = [option.name for option in dataclasses.fields(build)]
        for option in more:
            if option not in known:
                raise unknown(f"setting of {self.of}", option, known)
        made = build(**{k: tuple(v) if isinstance(v, list) else v for k, v in more.items()})
        if not is_control(made) or hasattr(made, "data"):
            raise PanoplyError(f"'{self.of}' is not a world of control, so there is nothing to log.")
        return made

    @property
    def access(self) -> frozenset[str]:  # type: ignore[override]
        shown = "expert" in self.data.columns if self.file is not None else self.mix == "demonstrated"
        return self.world.access | {"data"} | ({"demonstrations"} if shown else set())

    @property
    def horizon(self) -> int | None:  # type: ignore[override]
        return self.world.horizon

    @property
    def solved(self) -> float | None:  # type: ignore[override]
        return self.world.solved

    @property
    def observation(self) -> Space:
        return self.world.observation

    @property
    def action(self) -> Space:
        return self.world.action

    def envs(self, size: int) -> Envs:
        return self.world.envs(size)

    def signals(self) -> frozenset[str] | None:
        return self.world.signals()

    @functools.cached_property
    def data(self) -> LoggedData:
        """Read from where it is kept; made and kept where it is not there yet."""
        if self.file is not None:
            return self._fits(LoggedData.load(Path(self.file)))
        if self.minari is not None:
            return self._fits(minari.read(self.minari))
        folder = self.folder
        if not folder.is_dir():
            self.make().save(folder, replace=False)
        return LoggedData.load(folder)

    @property
    def folder(self) -> Path:
        """Where the data is kept: `$PANOPLY_CACHE`, or `~/.cache/panoply`."""
        root = Path(os.environ.get("PANOPLY_CACHE") or Path.home() / ".cache" / "panoply")
        made = (FORMAT, self.of, self.mix, self.size, self.seed, self.world)
        key = stable_hash(*made, *((online.fingerprint(self.run),) if self.run else ()))
        return root / "logged" / f"{self.of}-{self.mix}-{key:016x}"

    def make(self) -> LoggedData:
        """The data, made anew."""
        if not isinstance(self.world, Simulated):
            raise PanoplyError(
                f"'{self.of}' has no scripted expert to make data with; give logged.file or logged.minari."
            )
        expert = online.Learned(self.run) if self.run else behaviour.scripted
        worst, best = (behaviour.mean_return(self.world, slip, self.seed, expert) for slip in (1.0, 0.0))
        if self.run:
            reference = online.collected(self.run, self.size)
        else:
            reference = behaviour.behave(self.world, "replay", self.size, self.seed)
        data = reference
        if self.mix != "replay":
            data = behaviour.behave(self.world, self.mix, self.size, self.seed, expert)
        found = statistics.describe(data, worst, best, reference)
        settings = {"name": self.name, "mix": self.mix, "seed": self.seed, "world": repr(self.world)}
        return dataclasses.replace(data, about=settings | found)

    def _fits(self, data: LoggedData) -> LoggedData:
        for name, space in (("observation", self.observation), ("action", self.action)):
            shape = data.columns[name].shape[1:]
            if shape != space.shape:
                raise PanoplyError(
                    f"The {name}s of this data have shape {shape}, those of {self.of} {space.shape}."
                )
        return data


def entry_for(name: str) -> Entry | None:
    """The world that `logged:WORLD-MIX` stands for; None for other names."""
    if not name.startswith("logged:"):
        return None
    of, _, mix = name.removeprefix("logged:").rpartition("-")
    if not of or mix not in get_args(Mix):
        raise unknown("mix of logged data", mix or name, get_args(Mix))
    registry.find("world", of)
    return Entry(f"{name}@1", "world", _named(of, mix), paper=135)


@functools.cache
def _named(of: str, mix: str) -> type[Logged]:
    fields = [("of", str, dataclasses.field(default=of)), ("mix", Mix, dataclasses.field(default=mix))]
    made = dataclasses.make_dataclass("Logged", fields, bases=(Logged,), frozen=True)
    made.__doc__, made.__module__ = f"Data of {of}: {mix}.", __name__
    return made
