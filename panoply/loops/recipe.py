"""Running a recipe: its stages in order, each an ordinary run in a folder below the recipe's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panoply import trust
from panoply.checkpoint import clear_errors, remove_unfinished, write_atomically
from panoply.errors import PanoplyError, unknown
from panoply.files import brief, is_file, read_json, read_text
from panoply.given import FOLDER
from panoply.parts import Part
from panoply.recipes import Recipe, Stage
from panoply.records import RecipeRecord
from panoply.run import RECIPE, Run
from panoply.stopping import Stopped

if TYPE_CHECKING:
    from panoply.handle import Course
    from panoply.planning import Plan
    from panoply.registry import Entry

Train = Callable[..., "Course"]
FOR_ALL = ("world.", "run.")
"""What settings for all stages begin with; others begin with the name of one."""


def run_recipe(entry: Entry, folder: Path, choices: Mapping[str, Any], train: Train) -> Course:
    """Train every stage that is not finished yet; one that was interrupted goes on where it stopped.

    `choices` are the user's. Settings of the world or the run are for all stages; `STAGE.PATH` is for one. Where not
    even one stage could begin, no folder is left.
    """
    recipe: Recipe = entry.build()
    made = _claim(folder, {"recipe": entry.id, "choices": dict(choices)})
    done: dict[str, Path] = {}
    result = None
    try:
        for number in range(recipe.rounds):
            for place, stage in enumerate(recipe.stages):
                at = folder / f"{number * len(recipe.stages) + place + 1:02d}-{stage.name}"
                result = yield from _run_stage(stage, at, done, choices, train)
                done[stage.name] = at
    except KeyboardInterrupt as stop:
        raise Stopped.to_go_on(f"go on with panoply train --resume {folder}", stop) from None
    except PanoplyError:
        if made and not any(folder.glob("*/run.json")):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    assert result is not None
    return result


def plan_stages(entry: Entry, choices: Mapping[str, Any], plan: Callable[..., Plan]) -> dict[str, Plan]:
    """The plan of every stage, each starting from what is known before any has run.

    A stage that starts from another is planned with the model that one starts from.
    """
    recipe: Recipe = entry.build()
    _check(recipe, dict(choices.get("settings") or {}))
    found: dict[str, Plan] = {}
    for stage in recipe.stages:
        asked = _asked(stage, choices, {name: f"@{name}" for name in found})
        if asked.pop("from_scratch", False):
            asked["model"] = "fresh"
        for option in ("model", "reference"):
            earlier = str(asked.get(option) or "")
            if earlier.startswith("@"):
                asked[option] = found[earlier[1:]].options.model
        try:
            found[stage.name] = plan(stage.method, **asked)
        except PanoplyError as error:
            raise PanoplyError(f"Stage {stage.name} ({stage.method}): {error}") from error
    return found


def stored_recipe(folder: Path) -> tuple[str, str, dict[str, Any]] | None:
    """The recipe of a folder, its world and the user's choices; None where it is no recipe's."""
    if not is_file(folder / RECIPE):
        return None
    stored = read_json(folder / RECIPE, RecipeRecord)
    trust.check(folder / RECIPE, stored["choices"])
    choices = dict(stored["choices"])
    world = choices.pop("world", None)
    if not isinstance(world, str):
        raise PanoplyError(f"{folder / RECIPE} cannot be used: choices.world is text, not {brief(world)}.")
    return stored["recipe"], world, choices


def _run_stage(
    stage: Stage, at: Path, done: Mapping[str, Path], choices: Mapping[str, Any], train: Train
) -> Course:
    from panoply.training import Trained

    if is_file(at / "run.json"):
        run = Run.open(at)
        return Trained.of(run) if run.status() == "finished" else (yield from train(resume=at))
    folders = {name: str(folder.resolve()) for name, folder in done.items()}
    return (yield from train(stage.method, run=at, **_asked(stage, choices, folders)))


def _asked(stage: Stage, choices: Mapping[str, Any], earlier: Mapping[str, str]) -> dict[str, Any]:
    """What a stage is asked to do. Of the same thing the user's word for this stage counts, then his word for all
    stages, then the recipe's; but which stage starts from which (`@NAME`) is not changed for all of them at once.
    """

    def placed(values: Mapping[str, Any]) -> dict[str, Any]:
        return {k: earlier[v[1:]] if _is_stage(v) else v for k, v in values.items()}

    given = choices.get("settings") or {}
    shared = {k: v for k, v in given.items() if k.startswith(FOR_ALL)}
    own = {k.removeprefix(f"{stage.name}."): v for k, v in given.items() if k.startswith(f"{stage.name}.")}
    options = {k: v for k, v in choices.items() if k not in ("settings", "from_scratch")}
    if choices.get("from_scratch") and "model" not in stage.options:
        options["from_scratch"] = True
    wired = {k: v for k, v in stage.options.items() if _is_stage(v)}
    said = {k: v for k, v in stage.options.items() if k not in wired and f"run.{k}" not in shared}
    options = {**said, **options, **placed(wired)}
    options = {k: v for k, v in options.items() if f"run.{k}" not in own}
    return {**options, "settings": {**placed(stage.settings), **shared, **own}}


def _is_stage(word: Any) -> bool:
    return isinstance(word, str) and word.startswith("@")


def _check(recipe: Recipe, settings: Mapping[str, Any]) -> None:
    """Every setting begins with a stage, or is the world's or the run's, in all stages."""
    known = [stage.name for stage in recipe.stages]
    for path in settings:
        first, _, rest = path.partition(".")
        if first not in (*known, "world", "run"):
            raise unknown("stage of this recipe", first, [*known, "world", "run"])
        if not rest:
            raise PanoplyError(f"Name a setting of '{first}', such as {known[0]}.run.steps=10.")


def _claim(folder: Path, config: Mapping[str, Any]) -> bool:
    """Make the recipe's folder, or make sure that what is in it is this recipe. Says whether it was made."""
    text = json.dumps(
        config, indent=1, sort_keys=True, default=lambda v: v.to_json() if isinstance(v, Part) else str(v)
    )
    remove_unfinished(folder, RECIPE)
    if is_file(folder / RECIPE):
        if read_text(folder / RECIPE) != text:
            raise PanoplyError(
                f"{folder} holds another recipe, or this one with other choices: name another folder."
            )
        return False
    if folder.exists() and any(path.name != FOLDER for path in folder.iterdir()):
        raise PanoplyError(f"{folder} is not empty and holds no recipe: name another folder.")
    with clear_errors(f"make the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RECIPE, text)
    return True
