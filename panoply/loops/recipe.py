"""Running a recipe: its stages in order, each an ordinary run in a folder below the recipe's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panoply.checkpoint import write_atomically
from panoply.errors import PanoplyError, unknown
from panoply.recipes import Recipe, Stage
from panoply.run import Run

if TYPE_CHECKING:
    from panoply.api import Trained
    from panoply.registry import Entry

CONFIG = "recipe.json"
Train = Callable[..., "Trained"]


def run_recipe(entry: Entry, folder: Path, choices: Mapping[str, Any], train: Train) -> Trained:
    """Train every stage that is not finished yet; one that was interrupted goes on where it stopped.

    `choices` are the user's. Settings of the world or the run are for all stages; `STAGE.PATH` is for one.
    """
    recipe: Recipe = entry.build()
    settings = dict(choices.get("settings") or {})
    _check(recipe, settings)
    _claim(folder, {"recipe": entry.id, "choices": dict(choices)})
    done: dict[str, Path] = {}
    result: Trained | None = None
    for number in range(recipe.rounds):
        for place, stage in enumerate(recipe.stages):
            at = folder / f"{number * len(recipe.stages) + place + 1:02d}-{stage.name}"
            result = _run_stage(stage, at, done, {**choices, "settings": _of_stage(stage, settings)}, train)
            done[stage.name] = at
    assert result is not None
    return result


def stored_recipe(folder: Path) -> tuple[str, str, dict[str, Any]] | None:
    """The recipe of a folder, its world and the user's choices; None where it is no recipe's."""
    if not (folder / CONFIG).is_file():
        return None
    try:
        stored = json.loads((folder / CONFIG).read_text())
        choices = dict(stored["choices"])
        return stored["recipe"], choices.pop("world"), choices
    except (ValueError, KeyError) as error:
        raise PanoplyError(f"{folder / CONFIG} cannot be read.") from error


def _run_stage(
    stage: Stage, at: Path, done: Mapping[str, Path], choices: Mapping[str, Any], train: Train
) -> Trained:
    from panoply.api import Trained

    if (at / "run.json").is_file():
        run = Run.open(at)
        return Trained.of(run) if run.status() == "finished" else train(resume=at)

    def placed(values: Mapping[str, Any]) -> dict[str, Any]:
        """`@NAME` becomes the folder of an earlier stage."""
        return {
            k: str(done[v[1:]].resolve()) if isinstance(v, str) and v.startswith("@") else v
            for k, v in values.items()
        }

    settings = {**placed(stage.settings), **choices["settings"]}
    own = {k: v for k, v in choices.items() if k not in ("settings", "from_scratch")}
    if choices.get("from_scratch") and "model" not in stage.options:
        own["from_scratch"] = True
    return train(stage.method, run=at, settings=settings, **{**own, **placed(stage.options)})


def _of_stage(stage: Stage, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for all stages, and this stage's own."""
    shared = {k: v for k, v in settings.items() if k.startswith(("world.", "run."))}
    prefix = f"{stage.name}."
    return shared | {k.removeprefix(prefix): v for k, v in settings.items() if k.startswith(prefix)}


def _check(recipe: Recipe, settings: Mapping[str, Any]) -> None:
    known = [stage.name for stage in recipe.stages]
    for path in settings:
        if path.split(".")[0] not in (*known, "world", "run"):
            raise unknown("stage of this recipe", path.split(".")[0], [*known, "world", "run"])


def _claim(folder: Path, config: Mapping[str, Any]) -> None:
    """Make the recipe's folder, or make sure that what is in it is this recipe."""
    text = json.dumps(config, indent=1, sort_keys=True)
    if (folder / CONFIG).is_file():
        if (folder / CONFIG).read_text() != text:
            raise PanoplyError(
                f"{folder} holds another recipe, or this one with other choices: name another folder."
            )
        return
    if folder.exists() and any(folder.iterdir()):
        raise PanoplyError(f"{folder} is not empty and holds no recipe: name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / CONFIG, text)
