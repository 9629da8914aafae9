"""Momentum by hand; what transport makes of linear gradients; Hessian products against finite differences of J."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import panoply as pp
from panoply.costs import cost
from panoply.errors import PanoplyError
from panoply.experience import Segments
from panoply.loops.mover import Diverged
from panoply.loops.on_policy import learn
from panoply.methods.control.n_pg_igt import exact_gradient
from panoply.policies.build import open_folder
from panoply.progress import Progress
from panoply.rollout.control import ControlCollector
from panoply.slots.update.momentum import Momentum, hessian_product
from panoply.worlds.control.mdp import softmax
from panoply.worlds.control.tabular import Tabular

CURVE = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
TARGET = torch.tensor([0.5, -1.0], dtype=torch.float64)


def made(
    correction: str, lr: float = 0.1, eta: float = 0.25, **more: float
) -> tuple[torch.nn.Parameter, Momentum]:
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    settings = {"normalise": True, "cap": 50.0, **more}
    return weight, Momentum([weight], lr=lr, eta=eta, correction=correction, **settings)


def slope(at: Tensor) -> Tensor:
    return CURVE @ (at.detach() - TARGET)


class Curved:
    """One decision with credit −1, whose log π has no slope where it is looked at and the quadratic's curvature."""

    def __init__(self, weight: torch.nn.Parameter):
        self.leaves: list[Tensor] = [weight]

    def aside(self) -> tuple[Tensor, Tensor, Tensor]:
        (weight,) = self.leaves
        off = weight - weight.detach()
        return (0.5 * off @ CURVE @ off)[None], torch.tensor([-1.0]).double(), torch.tensor([4])


def test_by_hand() -> None:
    """d₀ = (3, 4), of length 5; d₁ = ¾·d₀ + ¼·(−5, 4) = (1, 4), without normalisation."""
    weight, plain = made("none")
    weight.grad = torch.tensor([3.0, 4.0]).double()
    plain.step()
    assert weight.tolist() == pytest.approx([-0.06, -0.08])
    plain.param_groups[0]["normalise"] = False
    weight.grad = torch.tensor([-5.0, 4.0]).double()
    plain.step()
    assert weight.tolist() == pytest.approx([-0.16, -0.48])


def test_extrapolated_gradients_average_to_the_present_one_where_they_are_linear() -> None:
    off = {}
    for correction in ("none", "extrapolate"):
        weight, update = made(correction)
        for _ in range(6):
            assert list(update.visits(torch.Generator())) == [False]
            weight.grad = slope(weight)
            update.step()
        state = update.state[weight]
        off[correction] = float((state["direction"] - slope(state["previous"])).norm())
    assert off["extrapolate"] < 1e-12
    assert off["none"] > 0.05


def test_it_looks_ahead_so_many_times_the_last_step_and_comes_back() -> None:
    """(1 − ¼)/¼ = 3 times the last step of (−0.06, −0.08); at most `cap` times."""
    for cap, factor in ((50.0, 3.0), (2.0, 2.0)):
        weight, update = made("extrapolate", cap=cap)
        weight.grad = torch.tensor([3.0, 4.0]).double()
        update.step()
        next(update.visits(torch.Generator()))
        assert weight.tolist() == pytest.approx([-0.06 * (1 + factor), -0.08 * (1 + factor)])
        update.settle()
        assert weight.tolist() == pytest.approx([-0.06, -0.08])


def test_curvature_keeps_the_average_true() -> None:
    """Exact Hessian products make d the gradient at θ, whatever the path, if it once was."""
    weight, update = made("hessian")
    for step in range(5):
        assert list(update.visits(torch.Generator().manual_seed(step))) == (
            [False] if step == 0 else [True, False]
        )
        weight.grad = slope(weight)
        update.step(Curved(weight) if update.looks else None)
        state = update.state[weight]
        torch.testing.assert_close(state["direction"], slope(state["previous"]))


def test_the_second_batch_is_taken_between_the_last_weights_and_these() -> None:
    weight, update = made("hessian")
    weight.grad = torch.tensor([3.0, 4.0]).double()
    update.step()
    q = float(torch.rand((), generator=torch.Generator().manual_seed(7)))
    visits = update.visits(torch.Generator().manual_seed(7))
    assert next(visits)
    assert weight.tolist() == pytest.approx([-0.06 * q, -0.08 * q])
    assert not next(visits)
    assert weight.tolist() == pytest.approx([-0.06, -0.08])


# ------------------------------------------------------------------ the Hessian of J


def test_hessian_products_are_differences_of_the_exact_gradient() -> None:
    """All trajectories of three steps in an MDP of two states, weighted by their probability."""
    mdp, gamma, horizon = Tabular("random", size=2, branching=2, seed=3).mdp, 0.9, 3
    rng = np.random.default_rng(0)
    table = torch.tensor(rng.normal(size=(2, 2)), requires_grad=True)
    states, actions, rewards, chances = trajectories(mdp.transitions, mdp.rewards, mdp.start, horizon)
    logp = table.log_softmax(-1)[states, actions]
    likely = chances * logp.sum(1).exp().detach()
    assert float(likely.sum()) == pytest.approx(1)
    discounted = rewards * gamma ** torch.arange(horizon)
    credit = discounted.flip(1).cumsum(1).flip(1)
    u = torch.tensor(rng.normal(size=4))
    episodes = Segments(torch.arange(len(states)).repeat_interleave(horizon))
    found = hessian_product(
        logp.flatten(), credit.flatten(), episodes, likely.repeat_interleave(horizon), [table], u
    )
    step = 1e-5 * u.view(2, 2).numpy()
    at = table.detach().numpy()
    ahead, behind = (mdp.gradient(at + s * step, gamma, horizon) for s in (1, -1))
    torch.testing.assert_close(
        found, torch.from_numpy((ahead - behind) / 2e-5).flatten(), rtol=1e-6, atol=1e-8
    )


