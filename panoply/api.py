"""The whole of Panoply from Python: train, plan, evaluate, sample, export."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panoply import registry
from panoply.checkpoint import Checkpoint, clear_errors
from panoply.errors import PanoplyError, Resumable, unknown
from panoply.kinds import kind_of
from panoply.own import is_data_file, own_data
from panoply.planning import Options, Plan, make_plan, world_settings
from panoply.regimes import REGIMES
from panoply.run import Run, fresh_folder, model_folder

if TYPE_CHECKING:
    from panoply.evaluation.held_out import Evaluation
    from panoply.policies.control import ControlPolicy
    from panoply.policies.text import TextPolicy
    from panoply.progress import Progress
    from panoply.worlds.control.world import ControlWorld
    from panoply.worlds.world import TextWorld

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

    def policy(self) -> TextPolicy | ControlPolicy:
        return load_policy(self.run)


class Stopped(KeyboardInterrupt):
    """Ctrl-C during a run: says how to go on with it."""


def plan(method: str, world: str | None = None, **choices: Any) -> Plan:
    """Resolve a method on a world (its home, or `chain`, where none is named) without running it.

    `choices` are slots (`credit="gigpo"`), `settings={"update.lr": 1e-4}`, `preset`, `plugins`, and run options
    (`seed`, `steps`, `minutes`, `model`, …). `data="FILE.jsonl"` and `reward="FILE.py:NAME"` (or several, in a list)
    make a world of your own.
    """
    for plugin in choices.get("plugins") or ():
        registry.load_plugin(plugin)
    world, choices = own_data(world, choices)
    world = world or registry.find("method", method).world or "chain"
    slots = {name: choices.pop(name) for name in SLOT_NAMES if choices.get(name) is not None}
    return make_plan(method, world, slots=slots, **{k: v for k, v in choices.items() if k not in SLOT_NAMES})


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
    return {**{k: v for k, v in choices.items() if v not in (None, False, (), [])}, "world": world or home}


def train(
    method: str | Plan | None = None,
    world: str | None = None,
    *,
    run: str | Path | None = None,
    resume: str | Path | None = None,
    progress: Progress | None = None,
    from_scratch: bool = False,
    **choices: Any,
) -> Trained:
    """Train a method, or all stages of a recipe, on a world, or go on with a stopped run (`resume=FOLDER`).

    from_scratch   remake the world's warm start first, by imitating its teacher, instead of using the shipped one
    """
    from panoply.progress import default

    watching = progress or default()
    if resume is not None:
        return _resume(Path(resume), watching)
    if method is None:
        raise PanoplyError("Name a method to train, or a run to resume.")
    if isinstance(method, Plan):
        if choices or from_scratch:
            raise PanoplyError("A plan is complete: make its choices with panoply.plan.")
        return _train(method, _new_run(method, run), watching)
    for plugin in choices.get("plugins") or ():
        registry.load_plugin(plugin)
    if registry.is_recipe(method):
        return _train_recipe(method, world, run, watching, {**choices, "from_scratch": from_scratch})
    if from_scratch:
        if choices.get("model") is not None:
            raise PanoplyError("--from-scratch makes the model to start from: leave --model out.")
        plan(method, world, **{**choices, "model": "fresh"})
        home = world or registry.find("method", method).world or "chain"
        choices["model"] = str(_warm_start(home, run, watching, choices))
    made = plan(method, world, **choices)
    return _train(made, _new_run(made, run), watching)


def _new_run(made: Plan, folder: str | Path | None) -> Run:
    """A run folder, once what can be checked without one has been."""
    _check_surroundings(made)
    return Run.create(_rooted(made), folder)


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
) -> Trained:
    from panoply.loops.recipe import run_recipe

    entry = registry.find("recipe", name)
    for made in plan_recipe(name, world, **choices).values():
        _check_surroundings(made)
    shared = _for_all_stages(entry, world, choices)
    at = Path(folder) if folder else fresh_folder([entry.name, shared["world"]])
    return run_recipe(entry, at, shared, lambda *a, **k: train(*a, progress=progress, **k))


def _resume(folder: Path, progress: Progress) -> Trained:
    from panoply.loops.recipe import stored_recipe

    recipe = stored_recipe(folder)
    if recipe is not None:
        name, world, choices = recipe
        return _train_recipe(name, world, folder, progress, choices)
    run = Run.open(folder)
    if run.status() == "finished":
        raise PanoplyError(f"The run {folder} is finished: there is nothing to resume.")
    made = run.plan()
    run.acquire()
    return _train(made, run, progress, new=False)


def _train(made: Plan, run: Run, progress: Progress, new: bool = True) -> Trained:
    from panoply.loops.dataset import dataset
    from panoply.loops.job import Job
    from panoply.loops.learner import Diverged
    from panoply.loops.off_policy import off_policy
    from panoply.loops.on_policy import on_policy
    from panoply.threads import without_denormals

    loops = {"on_policy": on_policy, "off_policy": off_policy, "dataset": dataset, "offline": dataset}
    loop = off_policy if made.method.regime == "offline" and "sample" in made.method.slots() else None
    job = None
    try:
        job = Job(made, run, progress)
        job.begin()
        with without_denormals():
            (loop or loops[made.method.regime])(job)
            job.finish()
    except Diverged as error:
        assert job is not None
        kept = job.save_last_good(str(error))
        raise PanoplyError(f"{error} {run.folder} holds the state of step {kept}.") from error
    except PanoplyError as error:
        if isinstance(error, Resumable):
            raise type(error)(f"{error} Go on with panoply train --resume {run.folder}.") from error
        if new:
            run.discard()
        raise
    except KeyboardInterrupt:
        raise Stopped(f"stopped; go on with panoply train --resume {run.folder}") from None
    finally:
        if job is not None:
            job.close()
        run.release()
    return Trained.of(run)


def _warm_start(world: str, run: str | Path | None, progress: Progress, choices: Mapping[str, Any]) -> Path:
    """Imitate the world's careless teacher with new weights; the run's last model is the warm start."""
    kept = {k: choices[k] for k in ("seed", "threads", "device", "plugins") if choices.get(k) is not None}
    settings = dict(getattr(registry.find("world", world).build, "imitation", {}))
    settings |= {k: v for k, v in (choices.get("settings") or {}).items() if k.startswith("world.")}
    made = plan(
        "sft", world, model="fresh", settings=settings, evaluate_every=0, checkpoint_every=500, **kept
    )
    progress.say(f"Imitating the teacher of {world} for {made.options.steps} steps to make the warm start.")
    folder = Path(f"{run}-start") if run else None
    return last_model(_train(made, _new_run(made, folder), progress).run)


def last_model(run: str | Path) -> Path:
    """The model folder of a run's newest checkpoint."""
    latest = Run.open(run).latest()
    if latest is None:
        raise PanoplyError(f"The run {run} has no usable checkpoint yet.")
    return latest.model


