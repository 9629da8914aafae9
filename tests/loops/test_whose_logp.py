"""Whose log-probabilities a term gets: those of the distribution sampled from, or the policy's own."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from kit import ACTIONS, Tabular, assert_same, dataset, learner, on_policy, ragged
from torch import Tensor

from panoply import registry
from panoply.batch import Batch
from panoply.experience import Experience, Ragged, Table
from panoply.loops.samples import Watch
from panoply.loops.snapshots import Snapshots
from panoply.methods.base.online_dpo import online_dpo
from panoply.methods.preferences.cgpo import cgpo_codpo
from panoply.methods.preferences.sppo import sppo
from panoply.parts import Part
from panoply.policies.text import TextPolicy
from panoply.regimes import OnPolicy
from panoply.rollout.text import Collector
from panoply.slots.loss.pairs import logistic
from panoply.slots.regularise.terms import kl
from panoply.slots.surrogate.preferences import preference
from panoply.slots.surrogate.ratios import clip

registry.entries()
TERMS = [
    cls
    for slot in ("surrogate", "regularise", "loss")
    for cls in registry.parts(slot).values()
    if cls.info.unit != "transition" and cls.__module__.startswith("panoply.")
]
HEAT = 0.7


def scoring(cls: type[Part]) -> bool:
    """Whether a term can be fed with a table's log-probabilities alone."""
    return cls.info.scores != "none" and {n.split("@")[0] for n in cls().needs()} <= {"logp", "entropy"}


def heated(stream: int) -> Experience:
    """Rows sampled at a temperature, with every column a term may ask for."""
    made = ragged()
    label = torch.tensor([1, -1, 0, -1, 1, 0, 1, 1, 0, -1])[made.by("episode").index]
    pairs = Table({"chosen": torch.tensor([100, 104, 106]), "rejected": torch.tensor([102, 103, 109])})
    made = made.with_columns(
        label=label,
        source=torch.full((len(made),), stream),
        temperature=torch.full((len(made),), HEAT, dtype=torch.float64),
        median=torch.zeros(len(made), dtype=torch.float64),
        value=torch.zeros(len(made), dtype=torch.float64),
    )
    then = {n: Tabular(seed).score(made)["logp"].detach() for n, seed in (("old", 1), ("reference", 2))}
    own = {
        n: Tabular(seed).score(made.unaltered())["logp"].detach()
        for n, seed in (("old", 1), ("reference", 2))
    }
    columns = {f"logp@{n}": c for n, c in then.items()} | {f"own@{n}": c for n, c in own.items()}
    lists = {
        "episodes": Ragged.from_lists([[100, 102, 104], [103, 106]]),
        "worth": Ragged.from_lists([[3, 2, 1], [2, 1]]),
    }
    return made.with_columns(**columns).with_pairs(pairs).with_lists(Table(lists))


def slope(held: Part, rows: Experience) -> Tensor:
    method: Any = {
        "surrogate": lambda: on_policy(surrogate=held),
        "regularise": lambda: on_policy(regularise=(held,)),
        "loss": lambda: dataset(held),
    }[held.info.slot]()
    if held.info.slot == "regularise":  # beside a surrogate that says nothing
        rows = rows.with_columns(advantage=torch.zeros(len(rows), dtype=torch.float64))
    return learner(Tabular(), method).gradient(rows)["logits"]


@pytest.mark.parametrize("cls", [c for c in TERMS if scoring(c)], ids=lambda cls: cls.info.id)
def test_a_term_gets_the_log_probabilities_it_declares(cls: type[Part]) -> None:
    held, rows = cls(), heated({"own": 0, "joint": 0, "imitation": 2}[cls.info.stream])
    own = {f"logp@{n}": rows[f"own@{n}"] for n in ("old", "reference")}
    plain = rows.unaltered().with_columns(**own).without("own@old", "own@reference")
    tempered = rows.without("own@old", "own@reference")
    found, of_policy = slope(held, rows), slope(held, plain)
    if cls.info.scores == "policy":
        assert_same(found, of_policy)
    else:
        assert_same(found, slope(held, tempered))
        gap = float((found - of_policy).abs().max() / of_policy.abs().max())
        assert gap > 1e-3, "the temperature makes no difference to it, so nothing was tested"


@pytest.mark.parametrize("cls", TERMS, ids=lambda cls: cls.info.id)
def test_likelihoods_pairs_and_regressions_are_of_the_policy_itself(cls: type[Part]) -> None:
    info = cls.info
    if info.unit == "pair" or info.stream == "imitation" or info.slot == "loss":
        assert info.scores in ("policy", "none")
    if "against" in cls.annotations():
        assert info.scores == "sampled", "a ratio to the behaviour is of what was sampled from"


def test_terms_of_both_kinds_side_by_side() -> None:
    rows = heated(0)
    pair, pull = preference(loss=logistic()), kl(weight=0.3)
    both = on_policy(surrogate=pair, regularise=(pull,))
    alone = learner(Tabular(), on_policy(surrogate=pair)).gradient(rows)["logits"]
    assert_same(learner(Tabular(), both).gradient(rows)["logits"], alone + slope(pull, rows))


@pytest.mark.parametrize("build", [sppo, online_dpo, cgpo_codpo])
def test_log_ratios_of_pairs_are_those_of_the_policy(build: Any, tiny_collector: Collector) -> None:
    """After the weights moved, answers sampled cold: Σ log π/π_then at temperature 1, by the model's own logits."""
    method: OnPolicy = build()
    policy = cast(TextPolicy, tiny_collector.policy)
    made = tiny_collector.episodes(tiny_collector.tasks(3), 4, temperature=HEAT, top_k=5)
    assert made.altered
    rows = Snapshots(method, policy, policy.copy).score(made)
    keys = rows.by("episode").keys
    rows = rows.with_columns(reward=torch.rand(len(rows), generator=torch.Generator().manual_seed(0)))
    rows = rows.with_pairs(Table({"chosen": keys[0::2], "rejected": keys[1::2]}))
    before = policy.score(rows.unaltered())["logp"]
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    expected = rows.by("episode").sum(policy.score(rows.unaltered())["logp"] - before).detach()
    term = method.surrogate
    active = learner(policy, method).objective.active(0)
    view = Batch(rows, learner(policy, method).now(rows, active)).scored(term.info.scores)
    name = "old" if build is sppo else "reference"
    assert view.episode_log_ratio(name).tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert float(expected.abs().max()) > 0.1


def test_no_ratio_is_recorded_between_two_distributions() -> None:
    """The record of an episode shows the ratio a surrogate saw; to a behaviour at another temperature there is none."""
    rows = heated(0)
    for experience, recorded in ((rows, False), (rows.unaltered(), True)):
        watch = Watch(torch.tensor([100]))
        watch.see(preference(), Batch(experience, {"logp": experience["logp"] + 0.1}), {})
        assert ("ratio" in watch.columns) == recorded
        watch.see(clip(), Batch(experience, {"logp": experience["logp"] + 0.1}), {})
        assert "ratio" in watch.columns


def test_without_a_temperature_there_is_one_pass(tiny_collector: Collector) -> None:
    policy = Tabular()
    rows = heated(0).unaltered().without("own@old", "own@reference")
    learner(policy, on_policy(surrogate=preference(), regularise=(kl(),))).gradient(rows)
    assert policy.scored == [len(rows)]


def test_a_cut_alone_makes_another_distribution() -> None:
    made = ragged()
    every = Ragged.from_lists([list(range(ACTIONS))] * len(made))
    assert made.with_columns(allowed=every).altered
    assert not made.altered
    assert made.unaltered() is made
