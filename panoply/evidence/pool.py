"""Many runs at once, each in a process of its own: one that dies is named, and the others go on."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import panoply
from panoply.errors import PanoplyError, plain
from panoply.evidence import cache
from panoply.planning import Plan
from panoply.recipe_plans import RecipePlan
from panoply.stopping import Stopped

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

WORKER = "panoply.evidence.worker"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass
class Order:
    """A run to be made: under what name it is shown, its plan, and what to measure of its policy afterwards."""

    name: str
    plan: Plan | RecipePlan
    measures: tuple[str, ...] = ()
    folder: Path = field(default=Path(), init=False)
    cached: bool = field(default=False, init=False)
    done: float = field(default=0.0, init=False)
    score: float | None = field(default=None, init=False)
    problem: str | None = field(default=None, init=False)
    """Why it failed, in one sentence."""


class Watch:
    """Shows nothing; the base of the others."""

    def say(self, text: str) -> None: ...

    def show(self, orders: Sequence[Order], running: Sequence[Order]) -> None: ...

    def close(self) -> None: ...


class _Clock:
    """How long the rest will take, by how long what was done has taken."""

    def __init__(self) -> None:
        self._start: tuple[float, float] | None = None

    def left(self, orders: Sequence[Order]) -> str:
        now, done = time.monotonic(), sum(o.done for o in orders)
        self._start = self._start or (now, done)
        begun, before = self._start
        if done - before < 0.05:
            return ""
        seconds = (now - begun) * (len(orders) - done) / (done - before)
        return f"{seconds:.0f} s left" if seconds < 100 else f"{seconds / 60:.0f} min left"


class Lines(Watch):
    """A line about all runs every few seconds, for logs and pipes."""

    def __init__(self, every: float = 10.0):
        self.every, self._next, self._clock = every, 0.0, _Clock()

    def say(self, text: str) -> None:
        print(plain(text, lines=True), file=sys.stderr, flush=True)

    def show(self, orders: Sequence[Order], running: Sequence[Order]) -> None:
        if running and time.monotonic() >= self._next:
            self._next = time.monotonic() + self.every
            now = ", ".join(f"{o.name} {o.done:.0%}" for o in running)
            left = self._clock.left(orders)
            self.say(f"{ended(orders, running)}/{len(orders)} runs done{left and f', {left}'}; running {now}")


class Bars(Watch):
    """A bar for all runs and one for each that is running."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._next, self._clock = 0.0, _Clock()

    def say(self, text: str) -> None:
        text = plain(text, lines=True)
        if self._live is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._live.console.print(text, markup=False, highlight=False)

    def show(self, orders: Sequence[Order], running: Sequence[Order]) -> None:
        from rich.console import Console
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._live.start()
        if time.monotonic() >= self._next or not running:
            self._next = time.monotonic() + 0.1
            self._live.update(self._render(orders, running), refresh=True)

    def _render(self, orders: Sequence[Order], running: Sequence[Order]) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        grid = Table.grid(padding=(0, 2))
        counted = f"{ended(orders, running)}/{len(orders)}  {self._clock.left(orders)}"
        grid.add_row("all runs", ProgressBar(len(orders), sum(o.done for o in orders), width=40), counted)
        for order in running:
            score = "" if order.score is None else f"held out {order.score:.2f}"
            grid.add_row(order.name, ProgressBar(1.0, order.done, width=40), score)
        return grid

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def ended(orders: Sequence[Order], running: Sequence[Order]) -> int:
    return sum(o.done >= 1 or o.problem is not None for o in orders if not any(o is r for r in running))


def default_watch() -> Watch:
    return Bars() if sys.stderr.isatty() else Lines()


