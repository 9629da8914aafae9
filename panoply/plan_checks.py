"""What a plan refuses before any compute is spent: needs that nobody meets, absurd sizes, names that are none."""

from __future__ import annotations

import itertools
import math
import typing
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any, cast

from panoply import registry, selves
from panoply.effects import findings, inert, of_several, with_inner
from panoply.errors import PanoplyError, unknown
from panoply.kinds import Kind, kind_of
from panoply.parts import Part, show_value
from panoply.planning import ANSWER, Plan, named_world
from panoply.regimes import Method
from panoply.units import COMMON_KEYS, KEY_UNITS, STREAMS, plural

if TYPE_CHECKING:
    from panoply.worlds.world import TextWorld

MOST_ROWS = 10**8
"""Episodes or decisions that one step may ask for."""
MOST_WEIGHTS = 10**10
"""Of a control policy's network."""


def check_plan(plan: Plan) -> None:
    """Refuse what is impossible, and what the user set although it has no effect."""
    method, options = plan.method, plan.options
    if not plan.seat and (
        options.is_spread() or any(f"run.{name}" in plan.chosen for name in options.spread)
    ):
        from panoply.scale import placement

        placement.check(plan)
    for name, one in plan.seats().items():
        try:
            check_plan(one)
        except PanoplyError as error:
            raise PanoplyError(f"The seat '{name}': {error}") from error
    if method.seated():
        _check_own(plan)
        return
    _check_sizes(plan)
    _check_draws(plan)
    _check_lists(plan)
    _check_masters(plan)
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
    judged = {f"signal:{name}" for model in getattr(method, "models", ()) for name in _said_by(model)}
    judged |= {gift for _, held in method.parts() for gift in held.info.gives if gift.startswith("signal:")}
    for path, held in method.parts():
        spared = {"world:verify"} if held.needs() & judged else set()  # a reward model's word is enough
        for need in sorted(held.needs() - judged - spared):
            if need.startswith("signal:") and signals is not None and need[7:] not in signals:
                raise unknown(f"signal of {plan.world_id} for {path}", need[7:], signals)
            if need.startswith("world:") and need.removeprefix("world:") not in access:
                raise PanoplyError(_refusal(plan, f"{path} ({held.info.name})", need.removeprefix("world:")))
    for path, held in with_inner(method):
        for setting, reason in findings(held.info.impossible, held, method, world):
            value = f"{path}.{setting} cannot be {show_value(getattr(held, setting))}" if setting else ""
            raise PanoplyError(f"{value or f'{path} ({held.info.name}) cannot be used'}: {reason}.")
    _check_gifts(method, {f"column:{key}" for key in world.keys} | plan.gifts, access)
    if world.medium == "text":
        text = typing.cast("TextWorld", world)
        if text.stop and "world:masks" in method.needs():
            raise PanoplyError(
                "world.stop has no effect: a masked-diffusion model fills in answers of one length."
            )
        text.check(method.needs())
        text.walls()
    kind.check_policy(options.model, world, plan.policy_options)
    kind.check_model(options.model, world, method)
    kind.check_blocks(options.model, world, method.needs())
    _check_length(plan, world)
    if plan.options.decode_steps and world.medium != "text":
        raise PanoplyError(f"run.decode_steps has no effect: nothing is decoded in {plan.world_id}.")
    if (counted := plan.options.counted()) is not None:
        if world.medium != "text":
            raise PanoplyError(f"run.signal has no effect: signals of {plan.world_id} are not counted.")
        if signals is not None and counted not in signals:
            raise unknown(f"signal of {plan.world_id} for run.signal", counted, signals)
    _check_lora(plan, kind, world)
    _check_other_world(plan, world)
    for path, reason in inert(plan):
        if path in plan.chosen:
            raise PanoplyError(f"{path} has no effect: {reason}.")


def _check_masters(plan: Plan) -> None:
    """Weights without float32 copies are rounded in their own bits, after an optimiser that only moves them."""
    if plan.options.masters:
        return
    if plan.options.dtype == "float16":
        raise PanoplyError(
            "run.masters=false needs run.dtype=bfloat16: float16 has too few exponents to round into."
        )
    from panoply.loops import mover

    update = plan.method.slots().get("update")
    if isinstance(update, Part) and plan.options.dtype == "bfloat16" and mover.solves(update):
        raise PanoplyError(mover.PLACES.format(update.info.id))


def _said_by(model: Part) -> set[str]:
    """The signals that a model gives: by its name, or one for each of its outputs."""
    name, outputs = model.settings().get("name"), model.settings().get("outputs", ())
    return {f"{name}_{output}" for output in outputs} or {str(name)}


def _check_own(plan: Plan) -> None:
    """Of a method of several learners, the parts that belong to none of them."""
    world = plan.world()
    if plan.method.one_model:
        _check_shared(plan.method.seated(), plan.method.own_moments)
    for path, held in plan.method.slots().items():
        assert isinstance(held, Part)
        for setting, reason in findings(held.info.impossible, held, plan.method, world):
            raise PanoplyError(f"{path}.{setting} cannot be {show_value(getattr(held, setting))}: {reason}.")
        for need in sorted(n for n in held.needs() if n.startswith("world:")):
            if need.removeprefix("world:") not in world.access | {world.medium}:
                raise PanoplyError(_refusal(plan, f"{path} ({held.info.name})", need.removeprefix("world:")))
    for path, reason in of_several(plan):
        if path in plan.chosen:
            raise PanoplyError(f"{path} has no effect: {reason}.")


