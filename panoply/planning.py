"""Plan: everything that determines a run, checked before any compute is spent."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import typing
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from panoply import compose, extensions, registry, selves
from panoply.effects import findings, inert
from panoply.errors import PanoplyError, unknown
from panoply.experience import COMMON_KEYS, KEY_UNITS, STREAMS, plural
from panoply.kinds import Kind, kind_of
from panoply.parts import Part, check_fields, show_value
from panoply.ranges import MOST_THREADS, SEED
from panoply.regimes import Make, Method
from panoply.report.shown import Shown
from panoply.seeds import stable_hash
from panoply.until import Until

if TYPE_CHECKING:
    from panoply.worlds.control.world import ControlWorld
    from panoply.worlds.world import TextWorld


ANSWER = "sample.max_tokens"
"""How long an answer may be. A world of one's own data, which has such a setting too, goes by this one."""
MOST_ROWS = 10**8
"""Episodes or decisions that one step may ask for."""
MOST_WEIGHTS = 10**10
"""Of a control policy's network."""


@dataclass(frozen=True)
class Options:
    """How a method is run. None of these changes what its gradient is."""

    seed: int = 0
    """Of everything drawn: tasks, samples, new weights."""
    steps: int = 200
    """Optimisation steps: batches of experience, or of data."""
    minutes: float | None = None
    """Stop early when this much time has passed. A run stopped by the clock cannot be repeated bit for bit."""
    episodes: int | None = None
    """Stop early when this many episodes have been collected, those that were dropped again included."""
    decisions: int | None = None
    """Stop early when this many decisions have been collected, those of continuations that only value included."""
    until: str | None = None
    """Stop early when a number is reached, such as success>0.9: one measured on held-out problems, or a metric."""
    model: str = "start"
    """`start` (the world's warm start), `fresh` (new weights), a folder, a run, or a model of the Hugging Face Hub."""
    lora: int = 0
    """Rank of low-rank adapters, through PEFT; 0 trains every weight."""
    reference: str = "start"
    """Where KL terms and preference losses pull to: `start` (a frozen copy), `none`, or a folder."""
    device: str = "auto"
    """`auto` (a GPU where there is one), `cpu`, `cuda`, `cuda:1`, …"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and arithmetic; the optimiser keeps float32 copies of narrower weights."""
    threads: int = 0
    """0 measures what is faster; the number used is stored, since results differ between thread counts."""
    micro_tokens: int = 16384
    """Context tokens of one forward and backward pass, fewer where a GPU has no room; more accumulate gradients."""
    recompute: Literal["auto", "always", "never"] = "auto"
    """Whether the inside of blocks is computed again in the backward pass and not kept: a third slower, in a fraction
    of the memory. `auto` does so where a sequence would not fit otherwise."""
    evaluate_every: int = 20
    """Steps between evaluations; 0 evaluates at the beginning and the end only."""
    held_out: int = 256
    """Problems never trained on, on which success is measured."""
    held_out_world: str | None = None
    """Another world to be judged in as well, never trained in: a name, with options as in chain:operations=8,slip=0."""
    split: Literal["test", "validation"] = "test"
    """Which of the problems never trained on: `validation` takes others than `test`, to choose settings by."""
    greedy: bool = True
    """Whether greedy answers are measured beside sampled ones."""
    checkpoint_every: int = 20
    """Steps between checkpoints, which a stopped run goes on from."""
    keep: int = 2
    """How many of the last checkpoints are kept, beside the best one."""
    episodes_every: int = 10
    """Steps between records of a few whole episodes; 0 records none."""
    sinks: tuple[str, ...] = ()
    """Where metrics go beside the run folder: `tensorboard`, `wandb`."""

    bounds: ClassVar[Mapping[str, str]] = {
        "seed": SEED,
        "steps": "at least 1",
        "minutes": "above 0",
        "episodes": "at least 1",
        "decisions": "at least 1",
        "lora": "from 0 to 65536",
        "threads": f"from 0 to {MOST_THREADS}",
        "micro_tokens": "at least 1",
        "evaluate_every": "at least 0",
        "held_out": "from 1 to 1000000",
        "checkpoint_every": "at least 1",
        "keep": "at least 1",
        "episodes_every": "at least 0",
    }

    def __post_init__(self) -> None:
        check_fields(self, "run")
        if self.until is not None:
            Until.parse(self.until)
        if not re.fullmatch(r"[a-z]+(:[0-9]{1,3})?", self.device):
            raise PanoplyError(f"run.device is a name such as cpu or cuda:1, not '{self.device[:40]}'.")


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """Everything that determines a run: the method with its parts, the world, and how it is run."""

    method_id: str
    method: Method
    world_id: str
    world_options: Mapping[str, Any]
    options: Options
    chosen: frozenset[str] = field(default_factory=frozenset)
    """Paths the user set, which must not be inert."""
    plugins: tuple[str, ...] = ()
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    """What the policy is made of, where a run makes a new one."""
    seat: str = ""
    """Which of several learners this is the plan of."""
    gifts: frozenset[str] = frozenset()
    """What their game gives beside what the world does, such as `signal:paid`."""

    def seats(self) -> dict[str, Plan]:
        """A plan for each of several learners, by name; the seeds of all but the first are made of their names."""
        found: dict[str, Plan] = {}
        game = self.method.slots().get("game")
        for name, method in self.method.seated().items():
            seed = stable_hash("seat", name, self.options.seed) % 2**31 if found else self.options.seed
            own = {path.removeprefix(f"{name}.") for path in self.chosen if path.startswith(f"{name}.")}
            shared = {path for path in self.chosen if path.startswith(("run.", "policy."))}
            found[name] = dataclasses.replace(
                self,
                method=method,
                options=dataclasses.replace(self.options, seed=seed),
                chosen=frozenset(own | shared),
                seat=name,
                gifts=game.info.gives if isinstance(game, Part) else frozenset(),
            )
        return found

    def world(self) -> TextWorld | ControlWorld:
        built: TextWorld | ControlWorld = registry.find("world", self.world_id).build(**self.world_options)
        return built

    def seeded(self, seed: int, world: bool = False) -> Plan:
        """The same with another seed, which is then also the world's where that makes its own data."""
        data = {**self.world_options, "seed": seed} if world else self.world_options
        return dataclasses.replace(
            self, options=dataclasses.replace(self.options, seed=seed), world_options=data
        )

    def measures(self) -> str:
        """What a run is judged by on held-out problems: success, return, rewards of one's own, or accuracy."""
        first = next(iter(self.method.seated().values()), self.method)
        return "accuracy" if "judged" in first.needs() else self.world().judged_by

    def _page(self) -> str:
        from panoply.report.text import planned

        return planned(self)

    def to_json(self) -> dict[str, Any]:
        return {
            "method": {"id": self.method_id, **self.method.to_json()},
            "world": {"id": self.world_id, **self.world_options},
            "policy": dict(self.policy_options),
            "run": dataclasses.asdict(self.options),
            "chosen": sorted(self.chosen),
            "plugins": list(self.plugins),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        for plugin in data.get("plugins", ()):
            extensions.load_plugin(plugin)
        method, world = dict(data["method"]), dict(data["world"])
        policy = {k: tuple(v) if isinstance(v, list) else v for k, v in data.get("policy", {}).items()}
        options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data["run"].items()}
        return cls(
            method.pop("id"),
            compose.method_from_json(method),
            world.pop("id"),
            world_settings(registry.find("world", data["world"]["id"]), world),
            Options(**options),
            frozenset(data.get("chosen", ())),
            tuple(data.get("plugins", ())),
            policy,
        )

    def to_yaml(self) -> str:
        import yaml

        return str(yaml.safe_dump(self.to_json(), sort_keys=False, allow_unicode=True))

    def hash(self) -> str:
        """A short hash of everything that determines the run's numbers."""
        data = self.to_json()
        del data["chosen"]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]


