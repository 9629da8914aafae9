"""What a plan costs: tokens, memory and arithmetic, counted from its settings before anything runs."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from panoply import selves
from panoply.devices import missing
from panoply.effects import recomputes
from panoply.errors import PanoplyError
from panoply.footprint import (
    Dimensions,
    Held,
    Peak,
    Shapes,
    Work,
    expected,
    later,
    left_to_autograd,
    linear_of,
    pass_tokens,
)
from panoply.kinds import is_text, kind_of
from panoply.lora import BYTES, factors
from panoply.parts import Part

if TYPE_CHECKING:
    from panoply.planning import Plan

WITH_POLICY = "with the policy"
"""How a model learns that the policy's own update moves, and that has no update to be set."""
OF_WEIGHTS = (
    "'s weights",
    "'s adapters",
    "'s gradients",
    "'s optimiser",
    "'s float32 masters",
)
"""Memory that learners have once, where they share a model."""
Tokens = tuple[int, int]
"""Tokens sampled, and tokens trained on, in one step."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of one episode, at most: its first prompt, what the policy writes, and all that follows the prompt."""

    prompt: int
    answer: int
    context: int


def own_episodes(held: Any, of: Lengths) -> Tokens:
    """Groups of episodes, all of which are trained on; a prompt is read once for its group."""
    rows = held.prompts * held.group
    return rows * of.answer, held.prompts * of.prompt + rows * of.context


def given_episodes(held: Any, of: Lengths) -> Tokens:
    """Given answers, or pairs of them."""
    sides = 2 if "pairs" in held.info.gives else 1
    return 0, held.batch * (of.prompt + sides * of.context)


def part_tokens(held: Part, of: Lengths) -> Tokens:
    """What a sample or data part costs: as it says itself, or by its number of episodes."""
    if held.info.cost is not None:
        found: Tokens = held.info.cost(held, of)
        return found
    settings = held.settings()
    if {"prompts", "group"} <= settings.keys():
        return own_episodes(held, of)
    return given_episodes(held, of) if "batch" in settings else (0, 0)


@dataclass(frozen=True)
class Activations:
    """What a pass keeps for its backward pass, about: of so many tokens at a time, and of the longest sequence."""

    tokens: int
    bytes: int
    longest: int
    """Bytes of the longest sequence alone, the least a pass can have."""
    recomputed: bool
    """Whether only the stream between blocks is kept, and their inside is computed again."""


@dataclass(frozen=True)
class Cost:
    """What one step and the whole run need. Tokens and operations are at most so many."""

    parameters: int
    trainable: int
    sampled_tokens: int
    trained_tokens: int
    extra_forwards: list[str]
    memory_bytes: dict[str, int]
    operations: int
    """Floating-point operations of a step, 2 a weight and token forward and 4 backward."""
    activations: Activations
    peak: Peak | None = None
    """What a GPU holds at most; None where that is not counted: in control, in float32, and of odd layouts."""


@dataclass(frozen=True)
class Learned:
    """Weights of a policy, and which of them learn."""

    weights: int
    learning: int
    """All of them, or those of adapters."""
    under: int
    """Those of layers that have adapters; all where there are none."""
    reference: int
    """Of the model that --reference names."""
    base: str = "whole"
    begun: bool = False
    """Whether the policy as it began is there anyway, under fresh adapters."""
    merged: bool = False
    """Whether adapters are this library's own, merged into the weights."""


