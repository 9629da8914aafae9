"""FamO2O: the embedding by hand, what each loss moves, gradients in float64, and the same β in both arithmetics."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from actor_critics import ACTS, SEES, Fixed, actor_critic, rows

import panoply as pp
from panoply.loops.actor_critic import ActorCriticLearner
from panoply.methods.generative_offline.famo2o import (
    balanced,
    family_conservative_q,
    family_policy,
    family_weighted,
)
from panoply.policies.balance import embedded
from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.progress import Progress
from panoply.run import Run
from panoply.transitions import ActorCritic
from panoply.worlds.control.pointmass import Pointmass
from panoply.worlds.logged.behaviour import behave

SPEC = PolicySpec(hidden=(5,), head="bounded", balanced=True, betas=(2.0, 6.0))


def test_embedding() -> None:
    """β/n^(2i/6): β itself, β/21.54 and β/464.2, as sine and cosine."""
    (found,) = embedded(torch.tensor([3.0], dtype=torch.float64)).tolist()
    angles = [3.0, 3.0 / 10_000 ** (1 / 3), 3.0 / 10_000 ** (2 / 3)]
    assert found == pytest.approx([f(a) for a in angles for f in (math.sin, math.cos)])


def test_the_range() -> None:
    """−1, 0 and 1 are 2, 4 and 6; a new policy starts in the middle."""
    policy = ControlPolicy.fresh(SEES, ACTS, SPEC)
    balance: Any = policy.model.balance
    assert balance.scaled(torch.tensor([-1.0, 0.0, 1.0])).tolist() == [2.0, 4.0, 6.0]
    assert balance(torch.randn(9, 2)).tolist() == pytest.approx([4.0] * 9, abs=0.1)


def unsettled(spec: PolicySpec = SPEC) -> ControlPolicy:
    """A policy whose β matters, and whose actions stay between their bounds, where they have a slope."""
    policy = ControlPolicy.fresh(SEES, ACTS, spec, seed=2)
    draws = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            weight += (0.1 if name == "head.log_std" else 0.5) * torch.randn(weight.shape, generator=draws)
        if not spec.squash:
            policy.head.log_std -= 2.0
    return policy


def test_acting_and_learning_choose_the_same(tmp_path: Path) -> None:
    """NumPy acts by the β that torch computes, before and after a folder."""
    policy, seen = unsettled(), torch.randn(7, 2)
    out = policy.model(seen)
    np.testing.assert_allclose(
        policy.model.numpy()(seen.numpy(), np.zeros(7)), out.detach().numpy(), rtol=1e-4, atol=1e-5
    )
    balance: Any = policy.model.balance
    assert torch.equal(out, policy.model(seen, beta=balance(seen)))
    assert not torch.allclose(out, policy.model(seen, beta=torch.full((7,), 2.0)))
    policy.save(tmp_path)
    assert torch.equal(ControlPolicy.load(tmp_path).model(seen), out)


def test_weights() -> None:
    """exp(β·A), bounded: at A = ½ and a β between 2 and 6, from e to e³; at A = −9 next to nothing."""
    who = actor_critic(SPEC, v=lambda seen: torch.tensor([1.0, 9.0, 0.0, 0.0]))
    who.targets = {"q": Fixed([1.5, 0.0])}
    _, stats = family_weighted()(who, rows())
    assert math.e < stats["weight"][0] < math.e**3
    assert stats["weight"][1] < math.exp(-2 * 9) * 1.01
    assert family_weighted(most=2.0)(who, rows())[1]["weight"][0] == 2.0


def test_any_beta_at_first_and_later_its_own() -> None:
    """Uniform over the range from logged data alone; acting, as the balance policy has it, here narrow about 6."""
    who = actor_critic(SPEC, v=lambda s: torch.zeros(len(s)))
    who.targets = {"q": Fixed([1.0] * 2000)}
    last = who.policy.model.balance.layers.layers[-1]  # type: ignore[union-attr]
    with torch.no_grad():
        last.weight.zero_()
        last.bias.copy_(torch.tensor([3.0, -5.0]))
    seen = []
    for who.acting in (False, True):
        _, stats = family_weighted(most=1e9)(who, rows(2000))
        seen.append(stats["weight"].log())  # β, since A = 1
    assert seen[0].min() < 2.1
    assert seen[0].max() > 5.9
    assert seen[0].mean().item() == pytest.approx(4.0, abs=0.15)
    assert seen[1].min() > 5.9


def exact(spec: PolicySpec = SPEC) -> tuple[ActorCritic, Any]:
    """An actor and critics in float64, with a policy whose β matters."""
    who, batch = actor_critic(spec), rows(4)
    who.policy = unsettled(spec)
    for model in (who.policy.model, *who.networks.values(), who.targets["q"]):
        model.double()
    who.policy.model.features.forward = lambda x: x  # type: ignore[method-assign]
    for name in ("observation", "action", "next_observation", "reward", "discount"):
        object.__setattr__(batch, name, getattr(batch, name).double())
    return who, batch


def test_balance_gradient() -> None:
    """α·log π_b − min Q′(s, tanh(net(s, e(β))) + σ·ε) with the family fixed, row by row; and log α's own gradient."""
    who, batch = exact()
    noises = [torch.randn(4, 1, dtype=torch.float64) for _ in range(2)]
    queue = list(noises)
    who.noise = lambda *_: queue.pop(0)  # type: ignore[method-assign]
    balance: Any = who.policy.model.balance
    alpha, moved = who.networks["temperature"], list(balance.parameters())
    found = torch.autograd.grad(balanced()(who, batch)[0].mean(), [*moved, alpha.log])
    total, entropies = torch.zeros((), dtype=torch.float64), []
    climbed = torch.zeros((), dtype=torch.float64)
    for i in range(4):
        s = batch.observation[i : i + 1]
        mean, log_std = balance.layers(s)[0]
        u = mean + log_std.clamp(-20, 2).exp() * noises[0][i, 0]
        b = torch.tanh(u)
        logp = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp()).log_prob(u) - torch.log(1 - b**2)
        beta = 2 + (b + 1) / 2 * 4
        angles = [beta / 10_000 ** (2 * k / 6) for k in range(3)]
        code = torch.stack([f(a) for a in angles for f in (torch.sin, torch.cos)])[None]
        out = who.policy.model.layers(torch.cat([s, code], -1))
        action = (torch.tanh(out) + who.policy.head.log_std.exp() * noises[1][i]).clamp(-1, 1)
        worth = torch.minimum(*who.targets["q"](s, action))[0]
        total = total + (alpha().double() * logp - worth) / 4
        climbed = climbed + worth / 4
        entropies.append(-logp.detach())
    slopes = torch.autograd.grad(climbed, moved, retain_graph=True)
    assert all(slope.abs().max() > 1e-4 for slope in slopes), "the critics' word reaches β"
    for one, other in zip(found, torch.autograd.grad(total, moved), strict=False):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(found[-1], torch.stack(entropies).mean() + 0.5)


