"""LaRe: rewards of single steps from what whole episodes earned, as a function of a few factors that matter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from panoply.errors import PanoplyError, nearest
from panoply.evidence.claims import Ahead, Learns
from panoply.experience import Column, Experience
from panoply.methods.base.ppo import ppo
from panoply.methods.base.preference_ppo import CONTROL as WHOLE_EPISODES
from panoply.parts import Finding, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, algorithm, method
from panoply.rewards.factors import FactorFunction
from panoply.seeds import torch_rng
from panoply.slots.model.model import Model
from panoply.slots.model.step_rewards import LearnedReward, SeenAndDone
from panoply.slots.reward.running import over_deviation
from panoply.slots.reward.signals import signal
from panoply.worlds.control.pointmass import Pointmass
from panoply.worlds.logged.behaviour import episodes

if TYPE_CHECKING:
    from panoply.loops.seat import Seat

Loss = Literal["rd", "rrd", "rrd_unbiased"]
Factors = Callable[[Tensor, Tensor], Tensor]

# ------------------------------------------------------------------ factors


def reach(seen: Tensor, done: Tensor) -> Tensor:
    """Of `pointmass`: how far the goal is, how fast one is, how much one pushes."""
    distance = (seen[:, :2] - seen[:, 4:6]).norm(dim=1)
    return torch.stack([distance, seen[:, 2:4].norm(dim=1), done.square().sum(1)], 1)


def reach_and_noise(seen: Tensor, done: Tensor) -> Tensor:
    """The same with two that have nothing to do with what is paid: the first two distractors."""
    return torch.cat([reach(seen, done), seen[:, 6:8]], 1)


def reach_without_distance(seen: Tensor, done: Tensor) -> Tensor:
    """The same without what is paid."""
    return reach(seen, done)[:, 1:]


RAW = "raw"
WRITTEN: dict[str, Factors] = {
    each.__name__: each for each in (reach, reach_and_noise, reach_without_distance)
}
"""Written by hand, in place of a language model."""


def _file(name: str) -> Path | None:
    return Path(name) if name.endswith(".py") else None


def _factors(name: str) -> Factors:
    """One of those written by hand, or the function `factors` of a file, which runs in a sandbox."""
    if (path := _file(name)) is None:
        return WRITTEN[name]
    function = FactorFunction(path.read_text("utf-8"))

    def of_file(seen: Tensor, done: Tensor) -> Tensor:
        rows = [*zip(seen.tolist(), done.reshape(len(done), -1).tolist(), strict=True)]
        return torch.tensor(function(rows))

    return of_file


# ------------------------------------------------------------------ the reward


def decomposition(rewards: Tensor, paid: Tensor, lengths: Tensor, unbiased: bool = True) -> Tensor:
    """(mean of r̂ over K drawn steps − R/T)², less what drawing K of T steps adds to it on average.

    rewards: [episodes, K]; paid: R/T and lengths: T, [episodes]

    What is subtracted is Var(r̂)·(1 − K/T)/K, with 1/(K − 1) in the variance. Where there are fewer than K steps they
    are drawn with replacement, and it is Var(r̂)/K.
    """
    k = rewards.shape[1]
    error = (rewards.mean(1) - paid).square()
    if unbiased:
        share = torch.where(lengths >= k, 1 - k / lengths, 1.0)
        error = error - share * rewards.var(1) / k
    return error.mean()


class Decomposed(LearnedReward):
    """r̂(z), and the latest episodes with what each of them earned."""

    kept = ("steps", "lengths", "returns")

    def __init__(
        self, describe: Callable[[Experience], Tensor], wide: int, seed: int, settings: Mapping[str, Any]
    ):
        self.describe, self.settings = describe, settings
        super().__init__("decomposed", wide, settings["hidden"], settings["lr"], seed)
        self.returns = torch.zeros(0)

    def columns(self, experience: Experience) -> dict[str, Column]:
        return {"signal:decomposed": self.net(self.describe(experience))[:, 0]}

    def learn(self, collected: Experience, step: int) -> dict[str, float]:
        """Write the step's episodes down, forget old ones, and fit the reward some times."""
        earned = collected.by("episode").sum(collected["signal:reward"].float())
        self.returns = torch.cat([self.returns, earned])
        gone = self.remember(self.describe(collected), collected, self.settings["memory"])
        self.returns = self.returns[gone:]
        losses = [self.fit(step, i) for i in range(self.settings["fits"])]
        return {"loss": sum(losses) / len(losses)}

    @torch.enable_grad()
    def fit(self, step: int, i: int) -> float:
        """One step of Adam on some of the episodes, by lot."""
        dice = torch_rng("decomposed", self.seed, step, i)
        chosen = torch.randint(len(self.lengths), (self.settings["batch"],), generator=dice)
        lengths, paid = self.lengths[chosen], self.returns[chosen] / self.lengths[chosen]
        if self.settings["loss"] == "rd":
            rows, which = self.places(chosen)
            sums = torch.zeros(len(chosen)).index_add(0, which, self.net(self.steps[rows])[:, 0])
            return self.descend((sums / lengths - paid).square().mean())
        rows = self.drawn(chosen, self.settings["k"], dice)
        rewards = self.net(self.steps[rows.reshape(-1)])[:, 0].reshape(rows.shape)
        return self.descend(decomposition(rewards, paid, lengths, self.settings["loss"] == "rrd_unbiased"))

    def drawn(self, chosen: Tensor, k: int, dice: torch.Generator) -> Tensor:
        """[episodes, k]: rows of k different steps of each; of an episode with fewer, drawn with replacement."""
        lengths = self.lengths[chosen]
        most = max(int(lengths.max()), k)
        lots = torch.rand(len(chosen), most, generator=dice)
        apart = lots.masked_fill(torch.arange(most) >= lengths[:, None], 2.0).argsort(1)[:, :k]
        any_ = (torch.rand(len(chosen), k, generator=dice) * lengths[:, None]).long()
        first = (self.lengths.cumsum(0) - self.lengths)[chosen]
        return first[:, None] + torch.where(lengths[:, None] >= k, apart, any_)