def make_plan(
    method: str,
    world: str = "chain",
    *,
    preset: str | None = None,
    slots: Mapping[str, compose.Filling] | None = None,
    mark: str = "",
    settings: Mapping[str, Any] | None = None,
    plugins: Sequence[str] = (),
    **options: Any,
) -> Plan:
    """Resolve names, presets and settings into a plan, or say in one sentence why it cannot be.

    `settings` are paths: `credit.scale`, `update.lr`, `world.operations`, `policy.hidden`, `run.held_out`. What a world
    asks for does not reach into slots that are given as parts. `mark` is put after the method's id.
    """
    for plugin in plugins:
        extensions.load_plugin(plugin)
    world_entry = registry.find("world", world)
    given = dict(settings or {})
    of_world = _split(given, "world.")
    of_run, of_policy = _split(given, "run."), _split(given, "policy.")
    entry = registry.find("method", method)
    if preset not in (None, "published", *entry.presets):
        raise unknown(f"preset of {entry.name}", str(preset), [*entry.presets, "published"])
    names = (preset,) if preset else _presets(world_entry)
    resolved = compose.resolve(method, preset=names, slots=slots, settings=given)
    asked = dict(getattr(world_entry.build, "settings", {}))
    asked |= getattr(world_entry.build(**world_settings(world_entry, of_world)), "asks", {})
    numbers = compose.preset_of(entry, names)
    if preset is None and not numbers:
        asked |= getattr(world_entry.build, "defaults", {})
    fixed = {slot for slot, source in (slots or {}).items() if not isinstance(source, str)}
    for path, value in _asked(asked, resolved.method).items():
        if path not in resolved.chosen and path.split(".")[0] not in fixed:
            resolved = dataclasses.replace(resolved, method=compose.assign(resolved.method, path, value))
    run_defaults = _split(dict(asked), "run.") | _split(dict(numbers), "run.")
    kind = kind_of(world_entry.build)
    asked_for = resolved.method.settings().get(ANSWER) if ANSWER in resolved.chosen else None
    if asked_for is not None and (limit := getattr(world_entry.build, "limit", "")):
        of_world = {limit: asked_for, **of_world}
    world_options = world_settings(world_entry, of_world)
    needs, built = resolved.method.needs(), world_entry.build(**world_options)
    form = kind.policy_form(needs, built)
    run_defaults |= kind.run_form(needs, built)
    policy_options = form | _split(dict(numbers), "policy.") | of_policy
    chosen_options = {k: v for k, v in options.items() if v is not None}
    plan = Plan(
        resolved.id + mark,
        resolved.method,
        world_entry.id,
        world_options,
        _options({**run_defaults, **of_run, **chosen_options}),
        resolved.chosen
        | {f"run.{k}" for k in (*chosen_options, *of_run)}
        | {f"policy.{k}" for k in of_policy},
        tuple(os.path.abspath(p) for p in plugins),
        kind.policy_settings(policy_options) if policy_options else {},
    )
    check_plan(plan)
    return plan