def cores() -> int:
    """How many processes may compute at once here."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Worker:
    """A process that takes one order after another."""

    def __init__(self, news: queue.Queue[tuple[_Worker, dict[str, Any] | None]]):
        self.news, self.order = news, None
        self.log: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=_environment(),
        )
        threading.Thread(target=self._listen, daemon=True).start()

    order: Order | None

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.news.put((self, json.loads(line)))
        self.news.put((self, None))

    def take(self, order: Order) -> None:
        assert self.process.stdin is not None
        self.order = order
        words = {"plan": order.plan.to_json(), "folder": str(order.folder), "measures": order.measures}
        with contextlib.suppress(BrokenPipeError):  # its death is news of its own
            self.process.stdin.write(json.dumps(words) + "\n")
            self.process.stdin.flush()

    def last_words(self) -> str:
        """How the process ended."""
        code = self.process.wait()
        self.log.seek(0)
        said = [line.strip() for line in self.log.read().splitlines() if line.strip()]
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return (
            f"its process was {how}" if code < 0 else f"its process {how}: {said[-1] if said else 'no word'}"
        )

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            self.process.kill()
        self.process.wait()
        self.log.close()


def run_all(
    orders: Sequence[Order],
    root: Path,
    workers: int | None = None,
    watch: Watch | None = None,
    cluster: str | None = None,
) -> None:
    """Make every run that is not in the cache yet, several at a time; failures are noted in the orders.

    Orders for the same plan are one run. `cluster` is where runs are made: here, or as `--cluster` of a run says.
    """
    watch = watch or default_watch()
    root.mkdir(parents=True, exist_ok=True)
    waiting = _look_up(orders, root, watch)
    same = {order.folder: [o for o in orders if o.folder == order.folder] for order in orders}
    if not waiting:
        return
    news: queue.Queue[tuple[Any, dict[str, Any] | None]] = queue.Queue()
    hired = _hired(cluster, workers, len(waiting))
    staff: list[Any] = []
    try:
        while waiting and len(staff) < hired.number:
            staff.append(hired.worker(news))
            staff[-1].take(waiting.pop(0))
        while any(w.order is not None for w in staff):
            running = [w.order for w in staff if w.order is not None]
            watch.show(orders, running)
            try:
                worker, told = news.get(timeout=0.5)
            except queue.Empty:
                continue
            if worker.order is None:
                continue
            if told is not None and "ended" not in told:
                worker.order.done, worker.order.score = told["done"], told["score"]
                continue
            _close(same[worker.order.folder], told, worker, watch)
            worker.order = None
            if waiting and told is None:
                worker.stop()
                staff[staff.index(worker)] = worker = hired.worker(news)
            if waiting:
                worker.take(waiting.pop(0))
        watch.show(orders, [])
    except KeyboardInterrupt as stop:
        raise Stopped.to_go_on("the same command goes on from here", stop) from None
    finally:
        watch.close()
        for worker in staff:
            worker.stop()
        hired.close()


class _Here:
    """So many processes of this machine."""

    def __init__(self, number: int):
        self.number = number

    def worker(self, news: queue.Queue[tuple[Any, dict[str, Any] | None]]) -> _Worker:
        return _Worker(news)

    def close(self) -> None: ...


def _hired(cluster: str | None, workers: int | None, most: int) -> Any:
    """Who makes runs: processes here, or workers of a cluster (`scale/staff.py`)."""
    if cluster is None:
        return _Here(max(1, min(workers or cores(), most)))
    from panoply.scale.staff import staff

    return staff(cluster, workers, most)


def _look_up(orders: Sequence[Order], root: Path, watch: Watch) -> list[Order]:
    """Where each run lies; of those that are not finished the first order for each."""
    waiting: dict[Path, Order] = {}
    for order in orders:
        order.folder = cache.place(order.plan, root)
        if order.folder in waiting:
            continue
        problem = cache.tidy(order.folder)
        if problem:
            watch.say(problem)
        order.cached = cache.finished(order.folder) is not None
        order.done = float(order.cached)
        if not order.cached or order.measures:
            waiting[order.folder] = order
    return list(waiting.values())


def _close(orders: Sequence[Order], told: dict[str, Any] | None, worker: Any, watch: Watch) -> None:
    """Note how a run ended, in every order for it."""
    problem = worker.last_words() if told is None else told.get("why")
    for order in orders:
        order.problem, order.done = problem, 1.0
    if problem:
        watch.say(f"{orders[0].name} failed: {problem.rstrip('.')}.")


def called(
    function: Callable[[int], Mapping[str, float]], seeds: Sequence[int], workers: int | None = None
) -> Iterator[Mapping[str, float]]:
    """What a function measures with each seed; several at a time where a process of its own can import it."""
    size = min(workers or cores(), len(seeds))
    known = getattr(sys.modules.get(function.__module__), function.__qualname__, None) is function
    if size < 2 or not known or not function.__module__.startswith("panoply."):
        yield from map(function, seeds)
        return
    with ThreadPoolExecutor(size) as several:
        yield from several.map(functools.partial(_measured, function), seeds)


def _measured(function: Callable[[int], Mapping[str, float]], seed: int) -> Mapping[str, float]:
    words = [function.__module__, function.__qualname__, str(seed)]
    done = subprocess.run(
        [sys.executable, "-m", WORKER, *words], capture_output=True, text=True, env=_environment()
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise PanoplyError(f"Seed {seed} was not measured: {said[-1] if said else 'its process ended'}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _environment() -> dict[str, str]:
    """Of a process that computes on one thread with this very package."""
    path = os.pathsep.join([str(Path(panoply.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **dict.fromkeys(THREADS, "1"), "PYTHONPATH": path}


def failures(orders: Sequence[Order]) -> list[str]:
    return [order.name for order in orders if order.problem is not None]


def check_any(orders: Sequence[Order], what: str) -> None:
    """Refuse to go on where nothing has finished."""
    if orders and all(order.problem is not None for order in orders):
        raise PanoplyError(f"Not one run of {what} has finished: {str(orders[0].problem).rstrip('.')}.")
