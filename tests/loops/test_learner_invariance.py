"""What must not change a gradient: splits, order, sharing of prefixes, idle rows."""

from __future__ import annotations

import pytest
import torch
from kit import (
    Slow,
    Tabular,
    assert_same,
    dataset,
    gradient,
    learner,
    on_policy,
    ragged,
    rows_of,
    shuffled,
    values_of,
)
from toys import LISTS, TOYS, toy_list, toy_prepared, with_keys, with_lists, with_pairs

from panoply.batch import Batch, Values
from panoply.experience import Experience
from panoply.parts import part
from panoply.policies.decoder import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.slots.loss.imitation import nll
from panoply.slots.loss.pairs import logistic
from panoply.slots.reduce.averages import sequence_mean, sequence_sum, token_mean
from panoply.slots.regularise.terms import entropy, kl
from panoply.slots.sample.groups import groups
from panoply.slots.surrogate.ratios import clip
from panoply.worlds.text.chain import Chain

ZERO = torch.zeros((), dtype=torch.float64)


METHODS = {
    "clip": on_policy(surrogate=clip(), regularise=(kl(), entropy()), reduce=sequence_mean()),
    "reinforce": on_policy(reduce=sequence_sum()),
    "nll": dataset(nll()),
    "logistic": dataset(logistic()),
    "nll and logistic": dataset(nll(), logistic(weight=0.5)),
    **{unit: dataset(toy) for unit, toy in TOYS.items()},
    "list": dataset(toy_list()),
    "prepared": dataset(toy_prepared()),
    "group and pair": dataset(TOYS["group"], logistic()),
    "game, agent and list": dataset(TOYS["game"], TOYS["agent"], toy_list()),
}


def rich() -> Experience:
    return with_keys(with_lists(with_pairs(ragged())))


@pytest.mark.parametrize("name", METHODS)
def test_any_split_gives_the_same_gradient(name: str) -> None:
    made, method = rich(), METHODS[name]
    whole = gradient(method, made)
    passes = set()
    for micro_tokens in (1, 3, 5, 8, 13):
        policy = Tabular()
        found = learner(policy, method, micro_tokens=micro_tokens).gradient(made)["logits"]
        assert_same(found, whole, rel=1e-12)
        passes.add(len(policy.scored))
    assert max(passes) > 1 or name in ONE, "the mini-batch was never split"


ONE = ("batch", "game, agent and list")
"""What holds the whole mini-batch together: the batch, and games and lists that join its two agents."""


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", [0, 1])
def test_row_order_does_not_matter(name: str, seed: int) -> None:
    made, method = rich(), METHODS[name]
    assert_same(gradient(method, shuffled(made, seed)), gradient(method, made), rel=1e-12)
    assert_same(gradient(method, shuffled(made, seed), micro_tokens=4), gradient(method, made), rel=1e-12)


@pytest.mark.parametrize("unit", TOYS)
def test_units_against_a_slow_reference(unit: str) -> None:
    made, slow = rich(), Slow()
    inside = {"turn": "episode", "segment": "episode", "step": "game"}
    totals: dict[tuple[int, ...], torch.Tensor] = {}
    for row in rows_of(made):
        key = (row.get(inside.get(unit, unit), 0), row.get(unit, 0))
        totals[key] = totals.get(key, ZERO) + slow.logp(row["state"], row["action"])
    loss = sum((total**2 / len(totals) for total in totals.values()), ZERO)
    assert_same(gradient(dataset(TOYS[unit]), made, micro_tokens=3), slow.gradient(loss))


def test_lists_against_a_slow_reference() -> None:
    made, slow, loss = rich(), Slow(), ZERO
    for members in LISTS:
        total = ZERO
        for place, episode in enumerate(members, start=1):
            for row in rows_of(made, episode=episode):
                total = total + place * slow.logp(row["state"], row["action"])
        loss = loss + total**2 / len(LISTS)
    assert_same(gradient(dataset(toy_list()), made, micro_tokens=3), slow.gradient(loss))


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
    for toy in (TOYS["episode"], TOYS["group"]):
        assert_same(gradient(dataset(toy), masked), gradient(dataset(toy), made.take(train)), rel=1e-12)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def answers(request: pytest.FixtureRequest) -> tuple[TextPolicy, Experience]:
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
    policy.model.to(request.param)
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_splits_and_order_change_half_precision_by_its_rounding_only(dtype: torch.dtype) -> None:
    world = Chain(operations=2)
    config = DecoderConfig(**{**world.default_model(), "width": 64, "layers": 2, "heads": 2, "inner": 64})
    policy = TextPolicy.fresh(config, world.tokenizer, seed=1, dtype=dtype, device="cuda")
    made = groups(prompts=3, group=4)(Collector(world, policy, seed=0))
    made = made.with_columns(advantage=made.by("episode").rows(torch.linspace(-1, 2, 12)))
    method = on_policy(surrogate=clip(), reduce=sequence_mean())
    whole = learner(policy, method).gradient(made)
    for rows in (made, shuffled(made)):
        found = learner(policy, method, micro_tokens=40).gradient(rows)
        for name, slope in whole.items():
            assert (found[name] - slope).norm() < 8 * torch.finfo(dtype).eps * slope.norm(), name
