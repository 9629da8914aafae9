"""The learner: its gradient against slow references, and what must not change it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from kit import (
    RAGGED,
    Slow,
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

from panoply.batch import Batch, Values
from panoply.experience import Experience, Table
from panoply.loops.learner import Diverged, unit_labels
from panoply.parts import Part, part
from panoply.policies.decoder import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.slots.loss.imitation import nll
from panoply.slots.loss.pairs import logistic
from panoply.slots.reduce.averages import constant, sequence_mean, sequence_sum, token_mean
from panoply.slots.regularise.terms import entropy, kl
from panoply.slots.sample.groups import groups
from panoply.slots.schedule.schedules import linear
from panoply.slots.surrogate.ratios import clip, log_likelihood, ratio
from panoply.slots.update.optimisers import adam, sgd
from panoply.worlds.text.chain import Chain

ZERO = torch.zeros((), dtype=torch.float64)


# ------------------------------------------------------------------ against slow references


def per_episode_mean(experience: Experience, value: Callable[[dict[str, Any]], Tensor]) -> Tensor:
    """(1/E) Σ_e (1/|e|) Σ_t value, as GRPO writes it."""
    total = ZERO
    episodes = values_of(experience, "episode")
    for episode in episodes:
        rows = rows_of(experience, episode=episode)
        inner = ZERO
        for row in rows:
            inner = inner + value(row)
        total = total + inner / len(rows)
    return total / len(episodes)


def slow_clip(
    row: dict[str, Any], logp: Tensor, low: float, high: float, kind: str, dual: float | None
) -> Tensor:
    rho, a = (logp - row["logp"]).exp(), row["advantage"]
    size = float(rho.detach())
    inside = 1 - low <= size <= 1 + high
    bounded = rho if inside else torch.tensor(1 - low if size < 1 else 1 + high, dtype=torch.float64)
    if kind == "mask":
        return rho * a if inside else ZERO
    if kind == "truncate":
        return bounded.detach() * a * logp
    value = torch.minimum(rho * a, bounded * a) if not inside else rho * a
    if dual is not None and a < 0 and size > dual:
        return torch.tensor(dual * a, dtype=torch.float64)
    return value


@pytest.mark.parametrize("kind", ["min", "mask", "truncate"])
@pytest.mark.parametrize("dual", [None, 1.25])
def test_clip_gradient(kind: str, dual: float | None) -> None:
    made, slow = ragged(drift=0.5), Slow()
    dual = dual if kind == "min" else None
    term = clip(low=0.2, high=0.15, kind=kind, dual=dual)
    objective = per_episode_mean(
        made, lambda r: slow_clip(r, slow.logp(r["state"], r["action"]), 0.2, 0.15, kind, dual)
    )
    assert_same(gradient(on_policy(surrogate=term, reduce=sequence_mean()), made), slow.gradient(-objective))


@pytest.mark.parametrize(
    ("surrogate", "value"),
    [
        (log_likelihood(), lambda r, logp: r["advantage"] * logp),
        (ratio(), lambda r, logp: (logp - r["logp"]).exp() * r["advantage"]),
    ],
    ids=["log_likelihood", "ratio"],
)
def test_surrogate_gradient(surrogate: Part, value: Callable[[dict[str, Any], Tensor], Tensor]) -> None:
    made, slow = ragged(), Slow()
    objective = per_episode_mean(made, lambda r: value(r, slow.logp(r["state"], r["action"])))
    assert_same(
        gradient(on_policy(surrogate=surrogate, reduce=sequence_mean()), made), slow.gradient(-objective)
    )


@pytest.mark.parametrize(
    "reduce", [token_mean(), sequence_mean(), sequence_sum(), constant(length=3)], ids=str
)
def test_reduce_gradient(reduce: Part) -> None:
    """Each average as its equation says, written with plain loops."""
    made, slow = ragged(), Slow()
    episodes = [rows_of(made, episode=e) for e in values_of(made, "episode")]
    objective = ZERO
    for rows in episodes:
        for row in rows:
            share = {
                "token_mean": 1 / len(made),
                "sequence_mean": 1 / (len(episodes) * len(rows)),
                "sequence_sum": 1 / len(episodes),
                "constant": 1 / (len(episodes) * 3),
            }[reduce.info.name]
            objective = objective + share * row["advantage"] * slow.logp(row["state"], row["action"])
    assert_same(gradient(on_policy(reduce=reduce), made), slow.gradient(-objective))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("descends", [None, "reverse", "forward"])
def test_kl_gradient(estimator: str, descends: str | None) -> None:
    made, slow = ragged(), Slow()
    forward = (descends or {"k1": "reverse", "k2": "reverse", "k3": "forward"}[estimator]) == "forward"

    def pull(row: dict[str, Any]) -> Tensor:
        logp = slow.logp(row["state"], row["action"])
        l = float(logp.detach()) - row["logp@reference"]  # noqa: E741
        return (1 - math.exp(-l) if forward else l) * logp

    method = on_policy(
        regularise=(kl(weight=0.7, estimator=estimator, descends=descends),), reduce=sequence_mean()
    )
    loss = 0.7 * per_episode_mean(made, pull) - per_episode_mean(
        made, lambda r: r["advantage"] * slow.logp(r["state"], r["action"])
    )
    assert_same(gradient(method, made), slow.gradient(loss))


def test_entropy_gradient() -> None:
    made, slow = ragged(), Slow()
    loss = per_episode_mean(
        made,
        lambda r: -r["advantage"] * slow.logp(r["state"], r["action"]) - 0.3 * slow.entropy(r["state"]),
    )
    method = on_policy(regularise=(entropy(weight=0.3),), reduce=sequence_mean())
    assert_same(gradient(method, made), slow.gradient(loss))


def test_nll_gradient() -> None:
    made, slow = ragged(), Slow()
    loss = per_episode_mean(made, lambda r: -slow.logp(r["state"], r["action"]))
    assert_same(gradient(dataset(nll(), reduce=sequence_mean()), made), slow.gradient(loss))


PAIRS = [(100, 101), (103, 104), (104, 100), (106, 107)]


def with_pairs(experience: Experience) -> Experience:
    chosen, rejected = zip(*PAIRS, strict=True)
    return experience.with_pairs(Table({"chosen": torch.tensor(chosen), "rejected": torch.tensor(rejected)}))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_logistic_gradient(smoothing: float) -> None:
    made, slow = with_pairs(ragged()), Slow()

    def l(episode: int) -> Tensor:  # noqa: E743
        total = ZERO
        for row in rows_of(made, episode=episode):
            total = total + slow.logp(row["state"], row["action"]) - row["logp@reference"]
        return total

    loss = ZERO
    for chosen, rejected in PAIRS:
        p = 1 / (1 + (-0.5 * (l(chosen) - l(rejected))).exp())
        loss = loss - ((1 - smoothing) * p.log() + smoothing * (1 - p).log()) / len(PAIRS)
    assert_same(gradient(dataset(logistic(beta=0.5, smoothing=smoothing)), made), slow.gradient(loss))


# ------------------------------------------------------------------ what must not change a gradient


@part("loss", unit="episode")
def toy_episode(batch: Batch) -> Values:
    """Nonlinear in an episode's log-probability: a cut episode would give another number."""
    return batch.by("episode").sum(batch.now["logp"]) ** 2, {}


