"""Kills runs at random moments, resumes them, and compares their ends, bit for bit, with runs that were left in peace.

    python tests/kill.py --kills 1000 --jobs 16
    python tests/kill.py --kills 60 --methods ppo,rlhf --seed 7

Everything is imported once, and every run is a fork of that process, so that a kill costs less than a second. A life is
one run killed about ten times; its folder is kept where it ended otherwise than the whole one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forks
import tiny

from panoply import cli

RECORDS = {"run.checkpoint_every": 3, "run.evaluate_every": 7, "run.episodes_every": 2}
CONTROL = {
    **RECORDS,
    "run.device": "cpu",
    "run.held_out": 2,
    "policy.hidden": "16,16",
    "sample.envs": 16,
}


@dataclass(frozen=True)
class Case:
    """What is trained, and how long."""

    method: str
    steps: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    world: str | None = None
    plugin: str | None = None
    typed: bool = False
    """Whether it is the command line's words that begin it and go on with it."""

    def begin(self, folder: Path) -> None:
        """Train in a folder, or go on with what is in it; what has ended stays as it is."""
        choices: dict[str, Any] = {"steps": self.steps} if self.steps else {}
        if (folder / "result.json").exists():
            return
        if self.typed:
            self._type(folder)
        elif (folder / "run.json").exists() or (folder / "recipe.json").exists():
            tiny.resume(folder)
        elif self.world is None and not self.recipe:
            tiny.train(folder, self.method, settings=self.settings, **choices)
        else:
            choices |= {"plugins": [str(tiny.ROOT / self.plugin)]} if self.plugin else {}
            tiny.bare(folder, self.method, world=self.world, settings=self.settings, **choices)

    def _type(self, folder: Path) -> None:
        new = [*tiny.words(**self.settings), "--model", "fresh", "--threads", "1", "--steps", str(self.steps)]
        words = (
            ["--resume", str(folder)]
            if (folder / "run.json").exists()
            else [self.method, *new, "--run", str(folder)]
        )
        try:
            cli.main(["train", *words, "--quiet"])
        except SystemExit as ended:
            if ended.code:
                raise

    @property
    def recipe(self) -> bool:
        return not self.steps


CASES: dict[str, Case] = {
    "grpo": Case("grpo", 45, RECORDS),
    "reference": Case(
        "grpo", 45, {**RECORDS, "regularise.kl": 0.1, "update.epochs": 2, "update.minibatches": 2}
    ),
    "reinforce": Case("reinforce", 45, RECORDS),  # a part's state
    "dpo": Case("dpo", 45, RECORDS),
    "sft": Case("sft", 45, {**RECORDS, "update": "sgd", "update.momentum": 0.9}),
    # A pole that falls slowly: episodes are longer than a block of noise, and end at odd times.
    "ppo": Case(
        "ppo", 45,
        {**CONTROL, "sample.length": 40, "world.half": 4.0, "world.force": 2.0, "update.epochs": 2}, "cartpole",
    ),
    "sac": Case(
        "sac", 24, {**CONTROL, "sample.envs": 3, "sample.length": 12, "replay.batch": 16, "replay.warmup": 60},
        "pendulum",
    ),
    # Two learners, of which one answers what the other has asked for; a part of theirs remembers whose turn it is.
    "several": Case(
        "propose-solve", 20,
        {**RECORDS, "run.device": "cpu", "run.held_out": 4, "game.tasks": 12, "game.group": 4,
         "turn": "when", "turn.metric": "total_episodes", "turn.above": 500.0, "turn.below": 60.0},
        "chain", "examples/proposer_and_solver.py",
    ),
    "rlhf": Case(
        "rlhf", 0,
        {**RECORDS, "run.device": "cpu", "run.held_out": 8, "imitate.run.steps": 12, "imitate.data.batch": 4,
         "judge.run.steps": 10, "judge.data.batch": 4, "optimise.run.steps": 10, "optimise.sample.prompts": 8,
         "optimise.sample.max_tokens": 8},
    ),
}  # fmt: skip
METHODS = ("grpo", "ppo", "sac", "dpo", "rlhf")

# ------------------------------------------------------------------ moments

WATCHED = ("start", "writing", "step", "late")
"""While a process starts, while a checkpoint is written, in a step, some steps after the last checkpoint."""
COUNTED = ("first files", "files", "after an end")
"""At one of the first changes of a file, at any, or at one of the next after a run (or a stage) wrote its result."""
KINDS = (*WATCHED, *COUNTED)


