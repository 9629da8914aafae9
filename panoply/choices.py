"""What a user chooses, in words or values, becomes a plan: of a method, of a stage that makes data, or of a recipe."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from panoply import compose, extensions, registry, session
from panoply.errors import PanoplyError
from panoply.given import CHANGED, method_of, world_of
from panoply.own import in_words, is_data_file, judged_by, own_data
from panoply.parts import Part
from panoply.planning import Plan, make_plan, plan_data
from panoply.policies import hub
from panoply.regimes import REGIMES
from panoply.which import is_run, take

if TYPE_CHECKING:
    from panoply.recipe_plans import RecipePlan

SLOT_NAMES = tuple(
    dict.fromkeys(slot for name, regime in REGIMES.items() if name != "make" for slot in regime.slot_of)
)
"""The slots of all regimes: what may be borrowed by name."""


def plan(method: Any, world: Any = None, **choices: Any) -> Plan:
    """Resolve a method on a world (its home, or `chain`, where none is named) without running it.

    A method is a name, or a value such as `grpo().but(credit=group(scale="none"))`; a world a name or a value. Where a
    value is a registered method in some slot, that slot gets the world's preset as it would by name; the parts in which
    it differs are taken as they are. `choices` are slots (`credit="gigpo"`, or a part), `settings={"update.lr": 1e-4}`,
    `preset`, `plugins`, and run options (`seed`, `steps`, `minutes`, `model`, …). Of a run as `model` or `reference`
    the best checkpoint is meant, or `which="last"`, or that of a step, `which=40`. `reward_model` is a run of
    `reward-model`, or a folder that transformers opens as a sequence classifier: what it says is earned then.
    `data` and `reward` make a world of your own: a file FILE.jsonl, a list of rows or a Hugging Face `Dataset`; a
    function, `FILE.py:NAME`, several in a list, or `{function: weight}`.
    """
    choices = in_words(choices)
    if "slots" in choices:
        raise PanoplyError(
            "Parts are given by the name of their slot, such as credit=group(), and not as slots=…."
        )
    for plugin in choices.get("plugins") or ():
        extensions.load_plugin(plugin)
    if isinstance(method, Part) and method.info.slot == "make":
        world, of_world = world_of(world)
        choices["settings"] = {**of_world, **(choices.get("settings") or {})}
        world, choices = own_data(world, hub.known(exact(choices)))
        return plan_data(method, world or "chain", **choices)
    name, differing = method_of(method)
    world, of_world = world_of(world)
    world, choices = own_data(world, hub.known(exact(choices)))
    if world is None:
        world, of_world = world_of(registry.find("method", name).world or "chain")
    if of_world:
        choices["settings"] = {**of_world, **(choices.get("settings") or {})}
    given = {slot: held for slot in SLOT_NAMES if (held := choices.pop(slot, None)) is not None}
    if (folder := choices.pop("reward_model", None)) is not None:
        settings = choices.get("settings") or {}
        choices["settings"] = {**_judged_by(folder, name, {**differing, **given}, settings), **settings}
    mark = CHANGED if differing else ""
    made = make_plan(name, world, slots={**differing, **given}, mark=mark, **choices)
    with contextlib.suppress(session.Unwritable):  # bound to this process then, which is said at its start
        made = dataclasses.replace(made, plugins=(*made.plugins, *session.plugins(made)))
    return made


def _judged_by(
    folder: Any, name: str, slots: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings that a reward model stands for, in a method with slots and settings as they were chosen."""
    if settings.get("world.rewards") and "reward" not in slots:
        raise PanoplyError(
            "--reward-model and functions of yours are both rewards: add them up with --reward blend --set "
            "reward.names=reward,model."
        )
    resolved = compose.resolve(name, slots=slots)
    chosen = {path: value for path, value in settings.items() if path.split(".")[0] in ("reward", "credit")}
    method = functools.reduce(lambda made, item: compose.assign(made, *item), chosen.items(), resolved.method)
    return judged_by(str(folder), method, settings)


def exact(choices: Mapping[str, Any], say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
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
    if found.get("reward_model") is not None:
        from panoply.policies.folder import read_config

        judge = take(found["reward_model"])
        if judge.checkpoint is not None and is_run(found["reward_model"]):
            say(f"--reward-model is {judge}.")
        found["reward_model"] = os.path.abspath(judge.model)
        read_config(judge.model)
    return found


def plan_recipe(name: str, world: str | None = None, **choices: Any) -> RecipePlan:
    """The plans of a recipe's stages by name, all checked before any compute is spent."""
    from panoply.recipe_plans import chosen_recipe, plan_stages

    for plugin in choices.get("plugins") or ():
        extensions.load_plugin(plugin)
    entry = registry.find("recipe", name)
    shared = for_all_stages(entry, world, choices)
    return plan_stages(entry.id, chosen_recipe(entry.build(), shared), shared, plan)


def for_all_stages(entry: registry.Entry, world: str | None, choices: Mapping[str, Any]) -> dict[str, Any]:
    """What the user chose for a recipe, and where it runs."""
    if choices.get("reward_model") is not None:
        raise PanoplyError(
            "--reward-model is for a method, not for all stages of a recipe: name the stage's, as in --set "
            "STAGE.models.reward_model.folder=DIR."
        )
    choices = in_words(choices)
    home = "jsonl" if is_data_file(choices.get("data")) else entry.world or "chain"
    chosen = exact(choices).items()
    given = {k: v for k, v in chosen if v is not None and v is not False and v not in ((), [])}
    return {**given, "world": world or home}
