"""VPL: its bound by hand, one latent for all pairs of a user, scales, questions, and what users want."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from panoply import functions
from panoply.errors import PanoplyError
from panoply.methods.preferences.vpl import (
    Sizes,
    Users,
    accuracies,
    arms,
    chosen_questions,
    fitted,
    relabelled,
    spread,
)
from panoply.policies.user_rewards import (
    Labelled,
    UserReward,
    annealed,
    divergence,
    elbo,
    informative,
    log_mean_exp,
    min_max,
)


def model(**form: Any) -> UserReward:
    return UserReward(2, 3, **{"latent": 2, "hidden": 8, "reader": "joined", **form})


def some(users: int = 4, pairs: int = 3, steps: int = 1) -> Labelled:
    dice = torch.Generator().manual_seed(0)
    first, second = (torch.randn(users, pairs, steps, 2, generator=dice) for _ in range(2))
    return Labelled(first, second, (torch.rand(users, pairs, generator=dice) < 0.5).float())


class Additive(UserReward):
    """r(s, z) = s₀·z₀, and z is what is written down."""

    def __init__(self, z: list[list[float]]):
        super().__init__(2, 3, latent=1, hidden=1)
        self.z = torch.tensor(z)

    def encode(self, pairs: Labelled) -> tuple[Tensor, Tensor]:
        return self.z, torch.full_like(self.z, math.log(0.25))

    def ahead(self, first: Tensor, second: Tensor, z: Tensor) -> Tensor:
        return ((first - second)[..., 0] * z[:, None]).sum(-1)


# ------------------------------------------------------------------ the bound


def test_the_bound_by_hand() -> None:
    """Two users with z = 1 + ½·2 and −1 + ½·0, a pair each; KL = ½(μ² + ¼ − 1 + log 4)."""
    pairs = Labelled(
        torch.tensor([[[[1.0]]], [[[3.0]]]]), torch.zeros(2, 1, 1, 1), torch.tensor([[1.0], [1.0]])
    )
    loss, apart = elbo(Additive([[1.0], [-1.0]]), pairs, 0.5, torch.tensor([[2.0], [0.0]]))
    kl = 0.5 * (1 + 0.25 - 1 + math.log(4))
    assert apart.item() == pytest.approx(kl, rel=1e-6)
    expected = (math.log1p(math.exp(-2.0)) + math.log1p(math.exp(3.0))) / 2 + 0.5 * kl
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_divergence_is_that_of_normals() -> None:
    mean, log_variance = torch.tensor([[0.3, -1.0]]), torch.tensor([[0.4, -0.2]])
    normal = torch.distributions.Normal(mean, (log_variance / 2).exp())
    exact = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).sum(-1)
    assert torch.allclose(divergence(mean, log_variance), exact)


def test_one_latent_for_all_pairs_of_a_user() -> None:
    """The answer about a pair depends on the user's z and on no other's."""
    made, pairs = model(), some()
    z = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
    whole = made.ahead(pairs.first, pairs.second, z)
    one = made.ahead(pairs.first[2:3], pairs.second[2:3], z[2:3])
    assert torch.allclose(whole[2:3], one, atol=1e-6)
    assert made.drawn(*made.encode(pairs), torch.zeros(4, 2)).shape == (4, 2)


def test_pieces_are_sums_over_steps() -> None:
    made, pairs = model(steps=2, scale=2.0), some(steps=2)
    z = made.encode(pairs)[0]
    each = [made.rewards(pairs.first[:, 0, t], z).diagonal() for t in range(2)]
    others = [made.rewards(pairs.second[:, 0, t], z).diagonal() for t in range(2)]
    expected = (sum(each) - sum(others)) / 2
    assert torch.allclose(made.ahead(pairs.first, pairs.second, z)[:, 0], expected, atol=1e-5)


@pytest.mark.parametrize("reader", ["joined", "attention"])
def test_labels_are_read(reader: Any) -> None:
    made, pairs = model(reader=reader), some()
    other = pairs._replace(label=1 - pairs.label)
    assert not torch.allclose(made.encode(pairs)[0], made.encode(other)[0])
    swapped = Labelled(pairs.second, pairs.first, 1 - pairs.label)
    same = torch.allclose(made.encode(pairs)[0], made.encode(swapped)[0], atol=1e-6)
    assert same == (reader == "attention")  # which puts the preferred side first


def test_attention_does_not_mind_order_or_number() -> None:
    made, pairs = model(reader="attention"), some()
    turned = Labelled(pairs.first.flip(1), pairs.second.flip(1), pairs.label.flip(1))
    assert torch.allclose(made.encode(pairs)[0], made.encode(turned)[0], atol=1e-6)
    with torch.no_grad():
        mean, log_variance = made.encode(some(pairs=5))
    assert float(torch.cat([mean, log_variance]).abs().max()) <= 1
    assert torch.allclose(made.placed(mean).norm(dim=-1), torch.full((4,), math.sqrt(2)))


def test_without_a_latent_it_is_bradley_and_terry() -> None:
    """One reward for all: nobody's labels move what it says of a pair."""
    made, pairs = model(latent=0), some()
    z = made.encode(pairs)[0]
    assert z.shape == (4, 0)
    loss, apart = elbo(made, pairs, 1.0, torch.zeros(4, 0))
    rewards = [made.rewards(side.reshape(-1, 2), z[:1])[0].view(4, 3) for side in (pairs.first, pairs.second)]
    signed = (2 * pairs.label - 1) * (rewards[0] - rewards[1])
    assert loss.item() == pytest.approx(
        -torch.nn.functional.logsigmoid(signed).sum(-1).mean().item(), rel=1e-5
    )
    assert apart.item() == 0


