"""Losses on transitions: values worked by hand, and gradients against the equation in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from actor_critics import CHOICES, Fixed, actor_critic, rows
from torch import Tensor, nn

from panoply.methods.base.iql import iql
from panoply.policies.control import PolicySpec
from panoply.slots.loss import actors, bellman, soft
from panoply.transitions import ActorCritic, Chunk, Temperature
from panoply.worlds.control.world import Discrete, MultiDiscrete


def test_expectile() -> None:
    """u = min Q′ − V is 1 where V is 2 and −2 where V is 6: 0.7·1 and 0.3·4."""
    who = actor_critic(PolicySpec(), v=lambda _: torch.tensor([2.0, 6.0]))
    who.targets = {"q": Fixed([3.0, 4.0], [5.0, 4.5])}
    value, _ = bellman.expectile_v(expectile=0.7)(who, rows())
    torch.testing.assert_close(value, torch.tensor([0.7, 1.2], dtype=torch.float64))


def test_policy_and_critics_go_by_v_after_its_step() -> None:
    """V moves from 2 to 5 by its own loss: weights are of min Q′ − 5, and targets r + γ·5, as in the authors' code."""
    worth = [2.0]
    who = actor_critic(
        PolicySpec(),
        v=lambda seen: torch.full((len(seen),), worth[0], dtype=torch.float64),
        q=Fixed([0.0, 0.0]),
    )
    who.targets = {"q": Fixed([3.0, 4.0], [5.0, 4.5])}
    batch = rows()
    bellman.expectile_v()(who, batch)
    worth[0] = 5.0
    _, stats = actors.advantage_weighted(beta=1.0)(who, batch)
    assert stats["advantage"].tolist() == [-2.0, -1.0]
    worth[0] = 7.0  # once asked for, it is the same for all losses of the update
    assert bellman.q_of_v()(who, batch)[1]["target"].tolist() == [1 + 0.5 * 5, 2.0]


def test_iql_moves_v_first() -> None:
    """And its policy by a rate that falls along half a cosine: in the middle of the run it is half."""
    method = iql()
    assert [loss.learns() for loss in method.losses] == [("v",), ("policy",), ("q",)]
    assert method.settings()["losses.advantage_weighted.schedule"] == "cosine"
    assert method.losses[1].settings()["schedule"](500, 1000) == pytest.approx(0.5)


def test_q_of_v() -> None:
    """Targets 1 + 0.5·4 = 3 and 2 (terminated); Q_1 is off by 1 and 2, Q_2 by 0 and 1."""
    v = torch.tensor([0.0, 0.0, 4.0, 100.0])  # of both s, then of both s′
    who = actor_critic(PolicySpec(), v=lambda seen: v, q=Fixed([2.0, 4.0], [3.0, 3.0]))
    value, stats = bellman.q_of_v()(who, rows())
    assert value.tolist() == [1.0, 5.0]
    assert stats["target"].tolist() == [3.0, 2.0]
    value, _ = bellman.q_of_v(huber=1.5)(who, rows())
    assert value.tolist() == [0.5, 1.5 * (2 - 0.75) + 0.5]  # an error of 2 is on the line, those of 1 are not


def test_soft_q() -> None:
    """½·Σ (Q_i − (r + γ·(min Q′ − α·log π)))², with the action that the same noise gives."""
    who = actor_critic(PolicySpec(squash=True, std="state"), q=Fixed([1.0, 1.0], [0.0, 3.0]))
    who.targets = {"q": Fixed([2.0, 2.0], [3.0, 1.0])}
    batch = rows()
    value, _ = soft.soft_q()(who, batch)
    who.generator.manual_seed(0)
    _, logp = who.draw(batch.next_observation)
    target = 1 + 0.5 * (2.0 - 0.5 * logp[0].item())
    expected = [0.5 * ((1 - target) ** 2 + target**2), 0.5 * (1 + 1)]
    torch.testing.assert_close(value.tolist(), expected)


