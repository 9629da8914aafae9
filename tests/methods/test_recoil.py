"""ReCOIL: its loss by hand, the gradient in float64, what is drawn, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from actor_critics import Fixed, actor_critic, rows

import panoply as pp
from panoply.methods.generative_offline.recoil import recoil_q
from panoply.policies.control import PolicySpec
from panoply.policies.heads import head_for
from panoply.replay import Replay
from panoply.worlds.control.pendulum import Pendulum
from panoply.worlds.control.world import Box
from panoply.worlds.logged.behaviour import behave


def test_by_hand() -> None:
    """Bound 10, cost 1. Expert: target 0.5·4 − 1 = 1; Q = 2: ½(8² + 1²). After an end, −10; Q = −7: ½·3²."""
    who = actor_critic(
        PolicySpec(), v=lambda seen: torch.tensor([0.0, 0.0, 4.0, 99.0])[-len(seen) :], q=Fixed([2.0, -7.0])
    )
    batch = rows(2, more={"expert": torch.tensor([True, False])}, reward=torch.tensor([50.0, 50.0]))
    value, stats = recoil_q(bound=10.0, cost=1.0)(who, batch)
    assert value.tolist() == [32.5, 4.5]
    assert stats["target"].tolist() == [1.0, -10.0]


def test_gradient() -> None:
    """Q − bound on the expert's rows and Q − target on all, of both critics; nothing reaches V."""
    said = [torch.randn(6, dtype=torch.float64) for _ in range(2)]
    who = actor_critic(PolicySpec(), q=Fixed(*(s.tolist() for s in said)))
    expert, discount = torch.arange(6) % 3 == 0, torch.tensor([0.9] * 5 + [0.0])
    batch = rows(6, more={"expert": expert}, discount=discount)
    value = recoil_q(bound=20.0, cost=1.0)(who, batch)[0]
    found = torch.autograd.grad(value.sum(), list(who.networks["q"].parameters()))
    v = who.networks["v"](batch.next_observation).detach()
    for gradient, q in zip(found, said, strict=True):
        slopes = []
        for i in range(6):
            target = 0.9 * v[i].item() - 1.0 if i < 5 else -20.0
            slopes.append((q[i].item() - 20.0) * expert[i].item() + q[i].item() - target)
        torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_one_demonstration() -> None:
    """200 steps of the expert's, marked, and then random ones that go no less long than asked for."""
    data = behave(Pendulum(), "demonstrated", 1000, 0)
    shown = data.columns["expert"]
    assert len(data) == 1200
    assert shown.sum() == 200
    assert shown[:200].all()
    assert data.returns[0] > data.returns[1:].max()
    experience = data.experience()
    assert experience["expert"].tolist() == shown.tolist()
    assert len(np.unique(data.columns["episode"])) == 6


def test_half_of_a_batch() -> None:
    """The first half is the expert's, the others are drawn from all."""
    sees, acts = Box((3,)), Box((1,), (-2.0,), (2.0,))
    data = behave(Pendulum(), "demonstrated", 1800, 0).experience()
    replay = Replay(sees, acts, head_for(acts), size=len(data), gamma=0.9)
    replay.fill(data)
    drawn = replay.draw(4000, torch.Generator().manual_seed(0))
    assert 300 < drawn["expert"].sum() < 500  # a tenth
    replay.experts = 0.5
    drawn = replay.draw(4000, torch.Generator().manual_seed(0))
    assert drawn["expert"][:2000].all()
    assert 130 < drawn["expert"][2000:].sum() < 270


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"method": "recoil", "world": "logged:pendulum-mixed"}, "'demonstrations'"),
        (
            {"method": "iql", "world": "logged:pendulum-mixed", "settings": {"replay.experts": 0.5}},
            "'demonstrations'",
        ),
        ({"method": "recoil", "settings": {"replay.n_step": 3}}, "replay.n_step is 1"),
        ({"method": "recoil", "sample": "explore"}, "own experience has no demonstrations"),
    ],
)
def test_refused(choices: dict[str, Any], says: str) -> None:
    with pytest.raises(pp.PanoplyError, match=says):
        pp.plan(**choices)
