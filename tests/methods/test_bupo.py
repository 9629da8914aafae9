"""BuPO: an inner layer's ratio is of that layer alone, reaches what lies below, and gives way to the whole policy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kit import assert_same, batch, hand, learner, slopes
from torch import Tensor

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.base.grpo import grpo
from panoply.methods.objectives.bapo import balanced_clip
from panoply.methods.objectives.bupo import bupo, inner_clip
from panoply.policies.build import open_policy
from panoply.policies.decoder import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.regimes import OnPolicy
from panoply.rollout.text import Collector
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import token_mean
from panoply.slots.surrogate.phases import in_phases
from panoply.slots.surrogate.ratios import clip, log_likelihood
from panoply.slots.surrogate.sequences import sequence_clip
from panoply.slots.update.optimisers import sgd
from panoply.worlds.text.chain import Chain

INNER = "logp:2:raw"


def test_values_by_hand() -> None:
    """The recorded and the whole policy's log-probabilities have no say, but for the check of the sampler."""
    made = hand(logp=[-1.0] * 4, advantage=[1.0, 1.0, -1.0, -1.0], **{f"{INNER}@old": [-2.0] * 4})
    ratios = [1.1, 1.5, 0.7, 12.0]
    seen = batch(made, **{"logp": [-1.5] * 4, INNER: [-2.0 + math.log(r) for r in ratios]})
    value, stats = inner_clip(block=2, dual=10.0)(seen)
    assert value.tolist() == pytest.approx([1.1, 1.2, -0.8, -10.0])
    assert slopes(value, seen.now[INNER]) == pytest.approx([1.1, 0.0, 0.0, 0.0])
    assert stats["ratio_max/max"].tolist() == pytest.approx(ratios)
    assert stats["logp_gap"].tolist() == pytest.approx([0.5] * 4)


# ------------------------------------------------------------------ a model of four layers


def deep(tied: bool = False) -> tuple[TextPolicy, Experience]:
    """A new model, answers of it at another temperature, random advantages, and an `old` that is a little off."""
    world = Chain(operations=2, layers=4)
    config = {**world.default_model(), "width": 16, "inner": 32, "heads": 2, "tied": tied}
    policy = TextPolicy.fresh(DecoderConfig(**config), world.tokenizer, seed=3)
    collect = Collector(world, policy, seed=0)
    made = collect.episodes(collect.tasks(3), 2, temperature=0.7)
    dice = torch.Generator().manual_seed(0)
    advantage = made.by("episode").rows(torch.randn(6, generator=dice))
    with torch.no_grad():
        inner = policy.score(made, frozenset({INNER}))[INNER]
    old = inner + 0.4 * (torch.rand(len(made), generator=dice) - 0.5)
    return policy, made.with_columns(**{"advantage": advantage, f"{INNER}@old": old})


def inside(**settings: Any) -> OnPolicy:
    return grpo().but(
        surrogate=inner_clip(block=2, **settings),
        regularise=(),
        reduce=token_mean(),
        update=sgd(lr=1.0, clip=0.0),
    )


