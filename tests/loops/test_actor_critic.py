"""Agents: what moves in an update, how targets follow, and which worlds and policies a method refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import panoply as pp
from panoply.loops.actor_critic import ActorCriticLearner
from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.progress import Progress
from panoply.regimes import OffPolicy
from panoply.run import Run
from panoply.slots.loss.imitation import nll
from panoply.slots.targets.following import polyak
from panoply.worlds.control.world import Box


def learner(name: str, **spec: object) -> ActorCriticLearner:
    method = pp.plan(name, "pendulum", settings={"replay.batch": 8}).method
    assert isinstance(method, OffPolicy)
    policy = ControlPolicy.fresh(Box((3,)), Box((1,), (-2.0,), (2.0,)), PolicySpec(hidden=(4,), **spec))  # type: ignore[arg-type]
    made = ActorCriticLearner(policy, method, seed=0, total_steps=1)
    made.replay.held.written = 8
    for column in made.replay.held._columns.values():
        if column.is_floating_point():
            column[:8].normal_(generator=torch.Generator().manual_seed(1))
    made.begin(0, torch.Generator().manual_seed(2))
    return made


def test_polyak() -> None:
    """0 goes a quarter of the way to 8 in every second update."""
    target, source = [torch.zeros(2)], [torch.full((2,), 8.0)]
    follow = polyak(tau=0.25, every=2)
    seen = []
    for update in range(1, 5):
        follow(update, {"q": (target, source)})
        seen.append(target[0][0].item())
    assert seen == [0.0, 2.0, 2.0, 3.5]


def test_delay() -> None:
    """TD3's policy moves in every second update, and the targets right after it; its critics move in each."""
    made = learner("td3", head="bounded", std="fixed")
    policy, critic = made.policy.model.layers.layers[0].weight, made.models["q"].nets[0].layers[0].weight
    target = made.targets["q"].nets[0].layers[0].weight
    moved = []
    for _ in range(4):
        before = [w.detach().clone() for w in (policy, critic, target)]
        made.learn()
        moved.append([not torch.equal(a, b) for a, b in zip(before, (policy, critic, target), strict=True)])
    assert moved == [[False, True, False], [True, True, True]] * 2


def test_what_moves_seldom_is_noted_too() -> None:
    """Of one update in 25 each loss is noted, that of a delayed policy in the first in which it moves."""
    made = learner("td3", head="bounded", std="fixed")
    made.learn(2)
    assert {"smooth_q", "best_action"} <= made.metrics().keys()
    made.learn(52)
    assert [len([n for n in made._noted if name in n]) for name in ("smooth_q", "best_action")] == [3, 3]


def test_gradients_are_clipped_together() -> None:
    """Of a gradient of norm n all parameters get 0.01/n of theirs; without a clip they get all of it."""
    steps = {}
    for clip in (0.0, 0.01):
        made = learner("td3", head="bounded", std="fixed")
        descent = made.descents[0]
        descent.mover.limit = clip
        rows = made.replay.draw(8, torch.Generator().manual_seed(0))
        descent.step(made.learned, rows)
        steps[clip] = torch.cat([p.grad.flatten() for p in descent.parameters if p.grad is not None])
    assert steps[0.0].norm() > 0.1
    assert steps[0.01].norm().item() == pytest.approx(0.01, rel=1e-4)
    torch.testing.assert_close(steps[0.01] * (steps[0.0].norm() / 0.01), steps[0.0], rtol=1e-4, atol=1e-6)


def test_updates_are_counted_for_losses() -> None:
    """A loss knows how many updates came before it."""
    made = learner("sac", squash=True, std="state")
    seen: list[int] = []
    step = made.descents[1].step
    made.descents[1].step = lambda who, rows: (seen.append(who.updates), step(who, rows))[1]  # type: ignore[method-assign]
    made.learn(3)
    assert seen == [0, 1, 2]