# ------------------------------------------------------------------ schedules, scales, questions


def test_the_weight_rises_in_cycles() -> None:
    assert [annealed(step, 8, 2) for step in (0, 2, 4, 6)] == pytest.approx([0, 0.5, 0, 0.5])
    assert annealed(0, 8, 0) == 1


def test_scales_by_hand() -> None:
    rewards = torch.tensor([[0.0, 1.0, 3.0], [2.0, 4.0, 8.0]])
    assert torch.allclose(min_max(rewards), torch.tensor([[0.0, 1 / 3, 1.0]] * 2))
    level = log_mean_exp(rewards).exp().mean(-1)
    assert torch.allclose(level, torch.ones(2))
    assert spread(rewards) == pytest.approx(1.5 / 4.5)
    assert spread(min_max(rewards)) == 0


def test_a_win_rate_is_the_mean_chance_to_be_preferred() -> None:
    made = model(judge="classifier")
    states, compared, z = torch.randn(3, 2), torch.randn(2, 2), torch.randn(1, 2)
    with torch.no_grad():
        found = made.rewards(states, z, compared)
        first = made.ahead(states[None, :, None], compared[:1].expand(3, -1)[None, :, None], z).sigmoid()
        second = made.ahead(states[None, :, None], compared[1:].expand(3, -1)[None, :, None], z).sigmoid()
    assert torch.allclose(found, (first + second) / 2, atol=1e-6)


def test_what_tells_most_is_asked() -> None:
    """Answers that depend on z tell log 2; those that do not, or that nobody is sure of, tell nothing."""
    first = torch.tensor([[[[100.0]]], [[[0.0]]]])
    found = informative(Additive([[0.0]]), first, torch.zeros(2, 1, 1, 1), torch.tensor([[1.0], [-1.0]]))
    assert found.tolist() == pytest.approx([math.log(2), 0], abs=1e-4)


# ------------------------------------------------------------------ users


USERS = Users(2, 200, 3)


def test_users_say_which_is_nearer_to_their_goal() -> None:
    assert USERS.world.goals == 4
    goal = USERS.world.circle[1]
    nearest = int(np.hypot(*(USERS.data.columns["observation"][:, :2] - goal).T).argmin())
    assert int(USERS.worth[1].argmax()) == nearest
    asked = USERS.labelled("test", 4, 6, 2)
    assert asked.first.shape == (4, 6, 2, 4)
    assert 0 < float(asked.label.mean()) < 1  # the two sides stand in any order
    goals = torch.from_numpy(USERS.world.circle[USERS.wanted(4)]).float()[:, None, None]
    far = [(side[..., :2] - goals).norm(dim=-1).sum(-1) for side in (asked.first, asked.second)]
    clear = (far[0] - far[1]).abs() > 0.2
    assert torch.equal((far[0] < far[1])[clear], (asked.label > 0.5)[clear])


def test_one_reward_is_right_half_of_the_time_where_two_disagree() -> None:
    found = accuracies(UserReward(4, 3, latent=0, hidden=4), USERS, torch.zeros(6, 0))
    assert found[0] == 0.5


def test_episodes_are_relabelled_as_a_whole() -> None:
    z = torch.arange(3.0)[:, None] + 10
    rewards = torch.arange(3.0)[:, None] * 1000 + torch.arange(len(USERS.data)).float()
    made = relabelled(USERS.data, rewards, z, 0, copies=2)
    columns = made.columns
    assert len(made) == 2 * len(USERS.data)
    user = (columns["observation"][:, 4] - 10).astype(int)
    assert (columns["reward"] // 1000 == user).all()
    assert (columns["reward"] % 1000 == np.tile(np.arange(len(USERS.data)), 2)).all()
    for episode in np.unique(columns["episode"]):
        assert len(set(user[columns["episode"] == episode])) == 1
    assert len(set(user)) > 1
    assert not columns["terminated"].any()


def test_fitting_repeats_itself_and_lowers_the_bound() -> None:
    pairs = some(users=6)
    noise = torch.zeros(6, 2)
    with torch.no_grad():
        before = float(elbo(model(), pairs, 0.1, noise)[0])
    made = [fitted(model(), pairs, steps=30, batch=6, weight=0.1) for _ in range(2)]
    with torch.no_grad():
        assert float(elbo(made[0], pairs, 0.1, noise)[0]) < before
    assert all(torch.equal(a, b) for a, b in zip(made[0].parameters(), made[1].parameters(), strict=True))


def test_the_table_and_its_questions() -> None:
    sizes = Sizes(users=4, others=4, pairs=2, latent=2, hidden=4, fit=2, size=60, updates=10)
    found = arms(sizes, "log_mean_exp", 0)
    assert list(found) == [
        "Bradley and Terry",
        "VPL",
        "VPL, log mean exp",
        "VPL-SPO",
        "VPL, chosen questions",
    ]
    assert all("success" in row for name, row in found.items() if "questions" not in name)
    assert list(arms(sizes, "none", 0, only=("VPL",))) == ["VPL"]
    asked = chosen_questions(model(hidden=4, latent=2, reader="attention"), _four(), sizes)
    assert torch.equal(asked.first[0], asked.first[3])  # all are asked the same
    assert asked.label.shape == (4, 2)


def _four() -> Users:
    users = Users(2, 60, 0)
    users.states = users.states[:, :2]
    return users


@pytest.mark.parametrize("words", [{"kinds": "1"}, {"latent": "0"}, {"weight": "-1"}, {"scaling": "much"}])
def test_what_cannot_be_is_refused(words: dict[str, str]) -> None:
    with pytest.raises(PanoplyError):
        functions.call("vpl", words)
