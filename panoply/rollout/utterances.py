"""New turns of the policy, or old ones, in contexts that are given as tokens; no world hears them, and nothing is
graded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from panoply.errors import PanoplyError
from panoply.experience import OPEN, OWN, REPLAY, TERMINATED, Column, Experience, Ragged, Segments, Table
from panoply.rollout.engine import Request
from panoply.seeds import stable_hash

if TYPE_CHECKING:
    from panoply.rollout.text import Collector

FIRST = 1 << 40
"""The number of the first of them, which no episode of a world has."""


def utterances(
    collect: Collector,
    states: Sequence[Sequence[int]],
    tasks: Sequence[int],
    name: str,
    **how: Any,
) -> Experience:
    """One turn after each context, in their order: an episode each, counted as decisions alone.

    name   what they are drawn for: the same name, step and place give the same random numbers
    how    temperature, cuts, penalties and max_tokens, as `Collector.episodes` takes them
    """
    collect.check_tokens_alone("An utterance")
    if collect.world.play(collect.world.task("train", 0)).restricts:
        raise PanoplyError(
            f"{collect.world.name} says in each episode what may be drawn, and a context alone does not tell."
        )
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, state in enumerate(states):
        alike.setdefault(tuple(state), []).append(i)
    seed = (name, collect.seed, collect.version)
    requests = [Request(state, [stable_hash(*seed, i) for i in which]) for state, which in alike.items()]
    order = torch.tensor([i for which in alike.values() for i in which])
    found = collect.generate(requests, collect._sampling(**how), entropy=True)
    collect._count(found.decisions)
    decisions = found.decisions
    episode = order[decisions.tensor("context")]
    decisions = decisions.plus({"episode": episode}).take(episode.argsort(stable=True))
    row = decisions.tensor("episode")
    keys: dict[str, Column] = {
        "task": torch.tensor(list(tasks))[row],
        "group": row,
        "turn": torch.zeros_like(row),
        "state": torch.tensor([stable_hash(*state) for state in states])[row],
        "version": torch.full_like(row, collect.version),
        "source": torch.full_like(row, OWN),
        "end": torch.where(Segments(row).is_last(), TERMINATED, OPEN),
    }
    return Experience(decisions.plus({**keys, "episode": row + FIRST}), found.context)


@torch.no_grad()
def said_before(
    collect: Collector,
    states: Sequence[Sequence[int]],
    said: Sequence[Sequence[int]],
    tasks: Sequence[int],
    temperature: float = 1.0,
) -> Experience:
    """What was once said after each context, as rows like those of new utterances; `logp` is the policy's of now."""
    lengths = torch.tensor([len(answer) for answer in said])
    row = torch.arange(len(said)).repeat_interleave(lengths)
    shared = torch.tensor([len(state) for state in states])
    prompts: dict[tuple[int, ...], int] = {}
    prompt = torch.tensor([prompts.setdefault(tuple(state), len(prompts)) for state in states])
    decisions: dict[str, Column] = {
        "task": torch.tensor(list(tasks))[row],
        "group": row,
        "episode": row + FIRST,
        "turn": torch.zeros_like(row),
        "state": torch.tensor([stable_hash(*state) for state in states])[row],
        "version": torch.full_like(row, collect.version),
        "context": row,
        "position": shared[row] + torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row],
        "action": torch.tensor([token for answer in said for token in answer]),
        "source": torch.full_like(row, REPLAY),
        "end": torch.where(Segments(row).is_last(), TERMINATED, OPEN),
    }
    if temperature not in (0.0, 1.0):
        decisions["temperature"] = torch.full((len(row),), temperature)
    tokens = Ragged.from_lists([[*state, *answer] for state, answer in zip(states, said, strict=True)])
    rows = Experience(Table(decisions), Table({"tokens": tokens, "prompt": prompt, "shared": shared}))
    return rows.with_columns(logp=collect.policy.score(rows)["logp"].cpu())


def said_in(experience: Experience) -> list[list[int]]:
    """The tokens of each episode of one turn, in the order of their numbers."""
    answers: dict[int, list[int]] = {}
    for episode, token in zip(experience["episode"].tolist(), experience["action"].tolist(), strict=True):
        answers.setdefault(episode, []).append(token)
    return [answers[i] for i in sorted(answers)]
