"""A reward of steps that is fitted, as a run goes, to what annotators said of whole episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from panoply.experience import Column, Experience, Segments
from panoply.parts import Finding, part
from panoply.seeds import torch_rng
from panoply.slots.model.model import Model
from panoply.slots.model.step_rewards import LearnedReward, SeenAndDone

if TYPE_CHECKING:
    from panoply.loops.seat import Seat


class StepReward(LearnedReward):
    """r(s, a), and the episodes and comparisons it is fitted to, the latest of them."""

    kept = ("steps", "lengths", "pairs", "p")

    def __init__(self, policy: Any, seed: int, settings: Mapping[str, Any]):
        self.described, self.settings = SeenAndDone(policy), settings
        super().__init__("preferred", self.described.wide, settings["hidden"], settings["lr"], seed)
        self.pairs, self.p = torch.zeros(0, 2, dtype=torch.long), torch.zeros(0)
        """Which two of them were compared, by their place, and how likely the first is the better one."""

    def columns(self, experience: Experience) -> dict[str, Column]:
        return {"signal:preferred": self.net(self.described(experience))[:, 0]}

    def learn(self, collected: Experience, step: int) -> dict[str, float]:
        """Write down the step's episodes and comparisons, forget old ones, and fit the reward some times."""
        self._write(collected)
        losses = [self._fit(step, i) for i in range(self.settings["fits"])]
        right = (self._ahead(self.pairs[-256:]) > 0) == (self.p[-256:] > 0.5)
        return {"loss": sum(losses) / len(losses), "accuracy": float(right.float().mean())}

    def _write(self, collected: Experience) -> None:
        place = {key: i + len(self.lengths) for i, key in enumerate(collected.by("episode").keys.tolist())}
        table = collected.pairs
        assert table is not None
        asked = [[place[key] for key in table.tensor(side).tolist()] for side in ("chosen", "rejected")]
        self.pairs = torch.cat([self.pairs, torch.tensor(asked).T])
        self.p = torch.cat([self.p, table.tensor("p").float()])
        gone = self.remember(self.described(collected), collected, self.settings["memory"])
        kept = (self.pairs >= gone).all(1)
        self.pairs, self.p = self.pairs[kept] - gone, self.p[kept]

    @torch.enable_grad()
    def _fit(self, step: int, i: int) -> float:
        dice = torch_rng("preferred", self.seed, step, i)
        rows = torch.randint(len(self.pairs), (self.settings["batch"],), generator=dice)
        ahead = self._ahead(self.pairs[rows])
        return self.descend(functional.binary_cross_entropy_with_logits(ahead, self.p[rows]))

    def _ahead(self, pairs: Tensor) -> Tensor:
        """Of pairs of episodes, by how much the first has earned more, by this reward."""
        asked, place = torch.unique(pairs, return_inverse=True)
        rows, which = self.places(asked)
        total = Segments(which).sum(self.net(self.steps[rows])[:, 0])[place]
        return total[:, 0] - total[:, 1]


def _impossible(held: Any, method: Any) -> list[Finding]:
    if "pairs" not in method.sample.info.gives or getattr(method.sample, "against", "batch") != "batch":
        return [
            (
                "",
                "it is fitted to pairs of the step's episodes, which sample.annotated with against=batch gives",
            )
        ]
    return []


@part(
    "model",
    equation="r(s, a) with P(ξ ≻ ξ′) = σ(Σr − Σr′)",
    needs={"world:control"},
    gives={"signal:preferred"},
    impossible=_impossible,
    bounds={
        "lr": "above 0",
        "fits": "at least 1",
        "batch": "at least 1",
        "memory": "at least 2",
        "hidden": "at least 1",
        "warmup": "at least 0",
    },
)
def preferred(
    seat: Seat,
    *,
    hidden: tuple[int, ...] = (64, 64),
    lr: float = 1e-3,
    fits: int = 20,
    batch: int = 32,
    memory: int = 512,
    warmup: int = 0,
) -> Model:
    """A reward of steps, the signal `preferred`, learned from comparisons of episodes (Bradley and Terry).

    fits, batch   gradient steps in every step of the run, and comparisons in each of them
    memory        how many of the latest episodes it is fitted to
    warmup        steps in which the policy waits for it
    """
    settings = {"hidden": hidden, "lr": lr, "fits": fits, "batch": batch, "memory": memory}
    model = StepReward(seat.policy, seat.options.seed, settings)
    return Model(model, StepReward.columns, learn=StepReward.learn, warmup=warmup)
