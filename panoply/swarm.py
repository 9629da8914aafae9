"""A swarm: nodes as processes, each an ordinary run, that share rollouts through one folder (panoply/rollouts.py).

    FOLDER/swarm.json    what all nodes were asked for
    FOLDER/nodes/NAME    the run folder of a node: it resumes, evaluates and exports like any other
    FOLDER/rollouts …    what they share

The command that starts them only watches. A node that dies is started again and goes on from its last checkpoint; the
others do not notice. Nodes may join at any time, also from another shell or machine that sees the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypedDict

import panoply
from panoply import training
from panoply.checkpoint import clear_errors, write_atomically
from panoply.choices import plan
from panoply.errors import PanoplyError, plain
from panoply.files import BadFile, is_file, open_file, parse_json, read_json
from panoply.planning import Plan
from panoply.report.layout import table
from panoply.report.shown import Shown
from panoply.rollouts import NODE
from panoply.run import Run
from panoply.stopping import PATIENCE, Stopped

CONFIG, NODES, LOG = "swarm.json", "nodes", "log.txt"
METHOD = "sapo-swarm"
RESTARTS = 3
"""How often in a row a node is started again that does not get any further."""
REFUSED = 2
"""The exit code of a run that was refused, or has diverged: it would be again."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Asked(TypedDict):
    """What all nodes of a swarm have in common, as it was asked for."""

    schema: int
    method: str
    world: str | None
    choices: dict[str, Any]


# ------------------------------------------------------------------ making


