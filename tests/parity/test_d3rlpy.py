"""The losses of IQL, CQL (of both kinds of action), AWAC and CRR against d3rlpy's: same weights, batch and noise."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from kit import assert_same
from torch import nn

from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.slots.loss.actors import advantage_weighted, critic_weighted
from panoply.slots.loss.bellman import expected_q, expectile_v, q_learning, q_of_v
from panoply.slots.loss.soft import conservative_q
from panoply.transitions import ActorCritic, QNets, StateValue, Temperature, Transitions
from panoply.worlds.control.world import Box, Discrete

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import d3rlpy

SEES, ACTS = Box((3,)), Box((2,), (-1.0, -1.0), (1.0, 1.0))
ROWS, GAMMA = 16, 0.99


def linears(module: Any) -> list[nn.Linear]:
    return [m for m in module.modules() if isinstance(m, nn.Linear)]


@torch.no_grad()
def copied(net: nn.Module, theirs: Any) -> None:
    """Their layers into ours, in order; outputs that they keep apart (mean, deviation) are one layer here."""
    mine, given = linears(net), linears(theirs)
    inner, last = given[: len(mine) - 1], given[len(mine) - 1 :]
    for layer, source in zip(mine, inner, strict=False):
        layer.weight.copy_(source.weight)
        layer.bias.copy_(source.bias)
    outputs = mine[-1].out_features  # a deviation that does not depend on the state has none
    mine[-1].weight.copy_(torch.cat([layer.weight for layer in last])[:outputs])
    mine[-1].bias.copy_(torch.cat([layer.bias for layer in last])[:outputs])


def same(config: Any, spec: PolicySpec) -> tuple[ActorCritic, Any]:
    """An actor and critics with the weights of a new d3rlpy algorithm, whose targets have moved away."""
    d3rlpy.seed(3)
    algorithm = config.create(device="cpu:0")
    algorithm.create_impl(SEES.shape, ACTS.size)
    impl: Any = algorithm.impl
    with torch.no_grad():
        for weight in impl.modules.targ_q_funcs.parameters():
            weight += 0.05 * torch.randn_like(weight)
    policy = ControlPolicy.fresh(SEES, ACTS, spec)
    count = len(impl.modules.q_funcs)
    networks: dict[str, Any] = {"q": QNets.of(policy, count, 0), "temperature": Temperature(1.0)}
    targets = {"q": QNets.of(policy, count, 0)}
    copied(policy.model.layers, impl.modules.policy)
    for i in range(count):
        copied(networks["q"].nets[i], impl.modules.q_funcs[i])
        copied(targets["q"].nets[i], impl.modules.targ_q_funcs[i])
    if hasattr(impl.modules, "value_func"):
        networks["v"] = StateValue.of(policy, 0)
        copied(networks["v"], impl.modules.value_func)
    return ActorCritic(policy, networks, targets), impl


def batches() -> tuple[Transitions, Any]:
    draws = torch.Generator().manual_seed(5)
    seen, after = (torch.randn(ROWS, 3, generator=draws) for _ in range(2))
    action = torch.rand(ROWS, 2, generator=draws) * 1.9 - 0.95
    reward, ended = torch.randn(ROWS, generator=draws), torch.arange(ROWS) % 4 == 0
    ours = Transitions(seen, action, reward, GAMMA * (~ended).float(), after)
    column = {"rewards": reward[:, None], "terminals": ended.float()[:, None]}
    column |= {name: torch.ones(ROWS, 1) for name in ("intervals", "returns_to_go")}
    theirs = d3rlpy.torch_utility.TorchMiniBatch(
        observations=seen,
        actions=action,
        next_observations=after,
        next_actions=action,
        device="cpu:0",
        **column,
    )
    return ours, theirs


def test_iql() -> None:
    spec = PolicySpec(hidden=(256, 256), activation="relu", head="bounded")
    learned, impl = same(d3rlpy.algos.IQLConfig(gamma=GAMMA), spec)
    theirs = impl.modules.policy
    with torch.no_grad():  # they keep the deviation in a window by a sigmoid
        learned.policy.head.log_std.fill_(
            float(theirs._min_logstd + 0.5 * (theirs._max_logstd - theirs._min_logstd))
        )
    ours, batch = batches()
    expected = impl.compute_critic_loss(batch, impl.compute_target(batch))
    torch.testing.assert_close(q_of_v()(learned, ours)[0].mean(), expected.q_loss)
    torch.testing.assert_close(expectile_v(expectile=0.7)(learned, ours)[0].mean(), expected.v_loss)
    actor = impl.compute_actor_loss(batch, theirs(batch.observations)).actor_loss
    torch.testing.assert_close(advantage_weighted(beta=3.0, most=100.0)(learned, ours)[0].mean(), actor)


@pytest.mark.parametrize("threshold", [0.0, 10.0])
def test_cql(threshold: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole loss of the critics and of the multiplier, with the same uniform actions and normal noise.

    d3rlpy values the mean action at s′, so noise is 0 there.
    """
    samples, weight, alpha = 4, 5.0, 1.5
    config = d3rlpy.algos.CQLConfig(
        gamma=GAMMA,
        n_action_samples=samples,
        conservative_weight=weight,
        alpha_threshold=threshold,
        initial_alpha=alpha,
        alpha_learning_rate=0.0,  # theirs would move while the loss is computed
    )
    learned, impl = same(config, PolicySpec(hidden=(256, 256), activation="relu", squash=True, std="state"))
    ours, batch = batches()
    uniform, noise = torch.rand(ROWS * samples, 2), torch.randn(samples, ROWS, 2)
    monkeypatch.setattr(torch.distributions.normal, "_standard_normal", lambda *_, **__: noise)
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, low, high: low + (high - low) * uniform)
    with torch.no_grad():
        target = impl.compute_target(batch)
    expected = impl.compute_critic_loss(batch, target)
    assert expected.conservative_loss.abs() > 0.1  # the term under test is there
    flat = noise.transpose(0, 1).reshape(ROWS * samples, 2)
    learned.noise = lambda rows, size: flat if rows > ROWS else torch.zeros(rows, size)  # type: ignore[method-assign]
    monkeypatch.setattr(torch, "rand", lambda *_, **__: uniform)
    learned.networks = {**learned.networks, "multiplier": Temperature(alpha)}
    loss = conservative_q(weight=weight, samples=samples, threshold=threshold)
    value, stats = loss(learned, ours)
    (mine,) = torch.autograd.grad(value.mean(), learned.networks["multiplier"].log, retain_graph=True)
    over = weight * (stats["conservative_gap"].mean() - 2 * threshold)
    torch.testing.assert_close(alpha * over, expected.conservative_loss.detach())
    torch.testing.assert_close(
        mine, -expected.conservative_loss.detach() / 2
    )  # of −mean over critics of α·(…)
    whole = value.mean() + alpha * over / 2  # less what the multiplier climbs: the critics' part alone
    torch.testing.assert_close(whole, expected.critic_loss)
    slopes = torch.autograd.grad(value.mean(), linears(learned.networks["q"])[0].weight)
    (their_slopes,) = torch.autograd.grad(expected.critic_loss, linears(impl.modules.q_funcs[0])[0].weight)
    assert their_slopes.abs().max() > 1e-3
    torch.testing.assert_close(slopes[0], their_slopes)


