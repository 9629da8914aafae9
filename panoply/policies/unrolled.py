"""A policy asked what it would earn, through the dynamics of a world that is differentiable."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from panoply.experience import Experience, moved
from panoply.policies.control import ControlPolicy
from panoply.policies.deterministic import Certain
from panoply.worlds.control.world import ControlWorld, Differentiable


class Unrolled:
    """Scores decisions with `earns`: their rewards, were their episodes played again at the weights of now.

    What chance does in an episode is known by its column `trace` (the seed it began from) and does not depend on the
    actions, so the run is unrolled in torch and its rewards have exact gradients.
    """

    def __init__(self, policy: ControlPolicy, world: ControlWorld):
        assert isinstance(world, Differentiable)
        assert isinstance(policy.head, Certain)
        self.policy, self.world, self.head = policy, world, policy.head
        self.model, self.small = policy.model, policy.small

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.policy.named_parameters()

    def act(self, observation: Tensor) -> Tensor:
        return self.head.action(self.model(observation))

    def score(self, experience: Experience, needs: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        episodes, turn = experience.by("episode"), experience["turn"]
        seeds = episodes.first(experience["trace"]).cpu().numpy()
        earned = self.world.unrolled(self.act, seeds, int(turn.max()) + 1, self.policy.device)
        return {"earns": earned[moved(episodes.index, earned.device), moved(turn, earned.device)]}
