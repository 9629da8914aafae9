"""Steps measured by how far the policy moves, not by how far its weights do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from panoply.parts import Finding, Part, part
from panoply.slots.schedule.schedules import constant
from panoply.slots.update.optimisers import LIMITS
from panoply.slots.update.solver import MiniBatchView, Solver

_FLAT = constant()


class Natural(Solver, torch.optim.Optimizer):
    """Moves along F⁻¹g, the Fisher matrix F being that of the policy in the states that were visited.

    F·v = mean of Jᵀ·M·(J·v) is two passes through the graph of the distributions, J being their slope in the weights
    and M the Fisher matrix of each by itself; F⁻¹g comes from conjugate gradients. The step is as long as the quadratic
    model allows for a KL of `delta`; with `search` it is shortened until the loss has really fallen and the KL really
    stays below it.
    """

    looks = True

    def __init__(self, parameters: Iterable[torch.nn.Parameter], **settings: Any):
        super().__init__(list(parameters), settings)

    def step(self, view: MiniBatchView) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        weights = group["params"]
        gradient = torch.cat(
            [(w.grad if w.grad is not None else torch.zeros_like(w)).flatten() for w in weights]
        )
        if not bool(gradient.any()):
            return
        before: Tensor | None = None
        if group["fisher"] == "exact":
            head, distribution = view.distribution()
            before = distribution.detach()
            product = fisher(distribution, view.leaves, group["damping"], partial(head.curved, before))
        else:
            product = fisher(view.logp(), view.leaves, group["damping"])
        direction = conjugate(product, gradient, group["iterations"])
        curvature = float(direction @ product(direction))
        if not curvature > 0:
            return
        stride = group["lr"] * (2 * group["delta"] / curvature) ** 0.5
        start = torch.cat([w.detach().flatten() for w in weights])
        loss_before, _ = view.judge(before) if group["search"] else (0.0, 0.0)
        for _ in range(max(1, group["search"])):
            _write(weights, start - stride * direction)
            if not group["search"]:
                return
            loss, kl = view.judge(before)
            if loss < loss_before and kl <= group["delta"]:
                return
            stride *= group["shrink"]
        _write(weights, start)


def fisher(
    outputs: Tensor,
    leaves: list[Tensor],
    damping: float,
    curved: Callable[[Tensor], Tensor] = lambda change: change,
) -> Callable[[Tensor], Tensor]:
    """v ↦ (F + damping)·v, F = mean over rows of Jᵀ·M·J, J the slope of a row's outputs and M what `curved` applies.

    Of the log-probabilities of decisions, and without M, it is the Fisher matrix as the actions drawn estimate it.
    """
    weight = torch.ones_like(outputs, requires_grad=True)
    slopes = torch.autograd.grad(outputs, leaves, weight, create_graph=True, allow_unused=True)
    used = [(s, leaf) for s, leaf in zip(slopes, leaves, strict=True) if s is not None]
    sizes = [leaf.numel() for leaf in leaves]

    def product(v: Tensor) -> Tensor:
        pieces = dict(zip(map(id, leaves), v.split(sizes), strict=True))  # type: ignore[no-untyped-call]
        along = sum((s.flatten() * pieces[id(leaf)]).sum() for s, leaf in used)
        (forward,) = torch.autograd.grad(along, weight, retain_graph=True)
        bent = curved(forward) / len(outputs)
        back = torch.autograd.grad(outputs, leaves, bent, retain_graph=True, allow_unused=True)
        flat = [torch.zeros_like(x) if b is None else b for b, x in zip(back, leaves, strict=True)]
        return torch.cat([b.flatten() for b in flat]) + damping * v

    return product


def conjugate(product: Callable[[Tensor], Tensor], b: Tensor, iterations: int) -> Tensor:
    """x with product(x) ≈ b, by conjugate gradients (Hestenes and Stiefel 1952), as far as the product is positive."""
    x, residual = torch.zeros_like(b), b.clone()
    direction, squared = residual.clone(), residual @ residual
    for _ in range(iterations):
        moved = product(direction)
        curvature = direction @ moved
        if not curvature > 0:
            break
        stride = squared / curvature
        x += stride * direction
        residual -= stride * moved
        new = residual @ residual
        if float(new) < 1e-10:
            break
        direction = residual + new / squared * direction
        squared = new
    return x


@torch.no_grad()
def _write(weights: list[Tensor], flat: Tensor) -> None:
    for weight, piece in zip(weights, flat.split([w.numel() for w in weights]), strict=True):  # type: ignore[no-untyped-call]
        weight.copy_(piece.view_as(weight))


def _inert(held: Any, method: Any) -> list[Finding]:
    return [] if held.search > 1 else [("shrink", f"no shorter steps are tried (search={held.search})")]


@part(
    "update",
    inert=_inert,
    equation="F⁻¹g to a KL of {delta}",
    needs=lambda held: frozenset({"world:control"} if held.fisher == "exact" else ()),
    bounds={
        **LIMITS,
        "delta": "above 0",
        "damping": "at least 0",
        "iterations": "at least 1",
        "search": "at least 0",
        "shrink": "from 0 up to 1",
    },
    cost=lambda held: 0,
)
def natural(
    parameters: Iterable[torch.nn.Parameter],
    *,
    delta: float = 0.01,
    damping: float = 0.1,
    iterations: int = 15,
    search: int = 0,
    shrink: float = 0.8,
    fisher: Literal["exact", "sampled"] = "exact",
    lr: float = 1.0,
    clip: float = 0.0,
    schedule: Part = _FLAT,
    epochs: int = 1,
    minibatches: int = 1,
) -> torch.optim.Optimizer:
    """The natural gradient (Kakade 2001), as long as a KL of `delta` allows; with `search` TRPO's (arXiv 1502.05477).

    search: how many shorter steps are tried, each `shrink` of the one before, until the surrogate has improved within
    the KL; if none has, the weights stay. lr: a share of the full step.
    fisher: `exact` is over all actions in the states visited, as published, and so is the KL(old‖new); `sampled` is
    over the actions that were drawn, for policies whose distributions are too large to keep (language models).
    """
    return Natural(
        parameters, lr=lr, delta=delta, damping=damping, iterations=iterations, search=search, shrink=shrink,
        fisher=fisher,
    )  # fmt: skip
