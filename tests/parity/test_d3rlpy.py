"""The losses of IQL and CQL (of both kinds of action) against d3rlpy's, on the same weights, batch and noise."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.policies.critics import QNets, StateValue, Temperature
from panoply.slots.loss.actors import advantage_weighted
from panoply.slots.loss.bellman import conservative_q, expectile_v, q_learning, q_of_v
from panoply.transitions import Agent, Transitions
from panoply.worlds.control.world import Box, Discrete

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    d3rlpy = pytest.importorskip("d3rlpy", reason="d3rlpy is not installed")

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
    mine[-1].weight.copy_(torch.cat([layer.weight for layer in last]))
    mine[-1].bias.copy_(torch.cat([layer.bias for layer in last]))


def same(config: Any, spec: PolicySpec) -> tuple[Agent, Any]:
    """An agent with the weights of a new d3rlpy algorithm, whose targets have moved away."""
    d3rlpy.seed(3)
    algorithm = config.create(device="cpu:0")
    algorithm.create_impl(SEES.shape, ACTS.size)
    impl: Any = algorithm.impl
    with torch.no_grad():
        for weight in impl.modules.targ_q_funcs.parameters():
            weight += 0.05 * torch.randn_like(weight)
    policy = ControlPolicy.fresh(SEES, ACTS, spec)
    networks: dict[str, Any] = {"q": QNets.of(policy, 2, 0), "temperature": Temperature(1.0)}
    targets = {"q": QNets.of(policy, 2, 0)}
    copied(policy.model.layers, impl.modules.policy)
    for i in range(2):
        copied(networks["q"].nets[i], impl.modules.q_funcs[i])
        copied(targets["q"].nets[i], impl.modules.targ_q_funcs[i])
    if hasattr(impl.modules, "value_func"):
        networks["v"] = StateValue.of(policy, 0)
        copied(networks["v"], impl.modules.value_func)
    return Agent(policy, networks, targets), impl


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
    agent, impl = same(d3rlpy.algos.IQLConfig(gamma=GAMMA), spec)
    theirs = impl.modules.policy
    with torch.no_grad():  # they keep the deviation in a window by a sigmoid
        agent.policy.head.log_std.fill_(
            float(theirs._min_logstd + 0.5 * (theirs._max_logstd - theirs._min_logstd))
        )
    ours, batch = batches()
    expected = impl.compute_critic_loss(batch, impl.compute_target(batch))
    torch.testing.assert_close(q_of_v()(agent, ours)[0].mean(), expected.q_loss)
    torch.testing.assert_close(expectile_v(expectile=0.7)(agent, ours)[0].mean(), expected.v_loss)
    actor = impl.compute_actor_loss(batch, theirs(batch.observations)).actor_loss
    torch.testing.assert_close(advantage_weighted(beta=3.0, most=100.0)(agent, ours)[0].mean(), actor)


@pytest.mark.parametrize("threshold", [0.0, 10.0])
def test_cql(threshold: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conservative term and its multiplier, with the same uniform actions and normal noise on both sides."""
    samples, weight, alpha = 4, 5.0, 1.5
    config = d3rlpy.algos.CQLConfig(
        gamma=GAMMA,
        n_action_samples=samples,
        conservative_weight=weight,
        alpha_threshold=threshold,
        initial_alpha=alpha,
    )
    agent, impl = same(config, PolicySpec(hidden=(256, 256), activation="relu", squash=True, std="state"))
    ours, batch = batches()
    uniform, noise = torch.rand(ROWS * samples, 2), torch.randn(samples, ROWS, 2)
    monkeypatch.setattr(torch.distributions.normal, "_standard_normal", lambda *_, **__: noise)
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, low, high: low + (high - low) * uniform)
    expected = impl._compute_conservative_loss(
        obs_t=batch.observations,
        act_t=batch.actions,
        obs_tp1=batch.next_observations,
        returns_to_go=batch.returns_to_go,
    )
    flat = noise.transpose(0, 1).reshape(ROWS * samples, 2)
    agent.noise = lambda rows, size: flat[:rows]  # type: ignore[method-assign]
    monkeypatch.setattr(torch, "rand", lambda *_, **__: uniform)
    agent.networks = {**agent.networks, "multiplier": Temperature(alpha)}
    value, stats = conservative_q(weight=weight, samples=samples, threshold=threshold)(agent, ours)
    over = weight * (stats["conservative_gap"].mean() - 2 * threshold)
    torch.testing.assert_close(over, expected.sum().detach())
    (mine,) = torch.autograd.grad(value.mean(), agent.networks["multiplier"].log)
    (log,) = impl.modules.log_alpha.parameters()
    (theirs,) = torch.autograd.grad(-(log.exp() * expected.detach()).mean(), log)
    torch.testing.assert_close(mine, theirs.squeeze())


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
    agent = Agent(policy, {}, {"policy": target})
    found = q_learning(double=True, conservative=1.5)(agent, ours)[0].mean()
    torch.testing.assert_close(found, expected)
