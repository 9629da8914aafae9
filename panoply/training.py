"""Training from Python, and on behalf of the command line: runs are made, gone on with, and ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panoply import devices, extensions, registry, session
from panoply.choices import exact, for_all_stages, plan, plan_recipe
from panoply.errors import LearnersDied, PanoplyError, Resumable, machine_errors
from panoply.given import adopt, changed_files, method_of, world_of
from panoply.handle import Course, Step, Steps
from panoply.kinds import kind_of
from panoply.own import functions_by_name, in_words
from panoply.planning import Options, Plan
from panoply.policies import hub
from panoply.report.shown import Shown
from panoply.rewards import here
from panoply.run import Run, fresh_folder
from panoply.stopping import Stopped, patient
from panoply.trust import trusting
from panoply.which import Which, take

if TYPE_CHECKING:
    from panoply.policies.control import ControlPolicy
    from panoply.policies.text import TextPolicy
    from panoply.progress import Progress


@dataclass(frozen=True, repr=False)
class Trained(Shown):
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
        told = float(result.get("seconds", 0.0)), result.get("fingerprint", "")
        return cls(run.folder, result["before"], result["after"], *told)

    def _page(self) -> str:
        from panoply.report.text import trained

        return trained(self)

    def __fspath__(self) -> str:
        """A result may be given wherever a run's folder is."""
        return str(self.run)

    def policy(self, which: Which = None) -> TextPolicy | ControlPolicy:
        """Of the checkpoint that was best on held-out problems, the `last`, or that of a step."""
        from panoply.api import load_policy

        return load_policy(self.run, which=which)


def train(
    method: Any = None,
    world: Any = None,
    *,
    run: str | Path | None = None,
    resume: str | Path | None = None,
    progress: Progress | None = None,
    on_step: Callable[[Step], None] | None = None,
    from_scratch: bool = False,
    trust: bool = False,
    **choices: Any,
) -> Trained:
    """Train a method, or all stages of a recipe, on a world, or go on with a stopped run (`resume=FOLDER`).

    Methods, worlds and choices are those of `plan`, or a plan as a whole. A resumed run takes no choices but what it
    cannot find by itself: `plugins`, and as `reward` functions that lived in the process that made it.

    progress       who is told how the run goes (`panoply.Progress`); where none is given, a live panel or lines
    on_step        called after every step with a `Step`: its metrics, its experience, and `stop()`
    from_scratch   remake the world's warm start first, by imitating its teacher, instead of using the shipped one
    trust          with `resume`, run the Python that a run of others names

    Ctrl-C stops the run after its step, which is saved, or at once the second time; either way it can be resumed.
    """
    with patient() as stop:
        with trusting(trust):
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
    method: Any = None,
    world: Any = None,
    *,
    run: str | Path | None = None,
    resume: str | Path | None = None,
    progress: Progress | None = None,
    from_scratch: bool = False,
    trust: bool = False,
    **choices: Any,
) -> Steps:
    """The same as `train`, a step at a time: `for step in panoply.steps("grpo"): print(step.metrics["reward"])`.

    The plan is checked at once. `step.stop()` finishes the run early; leaving the loop pauses it (see `Steps`).
    """
    with trusting(trust):
        return Steps(_course(method, world, run, resume, progress, from_scratch, choices))


def _course(
    method: Any,
    world: Any,
    run: str | Path | None,
    resume: str | Path | None,
    progress: Progress | None,
    from_scratch: bool,
    choices: dict[str, Any],
) -> Course:
    """What is asked for is checked here and now; the rest happens when the first step is asked for."""
    from panoply.progress import default

    extensions.check_not_loading()
    watching = progress or default()
    if resume is not None:
        return _resume(Path(resume), watching, choices)
    if method is None:
        raise PanoplyError("Name a method to train, or a run to resume.")
    if isinstance(method, Plan):
        if choices or from_scratch:
            raise PanoplyError("A plan is complete: make its choices with panoply.plan.")
        return _start(method, run, watching)
    choices = in_words(choices)
    for plugin in choices.get("plugins") or ():
        extensions.load_plugin(plugin)
    choices = hub.fetched(choices, watching.say)
    if isinstance(method, str) and registry.is_recipe(method):
        return _train_recipe(method, world, run, watching, {**choices, "from_scratch": from_scratch})
    choices = exact(choices, watching.say)
    if from_scratch:
        if choices.get("model") is not None:
            raise PanoplyError("--from-scratch makes the model to start from: leave --model out.")
        plan(method, world, **{**choices, "model": "fresh"})
        return _from_scratch(method, world, run, watching, choices)
    return _start(plan(method, world, **choices), run, watching)


def _start(made: Plan, folder: str | Path | None, progress: Progress) -> Course:
    """A new run of a plan."""
    check_surroundings(made)

    def course() -> Course:
        run = Run.create(_rooted(made), folder)
        for why in _bound_here(made):
            progress.say(why)
        return (yield from _train(run.made, run, progress))

    return course()


def set_up(made: Plan, folder: str | Path) -> Path:
    """The folder of a run that has not begun: `train(resume=…)` begins it, in this process or another."""
    run = Run.create(_rooted(made), folder)
    run.release()
    return run.folder


def _bound_here(made: Plan) -> Iterator[str]:
    """Why a run cannot be gone on with in another process, in a sentence each."""
    if (why := session.missing(made)) is not None:
        yield f"{why} Until then the run belongs to this process."
    for word in made.world_options.get("rewards", ()):
        if here.is_here(word):
            name = word.partition(":")[2]
            yield (
                f"The reward function '{name}' runs in this process: a resumed run needs it again, reward={name}, and "
                "memory and network have no limits."
            )