def test_losses_move_their_own() -> None:
    """The policy's loss runs through the critics and leaves no gradient there."""
    made = learner("sac", squash=True, std="state")
    made.learn()
    q, actor = made.descents
    assert {name.split(".")[0] for name in q.named} == {"q"}
    assert {name.split(".")[0] for name in actor.named} == {"policy", "temperature"}
    rows = made.replay.draw(8, made.learned.generator)
    kept = [p.grad.clone() for p in q.parameters if p.grad is not None]
    actor.step(made.learned, rows)
    assert all(torch.equal(a, p.grad) for a, p in zip(kept, q.parameters, strict=True) if p.grad is not None)
    assert all(p.requires_grad for model in made.models.values() for p in model.parameters())


def test_targets_see_what_the_policy_sees() -> None:
    """Normalisation that is learned after the targets were made is theirs too: copies of one weight agree."""
    made = learner("td3", head="bounded", std="fixed", normalise=True)
    seen = 5 + 3 * torch.randn(64, 3)
    made.policy.model.features.learn(seen)
    action, targets = torch.zeros(64, 1), made.learned.targets
    assert torch.equal(targets["policy"].model(seen), made.policy.model(seen))
    for one, other in zip(targets["q"](seen, action), made.learned.networks["q"](seen, action), strict=True):
        assert torch.equal(one, other)
    assert made.policy.copy().model.features is not made.policy.model.features


@pytest.mark.parametrize(
    ("method", "world", "says"),
    [
        ("sac", "cartpole", "continuous actions"),
        ("dqn", "pendulum", "discrete actions"),
        ("iql", "pendulum", "'data'"),
        ("sac", "chain", "'control'"),
    ],
)
def test_refused(method: str, world: str, says: str) -> None:
    with pytest.raises(pp.PanoplyError, match=says):
        pp.plan(method, world)


def test_wrong_parts() -> None:
    with pytest.raises(pp.PanoplyError, match="policy.squash cannot be False"):
        pp.plan("sac", "pendulum", settings={"policy.squash": False})
    with pytest.raises(pp.PanoplyError, match="step"):
        pp.plan("sac", "pendulum", sample="groups")
    with pytest.raises(pp.PanoplyError, match="losses on transitions"):
        pp.plan("sac", "pendulum").method.but(losses=nll())


def test_chunks_are_for_losses_that_look_at_them(tmp_path: Path) -> None:
    """Refused where they do nothing, asked for where they are needed, and learned from."""
    with pytest.raises(pp.PanoplyError, match=r"replay.chunk has no effect: no loss of this method looks"):
        pp.plan("dqn", "cartpole", settings={"replay.chunk": 4})
    with pytest.raises(pp.PanoplyError, match=r"replay.chunk cannot be 1: a loss of this method looks"):
        pp.plan("dqn", "cartpole", settings={"losses": "watkins_q"})
    settings = {
        "losses": "watkins_q",
        "replay.chunk": 4,
        "replay.warmup": 8,
        "replay.every": 4,
        "sample.length": 32,
    }
    small = {"policy.hidden": (8,), "run.steps": 2, "run.held_out": 2}
    done = pp.train(
        "dqn", "cartpole", run=tmp_path / "run", threads=1, settings=settings | small, progress=Progress()
    )
    assert all(row["loss"] >= 0 for row in Run.open(done.run).metrics())
    assert done.fingerprint != ""


def test_a_loss_may_have_a_schedule_of_its_own() -> None:
    """IQL's policy slows down along a cosine from the common rate, which a setting still moves; its critics do not."""
    method = pp.plan("iql", settings={"update.lr": 0.01}).method
    made = ActorCriticLearner(
        ControlPolicy.fresh(Box((3,)), Box((1,), (-2.0,), (2.0,)), PolicySpec(hidden=(4,))),
        method,
        seed=0,
        total_steps=10,
    )  # type: ignore[arg-type]
    made.begin(5, torch.Generator())
    rates = {d.loss.info.name: d.mover.rate for d in made.descents}
    assert rates == {"expectile_v": 0.01, "q_of_v": 0.01, "advantage_weighted": pytest.approx(0.005)}
