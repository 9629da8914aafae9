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
from panoply.planning import MADE_WITH
from panoply.recipes import LAST, Recipe, Stage, Turn, is_stage
from panoply.records import RecipeRecord
from panoply.run import RECIPE, Run
from panoply.seeds import stable_hash
from panoply.stopping import Stopped
from panoply.until import Until

if TYPE_CHECKING:
    from panoply.handle import Course
    from panoply.planning import Plan
    from panoply.registry import Entry

Train = Callable[..., "Course"]
Place = Callable[[Turn, Mapping[str, Any]], Path]
"""Where the run of a stage lies, by what it is asked to do."""
WIDER = ("world", "run", "recipe")
FOR_ALL, OF_RECIPE = ("world.", "run."), "recipe."
"""What settings for all stages, and those of the recipe as a whole, begin with; others begin with the name of one."""


def run_recipe(entry: Entry, folder: Path, choices: Mapping[str, Any], train: Train) -> Course:
    """Train every stage that is not finished yet; one that was interrupted goes on where it stopped.

    `choices` are the user's. Settings of the world or the run are for all stages; `STAGE.PATH` is for one. Where not
    even one stage could begin, no folder is left.
    """
    recipe = _chosen(entry, choices)
    made = _claim(folder, {"recipe": entry.id, "choices": dict(choices)})
    try:
        return (yield from _run_turns(recipe, lambda turn, _: folder / turn.folder, choices, train))
    except KeyboardInterrupt as stop:
        raise Stopped.to_go_on(f"go on with panoply train --resume {folder}", stop) from None
    except PanoplyError:
        if made and not any(folder.glob("*/run.json")):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _run_turns(recipe: Recipe, place: Place, choices: Mapping[str, Any], train: Train) -> Course:
    """One stage after another, each where `place` puts it; what came of the last that trained."""
    from panoply.training import Trained

    enough = Until.parse(recipe.until) if recipe.until else None
    done: dict[str, str] = {}
    result: Trained | None = None
    for turn in recipe.turns():
        asked = asked_of(turn, choices, done)
        at = place(turn, asked)
        found = yield from _run_stage(turn.stage, at, asked, train)
        done[turn.stage.name] = str(at.resolve())
        if turn.stage.method:
            done[LAST[1:]], result = str(at.resolve()), found
        if enough and result and turn.number % len(recipe.stages) == 0:
            logged = Run.open(result.run).metrics()
            if enough.met(result.after, logged[-1] if logged else {}):
                break
    assert result is not None
    return result


def plan_stages(entry: Entry, choices: Mapping[str, Any], plan: Callable[..., Plan]) -> dict[str, Plan]:
    """The plan of every stage, each starting from what is known before any has run.

    A stage that starts from another is planned with the model that one starts from. What the second round changes is
    checked as well, and is that of all later ones.
    """
    recipe = _chosen(entry, choices)
    _check(recipe, dict(choices.get("settings") or {}))
    found: dict[str, Plan] = {}
    starts: dict[str, str] = {}
    for turn in recipe.turns():
        if turn.round > 2:
            break
        stage = turn.stage
        asked = asked_of(turn, choices, {name: f"@{name}" for name in starts})
        if asked.pop("from_scratch", False):
            asked["model"] = "fresh"
        for option in ("model", "reference"):
            if is_stage(asked.get(option)):
                asked[option] = starts[str(asked[option])[1:]]
        what = stage.method or asked.pop("make")
        try:
            made = plan(what, **asked)
        except PanoplyError as error:
            again = ", from the second round on" if turn.round > 1 else ""
            named = stage.method or (stage.make and stage.make.info.name)
            raise PanoplyError(f"Stage {stage.name} ({named}{again}): {error}") from error
        found.setdefault(stage.name, made)
        starts[stage.name] = made.options.model
        if stage.method:
            starts[LAST[1:]] = made.options.model
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


def _run_stage(stage: Stage, at: Path, asked: dict[str, Any], train: Train) -> Course:
    from panoply.training import Trained

    if is_file(at / "run.json"):
        run = Run.open(at)
        return Trained.of(run) if run.status() == "finished" else (yield from train(resume=at))
    return (yield from train(stage.method or asked.pop("make"), run=at, **asked))