@part("loss", unit="turn")
def toy_turn(batch: Batch) -> Values:
    return batch.by("turn").sum(batch.now["logp"]) ** 2, {}


@part("loss", unit="group")
def toy_group(batch: Batch) -> Values:
    return batch.by("group").sum(batch.now["logp"]) ** 2, {}


@part("loss", prepare=lambda batch, weight: {"mean": batch.now["logp"].mean(), "rows": len(batch.experience)})
def toy_prepared(batch: Batch, *, weight: float | Part = 1.0) -> Values:
    """Squared distance to the mini-batch's mean, which is a number and not differentiated."""
    return (batch.now["logp"] - batch.prepared["toy_prepared"]["mean"]) ** 2, {}


METHODS = {
    "clip": on_policy(surrogate=clip(), regularise=(kl(), entropy()), reduce=sequence_mean()),
    "reinforce": on_policy(reduce=sequence_sum()),
    "nll": dataset(nll()),
    "logistic": dataset(logistic()),
    "nll and logistic": dataset(nll(), logistic(weight=0.5)),
    "episode": dataset(toy_episode()),
    "turn": dataset(toy_turn()),
    "group": dataset(toy_group()),
    "prepared": dataset(toy_prepared()),
    "group and pair": dataset(toy_group(), logistic()),
}


