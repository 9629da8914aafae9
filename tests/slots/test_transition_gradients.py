"""Gradients of losses on transitions, against their equations in float64, one row at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import assert_same
from torch import Tensor, nn

from panoply.experience import Experience, Table
from panoply.parts import Part
from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.replay import Replay
from panoply.slots.loss import actors, bellman, soft
from panoply.transitions import ActorCritic, QNets, StateValue, Temperature, Transitions
from panoply.worlds.control.world import Box, Discrete, Space

SEES, ACTS, CHOICES = Box((2,)), Box((2,), (-2.0, -1.0), (2.0, 1.0)), Discrete(3)
ROWS = 6


def actor_critic(spec: PolicySpec, space: Space = ACTS, count: int = 2) -> ActorCritic:
    """A policy, critics and targets with weights of their own, all in float64."""
    policy = ControlPolicy.fresh(SEES, space, spec, seed=1)
    networks = {"q": QNets.of(policy, count, 0), "v": StateValue.of(policy, 0)}
    other = ControlPolicy.fresh(SEES, space, spec, seed=2)
    targets: dict[str, Any] = {"q": QNets.of(policy, count, 9), "policy": other}
    for model in (policy.model, other.model, *networks.values(), targets["q"]):
        model.double()
    for features in (policy.model.features, other.model.features):
        features.forward = lambda x: x  # type: ignore[method-assign]
    scaled = [*policy.model.layers.layers[-1:], *other.model.layers.layers[-1:]]
    with torch.no_grad():
        for layer in scaled:
            layer.weight *= 30  # outputs of a new policy are all but equal
    temperature = Temperature(0.5).double()
    made = ActorCritic(policy, {**networks, "temperature": temperature}, targets)
    drawn = torch.Generator().manual_seed(0)
    made.noise = lambda *shape: torch.randn(*shape, generator=drawn, dtype=torch.float64)  # type: ignore[method-assign]
    return made


def rows(space: Space = ACTS, **columns: Any) -> Transitions:
    """Six transitions, the third of which terminated and the last of which was cut after two steps."""
    draws = torch.Generator().manual_seed(3)
    made = {
        "observation": torch.randn(ROWS, 2, generator=draws, dtype=torch.float64),
        "action": torch.rand(ROWS, 2, generator=draws, dtype=torch.float64) * 1.8 - 0.9,
        "reward": torch.randn(ROWS, generator=draws, dtype=torch.float64) * 2,
        "discount": torch.tensor([0.9, 0.9, 0.0, 0.9, 0.9, 0.81], dtype=torch.float64),
        "next_observation": torch.randn(ROWS, 2, generator=draws, dtype=torch.float64),
    }
    if isinstance(space, Discrete):
        made["action"] = torch.tensor([0, 1, 2, 0, 1, 2])
    return Transitions(**{**made, **columns})


def compared(
    loss: Part, who: ActorCritic, batch: Transitions, model: nn.Module, row: Callable[[int], Tensor]
) -> None:
    """The gradient of the mean loss against that of the mean over rows of an equation."""
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss(who, batch)[0].mean(), list(parameters.values()))
    total = sum((row(i) for i in range(ROWS)), torch.zeros((), dtype=torch.float64)) / ROWS
    expected = torch.autograd.grad(total, list(parameters.values()))
    assert_same(dict(zip(parameters, found, strict=True)), dict(zip(parameters, expected, strict=True)), 1e-9)


@torch.no_grad()
def least(nets: Any, x: Tensor) -> float:
    """The most cautious of some critics."""
    return min(float(q(x)) for q in nets)


def one(batch: Transitions, i: int, name: str) -> Tensor:
    return getattr(batch, name)[i : i + 1]  # type: ignore[no-any-return]


# ------------------------------------------------------------------ values of n actions


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_q_learning(double: bool, masked: bool) -> None:
    who = actor_critic(PolicySpec(hidden=(5,), head="values", atoms=1), CHOICES)
    legal = torch.tensor([[True, False, True]] * 3 + [[False, True, True]] * 3) if masked else None
    batch = rows(CHOICES, next_legal=legal)
    net, target = who.policy.model, who.targets["policy"].model

    def row(i: int) -> Tensor:
        with torch.no_grad():
            after = one(batch, i, "next_observation")
            values, judged = target(after)[0], (net if double else target)(after)[0]
            could = [a for a in range(3) if legal is None or legal[i, a]]
            best = max(could, key=lambda a: float(judged[a]))
            y = batch.reward[i] + batch.discount[i] * values[best]
        error = net(one(batch, i, "observation"))[0, batch.action[i]] - y
        return 0.5 * error**2 if error.abs() < 1 else error.abs() - 0.5

    compared(bellman.q_learning(double=double), who, batch, net, row)


def test_conservative_q_learning() -> None:
    """+ w·(log Σ_b exp Q(s,b) − Q(s,a))."""
    who, batch = actor_critic(PolicySpec(hidden=(5,), head="values", atoms=1), CHOICES), rows(CHOICES)
    net = who.policy.model

    def row(i: int) -> Tensor:
        values = net(one(batch, i, "observation"))[0]
        taken = values[batch.action[i]]
        with torch.no_grad():
            after = who.targets["policy"].model(one(batch, i, "next_observation"))[0]
            y = batch.reward[i] + batch.discount[i] * after.max()
        error = taken - y
        huber = 0.5 * error**2 if error.abs() < 1 else error.abs() - 0.5
        return huber + 0.7 * (values.exp().sum().log() - taken)

    compared(bellman.q_learning(conservative=0.7), who, batch, net, row)


@pytest.mark.parametrize("double", [False, True])
def test_categorical_q(double: bool) -> None:
    """Algorithm 1 of Bellemare, Dabney and Munos (2017): each atom's mass to its neighbours below and above."""
    atoms, low, high = 5, -3.0, 3.0
    who = actor_critic(PolicySpec(hidden=(5,), head="values", atoms=atoms, span=(low, high)), CHOICES)
    batch, gap = rows(CHOICES), (high - low) / (atoms - 1)
    points = [low + gap * j for j in range(atoms)]
    net, target = who.policy.model, who.targets["policy"].model

    def chances(model: nn.Module, seen: Tensor) -> Tensor:
        return model(seen).view(3, atoms).softmax(-1)  # type: ignore[no-any-return]

    def row(i: int) -> Tensor:
        with torch.no_grad():
            after = one(batch, i, "next_observation")
            judged = chances(net if double else target, after)
            best = max(range(3), key=lambda a: sum(float(judged[a, j]) * points[j] for j in range(atoms)))
            p = chances(target, after)[best]
        m = [0.0] * atoms
        for j in range(atoms):
            z = min(max(float(batch.reward[i] + batch.discount[i] * points[j]), low), high)
            b = (z - low) / gap
            below, above = math.floor(b), math.ceil(b)
            if below == above:
                m[below] += float(p[j])
            else:
                m[below] += float(p[j]) * (above - b)
                m[above] += float(p[j]) * (b - below)
        mine = chances(net, one(batch, i, "observation"))[batch.action[i]]
        return -sum((m[j] * mine[j].log() for j in range(atoms)), torch.zeros((), dtype=torch.float64))

    compared(bellman.categorical_q(double=double), who, batch, net, row)