def test_smoothing() -> None:
    """The target's action moves by no more than the clip, and not over the bounds."""
    who, seen = actor_critic(PolicySpec(head="bounded", std="fixed")), []

    def least(_: Tensor, action: Tensor) -> Tensor:
        seen.append(action)
        return torch.zeros(len(action))

    who.targets["q"].least = least
    batch = rows(400)
    bellman.smooth_q(noise=10.0, clip=0.25)(who, batch)
    plain = who.act(batch.next_observation, target=True)
    away = (seen[0] - plain).abs()
    assert 0.2 < away.mean() <= 0.25
    assert away.max() <= 0.25 + 1e-6
    bellman.smooth_q(noise=0.0)(who, batch)
    assert torch.equal(seen[1], plain)


def test_smoothed_actions_stay_in_bounds() -> None:
    """tanh of 3 is 0.995, and noise of 10 is cut to 0.25: the target looks at 1, or at 0.745."""
    who = actor_critic(PolicySpec(head="bounded", std="fixed"))
    who.targets["policy"].model.forward = lambda x: torch.full((len(x), 1), 3.0)
    who.noise = lambda *shape: torch.tensor([[1.0], [-1.0]])  # type: ignore[method-assign]
    found = bellman.smooth_next(who, rows(), 10.0, 0.25)
    assert found[:, 0].tolist() == pytest.approx([1.0, math.tanh(3.0) - 0.25])


def test_q_learning() -> None:
    """Q(s,a) = 1, target 1 + 0.5·max(5, 3, 0) = 3.5: |−2.5| − ½; Double DQN takes the target's value of action 1."""
    who = actor_critic(PolicySpec(head="values", atoms=1), CHOICES)
    here, after = [[1.0, 0.0, 0.0]], [[5.0, 3.0, 0.0]]
    batch = rows(1, action=torch.tensor([0]))
    who.policy.model.forward = lambda x: torch.tensor(  # type: ignore[method-assign]
        here if x is batch.observation else [[0.0, 9.0, 0.0]]
    )
    who.targets["policy"].model.forward = lambda x: torch.tensor(after)
    assert bellman.q_learning()(who, batch)[0].item() == pytest.approx(2.0)
    assert bellman.q_learning(double=True)(who, batch)[0].item() == pytest.approx(1.0)  # 1 + 0.5·3 = 2.5


def test_illegal_next_actions() -> None:
    """Where action 0 cannot be taken at s′, max(3, 0) counts: 1 + 0.5·3; Double DQN too chooses a legal one."""
    who = actor_critic(PolicySpec(head="values", atoms=1), CHOICES)
    batch = rows(1, action=torch.tensor([0]), next_legal=torch.tensor([[False, True, True]]))
    who.policy.model.forward = lambda x: torch.tensor(  # type: ignore[method-assign]
        [[1.0, 0.0, 0.0]] if x is batch.observation else [[9.0, 0.0, 4.0]]
    )
    who.targets["policy"].model.forward = lambda x: torch.tensor([[5.0, 3.0, 0.0]])
    assert bellman.q_learning()(who, batch)[0].item() == pytest.approx(1.0)  # |1 − 2.5| − ½
    assert bellman.q_learning(double=True)(who, batch)[0].item() == pytest.approx(0.0)  # 1 + 0.5·0


def test_illegal_next_actions_of_distributions() -> None:
    """Points −1, 1. Action 0 surely pays 1, but only action 1, which surely pays −1, is legal: r + γ·Z is 0.5."""
    who = actor_critic(PolicySpec(head="values", atoms=2, span=(-1.0, 1.0)), Discrete(2))
    batch = rows(1, action=torch.tensor([0]), next_legal=torch.tensor([[False, True]]))
    who.policy.model.forward = lambda x: torch.zeros(1, 4)  # type: ignore[method-assign]
    who.targets["policy"].model.forward = lambda x: torch.tensor([[-40.0, 40.0, 40.0, -40.0]])
    target = {}
    projected = bellman.project

    def noted(*of: Tensor) -> Tensor:
        target["found"] = projected(*of)
        return target["found"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bellman, "project", noted)
        value, _ = bellman.categorical_q()(who, batch)
    torch.testing.assert_close(target["found"], torch.tensor([[0.25, 0.75]]))
    assert value.item() == pytest.approx(math.log(2))


