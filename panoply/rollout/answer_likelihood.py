"""What a policy knows in the midst of an episode: how likely it finds the right answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from panoply.errors import PanoplyError
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
    if "vectors" in context:
        raise PanoplyError(
            "An answer's likelihood is asked after tokens alone, and this policy has read vectors."
        )
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
    return turns.rows(_means(policy, list(asked)).exp()[torch.tensor(index)])


def likelihoods(policy: TextPolicy, asked: Sequence[Question]) -> Tensor:
    """The mean log-probability of each answer's tokens."""
    return _means(policy, asked)


def probabilities(policy: TextPolicy, asked: Sequence[Question]) -> Tensor:
    """The mean probability of each answer's tokens: one that is out of the question does not make it 0."""
    return _means(policy, asked, Tensor.exp)


@torch.no_grad()
def _means(
    policy: TextPolicy, asked: Sequence[Question], of: Callable[[Tensor], Tensor] = Tensor.float
) -> Tensor:
    """The mean over each answer's tokens of something of their log-probabilities."""
    found = []
    for some in (asked[i : i + ROWS] for i in range(0, len(asked), ROWS)):
        lengths = torch.tensor([len(answer) for _, answer in some])
        row = torch.arange(len(some)).repeat_interleave(lengths)
        inside = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
        columns: dict[str, Column] = {
            "context": row,
            "position": torch.tensor([len(question) for question, _ in some])[row] + inside,
            "action": torch.tensor([token for _, answer in some for token in answer]),
        }
        tokens = Ragged.from_lists([[*question, *answer] for question, answer in some])
        logp = policy.score(Experience(Table(columns), Table({"tokens": tokens})))["logp"]
        found.append(Segments(row).mean(of(logp.cpu().float())))
    return torch.cat(found)
