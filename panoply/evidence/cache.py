"""Runs found again by what determines them: `runs/.cache/grpo-chain-s0-HASH`.

The hash is of the plan (method with all its parts and settings, world, options, seed), of the code that computes with
them, and of the versions of torch, NumPy and Numba. So one baseline serves every comparison that needs it, and an
interrupted comparison goes on with its half-done runs, because runs resume.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

from panoply import session
from panoply.errors import PanoplyError
from panoply.evidence.closure import PACKAGE, closure
from panoply.files import is_file, read_json
from panoply.given import without_places
from panoply.kinds import is_text
from panoply.planning import Options, Plan
from panoply.recipe_plans import RecipePlan
from panoply.run import Run, versions

LOOPS = tuple(f"panoply.loops.{name}" for name in ("job", "steps"))

STAGES = "stages.json"
"""What the cached folder of a recipe holds: where its stages lie, each a cached run of its own."""


def identity(plan: Plan | RecipePlan) -> str:
    """A hash of everything that determines the numbers of a run, or of all runs of a recipe."""
    if isinstance(plan, RecipePlan):
        stages = [identity(made) for made in (*plan.first.values(), *plan.later.values())]
        facts = {"stages": stages, "counted": plan.counted, "recipe": plan.recipe.to_json()}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    data = plan.to_json()
    for irrelevant in ("chosen", "plugins"):
        del data[irrelevant]
    for name in ("sinks", "keep", "checkpoint_every", "episodes_every"):
        del data["run"][name]
    for name in Options.placed:
        data["run"].pop(name, None)
    facts = {
        "plan": without_places(data),
        "code": [file_hash(path) for path in _code(plan)],
        "files": [file_hash(path) for path in _named(plan)],
        **{name: versions()[name] for name in ("torch", "numpy", "numba")},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _code(plan: Plan) -> list[Path]:
    """The files a run computes with: loops, the kind of world, the world, the parts, and all that these import.

    So another method, another world, or a part that this plan does not have makes none of its runs stale. Of a plug-in
    its own file counts, and of a session only the definitions.
    """
    world = plan.world()
    own = {held.info.function.__module__ for held in _parts(plan)}
    own |= {type(inner).__module__ for inner in _worlds(world)}
    others = {name for name in own if not name.startswith("panoply.") and name != "__main__"}
    plugins = {Path(str(sys.modules[name].__file__)) for name in others if name in sys.modules}
    plugins |= {Path(file) for file in plan.plugins if session.is_written(Path(file))}
    loops = ("panoply.loops.making",) if plan.method.regime == "make" else LOOPS
    return [*closure((*loops, f"panoply.kinds.{world.medium}", *own)), *sorted(plugins)]


def _worlds(world: Any) -> Iterator[Any]:
    """A world, and those that it is made of: several in turn, or the one that data is of."""
    yield world
    for inner in (*getattr(world, "worlds", ()), *filter(None, [getattr(world, "world", None)])):
        yield from _worlds(inner)


def _named(plan: Plan) -> list[Path]:
    """The files a plan names: data, models, and the world's warm start."""

    options = plan.options
    words = [*plan.world_options.values(), options.model, options.reference]
    flat = [w for word in words for w in (word if isinstance(word, tuple) else (word,))]
    named = [
        Path(str(w).split(".py:")[0] + ".py" if ".py:" in str(w) else w) for w in flat if isinstance(w, str)
    ]
    world = plan.world()
    if is_text(world) and "start" in (options.model, options.reference):
        named.append(PACKAGE / "assets" / world.start)
    inside = [f for path in named for f in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [f for f in inside if f.is_file()]


def _parts(plan: Plan) -> Iterator[Any]:
    """Every part of the plan's method, those inside others included."""
    from panoply.parts import Part

    waiting: list[Any] = [held for _, held in plan.method.parts()]
    while waiting:
        held = waiting.pop()
        yield held
        waiting += [value for value in held.settings().values() if isinstance(value, Part)]


def place(plan: Plan | RecipePlan, root: Path) -> Path:
    """Where the run of a plan lies, or will."""
    words = (plan.method_id, plan.world_id, f"s{plan.options.seed}")
    return root / ("-".join(w.split("@")[0] for w in words) + f"-{identity(plan)}")


def finished(folder: Path) -> Run | None:
    """The run of a folder if it has ended, soundly or by diverging; of a recipe's folder its last run."""
    if is_file(folder / STAGES):
        runs = [finished(stage) for stage in stages(folder).values()]
        return runs[-1] if all(runs) else None
    if not (folder / "run.json").is_file():
        return None
    run = Run.open(folder)
    return run if run.status() in ("finished", "diverged") and _whole(run) else None


def _whole(run: Run) -> bool:
    result: dict[str, Any] = dict(run.result() or {})
    if not isinstance(result.get("before"), dict) or not isinstance(result.get("after"), dict):
        raise PanoplyError(f"'{run.folder}' cannot be read: its result lacks what was measured.")
    if len(run.metrics()) < int(result.get("steps", 0)):
        raise PanoplyError(f"'{run.folder}' cannot be read: lines of its metrics are missing.")
    return True


class Stages(TypedDict):
    """`stages.json`."""

    counted: str
    stages: dict[str, str]


def stages(folder: Path, all: bool = True) -> dict[str, Path]:
    """Where the stages of a recipe lie that were carried out, in their order; or those alone that a budget is for."""
    found = read_json(folder / STAGES, Stages)
    wanted = "" if all else found["counted"]
    return {
        name: folder.parent / place
        for name, place in found["stages"].items()
        if wanted in ("", name.partition("-")[2])
    }


def tidy(folder: Path) -> str | None:
    """Make sure that a folder can be used: remove what is neither a run nor the start of one, and say why."""
    if not folder.exists():
        return None
    try:
        if finished(folder) is None and (folder / "run.json").is_file():
            run = Run.open(folder)
            run.plan()
            if run.status() == "running":  # another comparison makes it; a worker will wait for that
                return None
            if not any(run.checkpoints.glob("step-*")):
                shutil.rmtree(folder)
            elif run.latest() is None:
                raise PanoplyError(f"no checkpoint of '{folder}' is usable.")
    except PanoplyError as error:
        shutil.rmtree(folder)
        return f"The cached run {folder.name} is broken and is made again: {error}"
    return None


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Of several that need the same run at the same time the second waits, and finds it finished or measured."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
