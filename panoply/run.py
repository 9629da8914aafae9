"""A run: a folder that holds everything about one training, can be resumed, and is written by one process at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import platform
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Literal, cast

from panoply import checkpoint, trust
from panoply.checkpoint import Checkpoint, DiskError, clear_errors, remove_unfinished, write_atomically
from panoply.errors import PanoplyError, plain
from panoply.files import BadFile, is_file, read_folder, read_json, read_lines
from panoply.given import FOLDER, adopt, relocated
from panoply.kinds import is_text
from panoply.planning import Plan
from panoply.records import Config, Episode, Metrics, PlanRecord, Result, Worker

CONFIG, RESULT, METRICS, EPISODES = "run.json", "result.json", "metrics.jsonl", "episodes.jsonl"
WORKERS = "workers.jsonl"
"""What the workers of a run that is spread did, a line a worker and step."""
RECIPE = "recipe.json"
"""What a recipe's folder has in place of `run.json`; its stages are runs below it."""
Status = Literal["finished", "running", "stopped", "diverged"]


class Run:
    """The folder of a run. `Run.create` makes one, `Run.open` finds one; only a locked run may be written."""

    def __init__(self, folder: Path, config: Config):
        self.folder = folder
        self.config = config
        self.made: Plan
        """Of a run that was just created: its plan, which names what was handed over where it lies now."""
        self.restarts = 0
        """How often learners elsewhere were started again, in this process."""
        self._lock: IO[str] | None = None
        self._streams: dict[str, IO[str]] = {}

    # -------------------------------------------------------------- making and finding

    @classmethod
    def create(cls, plan: Plan, folder: str | Path | None = None) -> Run:
        """A new folder with the resolved plan, versions and command; locked for this process."""
        path = (
            _make_folder(Path(folder))
            if folder
            else fresh_folder([plan.method_id, plan.world_id, f"s{plan.options.seed}"])
        )
        run = cls(path, cast(Config, {}))
        run.acquire()
        try:
            run._plan(plan)
            trust.remember(run.config["plan"])
            with clear_errors(f"make the run folder {path}"):
                run.checkpoints.mkdir(exist_ok=True)
            write_atomically(path / CONFIG, json.dumps(run.config, indent=1, ensure_ascii=False))
        except PanoplyError:
            run.release()
            raise
        return run

    def _plan(self, plan: Plan) -> None:
        """What the run's configuration will say; what was handed over in Python is brought here."""
        (options, plugins), hashes = adopt((dict(plan.world_options), plan.plugins), self.folder)
        self.made = plan = dataclasses.replace(plan, world_options=options, plugins=plugins)
        self.config = {
            "panoply": versions()["panoply"],
            "created": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "command": _command(),
            "versions": versions() | _sandbox(plan),
            "hash": plan.hash(),
            "measures": plan.measures(),
            "given": hashes,
            "plan": cast(PlanRecord, plan.to_json()),
        }

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        path = read_folder(folder, "run", CONFIG)
        try:
            return cls(path, read_json(path / CONFIG, Config))
        except BadFile as error:
            raise BadFile(f"'{plain(folder)}' cannot be read: {error}") from error

    def plan(self) -> Plan:
        plan = relocated(dict(self.config["plan"]), self.folder, self.config.get("given", {}))
        trust.check(self.folder / CONFIG, plan)
        try:
            return Plan.from_json(plan)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            made = self.config.get("panoply", "another version")
            raise PanoplyError(
                f"The plan in {self.folder / CONFIG} (made by panoply {made}) cannot be read: {error}."
            ) from error

    # -------------------------------------------------------------- one writer at a time

    def acquire(self) -> None:
        """Take the folder's lock, which the system releases when the process ends, however it ends."""
        with clear_errors(f"write to {self.folder}"):
            lock = open(self.folder / "lock", "a")  # noqa: SIM115
        for wait in (0.05, 0.1, 0.2, None):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if wait is not None:  # `status` of another process may be looking for a moment
                    time.sleep(wait)
                    continue
                lock.close()
                raise PanoplyError(
                    f"Another process is writing to {self.folder}: wait for it, or stop it first."
                ) from error
            self._lock = lock
            return

    def release(self) -> None:
        for stream in self._streams.values():
            with contextlib.suppress(OSError):  # what a full disk refused was reported when it was written
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
        try:
            probe = open(self.folder / "lock")  # noqa: SIM115
        except OSError:
            return "stopped"
        with probe:
            try:
                fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return "running"
        return "stopped"

    def discard(self) -> None:
        """Remove the folder of a run that failed before its first step was done: there is nothing to go on with."""
        self.release()
        if not any(c.step > 0 for c in checkpoint.listed(self.checkpoints)) and not self.metrics():
            shutil.rmtree(self.folder, ignore_errors=True)

    # -------------------------------------------------------------- records

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Append one line of metrics, flushed: a kill loses nothing that was logged."""
        self._append(METRICS, [metrics])

    def log_episodes(self, episodes: Iterable[Mapping[str, Any]]) -> None:
        self._append(EPISODES, episodes)

    def log_workers(self, lines: Iterable[Mapping[str, Any]]) -> None:
        self._append(WORKERS, lines)

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        with clear_errors(f"write {self.folder / name}"):
            if name not in self._streams:
                self._streams[name] = open(self.folder / name, "a", encoding="utf-8")  # noqa: SIM115
            self._streams[name].writelines(_line(row) for row in rows)
            self._streams[name].flush()

    def sync(self) -> None:
        """Bring the records to disk, so that a checkpoint never survives a power cut that its records do not."""
        with clear_errors(f"write to {self.folder}"):
            for stream in self._streams.values():
                os.fsync(stream.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        return _rows(self.folder / METRICS, Metrics)

    def episodes(self) -> list[dict[str, Any]]:
        return _rows(self.folder / EPISODES, Episode)

    def workers(self) -> list[dict[str, Any]]:
        return _rows(self.folder / WORKERS, Worker)

    def rewind(self, step: int, warn: Callable[[str], None] = lambda _: None) -> None:
        """Drop records of steps after `step`, the result among them: they will be made again.

        A line that cannot be read is named and left out; the good ones after it stay.
        """

        def leave_out(problem: BadFile) -> None:
            warn(f"{problem} It is left out.")

        for name, schema in ((METRICS, Metrics), (EPISODES, Episode), (WORKERS, Worker)):
            if (self.folder / name).exists():
                kept = [r for r in _rows(self.folder / name, schema, leave_out) if r["step"] <= step]
                write_atomically(self.folder / name, "".join(map(_line, kept)))
        (self.folder / RESULT).unlink(missing_ok=True)
        remove_unfinished(self.folder, CONFIG, RESULT, METRICS, EPISODES, WORKERS)

    def finish(self, result: Mapping[str, Any]) -> None:
        write_atomically(self.folder / RESULT, json.dumps(result, indent=1, ensure_ascii=False))

    def result(self) -> Result | None:
        """What the run ended with; None where it has not ended, or where that cannot be read: it is made again."""
        with contextlib.suppress(BadFile):
            return read_json(self.folder / RESULT, Result)
        return None

    # -------------------------------------------------------------- checkpoints

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def latest(self, warn: Any = lambda _: None) -> Checkpoint | None:
        return checkpoint.latest_usable(self.checkpoints, warn)


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def versions() -> dict[str, str]:
    import numpy
    import torch

    from panoply import __version__

    return {
        "panoply": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "numba": _installed("numba"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def _sandbox(plan: Plan) -> dict[str, str]:
    """What programs run in, where the world runs any."""
    world = plan.world()
    said = world.walls() if is_text(world) else ""
    return {"sandbox": said} if said else {}


def _rows(path: Path, schema: Any, bad: Callable[[BadFile], None] = lambda _: None) -> list[dict[str, Any]]:
    """The whole lines of a record; one torn by a kill is passed over, and one that cannot be read, of which `bad` is
    told.
    """
    if not is_file(path):
        return []
    return [x.value for x in read_lines(path, schema, finite=False, growing=True, bad=bad)]


def _line(row: Mapping[str, Any]) -> str:
    """One line of JSON; what is not a finite number is null, since JSON has no word for it."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, ensure_ascii=False) + "\n"


