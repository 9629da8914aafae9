"""The repetition penalty (Keskar et al. 2019, arXiv 1909.05858), the same for drawing tokens and for scoring them.

The logit of a token that the context already holds, prompt and observations included, is divided by the penalty
where it is positive and multiplied by it where it is negative. It acts before the temperature. What a context holds
follows from the record itself, so a decision records the penalty alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from panoply.experience import Experience, distinct, moved


def penalised(z: Tensor, penalty: Tensor | float) -> Tensor:
    """Logits of tokens that were said before."""
    return torch.where(z > 0, z / penalty, z * penalty)


def penalise_(logits: Tensor, history: Tensor, length: Tensor, penalty: Tensor | float) -> Tensor:
    """Penalise in [B, V] logits what row i has in `history[i, :length[i]]`. A token that is there twice counts once."""
    past = torch.arange(history.shape[1], device=history.device) >= length[:, None]
    ids = torch.where(past, history[:, :1], history)
    return logits.scatter_(1, ids, penalised(logits.gather(1, ids), penalty))


@dataclass(frozen=True)
class Said:
    """What was said before each of some decisions, and the penalty on saying it again."""

    tokens: Tensor
    """[contexts, longest]: what the contexts hold, with anything past their ends."""
    context: Tensor
    length: Tensor
    """Per decision: its row of `tokens`, and how much of it came before."""
    penalty: Tensor

    @classmethod
    def before(cls, experience: Experience, at: Tensor, device: torch.device) -> Said:
        """Before the decisions `at`, which have a penalty."""
        row, context = distinct(experience["context"][at])
        held = experience.context.ragged("tokens").take(row)
        tokens = held.padded(held.values, 0) if len(row) else held.values.new_zeros(0, 1)
        length, penalty = experience["position"][at], experience["repetition_penalty"][at]
        return cls(*(moved(x, device) for x in (tokens, context, length, penalty)))

    def penalise(self, z: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Logits of some decisions with the penalty, and its slope: what a change of a logit is multiplied by."""
        held, length = self.tokens[self.context[rows]], self.length[rows, None]
        past = torch.arange(held.shape[1], device=z.device) >= length
        said = torch.zeros_like(z, dtype=torch.bool).scatter_(1, torch.where(past, held[:, :1], held), True)
        penalty = self.penalty[rows, None].to(z.dtype)
        slope = torch.where(said, torch.where(z > 0, 1 / penalty, penalty), 1.0)
        return torch.where(said, penalised(z, penalty), z), slope
