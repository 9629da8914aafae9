"""Data made by a world's own teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from panoply.experience import Experience
from panoply.parts import part

if TYPE_CHECKING:
    from panoply.rollout.text import Collector


LIMITS = {"batch": "at least 1"}


@part(
    "data",
    equation="{batch} demonstrations of the world's teacher a step",
    needs={"world:teacher"},
    bounds=LIMITS,
)
def demonstrations(collect: Collector, *, batch: int = 128) -> Experience:
    """Fresh tasks, each with one demonstration, slips and all."""
    return collect.demonstrations(collect.tasks(batch))


@part(
    "data",
    equation="{batch} pairs a step: the reference answer over one the teacher got wrong",
    needs={"world:teacher", "world:pairs"},
    bounds=LIMITS,
    gives={"pairs"},
)
def teacher_pairs(collect: Collector, *, batch: int = 64) -> Experience:
    """Fresh tasks, each with the right answer preferred to a demonstration that fails the verifier."""
    return collect.teacher_pairs(collect.tasks(batch))
