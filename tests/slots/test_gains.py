"""Marginal gains of set functions: by hand, against F of every prefix, and over batches that cut episodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from panoply.experience import OPEN, TRUNCATED, Experience, Table
from panoply.parts import Part
from panoply.slots.reward.gains import capped_counts, covering, information

Point = tuple[float, float]
PATH: list[Point] = [(0.05, 0.05), (0.25, 0.05), (0.05, 0.05), (0.31, 0.15), (0.95, 0.95)]
"""Five points, of which the third was seen before."""


def walked(*paths: Sequence[Point], first: int = 7, turn: int = 0, ended: bool = True) -> Experience:
    """Episodes that have gone along paths; rows of all, then their final observations, as a collector lays them out."""
    steps = [len(path) - 1 for path in paths]
    n = sum(steps)
    points = [p for path in paths for p in path[:-1]] + [path[-1] for path in paths]
    last = torch.tensor([t == count - 1 for count in steps for t in range(count)])
    after = torch.arange(1, n + 1)
    after[last] = n + torch.arange(len(paths))
    decisions = {
        "episode": torch.tensor([first + e for e, count in enumerate(steps) for _ in range(count)]),
        "turn": torch.tensor([turn + t for count in steps for t in range(count)]),
        "context": torch.arange(n),
        "next": after,
        "end": torch.where(last, TRUNCATED if ended else OPEN, OPEN),
        "action": torch.zeros(n, dtype=torch.long),
    }
    return Experience(Table(decisions), Table({"observation": torch.tensor(points, dtype=torch.float32)}))


def rewards(part: Part, experience: Experience, memory: dict[str, Any] | None = None) -> list[float]:
    _, found = part(memory or {}, experience)
    assert len(found) == len(experience)
    return found.tolist()  # type: ignore[no-any-return]


# ------------------------------------------------------------------ set functions, written from their definitions


def value_covering(points: set[Point], reach: float = 0.3, sites: int = 3) -> float:
    lattice = [(i / (sites - 1), j / (sites - 1)) for i in range(sites) for j in range(sites)]
    return sum(any(math.dist(v, p) <= reach for p in points) for v in lattice) / len(lattice)


def value_smooth(points: set[Point], reach: float = 0.3, sites: int = 3) -> float:
    lattice = [(i / (sites - 1), j / (sites - 1)) for i in range(sites) for j in range(sites)]
    return sum(max(math.exp(-(math.dist(v, p) ** 2) / (2 * reach**2)) for p in points) for v in lattice) / 9


def value_information(points: set[Point], length: float = 0.2, noise: float = 0.5) -> float:
    at = torch.tensor(sorted(points), dtype=torch.float32).double()
    kernel = torch.exp(-(torch.cdist(at, at) ** 2) / (2 * length**2))
    return float(0.5 * torch.logdet(torch.eye(len(at)).double() + kernel / noise**2))


def value_counts(points: set[Point], item: float = 0.1, group: float = 0.5, cap: int = 2) -> float:
    items = {(math.floor(x / item), math.floor(y / item)) for x, y in points}
    size = round(group / item)
    groups: dict[tuple[int, int], int] = {}
    for x, y in items:
        groups[x // size, y // size] = groups.get((x // size, y // size), 0) + 1
    return float(sum(min(count, cap) for count in groups.values()))


FUNCTIONS: list[tuple[Part, Callable[[set[Point]], float]]] = [
    (covering(sites=3, reach=0.3), value_covering),
    (covering(sites=3, reach=0.3, kind="smooth"), value_smooth),
    (information(), value_information),
    (capped_counts(cap=2), value_counts),
]


@pytest.mark.parametrize(("part", "value"), FUNCTIONS)
def test_gains_are_differences_of_the_set_function(part: Part, value: Callable[[set[Point]], float]) -> None:
    other: list[Point] = [(0.5, 0.5), (0.55, 0.9), (0.5, 0.5)]
    expected = [
        value(set(path[: t + 2])) - value(set(path[: t + 1]))
        for path in (PATH, other)
        for t in range(len(path) - 1)
    ]
    found = rewards(part, walked(PATH, other))
    assert found == pytest.approx(expected, abs=1e-6)
    assert found[1] == 0, "the third point was seen before"


@pytest.mark.parametrize(("part", "value"), FUNCTIONS)
def test_modular_pays_every_point_by_itself(part: Part, value: Callable[[set[Point]], float]) -> None:
    found = rewards(part.but(modular=True), walked(PATH))
    assert found == pytest.approx([value({p}) for p in PATH[1:]], abs=1e-6)


@pytest.mark.parametrize(("part", "value"), FUNCTIONS)
def test_rows_may_come_in_any_order(part: Part, value: Callable[[set[Point]], float]) -> None:
    made = walked(PATH, PATH[::-1])
    order = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
    shuffled = Experience(Table({k: made[k][order] for k in made.decisions}), made.context)
    assert rewards(part, shuffled) == pytest.approx([rewards(part, made)[i] for i in order.tolist()])


@pytest.mark.parametrize(("part", "value"), FUNCTIONS)
def test_an_open_episode_remembers_where_it_was(part: Part, value: Callable[[set[Point]], float]) -> None:
    """Two episodes, one of which was begun a batch earlier, and is cut again."""
    whole = rewards(part, walked(PATH))
    memory, first = part({}, walked(PATH[:3], ended=False))
    assert list(memory) == ["7"]
    assert first.tolist() == pytest.approx(whole[:2])
    both = walked(PATH[2:], [(0.5, 0.5), (0.9, 0.1), (0.9, 0.9)], turn=2)
    memory, second = part(memory, both)
    assert second[:2].tolist() == pytest.approx(whole[2:])
    assert second[2:].tolist() == pytest.approx(rewards(part, walked([(0.5, 0.5), (0.9, 0.1), (0.9, 0.9)])))
    assert memory == {}


def test_counts_by_hand() -> None:
    """The start is an item of the first region; (0.25, 0.05) is its second and last that counts."""
    assert rewards(capped_counts(cap=2), walked(PATH)) == [1.0, 0.0, 0.0, 1.0]