def test_watkins_q() -> None:
    """γ = ½, λ = ½, max Q′ = 4 after every step, rewards 1, 2, 3, the third step the episode's last but cut.

    G_2 = 3 + ½·4 = 5. Greedy on both: G_1 = 2 + ½·(½·4 + ½·5) = 4.25, G_0 = 1 + ½·(2 + 2.125) = 3.0625. When the second
    action is not the best, G_0 = 1 + ½·4; and what is not inside does not count, whatever it is.
    """
    who = actor_critic(PolicySpec(head="values", atoms=1), CHOICES)
    who.targets["policy"].model.forward = lambda x: torch.tensor([[0.0, 4.0, 1.0]]).expand(len(x), 3)
    who.policy.model.forward = lambda x: torch.zeros(len(x), 3)  # type: ignore[method-assign]
    actions = torch.tensor([[0, 1, 1], [0, 2, 1], [0, 1, 1]])
    chunk = Chunk(
        torch.zeros(3, 3, 2),
        actions,
        torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 0.0, 0.0]]),
        torch.full((3, 3), 0.5),
        torch.zeros(3, 3, 2),
        torch.tensor([[True, True, True], [True, True, True], [True, False, False]]),
    )
    batch = rows(3, action=actions[:, 0], chunk=chunk)
    assert bellman.watkins_q(lam=0.5)(who, batch)[1]["target"].tolist() == [3.0625, 3.0, 3.0]
    assert bellman.watkins_q(lam=0.0)(who, batch)[1]["target"].tolist() == [3.0, 3.0, 3.0]


def test_conservative_q_learning() -> None:
    """Q(s,·) = 1, 0, 0 with action 2 illegal, target 1: nothing but 2·(log(e + 1) − 1)."""
    who = actor_critic(PolicySpec(head="values", atoms=1), CHOICES)
    batch = rows(
        1,
        action=torch.tensor([0]),
        discount=torch.zeros(1),
        legal=torch.tensor([[True, True, False]]),
    )
    who.policy.model.forward = lambda x: torch.tensor([[1.0, 0.0, 7.0]])  # type: ignore[method-assign]
    found, stats = bellman.q_learning(conservative=2.0)(who, batch)
    assert found.item() == pytest.approx(2 * (math.log(math.e + 1) - 1))
    assert stats["conservative_gap"].item() == pytest.approx(math.log(math.e + 1) - 1)


def test_illegal_actions_have_no_likelihood() -> None:
    """A softmax over the legal ones: of logits 0, 0, 9 with the last illegal, the first has ½."""
    who = actor_critic(PolicySpec(), CHOICES, v=lambda _: torch.zeros(1))
    who.targets = {"q": Fixed([0.0])}
    who.policy.model.forward = lambda x: torch.tensor([[0.0, 0.0, 9.0]])  # type: ignore[method-assign]
    batch = rows(1, action=torch.tensor([0]), legal=torch.tensor([[True, True, False]]))
    assert actors.advantage_weighted()(who, batch)[0].item() == pytest.approx(math.log(2))


def test_projection() -> None:
    """On points 0, 1, 2: Z = {1: ¼, 2: ¾} at r = 0.5, γ = 0.5 lies at 1 and 1.5; terminated, all of it at r."""
    points = torch.tensor([0.0, 1.0, 2.0])
    chances = torch.tensor([[0.0, 0.25, 0.75]] * 3)
    found = bellman.project(chances, torch.tensor([0.5, 0.5, 9.0]), torch.tensor([0.5, 0.0, 0.5]), points)
    assert found.tolist() == [[0.0, 0.625, 0.375], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]