# ------------------------------------------------------------------ critics of continuous actions


@pytest.mark.parametrize(("count", "noise"), [(1, 0.0), (2, 0.3)])
def test_smooth_q(count: int, noise: float) -> None:
    """DDPG: (Q(s,a) − (r + γ·Q′(s′, π′(s′))))². TD3: two of them, the least of the targets, and clipped noise."""
    who, batch = actor_critic(PolicySpec(hidden=(5,), head="bounded", std="fixed"), count=count), rows()
    nets, targets = who.networks["q"].nets, who.targets["q"].nets
    drawn = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def row(i: int) -> Tensor:
        with torch.no_grad():
            after = one(batch, i, "next_observation")
            action = who.targets["policy"].model(after).tanh()
            action = (action + (noise * drawn[i]).clamp(-0.25, 0.25)).clamp(-1, 1)
            worth = least(targets, torch.cat([after, action], -1))
            y = batch.reward[i] + batch.discount[i] * worth
        x = torch.cat([one(batch, i, "observation"), one(batch, i, "action")], -1)
        return sum(((q(x)[0, 0] - y) ** 2 for q in nets), torch.zeros((), dtype=torch.float64))

    compared(bellman.smooth_q(noise=noise, clip=0.25), who, batch, who.networks["q"], row)


