"""MDPO: closed forms on a tabular MDP, which divergence is descended, its limits, and SAC as a special case."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from kit import assert_same, batch, hand, learner, slopes, toy_shares
from torch import Tensor, distributions, nn

import panoply as pp
from panoply.batch import Batch
from panoply.errors import PanoplyError
from panoply.experience import Experience, Table
from panoply.methods.objectives.mdpo import anchored, mdpo, mdpo_off, mirror, mirror_policy
from panoply.parts import Part
from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.policies.text import TextPolicy
from panoply.progress import Progress
from panoply.regimes import OnPolicy
from panoply.rollout.text import Collector
from panoply.slots.loss.soft import soft_policy
from panoply.slots.schedule.schedules import inverse
from panoply.slots.surrogate.ratios import log_likelihood
from panoply.slots.update.optimisers import adam
from panoply.transitions import ActorCritic, QNets, Temperature, Transitions
from panoply.worlds.control.mdp import MDP, softmax
from panoply.worlds.control.world import Box, Discrete

GAMMA, STATES, ACTIONS = 0.9, 4, 3


def mdp(seed: int = 0) -> MDP:
    dice = np.random.default_rng(seed)
    moves = dice.dirichlet(np.ones(STATES), (STATES, ACTIONS))
    rewards = dice.normal(size=(STATES, ACTIONS, STATES))
    return MDP(moves, rewards, np.full(STATES, 1 / STATES), np.zeros(STATES, bool))


def table(logits: Any) -> ControlPolicy:
    """A policy that is a table of these logits, in float64."""
    policy = widened(ControlPolicy.fresh(Discrete(STATES), Discrete(ACTIONS), PolicySpec(hidden=())))
    write(policy, logits)
    return policy


class Wide(nn.Module):
    """Features in float64."""

    def __init__(self, features: nn.Module):
        super().__init__()
        self.features = features

    def forward(self, observation: Tensor) -> Tensor:
        return self.features(observation).double()  # type: ignore[no-any-return]


def widened(policy: ControlPolicy, scale: float = 1.0) -> ControlPolicy:
    """In float64, and its outputs `scale` times as far apart: new policies are almost uniform."""
    policy.model.double()
    policy.model.features = Wide(policy.model.features)  # type: ignore[assignment]
    with torch.no_grad():
        policy.model.layers.layers[-1].weight.mul_(scale)
    return policy


@torch.no_grad()
def write(policy: ControlPolicy, logits: Any) -> None:
    layer = policy.model.layers.layers[0]
    layer.weight.copy_(torch.as_tensor(logits).T)
    layer.bias.zero_()


def exact(world: MDP, policy: ControlPolicy, logits: Any) -> Experience:
    """Every state and action once, with the weight of its visits under the anchor π_k, and the exact advantage."""
    anchor = softmax(logits)
    q = world.evaluate(anchor, GAMMA)
    advantage = q - (anchor * q).sum(-1, keepdims=True)
    state, action = (torch.as_tensor(x.ravel()) for x in np.indices((STATES, ACTIONS)))
    share = world.occupancy(anchor, GAMMA)
    columns = {"logp": np.log(anchor), "advantage": advantage, "share": share / share.sum()}
    rows = Experience(
        Table(
            {"action": action, "context": state, "episode": torch.arange(len(state))}
            | {name: torch.as_tensor(column.ravel()) for name, column in columns.items()}
        ),
        Table({"observation": torch.arange(STATES)}),
    )
    with torch.no_grad():
        distribution = policy.remember("old", policy, rows)
    return rows.with_columns(**{"distribution@old": distribution, "logp@old": rows["logp"]})


def iteration(term: Part, **update: Any) -> OnPolicy:
    return mdpo().but(
        reduce=toy_shares(), regularise=(term,), models=(), update=adam(**{"lr": 0.05, "clip": 0.0, **update})
    )


@pytest.mark.parametrize("kind", ["exact", "sampled"])
def test_an_iteration_with_many_steps_is_the_closed_form(kind: Any) -> None:
    """π_k·exp(t·A)/Z: there the gradient is 0, and that is where the steps go."""
    t, world = 0.7, mdp()
    start = np.random.default_rng(1).normal(size=(STATES, ACTIONS))
    policy = table(start)
    rows = exact(world, policy, start)
    solved = start + t * rows["advantage"].numpy().reshape(STATES, ACTIONS)
    learns = learner(policy, iteration(mirror(weight=1 / t, divergence=kind)))
    at_start = learns.gradient(rows)["layers.layers.0.weight"]
    for _ in range(300):
        learns.step(rows, 0)
    reached = policy.model(torch.arange(STATES)).detach().numpy()
    assert softmax(reached) == pytest.approx(softmax(solved), abs=2e-3)
    assert np.abs(softmax(solved) - softmax(start)).max() > 0.1
    write(policy, solved)
    again = learner(policy, iteration(mirror(weight=1 / t, divergence=kind)))
    assert again.gradient(rows)["layers.layers.0.weight"].abs().max() < 1e-9 * at_start.abs().max()


def test_the_first_step_is_the_policy_gradient() -> None:
    """At π_k the divergence is flat, whatever its weight: m = 1 is REINFORCE with that advantage, and the MDP's own."""
    world, start = mdp(), np.random.default_rng(2).normal(size=(STATES, ACTIONS))
    policy = table(start)
    rows = exact(world, policy, start)
    plain = iteration(mirror()).but(surrogate=log_likelihood(), regularise=())
    found = [learner(policy, m).gradient(rows) for m in (iteration(mirror(weight=100.0)), plain)]
    assert_same(found[0], found[1])
    slope = found[0]["layers.layers.0.weight"].T
    assert_same(
        -slope * world.occupancy(softmax(start), GAMMA).sum(), torch.as_tensor(world.gradient(start, GAMMA))
    )


