"""Shards: masters and moments in pieces, and the same bits as in one place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from panoply.loops.mover import Flat, Masters, Mover
from panoply.loops.rounding import Rounding
from panoply.scale.meeting import InMemory, leave, meet
from panoply.scale.shards import Shards, owners
from panoply.slots.update.optimisers import adam, sgd

SHAPES = {"embedding": (40, 8), "up": (8, 16), "norm": (8,), "down": (16, 8), "unused": (3,), "idle": (4, 4)}


def weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, nn.Parameter]:
    chance = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=chance) for name, shape in SHAPES.items()}
    return {n: nn.Parameter(w.to(torch.float32 if n == "norm" else dtype)) for n, w in made.items()}


def slopes(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Gradients of one rank; powers of two, which add up alike in any order. `idle` has one on the last rank alone."""
    chance = torch.Generator().manual_seed(10 * step + rank)
    found = {n: torch.randint(-64, 64, s, generator=chance) / 64 for n, s in SHAPES.items() if n != "unused"}
    return found if rank else {n: g for n, g in found.items() if n != "idle"}


def give(held: dict[str, nn.Parameter], masters: Masters, found: dict[str, torch.Tensor]) -> None:
    for name, slope in found.items():
        weight = held[name]
        if weight.grad is None:
            weight.grad = slope.to(weight.dtype)
        else:
            weight.grad += slope.to(weight.dtype)
    masters.collect()


Make = Callable[[dict[str, nn.Parameter]], Masters]
KINDS: dict[str, tuple[Make, Any, torch.dtype]] = {
    "masters": (Masters, adam(lr=1e-2, clip=0.5, weight_decay=0.1), torch.bfloat16),
    "weights of 32 bits": (Masters, adam(lr=1e-2, clip=0.5), torch.float32),
    "moments of 8 bits": (Masters, adam(lr=1e-2, clip=0.5, bits=8), torch.bfloat16),
    "no masters": (lambda held: Rounding(held, 3), sgd(lr=1e-2, momentum=0.9, clip=0.0), torch.bfloat16),
    "one vector": (lambda held: Flat(held), adam(lr=1e-2, clip=0.5), torch.float32),
}


def one_process(kind: str, ranks: int) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """Three steps along all gradients: weights, what was kept, and norms."""
    make, update, dtype = KINDS[kind]
    held = weights(dtype)
    masters = make(held)
    mover, norms = Mover(masters, update, 3), []
    for step in range(3):
        masters.clear()
        for rank in range(ranks):
            give(held, masters, slopes(step, rank))
        mover.set_rate(step)
        norms.append(mover.clip())
        mover.move()
    return {n: w.detach().clone() for n, w in held.items()}, mover.state(), norms


def in_pieces(
    kind: str, ranks: int, address: str
) -> list[tuple[dict[str, Any], dict[str, Any], list[float]]]:
    """The same on threads, each with the gradients of one rank."""
    found: list[Any] = [None] * ranks

    def work(rank: int) -> None:
        make, update, dtype = KINDS[kind]
        held = weights(dtype)
        masters = make(held)
        shards = Shards(masters, meet(rank, ranks, address))
        mover, norms = Mover(masters, update, 3), []
        for step in range(3):
            masters.clear()
            give(held, masters, slopes(step, rank))
            norms.append(shards.sum())
            mover.set_rate(step)
            shards.clip(mover.limit)
            with shards.own_alone():
                mover.move()
            shards.hand_around()
        found[rank] = ({n: w.detach().clone() for n, w in held.items()}, mover.state(), norms)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    leave(address)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_pieces_come_to_what_one_process_does(kind: str, ranks: int) -> None:
    """Of one rank bit for bit; of two up to the clip, whose factor is formed of a norm that is summed otherwise."""
    expected, kept, norms = one_process(kind, ranks)
    found = in_pieces(kind, ranks, f"memory:{kind}")
    near = {"rtol": 0.0, "atol": 0.0} if ranks == 1 else {"rtol": 1e-5, "atol": 1e-6}
    if ranks == 2 and KINDS[kind][2] == torch.bfloat16:
        near = {"rtol": 8e-3, "atol": 1e-6}  # a neighbour
    for mine, _, measured in found:
        assert measured == pytest.approx(norms, rel=0 if ranks == 1 else 1e-6)
        for name, weight in expected.items():
            torch.testing.assert_close(mine[name], weight, **near)
    states = [state for _, state, _ in found]
    assert sorted(name for state in states for name in state) == sorted(kept)  # each is somewhere, and once
    if ranks == 1:
        assert all(torch.equal(states[0][name], value) for name, value in kept.items())
    elif kind == "masters":
        both = {**states[0], **states[1]}
        for name, value in kept.items():
            torch.testing.assert_close(both[name], value, rtol=1e-5, atol=1e-6)
        assert all(any(k.endswith(":exp_avg") for k in state) for state in states)


def test_weights_that_nobody_has_a_gradient_of_do_not_move() -> None:
    """Weight decay and momentum would move them, if a gradient that is not there were 0."""
    begun, (first, *_), (second, *_) = weights(), *in_pieces("masters", 2, "memory:unused")
    assert torch.equal(first["unused"], begun["unused"])
    assert not torch.equal(first["idle"], begun["idle"])
    assert all(torch.equal(first[name], second[name]) for name in begun)


def test_the_largest_weights_are_dealt_first() -> None:
    sizes = {"a": 3, "b": 10, "c": 4, "d": 3}
    assert owners(sizes, 2) == {"a": 1, "b": 0, "c": 1, "d": 1}
    assert set(owners({"a": 1}, 4).values()) == {0}


def test_sums_are_formed_in_the_order_of_ranks() -> None:
    """(1e8 + 1) − 1e8 is 0 in float32, and (1e8 − 1e8) + 1 is 1."""
    found: list[Any] = [None] * 3

    def work(rank: int) -> None:
        table = InMemory(rank, 3, "memory:order")
        found[rank] = float(table.sum(torch.tensor([1e8, 1.0, -1e8][rank])))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    leave("memory:order")
    assert found == [0.0, 0.0, 0.0]