def squashed(who: ActorCritic, seen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """tanh of a normal, and its log-density by the change of variables."""
    mean, log_std = who.policy.model(seen)[0].chunk(2)
    u = mean + log_std.clamp(-20, 2).exp() * noise
    normal = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp()).log_prob(u)
    return u.tanh(), (normal - (1 - u.tanh() ** 2).log()).sum()


def test_soft_q() -> None:
    who, batch = actor_critic(PolicySpec(hidden=(5,), squash=True, std="state")), rows()
    drawn = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def row(i: int) -> Tensor:
        with torch.no_grad():
            after = one(batch, i, "next_observation")
            action, logp = squashed(who, after, drawn[i])
            x = torch.cat([after[0], action])
            worth = least(who.targets["q"].nets, x[None]) - 0.5 * logp
            y = batch.reward[i] + batch.discount[i] * worth
        x = torch.cat([one(batch, i, "observation"), one(batch, i, "action")], -1)
        errors = [(q(x)[0, 0] - y) ** 2 for q in who.networks["q"].nets]
        return 0.5 * (errors[0] + errors[1])

    compared(soft.soft_q(), who, batch, who.networks["q"], row)


def test_conservative_q() -> None:
    """CQL(H): log of (1/N)·Σ exp Q/density over uniform actions and the policy's at s and s′ (up to log N)."""
    samples = 3
    who, batch = actor_critic(PolicySpec(hidden=(5,), squash=True, std="state")), rows()
    normal = torch.Generator().manual_seed(0)
    shapes = [(ROWS, 2), (ROWS * samples, 2), (ROWS * samples, 2)]
    next_noise, here_noise, there_noise = (
        torch.randn(*shape, generator=normal, dtype=torch.float64) for shape in shapes
    )
    who.generator.manual_seed(7)
    uniform = (
        2 * torch.rand(ROWS * samples, 2, generator=torch.Generator().manual_seed(7), dtype=torch.float64) - 1
    )
    torch.set_default_dtype(torch.float64)
    try:

        def row(i: int) -> Tensor:
            seen, after = one(batch, i, "observation"), one(batch, i, "next_observation")
            with torch.no_grad():
                action, _ = squashed(who, after, next_noise[i])
                worth = least(who.targets["q"].nets, torch.cat([after[0], action])[None])
                y = batch.reward[i] + batch.discount[i] * worth
                tried: list[tuple[Tensor, Tensor]] = []
                for j in range(i * samples, (i + 1) * samples):
                    tried.append((uniform[j], torch.tensor(0.25).log()))
                    tried += [squashed(who, seen, here_noise[j]), squashed(who, after, there_noise[j])]
            total = torch.zeros(())
            for q in who.networks["q"].nets:
                taken = q(torch.cat([seen, one(batch, i, "action")], -1))[0, 0]
                each = [(q(torch.cat([seen[0], a])[None])[0, 0] - logp).exp() for a, logp in tried]
                total = total + (taken - y) ** 2 + 5.0 * (torch.stack(each).sum().log() - taken)
            return total

        compared(soft.conservative_q(weight=5.0, samples=samples), who, batch, who.networks["q"], row)
    finally:
        torch.set_default_dtype(torch.float32)


def test_expectile_v() -> None:
    who, batch = actor_critic(PolicySpec(hidden=(5,), head="bounded")), rows()

    def row(i: int) -> Tensor:
        x = torch.cat([one(batch, i, "observation"), one(batch, i, "action")], -1)
        u = least(who.targets["q"].nets, x) - who.networks["v"](one(batch, i, "observation"))[0]
        return (0.8 if u > 0 else 0.2) * u**2

    compared(bellman.expectile_v(expectile=0.8), who, batch, who.networks["v"], row)


