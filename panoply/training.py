"""Planning and training from Python, and on behalf of the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panoply import registry
from panoply.errors import PanoplyError, Resumable, memory_errors
from panoply.handle import Course, Step, Steps
from panoply.kinds import kind_of
from panoply.own import is_data_file, own_data
from panoply.planning import Plan, make_plan
from panoply.policies import hub
from panoply.regimes import REGIMES
from panoply.run import Run, fresh_folder
from panoply.stopping import Stopped, patient
from panoply.which import Which, is_run, take

if TYPE_CHECKING:
    from panoply.policies.control import ControlPolicy
    from panoply.policies.text import TextPolicy
    from panoply.progress import Progress

SLOT_NAMES = tuple(dict.fromkeys(slot for regime in REGIMES.values() for slot in regime.slot_of))
"""The slots of all regimes: what may be borrowed by name."""


@dataclass(frozen=True)
class Trained:
    """A finished run: its folder, held-out success before and after, and its policy on demand."""

    run: Path
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    seconds: float
    fingerprint: str

    @classmethod
    def of(cls, run: Run) -> Trained:
        """A run that has ended."""
        result = run.result()
        if result is None:
            raise PanoplyError(f"The run {run.folder} has not ended yet.")
        return cls(run.folder, result["before"], result["after"], result["seconds"], result["fingerprint"])

    def policy(self, which: Which = None) -> TextPolicy | ControlPolicy:
        """Of the checkpoint that was best on held-out problems, the `last`, or that of a step."""
        from panoply.api import load_policy

        return load_policy(self.run, which=which)


def plan(method: str, world: str | None = None, **choices: Any) -> Plan:
    """Resolve a method on a world (its home, or `chain`, where none is named) without running it.

    `choices` are slots (`credit="gigpo"`), `settings={"update.lr": 1e-4}`, `preset`, `plugins`, and run options
    (`seed`, `steps`, `minutes`, `model`, …). Of a run as `model` or `reference` the best checkpoint is meant, or
    `which="last"`, or that of a step, `which=40`. `data="FILE.jsonl"` and `reward="FILE.py:NAME"` (or several, in a
    list) make a world of your own.
    """
    for plugin in choices.get("plugins") or ():
        registry.load_plugin(plugin)
    world, choices = own_data(world, hub.known(_exact(choices)))
    world = world or registry.find("method", method).world or "chain"
    slots = {name: choices.pop(name) for name in SLOT_NAMES if choices.get(name) is not None}
    return make_plan(method, world, slots=slots, **{k: v for k, v in choices.items() if k not in SLOT_NAMES})


def _exact(choices: Mapping[str, Any], say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The choices with the checkpoint that is meant in place of a run, which may go on and have another best."""
    found = dict(choices)
    which = found.pop("which", None)
    runs = [name for name in ("model", "reference") if is_run(found.get(name))]
    if which is not None and not runs:
        raise PanoplyError("--which has no effect: neither --model nor --reference names a run.")
    for name in runs:
        taken = take(found[name], which)
        assert taken.checkpoint is not None
        found[name] = str(taken.checkpoint.folder)
        say(f"--{name} is {taken}.")
    return found


def plan_recipe(name: str, world: str | None = None, **choices: Any) -> dict[str, Plan]:
    """The plans of a recipe's stages by name, all checked before any compute is spent."""
    from panoply.loops.recipe import plan_stages

    for plugin in choices.get("plugins") or ():
        registry.load_plugin(plugin)
    entry = registry.find("recipe", name)
    return plan_stages(entry, _for_all_stages(entry, world, choices), plan)


def _for_all_stages(entry: registry.Entry, world: str | None, choices: Mapping[str, Any]) -> dict[str, Any]:
    """What the user chose for a recipe, and where it runs."""
    home = "jsonl" if is_data_file(choices.get("data")) else entry.world or "chain"
    chosen = _exact(choices).items()
    given = {k: v for k, v in chosen if v is not None and v is not False and v not in ((), [])}
    return {**given, "world": world or home}


