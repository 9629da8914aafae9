"""Networks that learn beside a control policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from panoply.parts import Finding, part

if TYPE_CHECKING:
    from panoply.policies.behaviour import BehaviourModel
    from panoply.policies.control import ControlPolicy
    from panoply.transitions import QNets, StateValue, Temperature


@part(
    "network",
    equation="Q_1 … Q_{count}",
    gives={"network:q"},
    needs={"world:control"},
    bounds={"count": "at least 1"},
)
def q(policy: ControlPolicy, seed: int, *, count: int = 2) -> QNets:
    """Q(s, a), as many nets of the policy's widths; where there are several, the least counts (arXiv 1802.09477)."""
    from panoply.transitions import QNets

    return QNets.of(policy, count, seed)


@part("network", equation="V", gives={"network:v"}, needs={"world:control"})
def v(policy: ControlPolicy, seed: int) -> StateValue:
    """V(s), a net of the policy's widths."""
    from panoply.transitions import StateValue

    return StateValue.of(policy, seed)


def _never_zero(held: Any, method: Any) -> list[Finding]:
    return [("start", "what is learned is its logarithm")] if held.learned and held.start == 0 else []


@part(
    "network",
    equation="α",
    gives={"network:temperature"},
    impossible=_never_zero,
    bounds={"start": "at least 0"},
)
def temperature(policy: ControlPolicy, seed: int, *, start: float = 1.0, learned: bool = True) -> Temperature:
    """The weight of entropy: where it starts, and whether it is learned or stays there."""
    from panoply.transitions import Temperature

    return Temperature(start, learned)


@part("network", equation="η", gives={"network:multiplier"}, bounds={"start": "above 0"})
def multiplier(policy: ControlPolicy, seed: int, *, start: float = 1.0) -> Temperature:
    """The weight of a constraint, learned: more where it is broken, less where it is kept."""
    from panoply.transitions import Temperature

    return Temperature(start)


@part(
    "network",
    equation="q(z|s,a), p(a|s,z)",
    gives={"network:behaviour"},
    needs={"world:continuous actions"},
    bounds={"hidden": "from 1 to 100000"},
)
def behaviour(policy: ControlPolicy, seed: int, *, hidden: tuple[int, ...] = (750, 750)) -> BehaviourModel:
    """Who acted in the data: a conditional variational autoencoder of actions (arXiv 1812.02900)."""
    from panoply.policies.behaviour import BehaviourModel

    return BehaviourModel.of(policy, hidden, seed)