def test_expected_q_of_draws() -> None:
    """AWAC's critics: (Q_i(s,a) − (r + γ·mean of min_j Q′_j over draws a′ = clip(π(s′) + σ·ε)))²."""
    who, batch = actor_critic(PolicySpec(hidden=(5,), head="bounded", log_std=-0.5)), rows()
    drawn = torch.randn(3 * ROWS, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def row(i: int) -> Tensor:
        with torch.no_grad():
            after = one(batch, i, "next_observation")
            mean = who.policy.model(after).tanh()
            tried = [(mean + math.exp(-0.5) * drawn[k * ROWS + i]).clamp(-1, 1) for k in range(3)]
            worth = sum(least(who.targets["q"].nets, torch.cat([after, a], -1)) for a in tried) / 3
            y = batch.reward[i] + batch.discount[i] * worth
        x = torch.cat([one(batch, i, "observation"), one(batch, i, "action")], -1)
        errors = [(q(x)[0, 0] - y) ** 2 for q in who.networks["q"].nets]
        return errors[0] + errors[1]

    compared(bellman.expected_q(samples=3), who, batch, who.networks["q"], row)


# ------------------------------------------------------------------ policies


def test_best_action() -> None:
    """DDPG's and TD3's policy: −Q_1(s, π(s))."""
    who, batch = actor_critic(PolicySpec(hidden=(5,), head="bounded", std="fixed")), rows()

    def row(i: int) -> Tensor:
        seen = one(batch, i, "observation")
        return -who.networks["q"].nets[0](torch.cat([seen, who.policy.model(seen).tanh()], -1))[0, 0]  # type: ignore[no-any-return]

    compared(actors.best_action(), who, batch, who.policy.model.layers, row)


def test_td3_bc() -> None:
    """(π(s) − a)² − α·Q/mean|Q|, in which the mean is a number and not differentiated."""
    who, batch = actor_critic(PolicySpec(hidden=(5,), head="bounded", std="fixed")), rows()
    q = who.networks["q"].nets[0]

    def acted(i: int) -> tuple[Tensor, Tensor]:
        seen = one(batch, i, "observation")
        action = who.policy.model(seen).tanh()
        return action, q(torch.cat([seen, action], -1))[0, 0]

    size = sum(abs(float(acted(i)[1].detach())) for i in range(ROWS)) / ROWS

    def row(i: int) -> Tensor:
        action, worth = acted(i)
        return ((action - batch.action[i]) ** 2).mean() - 2.5 / size * worth

    compared(actors.best_action(alpha=2.5), who, batch, who.policy.model.layers, row)


def likelihood(who: ActorCritic, seen: Tensor, action: Tensor) -> Tensor:
    """log N(a; tanh of the output, σ) of an action in its units, with the density that of the action itself."""
    log_std, size = who.policy.head.log_std, torch.tensor([2.0, 1.0], dtype=torch.float64)
    z = (action - who.policy.model(seen)[0].tanh()) / log_std.exp()
    return (-0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi) - size.log()).sum()  # type: ignore[no-any-return]


def test_return_weighted() -> None:
    """AWR: −min(exp(A/β), most)·log π(a|s); the weight of the largest is cut."""
    advantage = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0, 9.0], dtype=torch.float64)
    who, batch = actor_critic(PolicySpec(hidden=(5,), head="bounded")), rows(more={"advantage": advantage})

    def row(i: int) -> Tensor:
        weight = min(math.exp(float(advantage[i]) / 0.5), 20.0)
        return -weight * likelihood(who, one(batch, i, "observation"), batch.action[i])

    compared(actors.return_weighted(beta=0.5, most=20.0), who, batch, who.policy.model, row)


def test_advantage_weighted() -> None:
    """IQL: −min(exp(β·(min Q′ − V)), most)·log π(a|s)."""
    who, batch = actor_critic(PolicySpec(hidden=(5,), head="bounded")), rows()

    def row(i: int) -> Tensor:
        seen = one(batch, i, "observation")
        x = torch.cat([seen, one(batch, i, "action")], -1)
        gain = least(who.targets["q"].nets, x) - float(who.networks["v"](seen).detach())
        return -min(math.exp(3 * gain), 1.2) * likelihood(who, seen, batch.action[i])

    compared(actors.advantage_weighted(beta=3.0, most=1.2), who, batch, who.policy.model, row)