def check_surroundings(made: Plan) -> None:
    """What a plan needs of this machine: its device, its model's folder and the libraries of its sinks."""
    from panoply.sinks import check_sinks

    devices.check(made.options.device)
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
        check_surroundings(made)
    shared = for_all_stages(entry, world, choices)

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
        kept, _ = adopt(shared, at)
        return (yield from run_recipe(entry, at, kept, stage))

    return course()


def _resume(folder: Path, progress: Progress, choices: dict[str, Any]) -> Course:
    """`plugins` and `reward` hand over again what the run cannot find by itself; everything else is as planned.

    But for where the work is done: a run may go on with another number of learners, or on another cluster.
    """
    from panoply.loops.recipe import stored_recipe

    given = {name: value for name, value in choices.items() if value is not None}
    elsewhere = {name: given.pop(name) for name in Options.placed if name in given}
    for name in given.keys() - {"plugins", "reward"}:
        raise PanoplyError(f"A run is resumed as it was planned: leave {name} out.")
    for plugin in choices.get("plugins") or ():
        extensions.load_plugin(plugin)
    recipe = stored_recipe(folder)
    if recipe is not None:
        name, world, stored = recipe
        stored = {**stored, **elsewhere}
        return _train_recipe(name, world, folder, progress, stored)
    run = Run.open(folder)
    if run.status() == "finished":
        raise PanoplyError(f"The run {folder} is finished: there is nothing to resume.")
    if changed := changed_files(folder, run.config.get("given") or {}):
        raise PanoplyError(
            f"{folder / changed[0]}, which the run was made with, is gone or has been changed: restore it, or start a "
            "new run."
        )
    made = _placed(run.plan(), elsewhere)
    words = tuple(made.world_options.get("rewards", ()))
    here.hand_over(words, functions_by_name(choices.get("reward")))
    for word in filter(here.is_here, words):
        here.find(word)

    def course() -> Course:
        run.acquire()
        return (yield from _train(made, run, progress, new=False))

    return course()


def _placed(made: Plan, elsewhere: Mapping[str, Any]) -> Plan:
    """The same plan with its work done elsewhere."""
    from panoply.plan_checks import check_plan

    if not elsewhere:
        return made
    options = dataclasses.replace(made.options, **elsewhere)
    chosen = made.chosen - {f"run.{name}" for name in Options.placed}
    placed = dataclasses.replace(made, options=options, chosen=chosen | {f"run.{name}" for name in elsewhere})
    check_plan(placed)
    return placed


def _train(made: Plan, run: Run, progress: Progress, new: bool = True) -> Course:
    """A run from where it stands to its end. Where learners died it goes on from the newest checkpoint."""
    for left in range(made.options.restarts, -1, -1):
        try:
            return (yield from _attempt(made, run, progress, new))
        except LearnersDied as error:
            if not left:
                raise Resumable(f"{error} Go on with panoply train --resume {run.folder}.") from error
            progress.say(f"{error} Learners are started again from the newest checkpoint.")
            run.restarts += 1
            run.acquire()
    raise AssertionError


def _attempt(made: Plan, run: Run, progress: Progress, new: bool) -> Course:
    """A run as long as all lives. One that is left on the way is saved first."""
    from panoply.loops.job import Job
    from panoply.loops.mover import Diverged
    from panoply.loops.steps import steps

    if made.method.regime == "make":
        return (yield from _make(made, run, progress, new))
    job = None
    try:
        with machine_errors():
            job = Job(made, run, progress)
            job.begin()
            yield from job.paused_between(steps(job))
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
    except LearnersDied:
        raise
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


def _make(made: Plan, run: Run, progress: Progress, new: bool) -> Course:
    """A stage that makes data, which has no steps to look at."""
    from panoply.loops.making import make_data

    yield from ()
    try:
        make_data(made, run, progress)
    except KeyboardInterrupt as stop:
        raise Stopped.to_go_on(f"go on with panoply train --resume {run.folder}", stop) from None
    except PanoplyError:
        if new:
            run.discard()
        raise
    finally:
        run.release()
    return Trained.of(run)


def _from_scratch(
    method: Any, world: Any, run: str | Path | None, progress: Progress, choices: Mapping[str, Any]
) -> Course:
    """Make the world's warm start, then train from it."""
    home = world or registry.find("method", method_of(method)[0]).world or "chain"
    model = yield from _warm_start(home, run, progress, choices)
    made = plan(method, world, **{**choices, "model": str(model)})
    return (yield from _start(made, run, progress))


def _warm_start(
    world: Any, run: str | Path | None, progress: Progress, choices: Mapping[str, Any]
) -> Generator[Step, None, Path]:
    """Imitate the world's careless teacher with new weights; the run's last model is the warm start."""
    kept = {k: choices[k] for k in ("seed", "threads", "device", "plugins") if choices.get(k) is not None}
    name, of_world = world_of(world)
    settings = dict(getattr(registry.find("world", str(name)).build, "imitation", {})) | of_world
    settings |= {k: v for k, v in (choices.get("settings") or {}).items() if k.startswith("world.")}
    made = plan("sft", name, model="fresh", settings=settings, evaluate_every=0, checkpoint_every=500, **kept)
    progress.say(f"Imitating the teacher of {name} for {made.options.steps} steps to make the warm start.")
    done = yield from _start(made, Path(f"{run}-start") if run else None, progress)
    return last_model(done.run)


def last_model(run: str | Path) -> Path:
    """The model folder of a run's last checkpoint."""
    return take(run, "last").model
