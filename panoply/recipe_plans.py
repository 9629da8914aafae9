"""What the stages of a recipe are asked to do, round by round, checked before any compute is spent."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from panoply import registry
from panoply.errors import PanoplyError, unknown
from panoply.lora import Lora, check_same
from panoply.parts import Part, value_to_json
from panoply.plan_checks import no_adapters
from panoply.planning import MADE_WITH, Options, Plan
from panoply.recipes import LAST, Recipe, Turn, is_stage
from panoply.seeds import stable_hash

WIDER = ("world", "run", "lora", "recipe")
FOR_ALL, OF_RECIPE = ("world.", "run.", "lora."), "recipe."
"""What settings for all stages, and those of the recipe as a whole, begin with; others begin with the name of one."""
SAMPLING = ("samplers", "staleness", "inflight", "patience", "engine")
"""Options that only stages which sample are told of, where they are given for all."""
Adapters = tuple[str, int, Lora]
"""That a stage leaves: its name, their rank, and their settings."""


@dataclass(frozen=True)
class RecipePlan(Mapping[str, Plan]):
    """The plans of all stages by name, as they are in the first round. To those who compare it is like one plan.

    A stage that starts from another is planned with the model that one starts from.
    """

    method_id: str
    recipe: Recipe
    choices: Mapping[str, Any]
    """The user's, for all stages."""
    first: Mapping[str, Plan]
    later: Mapping[str, Plan]
    """As they are from the second round on."""
    counted: str = ""
    """The stage that a budget is for; none means all of them together."""

    def __getitem__(self, name: str) -> Plan:
        return self.first[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.first)

    def __len__(self) -> int:
        return len(self.first)

    @property
    def last(self) -> str:
        """The stage whose policy the recipe ends with."""
        return [s.name for s in self.recipe.stages if s.method][-1]

    @property
    def options(self) -> Options:
        return self.first[self.last].options

    @property
    def world_id(self) -> str:
        return self.first[self.last].world_id

    def world(self) -> Any:
        return self.first[self.last].world()

    def runs(self) -> Iterator[tuple[str, Plan]]:
        """Every stage that trains, in every round."""
        for turn in self.recipe.turns():
            if turn.stage.method:
                yield turn.stage.name, (self.first if turn.round == 1 else self.later)[turn.stage.name]

    @property
    def steps(self) -> int:
        """Of all stages and rounds, where none ends early."""
        return sum(made.options.steps for _, made in self.runs())

    def seeded(self, seed: int, world: bool = False) -> RecipePlan:
        """The same with another seed in all stages."""
        settings = {**(self.choices.get("settings") or {}), **({"world.seed": seed} if world else {})}
        return dataclasses.replace(
            self,
            choices={**self.choices, "seed": seed, "settings": settings},
            first={name: made.seeded(seed, world) for name, made in self.first.items()},
            later={name: made.seeded(round_seed(seed, 2), world) for name, made in self.later.items()},
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "recipe": {"id": self.method_id, **self.recipe.to_json()},
            "choices": value_to_json(dict(self.choices)),
            "counted": self.counted,
            "stages": {name: made.to_json() for name, made in self.first.items()},
            "later": {name: made.to_json() for name, made in self.later.items()},
        }

    def hash(self) -> str:
        """A short hash of everything that determines the numbers of all stages."""
        data = self.to_json()
        for made in (*data["stages"].values(), *data["later"].values()):
            del made["chosen"]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]


def plan_stages(id: str, recipe: Recipe, choices: Mapping[str, Any], plan: Callable[..., Plan]) -> RecipePlan:
    """The plan of every stage, of the first round and of the later ones, which are all like the second."""
    check_settings(recipe, dict(choices.get("settings") or {}))
    found: dict[str, Plan] = {}
    later: dict[str, Plan] = {}
    starts: dict[str, str] = {}
    left: dict[str, Adapters | None] = {}
    for turn in recipe.turns():
        if turn.round > 2:
            break
        stage = turn.stage
        asked = asked_of(turn, choices, {name: f"@{name}" for name in starts})
        begun = str(asked.get("model"))
        if asked.pop("from_scratch", False):
            asked["model"] = "fresh"
        for option in ("model", "reference"):
            if is_stage(asked.get(option)):
                asked[option] = starts[str(asked[option])[1:]]
        what = stage.method or asked.pop("make")
        try:
            made = plan(what, **asked)
            own = _adapters(stage.name, made, left.get(begun))
        except PanoplyError as error:
            again = ", from the second round on" if turn.round > 1 else ""
            named = stage.method or (stage.make and stage.make.info.name)
            raise PanoplyError(f"Stage {stage.name} ({named}{again}): {error}") from error
        (found if turn.round == 1 else later)[stage.name] = made
        starts[stage.name] = made.options.model
        left[f"@{stage.name}"] = own
        if stage.method:
            starts[LAST[1:]] = made.options.model
            left[LAST] = own
    _check_heard(id, recipe, choices)
    return RecipePlan(id, recipe, dict(choices), found, later)


