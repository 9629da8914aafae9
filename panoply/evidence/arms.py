"""What is compared, and what each may spend: the notation `fast=grpo:update.lr=1e-3` and `episodes=20k`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from panoply import api, registry
from panoply.errors import PanoplyError, unknown
from panoply.evidence.scores import UNITS
from panoply.given import built, method_of
from panoply.parts import Part, show_value
from panoply.planning import SIGNAL, Plan
from panoply.recipe_plans import WIDER, RecipePlan
from panoply.regimes import Method

POINTS = 10
"""How many times a run is evaluated on its way."""


@dataclass(frozen=True)
class Budget:
    """What every run may spend: so many episodes, decisions, decoding steps, steps or seconds; or so much of a signal
    of the world, whoever earned it in whatever episode (`signal:calls=20k`).

    Of a recipe, steps are those of all stages together, of which the last one takes what the others leave; or a budget
    is for one stage alone (`optimise.episodes=2k`), and the others are free.
    """

    unit: str
    amount: float
    stage: str = ""

    @classmethod
    def parse(cls, word: str) -> Budget:
        named, _, amount = word.partition("=")
        stage, _, unit = named.replace(".run.", ".").rpartition(".")
        if unit not in UNITS and not re.fullmatch(rf"{SIGNAL}\w+", unit):
            raise unknown("unit of a budget", unit, UNITS)
        try:
            found = float(amount.replace("_", "").replace("k", "e3").replace("M", "e6"))
        except ValueError:
            found = 0.0
        if not 0 < found < math.inf or (unit != "seconds" and found != int(found)):
            raise PanoplyError(f"A budget is a number, such as {unit}=1000 or {unit}=20k, not '{word}'.")
        return cls(unit, found, stage)

    def __str__(self) -> str:
        said = f"{self.amount:,.0f} {self.unit}" if self.unit != "seconds" else f"{self.amount:g} seconds"
        return f"{said} of {self.stage}" if self.stage else said

    def options(self, made: Plan) -> dict[str, Any]:
        """As options of a run. Steps are then at most as many as the budget allows."""
        if self.unit == "seconds":
            return {"minutes": self.amount / 60, "steps": 10**6}
        if self.unit == "steps":
            return {"steps": int(self.amount)}
        if not _collects(made):
            name = made.method_id.split("@")[0]
            raise PanoplyError(
                f"{name} learns from given data and collects no {self.unit}: compare at equal steps or time, with "
                "--budget steps=N or --budget seconds=N."
            )
        most = math.ceil(self.amount / (a_step(made, self.unit) or 1))
        if self.unit.startswith(SIGNAL):
            return {"signal": f"{self.unit.removeprefix(SIGNAL)}={self.amount:.0f}", "steps": max(1, most)}
        return {self.unit: int(self.amount), "steps": max(1, most)}

    def of_stages(self, made: RecipePlan) -> dict[str, dict[str, Any]]:
        """As options of a recipe's stages."""
        if self.stage:
            if self.stage not in dict(made.runs()):
                raise unknown(f"stage of {made.method_id} that trains", self.stage, dict(made.runs()))
            return {self.stage: self.options(made[self.stage])}
        if self.unit != "steps":
            raise PanoplyError(
                f"{made.method_id} is a recipe: its budget is in steps, of all stages together, or for one stage, such "
                f"as --budget {made.last}.{self.unit}={self.amount:.0f}."
            )
        others = sum(plan.options.steps for name, plan in made.runs() if name != made.last)
        rest = int(self.amount - others) // made.recipe.rounds
        if rest < 1:
            raise PanoplyError(
                f"The stages of {made.method_id} before {made.last} take {others} steps, and the budget is {self}: "
                f"raise it, or give it to one stage, such as --budget {made.last}.steps={self.amount:.0f}."
            )
        return {made.last: {"steps": rest}}


def _source(made: Plan) -> Part:
    """The part by which experience comes in: of several learners their game, or without one the first one's."""
    slots = made.method.slots()
    held = slots.get("sample") or slots.get("game") or slots.get("data")
    if held is None:
        return _source(next(iter(made.seats().values())))
    assert isinstance(held, Part)
    return held


