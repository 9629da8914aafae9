"""What fits on a GPU, as `panoply plan` prints it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from panoply.costs import Cost, beside, device_memory, of_size, step_work
from panoply.errors import PanoplyError
from panoply.footprint import CARDS, GB, NOWHERE, SIZES, Dimensions, Peak, Work, held, pass_tokens, verdict
from panoply.parts import Part
from panoply.plan_checks import no_adapters
from panoply.planning import Plan
from panoply.report.layout import prose, table

LARGE = 10_000_000
"""Weights from which on a float32 model is one that people take to a GPU."""
RANK = 16
"""Of adapters in the table, where the plan has none."""
WHOLE = "all weights"
MARKS = "* in smaller micro-batches, ** with blocks computed again as well, – not at all"


def peak_rows(found: Peak | None, spread: bool = False) -> list[tuple[str, str]]:
    """What a GPU will hold at most, by what it is for; of a run that is `spread`, what one would if all were on it."""
    if found is None:
        return []
    alone = ", were all of it on one" if spread else ""
    parts = {
        "held all the time": found.held,
        "the sampler": found.sampler,
        f"activations of {found.tokens:,} tokens": found.activations,
        "softmaxes": found.softmaxes,
        "logits": found.logits,
    }
    said = ", ".join(f"{si(size)}B {name}" for name, size in parts.items() if size)
    return [("on a GPU", f"about {si(found.total)}B at most{alone}: {said}")]


def what_fits(made: Plan, needed: Cost) -> str:
    """A table of published sizes: what this step would take with each, of the GPU here or of cards of several sizes.

    It is of the plan's prompts, answers and method, and does not depend on what the plan itself trains: all weights and
    adapters of its rank are both in it.
    """
    here = device_memory(made.options.device)
    cards = {f"{card} GB": card * GB for card in CARDS}
    if here is not None:
        cards = {f"{here / GB:.0f} GB here": here}
    work = step_work(made, needed.sampled_tokens, needed.trained_tokens)
    found = {size: _ways(made, size, work, list(cards.values())) for size in SIZES}
    rows = [("model", "what learns", *cards)]
    nowhere: dict[str, list[str]] = {}
    for size, ways in found.items():
        first = size
        for how, verdicts in ways.items():
            if all(one == NOWHERE for one in verdicts):
                nowhere.setdefault(how, []).append(size)
                continue
            rows.append((first, how, *verdicts))
            first = ""
    asked = f"GB at most in bfloat16, with prompts of {work.prompt:,} and answers of {work.answer:,} tokens"
    which = (
        "" if here is not None else f"; {_absent(made.options.device)}, so these are cards of common sizes"
    )
    alone = ", were all of the run on one card" if made.options.is_spread() else ""
    several = WHOLE in nowhere and _can_be_sharded(made)
    legend = prose(_legend(made, any("--lora" in how for _, how, *_ in rows)))
    return "\n\n".join(
        [prose(f"{asked}{alone}{which}:"), table(rows), *_said(nowhere, here, several), legend]
    )


def _legend(made: Plan, adapters: bool) -> str:
    """What the table's marks mean, what it counts, and which settings, not in the plan yet, would take less."""
    from panoply.loops.mover import solves

    options, update = made.options, made.method.slots()["update"]
    assert isinstance(update, Part)
    marks = f"{MARKS}; nf4 is --set lora.base=nf4 (QLoRA)" if adapters else MARKS
    on = ", adapters on every linear layer," if adapters else ""
    whole = ["--set update.bits=8"] if update.settings().get("bits") == 32 else []
    whole += ["--set run.masters=false"] if options.masters and not solves(update) else []
    less = ["shorter answers"]
    if options.offload == "none" and options.recompute != "always":
        less.append("--set run.offload=activations")
    first = (
        f"All weights take less with {' and '.join(whole)}, everything" if whole else "Everything takes less"
    )
    return (
        f"{marks}. Counted for Qwen2.5's shapes{on} and the method, optimiser and run options above. "
        f"{first} with {' or '.join(less)}."
    )


def _can_be_sharded(made: Plan) -> bool:
    """Whether several GPUs could share all weights, where they do not yet."""
    from panoply.scale import sharded

    if made.options.layout == "sharded":
        return False
    try:
        sharded.check(replace(made, options=replace(made.options, lora=0, dtype="bfloat16")))
    except PanoplyError:
        return False
    return True


def _absent(device: str) -> str:
    return (
        "the plan is for a CPU" if device == "cpu" else f"no {'GPU' if device == 'auto' else device} is here"
    )


def _ways(made: Plan, size: str, work: Work, cards: list[int]) -> Mapping[str, list[str]]:
    """How a size can be trained, with what it takes of each card."""
    options, update = made.options, made.method.slots()["update"]
    assert isinstance(update, Part)
    numbers = 2 if update.info.cost is None else update.info.cost(update)
    rank, shapes = options.lora or RANK, SIZES[size]
    sizes = Dimensions.of(shapes)
    assert sizes is not None
    found, adapted = {}, dict.fromkeys(("whole", made.lora.base, "nf4"))
    for base in ("", *(() if no_adapters(made.method) else adapted)):
        adapters = rank if base else 0
        tokens = pass_tokens(options.micro_tokens, adapters=adapters > 0)
        asked = replace(work, width=2, frozen=adapters > 0, micro_tokens=tokens)
        more = beside(made, of_size(shapes, adapters, base), 2)
        holding = held(shapes, numbers, adapters, options.masters, base or "whole", more)
        how = f"--lora {rank}{'' if base == 'whole' else f', {base}'}" if base else WHOLE
        found[how] = [verdict(sizes, holding, asked, card) for card in cards]
    return found


def _said(nowhere: Mapping[str, list[str]], here: int | None, several: bool) -> list[str]:
    """What has room nowhere, and what to do then."""
    if not nowhere:
        return []
    missing = "; ".join(f"{how} of {', '.join(sizes)}" for how, sizes in nowhere.items())
    which = "The GPU here has no room" if here is not None else "None of these cards has room"
    hint = " Several GPUs can share them: --learners N --layout sharded." if several else ""
    return [prose(f"{which} for: {missing}.{hint}")]


def si(amount: float) -> str:
    """`1234567` as `1.2 M`."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if amount < 1000 or unit == "P":
            return f"{amount:.0f} {unit}" if unit == "" else f"{amount:.1f} {unit}"
        amount /= 1000
    raise AssertionError