def train(
    method: str | Plan | None = None,
    world: str | None = None,
    *,
    run: str | Path | None = None,
    resume: str | Path | None = None,
    progress: Progress | None = None,
    on_step: Callable[[Step], None] | None = None,
    from_scratch: bool = False,
    **choices: Any,
) -> Trained:
    """Train a method, or all stages of a recipe, on a world, or go on with a stopped run (`resume=FOLDER`).

    progress       who is told how the run goes (`panoply.Progress`); where none is given, a live panel or lines
    on_step        called after every step with a `Step`: its metrics, its experience, and `stop()`
    from_scratch   remake the world's warm start first, by imitating its teacher, instead of using the shipped one

    Ctrl-C stops the run after its step, which is saved, or at once the second time; either way it can be resumed.
    """
    with patient() as stop:
        course = _course(method, world, run, resume, progress, from_scratch, choices)
        with contextlib.closing(course):
            while True:
                try:
                    step = course.throw(Stopped(number=stop.asked)) if stop.asked else next(course)
                except StopIteration as ended:
                    found: Trained = ended.value
                    return found
                stop.stepping = True
                if on_step is not None:
                    on_step(step)
                del step  # what it was made of is not kept while the next is made


def steps(
    method: str | Plan | None = None,
    world: str | None = None,
    *,
    run: str | Path | None = None,
    resume: str | Path | None = None,
    progress: Progress | None = None,
    from_scratch: bool = False,
    **choices: Any,
) -> Steps:
    """The same as `train`, a step at a time: `for step in panoply.steps("grpo"): print(step.metrics["reward"])`.

    The plan is checked at once. `step.stop()` finishes the run early; leaving the loop pauses it (see `Steps`).
    """
    return Steps(_course(method, world, run, resume, progress, from_scratch, choices))


def _course(
    method: str | Plan | None,
    world: str | None,
    run: str | Path | None,
    resume: str | Path | None,
    progress: Progress | None,
    from_scratch: bool,
    choices: dict[str, Any],
) -> Course:
    """What is asked for is checked here and now; the rest happens when the first step is asked for."""
    from panoply.progress import default

    watching = progress or default()
    if resume is not None:
        return _resume(Path(resume), watching)
    if method is None:
        raise PanoplyError("Name a method to train, or a run to resume.")
    if isinstance(method, Plan):
        if choices or from_scratch:
            raise PanoplyError("A plan is complete: make its choices with panoply.plan.")
        return _start(method, run, watching)
    for plugin in choices.get("plugins") or ():
        registry.load_plugin(plugin)
    choices = hub.fetched(choices, watching.say)
    if registry.is_recipe(method):
        return _train_recipe(method, world, run, watching, {**choices, "from_scratch": from_scratch})
    choices = _exact(choices, watching.say)
    if from_scratch:
        if choices.get("model") is not None:
            raise PanoplyError("--from-scratch makes the model to start from: leave --model out.")
        plan(method, world, **{**choices, "model": "fresh"})
        return _from_scratch(method, world, run, watching, choices)
    return _start(plan(method, world, **choices), run, watching)


def _start(made: Plan, folder: str | Path | None, progress: Progress) -> Course:
    """A new run of a plan."""
    _check_surroundings(made)

    def course() -> Course:
        return (yield from _train(made, Run.create(_rooted(made), folder), progress))

    return course()


def _check_surroundings(made: Plan) -> None:
    """What a plan needs of this machine: its model's folder and the libraries of its sinks."""
    from panoply.sinks import check_sinks

    check_sinks(made.options.sinks)
    world = made.world()
    kind_of(world).check_source(made.options.model, world)


def _rooted(made: Plan) -> Plan:
    """The plan with the folders it names as absolute paths, so that it can be resumed from anywhere."""
    paths = {
        name: os.path.abspath(source)
        for name in ("model", "reference")
        if os.path.isdir(source := getattr(made.options, name)) and source not in ("start", "fresh", "none")
    }
    return dataclasses.replace(made, options=dataclasses.replace(made.options, **paths))


