"""How decisions are averaged. Each part returns the weight of every decision, computed once on a whole mini-batch."""

from __future__ import annotations

from torch import Tensor

from panoply.experience import Experience, Segments
from panoply.parts import part


def _episodes(experience: Experience, mask: Tensor) -> tuple[Segments, Tensor]:
    """Episodes, and how many decisions of the stream each has."""
    segments = experience.by("episode")
    return segments, segments.sum(mask.float())


@part("reduce", equation="mean over tokens")
def token_mean(experience: Experience, mask: Tensor) -> Tensor:
    """1/N for each of N decisions: long episodes weigh more."""
    return mask.float() / mask.sum().clamp(min=1)


@part("reduce", equation="mean over episodes, mean over their tokens")
def sequence_mean(experience: Experience, mask: Tensor) -> Tensor:
    """1/(E·|e|): every episode weighs the same, so a token of a long one weighs less (GRPO as published)."""
    episodes, lengths = _episodes(experience, mask)
    weight = 1.0 / (lengths.clamp(min=1) * (lengths > 0).sum().clamp(min=1))
    return mask.float() * episodes.rows(weight)


@part("reduce", equation="mean over groups, mean over their tokens")
def prompt_mean(experience: Experience, mask: Tensor) -> Tensor:
    """1/(G·|g|): every group weighs the same, so asking one prompt more often does not make it count for more."""
    groups = experience.by("group")
    sizes = groups.sum(mask.float())
    weight = 1.0 / (sizes.clamp(min=1) * (sizes > 0).sum().clamp(min=1))
    return mask.float() * groups.rows(weight)


@part("reduce", equation="mean over episodes, sum over their tokens")
def sequence_sum(experience: Experience, mask: Tensor) -> Tensor:
    """1/E: the plain policy gradient of the episode's log-probability."""
    _, lengths = _episodes(experience, mask)
    return mask.float() / (lengths > 0).sum().clamp(min=1)


@part(
    "reduce", equation="mean over episodes, sum over their tokens / {length}", bounds={"length": "at least 1"}
)
def constant(experience: Experience, mask: Tensor, *, length: int = 1024) -> Tensor:
    """1/(E·L) with a fixed L: unbiased by length (Dr. GRPO, arXiv 2503.20783)."""
    _, lengths = _episodes(experience, mask)
    return mask.float() / ((lengths > 0).sum().clamp(min=1) * length)
