"""What `plan` says of a run that is spread: where its work would lie, what that takes, and what cannot be spread."""

from __future__ import annotations

from typing import Any

from panoply.costs import Cost, cost, device_memory
from panoply.errors import PanoplyError
from panoply.footprint import Dimensions
from panoply.kinds import is_text, kind_of
from panoply.loops.mover import solves
from panoply.planning import Options, Plan
from panoply.rollout import engines
from panoply.scale import ahead, sharded
from panoply.scale.timing import Card, Load, expected

LEARNS = ("on_policy", "dataset")
"""Regimes whose updates are sums over rows, which several can share."""
PLAYS = ("on_policy", "off_policy")
"""Regimes that sample."""
PLAYED_HERE = {
    "engine:vectors": "the policy reads vectors of its own",
    "world:masks": "a masked-diffusion model is filled in as the sample part says",
}
"""What keeps episodes from samplers (`Fleet.plays_here`), by who needs it."""
WIRE = 12
"""Bytes of a decision on its way from a sampler."""


# ------------------------------------------------------------------ what is refused


def check(plan: Plan) -> None:
    """Refuse what cannot be spread, and options that have no effect, in one sentence."""
    options, regime = plan.options, plan.method.regime
    for name, reason in _idle(options):
        if f"run.{name}" in plan.chosen:
            raise PanoplyError(f"--{name} has no effect: {reason}.")
    regimes = {one.method.regime for one in plan.seats().values()} or {regime}
    if options.samplers and not regimes & set(PLAYS):
        raise PanoplyError(
            f"--samplers has no effect: {plan.method_id} samples nothing, it learns from data."
        )
    if options.learners and not regimes <= set(LEARNS):
        raise PanoplyError(
            f"--learners cannot be {options.learners}: {plan.method_id} learns from transitions, in small steps that "
            "one process makes faster than several. --samplers play for it."
        )
    if options.learners:
        _check_updates(plan)
        if options.layout == "sharded":
            sharded.check(plan)
    if options.engine != "native" and not (is_text(plan.world()) and regimes & set(PLAYS)):
        raise PanoplyError(f"--engine has no effect: {plan.method_id} on {plan.world_id} samples no text.")
    if options.engine != "native":
        world: Any = plan.world()
        for method in [one.method for one in plan.seats().values()] or [plan.method]:
            engines.check(options.engine, method, world)
    if options.staleness and options.samplers and not is_text(plan.world()):
        raise PanoplyError(
            f"--staleness cannot be {options.staleness}: only answers are sampled ahead, and {plan.world_id} has none."
        )
    ahead.check(plan)


def _check_updates(plan: Plan) -> None:
    """Learners hand on sums of gradients: who wants to look at the mini-batch, or at all weights, cannot be shared."""
    for one in plan.seats().values() or [plan]:
        data: Any = one.method.slots().get("data")
        if data is not None and "engine:vectors" in data.needs():
            raise PanoplyError(
                f"--learners cannot be {plan.options.learners}: {data.info.id} of {plan.method_id} has the policy read "
                "vectors once data is asked for, which only the driver does."
            )
        update: Any = one.method.slots()["update"]
        if solves(update):
            raise PanoplyError(
                f"--learners cannot be {plan.options.learners}: {update.info.id} of {plan.method_id} wants more than "
                "the sum of gradients that learners hand on."
            )


def _idle(options: Options) -> list[tuple[str, str]]:
    """Options without effect, and why."""
    found = []
    if not options.samplers:
        alone = "there are no samplers, --samplers N"
        found += [(name, alone) for name in ("staleness", "inflight", "patience")]
    elif not options.staleness:
        found.append(
            ("inflight", "weights that are always new do not change in the midst of answers, --staleness K")
        )
    if not options.learners:
        found += [(name, "there are no learners, --learners N") for name in ("layout", "restarts")]
    if not (options.learners or options.samplers):
        found.append(("cluster", "all of the run is in this process, --learners N and --samplers N"))
    return found


# ------------------------------------------------------------------ what it takes


def layout_of(options: Options, needed: Cost) -> str:
    """How learners hold the model: whole as long as that fits in nine tenths of a GPU (of 141 GB, if none is here)."""
    if options.layout != "auto":
        return options.layout
    room = 0.9 * (device_memory(options.device) or Card().memory)
    return "whole" if rank_bytes(needed, options, "whole") < room else "sharded"


def chosen_layout(plan: Plan) -> Any:
    """What learners of this run will hold; without a GPU `auto` is whole."""
    options = plan.options
    if options.layout == "auto" and (options.cluster == "threads" or device_memory(options.device) is None):
        return "whole"
    layout = options.layout if options.layout != "auto" else layout_of(options, cost(plan))
    if layout == "sharded":
        sharded.check(plan)
    return layout


