"""Plan: everything that determines a run, checked before any compute is spent."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from panoply import compose, devices, extensions, registry
from panoply.errors import PanoplyError, unknown
from panoply.kinds import kind_of
from panoply.lora import Lora
from panoply.parts import Part, check_fields, show_value, types_of
from panoply.ranges import MOST_THREADS, SEED
from panoply.regimes import Make, Method
from panoply.report.shown import Shown
from panoply.seeds import stable_hash
from panoply.until import Until
from panoply.values import parse

if TYPE_CHECKING:
    from panoply.worlds.control.world import ControlWorld
    from panoply.worlds.world import TextWorld


Settings = typing.TypeVar("Settings", "Options", Lora)
ANSWER = "sample.max_tokens"
"""How long an answer may be. A world of one's own data, which has such a setting too, goes by this one."""


STOP = "sample.stop"
"""What ends a turn, which is the world's to say: in training, evaluations and `panoply sample` alike."""
COLLECTED = ("episodes", "decisions", "decode_steps")
"""What a run counts of what it collects, and may be bounded by; only text is decoded."""
SIGNAL = "signal:"
"""Before the name of a signal, where that is what is counted."""


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
    decode_steps: int | None = None
    """Stop early when so many tokens were decoded one after another, the longest answer of every batch. Text alone."""
    signal: str | None = None
    """Stop early when a signal of the world has come to so much in all, such as calls=20000. Text alone."""
    until: str | None = None
    """Stop early when a number is reached, such as success>0.9: one measured on held-out problems, or a metric."""
    model: str = "start"
    """`start` (the world's warm start), `fresh` (new weights), a folder, a run, or a model of the Hugging Face Hub."""
    lora: int = 0
    """Rank of low-rank adapters, which alone learn then; 0 trains every weight."""
    reference: str = "start"
    """Where KL terms and preference losses pull to: `start` (a frozen copy), `none`, or a folder."""
    device: str = "auto"
    """`auto` (a GPU where there is one), `cpu`, `cuda`, `cuda:1`, …"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and arithmetic; the optimiser keeps float32 copies of narrower weights."""
    masters: bool = True
    """Whether bfloat16 weights have float32 copies. Without, they take a third of the memory, and a step rounds each up
    or down by chance, right on average."""
    threads: int = 0
    """0 measures what is faster, and takes 1 beside a GPU; the number used is stored, since results differ between
    thread counts."""
    micro_tokens: int = 0
    """Context tokens of one forward and backward pass, fewer where a GPU has no room; more accumulate gradients. 0
    takes what keeps a device busy: 9,216 on a GPU, 12,288 with adapters, 16,384 on a CPU."""
    recompute: Literal["auto", "always", "never"] = "auto"
    """Whether the inside of blocks is computed again in the backward pass and not kept: a third slower, in a fraction
    of the memory. `auto` does so where a sequence would not fit otherwise. Not in models that transformers runs."""
    offload: Literal["none", "activations"] = "none"
    """`activations` waits in host memory for the backward pass: several times slower, and exactly the same gradient."""
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
    learners: int = 0
    """Processes that make the passes of an update, each a share; 0 leaves them to this one."""
    samplers: int = 0
    """Processes that play episodes, each some; 0 leaves them to this one."""
    cluster: str = "local"
    """Where those processes are: `local` (Ray is started here), `auto` (the Ray cluster this machine is in), an address
    ray://HOST:PORT, or `threads` of this process, for breakpoints."""
    engine: Literal["native", "vllm"] = "native"
    """Who samples text: this library, or vLLM."""
    staleness: int = 0
    """How many steps older than those that learn the weights are that sample: so many batches are sampled ahead."""
    inflight: bool = False
    """Whether samplers take new weights in the midst of answers; `staleness` is then the most and not the rule."""
    layout: Literal["auto", "whole", "sharded"] = "auto"
    """How learners hold the model: `whole` weights each and pieces of what the optimiser keeps, or pieces of all."""
    restarts: int = 3
    """How often learners that died are started again, from the newest checkpoint."""
    patience: float = 600.0
    """Seconds after which a sampler that has not answered is held to hang, and another is asked."""

    placed: ClassVar[tuple[str, ...]] = ("learners", "samplers", "cluster", "layout", "restarts", "patience")
    # options that say where a run computes and not what: they are not part of a plan's hash
    spread: ClassVar[tuple[str, ...]] = (*placed, "engine", "staleness", "inflight")
    # all that only concern a run of several processes

    bounds: ClassVar[Mapping[str, str]] = {
        "seed": SEED,
        "steps": "at least 1",
        "minutes": "above 0",
        "episodes": "at least 1",
        "decisions": "at least 1",
        "decode_steps": "at least 1",
        "lora": "from 0 to 65536",
        "threads": f"from 0 to {MOST_THREADS}",
        "micro_tokens": "at least 0",
        "evaluate_every": "at least 0",
        "held_out": "from 1 to 1000000",
        "checkpoint_every": "at least 1",
        "keep": "at least 1",
        "episodes_every": "at least 0",
        "learners": "from 0 to 4096",
        "samplers": "from 0 to 4096",
        "staleness": "from 0 to 64",
        "restarts": "at least 0",
        "patience": "above 0",
    }

    def __post_init__(self) -> None:
        check_fields(self, "run")
        if self.until is not None:
            Until.parse(self.until)
        if self.signal is not None and not re.fullmatch(r"\w+=0*[1-9][0-9]{0,14}", self.signal):
            raise PanoplyError(
                f"run.signal is a name and a whole number, such as calls=20000, not '{self.signal[:40]}'."
            )
        devices.check_name(self.device)
        if not re.fullmatch(r"local|auto|threads|ray://[^\s/]+:[0-9]{1,5}", self.cluster):
            raise PanoplyError(
                "run.cluster is local, auto, threads or an address such as ray://head:10001, not "
                f"'{self.cluster[:40]}'."
            )

    def is_spread(self) -> bool:
        """Whether a run has more processes than this one, or another engine."""
        return bool(self.learners or self.samplers) or self.engine != "native"

    def to_json(self) -> dict[str, Any]:
        """All of them, but of those of a run that is spread only what was changed."""
        usual = {f.name: f.default for f in dataclasses.fields(self) if f.name in self.spread}
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in usual or v != usual[k]}

    def counted(self) -> str | None:
        """The signal that is counted, where that bounds the run."""
        return None if self.signal is None else self.signal.partition("=")[0]

    def budget(self) -> dict[str, int]:
        """How much of what may be collected, where it is bounded."""
        found = {of: int(most) for of in COLLECTED if (most := getattr(self, of))}
        if self.signal is not None:
            name, _, most = self.signal.partition("=")
            found[SIGNAL + name] = int(most)
        return found


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
    lora: Lora = field(default_factory=Lora)
    """What adapters are made of, beside their rank (`options.lora`)."""

    def seats(self) -> dict[str, Plan]:
        """A plan for each of several learners, by name; the seeds of all but the first are made of their names."""
        found: dict[str, Plan] = {}
        game = self.method.slots().get("game")
        for name, method in self.method.seated().items():
            seed = stable_hash("seat", name, self.options.seed) % 2**31 if found else self.options.seed
            own = {path.removeprefix(f"{name}.") for path in self.chosen if path.startswith(f"{name}.")}
            shared = {path for path in self.chosen if path.startswith(("run.", "policy.", "lora."))}
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

    def adapters(self) -> Lora:
        """What adapters are made of where a run begins: of saved ones that go on, their own settings."""
        if not self.options.lora:
            return self.lora
        world = self.world()
        return kind_of(world).adapted(self.options.model, world, self.options.lora, self.lora).settings

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
            "run": self.options.to_json(),
            **({"lora": dataclasses.asdict(self.lora)} if self.options.lora else {}),
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
            lora=_fields(Lora, "lora", data.get("lora", {})),
        )

    def to_yaml(self) -> str:
        import yaml

        return str(yaml.safe_dump(self.to_json(), sort_keys=False, allow_unicode=True))

    def hash(self) -> str:
        """A short hash of everything that determines the run's numbers."""
        data = self.to_json()
        del data["chosen"]
        data["run"] = {k: v for k, v in data["run"].items() if k not in Options.placed}
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

    `settings` are paths: `credit.scale`, `update.lr`, `world.operations`, `policy.hidden`, `lora.alpha`, `run.seed`.
    What a world asks for does not reach into slots that are given as parts. `mark` is put after the method's id.
    """
    for plugin in plugins:
        extensions.load_plugin(plugin)
    world_entry = registry.find("world", world)
    given = dict(settings or {})
    of_world = _split(given, "world.")
    of_run, of_policy, of_lora = (_split(given, prefix) for prefix in ("run.", "policy.", "lora."))
    entry = registry.find("method", method)
    of_world |= _stop(given, of_world, entry, world_entry)
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
            made = compose.assign(resolved.method, path, value)
            for inside in [p for p in given if p.startswith(f"{path}.")]:  # of a part that was put in
                made = compose.assign(made, inside, given[inside])
            resolved = dataclasses.replace(resolved, method=made)
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
    _check_twice(chosen_options, of_run)
    plan = Plan(
        resolved.id + mark,
        resolved.method,
        world_entry.id,
        world_options,
        _fields(Options, "run", {**run_defaults, **of_run, **chosen_options}),
        resolved.chosen
        | {f"run.{k}" for k in (*chosen_options, *of_run)}
        | {f"policy.{k}" for k in of_policy}
        | {f"lora.{k}" for k in of_lora},
        tuple(os.path.abspath(p) for p in plugins),
        kind.policy_settings(policy_options) if policy_options else {},
        lora=_fields(Lora, "lora", of_lora),
    )
    from panoply.plan_checks import check_plan

    check_plan(plan)
    return plan


def _check_twice(options: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse an option that a flag and a setting give different values."""
    for name in sorted(options.keys() & settings.keys()):
        one, two = (
            getattr(_fields(Options, "run", {name: given[name]}), name) for given in (options, settings)
        )
        if one != two:
            raise PanoplyError(f"run.{name} is given twice, as {show_value(one)} and as {show_value(two)}.")


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
        _fields(Options, "run", {**chosen, "steps": 1}),
        frozenset(f"make.{path}" for path in given),
        tuple(os.path.abspath(p) for p in plugins),
    )
    from panoply.plan_checks import check_plan

    check_plan(plan)
    return plan


