"""VPL: a reward for whom it concerns, with a latent read off a few of a user's comparisons."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.evidence.claims import Ahead
from panoply.policies.user_rewards import (
    Labelled,
    Reader,
    UserReward,
    annealed,
    elbo,
    informative,
    log_mean_exp,
    min_max,
)
from panoply.registry import algorithm
from panoply.seeds import numpy_rng, stable_hash, torch_rng
from panoply.slots.update.optimisers import adam
from panoply.worlds.control.pointmass import Pointmass
from panoply.worlds.control.world import Array, Box
from panoply.worlds.logged.behaviour import episodes
from panoply.worlds.logged.data import LoggedData
from panoply.worlds.logged.preferences import preferences

SURE = 50.0
"""How sharply users tell distances apart: they err on pairs that are about as far from their goal."""
CARELESS = 0.5
"""How often whoever made the data does anything at all, on the way to a goal."""
COMPARED, VOICES, DRAWS, SETS, TESTS = 24, 16, 64, 100, 512
"""States that a win rate is against, users whose rewards the logged episodes are given, draws of the prior, sets of
questions to choose among, and pairs to test by."""
Scaling = Literal["none", "min_max", "log_mean_exp"]


class Users:
    """Users of a square with goals on a circle, each of whom wants to be at one of them, and logged ways through it.

    There are twice as many goals as kinds of users, who want those of one half of the circle: so they agree on which
    half is better. Whoever made the data went to any goal, erring now and then. A state's worth to a user is minus the
    distance to the user's goal, which nobody says: there are only answers to which of two pieces of the data is better.
    """

    def __init__(self, kinds: int, size: int, seed: int):
        self.kinds, self.seed = kinds, seed
        self.world = Pointmass(variant="goals", goals=2 * kinds)
        self.data = episodes(self.world, lambda done: CARELESS, size, seed)
        self.states = torch.from_numpy(self.data.columns["observation"]).float()
        places = self.data.columns["observation"][:, None, :2].astype(np.float64)
        self.worth: Array = -np.hypot(*np.moveaxis(places - self.world.circle[:kinds], -1, 0)).T
        """[kinds, rows of the data]"""
        self.paid = [
            LoggedData({**self.data.columns, "reward": worth.astype(np.float32)}) for worth in self.worth
        ]
        """The data with the rewards of each kind."""

    def wanted(self, users: int) -> Array:
        """The goal of each user: all of them equally often."""
        return np.arange(users) % self.kinds

    def labelled(self, name: str, users: int, pairs: int, steps: int) -> Labelled:
        """So many labelled pairs of each of some users; the two sides stand in any order."""
        sides = [
            self._asked(name, i, kind, pairs, steps) for i, kind in enumerate(self.wanted(users).tolist())
        ]
        first, second, label = (np.stack(each) for each in zip(*sides, strict=True))
        return Labelled(self.states[first], self.states[second], torch.from_numpy(label).float())

    def _asked(self, name: str, user: int, kind: int, pairs: int, steps: int) -> tuple[Array, Array, Array]:
        draw = stable_hash(name, self.seed, user) % 2**31
        found = preferences(self.paid[kind], pairs, steps, sharpness=SURE, seed=draw)
        label = numpy_rng("sides", draw).random(pairs) < 0.5
        turned = label[:, None]
        first = np.where(turned, found.chosen, found.rejected)
        return first, np.where(turned, found.rejected, found.chosen), label

    def answered(self, first: Array, second: Array, kind: int) -> Array:
        """What a user of a kind says of pairs of rows, [pairs, steps] each, without erring: 1 for the first."""
        worth = self.worth[kind]
        said: Array = worth[first].sum(-1) > worth[second].sum(-1)
        return said.astype(np.float32)


# ------------------------------------------------------------------ a reward, fitted, and what it is worth


def fitted(
    model: UserReward,
    pairs: Labelled,
    *,
    steps: int,
    batch: int,
    lr: float = 1e-3,
    weight: float = 1.0,
    cycles: int = 0,
    seed: int = 0,
) -> UserReward:
    """Descend −ELBO by Adam, on users by lot."""
    from panoply.loops.compiler import leave_unloaded

    leave_unloaded()
    dice = torch_rng("users", seed)
    optimiser = adam(lr=lr)(model.parameters())
    for step in range(steps):
        users = torch.randint(len(pairs.label), (batch,), generator=dice)
        noise = torch.randn(batch, model.latent, generator=dice)
        loss, _ = elbo(model, pairs.of(users), weight * annealed(step, steps, cycles), noise)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return model


def accuracies(model: UserReward, users: Users, z: Tensor) -> tuple[float, float]:
    """Of pairs on which kinds of users disagree, and of those on which all agree: how often a reward is right.

    z: [users, latent] of users who were not in training
    """
    rng = numpy_rng("test pairs", users.seed)
    rows = rng.integers(len(users.states), size=(2, TESTS))
    says = np.stack([users.answered(rows[0][:, None], rows[1][:, None], kind) for kind in range(users.kinds)])
    agreed = (says == says[:1]).all(0)
    first, second = (users.states[side].expand(len(z), -1, -1)[:, :, None] for side in rows)
    with torch.no_grad():
        ahead = (model.ahead(first, second, z) > 0).numpy()
    right = ahead == (says[users.wanted(len(z))] > 0.5)
    return float(right[:, ~agreed].mean()), float(right[:, agreed].mean()) if agreed.any() else float("nan")


def spread(rewards: Tensor) -> float:
    """How much the range of rewards [users, states] differs between users: its deviation over its mean."""
    ranges = rewards.amax(-1) - rewards.amin(-1)
    return float(ranges.std(correction=0) / ranges.mean())


def success(users: Users, rewards: Tensor, z: Tensor, asked: Tensor, updates: int) -> float:
    """How often a policy gets users to their own goal, that was trained offline on rewards of every z.

    The logged episodes are given rewards [users, rows] of users by lot, in deviations of all of them, and the user's z
    is appended to what is seen; IQL learns from that. Then it acts for others, by the z [users, latent] `asked` of
    them.
    """
    from panoply.loops.actor_critic import ActorCriticLearner
    from panoply.methods.base.iql import iql
    from panoply.policies.control import ControlPolicy, PolicySpec

    seen = Box((users.states.shape[1] + z.shape[1],))
    spec = PolicySpec(hidden=(64, 64), activation="relu", head="bounded")
    policy = ControlPolicy.fresh(seen, users.world.action, spec, users.seed)
    base = iql()
    value, actor, critic = base.losses
    method = base.but(
        replay=base.replay.but(batch=64, gamma=0.9),
        losses=(value, actor.but(beta=10.0), critic),
        update=base.update.but(lr=1e-3),
    )
    learner = ActorCriticLearner(policy, method, seed=users.seed, total_steps=10)
    learner.remember(relabelled(users.data, rewards / rewards.std(), z, users.seed).experience())
    for step in range(10):
        learner.begin(step, torch_rng("vpl", users.seed, step))
        learner.learn(updates // 10)
    return _reached(users, policy, asked)


def relabelled(data: LoggedData, rewards: Tensor, z: Tensor, seed: int, copies: int = 4) -> LoggedData:
    """Every logged episode a few times, each time with the rewards and the z of another user by lot.

    Nothing ends at a goal: it may be somebody else's.
    """
    numbers, whose = np.unique(data.columns["episode"], return_inverse=True)
    made: list[dict[str, Array]] = []
    for copy in range(copies):
        user = numpy_rng("relabelled", seed, copy).integers(len(z), size=len(numbers))
        of, latents = user[whose], z.numpy()
        columns = {name: data.columns[name] for name in ("action", "turn")}
        columns["observation"] = np.concatenate([data.columns["observation"], latents[of]], 1).astype(
            np.float32
        )
        columns["final"] = np.concatenate([data.columns["final"], latents[user]], 1).astype(np.float32)
        columns["reward"] = rewards.numpy()[of, np.arange(len(of))].astype(np.float32)
        columns["episode"] = whose + copy * len(numbers)
        columns["terminated"], columns["truncated"] = np.zeros(len(of), bool), data.last
        made.append(columns)
    return LoggedData({name: np.concatenate([each[name] for each in made]) for name in made[0]})


@torch.no_grad()
def _reached(users: Users, policy: Any, asked: Tensor) -> float:
    """The share of users whose goal is the one that an episode ends at."""
    count = len(asked)
    envs = users.world.envs(count)
    envs.reset(np.arange(count), np.array([stable_hash("vpl", users.seed, i) % 2**31 for i in range(count)]))
    goal, open_ = np.zeros(count), np.ones(count, bool)
    for _ in range(users.world.horizon or 60):
        seen = torch.cat([torch.from_numpy(envs.observations).float(), asked], 1)
        step = envs.step(policy.head.action(policy.model(seen)).numpy())
        goal = np.where(open_, step.signals["goal"], goal)
        open_ &= ~step.terminated
        if not open_.any():
            break
    return float((goal == users.wanted(count) + 1).mean())


# ------------------------------------------------------------------ the algorithm


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much of everything there is."""

    kinds: int = 2
    users: int = 1000
    others: int = 80
    pairs: int = 8
    steps: int = 1
    latent: int = 8
    hidden: int = 64
    fit: int = 400
    size: int = 2000
    weight: float = 1.0
    cycles: int = 4
    reader: Reader = "attention"
    updates: int = 1000


