"""The learner of agents: a policy and networks beside it that learn from transitions, each by losses of its own.

An update is a few milliseconds of small matrix products, so there is nothing in it but those: batches are gathered from
the replay's tensors, gradients are asked for of the parameters that move and of no others, and metrics are noted in
some updates and read once a step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from panoply.experience import Experience
from panoply.loops.mover import Masters, Mover, guard
from panoply.loops.samples import Watch
from panoply.parts import Part
from panoply.policies.control import ControlPolicy
from panoply.regimes import Offline, OffPolicy
from panoply.replay import Memory
from panoply.transitions import ActorCritic, Transitions

NOTED = 25
"""Metrics are noted in one update of so many."""


class _Descent:
    """One loss, what it moves, and by which optimiser."""

    def __init__(
        self,
        loss: Part,
        update: Part,
        parameters: Mapping[str, nn.Parameter],
        resting: Sequence[nn.Parameter],
        total_steps: int,
    ):
        settings = loss.settings()
        self.resting = resting
        """Parameters that this loss looks at and does not move: their gradients are not even computed."""
        self.loss, self.every = loss, int(settings.get("every", 1))
        self.named, self.parameters = parameters, list(parameters.values())
        chosen: Part = settings.get("update") or update
        self.mover = Mover(Masters(parameters), chosen, total_steps, settings.get("schedule"))

    def step(self, learned: ActorCritic, rows: Transitions) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Move once; the loss, and what it says of the rows."""
        for parameter in self.resting:
            parameter.requires_grad_(False)
        try:
            values, stats = self.loss.filled(learned, rows)
            value = values.mean()
            gradients = torch.autograd.grad(value, self.parameters)
        finally:
            for parameter in self.resting:
                parameter.requires_grad_(True)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        if self.mover.limit > 0:
            self.mover.clip()
        self.mover.move()
        return value.detach(), stats


