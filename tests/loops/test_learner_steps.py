"""From a batch to moved weights: mini-batches, optimisers, and the guard against divergence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kit import (
    RAGGED,
    Tabular,
    assert_same,
    dataset,
    gradient,
    hand,
    learner,
    on_policy,
    ragged,
    rows_of,
    shuffled,
    values_of,
)
from torch import Tensor
from toys import PAIRS, TOYS, toy_list, with_keys, with_pairs

from panoply.experience import Experience, Ragged, Table
from panoply.loops.micro_batches import unit_labels
from panoply.loops.mover import Diverged
from panoply.parts import Part, part
from panoply.slots.loss.pairs import logistic
from panoply.slots.regularise.terms import entropy, kl
from panoply.slots.schedule.schedules import linear
from panoply.slots.surrogate.ratios import clip, ratio
from panoply.slots.update.optimisers import adam, sgd

# ------------------------------------------------------------------ splitting


@pytest.mark.parametrize(
    ("terms", "key"),
    [
        ([clip()], "episode"),
        ([TOYS["episode"]], "episode"),
        ([TOYS["group"]], "group"),
        ([TOYS["turn"]], "episode"),
        ([TOYS["game"]], "game"),
    ],
)
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("minibatches", [1, 2, 3, 50])
def test_minibatches_cover_whole_units_once_an_epoch(
    terms: list[Part], key: str, epochs: int, minibatches: int
) -> None:
    update = sgd(epochs=epochs, minibatches=minibatches)
    method = (
        on_policy(surrogate=terms[0], update=update)
        if terms[0].info.slot == "surrogate"
        else dataset(*terms, update=update)
    )
    made = shuffled(with_keys(ragged()))
    parts = list(learner(Tabular(), method).minibatches(made, torch.Generator().manual_seed(0)))
    units = len(made.by(key))
    assert len(parts) == epochs * min(minibatches, units)
    whole = {k: len(rows_of(made, **{key: k})) for k in values_of(made, key)}
    times: dict[int, int] = dict.fromkeys(whole, 0)
    for piece in parts:
        for k in values_of(piece, key):
            assert len(rows_of(piece, **{key: k})) == whole[k], "a unit was cut"
            times[k] += 1
    assert set(times.values()) == {epochs}
    if 1 < minibatches <= units:
        sizes = [len(p.by(key)) for p in parts]
        assert max(sizes) - min(sizes) <= 1


def test_minibatches_are_reshuffled_every_epoch() -> None:
    held = learner(Tabular(), on_policy(update=sgd(epochs=2, minibatches=2)))
    first = [values_of(p, "episode") for p in held.minibatches(ragged(), torch.Generator().manual_seed(3))]
    again = [values_of(p, "episode") for p in held.minibatches(ragged(), torch.Generator().manual_seed(3))]
    assert first == again
    assert first[0] != first[2]


@pytest.mark.parametrize("minibatches", [2, 3])
def test_minibatches_never_cut_a_pair(minibatches: int) -> None:
    """100 is in two pairs, so 100, 101, 103 and 104 stay together."""
    made = shuffled(with_pairs(ragged()))
    held = learner(Tabular(), dataset(logistic(), update=sgd(minibatches=minibatches)))
    pieces = list(held.minibatches(made, torch.Generator().manual_seed(1)))
    found = []
    for piece in pieces:
        assert piece.pairs is not None
        found += list(
            zip(piece.pairs.tensor("chosen").tolist(), piece.pairs.tensor("rejected").tolist(), strict=True)
        )
    assert sorted(found) == sorted(PAIRS)


def test_labels_join_whatever_is_connected() -> None:
    """Episodes 1 and 2 share context row 0, episode 2 also has row 1; 3 is paired with 4."""
    made = hand(episode=[1, 2, 2, 3, 4, 5], context=[0, 0, 1, 2, 3, 4], pairs=[(4, 3)])
    assert unit_labels(made, [clip()]).tolist() == [0, 0, 1, 2, 3, 4]
    assert unit_labels(made, [TOYS["episode"]]).tolist() == [0, 0, 0, 1, 2, 3]
    assert unit_labels(made, [logistic()]).tolist() == [0, 0, 0, 1, 1, 2]
    assert unit_labels(made, [TOYS["batch"], clip()]).tolist() == [0] * 6
    listed = made.with_lists(Table({"episodes": Ragged.from_lists([[5, 1], [3]])}))
    assert unit_labels(listed, [toy_list()]).tolist() == [0, 0, 0, 1, 2, 0]


def test_micro_batches_respect_the_limit() -> None:
    made = ragged()
    held = learner(Tabular(), on_policy(), micro_tokens=6)
    sizes = [int(m.context.ragged("tokens").lengths.sum()) for m in held.micro_batches(made)]
    assert sum(sizes) == sum(sum(g) for g in RAGGED)
    assert max(sizes) <= 6
    assert len(sizes) == 5


# ------------------------------------------------------------------ moving


def test_a_step_follows_the_gradient() -> None:
    made = ragged()
    policy = Tabular()
    before = policy.logits.detach().clone()
    slope = gradient(on_policy(), made)
    metrics = learner(policy, on_policy(update=sgd(lr=0.1, clip=0.0, schedule=linear())), steps=4).step(
        made, 1
    )
    assert metrics["lr"] == pytest.approx(0.075)
    assert metrics["gradient_norm"] == pytest.approx(float(slope.norm()))
    assert_same(policy.logits.detach() - before, -0.075 * slope, rel=1e-12)


def test_the_gradient_is_clipped_to_its_norm() -> None:
    made = ragged()
    policy = Tabular()
    before = policy.logits.detach().clone()
    slope = gradient(on_policy(), made)
    learner(policy, on_policy(update=sgd(lr=1.0, clip=0.01))).step(made, 0)
    assert_same(policy.logits.detach() - before, -0.01 * slope / slope.norm(), rel=1e-4)


def test_loss_is_the_sum_of_the_terms() -> None:
    method = on_policy(surrogate=ratio(), regularise=(kl(weight=0.5), entropy(weight=0.25)))
    metrics = learner(Tabular(), method).step(ragged(), 0)
    expected = -metrics["ratio"] + 0.5 * metrics["kl"] - 0.25 * metrics["entropy"]
    assert metrics["loss"] == pytest.approx(expected)


@pytest.mark.parametrize("update", [adam(lr=0.1), sgd(lr=0.1, momentum=0.9)], ids=["adam", "sgd"])
def test_the_optimiser_resumes(update: Part) -> None:
    made, method = ragged(), on_policy(update=update)
    policy, other = Tabular(), Tabular()
    held = learner(policy, method)
    held.step(made, 0)
    with torch.no_grad():
        other.logits.copy_(policy.logits)
    saved = {name: value.clone() for name, value in held.state().items()}
    assert saved
    held.step(made, 1)
    resumed = learner(other, method)
    resumed.load_state(saved)
    resumed.step(made, 1)
    assert torch.equal(policy.logits, other.logits)


# ------------------------------------------------------------------ the guard


def spoilt(**columns: float) -> Experience:
    made = ragged()
    for name, value in columns.items():
        column = made[name].clone()
        column[4] = value
        made = made.with_columns(**{name: column})
    return made


@pytest.mark.parametrize(
    ("method", "made"),
    [
        (on_policy(), spoilt(advantage=math.nan)),
        (on_policy(), spoilt(advantage=math.inf)),
        (on_policy(surrogate=clip()), spoilt(logp=math.nan)),
        (on_policy(surrogate=ratio()), spoilt(logp=-90.0)),
        (on_policy(surrogate=clip()), spoilt(logp=-90.0)),
        (on_policy(regularise=(kl(),)), spoilt(**{"logp@reference": math.nan})),
    ],
)
def test_divergence_leaves_the_weights(method: Any, made: Experience) -> None:
    policy = Tabular()
    before = policy.logits.detach().clone()
    held = learner(policy, method.but(update=adam(lr=0.1)))
    with pytest.raises(Diverged, match="Stopped"):
        held.step(made, 0)
    assert torch.equal(policy.logits, before)
    assert held.state() == {}
    held.step(ragged(), 0)
    assert policy.logits.isfinite().all()
    assert not torch.equal(policy.logits, before)


def test_nan_weights_are_caught(registries: None) -> None:
    @part("reduce")
    def toy_broken(experience: Experience, mask: Tensor) -> Tensor:
        return torch.full((len(experience),), math.nan)

    policy = Tabular()
    with pytest.raises(Diverged, match="loss is nan"):
        learner(policy, on_policy(reduce=toy_broken())).step(ragged(), 0)
    assert torch.equal(policy.logits, Tabular().logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_exploded_ratio_is_caught_in_any_precision(dtype: torch.dtype) -> None:
    """In float32 the largest ratio formed, e²⁰, is rounded down."""
    made = spoilt(logp=-90.0)
    made = made.with_columns(logp=made["logp"].to(dtype), advantage=made["advantage"].to(dtype))
    with pytest.raises(Diverged, match="-fold"):
        learner(Tabular(dtype=dtype), on_policy(surrogate=clip())).step(made, 0)


def test_a_healthy_ratio_is_not_a_divergence() -> None:
    learner(Tabular(), on_policy(surrogate=clip())).step(spoilt(logp=-19.0), 0)
