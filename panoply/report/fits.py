"""What fits on a GPU, as `panoply plan` prints it."""

from __future__ import annotations

from dataclasses import replace

from panoply import selves
from panoply.costs import Cost, device_memory, step_work
from panoply.footprint import CARDS, GB, SIZES, Dimensions, Peak, held, verdict
from panoply.parts import Part
from panoply.planning import Plan
from panoply.report.layout import prose, table

LARGE = 10_000_000
"""Weights from which on a float32 model is one that people take to a GPU."""
LEGEND = (
    "GB at most in bfloat16, of Qwen2.5's shapes with the prompts, answers and optimiser above; * in smaller "
    "micro-batches, ** with blocks computed again, – not at all. A run takes less with update.bits=8, "
    "run.masters=false, run.offload=activations, or shorter answers."
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
    """A table of published sizes: what this step would take with each, of the GPU here or of cards of several sizes."""
    here = device_memory(made.options.device)
    cards = (
        {f"{card} GB": card * GB for card in CARDS} if here is None else {f"{here / GB:.0f} GB here": here}
    )
    update = made.method.slots()["update"]
    assert isinstance(update, Part)
    numbers = 2 if update.info.cost is None else update.info.cost(update)
    copies = sum(one.copies for one in selves.named(made.method.needs()))
    work = replace(step_work(made, needed.sampled_tokens, needed.trained_tokens), width=2)
    rows = [("bfloat16", "", *cards)]
    for name, shapes in SIZES.items():
        sizes = Dimensions.of(shapes)
        assert sizes is not None
        for how, rank in (("all weights", 0), ("--lora 16", 16)):
            holding = held(shapes, numbers, rank, made.options.masters, copies)
            rows.append(
                (
                    name,
                    how,
                    *(
                        verdict(sizes, holding, replace(work, frozen=rank > 0), card)
                        for card in cards.values()
                    ),
                )
            )
    return f"{table(rows)}\n\n{prose(LEGEND)}"


def si(amount: float) -> str:
    """`1234567` as `1.2 M`."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if amount < 1000 or unit == "P":
            return f"{amount:.0f} {unit}" if unit == "" else f"{amount:.1f} {unit}"
        amount /= 1000
    raise AssertionError
