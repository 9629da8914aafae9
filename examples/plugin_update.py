"""An optimiser of your own: panoply train grpo --update lion --plugin examples/plugin_update.py"""

from collections.abc import Iterable

import torch
from torch import nn

import panoply as pp


class Lion(torch.optim.Optimizer):
    """What it keeps of a weight in `state` is saved with the run, and given back when the run is resumed."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for weight in group["params"]:
            if weight.grad is not None:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                weight -= group["lr"] * torch.lerp(weight.grad, mean, group["beta1"]).sign()
                mean.lerp_(weight.grad, 1 - group["beta2"])


@pp.part("update", equation="θ − {lr}·sign({beta1}·m + (1 − {beta1})·g)")
def lion(
    parameters: Iterable[nn.Parameter], *, lr: float = 1e-4, beta1: float = 0.9, beta2: float = 0.99
) -> Lion:
    """Lion (arXiv 2302.06675): the sign of a mean of gradients, so that every weight moves by `lr`."""
    return Lion(parameters, {"lr": lr, "beta1": beta1, "beta2": beta2})