def cost(plan: Plan) -> Cost:
    method, options, world = plan.method, plan.options, plan.world()
    kind = kind_of(world)
    if seats := plan.seats():
        return _together(plan, {name: cost(one) for name, one in seats.items()})
    shapes = kind.shapes(options.model, world, plan.policy_options)
    of = _learned(plan, shapes)
    parameters = of.weights
    slots: dict[str, Any] = method.slots()
    source = slots.get("sample") or slots["data"]
    sampled, trained = part_tokens(source, kind.lengths(world, source.settings().get("max_tokens")))

    if "replay" in slots and "sample" in slots and slots["replay"].info.unit == "episode":
        trained += part_tokens(slots["replay"], kind.lengths(world, None))[1]
    if getattr(method, "looks_back", False):
        trained *= 2
    width = 4 if options.dtype == "float32" else 2
    memory = {"weights": parameters * width}
    if options.lora:
        memory |= {"adapters": of.learning * 4, **_learning(of.learning, slots["update"], 4)}
        if of.merged and of.base in BYTES:
            memory["weights"] -= of.under * width
            memory["adapted layers in few bits"] = int(of.under * BYTES[of.base])
        elif of.merged:
            memory["adapted layers as they were"] = of.under * width
    else:
        memory |= _learning(parameters, slots["update"], width, options.masters)
    memory |= beside(plan, of, width)
    update = slots["update"].settings().get("epochs", 1)
    work = 2 * parameters * sampled + (4 if options.lora else 6) * parameters * trained * update
    extra = []
    if "aside" in method.needs():
        extra.append("a second batch, with three passes backward")
        sampled, work = 2 * sampled, work + 2 * parameters * sampled + 14 * parameters * trained
    for one in selves.named(method.needs()):
        asked = sorted(
            n for n in method.needs() if n.endswith(f"@{one.name}") and not n.startswith(selves.ACTS)
        )
        if asked:
            extra.append(f"one forward pass for {' and '.join(asked)}")
            theirs = of.reference if one.kind == "reference" else parameters
            work += 2 * theirs * trained * (2 if one.other else 1)
    for model in slots.get("models", ()):
        operations, passes = _work_beside(model, parameters, trained, slots["update"])
        work += operations
        extra += [passes] if passes else []
    for path, part in method.parts():
        if part.info.prepare is not None:
            extra.append(f"one forward pass a mini-batch for {path}'s prepare step")
            work += 2 * parameters * trained * update
    kept = activations(plan, shapes, trained, sum(memory.values()))
    most = _most(plan, shapes, memory, sampled, trained) if is_text(world) else None
    return Cost(parameters, of.learning, sampled, trained, extra, memory, work, kept, most)


def _learned(plan: Plan, shapes: Shapes) -> Learned:
    options, world = plan.options, plan.world()
    kind, weights = kind_of(world), sum(map(math.prod, shapes.values()))
    reference = weights
    if options.reference not in ("start", "none"):
        with contextlib.suppress(PanoplyError):  # said by whoever opens it, which need not be there yet
            there = kind.shapes(options.reference, world, plan.policy_options)
            reference = sum(map(math.prod, there.values()))
    if not options.lora:
        return Learned(weights, weights, weights, reference)
    planned = kind.adapted(options.model, world, options.lora, plan.lora)
    merged = kind.runs_natively(options.model, world, planned.settings)
    under = sum(map(math.prod, planned.shapes))
    return Learned(weights, planned.learning, under, reference, planned.settings.base, planned.fresh, merged)


def of_size(shapes: Shapes, rank: int, base: str) -> Learned:
    """Of a published size, with fresh adapters of a rank on every linear layer, or none (0)."""
    weights = sum(map(math.prod, shapes.values()))
    if not rank:
        return Learned(weights, weights, weights, weights)
    adapted = list(linear_of(shapes))
    under = sum(map(math.prod, adapted))
    return Learned(weights, factors(adapted, rank), under, weights, base, True, True)


def beside(plan: Plan, of: Learned, width: int) -> dict[str, int]:
    """Bytes of what there is beside the policy that learns: other selves, what a judge is made beside, and models."""
    method, options, memory = plan.method, plan.options, dict[str, int]()
    for one in selves.named(method.needs()):
        own = of.weights
        if one.kind == "reference" and options.reference != "start":
            own = of.reference
        elif one.kind == "reference" and of.begun:
            continue  # which is the base itself
        elif of.merged:
            own = of.learning * 4 // width if of.base in BYTES else of.under
        if one.copies:
            mean = of.weights * 4 if one.kind == "ema" and width < 4 and of.learning == of.weights else 0
            memory[f"{one.name} copy"] = own * width * one.copies + mean
    if "judged" in method.needs():
        memory["policy beside the judge"] = of.weights * width
    update = cast(Part, method.slots()["update"])
    for model in getattr(method, "models", ()):
        memory |= _memory_beside(model, of.weights, width, update, options.masters)
    return memory