@pytest.mark.parametrize("form", ["exp", "softmax", "binary"])
def test_critic_weighted(form: str) -> None:
    """AWAC and CRR: −f(min Q(s,a) − mean over draws b of min Q(s,b))·log π(a|s); nothing flows through the weight."""
    who, batch = actor_critic(PolicySpec(hidden=(5,), head="bounded", log_std=-0.5)), rows()
    drawn = torch.randn(2 * ROWS, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nets, gains = who.networks["q"].nets, []
    for i in range(ROWS):
        seen = one(batch, i, "observation")
        with torch.no_grad():
            mean = who.policy.model(seen).tanh()
        tried = [(mean + math.exp(-0.5) * drawn[k * ROWS + i]).clamp(-1, 1) for k in range(2)]
        own = sum(least(nets, torch.cat([seen, b], -1)) for b in tried) / 2
        gains.append(least(nets, torch.cat([seen, one(batch, i, "action")], -1)) - own)
    total = sum(math.exp(gain / 0.1) for gain in gains)
    weights = {
        "exp": [min(math.exp(gain / 0.1), 1.5) for gain in gains],
        "softmax": [ROWS * math.exp(gain / 0.1) / total for gain in gains],
        "binary": [float(gain > 0) for gain in gains],
    }[form]
    assert len(set(weights)) > 1

    def row(i: int) -> Tensor:
        return -weights[i] * likelihood(who, one(batch, i, "observation"), batch.action[i])

    loss = actors.critic_weighted(form=form, beta=0.1, most=1.5, samples=2)
    compared(loss, who, batch, who.policy.model, row)


@pytest.mark.parametrize("space", [ACTS, CHOICES], ids=["bounded", "choices"])
def test_imitation(space: Space) -> None:
    """BC: −log π of logged actions, of both kinds, through the policy that scores experience."""
    who, batch = (
        actor_critic(PolicySpec(hidden=(5,), head="bounded" if space is ACTS else "distribution"), space),
        rows(space),
    )
    action = who.policy.head.real(batch.action) if space is ACTS else batch.action
    decisions = Table({"context": torch.arange(ROWS), "action": action})
    experience = Experience(decisions, Table({"observation": batch.observation}))
    parameters = dict(who.policy.model.named_parameters())
    loss = -who.policy.score(experience)["logp"].mean()
    found = torch.autograd.grad(loss, list(parameters.values()))
    total = torch.zeros((), dtype=torch.float64)
    for i in range(ROWS):
        seen = one(batch, i, "observation")
        if space is ACTS:
            logp = likelihood(who, seen, batch.action[i])
        else:
            logits = who.policy.model(seen)[0]
            logp = logits[batch.action[i]] - logits.exp().sum().log()
        total = total - logp / ROWS
    expected = torch.autograd.grad(total, list(parameters.values()))
    assert_same(dict(zip(parameters, found, strict=True)), dict(zip(parameters, expected, strict=True)), 1e-9)


# ------------------------------------------------------------------ returns


def test_lambda_returns() -> None:
    """γ = λ = ½ and V(s) = s. An episode 0 → 1 → 2 that ends, and one 10 → 11 that is cut when 12 is seen.

    R_t = r + γ·((1 − λ)·V′ + λ·R_{t+1}): 4; 2 + ½·(1 + 2) = 3.5; 1 + ½·(0.5 + 1.75); and 16 + ½·12 = 22, since a cut
    episode is worth what its last state is worth; 8 + ½·(5.5 + 11).
    """
    policy = ControlPolicy.fresh(Box((1,)), Box((1,), (-1.0,), (1.0,)), PolicySpec(head="bounded"))
    replay = Replay(policy.observation, policy.action, policy.head, size=5, gamma=0.5)
    decisions = Table(
        {
            "context": torch.arange(5),
            "next": torch.tensor([1, 2, 5, 4, 6]),
            "episode": torch.tensor([0, 0, 0, 1, 1]),
            "action": torch.zeros(5, 1),
            "signal:reward": torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]),
            "end": torch.tensor([0, 0, 1, 0, 2]),
        }
    )
    seen = torch.tensor([0.0, 1.0, 2.0, 10.0, 11.0, 3.0, 12.0])[:, None]
    replay.fill(Experience(decisions, Table({"observation": seen})))
    who = ActorCritic(policy, {"v": lambda x: x[:, 0]}, {})
    found = bellman.lambda_returns(who, replay, lam=0.5)
    assert found["return"].tolist() == [2.125, 3.5, 4.0, 16.25, 22.0]
    gains = torch.tensor([2.125, 2.5, 2.0, 6.25, 11.0])
    torch.testing.assert_close(found["advantage"], (gains - gains.mean()) / (gains.std() + 1e-5))
    replay.more |= found
    value, _ = bellman.return_v()(who, replay.rows(torch.arange(5)))
    torch.testing.assert_close(value, 0.5 * gains**2)
