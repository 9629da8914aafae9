"""Steps that an earlier self of the policy takes, as where acting and learning are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from panoply.experience import Experience
from panoply.parts import part

if TYPE_CHECKING:
    from panoply.rollout.control import ControlCollector

Weights = dict[str, torch.Tensor]


@part(
    "sample",
    equation="{length} steps of {envs} environments, by the policy of {lag} steps ago",
    needs={"world:step", "world:control"},
    gives={"stale"},
    state=dict,
    cost=lambda held, of: (held.envs * held.length, held.envs * held.length),
    bounds={"envs": "at least 1", "length": "at least 1", "lag": "at least 0"},
)
def lagged(
    state: dict[str, Any], collect: ControlCollector, *, envs: int = 8, length: int = 20, lag: int = 1
) -> tuple[dict[str, Any], Experience]:
    """Like `rollout`, but who acts knows nothing of the last `lag` steps of learning (IMPALA, arXiv 1802.01561).

    `logp` is the acting policy's, so that credit (`vtrace`) or a ratio can make up for the difference. This is what
    learning from actors elsewhere is like. In the first steps the start is the earliest self there is.
    """
    policy, past = collect.policy, _past(state)
    acting = policy
    if past:
        acting = policy.copy()
        acting.model.load_state_dict(past[0])
    with collect.acted_by(acting):
        found = collect.rollout(envs, length)
    past.append({name: weight.detach().clone() for name, weight in policy.model.state_dict().items()})
    kept = enumerate(past[-lag:] if lag else [])
    state = {f"{i}:{name}": weight for i, weights in kept for name, weight in weights.items()}
    return state, found.with_columns(version=found["version"] - (len(past) - 1))


def _past(state: dict[str, Any]) -> list[Weights]:
    """Earlier selves, `lag` of them at most, the earliest first."""
    count = len({name.partition(":")[0] for name in state})
    past: list[Weights] = [{} for _ in range(count)]
    for name, weight in state.items():
        number, _, short = name.partition(":")
        past[int(number)][short] = weight
    return past
