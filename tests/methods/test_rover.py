"""ROVER: values relative to π_old, a mean over the vocabulary, and the theorem on trees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from kit import (
    Slow,
    Tabular,
    assert_same,
    batch,
    hand,
    learner,
    on_policy,
    ragged,
    rows_of,
    shuffled,
    slopes,
    values_of,
)
from numpy.typing import NDArray
from papers import ZERO
from tiny import bare, metrics
from torch import Tensor

import panoply as pp
from panoply.compose import assign
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.objectives.rover import rover, uniform_value
from panoply.slots.update.optimisers import sgd

Leaves = NDArray[np.float64]


class Whole(Tabular):
    """Gives the mean over all actions as well."""

    def score(self, experience: Experience, needs: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        found = super().score(experience, needs)
        if "mean_logp" in needs:
            found["mean_logp"] = self.logits[experience["state"]].log_softmax(-1).mean(-1)
        return found


def moved(drift: float = 0.4) -> Experience:
    """Ragged episodes, in which π_old is off from the policy; `position` says the order."""
    made = ragged(drift=drift)
    off = torch.linspace(-drift, drift, len(made), dtype=torch.float64)
    with torch.no_grad():
        mean = Whole().score(made, frozenset({"mean_logp"}))["mean_logp"]
    return made.with_columns(
        **{"logp@old": made["logp"], "mean_logp@old": mean + off, "position": torch.arange(len(made))}
    )


def gradient(made: Experience, surrogate: object = None, micro: int = 10**9) -> Tensor:
    method = on_policy(surrogate=surrogate or uniform_value())
    return learner(Whole(), method, micro_tokens=micro).gradient(made)["logits"]


def slow_loss(made: Experience, slow: Slow, rho: float = 1.0, bootstrap: float = 1.0) -> Tensor:
    """The card's equation, decision by decision; the target is a plain number."""
    loss = ZERO
    for e in values_of(made, "episode"):
        rows = rows_of(made, episode=e)
        for t, row in enumerate(rows):
            after = 0.0
            if t + 1 < len(rows):
                following = rows[t + 1]
                every = [slow.logp(following["state"], a).item() for a in range(4)]
                after = rho * (sum(every) / 4 - following["mean_logp@old"])
            q = rho * (slow.logp(row["state"], row["action"]) - row["logp@old"])
            loss = loss + (q - (row["advantage"] + bootstrap * after)) ** 2
    return loss / len(made)


def test_numbers_by_hand() -> None:
    """Two tokens and one: Q = 0.1, −0.2, 0.3; V′ = −3 − (−3.5) = 0.5 after the first, 0 after the last."""
    made = hand(episode=[0, 0, 1], position=[5, 6, 9], advantage=[0.25, 0.25, -0.75])
    made = made.with_columns(
        **{"logp@old": torch.tensor([-1.0, -1.0, -1.0]), "mean_logp@old": torch.tensor([-9.0, -3.5, -7.0])}
    )
    seen = batch(made, logp=[-0.9, -1.2, -0.7], mean_logp=[-2.0, -3.0, -4.0])
    values, stats = uniform_value()(seen)
    assert values.tolist() == pytest.approx([-(0.65**2), -(0.45**2), -(1.05**2)])
    assert stats["q"].tolist() == pytest.approx([0.1, -0.2, 0.3])
    assert stats["next_value"].tolist() == pytest.approx([0.5, 0.0, 0.0])
    assert slopes(values, seen.now["logp"]) == pytest.approx([1.3, 0.9, -2.1])
    halved, _ = uniform_value(rho=0.5, bootstrap=0.5)(seen)
    assert halved.tolist() == pytest.approx([-((0.05 - 0.375) ** 2), -(0.35**2), -(0.9**2)])