# ------------------------------------------------------------------ the term


def scored(policy: ControlPolicy, snapshot: ControlPolicy, rows: Experience, term: Part) -> Tensor:
    with torch.no_grad():
        distribution = policy.remember("old", snapshot, rows)
    return term(
        Batch(rows, policy.score(rows.with_columns(**{"distribution@old": distribution}), term.needs()))
    )[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("space", [Discrete(3), Box((2,), (-1.0, -1.0), (1.0, 1.0))])
def test_the_gradient_is_that_of_kl_from_new_to_old(space: Any) -> None:
    seen = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    new, old = (
        widened(ControlPolicy.fresh(Box((3,)), space, PolicySpec(hidden=(4,)), seed=s), 100) for s in (0, 1)
    )
    rows = Experience(
        Table(
            {"context": torch.arange(6), "action": torch.zeros(6, *space.shape), "episode": torch.arange(6)}
        ),
        Table({"observation": seen}),
    )
    if isinstance(space, Discrete):
        rows = rows.with_columns(action=torch.zeros(6, dtype=torch.long))

    def distribution(policy: ControlPolicy) -> distributions.Distribution:
        out = policy.model(seen)
        if isinstance(space, Discrete):
            return distributions.Categorical(logits=out)
        mean, log_std = policy.head.moments(out)
        return distributions.Independent(distributions.Normal(mean, log_std.exp().expand_as(mean)), 1)

    def gradient(value: Tensor) -> Tensor:
        weights = list(new.model.parameters())
        found = torch.autograd.grad(value.sum(), weights, allow_unused=True, retain_graph=True)
        return torch.cat(
            [
                torch.zeros_like(w).flatten() if g is None else g.flatten()
                for g, w in zip(found, weights, strict=True)
            ]
        )

    value = scored(new, old, rows, mirror())
    ours, theirs = distribution(new), distribution(old)
    torch.testing.assert_close(value, distributions.kl_divergence(ours, theirs))
    assert_same(gradient(value), gradient(distributions.kl_divergence(ours, theirs)))
    backwards = gradient(distributions.kl_divergence(theirs, ours))
    assert (gradient(value) - backwards).abs().max() > 0.05 * backwards.abs().max()


def test_sampled_golden() -> None:
    """ρ = 2 and ½: ρ·log ρ − ρ + 1, with the slope ρ·log ρ in log π."""
    made = batch(hand(episode=[0, 1], logp=[-1.0, -1.0]), logp=[-1 + math.log(2), -1 - math.log(2)])
    value, _ = mirror(divergence="sampled", to="behaviour")(made)
    assert value.tolist() == pytest.approx([2 * math.log(2) - 1, 0.5 - 0.5 * math.log(2)])
    assert slopes(value, made.now["logp"]) == pytest.approx([2 * math.log(2), -0.5 * math.log(2)])


def test_sampled_tsallis_golden() -> None:
    """q = 2: ρ·(π − π_k) with π = ½ and π_k = ¼ is 2·¼."""
    rows = hand(episode=[0], **{"logp": [math.log(0.25)], "logp@old": [math.log(0.25)]})
    value, _ = mirror(divergence="sampled", q=2.0)(batch(rows, logp=[math.log(0.5)]))
    assert value.tolist() == pytest.approx([0.5])


def test_tsallis_is_descended_towards_the_anchor_and_differs_from_kl() -> None:
    world, start = mdp(), np.zeros((STATES, ACTIONS))
    policy = table(start)
    rows = exact(world, policy, start)
    write(policy, np.random.default_rng(3).normal(size=(STATES, ACTIONS)))
    still = rows.with_columns(advantage=torch.zeros(len(rows), dtype=torch.float64))
    found = {q: learner(policy, iteration(mirror(weight=1.0, q=q))).gradient(still) for q in (1.0, 1.5)}
    name = "layers.layers.0.weight"
    assert (found[1.0][name] - found[1.5][name]).abs().max() > 0.1 * found[1.0][name].abs().max()
    learns = learner(policy, iteration(mirror(weight=1.0, q=1.5)))
    before = scored(policy, table(start), rows, mirror()).mean().item()
    for _ in range(300):
        learns.step(still, 0)
    assert scored(policy, table(start), rows, mirror()).mean().item() < 0.01 * before


def test_the_step_size_is_annealed_and_never_0() -> None:
    held = inverse(start=1.0, floor=0.1)
    assert [held(k, 100) for k in (0, 50, 90, 99, 100)] == pytest.approx([1, 2, 10, 10, 10])


# ------------------------------------------------------------------ text


def test_whole_vocabularies(tiny_collector: Collector) -> None:
    """0 on unchanged weights; then KL of the softmaxes, in either layout and however the batch is split."""
    policy = tiny_collector.policy
    rows = tiny_collector.episodes(tiny_collector.tasks(3), 4)
    need, old = "divergence:1@old", policy.copy()
    with torch.no_grad():
        rows = rows.with_columns(**{"distribution@old": policy.remember("old", policy, rows)})
        assert policy.score(rows, frozenset({need}))[need].abs().max() < 1e-6
        for weight in policy.model.parameters():
            weight.mul_(1.3)
        found = policy.score(rows, frozenset({need}))[need]
        plain = TextPolicy(policy.model, policy.tokenizer, shared=False)
        plain.outputs = policy.outputs
        torch.testing.assert_close(plain.score(rows, frozenset({need}))[need], found, atol=1e-5, rtol=1e-4)
        states = [p.states(rows) @ p.model.head_weight.t() for p in (policy, old)]
    dists = [distributions.Categorical(logits=z) for z in states]
    torch.testing.assert_close(found, distributions.kl_divergence(*dists), atol=1e-5, rtol=1e-4)
    assert found.mean() > 1e-3

    rows = rows.with_columns(advantage=torch.linspace(-1, 1, len(rows)))
    method = mdpo().but(models=())
    whole, split = (learner(policy, method, micro_tokens=n).gradient(rows) for n in (10**9, 40))
    assert_same(split, whole, rel=1e-5)


# ------------------------------------------------------------------ off-policy


def actor_critic(temperature: Temperature) -> ActorCritic:
    """Everything in float64; the anchor is another policy."""
    spec = PolicySpec(hidden=(5,), squash=True, std="state")
    sees, acts = Box((2,)), Box((2,), (-2.0, 0.0), (2.0, 1.0))
    fresh = [ControlPolicy.fresh(sees, acts, spec, seed=s) for s in (1, 2)]
    q = QNets.of(fresh[0], 2, 0).double()
    policy, anchor = (widened(each, 50) for each in fresh)
    q._features = [policy.model.features]
    anchor.model.requires_grad_(False)
    networks = {"q": q, "temperature": temperature.double()}
    return ActorCritic(policy, networks, {"policy": anchor}, torch.Generator().manual_seed(0))


def rows_of_replay(n: int = 8) -> Transitions:
    seen = torch.randn(2, n, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return Transitions(
        seen[0], torch.zeros(n, 2, dtype=torch.float64), torch.zeros(n), torch.zeros(n), seen[1]
    )


def value_and_gradient(loss: Part, who: ActorCritic) -> tuple[Tensor, Tensor]:
    who.generator.manual_seed(0)
    value, _ = loss(who, rows_of_replay())
    found = torch.autograd.grad(value.mean(), list(who.policy.model.parameters()))
    return value.detach(), torch.cat([g.flatten() for g in found])


def test_c_equal_to_lambda_is_sac() -> None:
    who = actor_critic(Temperature(0.2, learned=False))
    value, gradient = value_and_gradient(mirror_policy(c=0.2, critic="least", shrink=0.0), who)
    expected, slope = value_and_gradient(soft_policy(), who)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    assert_same(gradient, slope, rel=1e-6)


@pytest.mark.parametrize("q", [1.0, 1.5])
def test_the_anchor_is_asked_about_the_new_action_with_gradients_through_it(q: float) -> None:
    """−Q_1 + λ·ln_q π + (1/t)·(ln_q π − q·ln_q π_k), straight from the equation with torch's distributions."""
    who, lam, t = actor_critic(Temperature(0.2, learned=False)), 0.2, 0.5
    value, gradient = value_and_gradient(mirror_policy(c=lam + 1 / t, q=q, shrink=0.01), who)
    who.generator.manual_seed(0)
    rows = rows_of_replay()
    noise = who.noise(len(rows), 2)

    def log(density: Tensor) -> Tensor:
        return density.log() if q == 1 else (density ** (q - 1) - 1) / (q - 1)

    dists = []
    for policy in (who.policy, who.targets["policy"]):
        mean, log_std = policy.model(rows.observation).chunk(2, -1)
        normal = distributions.Normal(mean, log_std.exp())
        dists.append(distributions.TransformedDistribution(normal, distributions.TanhTransform(cache_size=1)))
    mean, log_std = who.policy.model(rows.observation).chunk(2, -1)
    action = dists[0].transforms[0](mean + log_std.exp() * noise)
    dists[1].transforms = dists[0].transforms
    now, then = (log(dist.log_prob(action).sum(-1).exp()) for dist in dists)
    slow = (lam + 1 / t) * now - q / t * then - who.networks["q"].first(rows.observation, action)
    slow = slow + 0.01 * (mean**2 + log_std**2).mean(-1)
    torch.testing.assert_close(value, slow.detach())
    found = torch.autograd.grad(slow.mean(), list(who.policy.model.parameters()))
    assert_same(gradient, torch.cat([g.flatten() for g in found]))


def test_the_anchor_stays_and_critics_follow() -> None:
    weights = {name: ([torch.zeros(1)], [torch.full((1,), 8.0)]) for name in ("policy", "q")}
    follow, seen = anchored(tau=0.5, every=3), []
    for update in range(1, 5):
        follow(update, weights)
        seen.append((weights["policy"][0][0].item(), weights["q"][0][0].item()))
    assert seen == [(0.0, 4.0), (0.0, 6.0), (8.0, 7.0), (8.0, 7.5)]


def test_lambda_is_not_learned() -> None:
    assert "temperature" not in {name for loss in mdpo_off().losses for name in loss.info.learns}
    assert list(Temperature(0.0, learned=False).parameters()) == []
    assert float(Temperature(0.0, learned=False)()) == 0.0


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("mdpo", {"update.epochs": "1", "regularise.mirror.weight": "2"}, "weight has no effect"),
        ("mdpo", {"regularise.mirror.to": "behaviour"}, "Unknown snapshot 'behaviour'"),
        ("mdpo", {"regularise.mirror.to": "reference", "regularise.mirror.divergence": "sampled"}, "not drawn"),
        ("mdpo", {"regularise.mirror.q": "0.5"}, "q must be at least 1, not 0.5"),
        ("mdpo-off", {"losses.mirror_policy.c": "0.1"}, "c cannot be 0.1: it is λ \\+ 1/t, so at least λ"),
        ("mdpo-off", {"networks.temperature.learned": "true", "networks.temperature.start": "0"}, "its logarithm"),
        ("sac", {"networks.temperature.learned": "false", "losses.soft_policy.entropy": "-1"}, "no effect"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(name: str, settings: dict[str, str], says: str) -> None:
    with pytest.raises(PanoplyError, match=says):
        pp.plan(name, "pendulum" if name != "mdpo" else "cartpole", settings=settings)


def test_it_can_be_borrowed() -> None:
    plan = pp.plan("grpo", "chain", regularise="mdpo", settings={"update.epochs": "4"})
    assert plan.method.settings()["regularise.mirror.to"] == "old"


@pytest.mark.learn
def test_it_learns_cartpole(tmp_path: Any) -> None:
    done = pp.train("mdpo", "cartpole", run=tmp_path / "run", threads=1, progress=Progress())
    assert done.after["sampled"] > 400