def rank_bytes(needed: Cost, options: Options, layout: str) -> float:
    """Of one learner's weights, gradients and optimiser, in bytes.

    Whole: the weights and float32 gradients, and a piece of the rest; 6 + 12/N a parameter in bfloat16.
    Sharded: a piece of all, 16/N a parameter, and one block that is gathered, taken as a fortieth of the weights.
    """
    ranks, width = max(1, options.learners), 2 if options.dtype != "float32" else 4
    moving = needed.trainable
    frozen = (needed.parameters - moving) * width
    kept = 12 if width == 2 else 8
    if layout == "whole":
        return frozen + moving * (width + 4 + kept / ranks)
    return (frozen + moving * 16) / ranks + needed.parameters * width / 40


def rows(plan: Plan, needed: Cost) -> list[tuple[str, str]]:
    """What `plan` says of a run that is spread: what lies where, what is moved, and how long a step would take."""
    options = plan.options
    found = [("placement", _placed(options, needed))]
    if options.learners:
        layout = layout_of(options, needed)
        size = (
            f"{_gb(rank_bytes(needed, options, layout))} of weights, gradients and optimiser, and activations"
        )
        found.append(
            ("a learner", f"{'all weights' if layout == 'whole' else 'a piece of all'} ({layout}): {size}")
        )
    found.append(("moved a step", _moved(options, needed)))
    if (seconds := _seconds(plan, needed)) is not None:
        found.append(("expected", seconds))
    here = "the order of tasks, rewards, credit, evaluation, and the run folder"
    source: Any = plan.method.slots().get("sample")
    why = [reason for need, reason in PLAYED_HERE.items() if need in plan.method.needs()] if source else []
    if options.samplers and why:
        here = f"all episodes, since {why[0]}; {here}"
    found.append(("done here", here))
    return found


def _placed(options: Options, needed: Cost) -> str:
    named = [(options.learners, "learner"), (options.samplers, "sampler")]
    words = [f"{n} {role}{'s' * (n > 1)}" for n, role in named if n]
    where = {
        "local": "on this machine, where Ray is started",
        "auto": "in the Ray cluster that this machine is in",
        "threads": "on threads of this process",
    }.get(options.cluster, f"in the Ray cluster at {options.cluster}")
    lag = (
        f", sampling {options.staleness} step{'s' * (options.staleness > 1)} ahead"
        if options.staleness
        else ""
    )
    engine = f", answers by {options.engine}" if options.engine != "native" else ""
    return f"{' and '.join(words) or 'one process'} {where}{lag}{' at most' * options.inflight}{engine}"


def _moved(options: Options, needed: Cost) -> str:
    width = 2 if options.dtype != "float32" else 4
    moving = needed.trainable
    found = []
    if options.learners > 1:
        whole = layout_of(options, needed) == "whole"
        found.append(
            f"{_gb(moving * (4 + width) if whole else 8 * needed.parameters)} to and from each learner"
        )
        if not whole:
            found[-1] += " a pass"
    if options.samplers:
        found.append(f"{_gb(moving * width)} of weights to each sampler")
        found.append(f"{_gb(needed.sampled_tokens * WIRE)} of decisions from all of them")
    return ", ".join(found) or "nothing"


def load_of(plan: Plan, needed: Cost) -> Load | None:
    """The plan's step as the simulation knows it; None where it samples nothing, or a model of another layout."""
    world = plan.world()
    source: Any = plan.method.slots().get("sample")
    if not is_text(world) or source is None or not needed.sampled_tokens:
        return None
    shapes = kind_of(world).shapes(plan.options.model, world, plan.policy_options)
    sizes = Dimensions.of(shapes)
    if sizes is None:
        return None
    of = kind_of(world).lengths(world, source.settings().get("max_tokens"))
    width = 2 if plan.options.dtype != "float32" else 4
    return Load(
        needed.parameters,
        kv=2 * sizes.layers * sizes.keys * width,
        mixing=sizes.layers * sizes.width,
        answers=max(1, needed.sampled_tokens // max(1, of.answer)),
        mean=of.answer / 4,
        most=of.answer,
        prompt=of.prompt,
        width=width,
        recomputed=needed.activations.recomputed,
    )


def _seconds(plan: Plan, needed: Cost) -> str | None:
    options, load = plan.options, load_of(plan, needed)
    if load is None or options.cluster == "threads" or needed.parameters < 10**8:
        return None
    found = expected(load, Card(), options.learners, options.samplers, options.staleness, options.inflight)
    return (
        f"about {found.seconds:.0f} s a step on H200s: sampling {found.sampling:.0f} s, learning {found.learning:.0f} "
        f"s, weights {found.publishing:.1f} s; learners wait {found.idle:.0%} of it. Simulated, for answers of a "
        f"quarter of the longest ({load.most:,} tokens) on average"
    )


def _gb(size: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size >= unit / 10:
            return f"{size / unit:.1f} {name}"
    return f"{size / 1e3:.1f} kB"