def test_the_target_has_no_gradient() -> None:
    made = moved()
    rows = [0.1] * len(made)
    seen = batch(made, logp=rows, mean_logp=rows)
    values, _ = uniform_value()(seen)
    assert torch.autograd.grad(values.sum(), seen.now["mean_logp"], allow_unused=True) == (None,)


@pytest.mark.parametrize("settings", [{}, {"rho": 0.5}, {"bootstrap": 0.5}, {"bootstrap": 0.0}])
def test_gradient_is_the_equations(settings: dict[str, float]) -> None:
    """With the mean over all actions alike; any order of rows and any split gives the same."""
    made, slow = moved(), Slow()
    expected = slow.gradient(slow_loss(made, slow, **settings))
    for rows in (made, shuffled(made)):
        for micro in (10**9, 6):
            assert_same(gradient(rows, uniform_value(**settings), micro), expected)


def test_while_nothing_has_moved_it_is_reinforce() -> None:
    """Q = V′ = 0, so the gradient is 2ρ·A·∇log π."""
    made = moved()
    with torch.no_grad():
        found = Whole().score(made, frozenset({"mean_logp"}))
    made = made.with_columns(**{"logp@old": found["logp"], "mean_logp@old": found["mean_logp"]})
    plain = learner(Tabular(), on_policy()).gradient(made)["logits"]
    assert_same(gradient(made, uniform_value(rho=0.25)), 0.5 * plain)


def test_it_is_what_the_released_code_computes() -> None:
    """compute_rover_loss on padded rows: values shifted by one, times the mask; a masked mean of squares."""
    made = moved()
    episodes = [rows_of(made, episode=e) for e in values_of(made, "episode")]
    longest = max(map(len, episodes))
    policy = Whole()

    def padded(name: str) -> Tensor:
        return torch.tensor([[r[name] for r in rows] + [0.0] * (longest - len(rows)) for rows in episodes])

    mask = torch.tensor([[1.0] * len(rows) + [0.0] * (longest - len(rows)) for rows in episodes])
    logp = policy.logits.log_softmax(-1)[padded("state").long(), padded("action").long()]
    logits = policy.logits[padded("state").long()]
    current = logits.mean(-1) - logits.logsumexp(-1)
    q = (logp - padded("logp@old").double()) * mask
    shifted = (current[:, 1:] - padded("mean_logp@old").double()[:, 1:]) * mask[:, 1:]
    after = torch.cat([shifted, torch.zeros(len(mask), 1)], 1).detach()
    loss = ((q - padded("advantage") - after) ** 2 * mask).sum() / mask.sum()
    loss.backward()
    assert policy.logits.grad is not None
    assert_same(gradient(made), policy.logits.grad, rel=1e-5)  # the padded columns are float32


def test_groups_without_a_difference_are_pulled_back() -> None:
    """A = 0 is no reason to leave an answer out: its Q still goes to V′."""
    made = moved()
    still = made.with_columns(advantage=torch.zeros(len(made), dtype=torch.float64))
    assert uniform_value().info.idle is None
    assert float(gradient(still).abs().max()) > 0


