"""Given episodes as single judgements: each is desirable or not, whatever it was compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panoply.costs import Lengths, Tokens, part_tokens
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.parts import Finding, Part, part
from panoply.slots.data.teacher import teacher_pairs

if TYPE_CHECKING:
    from panoply.rollout.text import Collector

_PAIRS = teacher_pairs()


def labels(experience: Experience, name: str = "success") -> Tensor:
    """+1 for desirable decisions and −1 for others: by the side of the pair they are on, or by a signal."""
    if experience.pairs is not None:
        chosen = torch.isin(experience["episode"], experience.pairs.tensor("chosen"))
    elif f"signal:{name}" in experience:
        episodes = experience.by("episode")
        chosen = episodes.rows(episodes.sum(experience[f"signal:{name}"]) > 0)
    else:
        raise PanoplyError(
            f"Episodes without pairs and without the signal '{name}' cannot be told good from bad."
        )
    return torch.where(chosen, 1, -1)


def mismatched(experience: Experience) -> Experience:
    """Every answer again, after another task's prompt: what the policy says where it was not asked.

    These rows have the label 0 and negative episode numbers, which no other episode has.
    """
    context = experience.context
    tokens, shared, prompt = context.ragged("tokens"), context.tensor("shared"), context.tensor("prompt")
    order = prompt.argsort(stable=True)
    most = int(prompt.bincount().max())
    if 2 * most > len(prompt):
        raise PanoplyError("Answers to one prompt cannot be put after another: the batch needs more prompts.")
    after = torch.empty_like(order)
    after[order] = order.roll(most)  # a row of another prompt, since no prompt has more rows
    swapped = experience.reprompted(
        {row: tokens[other][: int(shared[other])].tolist() for row, other in enumerate(after.tolist())}
    )
    marks = {"episode": -1 - experience["context"], "label": torch.zeros_like(experience["label"])}
    marks |= {name: torch.zeros_like(experience[name]) for name in experience.decisions if "signal:" in name}
    return Experience(swapped.decisions.plus(marks), swapped.context)


def _impossible(held: Any, method: Any) -> list[Finding]:
    if held.data.info.slot != "data":
        return [("data", "it is not a data part")]
    return [("data", "a part that remembers cannot be inside another")] if held.data.info.state else []


def _cost(held: Any, of: Lengths) -> Tokens:
    """Every answer twice, each with a prompt of its own."""
    _, once = part_tokens(held.data, of)
    return 0, 2 * once


@part(
    "data",
    equation=lambda held: f"{held.data.equation()}, each by itself",
    impossible=_impossible,
    cost=_cost,
)
def unpaired(collect: Collector, *, data: Part = _PAIRS, name: str = "success") -> Experience:
    """Episodes of another data part with the column `label`, and the same answers after wrong prompts (label 0).

    The label is +1 or −1: the side of its pair an episode is on, or whether it earned the signal `name`.
    """
    found: Experience = data(collect)
    found = found.with_columns(label=labels(found, name))
    return Experience.cat([Experience(found.decisions, found.context), mismatched(found)])
