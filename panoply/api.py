"""The whole of Panoply from Python: train and plan (see training.py), and what is done with a policy afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from panoply import extensions, registry
from panoply.checkpoint import Checkpoint, clear_errors
from panoply.choices import SLOT_NAMES, plan, plan_recipe
from panoply.errors import PanoplyError, machine_errors
from panoply.files import copy_folder
from panoply.given import world_of
from panoply.kinds import is_control, is_text, kind_of, writes
from panoply.own import in_words, own_data, spoken_with
from panoply.parts import Part
from panoply.planning import Options, world_settings
from panoply.run import Run
from panoply.stopping import Stopped
from panoply.training import Trained, last_model, steps, train
from panoply.trust import Untrusted, trusting
from panoply.which import Which, take

Source = str | os.PathLike[str]
"""A run, what came of one, a checkpoint or a model folder."""

if TYPE_CHECKING:
    from panoply.evaluation.held_out import Evaluation
    from panoply.policies.control import ControlPolicy
    from panoply.policies.text import TextPolicy
    from panoply.rollout.playing import Episode
    from panoply.worlds.control.world import ControlWorld
    from panoply.worlds.world import TextWorld

__all__ = [
    "SLOT_NAMES",
    "Stopped",
    "Trained",
    "evaluate",
    "export",
    "judge",
    "last_model",
    "load_policy",
    "plan",
    "plan_recipe",
    "play",
    "sample",
    "steps",
    "train",
    "video",
]


def load_policy(
    source: Source, device: str = "auto", dtype: str = "float32", *, which: Which = None, context: int = 0
) -> TextPolicy | ControlPolicy:
    """The policy of a run, a checkpoint, or a model folder.

    Adapters that were trained over a base in few bits are over that again, which does not learn: `policy.apart()` is
    the same with whole weights, all of which may.

    which     checkpoint of a run: `best` on held-out problems (where none is named), `last`, or a step
    context   the longest sequence in tokens; 0 takes the run's `policy.context`, or what the model was made for
    """
    from panoply.policies.build import open_folder

    source = os.fspath(source)
    _at_least("context", context, 0)
    found = open_folder(take(source, which).model, dtype, device, context)
    if context and getattr(found, "medium", "") == "control":
        raise PanoplyError(f"context has no effect: {source} is a policy of control, which reads no text.")
    if not hasattr(found, "medium"):
        raise PanoplyError(f"{source} holds a reward model: it judges answers and writes none.")
    return cast("TextPolicy | ControlPolicy", found)


@machine_errors()
def evaluate(
    source: Source,
    world: Any = None,
    *,
    which: Which = None,
    data: Any = None,
    reward: Any = None,
    plugins: Sequence[str | Path] = (),
    problems: int | None = None,
    attempts: int | None = None,
    ks: Sequence[int] = (),
    temperature: float = 1.0,
    seed: int = 0,
    trust: bool = False,
    settings: Mapping[str, Any] | None = None,
    watch: Callable[[int, int], None] = lambda done, total: None,
    device: str = "auto",
    dtype: str = "float32",
    threads: int = 0,
    context: int = 0,
) -> Evaluation:
    """Held-out success of a run or model folder: greedy, sampled, and unbiased pass@k.

    In control they are mean returns, with reward functions of one's own mean rewards. Of a run that trained a reward
    model it is the accuracy on held-out pairs, with calibration, margins and the accuracy of each group.

    which      checkpoint of a run: `best` on held-out problems (where none is named), `last`, or a step
    world      a name or a value; a run's own where none is given
    data, reward   in place of a world: your own, as in `plan`; a reward alone judges answers to a run's own prompts
    problems, attempts   256 problems and 8 attempts at each (or the largest k); in control 100 starts and one
    ks         of pass@k; 1 and the number of attempts where none is given
    settings   of the world, such as `{"world.operations": 8}`, over those a run was trained with
    trust      run the Python that a run of others names (see Runs in docs/architecture.md)
    watch      is told how many of all answers have been written
    threads    of the CPU; 0 takes torch's own number
    context    the longest sequence in tokens, as in `load_policy`
    """
    from panoply.threads import with_threads

    for plugin in plugins:
        extensions.load_plugin(plugin)
    source = os.fspath(source)
    name, given = _own_world(source, world, data, reward)
    with trusting(trust):
        built = _world(source, name, {**given, **(settings or {})})
    if (judge := _judge_of(source)) is not None:
        if attempts is not None or ks or temperature != 1:
            raise PanoplyError(
                f"{source} is a reward model: attempts, k and temperature have no effect on pairs."
            )
        _at_least("problems", problems or 1, 1)
        taken = take(source, which)
        with with_threads(threads):
            pairs = _pairs(judge, built, str(taken.model), problems or 256, seed, watch)
        return dataclasses.replace(pairs, model=str(taken), step=taken.step)
    text = built.medium == "text"
    if context and not text:
        raise PanoplyError(f"context has no effect: {built.name} is no world of text.")
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
    kind, taken = kind_of(built), take(source, which)
    options = Options(seed=seed, device=device, dtype=dtype)  # type: ignore[arg-type]
    with with_threads(threads):
        policy = kind.open_policy(str(taken.model), built, options, _asked(context))
        found = kind.evaluate(
            built, policy, problems, attempts=attempts, ks=ks, temperature=temperature, seed=seed, watch=watch
        )
    return dataclasses.replace(found, model=str(taken), step=taken.step)


def _asked(context: int) -> dict[str, Any]:
    """A longest sequence as a setting of the policy."""
    _at_least("context", context, 0)
    return {"context": context} if context else {}


def judge(
    run: Source,
    by: str,
    *,
    plugins: Sequence[str | Path] = (),
    seed: int | None = None,
    trust: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """Judge a run by a registered protocol, such as `sharpe-ratio-at-k`: the table it gives.

    settings   of the protocol, such as `{"k": 4}`; `panoply show NAME` lists them
    trust      run the Python that a run of others names (see Runs in docs/architecture.md)
    """
    from panoply.evaluation import judged

    for plugin in plugins:
        extensions.load_plugin(plugin)
    judged.find(by)
    with trusting(trust):
        return judged.judge(Run.open(os.fspath(run)), by, settings, seed)


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise PanoplyError(f"{name} must be at least {least:g}, not {value:g}.")


def _judge_of(source: str) -> Part | None:
    """The data part of a run that trained a reward model: it makes the pairs that the model is judged by."""
    if not os.path.exists(os.path.join(source, "run.json")):
        return None
    method = Run.open(source).plan().method
    return cast(Part, method.slots()["data"]) if "judged" in method.needs() else None


def _pairs(
    data: Part, world: Any, folder: str, pairs: int, seed: int, watch: Callable[[int, int], None]
) -> Evaluation:
    from panoply.evaluation.pairs import evaluate_pairs
    from panoply.policies.value import ValueModel

    for need in sorted(data.needs()):
        if need.startswith("world:") and need.removeprefix("world:") not in world.access:
            raise PanoplyError(
                f"{data.info.name} needs a world with '{need[6:]}', and {world.name} has none."
            )
    model = ValueModel.load(folder)
    collect = kind_of(world).collector(world, model.trunk, seed, split="test")
    return evaluate_pairs(data, cast(Any, collect), model, pairs, watch)


def _own_world(source: str, world: Any, data: Any, reward: Any) -> tuple[str | None, dict[str, Any]]:
    """The name of a world that is handed over in Python, and its settings."""
    if data is None and reward is None:
        name, settings = world_of(world)
        return name, spoken_with(name, {"settings": settings}, source).get("settings", {})
    if data is None and os.path.exists(os.path.join(source, "run.json")):
        data = (Run.open(source).config["plan"].get("world") or {}).get("data")
    name, choices = own_data(world, in_words({"data": data, "reward": reward, "model": source}))
    return name, choices.get("settings", {})


def _world(source: str, name: str | None, settings: Mapping[str, Any]) -> TextWorld | ControlWorld:
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
            if os.path.exists(os.path.join(source, "run.json")) or not os.path.isdir(source):
                raise
            raise PanoplyError(
                f"{source} is not a run: name the world to evaluate it on with --world."
            ) from error
        name, known = made.world_id, made.world_options
    given = {path.removeprefix("world."): value for path, value in settings.items()}
    entry = registry.find("world", name)
    built: TextWorld | ControlWorld = entry.build(**{**known, **world_settings(entry, given)})
    return built


@machine_errors()
def sample(
    source: Source,
    prompt: str,
    *,
    which: Which = None,
    n: int = 1,
    temperature: float = 1.0,
    max_tokens: int = 128,
    stop: str | Sequence[str] = (),
    seed: int = 0,
    device: str = "auto",
    dtype: str = "float32",
    threads: int = 0,
    context: int = 0,
) -> list[str]:
    """Continuations of a prompt, as text; of a run on a world of several turns, all turns, as `play` gives them.

    What the world answered stands between ⟨ and ⟩ then.

    which     checkpoint of a run: `best` on held-out problems (where none is named), `last`, or a step
    stop      text that ends a continuation, and stays in it; none: what a run was trained with (`sample.stop`)
    context   the longest sequence in tokens, as in `load_policy`
    """
    from panoply.policies.rotary import wider
    from panoply.rollout.engine import Request
    from panoply.rollout.engines import engine_of
    from panoply.rollout.sampling import Sampling
    from panoply.seeds import stable_hash
    from panoply.threads import with_threads

    source = os.fspath(source)
    _at_least("n", n, 1)
    _at_least("temperature", temperature, 0)
    _at_least("max_tokens", max_tokens, 1)
    if has_turns(source):
        chosen: dict[str, Any] = {"n": n, "temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        chosen |= {"device": device, "dtype": dtype, "threads": threads, "context": context}
        chosen |= {"settings": {"world.stop": stops} if (stops := stops_of(source, stop)) else {}}
        return [str(episode) for episode in play(source, prompt, which=which, **chosen)]
    policy = load_policy(take(source, which).model, device, dtype, context=context)
    if not writes(policy):
        raise PanoplyError(f"{source} acts and does not write: watch it with --video FILE.gif.")
    tokens = policy.tokenizer.encode_prompt(prompt)
    if not tokens:
        raise PanoplyError("The prompt is empty.")
    eos = policy.tokenizer.eos_id
    room = policy.context_length - len(tokens)
    if room < 1:
        raise PanoplyError(
            f"The prompt of {len(tokens)} tokens leaves no room in the model's context of {policy.context_length}."
            f"{wider(policy.model.config)}"
        )
    sampling = Sampling(
        temperature=temperature,
        max_tokens=min(max_tokens, room),
        stop_tokens=() if eos is None else (eos,),
        stop_strings=stops_of(source, stop),
    )
    seeds = [stable_hash("sample", seed, i) for i in range(n)]
    with with_threads(threads):
        rollouts = engine_of(policy).generate([Request(tokens, seeds)], sampling)
    return [policy.tokenizer.decode(c) for c in rollouts.completions()]


def stops_of(source: Source, asked: str | Sequence[str] = ()) -> tuple[str, ...]:
    """Text that ends a turn: what is asked for, or what a run was trained with."""
    if asked:
        return (asked,) if isinstance(asked, str) else tuple(asked)
    if not os.path.isfile(os.path.join(source, "run.json")):
        return ()
    world: Mapping[str, Any] = Run.open(os.fspath(source)).config["plan"].get("world") or {}
    return tuple(world.get("stop", ()))


def has_turns(source: Source, single: bool = False) -> bool:
    """Whether this is a run on a world of several turns, or a `single` one, whose episodes can be played."""
    from panoply.kinds import is_text
    from panoply.rollout.playing import several_turns

    source = os.fspath(source)
    played = is_text if single else several_turns
    with contextlib.suppress(Untrusted):  # its model can be sampled from without its world
        return os.path.isfile(os.path.join(source, "run.json")) and played(_world(source, None, {}))
    return False


@machine_errors()
def play(
    source: Source,
    prompt: str | None = None,
    *,
    world: Any = None,
    which: Which = None,
    n: int = 1,
    temperature: float = 1.0,
    max_tokens: int = 2**20,
    seed: int = 0,
    trust: bool = False,
    settings: Mapping[str, Any] | None = None,
    device: str = "auto",
    dtype: str = "float32",
    threads: int = 0,
    context: int = 0,
) -> list[Episode]:
    """Episodes turn by turn: what a policy says, and what the world answers, tools included.

    prompt       how the problem begins; the first held-out one where none is given
    world        for a model folder; a run knows its own, and `settings` go over it
    max_tokens   of one turn; never more than the world allows
    context      the longest sequence in tokens, as in `load_policy`
    which        checkpoint of a run: `best` on held-out problems (where none is named), `last`, or a step
    """
    from panoply.rollout import playing
    from panoply.threads import with_threads

    _at_least("n", n, 1)
    _at_least("temperature", temperature, 0)
    _at_least("max_tokens", max_tokens, 1)
    source = os.fspath(source)
    name, given = world_of(world)
    with trusting(trust):
        built = _world(source, name, {**given, **(settings or {})})
    if not is_text(built):
        raise PanoplyError(f"{built.name} is no world of text: watch it with --video FILE.gif.")
    task = playing.problem(built, prompt)
    options = Options(seed=seed, device=device, dtype=dtype)  # type: ignore[arg-type]
    with with_threads(threads):
        policy = kind_of(built).open_policy(str(take(source, which).model), built, options, _asked(context))
        assert writes(policy)
        return playing.play(built, policy, task, n, temperature, seed, max_tokens)


def video(
    source: Source,
    file: str | Path,
    *,
    world: Any = None,
    which: Which = None,
    temperature: float = 0.0,
    seed: int = 0,
    trust: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> float:
    """Film one held-out episode of a control policy (its likeliest actions at temperature 0); what it earned.

    file    ends in .gif or .mp4
    which   checkpoint of a run: `best` on held-out problems (where none is named), `last`, or a step
    """
    from panoply.report.video import film, save

    _at_least("temperature", temperature, 0)
    source = os.fspath(source)
    name, given = world_of(world)
    with trusting(trust):
        built = _world(source, name, {**given, **(settings or {})})
    if not is_control(built):
        raise PanoplyError(f"{built.name} is a world of text: there is nothing to film.")
    policy = kind_of(built).open_policy(
        str(take(source, which).model), built, Options(seed=seed, device="cpu"), {}
    )
    pictures, earned = film(built, cast("ControlPolicy", policy), seed, temperature)
    save(pictures, file)
    return earned


def export(source: Source, folder: str | Path, *, which: Which = None, adapter: bool = False) -> Path:
    """Copy a run's model to a Hugging Face folder that transformers opens; adapters of LoRA are merged into it.

    Where they were trained over a base in few bits, they are merged into what these bits say, in float32: in fewer bits
    their changes would be rounded away.

    which     checkpoint: `best` on held-out problems (where none is named), `last`, or a step
    adapter   of a LoRA run, write the adapter alone, which PEFT opens on the model the run began with, whole
    """
    target, source = Path(folder), os.fspath(source)
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise PanoplyError(f"{target} is not empty: name another folder.")
    run, taken = Run.open(source), take(source, which)
    assert taken.checkpoint is not None
    if taken.step == 0 and which in (None, "best"):
        raise PanoplyError(
            f"The best checkpoint of {source} is {taken}: no later one that was evaluated did better. Export the last "
            "with --which last, or this one with --which 0."
        )
    from panoply.policies.adapter_config import is_adapter, name_for_others, settings_of
    from panoply.policies.build import open_folder

    copied = _adapter(run, taken.checkpoint) if adapter else taken.model
    hidden = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with clear_errors(f"export to {target}"):
            if is_adapter(copied) and not adapter:
                few = settings_of(copied)[1].base != "whole"
                open_folder(copied, "float32" if few else run.plan().options.dtype, "cpu").save(hidden)
            else:
                copy_folder(copied, hidden)
                if adapter:
                    name_for_others(hidden)
            os.replace(hidden, target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return target


def _adapter(run: Run, found: Checkpoint) -> Path:
    """The folder of a checkpoint's adapter, if it has one, and the model below it, if that is there, is its own."""
    made = run.plan()
    if not made.options.lora:
        raise PanoplyError(f"{run.folder} trained every weight, so it has no adapter: leave --adapter out.")
    if made.options.model == "fresh":
        raise PanoplyError(
            f"The adapter of {run.folder} is one on new weights, which no folder holds: leave --adapter out."
        )
    from panoply.policies.adapter_base import Under, check_base
    from panoply.policies.adapter_config import base_is_missing, model_under

    if not base_is_missing(found.model):
        check_base(found.model, Under.of(model_under(found.model)))
    return found.model
