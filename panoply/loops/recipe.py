"""Running a recipe: its stages in order, each an ordinary run in a folder below the recipe's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panoply.checkpoint import write_atomically
from panoply.errors import PanoplyError
from panoply.recipes import Recipe, Stage
from panoply.run import Run

if TYPE_CHECKING:
    from panoply.api import Trained

CONFIG = "recipe.json"
Train = Callable[..., "Trained"]


def run_recipe(recipe: Recipe, name: str, folder: Path, choices: Mapping[str, Any], train: Train) -> Trained:
    """Train every stage that is not finished yet; a stage that was interrupted goes on where it stopped.

    `choices` are those of the user, which apply to every stage: seed, world settings, threads, …
    """
    _claim(folder, {"recipe": name, **recipe.to_json(), "choices": _plain(choices)})
    done: dict[str, Path] = {}
    first: Trained | None = None
    result: Trained | None = None
    for number in range(recipe.rounds):
        for place, stage in enumerate(recipe.stages):
            at = folder / f"{number * len(recipe.stages) + place + 1:02d}-{stage.name}"
            result = _run_stage(stage, at, done, choices, train)
            first = first or result
            done[stage.name] = at
    assert result is not None
    assert first is not None
    return result


def _run_stage(
    stage: Stage, at: Path, done: Mapping[str, Path], choices: Mapping[str, Any], train: Train
) -> Trained:
    from panoply.api import trained

    if (at / "run.json").is_file():
        run = Run.open(at)
        if run.result() is not None and not (run.result() or {}).get("diverged"):
            return trained(run)
        return train(resume=at)

    def placed(values: Mapping[str, Any]) -> dict[str, Any]:
        """`@NAME` becomes the folder of an earlier stage."""
        return {
            k: str(done[v[1:]]) if isinstance(v, str) and v.startswith("@") else v for k, v in values.items()
        }

    shared = {k: v for k, v in choices.items() if k not in ("settings", "steps", "model", "reference")}
    settings = {**placed(stage.settings), **(choices.get("settings") or {})}
    return train(stage.method, run=at, settings=settings, **{**shared, **placed(stage.options)})


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


def _plain(choices: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v if isinstance(v, str | int | float | bool | None) else str(v) for k, v in choices.items()}