@pytest.mark.parametrize("norm", ["raw", "normed"])
@pytest.mark.parametrize("micro", [1, 10**9])
def test_gradient_is_of_the_states_after_two_blocks(norm: Any, micro: int) -> None:
    """π² = softmax(E·h²/T) from the states themselves, a decision at a time; normed, they pass the final norm."""
    policy, made = deep()
    need = f"logp:2:{norm}"
    made = made.with_columns(**{f"{need}@old": made[f"{INNER}@old"]})
    found = learner(policy, inside(norm=norm), micro_tokens=micro).gradient(made)
    states = policy.score(made, frozenset({"hidden:2"}))["hidden:2"]
    loss = torch.zeros(())
    for i, h in enumerate(states):
        h = policy.model.normed(h[None])[0] if norm == "normed" else h
        logits = policy.model.head_weight @ h / made["temperature"][i]
        ratio = (logits.log_softmax(0)[made["action"][i]] - made[f"{need}@old"][i]).exp()
        a = made["advantage"][i]
        loss = loss - torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) / len(made)
    named = dict(policy.model.named_parameters())
    expected = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    slow = {
        n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), expected, strict=True)
    }
    assert_same({name: found[name] for name in slow}, slow, rel=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_reach_blocks_up_to_two_and_the_output_weights(tied: bool) -> None:
    policy, made = deep(tied)
    found = learner(policy, inside()).gradient(made)
    reached = {name for name, g in found.items() if bool(g.abs().sum() > 0)}
    blocks = {int(name.split(".")[2]) for name in reached if ".layers." in name}
    assert blocks == {0, 1}
    assert "model.norm.weight" not in reached
    rest = {name for name in reached if ".layers." not in name}
    assert rest == (
        {"model.embed_tokens.weight"} if tied else {"model.embed_tokens.weight", "lm_head.weight"}
    )


def test_the_last_block_is_the_whole_policy() -> None:
    policy, made = deep()
    with torch.no_grad():
        now = policy.score(made, frozenset({"logp:4:raw"}))
    assert now["logp:4:raw"].tolist() == pytest.approx(now["logp"].tolist(), abs=1e-5)


# ------------------------------------------------------------------ phases


def both(steps: int = 3) -> OnPolicy:
    return inside().but(surrogate=in_phases(first=inner_clip(block=2), then=clip(), steps=steps))


def test_each_phase_has_its_own_gradient_and_needs() -> None:
    policy, made = deep()
    made = made.with_columns(logp=made["logp"] + 0.1)
    phased = learner(policy, both())
    alone = {name: learner(policy, inside().but(surrogate=part)) for name, part in
             (("first", inner_clip(block=2)), ("then", clip()))}  # fmt: skip
    for step, name in ((2, "first"), (3, "then"), (0, "first")):
        found, expected = phased.gradient(made, step), alone[name].gradient(made, step)
        assert all(torch.equal(found[n], expected[n]) for n in expected), (step, name)
        assert phased.objective.needs == alone[name].objective.needs
    assert alone["then"].objective.needs == frozenset()


def test_a_part_in_phases_says_who_acts() -> None:
    held = in_phases(first=inner_clip(), then=clip(), steps=30)
    assert [held.acting(step).info.name for step in (0, 29, 30)] == ["inner_clip", "inner_clip", "clip"]
    assert held.needs() == inner_clip().needs()
    assert bupo().needs(0) - bupo().needs(30) == {"logp:6:raw", "logp:6:raw@old"}
    assert bupo().phased
    assert not grpo().phased


SETTINGS = {
    **tiny.SETTINGS,
    "world.layers": 4,
    "surrogate.first.block": 2,
    "surrogate.steps": 2,
    "update.minibatches": 2,
    "update.lr": 1e-2,
    "run.checkpoint_every": 1,
    "run.episodes_every": 0,
}
CHOICES: dict[str, Any] = {"model": "fresh", "world": "chain", "steps": 4, "settings": SETTINGS}


def test_a_run_changes_phase_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    """In the first phase ratios begin at 1, so both sides are of one layer; afterwards no layer is asked."""
    quiet: dict[str, Any] = {"threads": 1, "progress": tiny.Notes()}
    with pp.steps("bupo", run=tmp_path / "whole", **quiet, **CHOICES) as made:
        drawn = [step.experience for step in made]
    assert [f"{INNER}@old" in each for each in drawn] == [True, True, False, False]
    rows = tiny.metrics(tmp_path / "whole")
    assert ["inner_clip" in row for row in rows] == [True, True, False, False]
    assert ["clip" in row for row in rows] == [False, False, True, True]
    assert max(row["step0_gap"] for row in rows) < 1e-5
    assert max(row["step0_ratio_max"] for row in rows) == pytest.approx(1.0, abs=1e-5)
    assert max(row["ratio_max"] for row in rows) > 1.001, "and leave it"
    with pp.steps("bupo", run=tmp_path / "cut", **quiet, **CHOICES) as made:
        next(made)
    tiny.resume(tmp_path / "cut")
    assert tiny.metrics(tmp_path / "cut") == rows
    assert tiny.model_bytes(tmp_path / "cut", 4) == tiny.model_bytes(tmp_path / "whole", 4)


# ------------------------------------------------------------------ refused


def test_a_layer_that_is_not_there_is_refused() -> None:
    for norm in ("raw", "normed"):
        settings = {"surrogate.first.block": 3, "surrogate.first.norm": norm}
        with pytest.raises(PanoplyError, match=r"There is no block 3 .* this model has the blocks 1 to 2\."):
            pp.plan("bupo", "chain", settings=settings)
        pp.plan("bupo", "chain", model="fresh", settings={**settings, "world.layers": 3})


def test_what_cannot_be_is_refused() -> None:
    for first, why in (
        (group(), "is no surrogate"),
        (clip(), "the same as first"),
        (in_phases(), "phases of its own"),
        (sequence_clip(), "not of single decisions"),
    ):
        with pytest.raises(PanoplyError, match=why):
            pp.plan(grpo().but(surrogate=in_phases(first=first)), "chain")
    with pytest.raises(PanoplyError, match="A control policy cannot supply 'logp:6:raw'"):
        pp.plan(grpo().but(surrogate=inner_clip()), "cartpole")
    pp.plan(grpo().but(surrogate=in_phases(first=balanced_clip())), "chain")
    pp.plan(grpo().but(surrogate=in_phases(first=log_likelihood())), "cartpole")


# ------------------------------------------------------------------ the flow of entropy


def test_entropy_by_depth_is_that_of_the_layers() -> None:
    policy, _ = deep()
    world = Chain(operations=2, layers=4)
    found = [world.measure(f"entropy@{k}", policy) for k in range(1, 5)]
    collect = Collector(world, policy, 0, split="test")
    answers = collect.episodes(world.held_out(64))
    with torch.no_grad():
        states = policy.score(answers, frozenset({"hidden:3"}))["hidden:3"]
        p: Tensor = (states @ policy.model.head_weight.T).softmax(-1)
    assert found[2] == pytest.approx(float(torch.special.entr(p).sum(-1).mean()), rel=1e-4)
    assert found[3] == pytest.approx(float(answers["entropy"].mean()), rel=1e-4)
    with pytest.raises(PanoplyError, match="There is no hidden state 5 in 4 layers"):
        world.measure("entropy@5", policy)


def test_the_start_of_four_layers_is_surer_with_depth() -> None:
    world = Chain(**Chain.presets["deep"].settings)
    policy = open_policy("start", world, seed=0, device="cpu")
    assert policy.model.config.layers == 4
    found = [world.measure(f"entropy@{k}", policy) for k in range(1, 5)]
    assert found == sorted(found, reverse=True), found
