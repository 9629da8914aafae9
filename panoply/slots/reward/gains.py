"""Rewards of what a step adds to all that an episode has seen: marginal gains of submodular set functions.

The set is of observed points, the start included; a point seen before adds nothing. The gains of an episode sum up to
what the whole set is worth, so that any credit for rewards is credit for the set. With `modular` a point is paid what
it would be worth alone, again and again, as rewards of states usually are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from panoply.experience import OPEN, Experience, Segments
from panoply.parts import part
from panoply.slots.credit.returns import in_time

Memory = dict[str, Tensor]
"""Of every open episode, by its number, the points it has been to in earlier batches."""


class Paths(NamedTuple):
    """Where episodes have been. A path that ends early stays where it is."""

    points: Tensor
    """[episodes, 1 + steps, numbers]; the first is the one before the batch's first step."""
    past: list[Tensor]
    """Points before those, of episodes that an earlier batch left open."""
    rows: Tensor
    """[episodes, steps]: the decision of a step, −1 after an episode's end."""


def paths(memory: Memory, experience: Experience, dims: Iterable[int]) -> tuple[Memory, Paths]:
    """Every episode's way through the observed numbers `dims`; the memory for the batch after this one."""
    seen = experience.context.tensor("observation").double().flatten(1)[:, list(dims)]
    order = in_time(experience)
    episodes = Segments(experience["episode"][order])
    grid = episodes.grid()
    rows = torch.where(grid >= 0, order[grid.clamp(min=0)], -1)
    last = order[grid.max(1).values]
    steps = torch.where(rows >= 0, rows, last[:, None])
    first = seen[experience["context"][rows[:, :1]]]
    points = torch.cat([first, seen[experience["next"][steps]]], 1)
    numbers = episodes.keys.tolist()
    past = [memory.get(str(number), points.new_zeros(0, points.shape[-1])) for number in numbers]
    still = experience["end"][last] == OPEN
    left = {
        str(number): torch.cat([past[i], points[i, : int(episodes.count[i])]])
        for i, number in enumerate(numbers)
        if bool(still[i])
    }
    return left, Paths(points, past, rows)


def gained(found: Paths, gains: Callable[[Tensor], Tensor], modular: bool) -> Tensor:
    """For every decision, what its step added. `gains` of a path [episodes, points, numbers]: what each point adds."""
    longest = max(map(len, found.past))
    before = [
        p if len(p) == longest else _led_in(p, found.points[i], longest) for i, p in enumerate(found.past)
    ]
    whole = torch.cat([torch.stack(before), found.points], 1)
    added = gains(whole.flatten(0, 1)[:, None]).reshape(whole.shape[:2]) if modular else gains(whole)
    rows, inside = found.rows, found.rows >= 0
    reward = torch.zeros(int(inside.sum()), dtype=torch.float32)
    reward[rows[inside]] = added[:, longest + 1 :][inside].float()
    return reward


def _led_in(past: Tensor, points: Tensor, length: int) -> Tensor:
    """A shorter past made longer by its first point, which adds nothing the second time."""
    known = past if len(past) else points[:1]
    return torch.cat([known[:1].expand(length - len(past), -1), past])


def first_visits(points: Tensor) -> Tensor:
    """[episodes, points]: whether a point has not been on its path before."""
    same = (points[:, :, None] == points[:, None]).all(-1)
    return ~torch.tril(same, -1).any(-1)


# ------------------------------------------------------------------ what each point of a path adds


def covering_gains(points: Tensor, sites: Tensor, reach: float, kind: str) -> Tensor:
    """F(A) = mean over sites v of max_{s∈A} k(v, s)."""
    far = torch.cdist(points, sites.expand(len(points), -1, -1))
    near = (far <= reach).double() if kind == "within" else torch.exp(-0.5 * (far / reach) ** 2)
    reached = near.cummax(1).values
    return torch.diff(reached, dim=1, prepend=torch.zeros_like(reached[:, :1])).mean(-1)