def load_policy(
    source: str | Path, device: str = "auto", dtype: str = "float32"
) -> TextPolicy | ControlPolicy:
    """The policy of a run (its best checkpoint), a checkpoint, or a model folder."""
    from panoply.policies.build import open_folder
    from panoply.policies.value import ValueModel

    found = open_folder(model_folder(source), dtype, device)
    if isinstance(found, ValueModel):
        raise PanoplyError(f"{source} holds a reward model: it judges answers and writes none.")
    return found


def evaluate(
    source: str | Path,
    world: str | None = None,
    *,
    problems: int | None = None,
    attempts: int | None = None,
    ks: Sequence[int] = (),
    temperature: float = 1.0,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    watch: Callable[[int, int], None] = lambda done, total: None,
    device: str = "auto",
    dtype: str = "float32",
    threads: int = 0,
) -> Evaluation:
    """Held-out success of a run or model folder: greedy, sampled, and unbiased pass@k; in control, mean returns.

    problems, attempts   256 problems and 8 attempts at each (or the largest k); in control 100 starts and one
    ks         of pass@k; 1 and the number of attempts where none is given
    settings   of the world, such as `{"world.operations": 8}`, over those a run was trained with
    watch      is told how many of all answers have been written
    threads    of the CPU; 0 takes torch's own number
    """
    from panoply.threads import with_threads

    built = _world(source, world, settings or {})
    text = built.medium == "text"
    problems = (256 if text else 100) if problems is None else problems
    attempts = (max(8, *ks, 1) if text else 1) if attempts is None else attempts
    if ks and not text:
        raise PanoplyError(f"pass@k counts successes; {built.name} gives returns: leave k out.")
    ks = ks or sorted({1, attempts})
    _at_least("problems", problems, 1)
    _at_least("attempts", attempts, 1)
    _at_least("temperature", temperature, 0)
    for k in ks:
        _at_least("k", k, 1)
        if k > attempts:
            raise PanoplyError(f"pass@{k} needs at least {k} attempts a problem; there are {attempts}.")
    kind = kind_of(built)
    options = Options(seed=seed, device=device, dtype=dtype)  # type: ignore[arg-type]
    with with_threads(threads):
        policy = kind.open_policy(str(source), built, options, {})
        return kind.evaluate(
            built, policy, problems, attempts=attempts, ks=ks, temperature=temperature, seed=seed, watch=watch
        )


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise PanoplyError(f"{name} must be at least {least:g}, not {value:g}.")


