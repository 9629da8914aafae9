"""A reward of steps that is fitted, as a run goes, to what annotators said of whole episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from panoply.experience import Column, Experience, Segments
from panoply.parts import Finding, part
from panoply.policies.mlp import MLP
from panoply.seeds import torch_rng
from panoply.slots.model.model import Model
from panoply.slots.model.remembered import Remembered
from panoply.slots.update.optimisers import adam
from panoply.worlds.control.world import Discrete

if TYPE_CHECKING:
    from panoply.loops.seat import Seat


class StepReward(Remembered):
    """r(s, a), and the episodes and comparisons it is fitted to, the latest of them."""

    def __init__(self, policy: Any, seed: int, settings: Mapping[str, Any]):
        self.features, self.action = policy.model.features, policy.action
        self.seed, self.settings = seed, settings
        self.wide = self.features.size + (
            self.action.n if isinstance(self.action, Discrete) else _size(self.action)
        )
        self.net = MLP(self.wide, settings["hidden"], 1, "tanh")
        self.net.initialise(torch_rng("preferred", seed))
        self.optimiser = adam(lr=settings["lr"])(self.net.parameters())
        self.steps, self.lengths = torch.zeros(0, self.wide), torch.zeros(0, dtype=torch.long)
        """What is known of episodes, all steps after one another, and how many steps each has."""
        self.pairs, self.p = torch.zeros(0, 2, dtype=torch.long), torch.zeros(0)
        """Which two of them were compared, by their place, and how likely the first is the better one."""

    def described(self, experience: Experience) -> Tensor:
        """[decisions, numbers]: what was seen and done."""
        shown = self.features.forward(experience.context.tensor("observation")[experience["context"]])
        action = experience["action"]
        if isinstance(self.action, Discrete):
            action = functional.one_hot(action.long(), self.action.n)
        return torch.cat([shown.float(), action.float().reshape(len(action), -1)], 1)

    def columns(self, experience: Experience) -> dict[str, Column]:
        return {"signal:preferred": self.net(self.described(experience))[:, 0]}

    # -------------------------------------------------------------- what it learns

    def learn(self, collected: Experience, step: int) -> dict[str, float]:
        """Write down the step's episodes and comparisons, forget old ones, and fit the reward some times."""
        self._write(collected)
        losses = [self._fit(step, i) for i in range(self.settings["fits"])]
        right = (self._ahead(self.pairs[-256:]) > 0) == (self.p[-256:] > 0.5)
        return {"loss": sum(losses) / len(losses), "accuracy": float(right.float().mean())}

    def _write(self, collected: Experience) -> None:
        episodes = collected.by("episode")
        order = episodes.index.argsort(stable=True)
        place = {key: i + len(self.lengths) for i, key in enumerate(episodes.keys.tolist())}
        table = collected.pairs
        assert table is not None
        asked = [[place[key] for key in table.tensor(side).tolist()] for side in ("chosen", "rejected")]
        self.steps = torch.cat([self.steps, self.described(collected)[order]])
        self.lengths = torch.cat([self.lengths, episodes.count])
        self.pairs = torch.cat([self.pairs, torch.tensor(asked).T])
        self.p = torch.cat([self.p, table.tensor("p").float()])
        gone = max(0, len(self.lengths) - self.settings["memory"])
        self.steps, self.lengths = self.steps[int(self.lengths[:gone].sum()) :], self.lengths[gone:]
        kept = (self.pairs >= gone).all(1)
        self.pairs, self.p = self.pairs[kept] - gone, self.p[kept]

    @torch.enable_grad()
    def _fit(self, step: int, i: int) -> float:
        dice = torch_rng("preferred", self.seed, step, i)
        rows = torch.randint(len(self.pairs), (self.settings["batch"],), generator=dice)
        loss = functional.binary_cross_entropy_with_logits(self._ahead(self.pairs[rows]), self.p[rows])
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        return float(loss.detach())

    def _ahead(self, pairs: Tensor) -> Tensor:
        """Of pairs of episodes, by how much the first has earned more, by this reward."""
        asked, place = torch.unique(pairs, return_inverse=True)
        ends = self.lengths.cumsum(0)
        lengths = self.lengths[asked]
        which = torch.arange(len(asked)).repeat_interleave(lengths)
        inside = torch.arange(len(which)) - (lengths.cumsum(0) - lengths)[which]
        earned = self.net(self.steps[(ends - self.lengths)[asked][which] + inside])[:, 0]
        total = Segments(which).sum(earned)[place]
        return total[:, 0] - total[:, 1]

    # -------------------------------------------------------------- saving

    def state(self) -> dict[str, Tensor]:
        moments = self.optimiser.state_dict()["state"]
        kept = {
            f"adam.{i}.{name}": torch.as_tensor(x) for i, held in moments.items() for name, x in held.items()
        }
        known = {"steps": self.steps, "lengths": self.lengths, "pairs": self.pairs, "p": self.p}
        return {**{f"net.{name}": x for name, x in self.net.state_dict().items()}, **known, **kept}

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        self.net.load_state_dict(
            {n.removeprefix("net."): x for n, x in named.items() if n.startswith("net.")}
        )
        self.steps, self.lengths, self.pairs, self.p = (named[n] for n in ("steps", "lengths", "pairs", "p"))
        moments: dict[int, dict[str, Tensor]] = {}
        for name, x in named.items():
            if name.startswith("adam."):
                _, i, which = name.split(".")
                moments.setdefault(int(i), {})[which] = x
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": moments})


def _size(space: Any) -> int:
    return int(torch.tensor(space.shape).prod())


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