@pytest.mark.parametrize("name", METHODS)
def test_any_split_gives_the_same_gradient(name: str) -> None:
    made, method = with_pairs(ragged()), METHODS[name]
    whole = gradient(method, made)
    passes = set()
    for micro_tokens in (1, 3, 5, 8, 13):
        policy = Tabular()
        found = learner(policy, method, micro_tokens=micro_tokens).gradient(made)["logits"]
        assert_same(found, whole, rel=1e-12)
        passes.add(len(policy.scored))
    assert max(passes) > 1, "the mini-batch was never split"


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", [0, 1])
def test_row_order_does_not_matter(name: str, seed: int) -> None:
    made, method = with_pairs(ragged()), METHODS[name]
    assert_same(gradient(method, shuffled(made, seed)), gradient(method, made), rel=1e-12)
    assert_same(gradient(method, shuffled(made, seed), micro_tokens=4), gradient(method, made), rel=1e-12)


@pytest.mark.parametrize(("unit", "toy"), [("episode", toy_episode), ("group", toy_group)])
def test_units_against_a_slow_reference(unit: str, toy: Callable[[], Part]) -> None:
    made, slow = ragged(), Slow()
    loss, keys = ZERO, values_of(made, unit)
    for key in keys:
        total = ZERO
        for row in rows_of(made, **{unit: key}):
            total = total + slow.logp(row["state"], row["action"])
        loss = loss + total**2 / len(keys)
    assert_same(gradient(dataset(toy()), made, micro_tokens=3), slow.gradient(loss))


def test_turns_against_a_slow_reference() -> None:
    made, slow = ragged(), Slow()
    loss = ZERO
    keys = sorted({(r["episode"], r["turn"]) for r in rows_of(made)})
    for episode, turn in keys:
        total = ZERO
        for row in rows_of(made, episode=episode, turn=turn):
            total = total + slow.logp(row["state"], row["action"])
        loss = loss + total**2 / len(keys)
    assert_same(gradient(dataset(toy_turn()), made, micro_tokens=3), slow.gradient(loss))


@part("surrogate")
def toy_restless(batch: Batch) -> Values:
    """A·log π without saying that a zero advantage has no gradient."""
    return batch["advantage"] * batch.now["logp"], {}


def test_idle_rows_are_left_out_without_effect() -> None:
    made = ragged()
    quiet = (made["group"] == 11) | (made["episode"] == 100)
    made = made.with_columns(advantage=made["advantage"].masked_fill(quiet, 0.0))
    policy, restless = Tabular(), Tabular()
    found = learner(policy, on_policy(reduce=sequence_mean())).gradient(made)["logits"]
    method = on_policy(surrogate=toy_restless(), reduce=sequence_mean())
    assert_same(found, learner(restless, method).gradient(made)["logits"], rel=1e-12)
    assert policy.scored == [len(made) - int(quiet.sum())]
    assert restless.scored == [len(made)]


@part("surrogate", unit="group", idle="advantage")
def toy_idle_group(batch: Batch) -> Values:
    """Couples the episodes of a group, those with advantage 0 included."""
    groups = batch.by("group")
    return groups.sum(batch["advantage"].abs()) * groups.sum(batch.now["logp"]) ** 2, {}


def test_a_unit_is_idle_only_as_a_whole() -> None:
    made = ragged()
    quiet = (made["group"] == 11) | (made["episode"] == 100)
    made = made.with_columns(advantage=made["advantage"].masked_fill(quiet, 0.0))
    policy = Tabular()
    found = learner(policy, on_policy(surrogate=toy_idle_group())).gradient(made)["logits"]
    assert policy.scored == [len(made) - int((made["group"] == 11).sum())]
    slow, loss = Slow(), ZERO
    for key in values_of(made, "group"):
        total = ZERO
        for row in rows_of(made, group=key):
            total = total + slow.logp(row["state"], row["action"])
        loss = loss - sum(abs(r["advantage"]) for r in rows_of(made, group=key)) * total**2 / 4
    assert_same(found, slow.gradient(loss))


def test_nothing_to_learn_is_no_step() -> None:
    made = ragged()
    made = made.with_columns(advantage=torch.zeros_like(made["advantage"]))
    policy = Tabular()
    before = policy.logits.detach().clone()
    metrics = learner(policy, on_policy()).step(made, 0)
    assert (metrics["loss"], metrics["gradient_norm"], policy.scored) == (0.0, 0.0, [])
    assert torch.equal(policy.logits, before)


def test_masked_decisions_do_not_learn() -> None:
    made = ragged()
    train = torch.arange(len(made)) % 3 != 0
    masked = made.with_columns(train=train)
    for reduce in (token_mean(), sequence_mean(), sequence_sum()):
        method = on_policy(surrogate=clip(), regularise=(kl(),), reduce=reduce)
        assert_same(gradient(method, masked), gradient(method, made.take(train)), rel=1e-12)
    for toy in (toy_episode(), toy_group()):
        assert_same(gradient(dataset(toy), masked), gradient(dataset(toy), made.take(train)), rel=1e-12)