MADE_WITH = ("seed", "model", "device", "dtype", "threads")
"""The options that a stage has which makes data."""


def plan_data(
    part: Part,
    world: str,
    *,
    settings: Mapping[str, Any] | None = None,
    plugins: Sequence[str] = (),
    **options: Any,
) -> Plan:
    """The plan of a stage that makes data. Settings are those of its part, and of its world (`world.`)."""
    for plugin in plugins:
        extensions.load_plugin(plugin)
    entry, given = registry.find("world", world), dict(settings or {})
    of_world, of_run = _split(given, "world."), _split(given, "run.")
    method: Method = Make(part)
    for path, value in given.items():
        method = compose.assign(method, f"make.{path}", value)
    chosen = {k: v for k, v in {**of_run, **options}.items() if k in MADE_WITH and v is not None}
    plan = Plan(
        f"make.{part.info.name}",
        method,
        entry.id,
        world_settings(entry, of_world),
        _options({**chosen, "steps": 1}),
        frozenset(f"make.{path}" for path in given),
        tuple(os.path.abspath(p) for p in plugins),
    )
    check_plan(plan)
    return plan


def _split(settings: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Take out the settings below a prefix."""
    return {k.removeprefix(prefix): settings.pop(k) for k in list(settings) if k.startswith(prefix)}


def _presets(world: registry.Entry) -> tuple[str, ...]:
    """The presets that suit a world, best first: its own (`cartpole` for CartPole-v1), then that of its kind."""
    own = re.sub(r"-v\d+$", "", world.name).lower()
    return own, str(getattr(world.build, "preset", "published"))


def _asked(settings: Mapping[str, Any], method: Method) -> dict[str, Any]:
    """Settings a world asks for and the method has; the signal to reward also where a part wraps `signal`."""
    known, found = method.settings(), dict(settings)
    if "reward.name" in found:
        inner = [
            path
            for path, held in known.items()
            if held in ("signal", "verdict") and path.startswith("reward.")
        ]
        found |= {f"{path}.name": found["reward.name"] for path in inner}
    asked = {path: value for path, value in found.items() if path in known}
    for name, held in method.seated().items():
        asked |= {f"{name}.{path}": value for path, value in _asked(settings, held).items()}
    return asked


def world_settings(entry: registry.Entry, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a world as words or values, checked; only those that were given."""
    hints = typing.get_type_hints(entry.build)
    known = {f.name for f in dataclasses.fields(entry.build)}  # type: ignore[arg-type]
    found = {}
    for name, value in settings.items():
        if name not in known:
            raise unknown(f"setting of world {entry.name}", name, known)
        found[name] = registry.parse(f"world.{name}", value, hints[name]) if isinstance(value, str) else value
    built = entry.build(**found)
    return {name: getattr(built, name) for name in found}


def _options(settings: Mapping[str, Any]) -> Options:
    fields = {f.name: f for f in dataclasses.fields(Options)}
    hints = typing.get_type_hints(Options)
    found = {}
    for name, value in settings.items():
        if name not in fields:
            raise unknown("run setting", name, fields)
        found[name] = registry.parse(f"run.{name}", value, hints[name]) if isinstance(value, str) else value
    return Options(**found)


# ------------------------------------------------------------------ checks


def check_plan(plan: Plan) -> None:
    """Refuse what is impossible, and what the user set although it has no effect."""
    method, options = plan.method, plan.options
    for name, one in plan.seats().items():
        try:
            check_plan(one)
        except PanoplyError as error:
            raise PanoplyError(f"The seat '{name}': {error}") from error
    if method.seated():
        _check_own(plan)
        return
    _check_sizes(plan)
    snapshots = [one.name for one in selves.named(method.needs())]
    if "reference" in snapshots and options.reference == "none":
        wanting = [
            path
            for path, held in method.parts()
            if any(n.endswith(("@reference", ":reference")) for n in held.needs())
        ]
        raise PanoplyError(
            f"{wanting[0]} compares the policy with a reference model, and --reference none leaves none: "
            f"drop --reference none, or set {wanting[0]}=none."
        )
    if "reference" not in snapshots and "run.reference" in plan.chosen and options.reference != "none":
        raise PanoplyError(
            "--reference has no effect: no part of this method compares the policy with a reference."
        )
    world = plan.world()
    kind = kind_of(world)
    _check_selves(plan, kind)
    access, signals = world.access | {world.medium} | kind.affords(world), world.signals()
    for name, wanted in kind.policy_form(method.needs(), world).items():
        if (given := plan.policy_options.get(name, wanted)) != wanted:
            raise PanoplyError(f"policy.{name} cannot be {given}: {plan.method_id} needs it to be {wanted}.")
    if plan.policy_options.get("head") == "certain" and "policy:certain" not in method.needs():
        raise PanoplyError(
            f"policy.head cannot be certain: {plan.method_id} does not differentiate through a world, and without "
            "noise there is nothing else to learn from."
        )
    if getattr(world, "turn_cap", 0) == 1:
        access = access | {"one turn"}
    if plan.seat:
        access = access | {"game"}
        signals = signals and signals | {gift[7:] for gift in plan.gifts if gift.startswith("signal:")}
    judged = {f"signal:{c.settings().get('name')}" for c in getattr(method, "models", ())}
    judged |= {gift for _, held in method.parts() for gift in held.info.gives if gift.startswith("signal:")}
    for path, held in method.parts():
        spared = {"world:verify"} if held.needs() & judged else set()  # a reward model's word is enough
        for need in sorted(held.needs() - judged - spared):
            if need.startswith("signal:") and signals is not None and need[7:] not in signals:
                raise unknown(f"signal of {plan.world_id} for {path}", need[7:], signals)
            if need.startswith("world:") and need.removeprefix("world:") not in access:
                raise PanoplyError(_refusal(plan, f"{path} ({held.info.name})", need.removeprefix("world:")))
        for setting, reason in findings(held.info.impossible, held, method, world):
            value = f"{path}.{setting} cannot be {show_value(getattr(held, setting))}" if setting else ""
            raise PanoplyError(f"{value or f'{path} ({held.info.name}) cannot be used'}: {reason}.")
    _check_gifts(method, {f"column:{key}" for key in world.keys} | plan.gifts, access)
    if world.medium == "text":
        typing.cast("TextWorld", world).check(method.needs())
    _check_length(plan, world)
    _check_other_world(plan, world)
    for path, reason in inert(plan):
        if path in plan.chosen:
            raise PanoplyError(f"{path} has no effect: {reason}.")


def _check_own(plan: Plan) -> None:
    """Of a method of several learners, the parts that belong to none of them."""
    world = plan.world()
    for path, held in plan.method.slots().items():
        assert isinstance(held, Part)
        for setting, reason in findings(held.info.impossible, held, plan.method, world):
            raise PanoplyError(f"{path}.{setting} cannot be {show_value(getattr(held, setting))}: {reason}.")
        for need in sorted(n for n in held.needs() if n.startswith("world:")):
            if need.removeprefix("world:") not in world.access | {world.medium}:
                raise PanoplyError(_refusal(plan, f"{path} ({held.info.name})", need.removeprefix("world:")))


def _check_selves(plan: Plan, kind: Kind) -> None:
    """Refuse snapshots that would never be renewed in the run, and outputs that they do not have."""
    for path, held in plan.method.parts():
        for need in sorted(n for n in held.needs() if "@" in n and not n.startswith("divergence:")):
            output, _, name = need.partition("@")
            for one in selves.named([need]):
                if idle := one.idle(plan.options):
                    raise PanoplyError(f"{path} asks for {one.name}, which {idle}.")
            kind.check_output("logp" if need.startswith(selves.ACTS) else output, name)


def named_world(words: str) -> Any:
    """The world that words name, with options as in `chain:operations=8,levels=2,4`."""
    found = re.fullmatch(r"(.+?)(?::(\w+=.*))?", words, re.S)
    assert found is not None
    given = [word.partition("=") for word in re.split(r",(?=\w+=)", found[2])] if found[2] else []
    entry = registry.find("world", found[1])
    return entry.build(**world_settings(entry, {name: value for name, _, value in given}))


def _check_other_world(plan: Plan, world: Any) -> None:
    """The policy can act in the world that it is judged in as well, and that is another one."""
    words = plan.options.held_out_world
    if words is None:
        return
    other = named_world(words)
    if other == world:
        raise PanoplyError(f"run.held_out_world has no effect: {words} is the world of the run itself.")
    if "judged" in plan.method.needs():
        raise PanoplyError("run.held_out_world has no effect: a judge is trained, which does not act.")
    differs = "kind" if other.medium != world.medium else kind_of(world).differs(world, other)
    if differs:
        raise PanoplyError(
            f"run.held_out_world cannot be {words}: its {differs} is another than that of {world.name}, so the policy "
            "cannot act there."
        )


def _check_sizes(plan: Plan) -> None:
    """Refuse numbers that are sound each on its own and too many together, before memory is asked for."""
    for path, held in plan.method.parts():
        settings = held.settings()
        for names in (
            ("prompts", "group"),
            ("envs", "length"),
            ("batch", "n_step", "chunk"),
            ("batch", "answers"),
            ("prompts", "answers"),
        ):
            given = {n: v for n in names if isinstance(v := settings.get(n), int)}
            if math.prod(given.values()) > MOST_ROWS:
                listed = " × ".join(f"{path}.{n} {v:,}" for n, v in given.items())
                raise PanoplyError(
                    f"A step would hold {listed} rows, more than {MOST_ROWS:,}: make them fewer."
                )
    hidden = plan.policy_options.get("hidden") or ()
    weights = sum(a * b for a, b in itertools.pairwise(hidden))
    if weights > MOST_WEIGHTS:
        raise PanoplyError(
            f"policy.hidden makes {weights:,} weights, more than {MOST_WEIGHTS:,}: make it narrower."
        )


def _check_length(plan: Plan, world: Any) -> None:
    """An answer cannot be longer than its world lets it be."""
    asked, most = plan.method.settings().get(ANSWER), getattr(world, "max_tokens", None)
    if asked and most and asked > most:
        limit = getattr(world, "limit", "")
        hint = f": raise world.{limit}, or leave it out" if limit else ""
        raise PanoplyError(
            f"{ANSWER} cannot be {asked}: an answer in {plan.world_id} has at most {most} tokens{hint}."
        )


def _refusal(plan: Plan, who: str, need: str) -> str:
    """Why a part cannot work on a world, and with a file of the user's, what it would have to hold."""
    own = plan.world_id.startswith("jsonl@")
    if need == "game":
        return (
            f"{who} learns from what a game of several seats deals out, and {plan.method_id} has one learner."
        )
    if own and need == "pairs":
        return (
            f"{who} compares answers, and {plan.world_options['data']} has none to compare: its lines need 'chosen' "
            "and 'rejected'."
        )
    if own and need in ("teacher", "reference"):
        return (
            f"{who} learns from given answers, and {plan.world_options['data']} has none: its lines need 'completion' "
            "to be imitated, or 'chosen' and 'rejected' to be compared."
        )
    hint = " Name a reward function: --reward FILE.py:NAME." if need == "verify" else ""
    if need == "data" and "reset_to" in plan.world().access:
        hint = f" Data of it is a world of its own: --world logged:{plan.world_id.split('@')[0]}-mixed."
    return f"{who} needs a world with '{need}', and {plan.world_id} has none.{hint}"


def _check_gifts(method: Method, given: Set[str], access: Set[str]) -> None:
    """What one part needs of another must be given, and what is given for a term must have that term.

    given    by the world, or by a game of several learners
    access   what the world has, so that no part is named that cannot be used in it
    """
    given = given | {gift for _, held in method.parts() for gift in held.info.gives}
    for path, held in method.parts():
        needed = {need for need in held.needs() if need.startswith(("column:", "network:", "model:"))}
        for unit in held.units:
            if unit in ("pair", "list"):
                needed.add(plural(unit))
            elif unit in KEY_UNITS and unit not in COMMON_KEYS:
                needed.add(f"column:{unit}")
        for need in sorted(needed - given):
            raise PanoplyError(
                f"{path} ({held.info.name}) needs {_named(need)}{_givers(method, need, access)}."
            )
        for gift in held.info.gives:
            stream = gift.removeprefix("stream:")
            if gift.startswith("stream:") and not any(_takes(t, stream) for t in method.terms()):
                raise PanoplyError(
                    f"{path} ({held.info.name}) brings the stream '{stream}', and no term learns from it."
                )


def _takes(term: Part, stream: str) -> bool:
    """Whether a term's stream holds rows of another one."""
    return not set(STREAMS[term.info.stream]).isdisjoint(STREAMS[stream])


def _named(need: str) -> str:
    kind, _, name = need.partition(":")
    return f"the {kind} '{name}'" if name else kind


def _givers(method: Method, need: str, access: Set[str]) -> str:
    """Which parts for this method's slots would give it."""
    registry.entries()
    known = (held.info for slot in set(method.slot_of.values()) for held in registry.parts(slot).values())
    needs = {i.id: frozenset() if callable(i.needs) else i.needs for i in known if need in i.gives}
    having = {f"world:{name}" for name in access}
    found = sorted(
        id for id, needed in needs.items() if all(n in having for n in needed if n[:6] == "world:")
    )
    return f", which {' or '.join(found)} gives" if found else ""
