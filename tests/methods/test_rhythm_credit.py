"""Rhythm credit: what attention shows, by hand and by loops; which tokens are marked; what is done to advantages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience, Ragged, Table
from panoply.methods.reasoning_data.rhythm_credit import (
    coupled,
    looked_at,
    looking_back,
    middle_layers,
    on_rhythm,
    rhythm,
    spans,
    top,
)
from panoply.policies.attention import maps, whole_maps
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.slots.credit.groups import group

MAP = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.2, 0.3, 0.5, 0], [0.1, 0.2, 0.3, 0.4]])[None]
SAID = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
"""The last two of four tokens are the answer's."""


def test_statistics_by_hand() -> None:
    """From token 2: 0.2·2 + 0.3·1 = 0.7; from token 3: 0.1·3 + 0.2·2 + 0.3·1 = 1. Prompt rows count for nothing."""
    assert spans(MAP[:, None], SAID).tolist() == [[pytest.approx((0.3 + 0.7) / 2)]], "without token 0"
    assert looking_back(MAP, 2)[0].tolist() == pytest.approx([0.0, 0.5, 0.7, 0.9])
    found = looked_at(MAP, SAID, 1, 2)[0].tolist()
    assert found[:3] == pytest.approx([0.2, (0.3 + 0.2) / 2, 0.3])
    assert math.isnan(found[3]), "nothing comes after the last token"
    assert looked_at(MAP, SAID, 2, 3)[0, :2].tolist() == pytest.approx([0.15, 0.2])


def test_layers_of_the_middle_third() -> None:
    assert middle_layers(36) == [13, 16, 18, 21, 24]
    assert middle_layers(2) == [1, 2]
    assert middle_layers(1) == [1]


def test_marks_are_of_each_answer_and_leave_out_what_has_no_number() -> None:
    nan = math.nan
    values = torch.tensor([[1.0, 5.0, 2.0, 5.0, nan], [9.0, 8.0, nan, nan, nan]])
    assert top(values, 0.5).tolist() == [[0, 1, 0, 1, 0], [1, 0, 0, 0, 0]]
    assert top(torch.ones(1, 4), 0.5).tolist() == [[1, 1, 0, 0]], "among equals the first"


def test_an_anchor_that_looks_near_shares_with_who_introduced_it() -> None:
    """Medians are 2 and 1. Anchor 2 looks near (1) and token 1 changed by 4; anchor 3 looks far: it keeps all."""
    back, change = torch.tensor([[2.0, 5.0, 1.0, 9.0]]), torch.tensor([[1.0, 4.0, 0.5, math.nan]])
    anchors = torch.tensor([[False, False, True, True]])
    assert coupled(back, change, anchors, 2, 0.25).tolist() == [[0.0, 0.25, 0.75, 1.0]]
    assert coupled(back, change, anchors, 1, 0.25).tolist() == [[0.0, 0.25, 0.75, 1.0]]
    first = torch.tensor([[True, False, False, False]])
    assert coupled(back, change, first, 3, 0.25).tolist() == [[1.0, 0.0, 0.0, 0.0]], "nothing is before it"
    calm = torch.tensor([[0.1, 0.2, 3.0, math.nan]])
    assert coupled(back, calm, anchors, 1, 0.25).tolist()[0][:3] == [0.0, 0.25, 0.75]
    assert coupled(back, torch.tensor([[3.0, 0.2, 3.0, math.nan]]), anchors, 1, 0.25).tolist() == [
        [0.0, 0.0, 1.0, 1.0]
    ], "the token just before it did not jump"


# ------------------------------------------------------------------ of a policy


def said(policy: TextPolicy, lengths: tuple[int, ...] = (4, 6, 4)) -> Experience:
    """Answers of some lengths after a prompt of three tokens."""
    dice = torch.Generator().manual_seed(0)
    tokens = [torch.randint(policy.tokenizer.vocab_size, (3 + n,), generator=dice).tolist() for n in lengths]
    context = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)])
    position = torch.tensor([3 + t for n in lengths for t in range(n)])
    flat = Ragged.from_lists(tokens)
    decisions = {
        "context": context,
        "episode": context,
        "group": torch.zeros_like(context),
        "position": position,
        "action": flat.values[flat.offsets[context] + position],
        "reward": torch.tensor([1.0 * (i == 1) for i in context]) / 6,
    }
    return Experience(Table(decisions), Table({"tokens": flat}))