def test_weights() -> None:
    """exp(β·A) of what was done, bounded; the gradient is that of weighted imitation."""
    who = actor_critic(PolicySpec(head="bounded"), v=lambda _: torch.tensor([1.0, 0.0]))
    who.targets = {"q": Fixed([1.5, 100.0])}
    batch = rows()
    value, stats = actors.advantage_weighted(beta=2.0, most=20.0)(who, batch)
    assert stats["weight"].tolist() == pytest.approx([math.e, 20.0])
    torch.testing.assert_close(value, -stats["weight"] * who.logp(batch))


def test_td3_bc() -> None:
    """(π − a)² − α·Q/mean|Q|: doubling Q changes nothing."""
    who, batch = actor_critic(PolicySpec(head="bounded", std="fixed")), rows()
    parameters = list(who.policy.model.parameters())
    loss = actors.best_action(alpha=2.5)
    one = torch.autograd.grad(loss(who, batch)[0].mean(), parameters)
    first = who.networks["q"].first
    who.networks["q"].first = lambda o, a: 2 * first(o, a)
    other = torch.autograd.grad(loss(who, batch)[0].mean(), parameters)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b)
    away = (who.act(batch.observation) - batch.action).square().mean(-1)
    worth = first(batch.observation, who.act(batch.observation))
    torch.testing.assert_close(loss(who, batch)[1]["distance"], away.detach())
    expected = away - 2.5 * worth / worth.abs().mean()
    who.networks["q"].first = first
    torch.testing.assert_close(loss(who, batch)[0], expected)


def test_soft_policy_gradient() -> None:
    """Against α·log N(tanh⁻¹ a) − Σ log(1 − a²) − min Q in float64, and the temperature's own gradient."""
    who, batch = actor_critic(PolicySpec(hidden=(4,), squash=True, std="state")), rows(5)
    who.policy.model.double()
    who.policy.model.features.forward = lambda x: x  # type: ignore[method-assign]
    who.networks["q"].double()
    who.networks["temperature"].double()
    batch = rows(5, observation=batch.observation.double())
    noise = torch.randn(5, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    who.noise = lambda *_: noise  # type: ignore[method-assign]
    value = soft.soft_policy()(who, batch)[0].mean()
    moved = [*who.policy.model.parameters(), who.networks["temperature"].log]
    found = torch.autograd.grad(value, moved)

    out = who.policy.model(batch.observation)
    mean, log_std = out[:, :1], out[:, 1:].clamp(-20, 2)
    u = mean + log_std.exp() * noise
    action = torch.tanh(u)
    normal = torch.distributions.Normal(mean, log_std.exp()).log_prob(u)
    logp = (normal - torch.log(1 - action**2)).sum(-1)
    worth = torch.minimum(*who.networks["q"](batch.observation, action))
    reference = (who.networks["temperature"]() * logp - worth).mean()
    expected = torch.autograd.grad(reference, moved[:-1])
    for one, other in zip(found, expected, strict=False):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[-1], -(logp.detach() - 1).mean(), rtol=1e-9, atol=0)


def test_first_updates_of_a_soft_policy_may_imitate() -> None:
    """α·log π(a|s) − log π of the data in the first two updates, and the critics' word from then on."""
    who, batch = actor_critic(PolicySpec(hidden=(4,), squash=True, std="state")), rows(5)
    who.networks["temperature"] = Temperature(0.5, learned=False)
    loss, found = soft.soft_policy(imitate=2), []
    for updates in (0, 1, 2):
        who.updates = updates
        who.generator.manual_seed(0)
        found.append(loss(who, batch)[0])
    who.generator.manual_seed(0)
    action, logp = who.draw(batch.observation)
    torch.testing.assert_close(found[0], 0.5 * logp - who.logp(batch))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], 0.5 * logp - who.networks["q"].least(batch.observation, action))


# ------------------------------------------------------------------ critics of the policy's own actions


class Table(nn.Module):
    """A critic that says 1, 2, 4 of the choices 0, 1, 2, times a factor."""

    def __init__(self, factor: float = 1.0):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, observation: Tensor, action: Tensor) -> list[Tensor]:
        return [self.factor * action @ torch.tensor([1.0, 2.0, 4.0])]

    def least(self, observation: Tensor, action: Tensor) -> Tensor:
        return self(observation, action)[0]