def bounded(learned: ActorCritic, impl: Any) -> torch.Tensor:
    """Actors whose deviation does not depend on the state, and the noise that both sides draw from then on."""
    theirs = impl.modules.policy
    if theirs._use_std_parameter:  # they keep the deviation in a window by a sigmoid
        log_std = theirs._min_logstd + 0.5 * (theirs._max_logstd - theirs._min_logstd)
    else:
        log_std = -0.7
    policies = [(learned.policy, theirs)]
    if "policy" in learned.targets:
        policies.append((learned.targets["policy"], impl.modules.targ_policy))
    with torch.no_grad():
        for mine, given in policies:
            mine.head.log_std.fill_(float(log_std))
            if not theirs._use_std_parameter:
                given._logstd.weight.zero_()
                given._logstd.bias.fill_(log_std)
    return torch.randn(4, ROWS, 2)


def drawn_alike(learned: ActorCritic, noise: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """d3rlpy's draws are [n, rows], or [rows] where there is one; ours [n·rows]."""

    def standard(shape: Any, **_: Any) -> torch.Tensor:
        return noise[: shape[0]] if len(shape) == 3 else noise[0]

    monkeypatch.setattr(torch.distributions.normal, "_standard_normal", standard)
    learned.noise = lambda rows, size: noise[: rows // ROWS].reshape(-1, 2)  # type: ignore[method-assign]


def slope(value: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    """The gradient in a layer's weights, which is not 0."""
    (found,) = torch.autograd.grad(value, layer.weight, retain_graph=True)
    assert found.abs().max() > 1e-6
    return found


def test_awac(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy's loss, which d3rlpy sums over the batch. (Its critics have an entropy that the paper's have not.)"""
    config = d3rlpy.algos.AWACConfig(gamma=GAMMA, lam=0.5, n_action_samples=4)
    learned, impl = same(config, PolicySpec(hidden=(256, 256), activation="relu", head="bounded"))
    drawn_alike(learned, bounded(learned, impl), monkeypatch)
    ours, batch = batches()
    expected = impl.compute_actor_loss(batch, impl.modules.policy(batch.observations)).actor_loss
    value, stats = critic_weighted(form="softmax", beta=0.5, samples=4)(learned, ours)
    assert stats["weight"].max() / stats["weight"].min() > 1.01
    torch.testing.assert_close(value.sum(), expected)
    assert_same(
        slope(value.sum(), linears(learned.policy.model)[0]), slope(expected, linears(impl.modules.policy)[0])
    )


@pytest.mark.parametrize("over", ["mean", "max"])
@pytest.mark.parametrize("form", ["exp", "binary"])
def test_crr(form: str, over: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both losses, with draws of the policy's target at s′."""
    config = d3rlpy.algos.CRRConfig(
        gamma=GAMMA, weight_type=form, advantage_type=over, beta=0.1, max_weight=1.1
    )
    learned, impl = same(config, PolicySpec(hidden=(256, 256), activation="relu", head="bounded"))
    target = learned.policy.copy()
    with torch.no_grad():
        for weight in impl.modules.targ_policy.parameters():
            weight += 0.05 * torch.randn_like(weight)
    copied(target.model.layers, impl.modules.targ_policy)
    learned.targets = {**learned.targets, "policy": target}
    drawn_alike(learned, bounded(learned, impl), monkeypatch)
    ours, batch = batches()
    expected = impl.compute_critic_loss(batch, impl.compute_target(batch)).critic_loss
    value, _ = expected_q(follow="target")(learned, ours)
    torch.testing.assert_close(value.mean(), expected)
    torch.testing.assert_close(
        slope(value.mean(), linears(learned.networks["q"])[0]),
        slope(expected, linears(impl.modules.q_funcs)[0]),
    )
    expected = impl.compute_actor_loss(batch, impl.modules.policy(batch.observations)).actor_loss
    weighted = critic_weighted(form=form, over=over, beta=0.1, most=1.1, samples=4)
    value, stats = weighted(learned, ours)
    assert stats["weight"].min() < stats["weight"].max()
    torch.testing.assert_close(value.mean(), expected)
    torch.testing.assert_close(
        slope(value.mean(), linears(learned.policy.model)[0]),
        slope(expected, linears(impl.modules.policy)[0]),
    )


def test_discrete_cql() -> None:
    """Double DQN's error and the exact conservative term, on the same weights and batch."""
    d3rlpy.seed(3)
    config = d3rlpy.algos.DiscreteCQLConfig(gamma=GAMMA, alpha=1.5)
    algorithm = config.create(device="cpu:0")
    algorithm.create_impl(SEES.shape, 4)
    impl: Any = algorithm.impl
    with torch.no_grad():
        for weight in impl.modules.targ_q_funcs.parameters():
            weight += 0.3 * torch.randn_like(weight)
    spec = PolicySpec(hidden=(256, 256), activation="relu", head="values", atoms=1)
    policy = ControlPolicy.fresh(SEES, Discrete(4), spec)
    target = policy.copy()
    copied(policy.model.layers, impl.modules.q_funcs[0])
    copied(target.model.layers, impl.modules.targ_q_funcs[0])
    ours, batch = batches()
    action = torch.arange(ROWS) % 4
    ours = dataclasses.replace(ours, action=action, reward=3 * ours.reward)
    batch = dataclasses.replace(batch, actions=action[:, None], rewards=3 * batch.rewards)
    expected = impl.compute_loss(batch, impl.compute_target(batch)).loss
    learned = ActorCritic(policy, {}, {"policy": target})
    found = q_learning(double=True, conservative=1.5)(learned, ours)[0].mean()
    torch.testing.assert_close(found, expected)
