"""What a policy knows in the midst of an episode: how likely it finds the right answer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from panoply.experience import Column, Experience, Ragged, Segments, Table
from panoply.policies.text import TextPolicy
from panoply.worlds.world import Task, TextWorld

Question = tuple[tuple[int, ...], tuple[int, ...]]
"""What was said so far and leads up to an answer, and that answer."""
ROWS = 256
"""Questions asked at a time."""


def answer_likelihood(
    world: TextWorld, policy: TextPolicy, tasks: Sequence[Task], decisions: Table, context: Table
) -> Tensor:
    """For each decision, the belief in its task's right answer, were it to be given at the start of the turn.

    That is the geometric mean of its tokens' probabilities at temperature 1. Equal questions are asked once. Episodes
    are numbered as `tasks` are.
    """
    episode, place = decisions.tensor("episode"), decisions.tensor("context")
    turns = Segments(episode * 2**20 + decisions.tensor("turn"))
    begin = turns.min(decisions.tensor("position"))
    tokens = context.ragged("tokens")
    asked: dict[Question, int] = {}
    index = []
    for row, c, at in torch.stack([turns.first(episode), turns.first(place), begin], 1).tolist():
        bridge, answer = world.conclusion(tasks[row])
        question = (*tokens[c][:at].tolist(), *bridge)
        index.append(asked.setdefault((question, tuple(answer)), len(asked)))
    left, found = iter(asked), []
    while some := list(itertools.islice(left, ROWS)):
        found.append(likelihoods(policy, some))
    return turns.rows(torch.cat(found).exp()[torch.tensor(index)])


@torch.no_grad()
def likelihoods(policy: TextPolicy, asked: Sequence[Question]) -> Tensor:
    """The mean log-probability of each answer's tokens."""
    lengths = torch.tensor([len(answer) for _, answer in asked])
    row = torch.arange(len(asked)).repeat_interleave(lengths)
    inside = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
    columns: dict[str, Column] = {
        "context": row,
        "position": torch.tensor([len(question) for question, _ in asked])[row] + inside,
        "action": torch.tensor([token for _, answer in asked for token in answer]),
    }
    tokens = Ragged.from_lists([[*question, *answer] for question, answer in asked])
    logp = policy.score(Experience(Table(columns), Table({"tokens": tokens})))["logp"]
    return Segments(row).mean(logp.cpu().float())
