"""Transitions: what a loss on them sees. Decisions with what came after, a policy, and the networks that judge it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from panoply.policies.mlp import MLP, Features
from panoply.seeds import torch_rng

if TYPE_CHECKING:
    from panoply.policies.control import ControlPolicy


@dataclass(frozen=True)
class Chunk:
    """k steps in a row, [rows, k, …], the first of which is the transition's own.

    After an episode's end its last step is repeated, and is not `inside`: nothing of another episode is seen.
    """

    observation: Tensor
    action: Tensor
    reward: Tensor
    discount: Tensor
    """γ of each single step, or 0 where the episode terminated there."""
    next_observation: Tensor
    inside: Tensor
    next_legal: Tensor | None = None


@dataclass(frozen=True)
class Transitions:
    """A batch of rows: s, a, what was earned in the n steps from there, and s′ with the weight of its value."""

    observation: Tensor
    action: Tensor
    """Bounded ones from −1 to 1, choices as numbers."""
    reward: Tensor
    """Σ_{i<k} γ^i·r_{t+i} of the k ≤ n steps until the episode ended."""
    discount: Tensor
    """γ^k, or 0 where the episode terminated. A truncated one goes on being worth what its last state is worth."""
    next_observation: Tensor
    more: Mapping[str, Tensor] = field(default_factory=dict)
    """Other columns of the same rows."""
    legal: Tensor | None = None
    """Which actions could be taken at s, and at s′; none where all can."""
    next_legal: Tensor | None = None
    chunk: Chunk | None = None
    """The steps from s on, where the replay draws several in a row (`replay.chunk`)."""
    _kept: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.reward)

    def __getitem__(self, name: str) -> Tensor:
        return self.more[name]

    def once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Something that several losses of one update need, as the first of them finds it."""
        if name not in self._kept:
            self._kept[name] = compute()
        found: Tensor = self._kept[name]
        return found

    def target(self, value: Tensor) -> Tensor:
        """r + γ^k·V(s′), the right side of Bellman's equation."""
        return torch.addcmul(self.reward, self.discount, value)


def joined(first: Transitions, second: Transitions) -> Transitions:
    """The rows of two batches, one after the other, with the columns that both have."""
    return Transitions(
        torch.cat([first.observation, second.observation]),
        torch.cat([first.action, second.action]),
        torch.cat([first.reward, second.reward]),
        torch.cat([first.discount, second.discount]),
        torch.cat([first.next_observation, second.next_observation]),
        {name: torch.cat([first[name], second[name]]) for name in first.more.keys() & second.more.keys()},
        _joined_masks(first.legal, second.legal, first, second),
        _joined_masks(first.next_legal, second.next_legal, first, second),
        _joined_chunks(first, second),
    )


def _joined_chunks(first: Transitions, second: Transitions) -> Chunk | None:
    one, other = first.chunk, second.chunk
    if one is None or other is None:
        return None
    columns = ("observation", "action", "reward", "discount", "next_observation", "inside")
    made = {name: torch.cat([getattr(one, name), getattr(other, name)]) for name in columns}
    return Chunk(**made, next_legal=_joined_masks(one.next_legal, other.next_legal, first, second))


def _joined_masks(
    one: Tensor | None, other: Tensor | None, first: Transitions, second: Transitions
) -> Tensor | None:
    """Where only one side says what can be done, all can on the other."""
    if one is None and other is None:
        return None
    shape = (one if one is not None else other).shape[1:]  # type: ignore[union-attr]
    sides = [
        mask if mask is not None else rows.reward.new_ones(len(rows), *shape, dtype=torch.bool)
        for mask, rows in ((one, first), (other, second))
    ]
    return torch.cat(sides)


