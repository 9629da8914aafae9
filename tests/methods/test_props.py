"""PROPS: the push by hand, sampling that is on-policy where nothing pushes, and what the buffer keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import panoply as pp
from panoply.checkpoint import join_tensors, split_tensors
from panoply.episodes import from_tensors
from panoply.errors import PanoplyError
from panoply.evaluation.sampling_error import tabular_error
from panoply.experience import OWN, REPLAY, Experience
from panoply.methods.control import props as props_file
from panoply.methods.control.props import Pushing, pack, props, push_loss, pushed_off, robust
from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.rollout.control import ControlCollector
from panoply.worlds.control.bandit import Bandit
from panoply.worlds.control.cartpole import Cartpole
from panoply.worlds.control.pendulum import Pendulum
from panoply.worlds.control.world import ControlWorld

PUSH = Pushing("clipped", epsilon=0.3, anchor=0.1, limit=0.1, lr=1e-2, epochs=2, minibatches=2, clip=0.5)


def collector(world: ControlWorld, hidden: tuple[int, ...] = (8,), seed: int = 0) -> ControlCollector:
    policy = ControlPolicy.fresh(world.observation, world.action, PolicySpec(hidden=hidden), seed=1)
    return ControlCollector(world, policy, seed)


# ------------------------------------------------------------------ the push


def test_the_loss_by_hand() -> None:
    """g = ½ is below 0.7 and held there, without a slope; 1 and 3/2 are as they are, above 1.3 too."""
    log_ratio = torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64).log().requires_grad_()
    kl = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    loss = push_loss(log_ratio, kl, epsilon=0.3, anchor=2.0)
    assert loss.item() == pytest.approx((0.7 + 1 + 1.5 + 2 * 0.6) / 3)
    (slope,) = torch.autograd.grad(loss, log_ratio)
    assert slope.tolist() == pytest.approx([0, 1 / 3, 1.5 / 3])


def test_the_anchor_keeps_a_gaussian_from_widening() -> None:
    """To make what was drawn less likely, a normal widens; the pull to the target holds it back."""
    collect = collector(Pendulum())
    done = collect.rollout(2, 64)
    push = PUSH._replace(limit=10.0, epochs=100, minibatches=1)

    def widened(anchor: float) -> float:
        head: Any = pushed_off(collect.policy, done, push._replace(anchor=anchor), torch.Generator()).head
        return float(head.log_std.detach())

    free, held = widened(0.0), widened(3.0)
    assert free > 0.1
    assert abs(held) < 0.5 * free


def test_what_was_done_becomes_less_likely_and_the_target_stays() -> None:
    collect = collector(Cartpole())
    done = collect.rollout(2, 8)
    before = collect.policy.fingerprint()
    acting = pushed_off(collect.policy, done, PUSH, torch.Generator())
    change = acting.score(done)["logp"] - collect.policy.score(done)["logp"]
    assert change.mean().item() < -0.01
    assert collect.policy.fingerprint() == before


def test_pushing_stops_at_the_limit() -> None:
    collect = collector(Cartpole())
    done = collect.rollout(2, 8)
    gaps = []
    for limit in (1e-9, 0.01, 10.0):
        acting = pushed_off(
            collect.policy, done, PUSH._replace(limit=limit, epochs=50, minibatches=1), torch.Generator()
        )
        gaps.append((acting.score(done)["logp"] - collect.policy.score(done)["logp"]).detach())
    one, some, most = (float((g.exp() - 1 - g).mean()) for g in gaps)
    assert one < 0.01 < some < 0.03
    assert most > some


def test_the_plain_push_is_one_step_down_the_likelihood() -> None:
    """Four arms at ¼ each; of four draws three were of the first: the slope of its logit is ¾ − ¼."""
    collect = collector(Bandit(arms=4), hidden=())
    done = collect.rollout(1, 4).with_columns(action=torch.tensor([0, 0, 0, 2]))
    acting = pushed_off(collect.policy, done, PUSH._replace(push="plain", lr=2.0), torch.Generator())
    (weight, offset) = (p.detach().flatten() for _, p in acting.named_parameters())
    assert offset.tolist() == pytest.approx([-1.0, 0.5, 0.0, 0.5])
    assert weight.tolist() == pytest.approx([-1.0, 0.5, 0.0, 0.5])


# ------------------------------------------------------------------ sampling


def same(found: Experience, expected: Experience, *names: str) -> None:
    order, other = (
        sorted(range(len(e)), key=lambda i: (int(e["episode"][i]), int(e["turn"][i])))
        for e in (found, expected)
    )
    for name in names:
        torch.testing.assert_close(found[name][order], expected[name][other])
    for by in ("context", "next"):
        seen, then = found.looked_up("observation", by), expected.looked_up("observation", by)
        torch.testing.assert_close(seen[order], then[other])


def test_without_a_push_it_is_plain_sampling() -> None:
    plain = collector(Cartpole()).rollout(2, 32)
    _, found = robust(envs=2, length=32, rounds=4, batches=1, push="none")({}, collector(Cartpole()))
    same(found, plain, "action", "signal:reward", "earned", "end", "logp")


def test_a_push_changes_what_is_done_and_logp_is_the_targets() -> None:
    collect = collector(Cartpole())
    policy = collect.policy
    _, found = robust(envs=2, length=32, rounds=4, batches=1, lr=0.1)({}, collect)
    assert collect.policy is policy
    torch.testing.assert_close(found["logp"], policy.score(found)["logp"].detach())
    plain = collector(Cartpole()).rollout(2, 32)
    first = [e.take(e["episode"] == 0)["action"][:16].tolist() for e in (found, plain)]
    assert first[0] != first[1]


def test_the_last_batches_are_kept_and_scored_again() -> None:
    collect, part = collector(Cartpole()), robust(envs=2, length=16, rounds=4, batches=2, lr=0.03)
    state: dict[str, Any] = {}
    seen = []
    for step in range(3):
        state, found = part(state, collect)
        seen.append(found)
        assert len(found) == (32 if step == 0 else 64)
        with torch.no_grad():
            for weight in collect.policy.model.parameters():
                weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
    last, before = seen[2], seen[1]
    replayed = last["source"] == REPLAY
    assert int(replayed.sum()) == int((last["source"] == OWN).sum()) == 32
    assert sorted(set(last["round"][replayed].tolist())) == [4, 5, 6, 7]
    old, then = last.take(replayed), before.take(before["source"] == OWN)
    same(old, then, "action", "signal:reward")
    assert not torch.allclose(old["logp"].sort()[0], then["logp"].sort()[0])
    assert last.context.rows <= 2 * 64, "observations of dropped rounds are gone"


def test_the_optimiser_remembers_earlier_rounds() -> None:
    """Adam's averages and its count go on from round to round and from batch to batch, and change where it pushes."""
    collect, part = collector(Cartpole()), robust(envs=2, length=16, rounds=2, batches=2, lr=0.01, limit=10.0)
    state, _ = part({}, collect)
    kept = {name: value.clone() for name, value in state.items() if name.startswith("adam:")}
    assert {name.rpartition(":")[2] for name in kept} == {"step", "exp_avg", "exp_avg_sq"}
    assert float(kept["adam:0:step"]) == 16  # 4 epochs of 4 mini-batches, in the second of two rounds
    later, _ = part(state, collect)
    assert float(later["adam:0:step"]) == 48
    done = from_tensors(state)
    how = PUSH._replace(epochs=1, minibatches=1)
    fresh, going_on = (
        pushed_off(collect.policy, done, how, torch.Generator(), memory).score(done)["logp"]
        for memory in ({}, dict(kept))
    )
    assert not torch.allclose(fresh, going_on)
    assert float(kept["adam:0:step"]) == 16, "what was given is not changed"