def chooser(**networks: Any) -> ActorCritic:
    """Half of action 0 and a quarter of each other at s; of the target the same the other way round."""
    who = actor_critic(PolicySpec(), CHOICES, **networks)
    who.policy.model.forward = lambda x: torch.tensor([[2.0, 1.0, 1.0]]).log().expand(len(x), 3)  # type: ignore[method-assign]
    who.targets["policy"].model.forward = lambda x: torch.tensor([[1.0, 1.0, 2.0]]).log().expand(len(x), 3)
    return who


def test_expected_q() -> None:
    """½·1 + ¼·2 + ¼·4 = 2 by the policy and ¼·1 + ¼·2 + ½·4 = 2.75 by its target, of Q′; then r = 1 and γ = ½."""
    who = chooser(q=Table(1.0))
    who.targets["q"] = Table(1.0)
    batch = rows(1, action=torch.tensor([1]))
    value, stats = bellman.expected_q()(who, batch)
    assert stats["target"].tolist() == [1 + 0.5 * 2.0]
    assert value.tolist() == [(2.0 - 2.0) ** 2]
    assert bellman.expected_q(follow="target")(who, batch)[1]["target"].tolist() == [1 + 0.5 * 2.75]
    masked = rows(1, action=torch.tensor([1]), next_legal=torch.tensor([[False, True, True]]))
    assert bellman.expected_q()(who, masked)[1]["target"].tolist() == [1 + 0.5 * 3.0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"form": "exp", "beta": 2.0, "most": 1.2}, [math.exp(-0.5), 1.0, 1.2]),
        ({"form": "exp", "beta": 1.0, "most": 20.0, "over": "max"}, [math.exp(-3), math.exp(-2), 1.0]),
        ({"form": "binary"}, [0.0, 0.0, 1.0]),
        (
            {"form": "softmax", "beta": 1.0},
            [3 * math.exp(x) / (math.exp(-1) + 1 + math.exp(2)) for x in (-1.0, 0.0, 2.0)],
        ),
    ],
)
def test_critic_weighted(settings: dict[str, Any], expected: list[float]) -> None:
    """Values 1, 2, 4 of what was done, less the policy's mean of 2 or the largest, 4."""
    who = chooser(q=Table())
    batch = rows(3, action=torch.tensor([0, 1, 2]))
    value, stats = actors.critic_weighted(**settings)(who, batch)
    assert stats["weight"].tolist() == pytest.approx(expected)
    logp = torch.tensor([0.5, 0.25, 0.25]).log()
    torch.testing.assert_close(value, -torch.tensor(expected) * logp)


def test_what_is_best_is_legal() -> None:
    """Without the third choice the largest of the values is 2."""
    who = chooser(q=Table())
    legal = torch.tensor([[True, True, False]])
    batch = rows(1, action=torch.tensor([1]), legal=legal)
    assert actors.critic_weighted(over="max")(who, batch)[1]["advantage"].tolist() == [0.0]


def test_several_choices_are_drawn() -> None:
    """Two choices side by side, of which the first is all but certainly 1: their mean value by draws is near it."""
    who = actor_critic(PolicySpec(), MultiDiscrete((2, 3)))
    who.policy.model.forward = lambda x: torch.tensor([[-9.0, 9.0, 0.0, 0.0, 0.0]]).expand(len(x), 5)  # type: ignore[method-assign]

    class Second(nn.Module):
        def least(self, observation: Tensor, action: Tensor) -> Tensor:
            assert action.sum(-1).eq(2).all()  # one-hot twice
            return 10 * action[:, 1] + action[:, 2:] @ torch.tensor([0.0, 1.0, 2.0])

    found = who.worth(Second(), torch.zeros(4, 2), 2000)
    assert found.shape == (4,)
    assert ((found - 11).abs() < 0.1).all()


