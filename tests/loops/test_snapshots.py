"""Selves of the policy: their names, their rules over steps, who acts, and resuming with all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import panoply as pp
from panoply import selves
from panoply.costs import cost
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.loops.snapshots import Kept, Snapshots
from panoply.methods.base.grpo import grpo
from panoply.parts import Part, part
from panoply.planning import make_plan
from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.progress import Progress
from panoply.rollout.control import ControlCollector
from panoply.rollout.mixture import mixed
from panoply.rollout.text import Collector
from panoply.slots.grow.shapes import levels
from panoply.slots.sample.dynamic import dynamic
from panoply.slots.sample.tree import tree
from panoply.worlds.control.cartpole import Cartpole

# ------------------------------------------------------------------ an author's use


@part("sample", needs={"acts@behind:2"})
def halves(collect: Collector, *, prompts: int = 2, group: int = 4) -> Experience:
    """Half of a group's episodes by the policy of the last even step, half by the one that learns."""
    tasks = collect.tasks(prompts)
    with collect.acted_by("behind:2"):
        earlier = collect.episodes(tasks, group // 2)
    own = collect.episodes(tasks, group // 2, into=earlier.by("group").keys)
    return Experience.cat([earlier, own])


@part("credit", needs={"entropy@old", "logp*1.5@ema:0.5", "attention:1@old"})
def unsure(experience: Experience) -> Tensor:
    """Any output of any self is a column: here, numbers that only show that it is there and whose it is."""
    looked_at = torch.tensor(
        [
            float(row[0])
            for row in map(experience.decisions.ragged("attention:1@old").__getitem__, range(len(experience)))
        ]
    )
    return experience["entropy@old"] - experience["logp*1.5@ema:0.5"] + looked_at


QUIET: dict[str, Any] = {"threads": 1, "progress": Progress()}
SMALL = {name: value for name, value in tiny.SETTINGS.items() if not name.startswith("sample.")}


def test_a_part_lets_another_self_act_and_another_reads_outputs_of_two(
    tmp_path: Path, registries: None
) -> None:
    parts: dict[str, Any] = {"sample": halves(), "credit": unsure()}
    with pp.steps("grpo", run=tmp_path, model="fresh", steps=4, settings=SMALL, **parts, **QUIET) as steps:
        made = [step.experience for step in steps]
    for step, batch in enumerate(made):
        own = batch["actor"] == 0
        assert batch["version"][own].unique().tolist() == [step]
        assert batch["version"][~own].unique().tolist() == [step - step % 2]
        assert len(batch.by("group")) == 2
        assert {"entropy@old", "logp*1.5@ema:0.5", "attention:1@old"} <= set(batch.decisions)
        torch.testing.assert_close(batch["entropy@old"][own], batch["entropy"][own], atol=1e-4, rtol=1e-4)
        assert torch.allclose(batch["entropy@old"], batch["entropy"], atol=1e-4) == (step % 2 == 0)


@pytest.mark.parametrize(
    "sample",
    [
        dynamic(prompts=2, group=4, rounds=1, name="ended", by="behind:2"),
        tree(prompts=2, grow=levels(branching=(2, 2), segment=3), by="behind:2"),
    ],
    ids=["dynamic", "tree"],
)
def test_another_self_may_be_asked_again_and_branch(sample: Part, tmp_path: Path) -> None:
    with pp.steps(
        "grpo", run=tmp_path, model="fresh", steps=4, settings=SMALL, sample=sample, **QUIET
    ) as steps:
        made = [step.experience for step in steps]
    assert [batch["version"].unique().tolist() for batch in made] == [[0], [0], [2], [2]]
    assert all(bool((batch["actor"] == 1).all()) for batch in made)
    assert "by behind:2" in sample.equation()


# ------------------------------------------------------------------ rules


def control() -> ControlPolicy:
    world = Cartpole()
    return ControlPolicy.fresh(world.observation, world.action, PolicySpec(hidden=(4,), normalise=True))


def moved(policy: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in policy.named_parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)


def of(policy: Any) -> Tensor:
    return torch.cat([w.detach().flatten().float() for _, w in policy.named_parameters()])


@pytest.mark.parametrize("kind", ["text", "control"])
@pytest.mark.parametrize("name", ["behind:2", "past:2", "past:1", "ema:0.3", "best"])
def test_rules(name: str, kind: str, tiny_collector: Collector) -> None:
    """Whose weights a self has at every step, and that what is saved in between changes nothing."""
    policy: Any = tiny_collector.policy if kind == "text" else control()
    kept, best = Kept(selves.parse(name), policy), [0, 0, 2, 2, 4, 4]
    history, mean = [of(policy)], of(policy)
    for step in range(1, 6):
        moved(policy, step)
        history.append(of(policy))
        mean = 0.7 * mean + 0.3 * history[-1]
        kept.renew(step, best[step] == step)
        fresh = Kept(selves.parse(name), policy)
        fresh.load_state({key: weight.clone() for key, weight in kept.state().items()})
        kept = fresh
        whose = {
            "behind:2": step - step % 2,
            "past:2": max(0, step - 2),
            "past:1": step - 1,
            "best": best[step],
        }
        if name == "ema:0.3":
            torch.testing.assert_close(of(kept.policy), mean)
            assert kept.step == step
        else:
            assert torch.equal(of(kept.policy), history[whose[name]])
            assert kept.step == whose[name]


def test_a_mean_of_narrow_weights_is_kept_in_float32() -> None:
    """1 + 2⁻⁹ is 1 in bfloat16; half the way there, twenty times, is not."""
    policy = control()
    policy.model.to(torch.bfloat16)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.fill_(1.0)
    kept = Kept(selves.parse("ema:0.01"), policy)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.fill_(1.25)
    for step in range(200):
        kept.renew(step, False)
    assert 1.2 < float(of(kept.policy).mean()) < 1.25


def test_a_mean_of_weights_of_two_widths_is_saved_and_goes_on(tmp_path: Path) -> None:
    """Beside narrow weights, those in float32 have a mean of their own: a file takes no memory under two names."""
    first, second = control(), control()
    for policy in (first, second):
        policy.model.to(torch.bfloat16)
        next(policy.model.parameters()).data = next(policy.model.parameters()).data.float()
    kept, resumed = (Kept(selves.parse("ema:0.5"), policy) for policy in (first, second))
    with torch.no_grad():
        for weight in first.model.parameters():
            weight.add_(0.25)
    kept.renew(1, False)
    save_file(kept.state(), tmp_path / "kept.safetensors")
    resumed.load_state(load_file(tmp_path / "kept.safetensors"))
    assert {w.dtype for w in kept.weights.values()} >= {torch.float32, torch.bfloat16}
    for name, mean in kept.mean.items():
        assert mean.dtype == torch.float32
        assert torch.equal(resumed.mean[name], mean)
        assert torch.equal(resumed.weights[name], kept.weights[name])


@pytest.mark.parametrize(
    ("method", "world", "settings"),
    [
        (
            "grpo",
            "chain",
            {"sample.by": "behind:2", "regularise.kl.to": "ema:0.5", "regularise.kl.weight": 0.1},
        ),
        (
            "grpo",
            "chain",
            {"sample.by": "mix:0.5:past:2", "surrogate.against": "best", "run.evaluate_every": 2},
        ),
        (
            "ppo",
            "cartpole",
            {"sample.by": "behind:3", "surrogate.against": "past:2", "policy.normalise": True},
        ),
        ("dpo", "chain", {"losses.logistic.to": "behind:2"}),
    ],
)
def test_resumed_it_goes_on_with_the_same_selves(
    method: str, world: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    small: dict[str, Any] = {"run.held_out": 2, "run.checkpoint_every": 3, **settings}
    if world == "cartpole":
        small |= {"sample.envs": 2, "sample.length": 16}
    else:
        small |= tiny.SETTINGS if method == "grpo" else {"data.batch": 4, "world.operations": 2}
    choices: dict[str, Any] = {"model": "fresh", "steps": 4, "settings": small, **QUIET}
    whole = pp.train(method, world, run=tmp_path / "whole", **choices)
    with pp.steps(method, world, run=tmp_path / "cut", **choices) as steps:
        next(steps), next(steps), next(steps)
    again = pp.train(resume=tmp_path / "cut", progress=Progress())
    assert again.fingerprint == whole.fingerprint
    assert tiny.metrics(tmp_path / "cut") == tiny.metrics(tmp_path / "whole")


# ------------------------------------------------------------------ who acts


def snapshots(policy: Any, *needs: str) -> Snapshots:
    @part("select", needs=needs)
    def asking(experience: Experience) -> Experience:
        return experience

    return Snapshots(grpo().but(select=(asking(),)), policy, policy.copy)


def collected(collect: Any) -> Experience:
    tasks = collect.tasks(2)
    return collect.episodes(tasks, 2) if isinstance(collect, Collector) else collect.rollout(2, 8)


@pytest.mark.parametrize("kind", ["text", "control"])
def test_log_probabilities_and_version_are_those_of_who_acts(
    kind: str, tiny_collector: Collector, registries: None
) -> None:
    collect: Any = tiny_collector if kind == "text" else ControlCollector(Cartpole(), control(), 0)
    policy = collect.policy
    collect.selves = kept = snapshots(policy, "acts@behind:2", "acts@reference")
    start = policy.copy()
    for step in (1, 2, 3):
        moved(policy, step)
        kept.renew(step, False)
    collect.version = 3
    with collect.acted_by("behind:2"):
        earlier = collected(collect)
    own = collected(collect)
    with collect.acted_by("reference"):
        first = collected(collect)
    with torch.no_grad():
        for batch, who, actor, version in (
            (earlier, kept.policy_of("behind:2"), 1, 2),
            (own, policy, 0, 3),
            (first, start, 2, 0),
        ):
            torch.testing.assert_close(who.score(batch)["logp"], batch["logp"], atol=1e-4, rtol=1e-4)
            assert batch["actor"].unique().tolist() == [actor]
            assert batch["version"].unique().tolist() == [version]
    gap = kept.gap(Experience.cat([earlier, own, first]), 3)
    assert gap is not None
    assert gap < 1e-4
    wrong = earlier.with_columns(actor=torch.zeros_like(earlier["actor"]))
    found = kept.gap(wrong.with_columns(version=torch.full_like(wrong["version"], 3)), 3)
    assert found is not None
    assert found > 1e-3
    assert kept.gap(wrong, 3) is None, "an earlier self of the learner is nobody's to agree with"
    given = wrong.with_columns(source=torch.full_like(wrong["source"], 3))
    gap = kept.gap(Experience.cat([own, given]), 3)
    assert gap is not None
    assert gap < 1e-4
    collect.close()


def test_a_sampler_that_disagrees_with_who_acted_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the learner the same experience would be stopped too: it is asked who acted, and answered wrongly."""
    settings = {"sample.by": "behind:2"}
    tiny.train(tmp_path / "sound", steps=3, settings=settings)
    monkeypatch.setattr(Kept, "renew", lambda self, step, best: moved(self.learner, step))
    real = Snapshots.policy_of
    calls: list[str] = []

    def confused(self: Snapshots, name: str) -> Any:
        calls.append(name)
        return real(self, name) if len(calls) % 2 else self.policy  # who samples is not who is asked

    monkeypatch.setattr(Snapshots, "policy_of", confused)
    with pytest.raises(PanoplyError, match="Sampler and scorer disagree on unchanged weights"):
        tiny.train(tmp_path / "confused", steps=3, settings=settings)


def test_a_self_that_no_part_names_cannot_act(tiny_collector: Collector) -> None:
    with (
        pytest.raises(PanoplyError, match="'acts@behind:2' belongs to its needs"),
        tiny_collector.acted_by("behind:2"),
    ):
        pass


def test_where_another_acts_one_epoch_has_ratios_to_bound() -> None:
    with pytest.raises(PanoplyError, match="the ratio stays at 1"):
        make_plan("grpo", settings={"surrogate.low": 0.1})
    make_plan("grpo", settings={"surrogate.low": 0.1, "sample.by": "behind:4"})
    with pytest.raises(PanoplyError, match="the ratio stays at 1"):
        make_plan(
            "grpo", settings={"surrogate.low": 0.1, "sample.by": "behind:4", "surrogate.against": "old"}
        )


# ------------------------------------------------------------------ mixtures


def test_a_mixture_samples_and_scores_mixed_logits(tiny_collector: Collector) -> None:
    first = tiny_collector.policy
    second = first.copy()
    moved(second, 5)
    both = mixed(first, second, 0.25)
    with tiny_collector.acted_by(both), torch.no_grad():
        batch = tiny_collector.episodes(tiny_collector.tasks(3), 2)
        scored = both.score(batch, frozenset({"entropy"}))
        for i, (c, p, a) in enumerate(
            zip(batch["context"].tolist(), batch["position"].tolist(), batch["action"].tolist(), strict=True)
        ):
            tokens = batch.context.ragged("tokens")[c][None, :p]
            one, two = (model.model(tokens)[0, -1] for model in (first, second))
            expected = (0.75 * one + 0.25 * two).log_softmax(-1)
            torch.testing.assert_close(scored["logp"][i], expected[a], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(batch["logp"][i], expected[a], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(
                scored["entropy"][i], -(expected.exp() * expected).sum(), atol=1e-4, rtol=1e-4
            )
        with pytest.raises(PanoplyError, match="no blocks of its own"):
            both.score(batch, frozenset({"hidden:1"}))


# ------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("behnd:3", r"Unknown snapshot 'behnd:3'. Did you mean 'behind:10'"),
        ("behind", "needs a whole number from 2 on, as in behind:10"),
        ("behind:1", "needs a whole number from 2 on"),
        ("behind:2.5", "needs a whole number"),
        ("past:0", "needs a whole number from 1 on, as in past:4"),
        ("past:inf", "needs a whole number"),
        ("ema:0", "needs a share between 0 and 1, as in ema:0.05"),
        ("ema:1", "needs a share between 0 and 1"),
        ("ema:0.1:old", "needs a share"),
        ("old:3", "takes no number: write old"),
        ("mix:0.5", "and whom to mix with, as in mix:0.25:reference"),
        ("mix:0.5:old", "mixes the policy with itself"),
        (2000 * "mix:0.5:" + "best", "mixes the policy with itself"),
        ("mix:0.5:behind", "needs a whole number"),
    ],
)
def test_a_name_that_is_none_is_a_sentence(name: str, said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        make_plan("grpo", settings={"sample.by": name})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"sample.by": "behind:200"},
            "sample asks for behind:200, which would stay the start for all of 200 steps",
        ),
        ({"sample.by": "past:200"}, "would stay the start"),
        ({"sample.by": "mix:0.5:past:200"}, "sample asks for past:200, which would stay the start"),
        ({"sample.by": "best", "run.evaluate_every": 0}, "since nothing is evaluated before the end"),
        ({"sample.by": "best", "run.evaluate_every": 200}, "run.evaluate_every is 200"),
    ],
)
def test_a_rule_that_never_fires_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        make_plan("grpo", settings={**settings, "run.steps": 200})
    make_plan("grpo", settings={**settings, "run.steps": 201, "run.evaluate_every": 20})


def test_a_mixture_with_a_reference_needs_one() -> None:
    with pytest.raises(PanoplyError, match="--reference none leaves none"):
        make_plan("grpo", settings={"sample.by": "mix:0.5:reference"}, reference="none")


def test_control_has_no_vocabulary_to_mix() -> None:
    with pytest.raises(PanoplyError, match="logits of a vocabulary are mixed, and a control policy has none"):
        make_plan("ppo", "cartpole", settings={"sample.by": "mix:0.5:reference"})


def test_a_plan_counts_their_memory() -> None:
    plain = cost(make_plan("grpo", settings={"regularise.kl.weight": 0.0}))
    weights = plain.memory_bytes["weights"]
    more = cost(
        make_plan(
            "grpo",
            settings={"regularise.kl.weight": 0.1, "regularise.kl.to": "past:4", "sample.by": "behind:5"},
        )
    )
    assert more.memory_bytes["past:4 copy"] == 5 * weights
    assert more.memory_bytes["behind:5 copy"] == weights
    assert more.extra_forwards == ["one forward pass for logp@past:4"]
    narrow = cost(make_plan("grpo", settings={"sample.by": "ema:0.1", "run.dtype": "bfloat16"}))
    assert narrow.memory_bytes["ema:0.1 copy"] == narrow.parameters * (2 + 4)