def test_the_push_is_clipped() -> None:
    """Adam's first average is a tenth of the gradient, whose norm is cut to 0.001."""
    collect = collector(Cartpole())
    memory: dict[str, Any] = {}
    how = PUSH._replace(epochs=1, minibatches=1, clip=1e-3)
    pushed_off(collect.policy, collect.rollout(2, 8), how, torch.Generator(), memory)
    averages = [kept.flatten() for name, kept in memory.items() if name.endswith(":exp_avg")]
    assert torch.cat(averages).norm().item() == pytest.approx(1e-4, rel=1e-3)


def test_the_kl_is_from_the_learning_policy_to_the_acting_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """KL(π_θ‖π_φ) of whole distributions, by hand, in the loss that is descended."""
    collect = collector(Bandit(arms=4), hidden=())
    with torch.no_grad():
        for weight in collect.policy.model.parameters():
            weight += torch.tensor([1.0, 0.0, -1.0, 0.5]).view(-1, *(1,) * (weight.dim() - 1))
    done = collect.rollout(1, 8)
    seen = []
    real = props_file.push_loss
    monkeypatch.setattr(
        props_file,
        "push_loss",
        lambda ratio, kl, *more: (seen.append(kl.detach()), real(ratio, kl, *more))[1],
    )
    steps = PUSH._replace(epochs=3, minibatches=1, lr=0.3, limit=10.0)
    acting = pushed_off(collect.policy, done, steps._replace(epochs=2), torch.Generator())
    seen.clear()
    pushed_off(collect.policy, done, steps, torch.Generator())
    with torch.no_grad():
        theta, phi = collect.policy.distribution(done), acting.distribution(done)
    found, expected = seen[2].sort()[0], (theta.exp() * (theta - phi)).sum(-1).sort()[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    reverse = (phi.exp() * (phi - theta)).sum(-1).sort()[0]
    assert (reverse - expected).abs().max() > 1e-3


def test_the_buffer_survives_a_checkpoint() -> None:
    collect, part = collector(Cartpole()), robust(envs=2, length=16, rounds=2)
    state, found = part({}, collect)
    kept = join_tensors(*split_tensors({"sample": state}))["sample"]
    again = from_tensors(kept)
    assert set(again.decisions) == set(found.decisions)
    for name in again.decisions:
        assert torch.equal(again[name], found[name])
    assert torch.equal(again.looked_up("observation"), found.looked_up("observation"))
    assert pack(again).keys() == {name for name in state if not name.startswith("adam:")}
    assert kept.keys() == state.keys()


def test_fewer_repeats_of_what_there_is_enough_of() -> None:
    """Four arms, 256 draws: the pushed-off policy's shares are nearer to ¼ each than its own draws."""
    shares = torch.full((1, 4), 0.25)
    errors = {}
    for push in ("none", "clipped"):
        settings = {"length": 256, "rounds": 32, "batches": 1, "push": push, "lr": 0.1, "minibatches": 1}
        _, found = robust(**settings)({}, collector(Bandit(arms=4), hidden=()))
        errors[push] = tabular_error(found.looked_up("observation"), found["action"], shares)
    assert errors["clipped"] < 0.5 * errors["none"]


def test_the_method() -> None:
    assert props().sample == robust()
    plan = pp.plan("props", "cartpole")
    assert plan.method.sample.settings()["rounds"] == 8
    with pytest.raises(PanoplyError, match="not a multiple"):
        pp.plan("props", "cartpole", settings={"sample.rounds": 7})
    with pytest.raises(PanoplyError, match="epsilon has no effect: push=none"):
        pp.plan("props", "cartpole", settings={"sample.push": "none", "sample.epsilon": 0.2})