def _check_shared(seats: Mapping[str, Method], apart: bool) -> None:
    """Seats of one model have one optimiser, or one `apart` for each, and nothing else that moves with the weights."""
    from panoply.loops import mover

    first, *_ = seats.values()
    for name, method in seats.items():
        models = method.slots().get("models", ())
        together = [
            m.info.name for m in cast("tuple[Part, ...]", models) if m.settings().get("update", m) is None
        ]
        if method.regime not in ("on_policy", "dataset") or "judged" in method.needs() or together:
            what = (
                f"{together[0]} learns with its policy"
                if together
                else "it does not learn by terms of its policy"
            )
            raise PanoplyError(f"The seat '{name}' cannot share the weights of others: {what}.")
        update = cast(Part, method.slots()["update"])
        if mover.solves(update):
            raise PanoplyError(f"The seat '{name}': {mover.SHARED.format(update.info.id)}")
        if not apart and _moved_by(method) != _moved_by(first):
            raise PanoplyError(
                f"The seat '{name}' shares the weights of others, and so their optimiser: give all the same update, "
                "but for epochs and minibatches."
            )


def _moved_by(method: Method) -> tuple[Any, ...]:
    update = cast(Part, method.slots()["update"])
    rest = {n: v for n, v in update.settings().items() if n not in ("epochs", "minibatches")}
    return (update.info.id, tuple(rest.items()))


def _check_selves(plan: Plan, kind: Kind) -> None:
    """Refuse snapshots that a user named and the run would never renew, and outputs that they do not have."""
    for path, held in plan.method.parts():
        for need in sorted(n for n in held.needs() if "@" in n and not n.startswith("divergence:")):
            output, _, name = need.partition("@")
            for one in selves.named([need]):
                if (idle := one.idle(plan.options)) and one.name not in _named_by(plan.method_id):
                    raise PanoplyError(f"{path} asks for {one.name}, which {idle}.")
            kind.check_output("logp" if need.startswith(selves.ACTS) else output, name)


def _named_by(method_id: str) -> set[str]:
    """Snapshots that a registered method names itself: a run too short to renew them is its first moments."""
    entry = registry.find_any(method_id)
    if entry is None or entry.kind != "method":
        return set()
    return {one.name for one in selves.named(entry.build().needs())}


def no_adapters(method: Method) -> str:
    """Why what a method trains has no adapters; empty where it can."""
    if "judged" in method.needs():
        return "trains a judge, and every weight of it"
    if any(model.info.name == "token_values" for model in getattr(method, "models", ())):
        return "has values of tokens learn beside a policy that stays as it is"
    return ""


def _check_lora(plan: Plan, kind: Kind, world: Any) -> None:
    """Adapters have a rank, a model with layers of the names given, and somebody who trains them."""
    options = plan.options
    if not options.lora:
        if "run.lora" in plan.chosen:
            raise PanoplyError("--lora 0 leaves adapters nothing to learn: give a rank, or leave --lora out.")
        for path in sorted(p for p in plan.chosen if p.startswith("lora.")):
            raise PanoplyError(f"{path} has no effect without adapters: give them a rank with --lora RANK.")
        return
    if why := no_adapters(plan.method):
        raise PanoplyError(f"--lora has no effect: {plan.method_id} {why}.")
    chosen = frozenset(path.removeprefix("lora.") for path in plan.chosen if path.startswith("lora."))
    kind.check_lora(options.model, world, options.lora, plan.lora, chosen, options.dtype)


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
    if wanted := getattr(other, "sandboxed", None):
        wanted.find()
    differs = "kind" if other.medium != world.medium else kind_of(world).differs(world, other)
    if differs:
        raise PanoplyError(
            f"run.held_out_world cannot be {words}: its {differs} is another than that of {world.name}, so the policy "
            "cannot act there."
        )


def _check_draws(plan: Plan) -> None:
    """Refuse to draw from one token alone; at temperature 0, where it is taken without drawing, no cut acts.

    And refuse here, not when the first answer is drawn, what no logits can be divided by.
    """
    held: Any = plan.method.slots().get("sample")
    if held is None or plan.world().medium != "text":
        return
    from panoply.rollout.sampling import COLDEST

    settings = held.settings()
    for name, rest in (("temperature", "0, for the likeliest token, or "), ("repetition_penalty", "")):
        if 0 < settings.get(name, 1.0) < COLDEST:
            raise PanoplyError(f"sample.{name} must be {rest}at least {COLDEST:g}, not {settings[name]:g}.")
    if settings.get("top_k") == 1 and settings.get("temperature") != 0:
        raise PanoplyError(
            "sample.top_k cannot be 1: all episodes of a group would be the same, and the one token that could be "
            "drawn has probability 1 whatever the weights are, so that nothing is learned."
        )


def _check_lists(plan: Plan) -> None:
    """Refuse more draws than the ids of what could have been drawn have room for in memory."""
    held: Any = plan.method.slots().get("sample")
    settings = {} if held is None else held.settings()
    if not (settings.get("top_k") or settings.get("min_p") or settings.get("top_p", 1.0) < 1):
        return
    from panoply.costs import part_tokens
    from panoply.rollout.cuts import LISTED, most_listed

    world = plan.world()
    tokens, _ = part_tokens(held, kind_of(world).lengths(world, settings.get("max_tokens")))
    if tokens * LISTED * 8 > (room := most_listed()):
        raise PanoplyError(
            f"A step draws up to {tokens:,} tokens and records up to {LISTED} ids for each, that could have been "
            f"drawn: {tokens * LISTED * 8 / 2**30:,.0f} GiB, and {room / 2**30:,.0f} may be used here. "
            "Lower sample.prompts, sample.group or sample.max_tokens, or leave out top_k, top_p and min_p."
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
            "and 'rejected', or rated answers in 'completions'."
        )
    if own and need == "lists":
        return (
            f"{who} learns from lists, and {plan.world_options['data']} has none: its lines need rated answers in "
            "'completions', and world.rated to be lists."
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
