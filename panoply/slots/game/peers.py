"""Learners that are each other's peers: every one learns from some of the others' episodes, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from panoply.costs import Lengths, Tokens, part_tokens
from panoply.episodes import earlier, varied
from panoply.experience import Experience
from panoply.parts import Finding, Part, part
from panoply.seeds import torch_rng
from panoply.selves import actors
from panoply.slots.sample.groups import groups

_GROUPS = groups()
FAR = 2**40
"""Keys of others' episodes and groups are moved by so much for each seat, or they would be one's own."""


def _impossible(held: Any, method: Any) -> list[Finding]:
    if held.sample.info.slot != "sample" or "column:parent" in held.sample.info.gives:
        return [("sample", "peers exchange groups of whole episodes")]
    if actors(held.sample.needs()):
        return [("sample", "each seat samples with its own policy as it is")]
    return []


def _cost(held: Any, of: Lengths) -> Tokens:
    """Of one seat; the number of seats is not a part's to know."""
    sampled, trained = part_tokens(held.sample, of)
    return sampled, trained + held.theirs * held.sample.settings().get("group", 1) * (of.prompt + of.context)


@part(
    "game",
    equation=lambda held: f"each its own {held.sample.equation()}, and {held.theirs} groups of others",
    needs=lambda held: held.sample.needs() | {f"signal:{held.name}"},
    bounds={"theirs": "at least 1"},
    impossible=_impossible,
    cost=_cost,
)
def peers(
    collectors: Mapping[str, Any], *, sample: Part = _GROUPS, theirs: int = 4, name: str = "success"
) -> dict[str, Experience]:
    """Every seat samples for itself, and learns from its own groups and from some of the others'.

    What is taken over has the source `replay`, and its `logp` is that of who acted. A ratio to the behaviour corrects
    for that; one that is taken `against=old` treats it as one's own (SAPO, arXiv 2509.08721).

    sample   how each samples
    theirs   groups that each takes over, by lot among those of others whose signal varies
    name     that signal
    """
    found: dict[str, Experience] = {of: sample(collect) for of, collect in collectors.items()}
    shown = {of: earlier(rows.take(varied(name)(rows))) for of, rows in found.items()}
    moved = {
        of: rows.with_columns(episode=rows["episode"] + at * FAR, group=rows["group"] + at * FAR)
        for at, (of, rows) in enumerate(shown.items(), 1)
    }
    dealt = {}
    for of, collect in collectors.items():
        others = [rows for other, rows in moved.items() if other != of and len(rows)]
        if not others:
            dealt[of] = found[of]
            continue
        offered = Experience.mix(others)
        keys = offered.by("group").keys
        order = torch.randperm(len(keys), generator=torch_rng("peers", collect.seed, collect.state["groups"]))
        taken = offered.take(torch.isin(offered["group"], keys[order[:theirs]]))
        dealt[of] = Experience.mix([found[of], taken])
    return dealt