def arms(
    sizes: Sizes, scaling: Scaling, seed: int, only: tuple[str, ...] = ()
) -> dict[str, dict[str, float]]:
    """Bradley and Terry's reward, VPL's as it is, with another scale, and as a win rate; and with chosen questions.

    only: the rows that are asked for, where not all are
    """
    users = Users(sizes.kinds, sizes.size, seed)
    known = users.labelled("known", sizes.users, sizes.pairs, sizes.steps)
    others = users.labelled("others", sizes.others, sizes.pairs, sizes.steps)
    compared = users.states[
        torch.randint(len(users.states), (COMPARED,), generator=torch_rng("compared", seed))
    ]

    def fit(**form: Any) -> UserReward:
        shape = {"steps": sizes.steps, "latent": sizes.latent, "hidden": sizes.hidden, "seed": seed}
        made = UserReward(users.states.shape[1], sizes.pairs, reader=sizes.reader, **{**shape, **form})
        how: dict[str, Any] = {"weight": sizes.weight, "cycles": sizes.cycles, "seed": seed}
        return fitted(made, known, steps=sizes.fit, batch=64, **how)

    def row(
        model: UserReward, scale: Scaling = "none", asked: Labelled = others, updates: int = sizes.updates
    ) -> dict[str, float]:
        with torch.no_grad():
            mine, theirs = (model.placed(model.encode(pairs)[0]) for pairs in (known, asked))
            chosen = mine[torch.randint(len(mine), (VOICES,), generator=torch_rng("relabelled", seed))]
            given = SCALES[scale](model.rewards(users.states, chosen, compared))
        conflicting, agreed = accuracies(model, users, theirs)
        found = {"conflicting": conflicting, "agreeing": agreed, "spread of scales": spread(given)}
        if updates:
            found["success"] = success(users, given, chosen, theirs, updates)
        return found

    personal = fit()
    made: dict[str, Callable[[], dict[str, float]]] = {
        "Bradley and Terry": lambda: row(fit(latent=0)),
        "VPL": lambda: row(personal),
        f"VPL, {scaling.replace('_', ' ')}": lambda: row(personal, scaling),
        "VPL-SPO": lambda: row(fit(judge="classifier")),
        CHOSEN: lambda: row(personal, asked=chosen_questions(personal, users, sizes), updates=0),
    }
    if scaling == "none":
        del made["VPL, none"]
    return {name: make() for name, make in made.items() if not only or name in only}


