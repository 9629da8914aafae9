"""Thought graphs: every operation by hand, what is legal, what an episode pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.control.simulated import Draws
from panoply.worlds.control.thoughts import AGAIN, FINISH, MERGE, REFINE, SLOTS, SOLVE, SPLIT, Thoughts
from panoply.worlds.logged.behaviour import mean_return

WORLD = Thoughts()


class Fixed(Draws):
    """Luck and size that are said."""

    def __init__(self, luck: float, size: float = 0.0):
        super().__init__(np.array([0]), 0)
        self.said = [luck, size]

    def uniform(self, *shape: int, low: Any = 0.0, high: Any = 1.0) -> Any:
        return np.full((1, *shape), self.said.pop(0))


def graph(*nodes: tuple[int, int | None], used: int = 0) -> dict[str, Any]:
    """Nodes (length, errors), None where a piece is still to be sorted."""
    state = WORLD.start(Draws(np.array([1]), 0))
    for slot in range(SLOTS):
        length, wrong = nodes[slot] if slot < len(nodes) else (0, None)
        state["length"][0, slot], state["sorted"][0, slot] = length, wrong is not None
        state["wrong"][0, slot] = wrong or 0
    state["whole"][0], state["used"][0] = sum(length for length, _ in nodes), used
    return state


def after(
    state: dict[str, Any], action: int, luck: float = 0.5, size: float = 0.0
) -> list[tuple[int, int | None]]:
    moved = WORLD.move(state, np.array([action]), Fixed(luck, size)).state
    each = zip(moved["length"][0], moved["sorted"][0], moved["wrong"][0], strict=True)
    return [(int(length), int(wrong) if done else None) for length, done, wrong in each if length]


def test_splitting_and_solving() -> None:
    assert after(graph((16, None), (48, None)), SPLIT) == [(16, None), (24, None), (24, None)]
    right = np.exp(-48 / 16)
    assert after(graph((16, None), (48, None)), SOLVE, right - 1e-9) == [(16, None), (48, 0)]
    assert after(graph((16, None), (48, None)), SOLVE, right + 1e-9, 0.99) == [(16, None), (48, 12)]


def test_again_keeps_the_better_of_the_worst() -> None:
    nodes = graph((16, 3), (16, 1))
    assert after(nodes, AGAIN, 0.99, 0.99) == [(16, 3), (16, 1)]  # four errors: the three are kept
    assert after(nodes, AGAIN, 0.99, 0.0) == [(16, 1), (16, 1)]
    assert after(nodes, AGAIN, 0.0) == [(16, 0), (16, 1)]


def test_refining() -> None:
    nodes, better = graph((16, 5), (32, 1)), 0.9 * np.exp(-16 / 64)
    assert after(nodes, REFINE, better - 1e-9) == [(16, 2), (32, 1)]
    assert after(nodes, REFINE, better + 1e-9) == [(16, 5), (32, 1)]
    assert after(nodes, REFINE, 0.91) == [(16, 6), (32, 1)]


def test_merging_the_two_shortest() -> None:
    nodes, right = graph((32, 1), (16, 2), (8, 0)), np.exp(-24 / 64)
    assert after(nodes, MERGE, right - 1e-9) == [(32, 1), (24, 2)]
    assert after(nodes, MERGE, right + 1e-9, 0.99) == [(32, 1), (24, 2 + 1 + 2)]


def legal(*nodes: tuple[int, int | None]) -> list[int]:
    return np.flatnonzero(WORLD.allowed(graph(*nodes))[0]).tolist()


def test_what_may_be_done() -> None:
    assert legal((16, None)) == [SPLIT, SOLVE]
    assert legal((16, None), (16, 2)) == [SPLIT, SOLVE, REFINE, AGAIN]
    assert legal((16, 1), (16, 2)) == [REFINE, AGAIN, MERGE]
    assert legal((16, 1)) == [REFINE, AGAIN, FINISH]
    assert legal(*[(2, None)] * SLOTS) == [SOLVE]  # no node is free
    assert legal((1, None)) == [SOLVE]


@pytest.mark.parametrize(
    ("nodes", "used", "action", "paid", "over"),
    [
        ([(16, 4)], 3, FINISH, -0.25, True),
        ([(16, 0)], 3, FINISH, 0.0, True),
        ([(8, 0), (8, 0)], 11, REFINE, -1.0, True),  # the last call, and nothing finished
        ([(8, 0), (8, 0)], 10, REFINE, 0.0, False),
    ],
)
def test_what_it_pays(
    nodes: Sequence[tuple[int, int | None]], used: int, action: int, paid: float, over: bool
) -> None:
    moved = WORLD.move(graph(*nodes, used=used), np.array([action]), Fixed(0.5))
    assert (moved.reward[0], bool(moved.terminated[0])) == (paid, over)
    dear = Thoughts(price=0.1).move(graph(*nodes, used=used), np.array([action]), Fixed(0.5))
    assert dear.reward[0] == pytest.approx(paid - (action != FINISH) * 0.1)
    assert moved.signals["success"][0] == (over and paid == 0)


def test_the_expert_is_better_than_chance_and_sizes_are_checked() -> None:
    assert mean_return(WORLD, 0.0, 0) > -0.05 > mean_return(WORLD, 1.0, 0)
    for sizes in ((64, 16), (20, 64)):
        with pytest.raises(PanoplyError, match="multiples of 16"):
            Thoughts(sizes=sizes)