def names(count: int) -> list[str]:
    """a, b, …, z, a2, b2, …"""
    return [chr(ord("a") + i % 26) + (str(i // 26 + 1) if i >= 26 else "") for i in range(count)]


def make(
    folder: str | Path,
    method: str = METHOD,
    world: str | None = None,
    *,
    nodes: Mapping[str, Mapping[str, Any]],
    **choices: Any,
) -> list[Path]:
    """A new swarm's folder with a run for each node, all of them planned before any is made.

    nodes     settings of each node's own, by name, such as `{"a": {"run.model": "runs/one"}, "b": {}}`
    choices   of all nodes, as of `panoply.plan`
    """
    place = Path(folder)
    if is_file(place / CONFIG):
        raise PanoplyError(f"{place} is a swarm already: panoply swarm {place} goes on with it.")
    asked: Asked = {"schema": 1, "method": method, "world": world, "choices": dict(choices)}
    plans = planned(place, asked, nodes, first=0)
    with clear_errors(f"make {place}"):
        (place / NODES).mkdir(parents=True, exist_ok=True)
    write_atomically(place / CONFIG, json.dumps(asked, indent=1, ensure_ascii=False))
    return _create(place, plans)


def join(folder: str | Path, nodes: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Further nodes of a swarm, asked for what the others were, with settings of their own over it."""
    place = Path(folder)
    asked, there = opened(place), found(place)
    for name in nodes:
        if name in there:
            raise PanoplyError(f"{place} has a node {name} already: give the new one another name.")
    return _create(place, planned(place, asked, nodes, first=len(there)))


def planned(place: Path, asked: Asked, nodes: Mapping[str, Mapping[str, Any]], first: int) -> dict[str, Plan]:
    """A plan for every node. Each has a seed of its own, and so its own problems and draws."""
    if not nodes:
        raise PanoplyError("A swarm has at least one node.")
    for name in nodes:
        if not NODE.fullmatch(name):
            raise PanoplyError(
                "A node is named by at most 40 letters, digits, - and _, since that names its folder, not "
                f"'{plain(name)}'."
            )
    choices = dict(asked["choices"])
    shared = choices.pop("settings", None) or {}
    seed = int(choices.pop("seed", 0))
    if asked["method"].partition("@")[0] != METHOD:
        choices.setdefault("sample", METHOD)
    plans = {}
    for number, (name, own) in enumerate(nodes.items(), first):
        settings = {**shared, **own, "sample.folder": str(place.resolve()), "sample.node": name}
        chosen = {"threads": 1, "seed": seed + number, **choices}
        if model := settings.pop("run.model", None):
            if not os.path.isdir(model):
                raise PanoplyError(f"The node {name} is to begin with {plain(model)}, which is no folder.")
            chosen["model"] = model
        plans[name] = plan(asked["method"], asked["world"], **chosen, settings=settings)
        training.check_surroundings(plans[name])
    return plans


def _create(place: Path, plans: Mapping[str, Plan]) -> list[Path]:
    return [training.set_up(made, place / NODES / name) for name, made in plans.items()]


# ------------------------------------------------------------------ looking


def opened(place: Path) -> Asked:
    """What a swarm was asked for."""
    if not is_file(place / CONFIG):
        raise PanoplyError(
            f"There is no swarm in {place}: name how many nodes it is to have, such as --nodes 4."
        )
    return read_json(place / CONFIG, Asked)


def found(place: Path) -> dict[str, Run]:
    """The nodes of a swarm by name; what is no run is passed over."""
    runs = {}
    for home in sorted((place / NODES).iterdir()) if (place / NODES).is_dir() else ():
        with contextlib.suppress(BadFile):
            runs[home.name] = Run.open(home)
    return runs


@dataclass(frozen=True)
class Standing:
    """How a node stands: its rounds, held-out success, what it took from others, and what it dropped, by reason."""

    node: str
    status: str
    round: int
    rounds: int
    before: float | None
    after: float | None
    taken: int
    dropped: Mapping[str, int]

    @classmethod
    def of(cls, node: str, run: Run) -> Standing:
        rows, result = run.metrics(), run.result()
        reasons: Counter[str] = Counter()
        for row in rows:
            for name, count in row.items():
                if name.startswith("swarm_dropped_"):
                    reasons[name.removeprefix("swarm_dropped_")] += int(count)
        measured = [row["held_out_sampled"] for row in rows if "held_out_sampled" in row]
        return cls(
            node,
            run.status(),
            int(rows[-1]["step"]) if rows else 0,
            int(run.config["plan"]["run"]["steps"]),
            result["before"].get("sampled") if result else None,
            measured[-1] if measured else None,
            sum(int(row.get("swarm_taken", 0)) for row in rows),
            dict(reasons),
        )


@dataclass(frozen=True, repr=False)
class Swarm(Shown):
    """All nodes of a swarm, and how each stands."""

    folder: Path
    nodes: tuple[Standing, ...]
    failed: Mapping[str, str] = field(default_factory=dict)
    """Why nodes were given up, in a sentence each."""

    @classmethod
    def of(cls, folder: str | Path, failed: Mapping[str, str] | None = None) -> Swarm:
        place = Path(folder)
        opened(place)
        return cls(place, tuple(Standing.of(name, run) for name, run in found(place).items()), failed or {})

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "nodes": {s.node: {k: v for k, v in vars(s).items() if k != "node"} for s in self.nodes},
            "failed": dict(self.failed),
        }

    def _page(self) -> str:
        rows = [("node", "state", "rounds", "held out", "groups of others", "dropped")]
        for s in self.nodes:
            held = "–" if s.after is None else f"{s.after:.3f}"
            held = held if s.before is None else f"{s.before:.3f} → {held}"
            dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(s.dropped.items())) or "–"
            rows.append((s.node, s.status, f"{s.round}/{s.rounds}", held, str(s.taken), dropped))
        notes = [f"{name}: {why}" for name, why in self.failed.items()]
        if any(s.dropped for s in self.nodes):
            notes.append(f"What was dropped, and why: {self.folder / 'dropped'}")
        notes.append(f"Each node is a run: panoply report {self.folder / NODES / 'NAME'}")
        return "\n".join([table(rows, margin=0), "", *(table([(note,)], margin=0) for note in notes)])


# ------------------------------------------------------------------ running


class Node:
    """The process of a node, and how often it was started without getting any further."""

    def __init__(self, name: str, run: Run):
        self.name, self.run = name, run
        self.process: subprocess.Popen[bytes] | None = None
        self.tries, self.reached = 0, -1
        self.problem: str | None = None

    def start(self) -> None:
        words = ["train", "--resume", str(self.run.folder), "--quiet"]
        self._log: IO[bytes] = open(self.run.folder / LOG, "wb")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "panoply", *words],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for who watches, who then asks each node once
        )

    def last(self) -> Mapping[str, Any]:
        """The last line of its metrics."""
        with contextlib.suppress(BadFile, OSError), open_file(self.run.folder / "metrics.jsonl") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2**16))
            for line in reversed(file.read().splitlines()):
                with contextlib.suppress(BadFile):
                    return parse_json(line, "metrics", dict)
        return {}

    def ended(self) -> str | None:
        """After its process has ended: None where the run is finished, or why it was not."""
        assert self.process is not None
        code = self.process.wait()
        self._log.close()
        if self.run.status() == "finished":
            return None
        said = (self.run.folder / LOG).read_text(errors="replace").strip().splitlines()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with code {code}" + (f": {plain(said[-1]).removeprefix('panoply: ')}" if said else "")


class Watch:
    """Tells a person how nodes stand: a line now and then."""

    def __init__(self, every: float = 10.0, quiet: bool = False):
        self.every, self.quiet, self._next = every, quiet, 0.0

    def say(self, text: str) -> None:
        if not self.quiet:
            print(plain(text, lines=True), file=sys.stderr, flush=True)

    def show(self, nodes: Sequence[Node]) -> None:
        if self.quiet or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self.every
        words = []
        for node in nodes:
            row = node.last()
            of = node.run.config["plan"]["run"]["steps"]
            success = f" success {row['success']:.2f}" if "success" in row else ""
            words.append(f"{node.name} {row.get('step', 0)}/{of}{success}")
        self.say("round  " + "   ".join(words))


def run(folder: str | Path, watch: Watch | None = None, only: Sequence[str] = ()) -> Swarm:
    """Start every node that is neither finished nor running, and watch until all have ended.

    A node that is killed is started again and goes on from its last checkpoint; one that is refused, or that dies three
    times without a further round, is given up, and the others go on.
    only   names of nodes, where not all are meant
    """
    watch, place = watch or Watch(), Path(folder)
    opened(place)
    nodes = [
        Node(name, each)
        for name, each in found(place).items()
        if each.status() == "stopped" and (not only or name in only)
    ]
    if not nodes:
        raise PanoplyError(
            f"No node of {place} is left to be started: all are finished, or running elsewhere."
        )
    running = list(nodes)
    try:
        for node in nodes:
            node.start()
        while running:
            watch.show(nodes)
            time.sleep(0.2)
            running = [node for node in running if _goes_on(node, watch)]
    except KeyboardInterrupt as stop:
        raise Stopped.to_go_on(f"panoply swarm {place} goes on from here", stop) from None
    finally:
        _stop(running)
    return Swarm.of(place, {node.name: node.problem for node in nodes if node.problem})


def _goes_on(node: Node, watch: Watch) -> bool:
    """Whether a node is still at work; one that died is started again, unless that is of no use."""
    assert node.process is not None
    if node.process.poll() is None:
        return True
    why, reached = node.ended(), int(node.last().get("step", 0))
    if why is None:
        watch.say(f"{node.name} is finished.")
        return False
    node.tries = 1 if reached > node.reached else node.tries + 1
    node.reached = max(reached, node.reached)
    if node.process.returncode == REFUSED or node.tries > RESTARTS:
        node.problem = f"{why} in round {reached}, and was given up."
        watch.say(f"{node.name} {node.problem}")
        return False
    watch.say(f"{node.name} {why} in round {reached}, and is started again.")
    node.start()
    return True


def _stop(nodes: Sequence[Node]) -> None:
    """Let each finish and save its round, for as long as a run may take for that."""
    left = [node.process for node in nodes if node.process is not None and node.process.poll() is None]
    for process in left:
        process.terminate()
    patience = time.monotonic() + PATIENCE + 4
    for process in left:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, patience - time.monotonic()))
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    """Of a process that computes on one thread with this very package."""
    path = os.pathsep.join([str(Path(panoply.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **dict.fromkeys(THREADS, "1"), "PYTHONPATH": path}