@pytest.fixture(scope="module")
def answers() -> tuple[TextPolicy, Experience]:
    """A small language model in float64, and groups of answers it sampled."""
    world = Chain(operations=2)
    config = DecoderConfig(**{**world.default_model(), "width": 16, "layers": 2, "heads": 2, "inner": 16})
    policy = TextPolicy.fresh(config, world.tokenizer, seed=1, dtype=torch.float64)
    made = groups(prompts=3, group=4)(Collector(world, policy, seed=0))
    dice = torch.Generator().manual_seed(0)
    noise = 0.5 * torch.randn(2, len(made), generator=dice, dtype=torch.float64)
    columns = {"logp": made["logp"] + noise[0], "logp@reference": made["logp"] + noise[1]}
    episodes = made.by("episode")
    advantage = torch.randn(len(episodes), generator=dice, dtype=torch.float64)
    return policy, made.with_columns(advantage=episodes.rows(advantage), **columns)


@pytest.mark.parametrize("micro_tokens", [10**9, 60, 1])
def test_prefix_sharing_does_not_matter(answers: tuple[TextPolicy, Experience], micro_tokens: int) -> None:
    """A forward pass per prompt or per answer, split or not, in order or not: one gradient."""
    policy, made = answers
    method = on_policy(surrogate=clip(), regularise=(kl(), entropy()), reduce=sequence_mean())
    apart = TextPolicy(policy.model, policy.tokenizer, shared=False)
    expected = learner(apart, method).gradient(made)
    for scorer in (policy, apart):
        for rows in (made, shuffled(made)):
            assert_same(learner(scorer, method, micro_tokens=micro_tokens).gradient(rows), expected, rel=1e-9)


# ------------------------------------------------------------------ streams


@part("regularise", stream="imitation", equation="−log π")
def toy_imitation(batch: Batch, *, weight: float | Part = 1.0) -> Values:
    return -batch.now["logp"], {"seen": torch.ones(len(batch.experience))}


@part("regularise", stream="imitation", unit="episode", equation="(log π)²")
def toy_imitation_episode(batch: Batch, *, weight: float | Part = 1.0) -> Values:
    return batch.by("episode").sum(batch.now["logp"]) ** 2, {}


def mixed() -> tuple[Experience, Experience, Experience]:
    """Own and foreign rows in one table. Foreign rows have no log-probability and no advantage."""
    made = ragged()
    foreign = (made["group"] == 11) | (made["episode"] == 107)
    holes = {n: made[n].masked_fill(foreign, math.nan) for n in ("logp", "advantage", "logp@reference")}
    both = made.with_columns(source=torch.where(foreign, 2, 0), **holes)
    return both, both.take(~foreign), both.take(foreign)


@pytest.mark.parametrize("toy", [toy_imitation, toy_imitation_episode])
@pytest.mark.parametrize("reduce", [token_mean(), sequence_mean(), sequence_sum()], ids=str)
@pytest.mark.parametrize("surrogate", [clip(), log_likelihood()], ids=["clip", "log_likelihood"])
def test_streams_are_normalised_apart(toy: Callable[..., Part], reduce: Part, surrogate: Part) -> None:
    """The gradient of the mix is the sum of the gradients of each stream alone, under any split."""
    both, own, foreign = mixed()
    term = toy(weight=0.3)
    method = on_policy(surrogate=surrogate, regularise=(kl(), term), reduce=reduce)
    alone = gradient(method.but(regularise=(kl(),)), own) + gradient(method.but(regularise=(term,)), foreign)
    for micro_tokens in (10**9, 6, 1):
        assert_same(gradient(method, both, micro_tokens=micro_tokens), alone)
        assert_same(gradient(method, shuffled(both), micro_tokens=micro_tokens), alone)


def test_statistics_are_of_the_stream() -> None:
    both, own, foreign = mixed()
    method = on_policy(surrogate=clip(), regularise=(toy_imitation(),))
    metrics = learner(Tabular(), method).step(both, 0)
    alone = learner(Tabular(), method).step(own, 0)
    assert metrics["seen"] == 1.0
    for name in ("ratio_max", "logp_gap", "clip_high", "kl_behaviour", "clip"):
        assert metrics[name] == pytest.approx(alone[name]), name
    assert len(foreign) > 0


# ------------------------------------------------------------------ prepare, weights