class Moment:
    """A point in a process's life to wait for, found by looking at its folder from outside."""

    def __init__(self, kind: str, dice: random.Random, folder: Path, start_up: float):
        self.kind, self.folder, self.began = kind, folder, time.monotonic()
        self.delay = dice.uniform(0, start_up if kind == "start" else 0.008)
        self.steps = dice.randint(4 if kind == "late" else 1, 6)
        self.before = {file: os.stat(file).st_ino for file in self._files()}
        self.kept = {
            file: max((int(p.name[5:]) for p in file.parent.glob("checkpoints/step-*")), default=0)
            for file in self.before
        }

    def reached(self) -> bool:
        if self.kind == "start":
            return time.monotonic() - self.began >= self.delay
        if self.kind == "writing":
            seen = any(
                any(self.folder.glob(p)) for p in ("checkpoints/.writing-*", "*/checkpoints/.writing-*")
            )
        else:
            seen = self._done() >= self.steps
        if seen:
            time.sleep(self.delay)
        return seen

    def _files(self) -> list[Path]:
        return [f for place in ("", "*/") for f in self.folder.glob(f"{place}metrics.jsonl")]

    def _done(self) -> int:
        """Steps this process has made. A resumed one first replaces the file by the lines it keeps."""
        done = 0
        for file in self._files():
            try:
                if os.stat(file).st_ino != self.before.get(file):
                    done += file.read_bytes().count(b"\n") - self.kept.get(file, 0)
            except OSError:
                continue
        return done


CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")


def fall(kind: str, dice: random.Random, folder: Path) -> None:
    """Have this very process killed at one of the next changes it makes to files of its folder."""
    left = dice.randint(1, {"first files": 8, "files": 80, "after an end": 6}[kind])
    counting = kind != "after an end"

    def hook(event: str, given: Any) -> None:
        nonlocal left, counting
        if event not in CHANGES:
            return
        if event == "open" and not (given[1] or "").strip("rbt") and not given[2] & (os.O_WRONLY | os.O_RDWR):
            return
        name = str(given[0])
        if (
            not name.startswith(str(folder)) and "/" in name
        ):  # what has no folder is below one that was opened
            return
        counting = counting or (event == "os.rename" and str(given[1]).endswith("result.json"))
        left -= counting
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kill_often(
    start: Callable[[Callable[[], None]], int],
    folder: Path,
    seed: int,
    *,
    kinds: Sequence[str],
    start_up: float,
) -> list[str]:
    """Start a process again and again and kill it at the moments named; then leave it to end by itself.

    start      takes what the process does first, and gives its number
    start_up   the seconds after the start in which the kills of a process that still starts fall

    Gives the moments at which it was killed. One that ends before its moment comes ends it all.
    """
    dice = random.Random(seed)
    done: list[str] = []
    for kind in [*kinds, "never"]:
        moment = Moment(kind, dice, folder, start_up)
        counted = random.Random(dice.random())
        pid = start(lambda: fall(kind, counted, folder) if kind in COUNTED else None)  # noqa: B023
        while kind not in WATCHED or not moment.reached():
            ended, status = os.waitpid(pid, os.WNOHANG if kind in WATCHED else 0)
            if ended:
                break
            time.sleep(0.001)
        else:
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
        if status == 0:
            return done
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise AssertionError(f"the process failed after {done or 'no kill'}: see {folder}.log")
        done.append(kind)
    raise AssertionError("what was not killed did not end")


def forked(work: Callable[[], Any], log: Path | None = None) -> int:
    """Do something in a process of its own, a copy of this one."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if log is not None:
                for stream in (1, 2):
                    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
            work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return pid


def live(case: Case, folder: Path, seed: int, kinds: Sequence[str], start_up: float = 0.4) -> list[str]:
    """A case from its beginning to its end, killed on the way."""
    log = Path(f"{folder}.log")
    log.parent.mkdir(parents=True, exist_ok=True)

    def start(first: Callable[[], None]) -> int:
        return forked(lambda: (first(), case.begin(folder)), log)

    return kill_often(start, folder, seed, kinds=kinds, start_up=start_up)


def warm_up() -> None:
    """Import what runs import, so that forks need not."""
    for module in (
        "panoply.loops.steps", "panoply.loops.recipe",
        "panoply.api", "panoply.kernels.compiled", "numba", "scipy.linalg", "yaml",
        "torch._dynamo",  # torch.optim imports it on first use, which takes seconds
    ):  # fmt: skip
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as folder:
        forks.run_once(Path(folder))


# ------------------------------------------------------------------ the same to the last bit


def differences(killed: Path, whole: Path) -> list[str]:
    """What two folders do not have in common: of a recipe, in any of its stages."""
    stages = sorted(p.parent.name for p in whole.glob("*/run.json"))
    if not stages:
        return list(_differences(killed, whole))
    found = [f"{name}: {what}" for name in stages for what in _differences(killed / name, whole / name)]
    if {p.name for p in killed.iterdir()} != {p.name for p in whole.iterdir()}:
        found.append("files of the recipe's folder")
    return found


def _differences(killed: Path, whole: Path) -> Iterator[str]:
    if not (killed / "result.json").exists():
        yield "it has no result"
        return
    ours, theirs = tiny.result(killed), tiny.result(whole)
    if tiny.untimed(ours) != tiny.untimed(theirs):
        yield "result.json"
    if tiny.metrics(killed) != tiny.metrics(whole):
        yield "metrics.jsonl"
    for name in ("episodes.jsonl",):
        if _bytes(killed / name) != _bytes(whole / name):
            yield name
    if _files(killed) != _files(whole):
        yield f"files: {sorted(_files(killed) ^ _files(whole))}"
    for file in sorted(whole.glob("checkpoints/step-*/**/*.safetensors")):
        if _bytes(file) != _bytes(killed / file.relative_to(whole)):
            yield str(file.relative_to(whole))
    for file in sorted(whole.glob("checkpoints/step-*/state.json")):
        pair = [_state(folder / file.relative_to(whole)) for folder in (killed, whole)]
        if pair[0] != pair[1]:
            yield str(file.relative_to(whole))


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.exists() else None


def _state(file: Path) -> dict[str, Any] | None:
    return (
        {k: v for k, v in json.loads(file.read_text()).items() if k != "seconds"} if file.exists() else None
    )


def _files(folder: Path) -> set[str]:
    """Every name there is; what a killed writer left behind is a difference too."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def learned(whole: Path) -> bool:
    """Whether most steps moved the weights: otherwise nothing is shown."""
    runs = [p.parent for p in whole.glob("*/run.json")] or [whole]
    rows = [m for run in runs for m in tiny.metrics(run)]
    norms = [[v for k, v in m.items() if k.endswith("gradient_norm")] or [m.get("updates", 0)] for m in rows]
    return sum(max(of) > 0 for of in norms) > len(rows) / 2