# ------------------------------------------------------------------ with conservative critics

SQUASHED = PolicySpec(hidden=(5,), squash=True, std="state", balanced=True, betas=(0.5, 1.5))


def drawn(who: ActorCritic, s: torch.Tensor, beta: torch.Tensor, noise: torch.Tensor) -> tuple[Any, Any]:
    """tanh of a normal of the member β, and its log-density by the change of variables."""
    out = who.policy.model.layers(torch.cat([s, embedded(beta)], -1))
    mean, log_std = out.chunk(2, -1)
    u = mean + log_std.clamp(-20, 2).exp() * noise
    normal = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp()).log_prob(u)
    return u.tanh(), (normal - (1 - u.tanh() ** 2).log()).sum(-1)


def test_the_family_climbs_beta_times_the_critics() -> None:
    """α·log π(a|s,β) − β·min Q(s,a) for any β, −min Q for the balance policy; temperatures apart."""
    who, batch = exact(SQUASHED)
    share = torch.rand(4, generator=torch.Generator().manual_seed(0))
    beta = (0.5 + share).double()
    noise = torch.randn(4, 1, dtype=torch.float64)
    who.noise = lambda *_: noise  # type: ignore[method-assign]
    who.generator.manual_seed(0)
    value, _ = family_policy()(who, batch)
    moved = list(who.policy.model.layers.parameters())
    found = torch.autograd.grad(value.mean(), [*moved, who.networks["temperature"].log])
    action, logp = drawn(who, batch.observation, beta, noise)
    worth = torch.minimum(*who.networks["q"](batch.observation, action))
    expected = torch.autograd.grad((0.5 * logp - beta * worth).mean(), moved, retain_graph=True)
    climbed = torch.autograd.grad((beta * worth).mean(), moved)
    assert all(slope.abs().max() > 1e-4 for slope in climbed)
    for one, other in zip(found, expected, strict=False):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(found[-1], -(logp.detach() - 1).mean(), rtol=1e-6, atol=0)