def _stop(
    given: dict[str, Any], of_world: Mapping[str, Any], method: registry.Entry, world: registry.Entry
) -> dict[str, Any]:
    """Take out what ends a turn: it becomes the world's setting."""
    if STOP not in given:
        return {}
    made: Method = method.build()
    if "sample" not in made.slots() and not made.seated():
        raise PanoplyError(
            f"{STOP} has no effect: {method.name} samples nothing. Evaluations do, and go by world.stop."
        )
    if getattr(world.build, "medium", "") != "text":
        raise PanoplyError(f"{STOP} has no effect: {world.name} has no text that could end a turn.")
    if "stop" in of_world:
        raise PanoplyError(f"{STOP} and world.stop say the same: leave one of them out.")
    return {"stop": given.pop(STOP)}


def _split(settings: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Take out the settings below a prefix."""
    return {k.removeprefix(prefix): settings.pop(k) for k in list(settings) if k.startswith(prefix)}


def _presets(world: registry.Entry) -> tuple[str, ...]:
    """The presets that suit a world, best first: its own (`cartpole` for CartPole-v1), then that of its kind."""
    own = re.sub(r"-v\d+$", "", world.name).lower()
    return own, str(getattr(world.build, "preset", "published"))


def _asked(settings: Mapping[str, Any], method: Method) -> dict[str, Any]:
    """Settings a world asks for and the method has; the signal to reward also where a part wraps `signal`.

    A method that rewards a signal of its own, and not success, keeps it.
    """
    known, found = method.settings(), dict(settings)
    if (name := found.pop("reward.name", None)) is not None:
        found |= {
            path: name
            for path, held in known.items()
            if re.fullmatch(r"reward(\..+)?\.name", path) and held == "success"
        }
    asked = {path: value for path, value in found.items() if path in known}
    for name, held in method.seated().items():
        asked |= {f"{name}.{path}": value for path, value in _asked(settings, held).items()}
    return asked


def world_settings(entry: registry.Entry, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a world as words or values, checked; only those that were given."""
    hints = types_of(entry.build)
    known = {f.name for f in dataclasses.fields(entry.build)}  # type: ignore[arg-type]
    found = {}
    for name, value in settings.items():
        if name not in known and name == "sandbox":
            raise PanoplyError(f"--sandbox has no effect: no code of others is run in {entry.name}.")
        if name not in known:
            raise unknown(f"setting of world {entry.name}", name, known)
        found[name] = parse(f"world.{name}", value, hints[name]) if isinstance(value, str) else value
    built = entry.build(**found)
    return {name: getattr(built, name) for name in found}


def _fields(kind: type[Settings], prefix: str, settings: Mapping[str, Any]) -> Settings:
    """Options of a run, or of its adapters, as words or values."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    hints = types_of(kind)
    found = {}
    for name, value in settings.items():
        if name not in fields:
            raise unknown(f"{prefix} setting", name, fields)
        found[name] = parse(f"{prefix}.{name}", value, hints[name]) if isinstance(value, str) else value
    return kind(**found)


# ------------------------------------------------------------------ checks


def named_world(words: str) -> Any:
    """The world that words name, with options as in `chain:operations=8,levels=2,4`."""
    found = re.fullmatch(r"(.+?)(?::(\w+=.*))?", words, re.S)
    assert found is not None
    alone = ":" not in found[1] or registry.implied(found[1]) is None
    if ":" in words and alone and (whole := registry.implied(words)) is not None:
        return whole.build()
    given = [word.partition("=") for word in re.split(r",(?=\w+=)", found[2])] if found[2] else []
    entry = registry.find("world", found[1])
    return entry.build(**world_settings(entry, {name: value for name, _, value in given}))
