"""The slots, and what the parts of each are called with: a function that differs is refused when it is registered."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from panoply.errors import PanoplyError


@dataclass(frozen=True)
class Slot:
    """The contract of a slot."""

    takes: tuple[str, ...]
    """What its parts are called with: their positional arguments, by name."""
    returns: str
    """What they return, in words."""
    settings: frozenset[str] = frozenset()
    """Keywords that every part has, because others read them."""
    remembers: bool = False
    """Whether a part may declare a `state`, which it then takes first and returns anew."""


_TERM = Slot(("batch",), "one value per row of its unit, and columns for metrics", remembers=True)

SLOTS = {
    "sample": Slot(("collect",), "an `Experience`; off policy an `Acting`", remembers=True),
    "reward": Slot(("experience",), "the column `reward`", remembers=True),
    "select": Slot(("experience",), "a mask of the decisions to keep, or an `Experience`", remembers=True),
    "credit": Slot(("experience",), "the column `advantage`, or several columns by name", remembers=True),
    "surrogate": _TERM,
    "regularise": _TERM,
    "reduce": Slot(("experience", "mask"), "the weight of each decision"),
    "update": Slot(("parameters",), "an optimiser"),
    "data": Slot(("collect",), "an `Experience`", remembers=True),
    "loss": _TERM,
    "model": Slot(("seat",), "a `Model`"),
    "replay": Slot(("policy", "seed"), "a `Memory`", frozenset({"batch", "updates", "every", "warmup"})),
    "network": Slot(("policy", "seed"), "a module"),
    "targets": Slot(("updates", "pairs"), "nothing: it moves targets towards weights"),
    "turn": Slot(
        ("names", "step", "metrics"), "the names of the seats that learn in this step", remembers=True
    ),
    "game": Slot(("collectors",), "an `Experience` for each seat, by name", remembers=True),
    "grow": Slot(("tree",), "branches to add to it, none when it is grown"),
    "match": Slot(("pool", "rng"), "the number of a member of a pool"),
    "schedule": Slot(("step", "total"), "a factor"),
    "make": Slot(("maker",), "rows of data"),
}
"""The questions a method answers, the schedules that numbers in the answers may follow, and data made between runs."""

TERMS = ("surrogate", "regularise", "loss")
"""Their parts see a mini-batch in pieces, so that their `prepare`, which sees it whole, is what remembers."""

ON_TRANSITIONS = Slot(("learned", "rows"), "one value per transition, and columns for metrics")
"""The contract of a `loss` whose unit is the transition."""


OF_EPISODES = Slot(("policy", "seed"), "`Episodes`, of an on-policy method", frozenset({"batch"}))
"""The contract of a `replay` whose unit is the episode."""


def contract(slot: str, unit: str = "decision") -> Slot:
    """What holds for the parts of a slot that are of this unit."""
    return {("loss", "transition"): ON_TRANSITIONS, ("replay", "episode"): OF_EPISODES}.get(
        (slot, unit), SLOTS[slot]
    )


def check_contract(
    slot: str,
    name: str,
    unit: str,
    function: Callable[..., Any],
    state: Callable[[], dict[str, Any]] | None,
    prepare: Callable[..., Any] | None,
    annotate: Callable[..., Any] | None,
) -> None:
    """Refuse, in one sentence, a function that its slot could not call."""
    who, held_to = f"{slot}.{name}", contract(slot, unit)
    settings = [p.name for p in inspect.signature(function).parameters.values() if p.kind == p.KEYWORD_ONLY]
    first = () if state is None else ("state",)
    if state is not None and not held_to.remembers:
        raise PanoplyError(f"{who} declares a state, but a part of {slot} cannot remember.")
    if state is not None and prepare is None and slot in TERMS:
        raise PanoplyError(
            f"{who} declares a state but no prepare: a term sees a mini-batch in pieces, and only prepare, which sees "
            "it whole, can remember."
        )
    own = () if slot in TERMS else first
    _check_takes(who, f"a part of {slot}", function, (*own, *held_to.takes))
    if prepare is not None:
        if held_to.takes != ("batch",):
            raise PanoplyError(f"{who} declares a prepare, which only terms on a batch have.")
        _check_takes(f"The prepare of {who}", "it", prepare, (*first, "batch"), settings)
    if annotate is not None:
        if held_to is not ON_TRANSITIONS:
            raise PanoplyError(f"{who} declares an annotate, which only losses on transitions have.")
        _check_takes(f"The annotate of {who}", "it", annotate, ("learned", "replay"), settings)
    for missing in sorted(held_to.settings.difference(settings)):
        raise PanoplyError(f"{who} has no setting '{missing}', which every part of {slot} has.")


def _check_takes(
    who: str,
    called: str,
    function: Callable[..., Any],
    takes: tuple[str, ...],
    settings: Collection[str] = (),
) -> None:
    """Compare positional arguments by name; an underscore before one says that it is not used."""
    given = [
        f"*{p.name}" if p.kind == p.VAR_POSITIONAL else p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD) and p.name not in settings
    ]
    if tuple(name.lstrip("_") for name in given) != takes:
        raise PanoplyError(
            f"{who} takes ({', '.join(given)}), but {called} is called with ({', '.join(takes)})."
        )


def slot_table() -> str:
    """The contracts as a table of the documentation."""
    others = (("`loss` on transitions", ON_TRANSITIONS), ("`replay` of episodes", OF_EPISODES))
    rows = [*((f"`{name}`", slot) for name, slot in SLOTS.items()), *others]
    lines = [
        f"| {name} | {', '.join(slot.takes)} | {slot.returns} | {'yes' if slot.remembers else ''} |"
        for name, slot in rows
    ]
    return "\n".join(["| slot | called with | returns | may remember |", "|---|---|---|---|", *lines]) + "\n"
