"""How an objective changes with parameters that others are optimised for: gradients through the solution of a problem.

Above, G(ν, θ) is to rise; below, θ*(ν) maximises V(ν, ·). Since ∇_θ V(ν, θ*(ν)) stays 0 as ν moves,
∇²_νθ V + dθ*/dν·∇²_θθ V = 0, and that is all one needs to know of how θ* moves (Dontchev and Rockafellar 2009).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from panoply.slots.update.natural import conjugate

Value = Callable[[Tensor, Tensor], Tensor]
"""V(ν, θ), exact or of a sample, that can be differentiated twice."""
Solver = Literal["exact", "conjugate gradient", "diagonal"]
ITERATIONS = 100
"""Of conjugate gradients, at most."""


def hypergradient(
    value: Value,
    nu: Tensor,
    theta: Tensor,
    by_nu: Tensor,
    by_theta: Tensor,
    solver: Solver = "exact",
    damping: float = 0.0,
) -> Tensor:
    """dG/dν = ∂_ν G − ∇²_νθ V·[∇²_θθ V]⁻¹·∂_θ G, where θ maximises V(ν, ·).

    Only [∇²_θθ V − damping]⁻¹∂_θ G is solved for: conjugate gradients see the curvature through products with vectors.
    A softmax does not change when all its logits do, so the curvature is singular in those directions, in which ∂_θ G
    is 0: `exact` takes the pseudo-inverse, the others need damping.
    """
    nu, theta = nu.detach().requires_grad_(), theta.detach().requires_grad_()
    (slope,) = torch.autograd.grad(value(nu, theta), theta, create_graph=True)

    def bent(vector: Tensor) -> Tensor:  # (damping − ∇²_θθ V)·vector, positive where θ is a maximum
        (product,) = torch.autograd.grad((slope * vector.view_as(theta)).sum(), theta, retain_graph=True)
        return damping * vector - product.flatten()

    if solver == "conjugate gradient":
        size = by_theta.norm().clamp(min=1e-300)
        solved = -size * conjugate(bent, by_theta.flatten() / size, ITERATIONS).view_as(theta)
    else:
        every = torch.eye(theta.numel(), dtype=theta.dtype)
        curvature = -torch.stack([bent(one) for one in every])
        if solver == "diagonal":
            flat = by_theta.flatten() / curvature.diagonal()
        else:
            flat = torch.linalg.pinv(curvature, hermitian=True, rtol=1e-10) @ by_theta.flatten()
        solved = flat.view(theta.shape)
    (through,) = torch.autograd.grad((slope * solved).sum(), nu)
    return by_nu - through
