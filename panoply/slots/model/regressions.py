"""Small regressions that are fitted at once: principal components, standardised, then a ridge, a logistic or an MLP."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from panoply.seeds import torch_rng

Kind = Literal["ridge", "logistic", "mlp"]
FLAT = 1e-6
"""A feature that deviates by less is left as it is, and not blown up."""


@dataclass(frozen=True)
class Fitted:
    """A regression on blocks of features, by its tensors."""

    kind: Kind
    tensors: Mapping[str, Tensor]

    def __call__(self, blocks: Sequence[Tensor]) -> Tensor:
        found = self.tensors
        z = (_reduced(found, blocks) - found["mean"]) / found["scale"]
        if self.kind == "mlp":
            z = (z @ found["inner"] + found["inner_bias"]).relu()
        value = z @ found["weight"] + found["bias"]
        return value.sigmoid() if self.kind == "logistic" else value


def fitted(blocks: Sequence[Tensor], target: Tensor, most: Sequence[int], alpha: float, kind: Kind) -> Fitted:
    """A regression of `target` on blocks [rows, width], each reduced to so many directions (0: left as it is)."""
    found: dict[str, Tensor] = {}
    for i, (block, directions) in enumerate(zip(blocks, most, strict=True)):
        if directions:
            found[f"mean{i}"], found[f"axes{i}"] = axes(block, directions)
    features = _reduced(found, blocks)
    scale = features.std(0, correction=0)
    found |= {"mean": features.mean(0), "scale": scale.where(scale > FLAT, 1.0)}
    z = (features - found["mean"]) / found["scale"]
    return Fitted(kind, {**found, **REGRESSIONS[kind](z, target, alpha)})


def _reduced(found: Mapping[str, Tensor], blocks: Sequence[Tensor]) -> Tensor:
    """All blocks beside one another, each along its directions."""
    along = [
        (block - found[f"mean{i}"]) @ found[f"axes{i}"] if f"axes{i}" in found else block
        for i, block in enumerate(blocks)
    ]
    return torch.cat(along, 1)


def axes(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The mean of some vectors, and as columns the directions in which they differ most (principal components)."""
    mean = x.mean(0)
    off = (x - mean).double()
    if len(x) < x.shape[1]:
        directions = torch.linalg.svd(off, full_matrices=False).Vh.T
    else:
        directions = torch.linalg.eigh(off.T @ off).eigenvectors.flip(1)
    return mean, directions[:, : min(most, *x.shape)].to(x.dtype).contiguous()


def ridge(z: Tensor, target: Tensor, alpha: float) -> dict[str, Tensor]:
    """The least Σ(z·w + b − y)² + α‖w‖². Features have mean 0, so that b is the mean of y."""
    wide, y = z.double(), target.double()
    gram = wide.T @ wide + alpha * torch.eye(z.shape[1], dtype=torch.double)
    weight = torch.linalg.solve(gram, wide.T @ (y - y.mean()))
    return {"weight": weight.to(z.dtype), "bias": y.mean().to(z.dtype)}


def logistic(z: Tensor, target: Tensor, alpha: float) -> dict[str, Tensor]:
    """The least Σ cross-entropy + α/2·‖w‖², by Newton's method; b is free."""
    x = torch.cat([z, torch.ones(len(z), 1, dtype=z.dtype)], 1).double()
    y = target.double().clamp(1e-6, 1 - 1e-6)
    held = torch.full((x.shape[1],), alpha, dtype=torch.double)
    held[-1] = 0.0
    w = torch.zeros_like(held)
    w[-1] = torch.logit(y.mean())
    for _ in range(50):
        p = (x @ w).sigmoid()
        slope = x.T @ (p - y) + held * w
        bend = (x.T * (p * (1 - p))) @ x + torch.diag(held + 1e-9)
        step = torch.linalg.solve(bend, slope)
        w = w - step / step.abs().max().clamp(min=1.0)
        if float(step.abs().max()) < 1e-9:
            break
    return {"weight": w[:-1].to(z.dtype), "bias": w[-1].to(z.dtype)}


WIDTH, EPOCHS, RATE, BATCH, PATIENCE = 64, 1000, 1e-3, 8192, 10
"""Of the MLP: units, passes at most, Adam's rate, rows at once, and the passes without a gain after which it ends."""


@torch.enable_grad()
def mlp(z: Tensor, target: Tensor, alpha: float) -> dict[str, Tensor]:
    """One hidden layer, half the mean squared error + α/(2n)·‖w‖², by Adam, from the same weights every time."""
    dice = torch_rng("mlp", z.shape[1])

    def drawn(*shape: int) -> Tensor:
        bound = math.sqrt(6 / (shape[0] + [*shape, 1][1]))
        return (torch.rand(*shape, generator=dice) * 2 - 1) * bound

    first = {"inner": drawn(z.shape[1], WIDTH), "inner_bias": torch.zeros(WIDTH), "weight": drawn(WIDTH)}
    layers = {n: x.clone().requires_grad_() for n, x in {**first, "bias": target.mean()}.items()}
    optimiser, best, waited = torch.optim.Adam(layers.values(), lr=RATE), float("inf"), 0
    for _ in range(EPOCHS):
        total = 0.0
        for rows in torch.split(torch.randperm(len(z), generator=dice), BATCH):
            inner = (z[rows] @ layers["inner"] + layers["inner_bias"]).relu()
            off = inner @ layers["weight"] + layers["bias"] - target[rows]
            size = layers["inner"].square().sum() + layers["weight"].square().sum()
            loss = off.square().mean() / 2 + alpha / (2 * len(rows)) * size
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            total += float(loss.detach()) * len(rows) / len(z)
        waited = 0 if total < best - 1e-4 else waited + 1
        best = min(best, total)
        if waited == PATIENCE:
            break
    return {name: x.detach() for name, x in layers.items()}


REGRESSIONS: Mapping[Kind, Callable[[Tensor, Tensor, float], dict[str, Tensor]]] = {
    "ridge": ridge,
    "logistic": logistic,
    "mlp": mlp,
}
