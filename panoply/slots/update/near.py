"""Adam that looks how far the policy has gone from who acted, before it takes a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from panoply.parts import Finding, Part, part
from panoply.slots.schedule.schedules import constant
from panoply.slots.surrogate.ratios import STAYS
from panoply.slots.update.optimisers import LIMITS, SHARES, Adam

_FLAT = constant()


def _equation(held: Any) -> str:
    stops = f", until episodes are {held.stop_kl:g} nats away" if held.stop_kl else ""
    skips = f", where tokens are within {held.skip_kl:g} nats" if held.skip_kl else ""
    return f"AdamW, lr {held.lr:g}{stops}{skips}"


def _inert(held: Any, method: Any) -> list[Finding]:
    if held.epochs * held.minibatches == 1:
        return [("stop_kl", STAYS), ("skip_kl", STAYS)]
    surrogate = getattr(method, "surrogate", None)
    if surrogate is None or surrogate.info.name != "product_clip":
        return [("stop_kl", "only surrogate=loop/product_clip says how far episodes have moved")]
    return []


@part(
    "update",
    equation=_equation,
    bounds={
        **LIMITS,
        **SHARES,
        "epsilon": "above 0",
        "weight_decay": "at least 0",
        "stop_kl": "at least 0",
        "skip_kl": "at least 0",
    },
    cost=lambda held: 2,
    inert=_inert,
)
def adam_near(
    parameters: Iterable[torch.nn.Parameter],
    *,
    lr: float = 1e-6,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    clip: float = 1.0,
    stop_kl: float = 0.0,
    skip_kl: float = 0.0,
    schedule: Part = _FLAT,
    epochs: int = 1,
    minibatches: int = 1,
) -> torch.optim.Optimizer:
    """Adam that takes no step from mini-batches on which the policy is too far from who acted (`loops/mover.py`).

    stop_kl   above this |mean Σ_t log ρ_t| of its episodes a mini-batch ends the step's epochs: neither it nor what is
              left of them is learned from (0: never)
    skip_kl   a mini-batch above this mean of ρ − 1 − log ρ over tokens is left out alone (0: none)
    """
    return Adam(parameters, lr=lr, beta1=beta1, beta2=beta2, eps=epsilon, weight_decay=weight_decay)
