"""A2PR: who is imitated, by hand; gradients against the equation in float64; the limit that is TD3+BC."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from actor_critics import ACTS, SEES, Fixed, actor_critic, rows
from torch import Tensor, nn

import panoply as pp
from panoply.methods.generative_offline.a2pr import better_behaviour, guided_action, policy_v
from panoply.policies.behaviour import PRIOR, BehaviourModel, code_kl
from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.slots.loss.actors import best_action
from panoply.slots.loss.bellman import smooth_q
from panoply.transitions import ActorCritic

SPEC = PolicySpec(hidden=(4,), head="bounded", std="fixed")


class Judge(nn.Module):
    """Q(s, a) = the action itself: gains are then actions less V."""

    def first(self, _: Tensor, action: Tensor) -> Tensor:
        return action[:, 0]


class Echo(nn.Module):
    """A behaviour model that always does the same."""

    code = 2

    def __init__(self, *said: float):
        super().__init__()
        self.said = torch.tensor(said)[:, None]

    def near(self, *_: Tensor) -> Tensor:
        return self.said


def imitated(data: list[float], made: list[float], v: list[float], **settings: Any) -> list[float]:
    """The squared distances that count, of a policy that does 0 everywhere; the value's term is 0 by α → 0."""
    who = actor_critic(SPEC, q=Judge(), v=lambda _: torch.tensor(v), behaviour=Echo(*made))
    who.act = lambda *_, **__: torch.full((len(data), 1), 1e-20)  # type: ignore[method-assign]
    batch = rows(len(data), action=torch.tensor(data)[:, None])
    value, _ = guided_action(alpha=1e-20, **settings)(who, batch)
    return [round(x, 6) for x in value.tolist()]


def test_the_better_of_two_is_imitated_where_it_is_good() -> None:
    """V = 0.1: (a, â) = (0.5, 0.3) → 0.5²; (0.3, 0.5) → 0.5²; (−0.2, 0.4) → 0.4²; (−0.2, −0.3), both bad → 0."""
    data, made = [0.5, 0.3, -0.2, -0.2], [0.3, 0.5, 0.4, -0.3]
    assert imitated(data, made, [0.1] * 4) == [0.25, 0.25, 0.16, 0.0]
    assert imitated(data, made, [0.1] * 4, weight=2.0) == [0.5, 0.5, 0.32, 0.0]
    assert imitated(data, made, [0.1] * 4, guide="data") == [0.25, 0.09, 0.0, 0.0]


def test_ties_go_to_the_model_and_its_zero_gain_counts() -> None:
    """A_vae = A_data = 0: â is taken and is good enough (≥), where the data's own 0 would not be (>)."""
    assert imitated([0.5], [0.5], [0.5]) == [0.25]
    assert imitated([0.5], [0.5], [0.5], guide="data") == [0.0]


def test_policy_v() -> None:
    """y = 1 + 0.5·2 = 2 by the targets, 1 + 0.5·4 = 3 by the critics: towards 2; terminated: both are r = 2."""
    who = actor_critic(SPEC, q=Fixed([4.0, 9.0], [5.0, 9.0]), v=lambda _: torch.tensor([5.0, 1.0]))
    who.targets["q"] = Fixed([2.0, 7.0], [3.0, 7.0])
    value, _ = policy_v()(who, rows())
    assert value.tolist() == [9.0, 1.0]
    who.targets["q"] = Fixed([8.0, 7.0], [8.0, 7.0])  # y = 5, so the critics' 3 is less
    assert policy_v()(who, rows())[0].tolist() == [4.0, 1.0]


def test_v_and_critics_look_at_the_same_next_action() -> None:
    """One draw of noise serves both, as in the paper; another update draws again."""
    who, batch = actor_critic(SPEC), rows(8)
    seen: list[Tensor] = []
    for of in (who.targets, who.networks):
        least = of["q"].least
        of["q"].least = lambda o, a, least=least: (seen.append(a), least(o, a))[1]  # type: ignore[misc, index]
    smooth_q()(who, batch)
    policy_v()(who, batch)
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])
    smooth_q()(who, rows(8))
    assert not torch.equal(seen[2], seen[0])


def modelled(n: int = 6) -> tuple[ActorCritic, Any]:
    who, batch = actor_critic(SPEC), rows(n)
    who.networks = {**who.networks, "behaviour": BehaviourModel.of(who.policy, (5,), 0)}  # type: ignore[dict-item]
    for model in (who.policy.model, *who.networks.values(), who.targets["q"], who.targets["policy"].model):
        model.double()
    who.policy.model.features.forward = lambda x: x  # type: ignore[method-assign]
    for name in ("observation", "action", "next_observation", "reward", "discount"):
        object.__setattr__(batch, name, getattr(batch, name).double())
    return who, batch


