"""What was asked: the prompts of some experience, one a group, as a model reads them that knows no answers."""

from __future__ import annotations

import torch
from torch import Tensor

from panoply.experience import Experience, Ragged, Segments, Table


def asked_about(experience: Experience) -> tuple[Ragged, Tensor, Segments]:
    """The prompt and the task of each group, and the groups."""
    of = experience.by("group")
    first = of.first(experience["context"])
    whole, shared = (
        experience.context.ragged("tokens").take(first),
        experience.context.tensor("shared")[first],
    )
    prompts = [row[:n] for row, n in zip(whole.tolist(), shared.tolist(), strict=True)]
    return Ragged.from_lists(prompts), of.first(experience["task"]), of


def after_prompts(prompts: Ragged, tasks: Tensor) -> Experience:
    """One row for each prompt, at the place where its answer would begin: a model's state there knows the prompt."""
    row, lengths = torch.arange(len(tasks)), prompts.lengths
    rows = {"task": tasks, "group": row, "episode": row, "context": row, "position": lengths}
    none = torch.zeros_like(row)
    return Experience(
        Table({**rows, "action": none, "source": none}),
        Table({"tokens": prompts, "prompt": row, "shared": lengths}),
    )
