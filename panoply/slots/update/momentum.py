"""Momentum, and two ways to keep old gradients true while the weights move: look ahead, or correct by the curvature."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from panoply.experience import Segments
from panoply.parts import Finding, Part, part
from panoply.slots.schedule.schedules import constant
from panoply.slots.update.optimisers import LIMITS
from panoply.slots.update.solver import MiniBatchView, Solver

_FLAT = constant()


class Momentum(Solver, torch.optim.Optimizer):
    """d ← (1−η)(d + v) + η·g, then a step along d, of length lr if `normalise`.

    d is a mean of gradients that were taken at older weights. With `extrapolate` they are taken ahead of the weights,
    at θ + (1−η)/η·(θ − θ_before), so far that d is the gradient at θ wherever the gradient is linear. With `hessian` v
    is the Hessian, estimated at a random point between θ_before and θ, times the last step. Both want trajectories
    drawn at those points and not only scored there: see `visits`.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], **settings: Any):
        super().__init__(list(parameters), settings)
        self._home: list[Tensor] | None = None
        """The weights, while they are somewhere else."""
        self._between = 1.0
        """Where on the way from θ_before (0) to θ (1) the curvature is asked for."""

    @property
    def looks(self) -> bool:  # type: ignore[override]
        return bool(self.param_groups[0]["correction"] == "hessian" and self._previous())

    def visits(self, generator: torch.Generator) -> Iterator[bool]:
        """Go where trajectories are wanted: before each of them a word whether they are taken aside."""
        group, before = self.param_groups[0], self._previous()
        if before and group["correction"] == "extrapolate":
            factor = min((1 - group["eta"]) / group["eta"], group["cap"])
            self._leave([w + factor * (w - b) for w, b in zip(group["params"], before, strict=True)])
        elif before and group["correction"] == "hessian":
            self._between = float(torch.rand((), generator=generator))
            self._leave(self._point())
            yield True
            self.settle()
        yield False

    @torch.no_grad()
    def settle(self) -> None:
        """Be back at the weights that are learned."""
        if self._home is not None:
            for weight, kept in zip(self.param_groups[0]["params"], self._home, strict=True):
                weight.copy_(kept)
        self._home = None

    def step(self, view: MiniBatchView | None = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        weights, eta = group["params"], group["eta"]
        self.settle()
        moved = self._curvature(view) if view is not None else [torch.zeros_like(w) for w in weights]
        with torch.no_grad():
            for weight, v in zip(weights, moved, strict=True):
                state = self.state[weight]
                slope = torch.zeros_like(weight) if weight.grad is None else weight.grad
                known = state.get("direction")
                state["direction"] = slope.clone() if known is None else (1 - eta) * (known + v) + eta * slope
            directions = [self.state[weight]["direction"] for weight in weights]
            length = float(torch.nn.utils.get_total_norm(directions)) if group["normalise"] else 1.0
            for weight, direction in zip(weights, directions, strict=True):
                self.state[weight]["previous"] = weight.detach().clone()
                if length > 0:
                    weight.sub_(direction, alpha=group["lr"] / length)

    # -------------------------------------------------------------- pieces

    def _previous(self) -> list[Tensor]:
        """θ_before; nothing before the first step."""
        weights = self.param_groups[0]["params"]
        known = [self.state[w]["previous"] for w in weights if "previous" in self.state.get(w, {})]
        return known if len(known) == len(weights) else []

    def _point(self) -> list[Tensor]:
        weights = self.param_groups[0]["params"]
        return [
            torch.lerp(b, w.detach(), self._between) for b, w in zip(self._previous(), weights, strict=True)
        ]

    @torch.no_grad()
    def _leave(self, there: list[Tensor]) -> None:
        weights = self.param_groups[0]["params"]
        self._home = [w.detach().clone() for w in weights]
        for weight, point in zip(weights, there, strict=True):
            weight.copy_(point)

    def _curvature(self, view: MiniBatchView) -> list[Tensor]:
        """The loss's Hessian times the last step, from the trajectories taken aside."""
        weights = self.param_groups[0]["params"]
        ways = [w.detach() - b for w, b in zip(weights, self._previous(), strict=True)]
        self._leave(self._point())
        logp, credit, episode = view.aside()
        episodes = Segments(episode)
        share = torch.full_like(logp, 1 / len(episodes))
        flat = hessian_product(
            logp, credit, episodes, share, view.leaves, torch.cat([w.flatten() for w in ways])
        )
        self.settle()
        pieces = flat.neg().split([w.numel() for w in weights])  # type: ignore[no-untyped-call]
        return [piece.view_as(w) for piece, w in zip(pieces, weights, strict=True)]


def hessian_product(
    logp: Tensor, credit: Tensor, episodes: Segments, share: Tensor, leaves: list[Tensor], u: Tensor
) -> Tensor:
    """B·u = Σ_τ share_τ·(∇Φ·⟨∇log p(τ), u⟩ + ∇²Φ·u) with Φ = Σ_h A_h·log π(a_h|s_h), whose mean is ∇²J·u.

    ⟨∇log p, u⟩ is that of the very trajectory, so it is asked for row by row, by two passes through the graph.
    """
    sizes = [leaf.numel() for leaf in leaves]
    parts = [p.view_as(leaf) for p, leaf in zip(u.split(sizes), leaves, strict=True)]  # type: ignore[no-untyped-call]

    def along(slopes: Iterable[Tensor | None]) -> Tensor:
        pairs = zip(slopes, parts, strict=True)
        return sum(((s * p).sum() for s, p in pairs if s is not None), logp.new_zeros(()))

    def gradient(of: Tensor, graph: bool) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(of, leaves, create_graph=graph, retain_graph=True, allow_unused=True)

    ones = torch.ones_like(logp, requires_grad=True)
    (score,) = torch.autograd.grad(along(gradient((ones * logp).sum(), True)), ones, retain_graph=True)
    pushed = episodes.rows(episodes.sum(score.detach()))
    first = gradient((share * credit * pushed * logp).sum(), False)
    bent = along(gradient((share * credit * logp).sum(), True))
    second = gradient(bent, False) if bent.requires_grad else (None,) * len(leaves)
    found = [
        sum((g for g in pair if g is not None), torch.zeros_like(leaf)).flatten()
        for *pair, leaf in zip(first, second, leaves, strict=True)
    ]
    return torch.cat(found)


# ------------------------------------------------------------------ the part


def _equation(held: Any) -> str:
    v = " + ∇²J·Δθ" if held.correction == "hessian" else ""
    ahead = " ahead of θ" if held.correction == "extrapolate" else ""
    return f"d = (1−η)(d{v}) + η·g{ahead}, θ + {held.lr:g}·d" + ("/‖d‖" if held.normalise else "")


def _impossible(held: Any, method: Any) -> list[Finding]:
    if held.correction == "none":
        return []
    if held.epochs * held.minibatches > 1:
        return [("correction", "a batch is sampled for one step (epochs and minibatches 1)")]
    if method.regime != "on_policy":
        return [("correction", "it says where to sample, and this method samples nothing")]
    plain = method.surrogate.info.name == "log_likelihood" and method.reduce.info.name == "sequence_sum"
    if held.correction == "hessian" and not (plain and not method.models):
        return [
            ("correction", "it is the curvature of surrogate.log_likelihood with reduce.sequence_sum alone")
        ]
    return []


def _inert(held: Any, method: Any) -> list[Finding]:
    return [] if held.correction == "extrapolate" else [("cap", "nothing is extrapolated")]


@part(
    "update",
    equation=_equation,
    bounds={**LIMITS, "eta": "from 0 to 1", "cap": "at least 0"},
    needs=lambda held: frozenset({"aside"} if held.correction == "hessian" else ()),
    cost=lambda held: 2,
    impossible=_impossible,
    inert=_inert,
)
def momentum(
    parameters: Iterable[torch.nn.Parameter],
    *,
    lr: float = 0.1,
    eta: float | Part = 0.1,
    correction: Literal["none", "extrapolate", "hessian"] = "none",
    normalise: bool = True,
    cap: float = 50.0,
    clip: float = 0.0,
    schedule: Part = _FLAT,
    epochs: int = 1,
    minibatches: int = 1,
) -> torch.optim.Optimizer:
    """Steps along a moving mean of gradients, of a length that does not depend on theirs.

    eta          how much the newest gradient counts, a number or a schedule; 1 is no memory
    correction   what makes up for gradients that are of older weights: nothing, an extrapolated point to sample at
                 (`extrapolate`), or a Hessian-vector product on a second batch (`hessian`)
    cap          how many times the last step it looks ahead at most; (1−η)/η grows as η falls
    """
    first = 1.0 if isinstance(eta, Part) else eta
    settings = {"correction": correction, "normalise": normalise, "cap": cap}
    return Momentum(parameters, lr=lr, eta=first, **settings)