def _impossible(held: Any, method: Any, world: Any) -> list[Finding]:
    if method.sample.info.name == "rollout":
        return [
            ("", "it is fitted to whole episodes, and sample.rollout leaves some open: take sample.groups")
        ]
    path = _file(held.factors)
    if path is not None and not path.is_file():
        return [("factors", f"there is no file {path}")]
    if path is None and held.factors not in (RAW, *WRITTEN):
        meant = (nearest(held.factors, [RAW, *WRITTEN]) or [*WRITTEN])[0]
        return [
            ("factors", f"it is a file FILE.py or one that is written, such as {meant}, not '{held.factors}'")
        ]
    least = {"reach": 6, "reach_without_distance": 6, "reach_and_noise": 8}.get(held.factors, 0)
    if least and (
        world.name != "pointmass" or world.variant != "reach" or world.observation.shape[0] < least
    ):
        return [("factors", f"{held.factors} is about pointmass, variant reach, with {least} numbers to see")]
    return (
        [("k", "the variance of one step is unknown")] if held.k < 2 and held.loss == "rrd_unbiased" else []
    )


def _inert(held: Any, method: Any) -> list[Finding]:
    return [("k", "rd takes all steps of an episode")] if held.loss == "rd" else []


def _equation(held: Any) -> str:
    inputs = "s, a" if held.factors == RAW else f"{held.factors}(s, a)"
    steps = "all" if held.loss == "rd" else str(held.k)
    return f"r̂({inputs}) with mean r̂ of {steps} steps = R/T"