def _command() -> str:
    """What was typed, where that was the command line, and `python` where it was not."""
    program = Path(sys.argv[0] if sys.argv else "")
    typed = program.name == "panoply" or (program.name == "__main__.py" and program.parent.name == "panoply")
    return shlex.join(["panoply", *sys.argv[1:]]) if typed else "python"


def _make_folder(path: Path) -> Path:
    """An empty folder, a new one, or one whose maker was killed before it had written anything of use."""
    if (path / CONFIG).exists():
        raise PanoplyError(
            f"{path} already holds a run: resume it with --resume {path}, or name another folder."
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        names = {p.name for p in path.iterdir() if not p.name.startswith(f".{CONFIG}.")}
        if names - {"lock", "checkpoints", FOLDER} or any((path / "checkpoints").glob("*")):
            raise PanoplyError(f"{path} is not empty and not a run: name another folder.")
    except OSError as error:
        raise DiskError(f"Cannot make the run folder {path}: {error.strerror}.") from error
    return path


def fresh_folder(words: Iterable[str]) -> Path:
    """`runs/DATE-METHOD-WORLD-SEED`, with a number where that is taken, even in this very moment."""
    stem = re.sub(r"@\d+", "", "-".join([time.strftime("%Y-%m-%d"), *words])).replace("/", "-")
    for n in range(1, 100_000):
        path = Path("runs") / (stem if n == 1 else f"{stem}-{n}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise DiskError(f"Cannot make the run folder {path}: {error.strerror}.") from error
        return path
    raise PanoplyError(f"There are too many runs named {stem}: name another folder with --run.")
