"""What fits on a GPU, as `panoply plan` prints it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from panoply import selves
from panoply.costs import Cost, device_memory, step_work
from panoply.footprint import CARDS, GB, NOWHERE, SIZES, Dimensions, Peak, Work, held, pass_tokens, verdict
from panoply.parts import Part
from panoply.planning import Plan
from panoply.report.layout import prose, table

LARGE = 10_000_000
"""Weights from which on a float32 model is one that people take to a GPU."""
RANK = 16
"""Of adapters in the table, where the plan has none."""
WHOLE = "all weights"
LEGEND = (
    "* in smaller micro-batches, ** with blocks computed again as well, – not at all; nf4 is --set lora.base=nf4 "
    "(QLoRA). Counted for Qwen2.5's shapes, adapters on every linear layer, and the method, optimiser and run options "
    "above. All weights take less with --set update.bits=8 and --set run.masters=false, everything with shorter "
    "answers or --set run.offload=activations."
)


def peak_rows(found: Peak | None) -> list[tuple[str, str]]:
    """What a GPU will hold at most, by what it is for."""
    if found is None:
        return []
    parts = {
        "held all the time": found.held,
        "the sampler": found.sampler,
        f"activations of {found.tokens:,} tokens": found.activations,
        "softmaxes": found.softmaxes,
        "logits": found.logits,
    }
    said = ", ".join(f"{si(size)}B {name}" for name, size in parts.items() if size)
    return [("on a GPU", f"about {si(found.total)}B at most: {said}")]


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
    pieces = [prose(f"{asked}{which}:"), table(rows), *_said(nowhere, here), prose(LEGEND)]
    return "\n\n".join(pieces)


def _absent(device: str) -> str:
    return (
        "the plan is for a CPU" if device == "cpu" else f"no {'GPU' if device == 'auto' else device} is here"
    )


def _ways(made: Plan, size: str, work: Work, cards: list[int]) -> Mapping[str, list[str]]:
    """How a size can be trained, with what it takes of each card."""
    options, update = made.options, made.method.slots()["update"]
    assert isinstance(update, Part)
    numbers = 2 if update.info.cost is None else update.info.cost(update)
    copies = sum(one.copies for one in selves.named(made.method.needs()))
    rank, shapes = options.lora or RANK, SIZES[size]
    sizes = Dimensions.of(shapes)
    assert sizes is not None
    found = {}
    for base in ("", *dict.fromkeys(("whole", made.lora.base, "nf4"))):
        adapters = rank if base else 0
        tokens = pass_tokens(options.micro_tokens, adapters=adapters > 0)
        asked = replace(work, width=2, frozen=adapters > 0, micro_tokens=tokens)
        holding = held(shapes, numbers, adapters, options.masters, copies, base or "whole")
        how = f"--lora {rank}{'' if base == 'whole' else f', {base}'}" if base else WHOLE
        found[how] = [verdict(sizes, holding, asked, card) for card in cards]
    return found


def _said(nowhere: Mapping[str, list[str]], here: int | None) -> list[str]:
    """What has room nowhere, and what to do then."""
    if not nowhere:
        return []
    missing = "; ".join(f"{how} of {', '.join(sizes)}" for how, sizes in nowhere.items())
    which = "The GPU here has no room" if here is not None else "None of these cards has room"
    several = " Several GPUs can share them: --learners N --layout sharded." if WHOLE in nowhere else ""
    return [prose(f"{which} for: {missing}.{several}")]


def si(amount: float) -> str:
    """`1234567` as `1.2 M`."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if amount < 1000 or unit == "P":
            return f"{amount:.0f} {unit}" if unit == "" else f"{amount:.1f} {unit}"
        amount /= 1000
    raise AssertionError