def test_conservative_gap() -> None:
    """With Q the same everywhere, log ∫ exp Q da − Q is log 2: the size of the space from −1 to 1."""

    class Flat(nn.Module):
        def forward(self, observation: Tensor, action: Tensor) -> list[Tensor]:
            return [torch.full((len(action),), 3.0, dtype=torch.float64)] * 2

    who = actor_critic(PolicySpec(squash=True, std="state"), q=Flat())
    who.targets = {"q": Fixed([3.0] * 64, [3.0] * 64)}
    batch = rows(64, reward=torch.full((64,), 3.0), discount=torch.zeros(64))
    value, stats = soft.conservative_q(weight=2.0, samples=50)(who, batch)
    every = math.log(3 * 50)  # the estimate is a sum, not a mean: log of the number of samples too
    assert stats["conservative_gap"].mean().item() / 2 == pytest.approx(math.log(2) + every, abs=0.05)
    torch.testing.assert_close(value, 2.0 * stats["conservative_gap"])


class Level(nn.Module):
    """Two critics that say one number each, everywhere."""

    def __init__(self, *values: float):
        super().__init__()
        self.said = nn.ParameterList(torch.tensor(v, dtype=torch.float64) for v in values)

    def forward(self, observation: Tensor, action: Tensor) -> list[Tensor]:
        return [value.expand(len(action)) for value in self.said]


def test_conservative_multiplier() -> None:
    """With η = 2, w = 0.5 and threshold 1, log η feels −η·w·(mean gap of the critics − 1)."""
    who = actor_critic(
        PolicySpec(squash=True, std="state"), q=Level(3.0, 1.0), multiplier=Temperature(2.0).double()
    )
    who.targets = {"q": Level(3.0, 1.0)}
    who.targets["q"].least = lambda o, a: torch.zeros(len(a))  # type: ignore[union-attr]
    batch = rows(16, discount=torch.zeros(16), reward=torch.full((16,), 3.0))
    moved = [*who.networks["q"].parameters(), who.networks["multiplier"].log]
    value, stats = soft.conservative_q(weight=0.5, samples=4, threshold=1.0)(who, batch)
    found = torch.autograd.grad(value.mean(), moved)
    total = stats[
        "conservative_gap"
    ].mean()  # both critics' gaps: a level everywhere has no gradient in the gap
    torch.testing.assert_close(found[0], torch.tensor(0.0, dtype=torch.float64))  # Q_1 is right: (3 − 3)²
    torch.testing.assert_close(
        found[1], torch.tensor(-4.0, dtype=torch.float64)
    )  # Q_2 is 2 too low: 2·(1 − 3)
    torch.testing.assert_close(found[2], -2.0 * 0.5 * (total / 2 - 1.0))
    assert stats["multiplier"].item() == pytest.approx(2.0)


def test_a_gap_at_its_threshold_moves_nothing_but_the_critics() -> None:
    """Just so large, the constraint leaves η alone, and the critics' gradient is CQL's with weight η·w."""
    spec = PolicySpec(hidden=(4,), squash=True, std="state")
    who, batch = actor_critic(spec, multiplier=Temperature(3.0)), rows(8)
    weights = list(who.networks["q"].parameters())

    def gradients(**settings: float) -> list[Tensor]:
        who.generator.manual_seed(0)
        value = soft.conservative_q(samples=4, **settings)(who, batch)[0].mean()
        return list(torch.autograd.grad(value, weights))

    fixed, learned = gradients(weight=6.0), gradients(weight=2.0, threshold=5.0)
    for one, other in zip(fixed, learned, strict=True):
        torch.testing.assert_close(one, other)
    who.generator.manual_seed(0)
    _, stats = soft.conservative_q(samples=4)(who, batch)
    level = stats["conservative_gap"].mean().item() / 2
    who.generator.manual_seed(0)
    value = soft.conservative_q(weight=1.0, samples=4, threshold=level)(who, batch)[0].mean()
    (still,) = torch.autograd.grad(value, [who.networks["multiplier"].log])
    assert abs(still.item()) < 1e-4
