"""The weight of every decision, worked by hand."""

from __future__ import annotations

import pytest
import torch
from kit import hand

from panoply.parts import Part
from panoply.slots.reduce.averages import constant, prompt_mean, sequence_mean, sequence_sum, token_mean

EPISODE = [4, 4, 4, 4, 1, 1, 9]
"""Three episodes of 4, 2 and 1 decisions."""
GROUP = [6, 6, 6, 6, 6, 6, 2]
"""Two groups: the first two episodes, and the last."""
MASKED = [1, 1, 0, 0, 1, 1, 0]
"""Two decisions of the first, both of the second, none of the third: 4 decisions, 2 episodes."""


@pytest.mark.parametrize(
    ("part", "whole", "masked"),
    [
        (token_mean(), [1 / 7] * 7, [1 / 4, 1 / 4, 0, 0, 1 / 4, 1 / 4, 0]),
        (sequence_mean(), [1 / 12] * 4 + [1 / 6] * 2 + [1 / 3], [1 / 4, 1 / 4, 0, 0, 1 / 4, 1 / 4, 0]),
        (sequence_sum(), [1 / 3] * 7, [1 / 2, 1 / 2, 0, 0, 1 / 2, 1 / 2, 0]),
        (prompt_mean(), [1 / 12] * 6 + [1 / 2], [1 / 4, 1 / 4, 0, 0, 1 / 4, 1 / 4, 0]),
        (constant(length=8), [1 / 24] * 7, [1 / 16, 1 / 16, 0, 0, 1 / 16, 1 / 16, 0]),
    ],
    ids=lambda p: p.info.name if hasattr(p, "info") else "",
)
def test_weights(part: Part, whole: list[float], masked: list[float]) -> None:
    made = hand(episode=EPISODE, group=GROUP)
    assert part(made, made.stream("own")).tolist() == pytest.approx(whole)
    some = hand(episode=EPISODE, group=GROUP, train=MASKED)
    assert part(some, some.stream("own")).tolist() == pytest.approx(masked)


@pytest.mark.parametrize(
    "part", [token_mean(), sequence_mean(), prompt_mean(), sequence_sum(), constant(length=2)]
)
def test_streams_are_counted_apart(part: Part) -> None:
    """The weights of a stream are those it would have alone; the rest weighs nothing."""
    made = hand(episode=EPISODE, group=GROUP, source=[0, 0, 0, 0, 2, 2, 2])
    own, foreign = part(made, made.stream("own")), part(made, made.stream("imitation"))
    alone = made.take(made.stream("own"))
    assert own.tolist() == pytest.approx([*part(alone, alone.stream("own")).tolist(), 0, 0, 0])
    alone = made.take(made.stream("imitation"))
    assert foreign.tolist() == pytest.approx([0, 0, 0, 0, *part(alone, alone.stream("imitation")).tolist()])


@pytest.mark.parametrize("part", [token_mean(), sequence_mean(), prompt_mean(), sequence_sum(), constant()])
def test_nothing_to_learn_from_weighs_nothing(part: Part) -> None:
    made = hand(episode=[0, 0, 1], group=[3, 3, 4])
    assert part(made, torch.zeros(3, dtype=torch.bool)).tolist() == [0.0, 0.0, 0.0]