def test_the_balance_may_climb_the_critics_alone() -> None:
    """Without an entropy −min Q of the critics themselves, and no temperature is needed or moved."""
    loss = balanced(entropy=None, critics="now")
    assert loss.learns() == ("policy.balance",)
    assert not {"network:temperature", "target:q"} & loss.needs()
    who, batch = exact(SQUASHED)
    who.targets, who.networks = {}, {"q": who.networks["q"]}
    value, _ = loss(who, batch)
    slopes = torch.autograd.grad(value.mean(), list(who.policy.model.balance.parameters()))  # type: ignore[union-attr]
    assert all(slope.abs().max() > 1e-6 for slope in slopes)
    who.generator.manual_seed(0)
    again, _ = loss(who, batch)
    who.generator.manual_seed(0)
    beta, _ = who.policy.model.balance.draw(batch.observation, who.noise(4, 1))  # type: ignore[union-attr]
    action, _ = who.draw(batch.observation, beta)
    torch.testing.assert_close(again, -who.networks["q"].least(batch.observation, action))


def test_conservative_critics_of_a_family() -> None:
    """At s′ acts the member chosen at s, in the target and in the sum; at s the one that is learned for."""
    who, batch = exact(SQUASHED)
    asked: list[tuple[str, list[float]]] = []
    draw = who.draw

    def noted(observation: Any, beta: Any = None) -> Any:
        where = "s" if torch.equal(observation[:1], batch.observation[:1]) else "s′"
        asked.append((where, beta[:: len(beta) // 4].tolist()))
        return draw(observation, beta)

    who.draw = noted  # type: ignore[method-assign]
    value, _ = family_conservative_q(weight=2.0, samples=3)(who, batch)
    any_beta, chosen = (batch._kept[name].tolist() for name in ("any beta", "chosen beta"))
    assert any_beta != chosen
    assert asked == [("s′", chosen), ("s", any_beta), ("s′", chosen)]
    assert value.shape == (4,)
    assert torch.autograd.grad(value.sum(), list(who.networks["q"].parameters()))[0].abs().max() > 1e-4


def test_each_loss_moves_its_own() -> None:
    plan = pp.plan("famo2o", settings={"policy.hidden": "4", "world.size": 200})
    policy = ControlPolicy.fresh(SEES, ACTS, SPEC)
    learner = ActorCriticLearner(policy, plan.method, seed=0, total_steps=1)  # type: ignore[arg-type]
    pieces = {
        d.loss.info.name: {re.split(r"\.layers\.(?:layers\.)?", name)[0] for name in d.named}
        for d in learner.descents
    }
    assert pieces["balanced"] == {"policy.balance", "temperature.log"}
    assert pieces["family_weighted"] == {"policy", "policy.head.log_std"}


def test_halves() -> None:
    """In the left half the expert's action 95 times of 100, in the right half any."""
    data = behave(Pointmass(), "halves", 2000, 0)
    seen, action = data.columns["observation"], data.columns["action"]
    left = seen[:, 0] < 0
    assert 0.05 < left.mean() < 0.9
    at_speed = np.abs(action).max(1) > 0.999  # as the expert goes, and chance hardly ever
    assert at_speed[left].mean() > 0.8
    assert at_speed[~left].mean() < 0.05


@pytest.mark.parametrize(("name", "low", "high"), [("famo2o", 1, 5), ("famo2o-cql", 0.5, 1.5)])
def test_a_run_goes_online(
    name: str, low: float, high: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PANOPLY_CACHE", str(tmp_path / "cache"))
    settings = {"policy.hidden": "8", "replay.batch": 8, "replay.updates": 4, "world.size": 300}
    settings |= {"sample.length": 10, "run.held_out": 2, "run.evaluate_every": 0}
    done = pp.train(name, run=tmp_path / "run", steps=2, threads=1, settings=settings, progress=Progress())
    records = Run.open(done.run).metrics()
    assert [r["total_decisions"] for r in records] == [0, 10]
    assert all(low <= r["beta"] <= high for r in records)


def test_refused() -> None:
    with pytest.raises(pp.PanoplyError, match="policy.balanced cannot be False"):
        pp.plan("famo2o", settings={"policy.balanced": False})
    with pytest.raises(pp.PanoplyError, match="policy.betas is a range"):
        pp.plan("famo2o", settings={"policy.betas": "5,1"})
    with pytest.raises(pp.PanoplyError, match="continuous actions"):
        pp.plan("famo2o", "logged:cartpole-mixed")
