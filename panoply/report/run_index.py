"""An index: the runs below one folder, for those who only look. Nothing is written, and torch is not needed.

Every file is opened step by step from the index's own folder, links not followed, so no name leads out of it, not even
one that changes while it is read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from panoply.errors import PanoplyError
from panoply.files import BadFile, Line, json_of, lines_of, parse_json

CONFIG, RESULT, METRICS, EPISODES, WORKERS, RECIPE = (
    "run.json",
    "result.json",
    "metrics.jsonl",
    "episodes.jsonl",
    "workers.jsonl",
    "recipe.json",
)
COMPARISON = "comparison.json"
"""What `panoply compare` leaves beside its pictures: no run, but no stranger either."""
FILES = frozenset({CONFIG, RESULT, METRICS, EPISODES, WORKERS, RECIPE, "lock"})
"""All that is ever opened of a run."""
DEPTH = 5
"""How deep below the index a run may lie."""
TAIL = 65536
LARGEST = 1e300
"""No number of a run is this large."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Facts = dict[str, Any]


class NoSuchRun(PanoplyError):
    """A name that is no run of this index."""


class RunIndex:
    def __init__(self, root: str | Path):
        path = Path(root)
        if not path.is_dir():
            hint = " yet: make a run with panoply train grpo" if str(root) == "runs" else ""
            raise PanoplyError(f"There is no folder '{root}'{hint}.")
        self.root = path.resolve()
        self._facts: dict[str, tuple[tuple[Any, ...], Facts]] = {}
        self._lock = threading.Lock()

    # -------------------------------------------------------------- finding

    def find(self, cached: bool = False) -> list[str]:
        """Names of all runs, also those that cannot be read; with `cached`, those below hidden folders too."""
        return [name for name in self._walk("") if cached or not _hidden(name)]

    def strangers(self) -> list[str]:
        """Folders directly on the index that hold no run."""
        taken = {name.split("/")[0] for name in self._walk("")}
        rest = [name for name in self._folders("") if name not in taken and not _hidden(name)]
        return [name for name in rest if not os.path.lexists(f"{self.root}/{name}/{COMPARISON}")]

    def _walk(self, name: str, depth: int = 0) -> Iterator[str]:
        for child in self._folders(name):
            path = f"{name}/{child}" if name else child
            if os.path.lexists(f"{self.root}/{path}/{CONFIG}"):
                yield path
            elif depth < DEPTH:
                yield from self._walk(path, depth + 1)

    def _folders(self, name: str) -> list[str]:
        try:
            with os.scandir(self.root / name) as entries:
                return sorted(
                    e.name for e in entries if e.is_dir(follow_symlinks=False) and _speakable(e.name)
                )
        except OSError:
            return []

    # -------------------------------------------------------------- reading

    def open(self, run: str, name: str) -> BufferedReader:
        """A file of a run. Raises `NoSuchRun` for a name that is none, FileNotFoundError where the file is absent."""
        steps = _steps(run)
        assert name in FILES
        at = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for step in steps:
                try:
                    below = os.open(step, _FOLDER, dir_fd=at)
                except OSError as error:
                    raise NoSuchRun(f"There is no run '{run[:200]}' here.") from error
                os.close(at)
                at = below
            try:
                file = os.open(name, _FILE, dir_fd=at)
            except FileNotFoundError:
                raise
            except OSError as error:
                raise NoSuchRun(f"{name} of '{run[:200]}' cannot be read: {error.strerror}.") from error
        finally:
            os.close(at)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise NoSuchRun(f"{name} of '{run[:200]}' is not a file.")
        return os.fdopen(file, "rb")

    def json(self, run: str, name: str) -> dict[str, Any] | None:
        """A JSON object, or nothing where there is none that can be read."""
        with contextlib.suppress(FileNotFoundError, PanoplyError), self.open(run, name) as file:
            return json_of(file, name, dict[str, Any], finite=False)
        return None

    def config(self, run: str) -> dict[str, Any]:
        """What `run.json` holds, or one sentence about why it cannot be read."""
        try:
            with self.open(run, CONFIG) as file:
                found = json_of(file, f"{CONFIG} of '{run}'", dict[str, Any], finite=False)
        except FileNotFoundError as error:
            raise NoSuchRun(f"'{run}' is not a run: it has no {CONFIG}.") from error
        if not isinstance(found.get("plan"), dict):
            raise PanoplyError(f"{CONFIG} of '{run}' holds no plan.")
        return found

    def lines(
        self, run: str, name: str, start: int = 0, bad: Callable[[BadFile], None] = lambda problem: None
    ) -> Iterator[Line[dict[str, Any]]]:
        """The whole lines of a file; `bad` is told of those that cannot be read. One torn by a kill is passed over."""
        with contextlib.suppress(FileNotFoundError), self.open(run, name) as file:
            where = f"{name} of '{run}'"
            yield from lines_of(file, where, dict[str, Any], start=start, finite=False, growing=True, bad=bad)

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """A row a step; before them, where the run is over, what was measured before the first."""
        rows = [line.value for line in self.lines(run, METRICS)]
        before = (self.json(run, RESULT) or {}).get("before")
        if rows and isinstance(before, dict):
            known = {k: v for k, v in before.items() if f"held_out_{k}" in rows[-1]}
            rows.insert(0, {"step": 0, "seconds": 0.0, **{f"held_out_{k}": v for k, v in known.items()}})
        return rows

    def size(self, run: str, name: str) -> int:
        with contextlib.suppress(FileNotFoundError), self.open(run, name) as file:
            return os.fstat(file.fileno()).st_size
        return 0

    def status(self, run: str, result: Mapping[str, Any] | None) -> str:
        """finished, diverged, running (somebody holds its lock) or stopped."""
        if result is not None:
            return "diverged" if result.get("diverged") else "finished"
        with contextlib.suppress(FileNotFoundError, NoSuchRun), self.open(run, "lock") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return "running"
        return "stopped"

    # -------------------------------------------------------------- facts

    def all_facts(self, cached: bool = False) -> list[Facts]:
        """Facts about every run, newest first; those that cannot be read are among them."""
        found = [self.facts(run) for run in self.find(cached)]
        return sorted(found, key=lambda f: (f.get("created", ""), f["id"]), reverse=True)

    def facts(self, run: str) -> Facts:
        """What a list shows of a run; where it cannot be read, the sentence that says why."""
        _steps(run)
        signature = self._signature(run)
        with self._lock:
            held = self._facts.get(run)
        if held is not None and held[0] == signature and held[1]["status"] != "running":
            return held[1]
        found = self._read_facts(run)
        with self._lock:
            self._facts[run] = (signature, found)
        return found

    def _signature(self, run: str) -> tuple[Any, ...]:
        found: list[Any] = []
        for name in (CONFIG, RESULT, METRICS):
            try:
                seen = os.lstat(f"{self.root}/{run}/{name}")
                found += [seen.st_mtime_ns, seen.st_size]
            except OSError:
                found.append(None)
        return tuple(found)

    def _read_facts(self, run: str) -> Facts:
        place, _, name = run.rpartition("/")
        facts: Facts = {"id": run, "name": name, "place": place, "status": "unreadable"}
        try:
            return {**facts, **self._known(run)}
        except PanoplyError as error:
            return {**facts, "problem": str(error)}
        except (TypeError, ValueError, AttributeError):
            why = f"{CONFIG} of '{run}' is of a shape that Panoply does not write."
            return {**facts, "problem": why}

    def _known(self, run: str) -> Facts:
        config = self.config(run)
        result = self.json(run, RESULT)
        plan = config["plan"]
        last, scores = self._tail(run)
        before, after = (score(result.get(k)) if result else None for k in ("before", "after"))
        return {
            "status": self.status(run, result),
            "method": _text(_word(plan, "method", "id")),
            "world": _text(_word(plan, "world", "id")),
            "seed": _number(_word(plan, "run", "seed")),
            "step": _number(last.get("step", (result or {}).get("steps"))) or 0,
            "of": _number(_word(plan, "run", "steps")),
            "seconds": _number(last.get("seconds")),
            "before": before,
            "after": after if after is not None else _held_out(scores),
            "measured": _text(config.get("measures"))
            or _text(_word(result or {}, "after", "of"))
            or "success",
            "best": _number(_word(result or {}, "best", "step")),
            "reward": _number(last.get("reward")),
            "created": _text(config.get("created")) or "",
            "version": _text(config.get("panoply")) or "unknown",
            "metrics": [k for k, v in last.items() if v is None or _number(v) is not None],
            "group": group_of(plan),
            "why": _text((result or {}).get("diverged")) or "",
        }

    def _tail(self, run: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The last line of metrics, with the names of the last evaluation, and that evaluation's numbers."""
        with contextlib.suppress(FileNotFoundError, NoSuchRun), self.open(run, METRICS) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            text = file.read()
            end = text.rfind(b"\n")
            last = _line_around(text, end - 1)
            evaluated = _line_around(text, text.rfind(b'"held_out_', 0, max(end, 0)))
            scores = {k: v for k, v in evaluated.items() if k.startswith("held_out_")}
            return {**scores, **last}, scores
        return {}, {}


def _line_around(text: bytes, at: int) -> dict[str, Any]:
    """The JSON object on the line that holds a place; an empty one where there is no such line."""
    if at >= 0:
        with contextlib.suppress(BadFile):
            line = text[text.rfind(b"\n", 0, at) + 1 : text.find(b"\n", at)]
            return parse_json(line, METRICS, dict[str, Any], finite=False)
    return {}


def group_of(plan: Mapping[str, Any]) -> str:
    """A hash of all that determines a run but its seed: runs with the same one are seeds of one experiment."""
    run = {
        k: v
        for k, v in dict(plan.get("run") or {}).items()
        if k not in ("seed", "threads", "sinks", "minutes")
    }
    same = {"method": plan.get("method"), "world": plan.get("world"), "run": run}
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:12]


def _steps(run: str) -> list[str]:
    """A run's name as folders below the index; one that could mean anything else is refused."""
    steps = run.split("/")
    if not all(map(_speakable, steps)) or len(steps) > DEPTH + 1:
        raise NoSuchRun(f"There is no run '{run[:200]}' here.")
    return steps


def _hidden(run: str) -> bool:
    return run.startswith(".") or "/." in run


def _speakable(step: str) -> bool:
    return step not in ("", ".", "..") and "/" not in step and "\\" not in step and step.isprintable()


def _word(plan: Mapping[str, Any], *path: str) -> Any:
    """A value of a plan, whose shape may be that of another version."""
    value: Any = plan
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> float | None:
    """A number that JSON can say and others can count with; nothing where it is anything else."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
    return value if known else None


def score(measured: Any) -> float | None:
    """The rate a run is judged by: the last one with an interval."""
    if not isinstance(measured, Mapping):
        return None
    found = [_number(v) for k, v in measured.items() if f"{k}_interval" in measured]
    return next((v for v in reversed(found) if v is not None), None)


def _held_out(row: Mapping[str, Any]) -> float | None:
    return next((v for v in reversed([*map(_number, row.values())]) if v is not None), None)