def entropy_gains(points: Tensor, length: float, noise: float) -> Tensor:
    """F(A) = ½·log det(I + K_A/σ²): the diagonal of its Cholesky factor holds each point's share.

    A point seen before is taken out of K.
    """
    fresh = first_visits(points).double()
    kernel = torch.exp(-0.5 * (torch.cdist(points, points) / length) ** 2)
    kernel = kernel * fresh[:, :, None] * fresh[:, None] / noise**2
    eye = torch.eye(points.shape[1], dtype=points.dtype)
    factor: Tensor = torch.linalg.cholesky(kernel + eye)
    return factor.diagonal(dim1=1, dim2=2).log()


def count_gains(points: Tensor, item: float, group: float, cap: int) -> Tensor:
    """F(A) = Σ_k min(|A ∩ G_k|, d): the first `cap` different items of a group count."""
    items, groups = (points / item).floor(), (points / group).floor()
    fresh = first_visits(items)
    together = (groups[:, :, None] == groups[:, None]).all(-1)
    before = (torch.tril(together, -1) & fresh[:, None]).sum(-1)
    return (fresh & (before < cap)).double()


# ------------------------------------------------------------------ parts


@part(
    "reward",
    equation="F(A + s) − F(A),  F(A) = mean over sites of the largest k(site, s) with s in A",
    state=dict,
    needs={"world:control"},
    bounds={
        "sites": "at least 1",
        "reach": "above 0",
        "dims": "at least 0",
        "low": "any number",
        "high": "any number",
    },
)
def covering(
    state: Memory,
    experience: Experience,
    *,
    dims: tuple[int, ...] = (0, 1),
    low: float = 0.0,
    high: float = 1.0,
    sites: int = 10,
    reach: float = 0.15,
    kind: Literal["within", "smooth"] = "within",
    modular: bool = False,
) -> tuple[Memory, Tensor]:
    """Facility location: how well the points seen serve the sites of a lattice, `sites` a side from `low` to `high`.

    dims   which numbers of the observation make a point
    kind   `within` counts the sites nearer than `reach` (coverage); `smooth` serves by exp(−d²/(2·reach²))
    """
    side = torch.linspace(low, high, sites, dtype=torch.float64)
    lattice = torch.cartesian_prod(*[side] * len(dims)).reshape(-1, len(dims))
    state, found = paths(state, experience, dims)
    return state, gained(found, lambda x: covering_gains(x, lattice, reach, kind), modular)


@part(
    "reward",
    equation="½·log(1 + σ²(s|A)/{noise}²)",
    state=dict,
    needs={"world:control"},
    bounds={"length": "above 0", "noise": "above 0", "dims": "at least 0"},
)
def information(
    state: Memory,
    experience: Experience,
    *,
    dims: tuple[int, ...] = (0, 1),
    length: float = 0.2,
    noise: float = 0.5,
    modular: bool = False,
) -> tuple[Memory, Tensor]:
    """What measuring at a point says about a Gaussian process of unit variance, given the measurements so far."""
    state, found = paths(state, experience, dims)
    return state, gained(found, lambda x: entropy_gains(x, length, noise), modular)


@part(
    "reward",
    equation="1 for each of the first {cap} different items of a group",
    state=dict,
    needs={"world:control"},
    bounds={"item": "above 0", "group": "above 0", "cap": "at least 1", "dims": "at least 0"},
)
def capped_counts(
    state: Memory,
    experience: Experience,
    *,
    dims: tuple[int, ...] = (0, 1),
    item: float = 0.1,
    group: float = 0.5,
    cap: int = 3,
    modular: bool = False,
) -> tuple[Memory, Tensor]:
    """Σ_k min(|A ∩ G_k|, cap): items are cells `item` wide, groups of them cells `group` wide."""
    state, found = paths(state, experience, dims)
    return state, gained(found, lambda x: count_gains(x, item, group, cap), modular)
