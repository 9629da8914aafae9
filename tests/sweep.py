"""A sweep over all settings: changing one changes what a run does, or the plan refuses it.

    python tests/sweep.py [--workers N] [METHOD…]

Every setting of every part is tried once, in the first method that has it, in runs of two small steps whose weights and
metrics are compared bit for bit with those of the unchanged run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SMALL = {
    "sample.prompts": 4,
    "sample.group": 4,
    "sample.envs": 2,
    "sample.length": 16,
    "sample.pool": 8,
    "sample.random": 4,
    "sample.slots": 8,
    "sample.phases": (1, 1, 1),
    "sample.sizes": (6, 2),
    "sample.hard_prompts": 2,
    "sample.hard_group": 4,
    "sample.estimate": 2,
    "sample.every": 1,
    "sample.verify": 4,
    "sample.memory": 4,
    "sample.failures": 2,
    "select.and_wins.size": 1,
    "models.probe.bootstrap": 1,
    "models.generalist.support": 4,
    "sample.warmup": 0,
    "sample.cold": 1,
    "game.clear": 2,
    "data.batch": 8,
    "data.prompts": 8,
    "data.answers": 4,
    "data.data.batch": 8,
    "models.critic.warmup": 0,
    "models.pretrained_value.warmup": 2,
    "models.utterance_critic.warmup": 0,
    "models.utterance_critic.updates": 2,
    "models.utterance_critic.batch": 8,
    "models.utterance_critic.states": 16,
    "models.utterance_critic.size": 12,
    "losses.mixture.warmup": 0,
    "losses.mixture.every": 1,
    "replay.warmup": 4,
    "replay.every": 4,
    "replay.updates": 2,
    "replay.batch": 16,
    "replay.low": 2.0,
    "replay.flat": 9.0,
    "surrogate.steps": 1,
    "update.epochs": 2,
    "update.minibatches": 2,
    "update.lr": 1e-2,
}
"""Little data, and updates large enough that what bounds them is felt."""
RUN = {"held_out": 4, "steps": 3, "threads": 1, "device": "cpu", "evaluate_every": 0, "episodes_every": 0}
CLOCK = ("seconds", "tokens_per_second", "peak_memory")


def small(name: str, **settings: Any) -> Any:
    """The method on the first world that serves it, with as little data as its settings allow."""
    from kit import world_for

    import panoply as pp
    from panoply.errors import PanoplyError
    from panoply.policies.build import warm_start
    from panoply.worlds.control.world import ControlWorld

    world = world_for(name)
    known = pp.plan(name, world)
    asked = known.method.settings()
    fitting: dict[str, Any] = {
        p: v
        for p, v in SMALL.items()
        if asked.get(p) is not None and isinstance(asked[p], str) == isinstance(v, str)
    }  # a name in two parts may be a number in one and a word in the other
    built = known.world()
    if isinstance(built, ControlWorld):
        fitting["policy.hidden"] = (8,)
    model = "start" if isinstance(built, ControlWorld) or warm_start(built) else "fresh"
    updates, waits = ("update.epochs", "update.minibatches"), ("replay.warmup", "replay.every")
    for left_out in ((), updates, (*updates, *waits)):
        fitting = {p: v for p, v in fitting.items() if p not in left_out}
        try:
            pp.plan(name, world, settings=fitting, model=model, **RUN)
        except PanoplyError:
            continue
        break
    return pp.plan(name, world, settings={**fitting, **settings}, model=model, **RUN)


def outcome(plan: Any) -> str:
    """All that a run left behind, but for what depends on the clock."""
    import panoply as pp
    from panoply.errors import PanoplyError
    from panoply.progress import Progress
    from panoply.run import Run

    folder = Path(tempfile.mkdtemp(prefix="sweep-"))
    try:
        done = pp.train(plan, run=folder / "run", progress=Progress())
        rows = [{k: v for k, v in r.items() if not k.startswith(CLOCK)} for r in Run.open(done.run).metrics()]
        return json.dumps([done.fingerprint, rows, dict(done.after)], sort_keys=True)
    except PanoplyError as refused:
        return f"refused: {refused}"
    except Exception as error:
        return f"crashed: {type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def others(value: Any, annotation: Any) -> Iterator[Any]:
    """Other values that a setting could have."""
    from panoply.parts import options

    for option in options(annotation):
        if typing.get_origin(option) is typing.Literal:
            yield from (word for word in typing.get_args(option) if word != value)
        elif option is bool:
            yield not value
        elif option is int:
            held = value if isinstance(value, int) else 1
            yield from (held + 1, max(1, held // 2), held * 4, 1, 2)
        elif option is float:
            held = value if isinstance(value, int | float) and value else 0.5
            yield from (held * 0.5, held * 1.5, held * 0.01, held * 20, held * 1000, 0.0)
        elif option is type(None):
            yield None
        elif typing.get_origin(option) is tuple and isinstance(value, tuple) and value:
            yield tuple(v * 2 if isinstance(v, int | float) else v for v in value)
            yield from (value[:1], value[-1:])


def settings_of(plan: Any) -> Iterator[tuple[str, str, Any, Any]]:
    """Path, the name it is known by wherever it is used, value and type of each setting of a plan."""
    from panoply.parts import Part

    def below(path: str, held: Any, inside: str = "") -> Iterator[tuple[str, str, Any, Any]]:
        for name, value in held.settings().items():
            if isinstance(value, Part):
                yield from below(f"{path}.{name}", value, f"{inside}{held.info.id}.{name}=")
            else:
                yield f"{path}.{name}", f"{inside}{held.info.id}.{name}", value, held.annotations()[name]

    for path, held in plan.method.parts():
        yield from below(path, held)
    if plan.world().medium == "control":
        from panoply.policies.control import PolicySpec, spec_from

        spec = spec_from(plan.policy_options)
        actions = type(plan.world().action).__name__
        kind = f"policy on {actions}, {spec.head}"
        for name, annotation in typing.get_type_hints(PolicySpec).items():
            yield f"policy.{name}", f"{kind}.{name}", getattr(spec, name), annotation


def inert(task: tuple[str, list[tuple[str, str]]]) -> list[tuple[str, str, str]]:
    """Of a method's settings those that can be changed without any effect: method, path, and what was tried."""
    import torch

    from panoply.errors import PanoplyError

    torch.set_num_threads(1)
    name, paths = task
    plain = small(name)
    base = outcome(plain)
    known = {path: (value, annotation) for path, _, value, annotation in settings_of(plain)}
    found = []
    for path, ident in paths:
        value, annotation = known[path]
        tried = []
        for other in others(value, annotation):
            try:
                changed = small(name, **{path: other})
            except PanoplyError:
                continue
            if other == value or (
                changed.method == plain.method and changed.policy_options == plain.policy_options
            ):
                continue
            tried.append(other)
            found_now = outcome(changed)
            if found_now.startswith("crashed"):
                found.append((name, path, f"{ident} = {other!r}: {found_now}"))
            if found_now != base:
                break
        else:
            if tried:
                found.append((name, path, f"{ident} = {value!r}: {tried}"))
    return found


def tasks(methods: list[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Which settings to try in which method: each where it is met first."""
    seen: set[str] = set()
    made = []
    for name in methods:
        fresh = []
        for path, ident, _, _ in settings_of(small(name)):
            if ident not in seen:
                seen.add(ident)
                fresh.append((path, ident))
        made.append((name, fresh))
    return [task for task in made if task[1]]


def main() -> None:
    from panoply import registry

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*")
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    planned = tasks(chosen.methods or [e.name for e in registry.entries("method")])
    alone = [(name, [one]) for name, paths in planned for one in paths]
    with multiprocessing.get_context("spawn").Pool(chosen.workers, maxtasksperchild=50) as pool:
        for found in pool.imap_unordered(inert, alone, chunksize=4):
            for line in found:
                print("  ".join(line), flush=True)
    print(f"{len(alone)} settings tried.", file=sys.stderr)


if __name__ == "__main__":
    main()