@dataclass
class ActorCritic:
    """A policy, the networks beside it, and slowly following copies (targets) of those that losses compare with."""

    policy: ControlPolicy
    networks: Mapping[str, Any]
    targets: Mapping[str, Any]
    generator: torch.Generator = field(default_factory=torch.Generator)
    """Of the noise that losses draw; the learner sets it at every step."""
    acting: bool = False
    """Whether the policy acts by now, or still learns from logged data alone."""
    updates: int = 0
    """How many updates came before this one; the learner counts."""

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.policy.device)

    def _out(self, observation: Tensor, beta: Tensor | None) -> Tensor:
        model = self.policy.model
        out: Tensor = model(observation) if beta is None else model(observation, beta=beta)
        return out

    @torch.no_grad()
    def baseline(self, rows: Transitions) -> Tensor:
        """V(s) to compare with, as it is when first asked for: after V's own step, where that comes first."""
        return self._judged(rows)[: len(rows)]

    @torch.no_grad()
    def after(self, rows: Transitions) -> Tensor:
        """V(s′), at the same weights and in the same pass as `baseline`."""
        return self._judged(rows)[len(rows) :]

    def _judged(self, rows: Transitions) -> Tensor:
        """V(s), then V(s′): one pass over twice the rows takes less time than two."""
        return rows.once(
            "v", lambda: self.networks["v"](torch.cat([rows.observation, rows.next_observation]))
        )

    def draw(self, observation: Tensor, beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Fresh actions of a policy of continuous ones, in their units, and their log-densities.

        beta: of a balanced policy, the coefficient to act by
        """
        head: Any = self.policy.head
        found: tuple[Tensor, Tensor] = head.draw(
            self._out(observation, beta), self.noise(len(observation), head.size)
        )
        return found

    @torch.no_grad()
    def worth(
        self,
        critics: Any,
        observation: Tensor,
        samples: int,
        legal: Tensor | None = None,
        target: bool = False,
        best: bool = False,
    ) -> Tensor:
        """What the most cautious of critics expects of the policy's own actions: their mean value in each state.

        Of one choice of n that is exact, over all of them; of other actions an estimate from `samples` fresh draws.

        target: of the actions of the policy's target
        best: the largest of the values instead
        """
        policy: ControlPolicy = self.targets["policy"] if target else self.policy
        actions, shares = self._options(policy, observation, samples, legal)
        count = len(actions)
        seen = observation.repeat(count, *(1,) * (observation.dim() - 1))
        values: Tensor = critics.least(seen, actions.flatten(0, 1)).view(count, -1)
        if best:
            return values.masked_fill(shares == 0, -torch.inf).amax(0)
        return (shares * values).sum(0)

    def _options(
        self, policy: ControlPolicy, observation: Tensor, samples: int, legal: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """[k, rows, size] actions as critics take them, and [k, rows] shares that they have in a mean."""
        head: Any = policy.head
        out = policy.model(observation)
        if not hasattr(head, "sizes"):
            many = out.repeat(samples, 1)
            drawn = head.draw(many, self.noise(len(many), head.size))[0].unflatten(0, (samples, -1))
            return drawn, drawn.new_full(drawn.shape[:2], 1 / samples)
        distribution = head.distribution(out, legal, None)
        if len(head.sizes) == 1:
            every = torch.eye(distribution.shape[-1], device=distribution.device)
            return every[:, None].expand(-1, len(distribution), -1), distribution.exp().T
        chance = torch.rand(samples, *distribution.shape, generator=self.generator).to(distribution.device)
        noisy = (distribution - (-chance.log()).log()).split(
            list(head.sizes), -1
        )  # the largest is a draw: Gumbel noise
        chosen = torch.stack([part.argmax(-1) for part in noisy], -1)
        units = head.unit(chosen.flatten(0, 1)).unflatten(0, (samples, -1))
        return units, distribution.new_full(units.shape[:2], 1 / samples)

    def act(self, observation: Tensor, target: bool = False) -> Tensor:
        """The action of a deterministic policy, or of its target, in its units."""
        policy: ControlPolicy = self.targets["policy"] if target else self.policy
        head: Any = policy.head
        action: Tensor = head.action(policy.model(observation))
        return action

    def taken(self, rows: Transitions) -> Tensor:
        """The actions that were taken, as critics take them."""
        if rows.action.is_floating_point():
            return rows.action
        return rows.once("taken", lambda: self.policy.head.unit(rows.action))

    def logp(self, rows: Transitions, beta: Tensor | None = None) -> Tensor:
        """log π of the actions that were taken."""
        head = self.policy.head
        action = head.real(rows.action) if rows.action.is_floating_point() else rows.action
        out = self._out(rows.observation, beta)
        return head.score(out, action, rows.legal, None, False)["logp"]


# ------------------------------------------------------------------ networks beside the policy


class QNets(nn.Module):
    """Several Q(s, a) of the policy's widths, each a net of its own (one batched product is slower on a CPU)."""

    def __init__(self, features: Features, nets: list[MLP]):
        super().__init__()
        self.nets = nn.ModuleList(nets)
        self._features = [features]  # the policy's: neither saved nor moved from here

    @classmethod
    def of(cls, policy: ControlPolicy, count: int, seed: int) -> QNets:
        features, spec = policy.model.features, policy.spec
        actions = policy.head.unit(torch.zeros(1, *policy.action.shape, device=policy.device)).shape[-1]
        nets = [MLP(features.size + actions, spec.hidden, 1, spec.activation) for _ in range(count)]
        for i, net in enumerate(nets):
            net.initialise(torch_rng("q", seed, i))
        return cls(features, nets).to(policy.device)

    def forward(self, observation: Tensor, action: Tensor) -> list[Tensor]:
        """A value of each row by each net; actions in their units."""
        x = torch.cat([self._features[0](observation), action], -1)
        return [net(x).squeeze(-1) for net in self.nets]

    def first(self, observation: Tensor, action: Tensor) -> Tensor:
        """The first net's value alone."""
        x = torch.cat([self._features[0](observation), action], -1)
        return self.nets[0](x).squeeze(-1)  # type: ignore[no-any-return]

    def least(self, observation: Tensor, action: Tensor) -> Tensor:
        """The most cautious net's value."""
        values = self(observation, action)
        least: Tensor = values[0]
        for value in values[1:]:
            least = torch.where(value < least, value, least)  # the minimum, with less to do backwards
        return least


def squares(values: list[Tensor], target: Tensor) -> Tensor:
    """Σ_i (Q_i − y)² of each row."""
    if len(values) == 1:
        return (values[0] - target).square()
    return (torch.stack(values) - target).square().sum(0)


class StateValue(nn.Module):
    """V(s)."""

    def __init__(self, features: Features, net: MLP):
        super().__init__()
        self.net = net
        self._features = [features]

    @classmethod
    def of(cls, policy: ControlPolicy, seed: int) -> StateValue:
        features, spec = policy.model.features, policy.spec
        net = MLP(features.size, spec.hidden, 1, spec.activation)
        net.initialise(torch_rng("v", seed))
        return cls(features, net).to(policy.device)

    def forward(self, observation: Tensor) -> Tensor:
        return self.net(self._features[0](observation)).squeeze(-1)  # type: ignore[no-any-return]


class ActionNets(nn.Module):
    """Several Q(s, ·) of the policy's widths, a value for each of n actions; there may be none of them."""

    def __init__(self, nets: list[nn.Module]):
        super().__init__()
        self.nets = nn.ModuleList(nets)

    @classmethod
    def of(cls, policy: ControlPolicy, count: int, seed: int) -> ActionNets:
        nets: list[nn.Module] = []
        for i in range(count):
            net = MLP(
                policy.model.features.size, policy.spec.hidden, policy.head.width, policy.spec.activation
            )
            net.initialise(torch_rng("rung", seed, i))
            nets.append(_Featured(policy.model.features, net))
        return cls(nets).to(policy.device)


class _Featured(nn.Module):
    """A net on the policy's features, which are neither saved nor moved from here."""

    def __init__(self, features: Features, net: MLP):
        super().__init__()
        self.net = net
        self._features = [features]

    def forward(self, observation: Tensor) -> Tensor:
        return self.net(self._features[0](observation))  # type: ignore[no-any-return]


class Temperature(nn.Module):
    """α > 0, learned as its logarithm, or α ≥ 0, as it was given."""

    value: Tensor

    def __init__(self, start: float, learned: bool = True):
        super().__init__()
        self.learned = learned
        if learned:
            self.log = nn.Parameter(torch.tensor(math.log(start)))
        else:
            self.register_buffer("value", torch.tensor(float(start)))

    def forward(self) -> Tensor:
        return self.log.detach().exp() if self.learned else self.value