def trajectories(
    transitions: np.ndarray, rewards: np.ndarray, start: np.ndarray, horizon: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States, actions and rewards of every trajectory, and how likely the world makes it."""
    found = []
    for path in itertools.product(range(2), repeat=horizon + 1):
        for acts in itertools.product(range(2), repeat=horizon):
            steps = list(zip(path, acts, path[1:], strict=False))
            chance = start[path[0]] * np.prod([transitions[step] for step in steps])
            found.append((path[:-1], acts, [rewards[step] for step in steps], chance))
    states, actions, paid, chances = zip(*found, strict=True)
    return torch.tensor(states), torch.tensor(actions), torch.tensor(paid), torch.tensor(chances)


def test_the_exact_gradient_of_table_and_offset() -> None:
    mdp = Tabular("random", size=3, horizon=10, seed=1).mdp
    at = torch.from_numpy(np.random.default_rng(0).normal(size=mdp.actions * mdp.states + mdp.actions))

    def value(weights: Tensor) -> float:
        split = mdp.actions * mdp.states
        logits = weights[:split].view(mdp.actions, mdp.states).T + weights[split:]
        return mdp.value(softmax(logits.numpy()), 0.99, 10)

    steps = 1e-5 * torch.eye(len(at)).double()
    slow = torch.tensor([(value(at + s) - value(at - s)) / 2e-5 for s in steps], dtype=torch.float64)
    torch.testing.assert_close(exact_gradient(mdp, at), slow, rtol=1e-6, atol=1e-8)


# ------------------------------------------------------------------ in a run


@pytest.mark.parametrize("preset", ["control", "harpg", "n-harpg"])
def test_a_run_samples_where_the_update_wants_it(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ahead of the weights, or between the last two; evaluated and saved are the weights that are learned."""
    seen: list[Tensor] = []
    kept: list[Tensor] = []
    collect = ControlCollector.episodes

    def spy(self, *args, **more):  # type: ignore[no-untyped-def]
        weights = torch.cat([p.detach().flatten() for _, p in self.policy.named_parameters()])
        (kept if self.split == "test" else seen).append(weights.clone())
        return collect(self, *args, **more)

    monkeypatch.setattr(ControlCollector, "episodes", spy)
    pp.train(
        "n-pg-igt",
        "cartpole",
        preset=preset,
        run=tmp_path / "run",
        steps=4,
        threads=1,
        held_out=1,
        settings={"run.evaluate_every": 1, "sample.prompts": 2},
        progress=Progress(),
    )
    learned = kept[::2]  # greedy and sampled, before the first step and after each
    if preset == "control":
        for t in (1, 2, 3):
            eta = (2 / (t + 2)) ** 0.8
            ahead = learned[t] + (1 - eta) / eta * (learned[t] - learned[t - 1])
            torch.testing.assert_close(seen[t], ahead)
        return
    assert len(seen) == 7
    for t in (1, 2, 3):
        aside, own = seen[2 * t - 1], seen[2 * t]
        assert torch.equal(own, learned[t])
        way = learned[t] - learned[t - 1]
        q = float((aside - learned[t - 1]) @ way / (way @ way))
        assert 0 <= q <= 1
        torch.testing.assert_close(aside, learned[t - 1] + q * way)


def train(folder: Path) -> list[str]:
    """Three steps of N-PG-IGT; the weights of every checkpoint."""
    small = {"sample.prompts": 2, "run.checkpoint_every": 1, "run.keep": 9}
    more = {"run": folder, "steps": 3, "threads": 1, "held_out": 1, "settings": small, "progress": Progress()}
    try:
        pp.train("n-pg-igt", "cartpole", **more)
    except PanoplyError as refused:
        assert "for once" in str(refused)  # noqa: PT017
    return [
        open_folder(found / "model").fingerprint() for found in sorted((folder / "checkpoints").iterdir())
    ]


@pytest.mark.parametrize("what", ["nothing is learned", "it diverges"])
def test_a_step_without_an_update_leaves_the_weights_where_they_were(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learn_not(seat, experience, step):  # type: ignore[no-untyped-def]
        if step < 2:
            return learn(seat, experience, step)
        if what == "it diverges":
            raise Diverged("Stopped: for once.")
        return {"loss": 0.0}

    sound = train(tmp_path / "sound")
    monkeypatch.setattr("panoply.loops.on_policy.learn", learn_not)
    found = train(tmp_path / "stopped")
    assert found[:3] == sound[:3]
    assert set(found[3:]) == (set() if what == "it diverges" else {sound[2]})


def test_a_plan_counts_the_second_batch() -> None:
    one, two = (cost(pp.plan("n-pg-igt", "cartpole", preset=preset)) for preset in ("control", "n-harpg"))
    assert (one.sampled_tokens, two.sampled_tokens) == (4000, 8000)
    assert two.operations > 2 * one.operations


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PanoplyError, match="sampled for one step"):
        pp.plan("n-pg-igt", "cartpole", settings={"update.epochs": 2})
    with pytest.raises(PanoplyError, match="curvature of surrogate.log_likelihood"):
        pp.plan("n-pg-igt", "cartpole", settings={"update.correction": "hessian"}, surrogate="ppo")
    with pytest.raises(PanoplyError, match="cap has no effect: nothing is extrapolated"):
        pp.plan("n-pg-igt", "cartpole", preset="harpg", settings={"update.cap": 3.0})