def asked_of(turn: Turn, choices: Mapping[str, Any], earlier: Mapping[str, str]) -> dict[str, Any]:
    """What a stage is asked to do. Of the same thing the user's word for this stage counts, then his word for all
    stages, then the recipe's; but which stage starts from which (`@NAME`) is not changed for all of them at once.
    """
    stage = turn.stage
    if stage.make is not None:
        return _asked_to_make(turn, stage.make, choices, earlier)

    def placed(values: Mapping[str, Any]) -> dict[str, Any]:
        kept = {k: v for k, v in values.items() if v != LAST or LAST[1:] in earlier}
        return {k: earlier[v[1:]] if is_stage(v) else v for k, v in kept.items()}

    given = choices.get("settings") or {}
    shared = {k: v for k, v in given.items() if k.startswith(FOR_ALL)}
    own = {k.removeprefix(f"{stage.name}."): v for k, v in given.items() if k.startswith(f"{stage.name}.")}
    options = {k: v for k, v in choices.items() if k not in ("settings", "from_scratch")}
    if choices.get("from_scratch") and "model" not in placed(stage.options):
        options["from_scratch"] = True
    wired = {k: v for k, v in stage.options.items() if is_stage(v)}
    said = {k: v for k, v in stage.options.items() if k not in wired and f"run.{k}" not in shared}
    options = {**said, **options, **placed(wired)}
    options = {k: v for k, v in options.items() if f"run.{k}" not in own}
    settings = {**placed(stage.settings), **shared, **own}
    return _reseeded({**options, "settings": settings}, turn.round)


def _asked_to_make(
    turn: Turn, make: Part, choices: Mapping[str, Any], earlier: Mapping[str, str]
) -> dict[str, Any]:
    """Of a stage that makes data: its part, with folders in place of names, and the user's settings for it."""
    name, given = turn.stage.name, choices.get("settings") or {}
    own = {k.removeprefix(f"{name}."): v for k, v in given.items() if k.startswith(f"{name}.")}
    for path in own:
        if path.startswith("run.") and path[4:] not in MADE_WITH:
            raise PanoplyError(
                f"{name}.{path} has no effect: the stage {name} makes data, and trains nothing."
            )
    words = {k: v for k, v in make.settings().items() if is_stage(v)}
    placed = {
        k: "start" if v == LAST and LAST[1:] not in earlier else earlier[v[1:]] for k, v in words.items()
    }
    shared = {k: v for k, v in given.items() if k.startswith(FOR_ALL)}
    wanted = {
        k: choices[k]
        for k in (*MADE_WITH, "world", "plugins", "data", "reward")
        if choices.get(k) is not None
    }
    asked = {**wanted, "make": make.but(**placed), "settings": {**shared, **own}}
    return _reseeded(asked, turn.round)


def _reseeded(asked: dict[str, Any], number: int) -> dict[str, Any]:
    """From the second round on other tasks and draws: the same ones would teach what was learned already."""
    settings = asked["settings"]
    seed = settings.get("run.seed", asked.get("seed") or 0)
    if number == 1 or not str(seed).isdecimal():
        return asked
    fresh = stable_hash("round", int(seed), number) % 2**31
    if "run.seed" in settings:
        return {**asked, "settings": {**settings, "run.seed": fresh}}
    return {**asked, "seed": fresh}


def _chosen(entry: Entry, choices: Mapping[str, Any]) -> Recipe:
    """The recipe with as many rounds as the user wants (`recipe.rounds`)."""
    recipe: Recipe = entry.build()
    given = {
        k.removeprefix(OF_RECIPE): v
        for k, v in (choices.get("settings") or {}).items()
        if k.startswith(OF_RECIPE)
    }
    for name in given.keys() - {"rounds", "until"}:
        raise unknown("setting of a recipe", name, ("rounds", "until"))
    if "rounds" in given and str(given["rounds"]).isdecimal():
        given["rounds"] = int(given["rounds"])
    return recipe.but(**given) if given else recipe


def _check(recipe: Recipe, settings: Mapping[str, Any]) -> None:
    """Every setting begins with a stage, or is the world's or the run's, in all stages."""
    known = [stage.name for stage in recipe.stages]
    for path in settings:
        first, _, rest = path.partition(".")
        if first not in (*known, *WIDER):
            raise unknown("stage of this recipe", first, [*known, *WIDER])
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