@part(
    "model",
    equation=_equation,
    needs={"world:control", "signal:reward"},
    gives={"signal:decomposed"},
    impossible=_impossible,
    inert=_inert,
    bounds={
        "k": "at least 1",
        "lr": "above 0",
        "fits": "at least 1",
        "batch": "at least 1",
        "memory": "at least 1",
        "hidden": "at least 1",
        "warmup": "at least 0",
    },
)
def decomposed(
    seat: Seat,
    *,
    factors: str = "raw",
    loss: Loss = "rrd_unbiased",
    k: int = 64,
    hidden: tuple[int, ...] = (256, 256, 256),
    lr: float = 3e-4,
    fits: int = 50,
    batch: int = 32,
    memory: int = 1000,
    warmup: int = 0,
) -> Model:
    """A reward of steps, the signal `decomposed`, such that its mean over an episode is what a step of it earned.

    factors       what it is a function of: FILE.py with a function `factors(observation, action)` of lists, which runs
                  in a sandbox; `reach` and its kin for pointmass; `raw`, all that was seen and done
    loss          `rd`: all steps of an episode; `rrd`: `k` of them by lot, which is cheaper and adds the variance of
                  the lot; `rrd_unbiased`: less that variance, so that it may fall below 0
    fits, batch   gradient steps in every step of the run, and episodes in each of them
    memory        how many of the latest episodes it is fitted to
    warmup        steps in which the policy waits for it
    """
    given = {"loss": loss, "k": k, "hidden": hidden, "lr": lr, "fits": fits, "batch": batch, "memory": memory}
    describe, wide = _described(seat.policy, factors)
    model = Decomposed(describe, wide, seat.options.seed, given)
    return Model(model, Decomposed.columns, learn=Decomposed.learn, warmup=warmup)


def _described(policy: Any, factors: str) -> tuple[Callable[[Experience], Tensor], int]:
    """What of a step its reward is a function of, and how many numbers that is."""
    raw = SeenAndDone(policy)
    if factors == RAW:
        return raw, raw.wide
    function, seen = _factors(factors), int(np.prod(policy.model.features.space.shape))
    done = int(np.prod(getattr(policy.action, "shape", ())))

    def described(experience: Experience) -> Tensor:
        shown = experience.context.tensor("observation")[experience["context"]].float()
        return function(shown.reshape(-1, seen), experience["action"].float().reshape(-1, done))

    return described, function(torch.zeros(1, seen), torch.zeros(1, done)).shape[1]


# ------------------------------------------------------------------ how well it tells steps apart


def arms(seed: int, number: int, fits: int, distractors: int, loss: Loss) -> dict[str, float]:
    """How r̂ of steps of new episodes correlates with what they really earned, by what r̂ is a function of."""
    world = Pointmass(distractors=distractors)
    data = episodes(world, lambda steps: 1.0, 2 * number * (world.horizon or 60), seed)
    seen, done = (torch.from_numpy(data.columns[name]).float() for name in ("observation", "action"))
    paid, whose = torch.from_numpy(data.columns["reward"]), torch.from_numpy(data.columns["episode"])
    known = whose < number
    inputs: dict[str, Factors] = {"all that is seen and done": lambda s, a: torch.cat([s, a], 1)}
    inputs |= {"factors": reach, "and two that do not matter": reach_and_noise}
    inputs |= {"without the distance": reach_without_distance}
    return {
        name: _correlation(describe(seen, done), paid, whose, known, seed, fits, loss)
        for name, describe in inputs.items()
        if name != "and two that do not matter" or distractors >= 2
    }


def _correlation(
    rows: Tensor, paid: Tensor, whose: Tensor, known: Tensor, seed: int, fits: int, loss: Loss
) -> float:
    from panoply.loops.compiler import leave_unloaded

    leave_unloaded()
    given = {"loss": loss, "k": 32, "hidden": (64, 64), "lr": 1e-3, "batch": 32}
    model = Decomposed(lambda _: rows, rows.shape[1], seed, given)
    model.steps, model.lengths = rows[known], torch.bincount(whose[known])
    model.returns = torch.zeros(len(model.lengths)).index_add(0, whose[known], paid[known].float())
    for i in range(fits):
        model.fit(0, i)
    with torch.no_grad():
        said = model.net(rows[~known])[:, 0]
    return float(torch.corrcoef(torch.stack([said.double(), paid[~known].double()]))[0, 1])


def measure(seed: int) -> dict[str, float]:
    """By how much factors are ahead of all that is seen and done, after 50 episodes."""
    found = arms(seed, 50, 300, 16, "rrd_unbiased")
    return {"correlation ahead": found["factors"] - found["all that is seen and done"], **found}