def test_prepare_sees_the_whole_minibatch() -> None:
    seen: list[Mapping[str, Any]] = []

    @part("loss", prepare=lambda batch: {"mean": batch.now["logp"].mean(), "rows": len(batch.experience)})
    def toy_watching(batch: Batch) -> Values:
        seen.append(batch.prepared["toy_watching"])
        return (batch.now["logp"] - batch.prepared["toy_watching"]["mean"]) ** 2, {}

    made = shuffled(ragged())
    policy = Tabular()
    expected = float(policy.score(made)["logp"].detach().mean())
    for micro_tokens in (10**9, 4):
        seen.clear()
        policy.scored.clear()
        learner(policy, dataset(toy_watching()), micro_tokens=micro_tokens).gradient(made)
        assert {(x["rows"], round(float(x["mean"]), 12)) for x in seen} == {(len(made), round(expected, 12))}
        assert not seen[0]["mean"].requires_grad
        assert sum(policy.scored) == 2 * len(made), "one more forward pass"
        assert max(policy.scored) <= max(5, micro_tokens), "no more rows at once than elsewhere"


def test_prepare_gradient() -> None:
    made, slow = ragged(), Slow()
    every = [slow.logp(r["state"], r["action"]) for r in rows_of(made)]
    mean = sum(float(x.detach()) for x in every) / len(every)
    loss = sum(((x - mean) ** 2 for x in every), ZERO) / len(every)
    assert_same(gradient(dataset(toy_prepared()), made, micro_tokens=3), slow.gradient(loss))


def test_a_weight_may_follow_a_schedule() -> None:
    made = ragged()
    parts = {w: on_policy(regularise=(kl(weight=w),)) for w in (1.0, 0.5)}
    scheduled = learner(Tabular(), on_policy(regularise=(kl(weight=linear()),)), steps=10)
    plain = gradient(on_policy(), made)
    assert_same(scheduled.gradient(made, 0)["logits"], gradient(parts[1.0], made), rel=1e-12)
    assert_same(scheduled.gradient(made, 5)["logits"], gradient(parts[0.5], made), rel=1e-12)
    assert_same(scheduled.gradient(made, 10)["logits"], plain, rel=1e-12)


def test_a_term_without_weight_costs_nothing() -> None:
    made = ragged().take(torch.arange(9))
    without = Experience(
        Table({k: c for k, c in made.decisions.items() if k != "logp@reference"}), made.context
    )
    policy = Tabular()
    found = learner(policy, on_policy(regularise=(kl(weight=0.0),))).gradient(without)["logits"]
    assert_same(found, gradient(on_policy(), made), rel=1e-12)
    policy.scored.clear()
    learner(policy, dataset(nll(), toy_prepared(weight=0.0))).gradient(made)
    assert policy.scored == [9], "its prepare step is not run"


# ------------------------------------------------------------------ the on-policy limit


@pytest.mark.parametrize(
    "surrogate",
    [
        ratio(),
        clip(),
        clip(kind="mask"),
        clip(kind="truncate"),
        clip(dual=3.0),
        clip(against="old"),
        ratio(against="old"),
    ],
    ids=str,
)
def test_at_ratio_one_everything_is_reinforce(surrogate: Part) -> None:
    made = ragged()
    logp = Tabular().score(made)["logp"].detach()
    made = made.with_columns(**{"logp": logp, "logp@old": logp})
    for reduce in (token_mean(), sequence_mean()):
        expected = gradient(on_policy(surrogate=log_likelihood(), reduce=reduce), made)
        assert_same(gradient(on_policy(surrogate=surrogate, reduce=reduce), made), expected, rel=1e-12)


def test_at_the_reference_kl_has_no_gradient() -> None:
    made = ragged()
    made = made.with_columns(**{"logp@reference": Tabular().score(made)["logp"].detach()})
    for estimator in ("k1", "k2", "k3"):
        method = on_policy(regularise=(kl(weight=1.0, estimator=estimator),))
        assert_same(gradient(method, made), gradient(on_policy(), made), rel=1e-12)


# ------------------------------------------------------------------ splitting


@pytest.mark.parametrize(
    ("terms", "key"),
    [
        ([clip()], "episode"),
        ([toy_episode()], "episode"),
        ([toy_group()], "group"),
        ([toy_turn()], "episode"),
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
    made = shuffled(ragged())
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
    assert unit_labels(made, [toy_episode()]).tolist() == [0, 0, 0, 1, 2, 3]
    assert unit_labels(made, [logistic()]).tolist() == [0, 0, 0, 1, 1, 2]


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