CHOSEN = "VPL, chosen questions"
SCALES = {"none": lambda rewards: rewards, "min_max": min_max, "log_mean_exp": log_mean_exp}


def chosen_questions(model: UserReward, users: Users, sizes: Sizes) -> Labelled:
    """For users who are not known, the one set of questions whose answers tell most about z, answered by each."""
    rng = numpy_rng("questions", users.seed)
    rows = rng.integers(len(users.states) - sizes.steps, size=(2, SETS, sizes.pairs))
    pieces = rows[..., None] + np.arange(sizes.steps)
    z = model.placed(torch.randn(DRAWS, sizes.latent, generator=torch_rng("prior", users.seed)))
    best = int(informative(model, users.states[pieces[0]], users.states[pieces[1]], z).argmax())
    first, second = pieces[:, best]
    label = np.stack([users.answered(first, second, kind) for kind in users.wanted(sizes.others).tolist()])
    alike = [users.states[side].expand(sizes.others, -1, -1, -1) for side in (first, second)]
    return Labelled(alike[0], alike[1], torch.from_numpy(label))


def measure(seed: int) -> dict[str, float]:
    """By how much VPL is righter than Bradley and Terry's reward where users disagree."""
    found = arms(Sizes(), "none", seed, only=("Bradley and Terry", "VPL", CHOSEN))
    each = {f"{arm}: {name}": value for arm, row in found.items() for name, value in row.items()}
    return {
        "ahead where users disagree": found["VPL"]["conflicting"] - found["Bradley and Terry"]["conflicting"],
        **each,
    }