# ------------------------------------------------------------------ the command

A_LIFE = 10
"""Kills of one run."""


@dataclass
class Life:
    case: str
    seed: int
    planned: int
    kills: list[str]
    different: list[str]


def one_life(name: str, folder: Path, whole: Path, seed: int, kills: int) -> Life:
    """In a worker: live, compare, and leave nothing behind where all is well."""
    kinds = random.Random(seed).choices(KINDS, k=kills)
    try:
        done = live(CASES[name], folder, seed, kinds)
    except AssertionError as error:
        return Life(name, seed, kills, [], [str(error)])
    found = differences(folder, whole)
    if not found:
        shutil.rmtree(folder)
        Path(f"{folder}.log").unlink(missing_ok=True)
    return Life(name, seed, kills, done, found)


def in_peace(name: str, folder: Path) -> str | None:
    """In a worker: the whole run. Says what is wrong with it."""
    live(CASES[name], folder, 0, [])
    return None if learned(folder) else f"{name}: nothing is shown, the run hardly learned"


@contextmanager
def workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        yield pool


def kill_many(names: Sequence[str], kills: int, jobs: int, seed: int, folder: Path) -> list[Life]:
    """So many kills in all, shared out evenly."""
    dice, lives = random.Random(seed), []
    left = {name: kills // len(names) + (i < kills % len(names)) for i, name in enumerate(names)}
    with workers(jobs) as pool:
        for wrong in pool.map(in_peace, names, [folder / name / "whole" for name in names]):
            if wrong:
                raise SystemExit(wrong)
        waiting: set[Future[Life]] = set()
        while waiting or any(n > 0 for n in left.values()):
            while len(waiting) < jobs and any(n > 0 for n in left.values()):
                name = max(left, key=lambda n: left[n])
                size, number = min(A_LIFE, left[name]), dice.randrange(10**9)
                left[name] -= size
                place = folder / name / f"{number:09d}"
                waiting.add(pool.submit(one_life, name, place, folder / name / "whole", number, size))
            ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for life in (future.result() for future in ended):
                lives.append(life)
                if not life.different:  # an early end leaves kills for another life
                    left[life.case] += life.planned - len(life.kills)
    return lives


def table(lives: Sequence[Life]) -> str:
    rows = [["", *KINDS, "kills", "lives", "differences"]]
    names = list(dict.fromkeys(life.case for life in lives))
    for name in [*names, "all"]:
        of = [life for life in lives if name in (life.case, "all")]
        counts = Counter(kind for life in of for kind in life.kills)
        different = sum(bool(life.different) for life in of)
        rows.append(
            [name, *(str(counts[k]) for k in KINDS), str(counts.total()), str(len(of)), str(different)]
        )
    width = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, width, strict=True)) for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--methods", default=",".join(METHODS), help=f"of {', '.join(CASES)}")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    names = chosen.methods.split(",")
    if wrong := [name for name in names if name not in CASES]:
        parser.error(f"there is no {wrong[0]}, but {', '.join(CASES)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: a fork must not inherit threads
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="kills-"))
    warm_up()
    lives = kill_many(names, chosen.kills, chosen.jobs, chosen.seed, folder)
    print(table(lives))
    for life in lives:
        if life.different:
            print(
                f"{folder / life.case / f'{life.seed:09d}'} after {life.kills}: {'; '.join(life.different)}"
            )
    wrong = [life for life in lives if life.different]
    print(f"{sum(len(life.kills) for life in lives)} kills in {time.monotonic() - began:.0f} s, "
          f"{len(wrong)} runs that ended otherwise")  # fmt: skip
    if not wrong:
        shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