def _train_recipe(
    name: str, world: str | None, folder: str | Path | None, progress: Progress, choices: Mapping[str, Any]
) -> Course:
    from panoply.loops.recipe import run_recipe

    entry = registry.find("recipe", name)
    for made in plan_recipe(name, world, **choices).values():
        _check_surroundings(made)
    shared = _for_all_stages(entry, world, choices)

    def stage(
        method: str | None = None,
        world: str | None = None,
        *,
        run: Path | None = None,
        resume: Path | None = None,
        from_scratch: bool = False,
        **asked: Any,
    ) -> Course:
        return _course(method, world, run, resume, progress, from_scratch, asked)

    def course() -> Course:
        at = Path(folder) if folder else fresh_folder([entry.name, shared["world"]])
        return (yield from run_recipe(entry, at, shared, stage))

    return course()


def _resume(folder: Path, progress: Progress) -> Course:
    from panoply.loops.recipe import stored_recipe

    recipe = stored_recipe(folder)
    if recipe is not None:
        name, world, choices = recipe
        return _train_recipe(name, world, folder, progress, choices)
    run = Run.open(folder)
    if run.status() == "finished":
        raise PanoplyError(f"The run {folder} is finished: there is nothing to resume.")
    made = run.plan()

    def course() -> Course:
        run.acquire()
        return (yield from _train(made, run, progress, new=False))

    return course()


def _train(made: Plan, run: Run, progress: Progress, new: bool = True) -> Course:
    """A run from where it stands to its end. One that is left on the way is saved first."""
    from panoply.loops.dataset import dataset
    from panoply.loops.job import Job
    from panoply.loops.learner import Diverged
    from panoply.loops.off_policy import off_policy
    from panoply.loops.on_policy import on_policy

    loops = {"on_policy": on_policy, "off_policy": off_policy, "dataset": dataset, "offline": dataset}
    mixed = made.method.regime == "offline" and "sample" in made.method.slots()
    job = None
    try:
        with memory_errors():
            job = Job(made, run, progress)
            job.begin()
            yield from job.paused_between(off_policy(job) if mixed else loops[made.method.regime](job))
            with job.at_work():
                job.finish()
    except Diverged as error:
        assert job is not None
        kept = job.save_last_good(str(error))
        raise PanoplyError(f"{error} {run.folder} holds the state of step {kept}.") from error
    except SystemExit as error:
        raise PanoplyError(
            f"The run was left by sys.exit({error.code!r}), which a plug-in or a world must have called. Go on with "
            f"panoply train --resume {run.folder}."
        ) from error
    except PanoplyError as error:
        if isinstance(error, Resumable):
            raise type(error)(f"{error} Go on with panoply train --resume {run.folder}.") from error
        if new:
            run.discard()
        raise
    except KeyboardInterrupt as stop:
        raise Stopped.to_go_on(f"go on with panoply train --resume {run.folder}", stop) from None
    except GeneratorExit:
        assert job is not None
        job.pause()
        raise
    finally:
        if job is not None:
            job.close()
        run.release()
    return Trained.of(run)


def _from_scratch(
    method: str, world: str | None, run: str | Path | None, progress: Progress, choices: Mapping[str, Any]
) -> Course:
    """Make the world's warm start, then train from it."""
    home = world or registry.find("method", method).world or "chain"
    model = yield from _warm_start(home, run, progress, choices)
    made = plan(method, world, **{**choices, "model": str(model)})
    return (yield from _start(made, run, progress))


def _warm_start(
    world: str, run: str | Path | None, progress: Progress, choices: Mapping[str, Any]
) -> Generator[Step, None, Path]:
    """Imitate the world's careless teacher with new weights; the run's last model is the warm start."""
    kept = {k: choices[k] for k in ("seed", "threads", "device", "plugins") if choices.get(k) is not None}
    settings = dict(getattr(registry.find("world", world).build, "imitation", {}))
    settings |= {k: v for k, v in (choices.get("settings") or {}).items() if k.startswith("world.")}
    made = plan(
        "sft", world, model="fresh", settings=settings, evaluate_every=0, checkpoint_every=500, **kept
    )
    progress.say(f"Imitating the teacher of {world} for {made.options.steps} steps to make the warm start.")
    done = yield from _start(made, Path(f"{run}-start") if run else None, progress)
    return last_model(done.run)


def last_model(run: str | Path) -> Path:
    """The model folder of a run's last checkpoint."""
    return take(run, "last").model
