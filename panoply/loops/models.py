"""Models beside the policy: critics, reward models, probes.

Each may annotate experience, answer a sample part's questions about tasks, and learn from what was collected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from panoply.experience import Experience
from panoply.loops.learner import Scorer, mean_metrics
from panoply.parts import Part
from panoply.seeds import torch_rng
from panoply.slots.model.model import Model

if TYPE_CHECKING:
    from panoply.loops.seat import Seat
    from panoply.policies.thoughts import Thoughts


class Kept(Protocol):
    """What is saved with a run, whatever it is made of."""

    def save(self, folder: Path) -> None: ...

    def load_weights(self, folder: Path) -> None: ...


class Annotator(Scorer, Kept, Protocol):
    """A model that says something about decisions."""

    outputs: tuple[str, ...]
    """What it gives for them, by name."""


class Together:
    """A policy and the models that learn with it: one forward pass, one backward pass, one optimiser."""

    def __init__(self, policy: Scorer, models: Mapping[str, Annotator]):
        self.policy, self.models = policy, models
        self.model, self.small = getattr(policy, "model", None), getattr(policy, "small", False)

    def score(self, experience: Experience, needs: frozenset[str]) -> dict[str, Tensor]:
        found = self.policy.score(experience, needs.difference(*(m.outputs for m in self.models.values())))
        for model in self.models.values():
            found |= model.score(experience, needs)
        return found

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.policy.named_parameters()
        for name, model in self.models.items():
            yield from ((f"{name}.{key}", parameter) for key, parameter in model.named_parameters())


class Models:
    """All of a method's models, by the name of their part."""

    def __init__(self, seat: Seat):
        options = seat.options
        self.seed = options.seed
        self.held: dict[str, Model] = {
            part.info.name: part(seat) for part in getattr(seat.method, "models", ())
        }
        settings = {
            "total_steps": options.steps,
            "micro_tokens": options.micro_tokens,
            "recompute": options.recompute,
            "offload": options.offload,
            "masters": options.masters,
        }
        make = seat.teacher
        self.learners = {
            name: make(name)(c.model, c.fit, **settings) for name, c in self.held.items() if c.fit is not None
        }
        self.warmup = max((c.warmup for c in self.held.values()), default=0)
        for held in self.held.values():
            if held.thinks:
                cast(Any, seat.policy).think(held.model)
            if held.steers:
                cast(Any, seat.policy).steer(held.model)

    @property
    def thoughts(self) -> Thoughts | None:
        """What has become a part of the policy."""
        return next((held.model for held in self.held.values() if held.thinks), None)

    def joined(self, policy: Scorer) -> Scorer:
        """The policy, with the models that learn together with it."""
        models = {name: c.model for name, c in self.held.items() if c.losses or c.joins}
        return Together(policy, models) if models else policy

    def joined_losses(self) -> list[Part]:
        """What the policy's learner descends for them."""
        return [loss for c in self.held.values() for loss in c.losses]

    def annotate(self, experience: Experience) -> Experience:
        """Add every model's columns, beside those that are there already, wherever the model is."""
        beside = experience["action"].device
        with torch.no_grad():
            for held in self.held.values():
                columns = held.columns(held.model, experience) if held.columns else {}
                experience = experience.with_columns(**{n: c.to(beside) for n, c in columns.items()})
        return experience

    def asked(self) -> dict[str, Callable[[Sequence[Any]], Tensor]]:
        """What a collector may ask about tasks, by the name of the model."""
        return {name: partial(c.ask, c.model) for name, c in self.held.items() if c.ask is not None}

    def instead(self, collected: Experience, step: int) -> tuple[Experience, dict[str, float]]:
        """What the policy learns from: what was collected, unless a model gives something else in its place."""
        found, metrics = collected, dict[str, float]()
        for name, held in self.held.items():
            if held.instead is not None:
                found, learned = held.instead(held.model, collected, step)
                metrics |= {f"{name}_{key}": float(value) for key, value in learned.items()}
        return (found if found is collected else self.annotate(found)), metrics

    def fit(self, experience: Experience, step: int) -> dict[str, float]:
        """Before the policy learns, let every model do so that learns by gradients; its metrics carry its name."""
        found: dict[str, float] = {}
        for name, learner in self.learners.items():
            if self.held[name].stays and step >= self.held[name].warmup:
                continue
            order, among = torch_rng("fit", name, self.seed, step), self.held[name].among
            rows = among(experience) if among is not None else experience
            metrics = mean_metrics([learner.step(m, step) for m in learner.minibatches(rows, order)])
            learner.settle()
            found |= {f"{name}_{key}": value for key, value in metrics.items()}
        return found

    @torch.no_grad()
    def learn(self, collected: Experience, step: int) -> dict[str, float]:
        """After the policy has learned, let those learn that need no gradients.

        collected   all that was sampled, whether or not it was selected to learn from
        """
        found: dict[str, float] = {}
        for name, held in self.held.items():
            if held.learn is not None:
                learned = held.learn(held.model, collected, step)
                found |= {f"{name}_{key}": float(value) for key, value in learned.items()}
        return found

    # -------------------------------------------------------------- saving

    def save(self, folder: Path) -> None:
        for name, held in self._learning():
            held.model.save(folder / name)

    def state(self) -> dict[str, Tensor]:
        return {
            f"model:{n}:{k}": v for n, learner in self.learners.items() for k, v in learner.state().items()
        }

    def load(self, folder: Path, named: Mapping[str, Any]) -> None:
        for name, held in self._learning():
            held.model.load_weights(folder / name)
        for name, learner in self.learners.items():
            prefix = f"model:{name}:"
            learner.load_state({k.removeprefix(prefix): v for k, v in named.items() if k.startswith(prefix)})

    def _learning(self) -> list[tuple[str, Model]]:
        """What is saved here; thoughts are the policy's, and saved with it."""
        kept = (c.fit or c.losses or c.joins or c.learn or c.instead for c in self.held.values())
        learning = (pair for pair, keep in zip(self.held.items(), kept, strict=True) if keep)
        return [(name, held) for name, held in learning if not held.thinks]
