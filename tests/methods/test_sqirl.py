"""SQIRL: its loss by hand and its gradient, what it explores, what it learns from, and what it comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import panoply as pp
from panoply.errors import PanoplyError
from panoply.evaluation.effective_horizon import fitted
from panoply.experience import Experience
from panoply.loops.actor_critic import ActorCriticLearner
from panoply.methods.control.sqirl import climbing_q, random_suffixes
from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.progress import Progress
from panoply.regimes import Offline
from panoply.rollout.control import ControlCollector
from panoply.seeds import torch_rng
from panoply.transitions import Transitions
from panoply.worlds.control.tabular import Tabular

WORLD = Tabular(variant="riverswim", size=4, horizon=6)


def policy_for(world: Tabular = WORLD, hidden: tuple[int, ...] = ()) -> ControlPolicy:
    spec = PolicySpec(hidden=hidden, head="values", atoms=1, stages=world.horizon or 0)
    return ControlPolicy.fresh(world.observation, world.action, spec)


def learner(policy: ControlPolicy, steps: int = 1, **settings: Any) -> ActorCriticLearner:
    method = pp.plan("sqirl", "tabular", settings=settings).method
    assert isinstance(method, Offline)
    return ActorCriticLearner(policy, method, seed=0, total_steps=steps)


def fill(filled: ActorCriticLearner, experience: Experience) -> ActorCriticLearner:
    list(filled.minibatches(experience, torch_rng("test")))
    return filled


# ------------------------------------------------------------------ the loss


ROWS = Transitions(
    observation=torch.tensor([0, 1]),
    action=torch.tensor([1, 0]),
    reward=torch.tensor([0.5, 2.0]),
    discount=torch.tensor([0.9, 0.9]),
    next_observation=torch.tensor([1, 1]),
    more={"return": torch.tensor([3.0, 2.0]), "going": torch.tensor([1.0, 0.0])},
)


def tables(filled: ActorCriticLearner, *weights: list[list[float]]) -> None:
    """Values of each state and action, of Q¹, Q², … and last the policy's."""
    nets = [*(n.net for n in filled.learned.networks["rungs"].nets), filled.policy.model.layers]
    with torch.no_grad():
        for net, weight in zip(nets, weights, strict=True):
            net.layers[0].weight.copy_(torch.tensor(weight).T)


def small(count: int) -> ActorCriticLearner:
    world = Tabular(variant="corridor", size=2, horizon=3)
    return learner(policy_for(world), **{"networks.rungs.count": count})


def test_loss_by_hand() -> None:
    """k = 1: returns alone. k = 2: Q¹ against returns, and the policy against r + 0.9·max Q¹(s′), or r at the end.

    Q¹: 1 − 3 and 4 − 2. The policy: 2 − (0.5 + 0.9·5), and 1 − 2.
    """
    one = small(0)
    tables(one, [[0.0, 1.0], [4.0, 5.0]])
    assert climbing_q()(one.learned, ROWS)[0].tolist() == [4.0, 4.0]
    two = small(1)
    tables(two, [[0.0, 1.0], [4.0, 5.0]], [[0.0, 2.0], [1.0, 9.0]])
    assert climbing_q()(two.learned, ROWS)[0].tolist() == pytest.approx([(4 + 9) / 2, (4 + 1) / 2])


def test_gradient() -> None:
    """Against float64: only the value of what was done moves, and no target does."""
    made = small(1)
    tables(made, [[0.3, 1.7], [4.2, 5.1]], [[0.4, 2.2], [1.3, 0.9]])
    named = made.descents[0].named
    found = torch.autograd.grad(climbing_q()(made.learned, ROWS)[0].mean(), list(named.values()))
    by_name = dict(zip(named, found, strict=True))
    q1, q2 = (torch.tensor(t, dtype=torch.float64, requires_grad=True) for t in (
        [[0.3, 1.7], [4.2, 5.1]], [[0.4, 2.2], [1.3, 0.9]]
    ))  # fmt: skip
    ahead = 0.5 + 0.9 * q1[1].max().detach()
    slow = (q1[0, 1] - 3) ** 2 + (q2[0, 1] - ahead) ** 2 + (q1[1, 0] - 2) ** 2 + (q2[1, 0] - 2) ** 2
    (slow / 4).backward()
    for name, reference in (("rungs.nets.0.net.layers.0.weight", q1), ("policy.layers.layers.0.weight", q2)):
        assert reference.grad is not None
        torch.testing.assert_close(by_name[name].double(), reference.grad.T, rtol=1e-6, atol=1e-7)


# ------------------------------------------------------------------ data