def test_whole_maps_are_the_maps(tiny_collector: Collector) -> None:
    policy, made = tiny_collector.policy, said(tiny_collector.policy)
    tokens = made.context.ragged("tokens")
    both = torch.stack([tokens[0], tokens[2]])
    first, second = whole_maps(policy, both, [1, 2])
    assert torch.allclose(first.sum(-1), torch.ones(()))
    assert torch.allclose(whole_maps(policy, tokens[2][None], [2])[0][0], second[1], atol=1e-6)
    row = maps(policy, made, 2, head=1)[2]  # the decision at position 5 is predicted from position 4
    assert torch.allclose(row, second[0, 1, 4, :5], atol=1e-6)
    with pytest.raises(PanoplyError, match="no attention of block 3"):
        whole_maps(policy, both, [3])


def slow(policy: TextPolicy, made: Experience, w: int, low: int, high: int, share: float) -> Tensor:
    """WAAD and FAI of every decision in plain loops, straight from the definitions."""
    found = []
    for context in range(3):
        tokens = made.context.ragged("tokens")[context]
        n = len(tokens)
        heads = [m for layer in whole_maps(policy, tokens[None], [1, 2]) for m in layer[0].tolist()]
        answer = range(3, n)
        d = [sum(a[t][s] * (t - s) for t in answer for s in range(1, t + 1)) / len(answer) for a in heads]
        order = sorted(range(len(heads)), key=lambda i: d[i])
        number = round(share * len(heads))
        local, anywhere = ([heads[i] for i in some] for some in (order[:number], order[-number:]))
        for t in answer:
            waad = sum(a[t][s] * min(t - s, w) for a in local for s in range(t + 1)) / number
            later = [u for u in answer if t + low <= u <= min(n, t + high)]
            fai = [sum(a[u][t] for a in anywhere) / number for u in later]
            found.append([waad, sum(fai) / len(fai) if fai else math.nan])
    return torch.tensor(found)


def test_the_tap_is_the_definitions(tiny_collector: Collector) -> None:
    policy, made = tiny_collector.policy, said(tiny_collector.policy)
    found = rhythm(policy, made, 2, 1, 2, 0.3)
    assert torch.allclose(found, slow(policy, made, 2, 1, 2, 0.3), atol=1e-6, equal_nan=True)
    order = torch.randperm(len(made), generator=torch.Generator().manual_seed(1))
    mixed = Experience(made.decisions.take(order), made.context)
    assert torch.allclose(rhythm(policy, mixed, 2, 1, 2, 0.3), found[order], atol=1e-6, equal_nan=True)


NEED = "rhythm:2:1:2:0.3@old"
SETTINGS: Any = {"window": 2, "nearest": 1, "farthest": 2, "share": 0.5}


def test_advantages_are_multiplied_whatever_their_sign(tiny_collector: Collector) -> None:
    made = said(tiny_collector.policy)
    made = made.with_columns(**{NEED: rhythm(tiny_collector.policy, made, 2, 1, 2, 0.3)})
    plain, credit = group()(made), on_rhythm(by="anchor", **SETTINGS)
    found = credit(made)["advantage"]
    factor = found / plain
    assert sorted(set(factor.round(decimals=4).tolist())) == [1.0, 1.5]
    marked = [int((factor[made["episode"] == e] > 1).sum()) for e in range(3)]
    assert marked == [2, 2, 2], "half of each answer's tokens but the last, which nothing comes after"
    positive = on_rhythm(by="anchor", signs="positive", **SETTINGS)(made)["advantage"]
    assert torch.equal(positive, torch.where(plain > 0, found, plain))
    assert not found.requires_grad
    order = torch.randperm(len(made), generator=torch.Generator().manual_seed(1))
    mixed = Experience(made.decisions.take(order), made.context)
    for by in ("coupled", "local", "anchor", "least"):
        one = on_rhythm(by=by, **SETTINGS)
        assert torch.allclose(one(mixed)["advantage"], one(made)["advantage"][order])
    least = on_rhythm(by="least", **SETTINGS)(made)["advantage"] / plain
    assert bool(((least > 1) & (factor > 1)).sum() < 6)
    lot = on_rhythm(by="lot", share=0.5)(made)["advantage"] / plain
    assert [int((lot[made["episode"] == e] > 1).sum()) for e in range(3)] == [2, 3, 2]


def test_what_cannot_be_is_refused() -> None:
    for settings, why in (
        ({"credit.nearest": 17}, "tokens are looked back at from 17 later on"),
        ({"credit.by": "local", "credit.alpha": 0.3}, "only by=coupled"),
        ({"credit.by": "lot", "credit.heads": 0.2}, "looks at no attention"),
    ):
        with pytest.raises(PanoplyError, match=why):
            pp.plan("rhythm-credit", "chain", settings=settings)
    with pytest.raises(PanoplyError, match="A control policy cannot supply"):
        pp.plan("rhythm-credit", "cartpole")
