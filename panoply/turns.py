"""Turns of text as transitions (s, a, r, s′): what critics of whole utterances learn from, again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from panoply.experience import OPEN, Experience, Ragged

Tokens = Sequence[int]


class Turn(NamedTuple):
    """What was read, what was said to it, what that earned, and what was read next: nothing after the last turn."""

    state: Tokens
    said: Tokens
    reward: float
    then: Tokens
    task: int


def turns_of(experience: Experience) -> list[Turn]:
    """The turns of episodes, whose rows have `reward`. An episode that was cut off counts as one that is over.

    What would have been read after the cut is no part of an experience, so nothing can be looked up there.
    """
    turns = experience.by("turn")
    rows = torch.arange(len(experience), device=turns.index.device)
    first, last = turns.first(rows), turns.last(rows)
    context = experience["context"][first].tolist()
    begins, ends = (experience["position"][at].tolist() for at in (first, last))
    earned = turns.sum(experience["reward"].float()).tolist()
    over = (experience["end"][last] != OPEN).tolist()
    episode, number, task = (experience[name][first].tolist() for name in ("episode", "turn", "task"))
    texts = experience.context.ragged("tokens").tolist()
    read = [texts[c][:at] for c, at in zip(context, begins, strict=True)]
    place = {key: i for i, key in enumerate(zip(episode, number, strict=True))}
    return [
        Turn(
            read[i],
            texts[context[i]][begins[i] : ends[i] + 1],
            earned[i],
            () if over[i] else read[place[episode[i], number[i] + 1]],
            task[i],
        )
        for i in range(len(read))
    ]


class Turns:
    """The last `size` turns, drawn with repetition."""

    def __init__(self, size: int):
        self.size, self.held = size, list[Turn]()

    def __len__(self) -> int:
        return len(self.held)

    def add(self, turns: Sequence[Turn]) -> None:
        self.held = [*self.held, *turns][-self.size :]

    def draw(self, n: int, generator: torch.Generator) -> list[Turn]:
        return [self.held[i] for i in torch.randint(len(self.held), (n,), generator=generator).tolist()]

    # -------------------------------------------------------------- saving

    def state(self) -> dict[str, Tensor]:
        texts = {name: [getattr(t, name) for t in self.held] for name in ("state", "said", "then")}
        found: dict[str, Tensor] = {}
        for name, lists in texts.items():
            ragged = Ragged.from_lists(lists)
            found |= {f"{name}#values": ragged.values.long(), f"{name}#offsets": ragged.offsets}
        reward = torch.tensor([t.reward for t in self.held], dtype=torch.float64)
        return {
            **found,
            "reward": reward,
            "task": torch.tensor([t.task for t in self.held], dtype=torch.long),
        }

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        state, said, then = (
            Ragged(named[f"{name}#values"], named[f"{name}#offsets"]).tolist()
            for name in ("state", "said", "then")
        )
        numbers = zip(named["reward"].tolist(), named["task"].tolist(), strict=True)
        rows = zip(state, said, then, numbers, strict=True)
        self.held = [Turn(s, a, r, after, task) for s, a, after, (r, task) in rows]
