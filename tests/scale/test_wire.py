"""Experience comes back bit for bit, in few bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kit import ragged
from toys import with_lists

from panoply import registry
from panoply.experience import Column, Experience, Ragged, Table
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.scale import wire


def _equal(one: Column, other: Column) -> bool:
    if isinstance(one, Ragged):
        assert isinstance(other, Ragged)
        return _equal(one.values, other.values) and torch.equal(one.offsets, other.offsets)
    assert isinstance(other, torch.Tensor)
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and np.array_equal(wire._bits(one), wire._bits(other))


def _plain(found: Any) -> bool:
    if isinstance(found, dict):
        return all(isinstance(k, str) and _plain(v) for k, v in found.items())
    return isinstance(found, np.ndarray | str | int)


def check(experience: Experience) -> wire.Packed:
    sent = wire.packed(experience)
    assert _plain(sent)
    back = wire.unpacked(sent)
    for name in ("decisions", "context", "pairs", "lists"):
        one, other = getattr(experience, name), getattr(back, name)
        assert (one is None) == (other is None)
        if one is not None:
            assert list(one) == list(other)
            assert one.rows == other.rows
            assert [n for n in one if not _equal(one[n], other[n])] == []
    return sent


@pytest.mark.parametrize("world", ["chain", "keydoor"])
def test_what_was_sampled_comes_back_in_few_bytes(world: str) -> None:
    made = registry.find("world", world).build()
    collect = Collector(made, open_policy("start", made, 0, "cpu"), 0)
    found = collect.episodes(collect.tasks(8), 8)
    sent = wire.size(check(found)) / len(found)
    memory = sum(wire.size(wire._plain(t)) for t in (found.decisions, found.context)) / len(found)
    assert sent < (13 if world == "chain" else 45), "log-probability, entropy, the token, and a little"
    assert sent < memory / 1.5
    check(found.take(found["episode"] % 3 == 0))
    check(found.take(torch.randperm(len(found), generator=torch.manual_seed(0))))


def test_odd_columns_tables_and_numbers() -> None:
    found = ragged()
    n = len(found)
    odd = torch.zeros(n)
    odd[0], odd[1], odd[2] = torch.nan, -0.0, torch.inf
    lists = Ragged.from_lists([[7] * (i % 4) for i in range(n)])
    found = found.with_columns(
        odd=odd, allowed=lists, large=torch.arange(n) * 2**40, small=torch.full((n,), -128),
        narrow=torch.arange(n).to(torch.int16), half=odd.to(torch.bfloat16), double=odd.double(),
        wide=torch.arange(2.0 * n).view(n, 2), train=torch.arange(n) % 2 == 0, minus=torch.full((n,), -0.0),
    )  # fmt: skip
    check(found)
    check(with_lists(found))
    chosen = found["episode"].unique()[:2]
    check(found.with_pairs(Table({"chosen": chosen[:1], "rejected": chosen[1:], "p": torch.tensor([0.25])})))
    check(found.take(torch.zeros(n, dtype=torch.bool)))


def test_an_action_that_is_not_what_stands_in_its_context_and_prompts_that_are_not_shared() -> None:
    found = ragged()
    check(found.with_columns(action=found["action"] + 1))
    rows = found.context.rows
    for shared in (2, 0):
        other = found.context.plus({"prompt": torch.arange(rows) // 2, "shared": torch.full((rows,), shared)})
        check(Experience(found.decisions, other))


def test_weights_travel_as_copies() -> None:
    weights = {"a": torch.arange(4.0), "b": torch.tensor([1.5, -0.0], dtype=torch.bfloat16)}
    sent = wire.packed_weights(weights)
    weights["a"] += 1
    back = wire.unpacked_weights(sent)
    assert torch.equal(back["a"] + 1, weights["a"])
    assert _equal(back["b"], weights["b"])
