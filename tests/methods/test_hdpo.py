"""HDPO: its loss by hand, its gradient against scalar dynamics, and that it plays the same episodes again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from kit import hand
from torch import Tensor

import panoply as pp
from panoply.batch import Batch
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.loops.learner import Learner
from panoply.methods.control.hdpo import hindsight, traces
from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.policies.unrolled import Unrolled
from panoply.progress import Progress
from panoply.rollout.control import ControlCollector
from panoply.worlds.control.inventory import Inventory

WORLD = Inventory(lead=2, horizon=6)
SPEC = PolicySpec(hidden=(4,), activation="elu", head="certain")


def setting(world: Inventory = WORLD, batch: int = 5) -> tuple[ControlPolicy, Experience]:
    """A policy that orders about as much as is asked for, and what it plays."""
    policy = ControlPolicy.fresh(world.observation, world.action, SPEC, seed=3)
    with torch.no_grad():
        for _, weight in policy.named_parameters():
            weight.normal_(generator=torch.Generator().manual_seed(weight.numel())).mul_(0.3)
        policy.model.layers.layers[-1].bias.add_(4)  # type: ignore[operator]
    return policy, traces(batch=batch)(ControlCollector(world, policy, seed=0))


def learner(policy: ControlPolicy, world: Inventory = WORLD, micro_tokens: int = 1000) -> Learner:
    method = pp.plan("hdpo", "inventory").method
    return Learner(Unrolled(policy, world), method, total_steps=1, micro_tokens=micro_tokens)


def test_loss_by_hand() -> None:
    """Mean cost a step of an episode; the first steps left out where asked."""
    made = hand(episode=[7, 7, 9], turn=[0, 1, 0], context=[0, 1, 2])
    batch = Batch(made, {"earns": torch.tensor([-2.0, -4.0, -6.0])})
    assert hindsight()(batch)[0].tolist() == [3.0, 6.0]
    assert hindsight(ignore=1)(batch)[0].tolist() == [4.0, 0.0]


@pytest.mark.parametrize(
    "world",
    [
        WORLD,
        Inventory(lead=1, lost=False, horizon=6),
        Inventory(stores=3, warehouse=True, correlation=0.5, horizon=6),
        Inventory(stores=3, warehouse=True, allocation="softmax", echelons=2, horizon=6),
    ],
    ids=["lost", "waits", "warehouse", "softmax"],
)
def test_hindsight_is_what_was_seen(world: Inventory) -> None:
    """At the weights that played, the unrolled rewards are those that were recorded; in any order of rows."""
    policy, played = setting(world)
    shuffled = played.take(torch.randperm(len(played), generator=torch.Generator().manual_seed(0)))
    for made in (played, shuffled):
        earns = Unrolled(policy, world).score(made)["earns"]
        torch.testing.assert_close(earns, made["signal:reward"], rtol=1e-4, atol=1e-3)


def slow_cost(policy: ControlPolicy, seeds: list[int], parameters: list[Tensor]) -> Tensor:
    """Scalars in float64, straight from the equations of one store with lost demand."""
    w1, b1, w2, b2 = parameters
    total = torch.zeros((), dtype=torch.float64)
    for seed in seeds:
        demand = WORLD.demands(torch.tensor([seed]).numpy(), 6)[0, :, 0].tolist()
        on_hand, coming = (torch.tensor(5.0, dtype=torch.float64) for _ in range(2))
        for asked in demand:
            hidden = torch.nn.functional.elu(w1 @ torch.stack([on_hand, coming]) + b1)
            order = torch.log1p((w2[0] @ hidden + b2[0] + 1).exp())
            if on_hand >= asked:
                total = total + 1.0 * (on_hand - asked)
                on_hand = on_hand - asked
            else:
                total = total + 9.0 * (asked - on_hand)
                on_hand = torch.zeros((), dtype=torch.float64)
            on_hand, coming = on_hand + coming, order
    return total / (6 * len(seeds))


def test_gradient() -> None:
    policy, played = setting()
    found = learner(policy).gradient(played)
    wide = [p.detach().double().requires_grad_() for _, p in policy.named_parameters()]
    seeds = played.by("episode").first(played["trace"]).tolist()
    wanted = torch.autograd.grad(slow_cost(policy, seeds, wide), wide)
    for (name, _), reference in zip(policy.named_parameters(), wanted, strict=True):
        scale = float(reference.abs().max())
        assert scale > 0
        torch.testing.assert_close(found[name].double() / scale, reference / scale, rtol=0, atol=2e-5)


def test_any_split_and_order_gives_the_same_gradient() -> None:
    policy, played = setting()
    whole = learner(policy).gradient(played)
    shuffled = played.take(torch.randperm(len(played), generator=torch.Generator().manual_seed(1)))
    for made, tokens in ((played, 6), (shuffled, 1000), (shuffled, 13)):
        other = learner(policy, micro_tokens=tokens).gradient(made)
        for name, gradient in whole.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-5)


def test_a_pool_of_traces_comes_again() -> None:
    policy, _ = setting()
    collect = ControlCollector(WORLD, policy, seed=0)
    played = [traces(batch=2, pool=3)(collect) for _ in range(2)]
    first, second = (made.by("episode").first(made["trace"]).tolist() for made in played)
    assert second[1] == first[0]
    assert second[0] not in first
    endless = traces(batch=4)(ControlCollector(WORLD, policy, seed=0))
    assert len(set(endless["trace"].tolist())) == 4


def test_the_certain_action() -> None:
    """softplus(out + 1) of orders, which are not negative: log(1 + e) ≈ 1.3133 at 0; cut at the most."""
    policy, _ = setting()
    out = torch.tensor([[0.0], [3.0], [90.0]])
    assert policy.head.action(out)[0, 0].item() == pytest.approx(math.log(1 + math.e))  # type: ignore[operator]
    drawn = policy.head.act(out.numpy(), out.numpy(), None, 0.0)
    assert drawn.acted[:, 0].tolist() == pytest.approx([1.31326, 4.01815, 40.0], rel=1e-5)


def test_refused() -> None:
    with pytest.raises(PanoplyError, match="needs a world with 'differentiable', and pendulum@1 has none"):
        pp.plan("hdpo", "pendulum")
    with pytest.raises(PanoplyError, match="policy.head cannot be distribution"):
        pp.plan("hdpo", "inventory", settings={"policy.head": "distribution"})
    with pytest.raises(PanoplyError, match="policy.head cannot be certain"):
        pp.plan("ppo", "inventory", settings={"policy.head": "certain"})
    policy, played = setting()
    with pytest.raises(PanoplyError, match="has no log-probabilities to learn by"):
        policy.score(played)


@pytest.mark.learn
def test_it_comes_near_the_best_rule(tmp_path: Path) -> None:
    """Within 2 % of the best capped base-stock rule on the same starts."""
    from panoply.methods.control.hdpo import best_known

    done = pp.train("hdpo", "inventory", run=tmp_path / "run", threads=1, progress=Progress())
    assert done.after["greedy"] > 1.02 * best_known(Inventory(), 200)