def _world(source: str | Path, name: str | None, settings: Mapping[str, Any]) -> TextWorld | ControlWorld:
    """The world named, or the one a run was trained on, with settings over it."""
    for path in settings:
        if not path.startswith("world."):
            raise PanoplyError(
                f"An evaluation has only settings of the world, such as world.x=1, not '{path}'."
            )
    known: Mapping[str, Any] = {}
    if name is None:
        try:
            made = Run.open(source).plan()
        except PanoplyError as error:
            if os.path.exists(os.path.join(source, "run.json")):
                raise
            raise PanoplyError(
                f"{source} is not a run: name the world to evaluate it on with --world."
            ) from error
        name, known = made.world_id, made.world_options
    given = {path.removeprefix("world."): value for path, value in settings.items()}
    entry = registry.find("world", name)
    built: TextWorld | ControlWorld = entry.build(**{**known, **world_settings(entry, given)})
    return built


def sample(
    source: str | Path,
    prompt: str,
    *,
    n: int = 1,
    temperature: float = 1.0,
    max_tokens: int = 128,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "float32",
    threads: int = 0,
) -> list[str]:
    """Continuations of a prompt, as text."""
    from panoply.policies.text import TextPolicy
    from panoply.rollout.engine import Request, TextEngine
    from panoply.rollout.sampling import Sampling
    from panoply.seeds import stable_hash
    from panoply.threads import with_threads

    _at_least("n", n, 1)
    _at_least("temperature", temperature, 0)
    _at_least("max_tokens", max_tokens, 1)
    policy = load_policy(source, device, dtype)
    if not isinstance(policy, TextPolicy):
        raise PanoplyError(f"{source} acts and does not write: watch it with --video FILE.gif.")
    tokens = policy.tokenizer.encode_prompt(prompt)
    if not tokens:
        raise PanoplyError("The prompt is empty.")
    eos = policy.tokenizer.eos_id
    room = policy.context_length - len(tokens)
    if room < 1:
        raise PanoplyError(
            f"The prompt of {len(tokens)} tokens leaves no room in the model's context of {policy.context_length}."
        )
    sampling = Sampling(
        temperature=temperature,
        max_tokens=min(max_tokens, room),
        stop_tokens=() if eos is None else (eos,),
    )
    seeds = [stable_hash("sample", seed, i) for i in range(n)]
    with with_threads(threads):
        rollouts = TextEngine(policy.model, policy.tokenizer).generate([Request(tokens, seeds)], sampling)
    return [policy.tokenizer.decode(c) for c in rollouts.completions()]


def video(
    source: str | Path,
    file: str | Path,
    *,
    world: str | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> float:
    """Film one held-out episode of a control policy (its likeliest actions at temperature 0); what it earned.

    file   ends in .gif or .mp4
    """
    from panoply.policies.control import ControlPolicy
    from panoply.report.video import film, save
    from panoply.worlds.control.world import ControlWorld

    _at_least("temperature", temperature, 0)
    built = _world(source, world, settings or {})
    if not isinstance(built, ControlWorld):
        raise PanoplyError(f"{built.name} is a world of text: there is nothing to film.")
    policy = kind_of(built).open_policy(str(source), built, Options(seed=seed, device="cpu"), {})
    assert isinstance(policy, ControlPolicy)
    pictures, earned = film(built, policy, seed, temperature)
    save(pictures, file)
    return earned


def export(source: str | Path, folder: str | Path, *, which: str = "best") -> Path:
    """Copy a run's model (its `best` or `last` checkpoint) to a Hugging Face folder that transformers opens."""
    if which not in ("best", "last"):
        raise unknown("checkpoint", which, ("best", "last"))
    target = Path(folder)
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise PanoplyError(f"{target} is not empty: name another folder.")
    run = Run.open(source)
    found: Checkpoint | None = run.best() if which == "best" else run.latest()
    if found is None:
        raise PanoplyError(f"The run {source} has no usable checkpoint yet.")
    hidden = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with clear_errors(f"export to {target}"):
            shutil.copytree(found.model, hidden)
            os.replace(hidden, target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return target
