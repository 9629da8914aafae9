"""Rewards of single steps in control that a network learns as a run goes, from what is known of whole episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from panoply.experience import Experience
from panoply.policies.mlp import MLP
from panoply.seeds import torch_rng
from panoply.slots.model.remembered import Remembered
from panoply.slots.update.optimisers import adam
from panoply.worlds.control.world import Discrete


class LearnedReward(Remembered):
    """A network over rows of numbers, one a step, and the latest episodes, whose steps lie after one another.

    What a subclass remembers beside them it names in `kept`; all of it are tensors.
    """

    kept: tuple[str, ...] = ("steps", "lengths")

    def __init__(self, name: str, wide: int, hidden: Sequence[int], lr: float, seed: int):
        self.name, self.seed, self.wide = name, seed, wide
        self.net = MLP(wide, hidden, 1, "tanh")
        self.net.initialise(torch_rng(name, seed))
        self.optimiser = adam(lr=lr)(self.net.parameters())
        self.steps, self.lengths = torch.zeros(0, wide), torch.zeros(0, dtype=torch.long)
        """What is known of episodes, all steps after one another, and how many steps each has."""

    def remember(self, rows: Tensor, experience: Experience, memory: int) -> int:
        """Write episodes down and forget all but the latest; how many were forgotten."""
        episodes = experience.by("episode")
        order = episodes.index.argsort(stable=True)
        self.steps = torch.cat([self.steps, rows[order]])
        self.lengths = torch.cat([self.lengths, episodes.count])
        gone = max(0, len(self.lengths) - memory)
        self.steps, self.lengths = self.steps[int(self.lengths[:gone].sum()) :], self.lengths[gone:]
        return gone

    def places(self, episodes: Tensor) -> tuple[Tensor, Tensor]:
        """Of some of the episodes, by their place: the rows of all their steps, and whose each is (0, 1, …)."""
        lengths, ends = self.lengths[episodes], self.lengths.cumsum(0)
        which = torch.arange(len(episodes)).repeat_interleave(lengths)
        inside = torch.arange(len(which)) - (lengths.cumsum(0) - lengths)[which]
        return (ends - self.lengths)[episodes][which] + inside, which

    def descend(self, loss: Tensor) -> float:
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        return float(loss.detach())

    # -------------------------------------------------------------- saving

    def state(self) -> dict[str, Tensor]:
        moments = self.optimiser.state_dict()["state"]
        averages = {
            f"adam.{i}.{name}": torch.as_tensor(x) for i, held in moments.items() for name, x in held.items()
        }
        known = {name: getattr(self, name) for name in self.kept}
        return {**{f"net.{name}": x for name, x in self.net.state_dict().items()}, **known, **averages}

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        self.net.load_state_dict(
            {n.removeprefix("net."): x for n, x in named.items() if n.startswith("net.")}
        )
        for name in self.kept:
            setattr(self, name, named[name])
        moments: dict[int, dict[str, Tensor]] = {}
        for name, x in named.items():
            if name.startswith("adam."):
                _, i, which = name.split(".")
                moments.setdefault(int(i), {})[which] = x
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": moments})


class SeenAndDone:
    """What a policy saw and did, as a row of numbers a decision."""

    def __init__(self, policy: Any):
        self.features, self.action = policy.model.features, policy.action
        done = (
            self.action.n
            if isinstance(self.action, Discrete)
            else int(torch.tensor(self.action.shape).prod())
        )
        self.wide = self.features.size + done

    def __call__(self, experience: Experience) -> Tensor:
        """[decisions, numbers]"""
        shown = self.features.forward(experience.context.tensor("observation")[experience["context"]])
        action = experience["action"]
        if isinstance(self.action, Discrete):
            action = functional.one_hot(action.long(), self.action.n)
        return torch.cat([shown.float(), action.float().reshape(len(action), -1)], 1)
