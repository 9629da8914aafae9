"""ARIES: a policy that chooses the next operation on a thought graph, against schedules that are fixed beforehand."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from panoply.errors import PanoplyError
from panoply.evidence.claims import Ahead
from panoply.registry import algorithm
from panoply.seeds import numpy_rng, stable_hash
from panoply.worlds.control.thoughts import AGAIN, FINISH, MERGE, NAMES, REFINE, SOLVE, SPLIT, Thoughts
from panoply.worlds.control.world import Array

Choose = Callable[[Array, Array, int], Array]
"""What is seen, what is legal and the number of the step in, an operation for each row out."""
Row = dict[str, float]
PPO: dict[str, Any] = {
    "sample.envs": 16,
    "sample.length": 128,
    "credit.gamma": 1.0,
    "update.minibatches": 8,
    "run.evaluate_every": 1000,
    "run.held_out": 2,
}


# ------------------------------------------------------------------ who chooses


def schedule(splits: int, again: int, refine: int, last: int) -> tuple[int, ...]:
    """Graph of Thoughts' way: split, solve all, try each again, put all together and refine, whatever comes of it."""
    pieces = splits + 1
    together = [MERGE, *[REFINE] * refine] * splits
    first = (*[SPLIT] * splits, *[SOLVE] * pieces, *[AGAIN] * (again * pieces))
    return (*first, *together, *[REFINE] * last, FINISH)


def schedules(calls: int) -> list[tuple[int, ...]]:
    """All that end in time: up to seven splits, four more tries a piece, three refinements a merge, six at the end."""
    every = (schedule(*way) for way in itertools.product(range(8), range(5), range(4), range(7)))
    return sorted({way for way in every if len(way) <= calls + 1}, key=lambda way: (len(way), way))


def follow(way: Sequence[int]) -> Choose:
    """A schedule, which looks at nothing; where an operation cannot be done (a piece is too short) the next one."""

    def choose(seen: Array, legal: Array, step: int) -> Array:
        wanted = way[min(step, len(way) - 1)]
        first: Array = legal.argmax(-1)
        chosen: Array = np.where(legal[:, wanted], wanted, np.where(legal[:, FINISH], FINISH, first))
        return chosen

    return choose


def by_chance(seed: int) -> Choose:
    def choose(seen: Array, legal: Array, step: int) -> Array:
        chosen: Array = np.where(legal, numpy_rng("chance", seed, step).random(legal.shape), -1).argmax(-1)
        return chosen

    return choose


def votes(policy: Any, members: int, seed: int) -> Choose:
    """What most of so many draws from a policy say, the paper's ensemble; of 0 draws, what it finds likeliest."""

    @torch.no_grad()
    def choose(seen: Array, legal: Array, step: int) -> Array:
        logits = policy.model(torch.from_numpy(seen)).numpy().astype(np.float64)
        logits = np.where(legal, logits, -np.inf)
        if members:
            noise = numpy_rng("votes", seed, step).gumbel(size=(members, *logits.shape))
            said = (logits + noise).argmax(-1)
            logits = np.stack([(said == number).sum(0) for number in range(len(NAMES))], -1)
        chosen: Array = logits.argmax(-1)
        return chosen

    return choose


def played(world: Thoughts, choose: Choose, episodes: int, seed: int) -> Row:
    """Mean error, share without error, and calls of the reasoner, over episodes that all who choose meet alike."""
    envs = world.envs(episodes)
    envs.reset(np.arange(episodes), np.array([stable_hash("aries", seed, i) >> 1 for i in range(episodes)]))
    open_ = np.ones(episodes, bool)
    total = {"error": np.zeros(episodes), "success": np.zeros(episodes), "call": np.zeros(episodes)}
    for step in range(world.calls + 1):
        assert envs.masks is not None
        moved = envs.step(choose(envs.observations, envs.masks, step))
        for name in total:
            total[name] += open_ * moved.signals[name]
        open_ &= ~moved.terminated
        if not open_.any():
            break
    return {
        "error": float(total["error"].mean()),
        "right": float(total["success"].mean()),
        "calls": float(total["call"].mean()),
    }