def test_behaviour_gradient() -> None:
    """w·1(A > 0)·mean (â − a)² + ½·mean_z ½(μ² + σ² − log σ² − 1), row by row in float64."""
    who, batch = modelled()
    model, noise = who.networks["behaviour"], torch.randn(6, 2, dtype=torch.float64)
    who.noise = lambda *_: noise  # type: ignore[method-assign]
    found = torch.autograd.grad(better_behaviour(weight=0.7)(who, batch)[0].mean(), model.parameters())
    total = torch.zeros((), dtype=torch.float64)
    for i in range(6):
        s, a = batch.observation[i : i + 1], batch.action[i : i + 1]
        out = model.encoder(torch.cat([s, a], -1))[0]
        mu, sigma = out[:2], out[2:].clamp(-4, 15).exp()
        made = torch.tanh(model.decoder(torch.cat([s, (mu + sigma * noise[i])[None]], -1)))[0, 0]
        good = who.networks["q"](s, a)[0] > who.networks["v"](s)
        kl = sum(-0.5 * (1 + torch.log(sigma[k] ** 2) - mu[k] ** 2 - sigma[k] ** 2) for k in range(2)) / 2
        total = total + (0.7 * good.double()[0] * (made - a[0, 0]) ** 2 + 0.5 * kl) / 6
    for one, other in zip(found, torch.autograd.grad(total, model.parameters()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_policy_gradient() -> None:
    """−α/mean|Q|·Q + ω·m·(π − a*)² with a* held fixed: nothing flows through the model."""
    who, batch = modelled()
    noise = torch.randn(6, 2, dtype=torch.float64)
    who.noise = lambda *_: noise  # type: ignore[method-assign]
    parameters = list(who.policy.model.layers.parameters())
    found = torch.autograd.grad(guided_action(alpha=2.0, weight=0.5)(who, batch)[0].mean(), parameters)
    q, v, model = (who.networks[name] for name in ("q", "v", "behaviour"))
    action = torch.tanh(who.policy.model(batch.observation))
    made = model.near(batch.observation, action, noise).detach()
    worth, base = q(batch.observation, action)[0], v(batch.observation)
    a_data, a_made = q(batch.observation, batch.action)[0] - base, q(batch.observation, made)[0] - base
    away = torch.zeros((), dtype=torch.float64)
    for i in range(6):
        best = made[i] if a_made[i] >= a_data[i] else batch.action[i]
        mask = float(a_made[i] >= 0 or a_data[i] > 0)
        away = away + 0.5 * mask * ((action[i] - best) ** 2).sum() / 6
    loss = away - 2.0 * worth.mean() / worth.detach().abs().mean()
    for one, other in zip(found, torch.autograd.grad(loss, parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_where_all_data_is_good_the_mask_changes_nothing() -> None:
    """With V below everything and the data as guide, the loss is TD3+BC's."""
    who, batch = actor_critic(SPEC, v=lambda s: torch.full((len(s),), -1e9)), rows(8)
    mine = guided_action(guide="data", alpha=2.5)(who, batch)[0]
    torch.testing.assert_close(mine, best_action(alpha=2.5)(who, batch)[0])


def test_codes() -> None:
    """KL of N(1, e²) is ½(1 + e² − 2 − 1); codes drawn without an action stay within the bounds."""
    torch.testing.assert_close(
        code_kl(torch.ones(1, 3), torch.ones(1, 3)), torch.tensor([0.5 * (torch.e**2 - 2)])
    )
    policy = ControlPolicy.fresh(SEES, ACTS, SPEC)
    model = BehaviourModel.of(policy, (8,), 3)
    assert model.code == 2
    seen = torch.randn(5, 2)
    far = model.draw(seen, torch.full((5, 2), 9.0))
    assert torch.equal(far, model.decode(seen, torch.full((5, 2), PRIOR)))
    assert torch.equal(far, BehaviourModel.of(policy, (8,), 3).draw(seen, torch.full((5, 2), 7.0)))
    assert far.abs().max() < 1


def test_refused() -> None:
    with pytest.raises(pp.PanoplyError, match="needs the network 'behaviour'"):
        pp.plan("a2pr", settings={"networks.behaviour": "none"})
    with pytest.raises(pp.PanoplyError, match="continuous actions"):
        pp.plan("a2pr", "logged:cartpole-mixed")
