"""Settings without effect. What is set and would change nothing is refused, so a plan must know what that is.

A part says so of its own settings (`inert`); here is what follows from how parts, world and policy stand together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from panoply.kinds import is_text, kind_of
from panoply.lora import Lora
from panoply.parts import Finding, Part
from panoply.regimes import Method
from panoply.units import plural

if TYPE_CHECKING:
    from panoply.planning import Plan

Rule = Callable[..., Iterable[Finding]]


def inert(plan: Plan) -> list[Finding]:
    """Settings without effect in this plan, by their whole paths, with the reason."""
    world = plan.world()
    if seats := plan.seats():
        theirs = [(f"{name}.{path}", reason) for name, one in seats.items() for path, reason in inert(one)]
        return [*of_several(plan), *theirs]
    found = [
        (f"{path}.{setting}", reason)
        for path, held in with_inner(plan.method)
        for setting, reason in findings(held.info.inert, held, plan.method, world)
        if not (plan.options.staleness and _moved_since(held, reason))
    ]
    of_policy = kind_of(world).policy_inert(plan.policy_options, world)
    found += [
        *_average(plan.method),
        *_uncut(plan.method),
        *_uncredited(plan.method),
        *((f"policy.{name}", reason) for name, reason in of_policy),
    ]
    found += [(f"run.{name}", reason) for name, reason in _of_memory(plan)]
    if "judged" in plan.method.needs():
        found += [
            (f"run.{name}", "a judge is measured by the pairs it orders") for name in ("split", "greedy")
        ]
    return found


def _moved_since(held: Part, reason: str) -> bool:
    """Of batches that are sampled ahead: the policy is no longer who acted, so a ratio to that one moves."""
    from panoply.slots.surrogate.ratios import STAYS

    return reason == STAYS and held.settings().get("against") != "old"


def of_several(plan: Plan) -> list[Finding]:
    """Of a method of several learners: settings of the parts that belong to none of them, its turn and its game."""
    return [
        (f"{path}.{setting}", reason)
        for path, held in plan.method.slots().items()
        for setting, reason in findings(
            cast(Part, held).info.inert, cast(Part, held), plan.method, plan.world()
        )
    ]


def _of_memory(plan: Plan) -> Iterator[Finding]:
    """Options that save memory where there is none of that kind to save."""
    options, regime, world = plan.options, plan.method.regime, plan.world()
    if options.dtype != "float32" and not is_text(world):
        yield "dtype", "networks of control are in float32"
    if regime in ("off_policy", "offline"):
        yield "micro_tokens", "batches are drawn from a replay (replay.batch), and each is one pass"
    if not is_text(world) or regime not in ("on_policy", "dataset"):
        for name in ("masters", "offload", "recompute"):
            yield name, "only a language model's gradients come in passes that fill a GPU"
        return
    if not recomputes(plan):
        yield "recompute", "transformers runs this model, and its blocks keep what they compute"
    if options.dtype == "float32":
        yield "masters", "float32 weights have no copies; they are of run.dtype=bfloat16"
    elif options.lora:
        yield "masters", "adapters are in float32"
    if options.offload != "none" and on_cpu(options.device):
        yield "offload", "the run is on a CPU, whose memory is the host's"
    if options.offload != "none" and options.recompute == "always":
        yield "offload", "run.recompute=always keeps no activations that could wait elsewhere"


def recomputes(plan: Plan) -> bool:
    """Whether blocks of the model can be computed again: those of this library's own decoder."""
    world = plan.world()
    return kind_of(world).runs_natively(plan.options.model, world, Lora())


def on_cpu(device: str) -> bool:
    """Whether a name of a device stands for the CPU here."""
    import torch

    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def findings(rule: Rule | None, held: Part, method: Method, world: Any) -> Iterable[Finding]:
    """What a part's rule says of it in a method; a rule that takes a third argument is told the world too."""
    if rule is None:
        return ()
    told = (held, method, world)
    return rule(*told[: len(inspect.signature(rule).parameters)])


def with_inner(method: Method) -> Iterator[tuple[str, Part]]:
    """Every part with its path, those that are settings of others included."""
    waiting = list(method.parts())
    while waiting:
        path, held = waiting.pop(0)
        yield path, held
        waiting += [(f"{path}.{name}", v) for name, v in held.settings().items() if isinstance(v, Part)]


def _average(method: Method) -> list[Finding]:
    """`reduce` averages decisions: where all terms are of something larger, it is never asked."""
    reduce = method.slots().get("reduce")
    terms = [t for t in method.terms() if t.settings().get("weight", 1.0) != 0] if reduce else []
    together = [m for m in getattr(method, "models", ()) if m.settings().get("update", m) is None]
    terms += [
        v for m in together for v in m.settings().values() if isinstance(v, Part) and v.info.slot == "loss"
    ]
    units = sorted({term.info.unit for term in terms})
    if not isinstance(reduce, Part) or "decision" in units:
        return []
    reason = f"what is learned from is averaged over {' and '.join(map(plural, units))}, not over decisions"
    return [("reduce", reason), *((f"reduce.{name}", reason) for name in reduce.settings())]


def _uncredited(method: Method) -> list[Finding]:
    """Who learns from pairs alone, given ones or those of a group, looks at no advantage."""
    surrogate, credit = (method.slots().get(slot) for slot in ("surrogate", "credit"))
    if not isinstance(surrogate, Part) or not isinstance(credit, Part) or credit.info.gives:
        return []
    reason = f"{surrogate.info.id} learns from pairs, whatever their advantages"
    of = surrogate.info
    pairs = of.unit == "pair" or (of.unit == "group" and of.idle != "advantage")
    return [(f"credit.{n}", reason) for n in credit.settings()] if pairs else []


def _uncut(method: Method) -> list[Finding]:
    """A term that sees all of a batch at once leaves nothing to divide."""
    seen = [t for t in method.terms() if "batch" in t.units]
    update = method.slots().get("update")
    if not seen or not isinstance(update, Part) or "minibatches" not in update.settings():
        return []
    return [("update.minibatches", f"{seen[0].info.id} sees the whole batch at once, which is never divided")]
