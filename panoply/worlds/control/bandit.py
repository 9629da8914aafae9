"""One-step worlds: what is the best action, and how does a gradient find it?"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from panoply.errors import PanoplyError
from panoply.registry import world
from panoply.seeds import numpy_rng
from panoply.worlds.control.drawing import BLUE, FAINT, GOLD, GREEN, RED, Canvas
from panoply.worlds.control.mdp import softmax
from panoply.worlds.control.simulated import Draws, Moved, Simulated, State
from panoply.worlds.control.world import Array, Box, Discrete, Space
from panoply.worlds.measures import measures


class Tables(NamedTuple):
    """What a bandit's seed decides."""

    means: Array
    """[problems, arms]: expected rewards. Of `linear`: [features, arms], weights of the context's features. Of `bits`:
    [groups · contexts, arms], the contexts of one group after another."""
    features: Array
    """[problems, arms, features] of `problems`, in which problems share directions; else empty."""


@world("bandit@1")
@dataclass(frozen=True)
class Bandit(Simulated):
    """One action, one reward, the end.

    - `arms`: `arms` arms with means drawn from [0, 1], or given as `means`.
    - `linear`: a context of `features` normal numbers is seen; an arm pays its own linear function of them.
    - `problems`: one of `problems` questions is seen as its number; `right` of its `arms` answers pay 1. The answers
      have `features` that questions share. With `seen=features` they are all that is seen of a question, and a policy
      that weighs them alike everywhere (`policy.shared=true`, `policy.hidden=[]`) is a softmax over φ(x, a)·θ: what is
      learnt on one question moves others.
    - `bits`: one of 2^`bits` contexts is seen, and an arm pays what it is worth to the user, who is of one of some
      `groups`. What arms are worth is normal around ½ with a deviation of ¼: drawn anew for every context and group
      (`structure=table`), or a linear function of the bits as ±1 that each group has of its own (`linear`). With `told`
      the user's group is seen, too. With `seen=features` a policy sees 1 and the bits, in the place of the user's group
      where it is told: without hidden layers (`policy.hidden=[]`) it is a softmax over them.
    - `ring`: an action is a point in the plane; `modes` peaks on a ring of radius 1 pay up to 1 each.

    Rewards have normal noise of `noise`. `value`, `gradient` and `best` are exact.
    """

    variant: Literal["arms", "linear", "problems", "bits", "ring"] = "arms"
    arms: int = 8
    means: tuple[float, ...] | None = None
    features: int = 4
    problems: int = 40
    right: int = 2
    seen: Literal["number", "features"] = "number"
    """What is seen of one of the `problems`, or of a context of `bits`."""
    bits: int = 4
    groups: int = 1
    structure: Literal["table", "linear"] = "table"
    told: bool = True
    modes: int = 6
    width: float = 0.15
    """Of a ring's peak: its standard deviation."""
    noise: float = 0.0
    seed: int = 0
    horizon: int | None = 1

    bounds: ClassVar[Mapping[str, str]] = {
        "arms": "from 2 to 1000000",
        "means": "any number",
        "features": "from 1 to 100000",
        "problems": "from 1 to 1000000",
        "right": "from 1 to 1000000",
        "bits": "from 1 to 16",
        "groups": "from 1 to 1000",
        "modes": "from 1 to 10000",
        "width": "above 0",
        "noise": "at least 0",
        "seed": "any whole number",
        "horizon": "from 1 to 10000000",
    }

    access = Simulated.access | {"model"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.means is not None:
            object.__setattr__(self, "arms", len(self.means))
        if self.arms < 2:  # of the means
            raise PanoplyError(f"bandit.arms is at least 2, not {self.arms}.")
        if self.variant == "problems" and not 1 <= self.right < self.arms:
            raise PanoplyError(f"bandit.right is a number of the {self.arms} answers, not {self.right}.")

    @property
    def tables(self) -> Tables:
        return _tables(self)

    @property
    def sees(self) -> Space:  # type: ignore[override]
        if self.variant == "linear":
            return Box((self.features,))
        if self.variant == "problems" and self.seen == "features":
            return Box((self.arms * self.features,), nodes=(self.arms, self.features))
        if self.variant == "bits":
            known = self.groups if self.told else 1
            return Discrete(known << self.bits) if self.seen == "number" else Box((known * (1 + self.bits),))
        return Discrete(self.cells)

    @property
    def cells(self) -> int:
        """How many problems there are; of `bits`, contexts of all groups."""
        return {"problems": self.problems, "bits": self.groups << self.bits}.get(self.variant, 1)

    @property
    def takes(self) -> Space:  # type: ignore[override]
        return Box((2,), (-1.5, -1.5), (1.5, 1.5)) if self.variant == "ring" else Discrete(self.arms)

    @property
    def peaks(self) -> Array:
        """Where a ring's modes are."""
        turns = 2 * np.pi * np.arange(self.modes) / self.modes
        return np.stack([np.cos(turns), np.sin(turns)], -1)

    def start(self, draws: Draws) -> State:
        rows = len(draws.seeds)
        taken = np.zeros((rows, 2))
        if self.variant == "linear":
            return {"context": draws.normal(self.features), "taken": taken}
        number = draws.below(self.cells) if self.cells > 1 else np.zeros(rows, np.int64)
        return {"problem": number, "taken": taken}

    def move(self, state: State, actions: Array, draws: Draws) -> Moved:
        if self.variant == "ring":
            paid, taken = self.height(actions), actions.astype(np.float64)
        else:
            paid = self.expected(state)[np.arange(len(actions)), actions]
            taken = np.stack([actions, paid], -1)
        if self.noise:
            paid = paid + self.noise * draws.normal()
        return Moved(state | {"taken": taken}, paid, np.ones(len(paid), bool))

    def look(self, state: State) -> Array:
        if self.variant == "linear":
            return state["context"].astype(np.float32)
        return self._seen(state["problem"])

    def _seen(self, problem: Array) -> Array:
        """What is seen of problems by their numbers."""
        if self.variant == "bits":
            return self._in_context(problem)
        return self._described(problem) if self.seen == "features" else problem

    def _in_context(self, cell: Array) -> Array:
        """What is seen of contexts: their numbers, or 1 and the bits, each with the group where it is told."""
        context = cell % (1 << self.bits)
        if self.seen == "number":
            return cell if self.told else context
        seen = np.zeros((len(cell), self.groups if self.told else 1, 1 + self.bits), np.float32)
        seen[np.arange(len(cell)), cell >> self.bits if self.told else 0] = spelled(context, self.bits)
        return seen.reshape(len(cell), -1)

    def _described(self, problem: Array) -> Array:
        """φ(x, ·) of problems, the features of all their answers after one another."""
        found: Array = self.tables.features[problem].reshape(len(problem), -1).astype(np.float32)
        return found

    def key(self, state: State) -> Array | None:
        return state.get("problem")

    def expert(self, state: State) -> Array:
        if self.variant == "ring":
            return np.broadcast_to(self.peaks[0], (len(state["problem"]), 2))
        best: Array = self.expected(state).argmax(-1)
        return best

    def expected(self, state: State) -> Array:
        """[rows, arms]: what each arm pays on average."""
        if self.variant == "linear":
            paid: Array = state["context"] @ self.tables.means
            return paid
        table: Array = self.tables.means[state["problem"]]
        return table

    def height(self, points: Array) -> Array:
        """What a ring pays at points of the plane: the highest of its peaks there."""
        square = ((points[:, None] - self.peaks) ** 2).sum(-1)
        raised: Array = np.exp(-square / (2 * self.width**2)).max(-1)
        return raised

    def mode(self, points: Array) -> Array:
        """The nearest mode of each point."""
        nearest: Array = ((points[:, None] - self.peaks) ** 2).sum(-1).argmin(-1)
        return nearest

    # -------------------------------------------------------------- exact

    def value(self, logits: Array) -> float:
        """Expected reward of a softmax policy, logits [arms] or [problems, arms]."""
        return float((softmax(logits) * self._means(logits)).sum(-1).mean())

    def gradient(self, logits: Array) -> Array:
        """Its gradient: π_a (r_a − Σ_b π_b r_b), divided by the number of problems."""
        means, policy = self._means(logits), softmax(logits)
        ahead: Array = policy * (means - (policy * means).sum(-1, keepdims=True))
        return ahead / (len(logits) if logits.ndim == 2 else 1)

    def best(self) -> float:
        """The expected reward of the best policy."""
        if self.variant == "linear":
            raise PanoplyError("The best of a linear bandit has no closed form.")
        return 1.0 if self.variant == "ring" else float(self.tables.means.max(-1).mean())

    def _means(self, logits: Array) -> Array:
        if self.variant not in ("arms", "problems", "bits"):
            raise PanoplyError(
                f"Exact values of a softmax are for arms, problems and bits, not for {self.variant}."
            )
        return self.tables.means if logits.ndim == 2 else self.tables.means[0]

    @measures("pass@K")
    def pass_at(self, policy: Any, seed: int, k: int) -> float:
        """How likely one of k answers is right, exactly: the mean of 1 − (1 − p)^k over the problems."""
        return float((1 - (1 - self.rightly(policy)) ** k).mean())

    def rightly(self, policy: Any) -> Array:
        """How likely a policy answers each of the problems rightly."""
        if self.variant != "problems":
            raise PanoplyError(f"A bandit of {self.variant} has no right answers; one of problems has.")
        every = np.arange(self.problems)
        found: Array = (policy.chances(self._seen(every)) * self.tables.means).sum(-1)
        return found

    @measures("worst-group")
    def worst_group(self, policy: Any, seed: int) -> float:
        """What the worst-served group of users loses by a policy against the best for it, exactly."""
        self._check_groups()
        means = self.tables.means.reshape(self.groups, -1, self.arms)
        chances = policy.chances(self._seen(np.arange(self.cells))).reshape(means.shape)
        return float((means.max(-1) - (chances * means).sum(-1)).mean(-1).max())

    def users(self, seeds: Array) -> tuple[Array, Array]:
        """Of starts by their seeds: the group of the user who comes, and the most that an arm is worth to him."""
        self._check_groups()
        cell = self.start(Draws(seeds, 0))["problem"]
        return cell >> self.bits, self.tables.means[cell].max(-1)

    def _check_groups(self) -> None:
        if self.variant != "bits":
            raise PanoplyError(f"A bandit of {self.variant} has no groups of users; one of bits has.")

    def picture(self, state: State, size: int = 240) -> Array:
        if self.variant == "ring":
            sheet = Canvas(size, (-1.6, 1.6), (-1.6, 1.6))
            for peak in self.peaks:
                sheet.disc(peak, 2 * self.width, FAINT)
                sheet.disc(peak, self.width, GREEN)
            sheet.disc(state["taken"][0], 0.06, RED)
            return sheet.pixels()
        means = self.expected({name: column[:1] for name, column in state.items()})[0]
        top, floor = max(1.0, float(means.max())), min(0.0, float(means.min()))
        sheet = Canvas(size, (0, self.arms), (floor * self.arms, top * self.arms))
        for arm, mean in enumerate(means * self.arms):
            low, high = min(0.0, mean), max(0.0, mean)
            taken = state["taken"][0, 1] != 0 and state["taken"][0, 0] == arm
            sheet.box((arm + 0.1, low), (arm + 0.9, high), GOLD if taken else BLUE)
        return sheet.pixels()


def spelled(context: Array, bits: int) -> Array:
    """1 and the bits of numbers as ±1: 2 of two bits, whose second is set, is 1, −1, 1."""
    found: Array = 2.0 * (context[:, None] >> np.arange(bits) & 1) - 1
    return np.concatenate([np.ones((len(context), 1)), found], axis=1)


@functools.lru_cache(maxsize=64)
def _tables(world: Bandit) -> Tables:
    rng = numpy_rng("bandit", world.variant, world.seed)
    nothing = np.zeros((0, 0, 0))
    if world.variant == "linear":
        return Tables(rng.normal(size=(world.features, world.arms)) / np.sqrt(world.features), nothing)
    if world.variant == "problems":
        means = np.zeros((world.problems, world.arms))
        for row in means:
            row[rng.permutation(world.arms)[: world.right]] = 1.0
        return Tables(means, rng.normal(size=(world.problems, world.arms, world.features)))
    if world.variant == "bits":
        size = (world.groups, 1 << world.bits, world.arms)
        if world.structure == "linear":
            weights = rng.normal(size=(world.groups, 1 + world.bits, world.arms)) / np.sqrt(1 + world.bits)
            worth = spelled(np.arange(1 << world.bits), world.bits) @ weights
        else:
            worth = rng.normal(size=size)
        return Tables((0.5 + worth / 4).reshape(-1, world.arms), nothing)
    means = rng.random(world.arms) if world.means is None else np.asarray(world.means, np.float64)
    return Tables(means[None], nothing)