def step_work(plan: Plan, sampled: int, trained: int) -> Work:
    """What the plan's step asks of a GPU. Evaluations sample as well, all problems at once where there is room; but
    for those of a judge, who gives a text one number, and no token a probability."""
    method, options, world = plan.method, plan.options, plan.world()
    source: Any = method.slots().get("sample") or method.slots()["data"]
    of = kind_of(world).lengths(world, source.settings().get("max_tokens"))
    decisions = sampled or trained * of.answer // max(1, of.prompt + of.context)
    judged = "judged" in method.needs()
    return Work(
        of.prompt,
        of.context,
        0 if judged else max(sampled // max(1, of.answer), options.held_out),
        trained,
        0 if judged else min(decisions, trained),
        pass_tokens(options.micro_tokens, adapters=options.lora > 0),
        4 if options.dtype == "float32" else 2,
        "entropy" in method.needs(),
        options.lora > 0,
        options.recompute,
        options.offload == "activations",
    )


def _most(plan: Plan, shapes: Shapes, memory: dict[str, int], sampled: int, trained: int) -> Peak | None:
    sizes, options = _dimensions(plan, shapes), plan.options
    if sizes is None or options.dtype == "float32":
        return None
    summed = 0 if options.lora else memory.get("gradients", 0)
    passing = 0 if options.lora else 2 * left_to_autograd(shapes)
    held = Held(sum(memory.values()) - summed, summed, passing, later(memory))
    work = step_work(plan, sampled, trained)
    work = work if recomputes(plan) else replace(work, recompute="never")
    return expected(sizes, held, work, device_memory(options.device))


def _dimensions(plan: Plan, shapes: Shapes) -> Dimensions | None:
    world, model = plan.world(), plan.options.model
    kind = kind_of(world)
    return Dimensions.of(
        shapes, kind.experts_at_once(model, world), kind.runs_natively(model, world, plan.adapters())
    )


def _together(plan: Plan, seats: dict[str, Cost]) -> Cost:
    """What several learners need, and their game; they learn one after another, so activations are those of one."""
    world, game = plan.world(), plan.method.slots().get("game")
    sampled, trained = (
        sum(getattr(c, of) for c in seats.values()) for of in ("sampled_tokens", "trained_tokens")
    )
    work, most = sum(c.operations for c in seats.values()), max(c.parameters for c in seats.values())
    if isinstance(game, Part):
        more, learned = part_tokens(game, kind_of(world).lengths(world, None))
        sampled, trained, work = sampled + more, trained + learned, work + most * (2 * more + 6 * learned)
    memory = {f"{name}'s {of}": size for name, c in seats.items() for of, size in c.memory_bytes.items()}
    shapes = kind_of(world).shapes(plan.options.model, world, plan.policy_options)
    counted = list(seats.values())
    if plan.method.one_model:
        own = {f"{next(iter(seats))}{of}" for of in OF_WEIGHTS}
        own |= {f"{name}'s optimiser" for name in seats if plan.method.own_moments}
        memory = {of: size for of, size in memory.items() if of in own or not of.endswith(OF_WEIGHTS)}
        counted = counted[:1]
    return Cost(
        sum(c.parameters for c in counted),
        sum(c.trainable for c in counted),
        sampled,
        trained,
        [f"{name}: {extra}" for name, c in seats.items() for extra in c.extra_forwards],
        memory,
        work,
        activations(plan, shapes, trained, sum(memory.values())),
    )


def activations(plan: Plan, shapes: Shapes, trained: int, held: int, total: int | None = None) -> Activations:
    """A block keeps what its matrices and norms put out. `total` is the memory of the GPU, if there is one.

    Where that has no room for the longest sequence beside the `held` bytes, blocks are computed again.
    """
    options, world = plan.options, plan.world()
    of = kind_of(world).lengths(world, None)
    total = device_memory(options.device) if total is None else total
    blocks = [(name, shape) for name, shape in shapes.items() if ".layers." in name and "bias" not in name]
    sizes = _dimensions(plan, shapes)
    inside = sum(shape[0] for _, shape in blocks) if sizes is None else sizes.kept
    between = sum(shape[0] for name, shape in blocks if name.endswith("o_proj.weight"))
    width = 4 if options.dtype == "float32" else 2
    gpu = total is not None or options.device.startswith("cuda")
    at_once = pass_tokens(options.micro_tokens, gpu, options.lora > 0)
    longest, most = of.prompt + of.context, min(at_once, max(trained, 1))
    cramped = total is not None and held + longest * inside * width > total
    recomputed = options.recompute == "always" or (options.recompute == "auto" and cramped)
    recomputed = recomputed and recomputes(plan)
    each = width * (between if recomputed else inside)
    return Activations(most, most * each, longest * each, recomputed)


def device_memory(name: str) -> int | None:
    """Bytes of the GPU that a name stands for; None where that is not here."""
    import torch

    if not torch.cuda.is_available() or name == "cpu" or missing(name):
        return None
    return int(torch.cuda.get_device_properties(0 if name == "auto" else name).total_memory)


def _learning(weights: int, update: Part, width: int, masters: bool = True) -> dict[str, int]:
    """Gradients, which add up in float32, what the optimiser keeps, and float32 masters of weights in fewer bits."""
    numbers = update.info.cost(update) if update.info.cost is not None else 2
    found = {"gradients": weights * 4, "optimiser": int(weights * 4 * numbers)}
    if width < 4 and masters:
        found["float32 masters"] = weights * 4
    return {name: size for name, size in found.items() if size}


def _memory_beside(model: Part, policy: int, width: int, update: Part, masters: bool) -> dict[str, int]:
    """Bytes of a model beside a policy of so many weights and its `update`."""
    if isinstance(_learns(model, update), int):
        return {}
    name, weights = model.info.name, _weights_of(model, policy)
    memory, own = {name: weights * width}, _learns(model, update)
    if isinstance(own, Part):
        learning = _learning(weights, own, width, masters)
        memory |= {f"{name}'s {what}": size for what, size in learning.items()}
    return memory


def _work_beside(model: Part, policy: int, trained: int, update: Part) -> tuple[int, str]:
    """Operations and passes of a model beside a policy of so many weights."""
    name, learns = model.info.name, _learns(model, update)
    if isinstance(learns, int):
        counted = f"{learns} forward pass{'es' * (learns > 1)} of the policy for {name}"
        return 2 * policy * trained * learns, counted if learns else ""
    each = _weights_of(model, policy) * trained
    epochs = 0 if learns is None else int(learns.settings().get("epochs", 1))
    return 2 * each + 6 * each * epochs, f"one forward pass of {name}"


def _learns(model: Part, update: Part) -> Part | int | None:
    """How a model learns, or how often the policy is asked for it; one without an update has that of the policy."""
    found: Part | int | str | None = None if model.info.cost is None else model.info.cost(model)
    together = found is None and model.settings().get("update", model) is None
    return update if together or isinstance(found, str) else found


def _weights_of(model: Part, policy: int) -> int:
    """As many as the policy has, where it is not known yet."""
    from panoply.policies.build import folder_shapes
    from panoply.which import model_folder

    settings = model.settings()
    folder = str(settings.get("folder") or settings.get("start") or "")
    if not folder or not Path(folder).is_dir():
        return policy
    return sum(map(math.prod, folder_shapes(model_folder(folder)).values()))
