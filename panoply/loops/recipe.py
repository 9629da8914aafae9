"""Running a recipe: its stages in order, each an ordinary run in a folder below the recipe's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panoply import trust
from panoply.checkpoint import clear_errors, remove_unfinished, write_atomically
from panoply.errors import PanoplyError
from panoply.files import brief, is_file, read_json, read_text
from panoply.given import FOLDER
from panoply.parts import Part
from panoply.recipe_plans import asked_of, chosen_recipe
from panoply.recipes import LAST, Recipe, Turn
from panoply.records import RecipeRecord
from panoply.run import RECIPE, Run
from panoply.stopping import Stopped
from panoply.until import Until
from panoply.which import take

if TYPE_CHECKING:
    from panoply.handle import Course
    from panoply.registry import Entry
    from panoply.training import Trained

Train = Callable[..., "Course"]
CarryOut = Callable[[Turn, dict[str, Any]], "Course"]
"""Makes the run of a stage, by what it is asked to do."""


def run_recipe(entry: Entry, folder: Path, choices: Mapping[str, Any], train: Train) -> Course:
    """Train every stage that is not finished yet; one that was interrupted goes on where it stopped.

    `choices` are the user's. Settings of the world or the run are for all stages; `STAGE.PATH` is for one. Where not
    even one stage could begin, no folder is left.
    """
    recipe = chosen_recipe(entry.build(), choices)
    made = _claim(folder, {"recipe": entry.id, "choices": dict(choices)})

    def carry_out(turn: Turn, asked: dict[str, Any]) -> Course:
        return run_stage(turn, folder / turn.folder, asked, train)

    try:
        return (yield from run_turns(recipe, choices, carry_out))
    except KeyboardInterrupt as stop:
        raise Stopped.to_go_on(f"go on with panoply train --resume {folder}", stop) from None
    except PanoplyError:
        if made and not any(folder.glob("*/run.json")):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def run_turns(recipe: Recipe, choices: Mapping[str, Any], carry_out: CarryOut) -> Course:
    """One stage after another, until the rounds are over; what came of the last that trained."""
    enough = Until.parse(recipe.until) if recipe.until else None
    done: dict[str, str] = {}
    result: Trained | None = None
    for turn in recipe.turns():
        found = yield from carry_out(turn, asked_of(turn, choices, done))
        done[turn.stage.name] = _left(turn, found.run.resolve())
        if turn.stage.method:
            done[LAST[1:]], result = done[turn.stage.name], found
        if enough and result and turn.number % len(recipe.stages) == 0:
            logged = Run.open(result.run).metrics()
            if enough.met(result.after, logged[-1] if logged else {}):
                break
    assert result is not None
    return result


def _left(turn: Turn, run: Path) -> str:
    """What later stages find under a stage's name: the folder of its data, or the weights that it ended with.

    Not its best weights by held-out success, which are meant where a person names a run: they may be those of step 0,
    and then all that the stage is there to teach would be dropped without a word.
    """
    return str(run if turn.stage.make else take(run, "last").model.parent)


def run_stage(turn: Turn, at: Path, asked: dict[str, Any], train: Train) -> Course:
    """The run of a stage in its folder, from where it stands."""
    from panoply.training import Trained

    if is_file(at / "run.json"):
        run = Run.open(at)
        return Trained.of(run) if run.status() == "finished" else (yield from train(resume=at))
    return (yield from train(turn.stage.method or asked.pop("make"), run=at, **asked))


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