@algorithm(
    "vpl@1",
    paper=111,
    claim=Ahead(
        "Of users who were not in training, and of pairs on which users disagree, a reward with a latent of eight of "
        "the user's comparisons is right more often than one reward for all.",
        measure,
    ),
)
def vpl(
    kinds: int = 2,
    users: int = 1000,
    pairs: int = 8,
    steps: int = 1,
    latent: int = 8,
    hidden: int = 64,
    fit: int = 400,
    weight: float = 1.0,
    cycles: int = 4,
    reader: Reader = "attention",
    scaling: Scaling = "min_max",
    updates: int = 1000,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Variational preference learning (arXiv 2408.10075): users want different things, and one reward wants the mean.

    An encoder reads a user's labelled pairs S into q(z|S) = N(μ, σ²); a decoder judges states by r(s, z);
    −ELBO = Σ_pairs −log σ(±(r(A, z) − r(B, z))) + w·KL(q ‖ N(0, I)), one z for all pairs of a user. A policy with z
    beside its observation is trained offline (IQL) on logged episodes that are given rewards of users by lot; for a new
    user z is μ of a few answers. The scale of r(·, z) is free for every z, so a policy hears some users louder than
    others: VPL-SPO trains P(s ≻ s′ | z) instead, and pays a state its win rate against states of the data.

    A square with goals on a circle, of which users want one each, in one half of it. Rows: Bradley and Terry's one
    reward, VPL, VPL with its rewards scaled, VPL-SPO, and VPL where new users answer the set of questions that tells
    most about z (mutual information; the others answer any). Columns are of users who were not in training, though of
    the same kinds: pairs judged rightly where kinds disagree, and where all agree; how much the range of rewards
    differs between users; and how often their policy gets them to their own goal. Where two kinds disagree one reward
    is right half of the time by construction, which says nothing against it on pairs that all agree on.

    kinds     of users; there are twice as many goals
    pairs     labelled pairs of each of so many `users`, `steps` long each
    weight    w; the released code leaves out the ½ of the KL for control, which is a weight of 2 here
    cycles    w rises from 0 along half a cosine so many times, optional for control; 0: it is always w
    reader    `attention` over pairs, as the paper has it for language models, or all pairs `joined` into one network,
              as for control, which takes many more steps to tell users apart
    scaling   of the row with scaled rewards: each user's from 0 to 1, or less the log of their mean exponential
    updates   of IQL for each row; 0 leaves the policies out

    For control the paper has latent 32, hidden 256, batches of 256, 500 epochs and 1000 states to compare with; here
    all is smaller, to take seconds. Priors that learn, an option of the released code, are not built.
    """
    if kinds < 2 or pairs < 1 or steps < 1 or latent < 1 or hidden < 1 or users < kinds:
        raise PanoplyError(
            "vpl needs two kinds of users, one user of each, and at least one pair, step, latent and unit."
        )
    if weight < 0 or cycles < 0 or fit < 1 or updates < 0:
        raise PanoplyError("vpl.weight, cycles and updates are at least 0, and fit at least 1.")
    sizes = Sizes(
        kinds,
        users,
        pairs=pairs,
        steps=steps,
        latent=latent,
        hidden=hidden,
        fit=fit,
        weight=weight,
        cycles=cycles,
        reader=reader,
        updates=updates,
    )
    return arms(sizes, scaling, seed)
