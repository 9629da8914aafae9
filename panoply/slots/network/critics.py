"""Networks that learn beside a control policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from panoply.parts import part

if TYPE_CHECKING:
    from panoply.policies.control import ControlPolicy
    from panoply.policies.critics import QNets, StateValue, Temperature


@part(
    "network",
    equation="Q_1 … Q_{count}",
    gives={"network:q"},
    needs={"world:control"},
    bounds={"count": "at least 1"},
)
def q(policy: ControlPolicy, seed: int, *, count: int = 2) -> QNets:
    """Q(s, a), as many nets of the policy's widths; where there are several, the least counts (arXiv 1802.09477)."""
    from panoply.policies.critics import QNets

    return QNets.of(policy, count, seed)


@part("network", equation="V", gives={"network:v"}, needs={"world:control"})
def v(policy: ControlPolicy, seed: int) -> StateValue:
    """V(s), a net of the policy's widths."""
    from panoply.policies.critics import StateValue

    return StateValue.of(policy, seed)


@part("network", equation="α", gives={"network:temperature"}, bounds={"start": "above 0"})
def temperature(policy: ControlPolicy, seed: int, *, start: float = 1.0) -> Temperature:
    """The weight of entropy, learned."""
    from panoply.policies.critics import Temperature

    return Temperature(start)