# ------------------------------------------------------------------ the comparison


def compare(
    seed: int,
    calls: int,
    price: float,
    sizes: tuple[int, int],
    beyond: int,
    members: int,
    steps: int,
    episodes: int,
) -> dict[str, Row]:
    """A row for each who chooses; `search` counts calls that were spent before the first new problem."""
    from panoply.api import train
    from panoply.progress import Progress

    world = Thoughts(sizes=sizes, calls=calls)
    ways = schedules(calls)
    tried = [played(world, follow(way), episodes, seed + 10_000) for way in ways]
    best = ways[int(np.argmin([row["error"] for row in tried]))]
    spent = sum(row["calls"] for row in tried) * episodes
    with tempfile.TemporaryDirectory() as kept:
        settings = {**PPO, "world.calls": calls, "world.sizes": sizes, "world.price": price}
        done = train(
            "ppo", "thoughts", run=Path(kept) / "run", settings=settings, steps=steps, seed=seed, threads=1,
            progress=Progress(),
        )  # fmt: skip
        policy = done.policy("last")
    taught = float(PPO["sample.envs"] * PPO["sample.length"] * steps)
    sides: dict[str, tuple[Choose, float]] = {
        "learned": (votes(policy, 0, seed), taught),
        f"learned, {members} votes": (votes(policy, members, seed), taught),
        "best schedule": (follow(best), spent),
        "by chance": (by_chance(seed), 0.0),
    }
    longer = Thoughts(sizes=(beyond, beyond), calls=calls)
    return {
        name: {
            **played(world, choose, episodes, seed),
            "error beyond": played(longer, choose, episodes, seed)["error"],
            "search": before,
        }
        for name, (choose, before) in sides.items()
    }


def measure(seed: int) -> Row:
    """By how much a learned controller errs less than the best schedule with as many calls."""
    found = compare(seed, 12, 0.0, (16, 64), 128, 15, 60, 1000)
    learned, fixed = found["learned"], found["best schedule"]
    return {
        "fewer errors": fixed["error"] - learned["error"],
        **{f"{name}: {what}": value for name, row in found.items() for what, value in row.items()},
    }


@algorithm(
    "aries@1",
    paper=106,
    claim=Ahead(
        "On lists of 16 to 64 numbers, with at most twelve calls of the reasoner, a controller that PPO has taught "
        "errs less than the best of all fixed schedules.",
        measure,
    ),
)
def aries(
    calls: int = 12,
    price: float = 0.0,
    sizes: tuple[int, int] = (16, 64),
    beyond: int = 128,
    members: int = 15,
    steps: int = 60,
    episodes: int = 1000,
    seed: int = 0,
) -> dict[str, Row]:
    """ARIES (arXiv 2502.21208): operations on a thought graph are actions, chosen by a policy that sees it.

    The world `thoughts` stands for both the graph and the reasoner, who errs by chance, the more the longer the list.
    Rows: the likeliest operation of a policy that PPO has taught for `steps` steps; what most of `members` draws from
    it say; the best of all schedules (split so often, try each piece so often, refine so often after each merge and at
    the end), chosen on problems of its own; and chance. Columns: the share of numbers in the wrong place, lists without
    error, calls of the reasoner, errors on lists of `beyond` numbers, longer than any in training, and the calls spent
    before (`search`).

    A schedule looks at nothing, so it refines what is right already. The paper prompts a large model to choose and
    trains nothing, so that its search costs no call; here the controller is a small network, and its training is
    counted. It found prompted controllers to lose where lists are split deeper than they can follow: `beyond` asks that
    of ours.
    """
    if steps < 1 or episodes < 1 or members < 1:
        raise PanoplyError("aries needs a step to learn in, an episode to judge by, and a vote.")
    return compare(seed, calls, price, sizes, beyond, members, steps, episodes)