def _collects(made: Plan) -> bool:
    """Whether a method's own policy acts: what it samples, or data that it plays itself."""
    held = _source(made)
    return held.info.slot in ("sample", "game") or "episodes" in held.info.gives


def a_step(made: Plan, unit: str) -> int | None:
    """How many episodes or decisions a step of a method collects at least; None where its settings do not say."""
    if not _collects(made) or unit == "decode_steps" or unit.startswith(SIGNAL):
        return None
    settings = _source(made).settings()
    if "batch" in settings:
        return int(settings["batch"])
    if {"envs", "length"} <= settings.keys():
        return int(settings["envs"] * settings["length"]) if unit == "decisions" else None
    if {"prompts", "group"} <= settings.keys():
        return int(settings["prompts"] * settings["group"])
    return None


@dataclass(frozen=True)
class Arm:
    """One of the things compared: a method, by name or as a value, with parts borrowed and settings changed."""

    label: str
    method: str | Method
    slots: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, word: str) -> Arm:
        """`grpo`, `grpo:update.lr=1e-3`, `grpo+credit=gigpo`, `fast=grpo:sample.group=16,update.lr=1e-3`."""
        label, named, spelled = word.partition("=")
        if not named or re.search(r"[:+,]", label):
            label, spelled = word, word
        method, *changes = re.split(r"[:+,](?=[a-z_]+(?:\.\w+)*=)", spelled)
        slots: dict[str, str] = {}
        settings: dict[str, str] = {}
        for change in changes:
            path, _, value = change.partition("=")
            if not value:
                raise PanoplyError(f"'{word}' changes {path} to nothing: write METHOD:PATH=VALUE.")
            (slots if path in api.SLOT_NAMES else settings)[path] = value
        if not method or re.search(r"[:,=]", method):
            raise PanoplyError(f"'{word}' is not a method with changes: write METHOD:PATH=VALUE,PATH=VALUE.")
        return cls(label, method, slots, settings)

    @classmethod
    def of(cls, given: Any) -> list[Arm]:
        """The arms of a word, of a method as a value, or of several under names of their own, `{"mine": …}`."""
        if isinstance(given, Mapping):
            found = [(str(label), arm) for label, one in given.items() for arm in cls.of(one)]
            return [dataclasses.replace(arm, label=label) for label, arm in found]
        if isinstance(given, str):
            return [cls.parse(given)]
        id, differing = method_of(given)
        name = id.split("@")[0]
        name = name if registry.find("method", name).id == id else id
        made = cls(name, given if differing else name)
        return [dataclasses.replace(made, label=made.spelled())]

    def spelled(self) -> str:
        """What `parse` reads, without a name of its own; of a value, how it differs from the registered method."""
        found = {**self.changed(), **self.slots, **self.settings}
        changes = [f"{path}={show_value(v)}" for path, v in found.items()]
        return ":".join([self.name, *([",".join(changes)] if changes else [])])

    @property
    def name(self) -> str:
        """Of the registered method, or of that which a value is nearest to."""
        return self.method if isinstance(self.method, str) else method_of(self.method)[0].split("@")[0]

    def changed(self) -> dict[str, str | None]:
        """Where a value differs from the registered method: other parts by name, and settings of the same ones."""
        if isinstance(self.method, str):
            return {}
        found = {path: mine for path, mine, _ in self.method.diff(built(self.name))}
        whole = {path for path in found if path in self.method.slot_of}
        return {
            path: mine for path, mine in found.items() if path in whole or path.split(".")[0] not in whole
        }

    def but(self, settings: Mapping[str, Any]) -> Arm:
        return Arm(self.label, self.method, self.slots, {**self.settings, **settings})

    @property
    def is_recipe(self) -> bool:
        return isinstance(self.method, str) and registry.is_recipe(self.method)

    def home(self) -> str:
        """The world where the method is at home, or `chain`."""
        return registry.find("recipe" if self.is_recipe else "method", self.name).world or "chain"

    def plan(
        self,
        world: str | None,
        seed: int,
        budget: Budget | None,
        *,
        greedy: bool = True,
        split: str = "test",
        **choices: Any,
    ) -> Plan | RecipePlan:
        """The plan of one run; refused here what cannot be run. `greedy` and `split` say how it is measured."""
        shared = dict(choices.pop("settings", None) or {})
        settings = {**shared, **self.settings}
        if self.is_recipe:
            return self._plan_stages(world, seed, budget, settings, greedy=greedy, split=split, **choices)
        given = {**self.slots, **{k: v for k, v in choices.items() if v is not None}}
        made = api.plan(self.method, world, seed=seed, threads=1, settings=settings, **given)
        spending = budget.options(made) if budget else {}
        settings = {**self._paced(made, budget, spending, greedy, split), **settings}
        return api.plan(self.method, world, seed=seed, threads=1, settings=settings, **{**given, **spending})

    def _plan_stages(
        self,
        world: str | None,
        seed: int,
        budget: Budget | None,
        settings: Mapping[str, Any],
        *,
        greedy: bool,
        split: str,
        **choices: Any,
    ) -> RecipePlan:
        """The same of a recipe. A setting that names no stage, such as `update.lr`, is of the one it ends with."""
        for slot in self.slots:
            raise PanoplyError(
                f"'{self.label}' is a recipe: say of which stage {slot} is, STAGE.{slot}=NAME."
            )
        asked: dict[str, Any] = {"seed": seed, "threads": 1, **choices}
        bare = api.plan_recipe(self.name, world, **asked)
        known = (*bare, *WIDER)
        given = {k if k.split(".")[0] in known else f"{bare.last}.{k}": v for k, v in settings.items()}
        made = api.plan_recipe(self.name, world, **asked, settings=given)
        spending = budget.of_stages(made) if budget else {}
        paced: dict[str, Any] = {}
        for name, plan in made.runs():
            spent = spending.get(name, {})
            counted = budget if budget and name in (budget.stage, made.last) else None
            of_stage = self._paced(plan, counted, spent, greedy, split, made.recipe.rounds)
            of_stage |= {f"run.{option}": value for option, value in spent.items()}
            paced |= {f"{name}.{path}": value for path, value in of_stage.items()}
        made = api.plan_recipe(self.name, world, **asked, settings={**paced, **given})
        return dataclasses.replace(made, counted=budget.stage if budget else "")

    def _paced(
        self,
        made: Plan,
        budget: Budget | None,
        spending: Mapping[str, Any],
        greedy: bool,
        split: str,
        rounds: int = 1,
    ) -> dict[str, Any]:
        """How a run is measured on its way, and what is kept of it."""
        paced: dict[str, Any] = {
            "run.evaluate_every": self._pace(made, budget, spending, rounds),
            "run.keep": 1,
            "run.checkpoint_every": 50,
        }
        if "judged" not in made.method.needs():
            paced |= {} if greedy else {"run.greedy": False}
            paced |= {} if split == "test" else {"run.split": split}
        return paced

    def _pace(self, made: Plan, budget: Budget | None, spending: Mapping[str, Any], rounds: int = 1) -> int:
        """After how many steps to evaluate, so that it is done some ten times, in all rounds together."""
        steps = int(spending.get("steps", made.options.steps)) * rounds
        if (
            budget and budget.unit == "decode_steps"
        ):  # a step takes as many as its longest answer has, or a window
            longest: int = getattr(made.world(), "max_tokens", 1)
            steps //= _source(made).settings().get("window", longest)
        elif budget and budget.unit.startswith(SIGNAL):  # an episode earns about one
            steps //= a_step(made, "episodes") or 1
        elif budget and budget.unit in ("episodes", "decisions") and a_step(made, budget.unit) is None:
            steps = made.options.steps
        elif budget and budget.unit == "seconds":
            steps = 20 * POINTS
        elif budget and budget.unit == "decisions" and a_step(made, "episodes"):
            world: Any = made.world()  # an episode has about as many
            steps //= getattr(world, "max_tokens", None) or getattr(world, "horizon", None) or 1
        return max(1, -(-steps // POINTS))


def default_budget(arm: Arm, world: str, **choices: Any) -> Budget:
    """What the first method collects in its own number of steps: episodes, decisions in control, or else its steps."""
    made = arm.plan(world, 0, None, **choices)
    if isinstance(made, RecipePlan):
        return Budget("steps", made.steps)
    for unit in ("episodes", "decisions"):
        if (each := a_step(made, unit)) is not None:
            return Budget(unit, made.options.steps * each)
    return Budget("steps", made.options.steps)
