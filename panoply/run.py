"""A run: a folder that holds everything about one training, can be resumed, and is written by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

from panoply import checkpoint
from panoply.checkpoint import Checkpoint, write_atomically
from panoply.errors import PanoplyError
from panoply.planning import Plan

CONFIG, RESULT, METRICS, EPISODES = "run.json", "result.json", "metrics.jsonl", "episodes.jsonl"
Status = Literal["finished", "running", "stopped", "diverged"]


class Run:
    """The folder of a run. `Run.create` makes one, `Run.open` finds one; only a locked run may be written."""

    def __init__(self, folder: Path, config: dict[str, Any]):
        self.folder = folder
        self.config = config
        self._lock: IO[str] | None = None
        self._streams: dict[str, IO[str]] = {}

    # -------------------------------------------------------------- making and finding

    @classmethod
    def create(cls, plan: Plan, folder: str | Path | None = None) -> Run:
        """A new folder with the resolved plan, versions and command; locked for this process."""
        path = Path(folder) if folder else _fresh_name(plan)
        if (path / CONFIG).exists():
            raise PanoplyError(
                f"{path} already holds a run: resume it with --resume {path}, or name another folder."
            )
        if path.exists() and any(path.iterdir() if path.is_dir() else [path]):
            raise PanoplyError(f"{path} is not empty and not a run: name another folder.")
        try:
            (path / "checkpoints").mkdir(parents=True)
        except OSError as error:
            raise PanoplyError(f"Cannot make the run folder {path}: {error.strerror}.") from error
        config = {
            "panoply": versions()["panoply"],
            "created": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "command": " ".join(["panoply", *sys.argv[1:]]) if sys.argv[0].endswith("panoply") else "python",
            "versions": versions(),
            "hash": plan.hash(),
            "plan": plan.to_json(),
        }
        run = cls(path, config)
        run.acquire()
        write_atomically(path / CONFIG, json.dumps(config, indent=1, ensure_ascii=False))
        return run

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        path = Path(folder)
        if not path.is_dir():
            raise PanoplyError(f"There is no run folder '{folder}'.")
        if not (path / CONFIG).is_file():
            raise PanoplyError(f"'{folder}' is not a run: it has no {CONFIG}.")
        try:
            return cls(path, json.loads((path / CONFIG).read_text()))
        except ValueError as error:
            raise PanoplyError(f"'{folder}' cannot be read: its {CONFIG} is not JSON.") from error

    def plan(self) -> Plan:
        return Plan.from_json(self.config["plan"])

    # -------------------------------------------------------------- one writer at a time

    def acquire(self) -> None:
        """Take the folder's lock, which the system releases when the process ends, however it ends."""
        self._lock = open(self.folder / "lock", "a")  # noqa: SIM115
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            self._lock = None
            raise PanoplyError(
                f"Another process is writing to {self.folder}: wait for it, or stop it first."
            ) from error

    def release(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams = {}
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def status(self) -> Status:
        result = self.result()
        if result is not None:
            return "diverged" if result.get("diverged") else "finished"
        if self._lock is not None:
            return "running"
        with open(self.folder / "lock", "a") as probe:
            try:
                fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return "running"
        return "stopped"

    # -------------------------------------------------------------- records

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Append one line of metrics, flushed: a kill loses nothing that was logged."""
        self._append(METRICS, [metrics])

    def log_episodes(self, episodes: Iterable[Mapping[str, Any]]) -> None:
        self._append(EPISODES, episodes)

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        if name not in self._streams:
            self._streams[name] = open(self.folder / name, "a")  # noqa: SIM115
        try:
            self._streams[name].writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            self._streams[name].flush()
        except OSError as error:
            raise PanoplyError(
                f"Cannot write {name}: {error.strerror}. Finished checkpoints are untouched."
            ) from error

    def metrics(self) -> list[dict[str, Any]]:
        return list(_json_lines(self.folder / METRICS))

    def episodes(self) -> list[dict[str, Any]]:
        return list(_json_lines(self.folder / EPISODES))

    def rewind(self, step: int) -> None:
        """Drop records of steps after `step`: they will be made again."""
        for name in (METRICS, EPISODES):
            if (self.folder / name).exists():
                kept = [r for r in _json_lines(self.folder / name) if r.get("step", 0) <= step]
                write_atomically(
                    self.folder / name, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept)
                )

    def finish(self, result: Mapping[str, Any]) -> None:
        write_atomically(self.folder / RESULT, json.dumps(result, indent=1, ensure_ascii=False))

    def result(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.folder / RESULT).read_text())
            return found
        return None

    # -------------------------------------------------------------- checkpoints

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def latest(self, warn: Any = lambda _: None) -> Checkpoint | None:
        return checkpoint.latest_usable(self.checkpoints, warn)

    def best(self) -> Checkpoint | None:
        """The checkpoint with the highest held-out success, where evaluation was on."""
        newest = self.latest()
        step = newest.state().get("best_step") if newest else None
        found = [c for c in checkpoint.listed(self.checkpoints) if c.step == step]
        return found[0] if found and found[0].problem() is None else newest


def model_folder(source: str | Path) -> Path:
    """The model folder meant by a run (its best checkpoint), a checkpoint, or a model folder itself."""
    path = Path(source)
    if (path / CONFIG).is_file():
        best = Run.open(path).best()
        if best is None:
            raise PanoplyError(f"The run {path} has no usable checkpoint yet.")
        return best.model
    if (path / checkpoint.MANIFEST).is_file():
        problem = Checkpoint(path).problem()
        if problem is not None:
            raise PanoplyError(f"The checkpoint {path} is not usable: {problem}.")
        return path / "model"
    return path


def list_runs(root: str | Path) -> list[Run]:
    """Every readable run below a folder, newest first."""
    base = Path(root)
    found = []
    for config in base.glob(f"*/{CONFIG}"):
        with contextlib.suppress(PanoplyError):
            found.append(Run.open(config.parent))
    return sorted(found, key=lambda r: (str(r.config.get("created")), r.folder.name), reverse=True)


def versions() -> dict[str, str]:
    import numpy
    import torch

    from panoply import __version__

    return {
        "panoply": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file; a last line torn by a kill is passed over."""
    if not path.exists():
        return
    with open(path) as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                return


def _fresh_name(plan: Plan) -> Path:
    words = [time.strftime("%Y-%m-%d"), plan.method_id, plan.world_id, f"s{plan.options.seed}"]
    stem = re.sub(r"@\d+", "", "-".join(words))
    candidates = (Path("runs") / (stem if n == 1 else f"{stem}-{n}") for n in range(1, 100_000))
    return next(c for c in candidates if not c.exists())