class ActorCriticLearner:
    """Makes a method's networks, and moves them and the policy: for transitions what `Learner` is for terms."""

    def __init__(
        self,
        policy: ControlPolicy,
        method: OffPolicy | Offline,
        *,
        seed: int,
        total_steps: int,
    ):
        self.policy, self.method, self.total_steps = policy, method, total_steps
        self.replay: Memory = method.replay(policy, seed)
        self.batch: int = method.replay.settings()["batch"]
        self.rhythm = method.rhythm(total_steps)
        self.envs = 1
        if method.sample is not None:
            acting = method.sample.settings()
            self.envs = acting["envs"]
            self.replay.begin(self.envs, self.envs * acting["length"] * total_steps)
        networks = {held.info.name: held(policy, seed) for held in method.networks}
        models: dict[str, nn.Module] = {"policy": policy.model, **networks}
        self.models = models
        wanted = sorted(n.removeprefix("target:") for n in method.needs() if n.startswith("target:"))
        self.targets = {
            name: policy.copy(seeing_alike=True) if name == "policy" else self._copied(models[name])
            for name in wanted
        }
        self.learned = ActorCritic(policy, networks, self.targets)
        self.descents = [self._descent(loss) for loss in method.losses]
        self._follow = {
            n: (list(_module(self.targets[n]).parameters()), list(models[n].parameters())) for n in wanted
        }
        self.updates = 0
        self.watch: Watch | None = None
        self._data: Experience | None = None
        self._noted: list[Mapping[str, Tensor]] = []
        self._named: set[str] = set()

    def _copied(self, network: nn.Module) -> nn.Module:
        """A copy that sees what the policy sees: the same features, whatever they learn of the data later."""
        features = self.policy.model.features
        return copy.deepcopy(network, {id(features): features}).requires_grad_(False)

    @property
    def optimisers(self) -> list[torch.optim.Optimizer]:
        return [descent.mover.optimiser for descent in self.descents]

    def _descent(self, loss: Part) -> _Descent:
        moved = {}
        for name in loss.learns():
            model, _, piece = name.partition(".")  # `policy.balance` is a piece of the policy
            for key, parameter in self.models[model].get_submodule(piece).named_parameters():
                moved[f"{name}.{key}"] = parameter
        mine = set(moved.values())
        rest = (p for model in self.models.values() for p in model.parameters() if p not in mine)
        resting = [p for p in rest if p.requires_grad]
        return _Descent(loss, self.method.update, moved, resting, self.total_steps)

    # -------------------------------------------------------------- remembering

    def remember(self, experience: Experience) -> None:
        """Fill the replay with logged data, unless it is, beside what the policy does itself, if it acts."""
        if experience is self._data:
            return
        self._data = experience
        self.replay.add(experience)
        self.policy.learn_statistics(experience, once=True)

    # -------------------------------------------------------------- learning

    def begin(self, step: int, generator: torch.Generator) -> None:
        """Before a step's updates: their random numbers, and the rates of learning."""
        self.learned.generator = generator
        for descent in self.descents:
            descent.mover.set_rate(step)

    def learn(self, count: int = 1) -> None:
        """So many updates, each on a batch of its own."""
        follow = self.method.targets.filled
        for _ in range(count):
            rows = self.replay.draw(self.batch, self.learned.generator)
            self.learned.updates = self.updates
            for descent in self.descents:
                if (self.updates + 1) % descent.every == 0:
                    value, stats = descent.step(self.learned, rows)
                    name = descent.loss.info.name
                    if self.updates % NOTED < descent.every or name not in self._named:
                        self._noted.append({name: value, **stats})
                        self._named.add(name)
            self.updates += 1
            follow(self.updates, self._follow)

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Means of what was noted since the last time; raises where a loss is not finite."""
        noted, self._noted, self._named = self._noted, [], set()
        found: dict[str, list[Tensor]] = {}
        for stats in noted:
            for name, column in stats.items():
                found.setdefault(name, []).append(column.float().mean())
        means = {name: float(torch.stack(several).mean()) for name, several in found.items()}
        losses = {
            d.loss.info.name: means[d.loss.info.name] for d in self.descents if d.loss.info.name in means
        }
        for name, value in losses.items():
            guard(f"the loss {name}", value)
        rate = self.descents[0].mover.rate
        return {"loss": sum(losses.values()), **means, "updates": self.updates, "lr": rate}

    # -------------------------------------------------------------- as a learner of given data

    def minibatches(self, experience: Experience, generator: torch.Generator) -> Iterator[Experience]:
        """The data as one, from which batches are drawn; the replay is filled with it whenever it is another."""
        self.remember(experience)
        for descent in self.descents if len(self.replay) else ():
            if descent.loss.info.annotate is not None:
                self.replay.annotate(
                    partial(descent.loss.info.annotate, self.learned, **descent.loss.settings())
                )
        self.learned.generator = generator
        yield experience

    def step(self, experience: Experience, step: int) -> dict[str, float]:
        """All updates of one step of a run on given data."""
        self.begin(step, self.learned.generator)
        if len(self.replay):
            self.learn(self.rhythm.a_step)
        return self.metrics()

    def settle(self) -> None:
        """The weights are always where they are learned."""

    # -------------------------------------------------------------- saving

    def state(self) -> dict[str, Tensor]:
        """Networks, targets, what optimisers keep, and what was collected, as plain named tensors."""
        named = {f"target:{n}:{k}": v for n, t in self.targets.items() for k, v in _state(t).items()}
        named |= {
            f"network:{n}:{k}": v for n, m in self.learned.networks.items() for k, v in _state(m).items()
        }
        for number, descent in enumerate(self.descents):
            named |= {f"optimiser:{number}:{key}": value for key, value in descent.mover.state().items()}
        if self.method.sample is not None:
            named |= self.replay.state()
        return {**named, "updates": torch.tensor(self.updates)}

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        held = {"target": self.targets, "network": self.learned.networks}
        for full, value in named.items():
            kind, _, rest = full.partition(":")
            if kind in held:
                name, _, key = rest.partition(":")
                _state(held[kind][name])[key].copy_(value)
            elif kind == "optimiser":
                number, _, key = rest.partition(":")
                self.descents[int(number)].mover.load_state({key: value})
        self.updates = int(named["updates"])
        if self.method.sample is not None:
            self.replay.load_state(named)


def _state(model: Any) -> Mapping[str, Tensor]:
    return {name: weight.detach() for name, weight in _module(model).state_dict().items()}


def _module(model: Any) -> nn.Module:
    """A network, or the one inside of a policy."""
    module: nn.Module = getattr(model, "model", model)
    return module