def played_at(t: int, batch: int = 40) -> tuple[ControlPolicy, Experience]:
    policy = policy_for()
    collect = ControlCollector(WORLD, policy, seed=0)
    for turn in range(t):  # as a run would: the greedy action of turn 0 is 1, of turn 1 is 0, …
        collect.version = turn
        random_suffixes(batch=1)(collect)
        with torch.no_grad():
            policy.model.layers.layers[0].bias.copy_(torch.tensor([float(turn % 2), 0.5]))  # type: ignore[operator]
    collect.version = t
    return policy, random_suffixes(batch=batch)(collect)


def test_greedy_before_t_and_random_from_then_on() -> None:
    _, made = played_at(3, batch=400)
    turn, action = made["turn"], made["action"]
    for before, best in enumerate((1, 0, 1)):
        assert (action[turn == before] == best).all()
    later = action[turn >= 3].double()
    assert float(later.mean()) == pytest.approx(0.5, abs=0.05)
    assert torch.equal(made["train"], turn >= 3)


def test_nothing_before_t_is_learned_from() -> None:
    policy, made = played_at(2)
    filled = fill(learner(policy), made)
    assert len(filled.replay) == int((made["turn"] >= 2).sum()) == 40 * 4
    seen = made.looked_up("observation")[made["turn"] >= 2]
    assert torch.equal(filled.replay.held.rows(torch.arange(160)).observation, seen)


def test_returns_end_with_the_episode() -> None:
    policy, made = played_at(4, batch=3)
    rows = fill(learner(policy), made).replay.held.rows(torch.arange(6))
    assert rows["going"].tolist() == [1, 0] * 3
    rewards = made["reward"][made["turn"] >= 4].view(3, 2)
    torch.testing.assert_close(rows["return"].view(3, 2), torch.stack([rewards.sum(1), rewards[:, 1]], 1))


def test_a_table_comes_to_the_exact_regression() -> None:
    """Trained on all rows until nothing moves, the policy's table is what `fitted` computes."""
    policy, made = played_at(1, batch=60)
    rate = {"update.lr": 0.1, "update.schedule": "linear", "networks.rungs.count": 1, "replay.batch": 4000}
    filled = fill(learner(policy, 20, **rate), made)
    rows = filled.replay.held.rows(torch.arange(len(filled.replay)))
    filled.replay.draw = lambda count, generator: rows  # type: ignore[method-assign]
    for step in range(20):
        filled.begin(step, torch_rng("test"))
        filled.learn(60)
    steps = {"state": rows.observation, "action": rows.action, "reward": rows.reward}
    steps |= {"after": rows.next_observation, "going": rows["going"], "return": rows["return"]}
    exact = fitted({name: column.numpy() for name, column in steps.items()}, 4, 2, k=2)
    with torch.no_grad():
        values = policy.model(torch.arange(4)).numpy()
    tried = np.zeros((4, 2), bool)
    tried[rows.observation, rows.action] = True
    np.testing.assert_allclose(values[tried], exact[tried], atol=2e-3)


# ------------------------------------------------------------------ runs


def test_it_finds_its_way(tmp_path: Path) -> None:
    """Five steps right in five turns: nobody else in a random batch does so, and after five steps everyone."""
    settings = {"world.variant": "corridor", "world.size": 5, "world.horizon": 5, "data.batch": 128}
    settings |= {"run.evaluate_every": 0, "replay.updates": 100}
    done = pp.train(
        "sqirl", "tabular", run=tmp_path / "run", threads=1, settings=settings, progress=Progress()
    )
    assert done.before["greedy"] == 0.0
    assert done.after["greedy"] == 1.0


def test_a_run_has_a_step_for_every_turn() -> None:
    assert pp.plan("sqirl", "tabular", settings={"world.horizon": 7}).options.steps == 7
    assert pp.plan("sqirl", "tabular", steps=3).options.steps == 3
    assert pp.plan("sqirl", "tabular", settings={"run.steps": 4}).options.steps == 4


def test_refused() -> None:
    with pytest.raises(PanoplyError, match="discrete actions"):
        pp.plan("sqirl", "pendulum")
    with pytest.raises(PanoplyError, match="'time limit'"):
        pp.plan("sqirl", "tabular", settings={"world.horizon": None})
    with pytest.raises(PanoplyError, match="policy.stages cannot be 3"):
        pp.plan("sqirl", "tabular", settings={"policy.stages": 3})
    with pytest.raises(PanoplyError, match="replay.n_step is 3"):
        pp.plan("sqirl", "tabular", settings={"replay.n_step": 3})
