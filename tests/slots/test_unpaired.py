"""Episodes that are desirable or not: labels, mismatched answers, KTO's loss."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from kit import batch, hand, slopes

from panoply.errors import PanoplyError
from panoply.experience import Experience, Ragged, Table
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.slots.data.teacher import demonstrations, teacher_pairs
from panoply.slots.data.unpaired import labels, mismatched, unpaired
from panoply.slots.loss.unpaired import prospect
from panoply.worlds.text.chain import Chain


def given() -> Experience:
    """Three answers: two to the prompt 1 2, one to the prompt 3."""
    decisions = {
        "episode": torch.tensor([10, 10, 11, 12, 12]),
        "context": torch.tensor([0, 0, 1, 2, 2]),
        "position": torch.tensor([2, 3, 2, 1, 2]),
        "action": torch.tensor([7, 8, 9, 5, 6]),
        "signal:success": torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0]),
        "label": torch.tensor([1, 1, -1, 1, 1]),
    }
    context = {
        "tokens": Ragged.from_lists([[1, 2, 7, 8], [1, 2, 9], [3, 5, 6], [4, 0]]),
        "prompt": torch.tensor([0, 0, 1, 2]),
        "shared": torch.tensor([2, 2, 1, 1]),
    }
    return Experience(Table(decisions), Table(context))


def test_labels() -> None:
    made = given()
    assert labels(made).tolist() == [1, 1, -1, 1, 1]
    pairs = Table({"chosen": torch.tensor([11]), "rejected": torch.tensor([10])})
    assert labels(made.with_pairs(pairs)).tolist() == [-1, -1, 1, -1, -1], "pairs come before signals"
    with pytest.raises(PanoplyError, match="signal 'praise'"):
        labels(made, "praise")


def test_answers_go_after_another_prompt() -> None:
    made = mismatched(given())
    rows = made.context.ragged("tokens").tolist()
    assert rows == [[3, 7, 8], [4, 9], [1, 2, 5, 6], [1, 2, 0]]
    where = zip(made["context"].tolist(), made["position"].tolist(), strict=True)
    assert [rows[c][p] for c, p in where] == made["action"].tolist()
    assert made.context.tensor("shared").tolist() == [1, 1, 2, 2]
    assert made["episode"].tolist() == [-1, -1, -2, -3, -3]
    assert made["label"].tolist() == [0] * 5
    assert made["signal:success"].sum() == 0


def test_one_prompt_cannot_be_mismatched() -> None:
    made = given()
    one = replace(made, context=made.context.plus({"prompt": torch.tensor([0, 0, 0, 1])}))
    with pytest.raises(PanoplyError, match="more prompts"):
        mismatched(one)


@pytest.mark.parametrize("data", [teacher_pairs(batch=6), demonstrations(batch=6)])
def test_from_a_world(data: object) -> None:
    world = Chain(operations=2)
    collect = Collector(world, open_policy("fresh", world, 0, "cpu", "float32"), seed=0)
    made = unpaired(data=data)(collect)
    matched, wrong = made.take(made["label"] != 0), made.take(made["label"] == 0)
    assert made.pairs is None
    assert len(matched) == len(wrong) > 0
    success = matched.by("episode").rows(matched.by("episode").sum(matched["signal:success"]))
    assert torch.equal(success > 0, matched["label"] > 0)
    assert torch.equal(matched["action"], wrong["action"])
    kept = (matched["task"], matched["position"])
    assert torch.equal(kept[0], wrong["task"])
    tokens = made.context.ragged("tokens")
    for row in range(len(made)):
        assert tokens[int(made["context"][row])][int(made["position"][row])] == made["action"][row]
    asked = [tuple(t[: int(s)].tolist()) for t, s in zip(tokens, made.context.tensor("shared"), strict=False)]
    half = len(asked) // 2
    assert all(a != b for a, b in zip(asked[:half], asked[half:], strict=True))


def test_prospect() -> None:
    """ℓ = 2, −1 and, mismatched, 1 and 0.5: z₀ = ¾. Each of two labelled among four counts double."""
    made = hand(episode=[4, 7, -1, -2], label=[1, -1, 0, 0], **{"logp@reference": [-3.0, -1.0, -2.0, -1.5]})
    seen = batch(made, logp=[-1.0, -2.0, -1.0, -1.0])
    part = prospect(beta=0.5, desirable=1.5, undesirable=0.5)
    assert part.info.prepare is not None
    prepared = part.info.prepare(seen, **part.settings())
    assert prepared == {"baseline": 0.75, "labelled": 0.5}
    seen = replace(seen, prepared={"prospect": prepared})
    values, stats = part(seen)
    good, bad = 1 / (1 + math.exp(-0.625)), 1 / (1 + math.exp(-0.875))
    assert values.tolist() == pytest.approx([0, 0, 2 * 1.5 * (1 - good), 2 * 0.5 * (1 - bad)])
    assert slopes(values, seen.now["logp"]) == pytest.approx(
        [-2 * 1.5 * 0.5 * good * (1 - good), 2 * 0.5 * 0.5 * bad * (1 - bad), 0, 0]
    )
    assert stats["desirable_logratio"].tolist() == [2.0]
    assert stats["undesirable_logratio"].tolist() == [-1.0]


def test_the_reference_point_is_never_below_zero() -> None:
    made = hand(episode=[4, -1], label=[1, 0], **{"logp@reference": [-1.0, -1.0]})
    seen = batch(made, logp=[-1.0, -3.0])
    part = prospect()
    assert part.info.prepare is not None
    assert part.info.prepare(seen, **part.settings())["baseline"] == 0.0
