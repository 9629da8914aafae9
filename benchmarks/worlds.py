"""How long GRPO takes from a world's warm start to a held-out success of 0.8.

    python benchmarks/worlds.py --world add --seeds 0,1,2 --threads 2
    python benchmarks/worlds.py --world all

Sampled success on held-out problems is measured every few steps; the time that takes is not counted. Results go to
results/worlds/NAME.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from panoply import api, registry
from panoply.errors import PanoplyError, unknown
from panoply.loops.job import Job
from panoply.policies.build import warm_start
from panoply.progress import Progress

GOAL = 0.8
PHASES = ("seconds_sample", "seconds_credit", "seconds_score", "seconds_learn")


@dataclass(frozen=True)
class Case:
    """A world with options, and settings of GRPO beside the preset for small models."""

    world: str
    options: Mapping[str, Any]
    settings: Mapping[str, Any]

    def all_settings(self) -> dict[str, Any]:
        return {**{f"world.{name}": value for name, value in self.options.items()}, **self.settings}

    def start(self) -> Path | None:
        return warm_start(registry.find("world", self.world).build(**self.options))


SPECIAL = {
    "manyanswers-countdown": Case("manyanswers", {"kind": "countdown"}, {}),
    "tools-calculator": Case("tools", {"kind": "calculator"}, {}),
    **{f"guess-{kind}": Case("guess", {"kind": kind}, {}) for kind in ("gatekeeper", "slots", "wordle")},
    **{f"program-{kind}": Case("program", {"kind": kind}, {}) for kind in ("python", "stack", "ir", "shell")},
}
"""Cases that are not a registered world with its defaults."""


class Reached(Exception):
    """The goal is reached: the rest of the run is not needed."""


class Watch(Progress):
    """Adds up the time of training, evaluation left out, and stops at the goal."""

    def __init__(self) -> None:
        self.seconds, self.steps = 0.0, 0
        self.curve: list[tuple[int, float, float]] = []
        self._cpu = self._paused = 0.0

    def start(self, job: Job) -> None:
        self._cpu = time.process_time()

    def evaluating(self, job: Job, done: int, total: int) -> None:
        if done == 0:
            self._paused = time.process_time()

    def evaluated(self, job: Job, found: Any) -> None:
        self._cpu += time.process_time() - self._paused

    @property
    def cpu_seconds(self) -> float:
        """Of all threads; hardly changed by what else the machine does."""
        return time.process_time() - self._cpu

    def step(self, job: Job, record: Mapping[str, Any], experience: Any) -> None:
        self.steps = record["step"]
        self.seconds += sum(record.get(phase, 0.0) for phase in PHASES)
        success = record.get("held_out_sampled")
        if success is not None:
            self.curve.append((self.steps, round(self.seconds, 2), success))
            if success >= GOAL:
                raise Reached


def cases(asked: str) -> Iterator[tuple[str, Case]]:
    plain = {entry.name: Case(entry.name, {}, {}) for entry in registry.entries("world")}
    known = {**plain, **SPECIAL}
    if asked == "all":
        yield from ((name, case) for name, case in sorted(known.items()) if case.start() is not None)
        return
    for name in asked.split(","):
        if name not in known:
            raise unknown("world", name, known)
        yield name, known[name]


def train(case: Case, seed: int, chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    watch = Watch()
    try:
        api.train(
            "grpo",
            case.world,
            seed=seed,
            steps=chosen.steps,
            threads=chosen.threads,
            settings=case.all_settings(),
            evaluate_every=chosen.every,
            held_out=chosen.problems,
            checkpoint_every=chosen.steps,
            progress=watch,
            run=folder / f"{case.world}-{seed}",
        )
        reached = False
    except Reached:
        reached = True
    return {
        "seed": seed,
        "reached": reached,
        "steps": watch.steps,
        "seconds": round(watch.seconds, 2),
        "cpu_seconds": round(watch.cpu_seconds, 2),
        "curve": watch.curve,
    }


def measure(name: str, case: Case, chosen: argparse.Namespace) -> dict[str, Any]:
    start = case.start()
    if start is None:
        raise PanoplyError(f"The world {name} ships no warm start to train from.")
    torch.set_num_threads(chosen.threads)
    settings = {path: value for path, value in case.all_settings().items() if path.startswith("world.")}
    load = os.getloadavg()[0]
    found = api.evaluate(
        start, case.world, problems=chosen.problems, attempts=4, ks=(1, 4), settings=settings
    )
    with tempfile.TemporaryDirectory() as folder:
        runs = [train(case, int(seed), chosen, Path(folder)) for seed in chosen.seeds.split(",")]
    return {
        "world": name,
        "settings": case.all_settings(),
        "goal": GOAL,
        "start": {**found.to_json(), "model": start.name},
        "runs": runs,
        "median_seconds": statistics.median(r["seconds"] for r in runs),
        "median_cpu_seconds": statistics.median(r["cpu_seconds"] for r in runs),
        "median_steps": statistics.median(r["steps"] for r in runs),
        "reached": sum(r["reached"] for r in runs),
        "threads": chosen.threads,
        "load_before": round(load, 2),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--world", default="all", help="names with commas between, or all that ship a warm start"
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300, help="give up after so many")
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument("--out", default="results/worlds", type=Path)
    chosen = parser.parse_args()
    try:
        for name, case in cases(chosen.world):
            result = measure(name, case, chosen)
            chosen.out.mkdir(parents=True, exist_ok=True)
            (chosen.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
            start = result["start"]
            print(
                f"{name}: start {start['sampled']:.3f} sampled, {start['greedy']:.3f} greedy; "
                f"{result['reached']} of {len(result['runs'])} seeds reach {GOAL} "
                f"after {result['median_steps']:g} steps, {result['median_seconds']:g} s, "
                f"{result['median_cpu_seconds']:g} CPU s "
                f"({result['threads']} threads, load {result['load_before']:g})",
                flush=True,
            )
    except PanoplyError as error:
        raise SystemExit(f"{error}") from error


if __name__ == "__main__":
    main()
