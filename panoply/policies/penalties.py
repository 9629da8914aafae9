"""Penalties on what was said before, the same for drawing tokens and for scoring them. They act before the temperature.

The repetition penalty (Keskar et al. 2019, arXiv 1909.05858) divides the logit of a token that the context already
holds, prompt and observations included, where it is positive, and multiplies it where it is negative. After it, what
the turn itself has said counts: the presence penalty is taken from the logit of every token in it, the frequency
penalty once for each time that it is there. Both may be negative, and then ask for repetition.

What was said follows from the record itself, so a decision records the penalties, and how much of its turn came before
it (`within`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from panoply.experience import Experience, distinct, moved

NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Values that change nothing; the columns of these names are there only where they do."""


def penalised(z: Tensor, penalty: Tensor | float) -> Tensor:
    """Logits of tokens that were said before."""
    return torch.where(z > 0, z / penalty, z * penalty)


def penalise_(logits: Tensor, history: Tensor, length: Tensor, penalty: Tensor | float) -> Tensor:
    """Penalise in [B, V] logits what row i has in `history[i, :length[i]]`. A token that is there twice counts once."""
    past = torch.arange(history.shape[1], device=history.device) >= length[:, None]
    ids = torch.where(past, history[:, :1], history)
    return logits.scatter_(1, ids, penalised(logits.gather(1, ids), penalty))


def count_(
    logits: Tensor,
    history: Tensor,
    start: Tensor,
    length: Tensor,
    presence: Tensor | float,
    frequency: Tensor | float,
) -> Tensor:
    """Take from [B, V] logits the penalties on what row i's turn has said, `history[i, start[i]:length[i]]`."""
    at = torch.arange(history.shape[1], device=history.device)
    inside = (at >= start[:, None]) & (at < length[:, None])
    newest = history.gather(1, (length - 1).clamp(min=0)[:, None])
    ids = torch.where(
        inside, history, newest
    )  # of a turn that has said nothing, a token that nothing happens to
    once = inside.to(logits.dtype)
    logits.scatter_(1, ids, logits.gather(1, ids) - (presence * once.amax(1, keepdim=True)).to(logits.dtype))
    return logits.scatter_add_(1, ids, -(frequency * once).to(logits.dtype))


@dataclass(frozen=True)
class Said:
    """What was said before each of some decisions, and the penalties on saying it again."""

    tokens: Tensor
    """[contexts, longest]: what the contexts hold, with anything past their ends."""
    context: Tensor
    length: Tensor
    """Per decision: its row of `tokens`, and how much of it came before."""
    start: Tensor
    """Where its turn begins."""
    penalty: Tensor | None
    presence: Tensor | None
    frequency: Tensor | None

    @classmethod
    def before(cls, experience: Experience, at: Tensor, device: torch.device) -> Said:
        """Before the decisions `at`, which have some of the penalties."""
        row, context = distinct(experience["context"][at])
        held = experience.context.ragged("tokens").take(row)
        tokens = held.padded(held.values, 0) if len(row) else held.values.new_zeros(0, 1)
        length = experience["position"][at]
        start = length - experience["within"][at] if "within" in experience else length
        penalties = (moved(experience[n][at], device) if n in experience else None for n in NEUTRAL)
        return cls(*(moved(x, device) for x in (tokens, context, length, start)), *penalties)

    def penalise(self, z: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Logits of some decisions with the penalties, and the slope: what a change of a logit is multiplied by."""
        held, length, start = self.tokens[self.context[rows]], self.length[rows, None], self.start[rows, None]
        at = torch.arange(held.shape[1], device=z.device)
        slope = torch.ones_like(z)
        if self.penalty is not None:
            penalty = self.penalty[rows, None].to(z.dtype)
            ids = torch.where(at >= length, held[:, :1], held)
            said = torch.zeros_like(z, dtype=torch.bool).scatter_(1, ids, True)
            slope = torch.where(said, torch.where(z > 0, 1 / penalty, penalty), 1.0)
            z = torch.where(said, penalised(z, penalty), z)
        if self.presence is not None or self.frequency is not None:
            inside = ((at >= start) & (at < length)).to(z.dtype)
            times = torch.zeros_like(z).scatter_add_(1, held, inside)
            for by, count in ((self.presence, (times > 0).to(z.dtype)), (self.frequency, times)):
                z = z if by is None else z - by[rows, None].to(z.dtype) * count
        return z, slope