def test_it_is_of_the_distribution_sampled_from(tmp_path: Path) -> None:
    """At the published temperature the first mini-batch has ratios, values and V′ of exactly 0; later ones have not."""
    small = {
        "world.low": 10,
        "world.high": 20,
        "sample.prompts": 4,
    }
    small |= {"run.held_out": 4, "update.lr": 1e-3, "sample.temperature": 0.6}
    few = {"model": "start", "world": "manyanswers", "steps": 1}
    bare(tmp_path / "one", "rover", settings={**small, "update.minibatches": 1}, **few)
    (first,) = metrics(tmp_path / "one")
    assert first["q"] == 0
    assert first["next_value"] == 0
    bare(tmp_path / "four", "rover", settings=small, **few)
    assert abs(metrics(tmp_path / "four")[0]["next_value"]) > 1e-4, "more than rounding"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"surrogate.against": "behaviour"}, "a mean over all"),
        ({"sample.top_p": 0.9}, "of which sample.top_p leaves a part"),
        ({"sample.top_k": 5}, "of which sample.top_k leaves a part"),
        ({"update.minibatches": 1, "surrogate.bootstrap": 0.5}, "V′ is 0"),
        ({"surrogate.rho": 0.0}, "above 0"),
    ],
)
def test_refusals(settings: dict[str, object], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        pp.plan("rover", "manyanswers", settings=settings)


def test_control_is_refused() -> None:
    """Its policies have no vocabulary to average over."""
    with pytest.raises(PanoplyError, match="cannot supply 'mean_logp', which a part needs"):
        pp.plan("ppo", "cartpole", settings={"surrogate": "rover"})


def test_without_bootstrap_one_pass_is_less() -> None:
    method = assign(rover(), "surrogate.bootstrap", 0.0)
    assert not any("mean_logp" in need for need in method.needs())
    assert {"mean_logp", "mean_logp@old", "logp@old"} <= rover().needs()


def test_mini_batches_never_cut_an_episode() -> None:
    """Or the next token would be missing."""
    made = moved()
    method = on_policy(surrogate=uniform_value(), update=sgd(lr=0.1, minibatches=3))
    parts = list(learner(Whole(), method).minibatches(made, torch.Generator().manual_seed(0)))
    assert len(parts) == 3
    assert sum(len(values_of(part, "episode")) for part in parts) == len(values_of(made, "episode"))


ACTIONS = 4


def uniform_values(leaf: Leaves) -> list[Leaves]:
    """Q of the uniform policy in a tree with these rewards at its ends, [states, actions] a depth, the root first."""
    found: list[Leaves] = []
    while len(leaf) > 1:
        found.append(leaf.reshape(-1, ACTIONS))
        leaf = found[-1].mean(1)
    return found[::-1]


def leaves(values: list[Leaves], rho: float) -> Leaves:
    """How likely each end is where actions are drawn by the softmax of Q/ρ."""
    chance = np.ones(1)
    for table in values:
        raised = np.exp((table - table.max(-1, keepdims=True)) / rho)
        chance = (chance[:, None] * raised / raised.sum(-1, keepdims=True)).ravel()
    return chance


def test_values_of_the_uniform_policy() -> None:
    """Sixteen leaves, the first and the last two right: a quarter of the first branch, a half of the last."""
    leaf = np.zeros(16)
    leaf[[0, 14, 15]] = 1.0
    root, below = uniform_values(leaf)
    assert root.tolist() == [[0.25, 0.0, 0.0, 0.5]]
    assert below[3].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert leaves([root, below], 1e9).tolist() == pytest.approx([1 / 16] * 16)


def test_greedy_on_them_always_succeeds_where_rewards_are_0_or_1() -> None:
    for seed in range(20):
        dice = np.random.default_rng(seed)
        leaf = (dice.random(1024) < 0.003).astype(float)
        leaf[dice.integers(1024)] = 1.0
        chance = leaves(uniform_values(leaf), 1e-9)
        assert chance @ leaf == pytest.approx(1.0)


def test_their_softmax_keeps_every_right_branch() -> None:
    """Also where greedy takes one of them alone."""
    leaf = np.zeros(64)
    leaf[[0, 1, 37]] = 1.0
    kept = leaves(uniform_values(leaf), 0.03)
    assert kept[37] > 0.01
    assert kept @ leaf > 0.9
    assert leaves(uniform_values(leaf), 1e-9)[37] == 0


def test_graded_rewards_break_the_theorem() -> None:
    """Many small rewards outweigh one large one: greedy takes 0.5 of what could be had."""
    leaf = np.zeros(16)
    leaf[0], leaf[4:8] = 1.0, 0.5
    chance = leaves(uniform_values(leaf), 1e-9)
    assert chance @ leaf == pytest.approx(0.5)