@algorithm(
    "latent-reward@1",
    paper=98,
    claim=Ahead(
        "After 50 episodes of which only the sums are known, with sixteen numbers of noise among what is seen, a "
        "reward of three factors correlates more with what steps really earned than one of all that is seen and done.",
        measure,
    ),
)
def latent_reward(
    episodes: int = 50, fits: int = 300, distractors: int = 16, loss: Loss = "rrd_unbiased", seed: int = 0
) -> dict[str, float]:
    """LaRe's rewards (arXiv 2412.11120): how well returns of episodes tell steps apart, by what a reward sees of them.

    A point that moves by chance (`pointmass`), with `distractors` numbers of noise beside what it sees; each step earns
    minus its distance to the goal, and only the sum is known. Rewards are fitted to `episodes` of them, `fits` steps of
    Adam; correlations are over the steps of as many new ones. Rows: all that is seen and done (RRD); distance, speed
    and effort (LaRe); these and two numbers of noise; these without the distance, which is what is paid.
    """
    if episodes < 1 or fits < 1 or distractors < 0:
        raise PanoplyError("latent-reward needs an episode and a fit, and counts distractors from 0.")
    return arms(seed, episodes, fits, distractors, loss)


# ------------------------------------------------------------------ the method


CONTROL = {
    **WHOLE_EPISODES,
    "models.decomposed.k": 32,
    "models.decomposed.hidden": (64, 64),
    "models.decomposed.lr": 1e-3,
}
"""PPO's numbers on whole episodes, and a smaller reward."""
EPISODIC = {"world.reward": "episodic", "world.distractors": "16", "run.held_out": "128"}
PUBLISHED: Published = {
    "the authors' code, mujoco/reward_model": {
        "models.decomposed.loss": "rrd_unbiased",
        "models.decomposed.k": 64,
        "models.decomposed.hidden": (256, 256, 256),
        "models.decomposed.lr": 3e-4,
    },
}


@method(
    "lare@1",
    paper=98,
    base="ppo",
    world="pointmass",
    presets={"control": CONTROL},
    claim=Learns(
        "Where an episode is paid at its end, with sixteen numbers of noise among what is seen, PPO on a reward of "
        "three factors learns more than PPO on a reward of all that is seen and done.",
        over="lare:models.decomposed.factors=raw",
        world="pointmass",
        budget="episodes=800",
        settings=EPISODIC,
        metric="area",
        also=("success",),
        best=-2.0,
        reworded="after 1280 episodes the rival had filled 86 % of the room",
    ),
    published=PUBLISHED,
)
def lare() -> OnPolicy:
    """LaRe (arXiv 2412.11120): a reward of steps, learned from what episodes earn, of a few factors that matter.

    z_t = φ(s_t, a_t) are a handful of numbers, by a function that a language model wrote for the task; r̂_t = f(z_t) is
    fitted to whole episodes, (mean of r̂ over K steps by lot − R/T)² − Var(r̂)·(1 − K/T)/K, where the second term is what
    drawing K of T steps adds on average; PPO learns on r̂. What the factors leave out cannot be mistaken for what is
    paid, so far fewer episodes are enough than for a reward of all that is seen (`models.decomposed.factors=raw`: RRD).

    Surprising: r̂ is known only up to how it is spread over steps that always come together, and the loss may fall
    below 0.

    `panoply.rewards.factors.write_factors` lets a language model write φ: five candidates, which it puts together
    itself, tried on steps, and mended when they fail. Such code runs in a sandbox alone
    (`models.decomposed.factors=FILE.py`). By default φ is written by hand for pointmass. Where an episode has fewer
    than K steps the authors' code subtracts a negative share, which adds variance; here it is what drawing with
    replacement adds.

    Not built: TD3 and SAC, the paper's learners in MuJoCo, which recompute rewards of stored steps; sums over agents.
    """
    base = ppo()
    return base.but(
        reward=over_deviation(reward=signal(name="decomposed")),
        models=(*base.models, decomposed(factors="reach")),
    )
