"""How parameters move."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch

from panoply.parts import Finding, Part, part
from panoply.slots.schedule.schedules import constant
from panoply.slots.update.eight_bits import BLOCK, EightBitAdam

_FLAT = constant()


LIMITS = {"lr": "above 0", "clip": "at least 0", "epochs": "at least 1", "minibatches": "at least 1"}


def _inert(held: Any, method: Any) -> list[Finding]:
    if method.regime not in ("off_policy", "offline"):
        return []
    found = [(name, "batches are drawn from a replay (replay.batch)") for name in ("epochs", "minibatches")]
    skips = "skip" in held.settings()
    return [*found, *([("skip", "losses of transitions take every step")] if skips else [])]


SHARES = dict.fromkeys(("beta1", "beta2", "momentum"), "from 0 up to 1")


@part(
    "update",
    equation="AdamW, lr {lr}",
    bounds={**LIMITS, **SHARES, "epsilon": "above 0", "weight_decay": "at least 0", "skip": "at least 0"},
    cost=lambda held: 2 if held.bits == 32 else 2 * (1 / 4 + 1 / BLOCK),
    inert=_inert,
)
def adam(
    parameters: Iterable[torch.nn.Parameter],
    *,
    lr: float = 1e-6,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    clip: float = 1.0,
    skip: float = 0.0,
    bits: Literal[32, 8] = 32,
    schedule: Part = _FLAT,
    epochs: int = 1,
    minibatches: int = 1,
) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay; the gradient's norm is clipped at `clip` (0: never).

    A step along a gradient whose norm, before it is clipped, is above `skip` is not taken (0: all are).
    Its two averages take `bits` a weight each; 8 are a quarter of the memory, rounded by chance and right on average.
    """
    return (Adam if bits == 32 else EightBitAdam)(
        parameters, lr=lr, beta1=beta1, beta2=beta2, eps=epsilon, weight_decay=weight_decay
    )


class Adam(torch.optim.Optimizer):
    """torch's fused AdamW kernel, and nothing else between a gradient and it.

    `torch.optim.AdamW` is the same arithmetic, but takes longer to arrive at the kernel than the kernel takes for a
    small network.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], **settings: float):
        super().__init__(list(parameters), {**settings, "fused": True})
        self._alike: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
        """Parameters of one device and dtype, and their group, which has their rates."""
        for group in self.param_groups:
            alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
            for parameter in group["params"]:
                alike.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            self._alike += [(group, some) for some in alike.values()]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for chosen, alike in self._alike:
            rates = {name: chosen[name] for name in ("lr", "beta1", "beta2", "eps", "weight_decay")}
            moving = [parameter for parameter in alike if parameter.grad is not None]
            if not moving:
                continue
            slopes = [parameter.grad for parameter in moving if parameter.grad is not None]
            kept = [self.state[parameter] or self._begin(parameter) for parameter in moving]
            means, squares = ([k[n] for k in kept] for n in ("exp_avg", "exp_avg_sq"))
            steps = self._counted(kept, moving[0].device)
            torch._fused_adamw_(
                moving, slopes, means, squares, [], steps, **rates, amsgrad=False, maximize=False
            )  # fmt: skip
        for hook in self._optimizer_step_post_hooks.values():
            hook(self, (), {})

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it in a profiler's marks and the hooks above

    @staticmethod
    def _counted(kept: list[dict[str, Any]], device: torch.device) -> list[torch.Tensor]:
        """One step more for each: a number, and for the kernel one tensor of all that have moved as often."""
        made: dict[float, torch.Tensor] = {}
        for held in kept:
            count = held["step"] = float(held["step"]) + 1
            if count not in made:
                made[count] = torch.full((), count, device=device)
        return [made[held["step"]] for held in kept]

    def _begin(self, parameter: torch.Tensor) -> dict[str, Any]:
        kept = {
            "step": 0.0,
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
        self.state[parameter] = kept
        return kept


@part(
    "update",
    equation="SGD, lr {lr}",
    bounds={**LIMITS, **SHARES},
    cost=lambda held: 1 if held.momentum else 0,
    inert=_inert,
)
def sgd(
    parameters: Iterable[torch.nn.Parameter],
    *,
    lr: float = 1e-2,
    momentum: float = 0.0,
    clip: float = 1.0,
    schedule: Part = _FLAT,
    epochs: int = 1,
    minibatches: int = 1,
) -> torch.optim.Optimizer:
    """Plain stochastic gradient descent."""
    return torch.optim.SGD(list(parameters), lr=lr, momentum=momentum)


@part(
    "update",
    equation="RMSprop, lr {lr}",
    bounds={**LIMITS, "decay": "from 0 up to 1", "epsilon": "above 0"},
    cost=lambda held: 1,
    inert=_inert,
)
def rmsprop(
    parameters: Iterable[torch.nn.Parameter],
    *,
    lr: float = 7e-4,
    decay: float = 0.99,
    epsilon: float = 1e-5,
    clip: float = 0.5,
    schedule: Part = _FLAT,
    epochs: int = 1,
    minibatches: int = 1,
) -> torch.optim.Optimizer:
    """RMSprop (Hinton 2012): each weight's step is divided by the root of its recent squared gradients."""
    return torch.optim.RMSprop(list(parameters), lr=lr, alpha=decay, eps=epsilon)
