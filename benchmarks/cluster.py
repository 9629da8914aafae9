"""What spreading a run gains: simulated for 8 to 1,024 GPUs, and measured on this machine's two cores.

    python -m benchmarks.cluster simulate            seconds a step by number of GPUs, for 7B and 32B (a few minutes)
    python -m benchmarks.cluster                     the cells on this machine; those that are there already are kept
    python -m benchmarks.cluster --cell ahead        one cell again (several, `--rounds 3`: by turns, thrice)
    python -m benchmarks.cluster table               what was found, as Markdown

Simulated is the model that `panoply plan` prints (`panoply/scale/timing.py`): 512 prompts with 16 answers each, of
lognormal lengths (mean 4,000, at most 16,384 tokens), on H200s. Its rates were measured on one; that decoding reaches
60 % of its byte floor and learning 50 % (42 % of 32B, whose blocks are computed again), that weights travel at 8.25
GB/s and that the driver takes 2 s, is assumed. The best split of learners and samplers is searched for.

Measured is GRPO on `chain`, with as many epochs as make learning take as long as sampling (`balance`), and with a
learning rate at which the policy hardly moves: rewards then stay as rare as they were, and all steps are of one
length. `alone-1` and `alone-2` are one process on one thread and on two, and `twice` is a step of one of two such
processes at the same time, which have nothing to do with one another: two steps in its time is all that two cores
give. `pair` is one learner and one sampler, by turns with a run of one process, which shows what Ray costs; `ahead` two
samplers and a learner with batches sampled one step ahead, and `ahead-1` the same with one sampler. `-long` is the same
with four times the prompts. Three steps warm up, then ten are timed; `cpu` is what all processes of the run together
computed in such a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from panoply.checkpoint import write_atomically
from panoply.scale.timing import Card, Load, expected

RESULTS = Path("results/bench-cluster")
WARM, TIMED = 3, 10

# ------------------------------------------------------------------ simulated

SEVEN = Load(7.62e9, kv=57_344, mixing=28 * 3584, answers=8192, mean=4000, most=16_384)
LARGE = Load(
    32.8e9, kv=262_144, mixing=64 * 5120, answers=8192, mean=4000, most=16_384, recomputed=True, parallel=2
)
MODELS = {"7B": (SEVEN, Card()), "32B": (LARGE, Card(learning=0.42))}
MODES = {"sync": (0, False), "lag 1": (1, False), "in flight ≤ 1": (1, True), "in flight ≤ 4": (4, True)}
GPUS = {"7B": (8, 16, 32, 64, 128, 256, 512, 1024), "32B": (32, 64, 128, 256, 512, 1024)}
SPLITS = (0.375, 0.4, 0.5, 0.6, 0.67, 0.75, 0.84)
"""Shares of samplers that are tried."""


def best(load: Load, card: Card, gpus: int, staleness: int, inflight: bool) -> tuple[float, int]:
    """Seconds of a step with the best split, and its samplers; 0 where all do both by turns."""
    if not staleness:
        return expected(load, card, gpus, 0).seconds, 0
    tried = {round(gpus * share / load.parallel) * load.parallel for share in SPLITS}
    found = [
        (expected(load, card, gpus - n, n, staleness, inflight).seconds, n) for n in tried if 0 < n < gpus
    ]
    return min(found)


def simulate() -> None:
    found: dict[str, Any] = {}
    for model, (load, card) in MODELS.items():
        for gpus in GPUS[model]:
            row = {mode: best(load, card, gpus, *how) for mode, how in MODES.items()}
            found.setdefault(model, {})[str(gpus)] = row
            print(
                model, gpus, {mode: f"{seconds:.0f} ({n})" for mode, (seconds, n) in row.items()}, flush=True
            )
        many = replace(load, answers=4 * load.answers)
        row = {mode: best(many, card, 1024, *how) for mode, how in MODES.items()}
        found[model]["1024, four times the prompts"] = row
    _store("simulated", found)


# ------------------------------------------------------------------ measured

WORK = {
    "world.operations": 6,
    "sample.prompts": 64,
    "sample.group": 8,
    "update.lr": 1e-6,
    "run.held_out": 1,
    "run.evaluate_every": 0,
    "run.episodes_every": 0,
    "run.checkpoint_every": 1000,
}
CELLS: dict[str, dict[str, Any]] = {
    "balance": {"threads": 1},
    "alone-1": {"threads": 1},
    "alone-2": {"threads": 2},
    "twice": {"threads": 1},
    "pair": {"threads": 1, "learners": 1, "samplers": 1},
    "ahead": {"threads": 1, "learners": 1, "samplers": 2, "staleness": 1},
    "ahead-1": {"threads": 1, "learners": 1, "samplers": 1, "staleness": 1},
}
LONG = "-long"
"""The end of names of cells with four times the prompts."""
CELLS |= {name + LONG: how for name, how in CELLS.items() if name not in ("balance", "twice", "ahead-1")}


def measure(name: str, saved: bool = True) -> None:
    """One cell, in this process."""
    from panoply.run import versions

    epochs = 1 if name == "balance" else json.loads((RESULTS / "balance.json").read_text())["epochs"]
    settings = {**WORK, "update.epochs": epochs}
    if name.endswith(LONG):
        settings["sample.prompts"] *= 4
    command = [sys.executable, "-m", "benchmarks.cluster", "one", "--cell", "alone-1", "--unsaved"]
    beside = subprocess.Popen(command) if name == "twice" else None
    turns = [name, "alone-1"] if name.startswith("pair") else [name]
    with tempfile.TemporaryDirectory() as folder:
        taken = in_turns(turns, settings, Path(folder))
    if beside is not None:
        beside.wait()
    seconds, rows, computed = taken[0]
    facts = {
        "steps": [round(s, 4) for s in seconds],
        "median": statistics.median(seconds),
        "cpu": round((computed[1] - computed[0]) / (TIMED - 1), 4),
        "phases": {k: statistics.median([r[k] for r in rows if k in r]) for k in rows[-1] if "seconds_" in k},
        "epochs": epochs,
        "versions": versions(),
        "chosen": CELLS[name],
    }
    if len(taken) > 1:
        facts["over"] = statistics.median(a / b - 1 for a, b in zip(seconds, taken[1][0], strict=True))
        del facts["cpu"]  # it is both runs'
    if name == "balance":
        ratio = facts["phases"]["seconds_sample"] / facts["phases"]["seconds_learn"]
        facts["epochs"] = max(1, round(ratio))
    if saved:
        _store(name, {**facts, "rounds": [*_rounds(name), round(facts["median"], 4)]})


def in_turns(names: list[str], settings: dict[str, Any], folder: Path) -> list[Any]:
    """Runs of cells that make their steps by turns, so that a machine which gets slower does so for all of them.

    Of each: seconds and metrics of the timed steps, and what was computed until the last warm one and the last but one.
    """
    import panoply

    runs = [
        panoply.steps(
            "grpo",
            "chain",
            run=folder / name,
            steps=WARM + TIMED,
            settings=settings,
            device="cpu",
            progress=panoply.Progress(),
            **CELLS[name],
        )
        for name in names
    ]
    found: list[Any] = [([], [], []) for _ in runs]
    for number in range(WARM + TIMED):
        for run, (seconds, rows, computed) in zip(runs, found, strict=True):
            began = time.perf_counter()
            step = next(run)
            took = time.perf_counter() - began
            if number in (WARM - 1, WARM + TIMED - 2):  # the last step also evaluates
                computed.append(cpu_seconds())
            if number >= WARM:
                seconds.append(took)
                rows.append(dict(step.metrics))
    for run in runs:
        run.close()
    return found


def cpu_seconds() -> float:
    """What this process and all that came of it have computed so far."""
    spent, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(folder.name)
        parents[pid], spent[pid] = int(words[1]), (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(spent[pid] for pid in family)


def cells(names: list[str], again: bool, rounds: int) -> None:
    """Every cell once in a round: a machine is not the same for minutes, and cells of one round are compared."""
    due = [name for name in names if again or not (RESULTS / f"{name}.json").is_file()]
    for name in due:
        if _rounds(name):
            _store(name, {**json.loads((RESULTS / f"{name}.json").read_text()), "rounds": []})
    for _ in range(rounds):
        for name in due:
            subprocess.run([sys.executable, "-m", "benchmarks.cluster", "one", "--cell", name], check=True)
            facts = json.loads((RESULTS / f"{name}.json").read_text())
            over = f", {facts['over']:+.1%} of the step of one process" if "over" in facts else ""
            print(f"{name:12} {facts['median']:.3f} s a step, {facts['epochs']} epochs{over}", flush=True)


def _rounds(name: str) -> list[float]:
    place = RESULTS / f"{name}.json"
    return list(json.loads(place.read_text()).get("rounds", [])) if place.is_file() else []


# ------------------------------------------------------------------ shown


def table() -> str:
    """What was found, as Markdown."""
    pieces = []
    if (RESULTS / "simulated.json").is_file():
        found = json.loads((RESULTS / "simulated.json").read_text())
        for model, rows in found.items():
            lines = [f"| {model}, GPUs | {' | '.join(MODES)} |", "|---" * (1 + len(MODES)) + "|"]
            for gpus, row in rows.items():
                told = [f"{row[m][0]:,.0f}" + (f" ({row[m][1]})" if row[m][1] else "") for m in MODES]
                lines.append(f"| {gpus} | {' | '.join(told)} |")
            pieces.append("\n".join(lines))
    known: dict[str, Any] = {
        n: json.loads(p.read_text()) for n in CELLS if (p := RESULTS / f"{n}.json").is_file()
    }
    shown = ["| | seconds a step | computed | times one thread, by round |", "|---|---|---|---|"]
    for name, facts in known.items():
        one = known.get("alone-1" + (LONG if name.endswith(LONG) else ""))
        if name == "balance" or one is None:
            continue
        pairs = zip(one.get("rounds", []), facts.get("rounds", []), strict=False)
        times = sorted(a / b for a, b in pairs) or [one["median"] / facts["median"]]
        gained = f"{statistics.median(times):.2f} ({times[0]:.2f}–{times[-1]:.2f})"
        shown.append(f"| {name} | {facts['median']:.3f} | {facts.get('cpu', '')} | {gained} |")
    for name, facts in known.items():
        if "over" in facts:
            shown.append(f"\n{name}: Ray takes {facts['over']:.1%} of a step, by turns with one process.")
    pieces.append("\n".join(shown))
    return "\n\n".join(pieces)


def _store(name: str, facts: Any) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_atomically(RESULTS / f"{name}.json", json.dumps(facts, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="cells", choices=["cells", "one", "simulate", "table"])
    parser.add_argument("--cell", action="append", choices=list(CELLS))
    parser.add_argument("--rounds", type=int, default=1, help="how often each cell is measured, by turns")
    parser.add_argument("--unsaved", action="store_true", help="time one cell, and store nothing")
    chosen = parser.parse_args()
    if chosen.what == "simulate":
        simulate()
    elif chosen.what == "one":
        measure(chosen.cell[0], saved=not chosen.unsaved)
    elif chosen.what == "cells":
        cells(chosen.cell or list(CELLS), bool(chosen.cell), chosen.rounds)
    if chosen.what != "one":
        print(f"\n{table()}")


if __name__ == "__main__":
    main()