def _adapters(name: str, made: Plan, earlier: Adapters | None) -> Adapters | None:
    """The adapters that a stage leaves; those of an earlier one are refused as others than they are."""
    rank, chosen = made.options.lora, {path[5:] for path in made.chosen if path.startswith("lora.")}
    if not rank or (earlier is None and _has_its_own(made)):
        return None
    if earlier is None:
        return name, rank, made.lora
    of, own_rank, own = earlier
    check_same(f"the adapter of stage {of}", (own_rank, own), (rank, made.lora), chosen)
    return earlier


def _has_its_own(made: Plan) -> bool:
    """Whether a stage starts from new weights, which are saved whole, or from an adapter, whose settings count."""
    from panoply.policies.adapter_config import is_adapter
    from panoply.policies.build import model_source

    with suppress(PanoplyError):  # a model that is not there yet
        folder = model_source(made.options.model, cast(Any, made.world()))
        return folder is None or is_adapter(folder)
    return False


def _check_heard(id: str, recipe: Recipe, choices: Mapping[str, Any]) -> None:
    """Refuse what would be told to stages that sample, or have adapters, where there are none."""
    usual, given = vars(Options()), choices.get("settings") or {}
    methods = [stage.method for stage in recipe.stages if stage.method]
    samples, adapts = any(map(_samples, methods)), any(map(_adapts, methods))
    for name in (*SAMPLING, "lora"):
        chosen = choices.get(name) not in (None, usual[name]) or f"run.{name}" in given
        if chosen and not (adapts if name == "lora" else samples):
            why = "trains a policy" if name == "lora" else "samples, all learn from data"
            raise PanoplyError(f"--{name} has no effect: no stage of {id} {why}.")


def _adapts(method: str) -> bool:
    """Whether a stage trains a policy, which may have adapters."""
    built: Any = registry.find("method", method).build()
    return not no_adapters(built)


def _samples(method: str) -> bool:
    return "sample" in registry.find("method", method).build().slots()


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
    options, shared = _heard(stage.method, options, shared)
    shared = {k: v for k, v in shared.items() if k.removeprefix("run.") not in placed(wired)}
    options = {**said, **options, **placed(wired)}
    options = {k: v for k, v in options.items() if f"run.{k}" not in own}
    settings = {**placed(stage.settings), **shared, **own}
    return _reseeded({**options, "settings": settings}, turn.round)


def _heard(
    method: str, options: dict[str, Any], shared: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is said for all stages, without what means nothing to this one: who learns from data has no samplers, and a
    judge, all of whose weights learn, no adapters."""
    idle: tuple[str, ...] = ()
    if not _samples(method):
        idle = SAMPLING if options.get("learners") or "run.learners" in shared else (*SAMPLING, "cluster")
    if not _adapts(method):
        idle += ("lora",)
        shared = {k: v for k, v in shared.items() if not k.startswith("lora.")}
    unheard = {*idle, *(f"run.{name}" for name in idle)}
    return (
        {k: v for k, v in options.items() if k not in unheard},
        {k: v for k, v in shared.items() if k not in unheard},
    )


def _asked_to_make(
    turn: Turn, make: Part, choices: Mapping[str, Any], earlier: Mapping[str, str]
) -> dict[str, Any]:
    """Of a stage that makes data: its part, with folders in place of names, and the user's settings for it."""
    name, given = turn.stage.name, choices.get("settings") or {}
    own = {k.removeprefix(f"{name}."): v for k, v in given.items() if k.startswith(f"{name}.")}
    for path in own:
        if path.startswith("make."):
            raise PanoplyError(f"Unknown setting '{name}.{path}'. Did you mean '{name}.{path[5:]}'?")
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
    fresh = round_seed(int(seed), number)
    if "run.seed" in settings:
        return {**asked, "settings": {**settings, "run.seed": fresh}}
    return {**asked, "seed": fresh}


def round_seed(seed: int, number: int) -> int:
    return seed if number == 1 else stable_hash("round", seed, number) % 2**31


def chosen_recipe(recipe: Recipe, choices: Mapping[str, Any]) -> Recipe:
    """The recipe with as many rounds as the user wants (`recipe.rounds`)."""
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


def check_settings(recipe: Recipe, settings: Mapping[str, Any]) -> None:
    """Every setting begins with a stage, or is the world's or the run's, in all stages."""
    known = [stage.name for stage in recipe.stages]
    for path in settings:
        first, _, rest = path.partition(".")
        if first not in (*known, *WIDER):
            raise unknown("stage of this recipe", first, [*known, *WIDER])
        if not rest:
            raise PanoplyError(f"Name a setting of '{first}', such as {known[0]}.run.steps=10.")
