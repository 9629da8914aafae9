"""The mover: weights, and the `update` part that moves them. Rate, clip, guard, and what an optimiser keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.loops.masters import Masters
from panoply.parts import Part
from panoply.slots.schedule.schedules import at
from panoply.slots.update.solver import MiniBatchView, Solver


class Diverged(PanoplyError):
    """The loss, the gradient or the policy's movement is not a sane number; the weights were left as they were."""


def guard(name: str, value: float) -> None:
    """Stop before weights are moved by what is no number."""
    if not math.isfinite(value):
        raise Diverged(f"Stopped: {name} is {value}; the weights of the last good step are kept.")


class Mover:
    """Moves weights as an `update` part says, which need not say more than which optimiser it is.

    Its rates are those that the optimiser was made with, times `schedule`. Another setting that is a schedule, and has
    the name of one of the optimiser's numbers, is followed too. `clip` is the largest norm of a gradient (0: any).

    schedule   in place of the part's own
    """

    def __init__(self, masters: Masters, update: Part, total_steps: int, schedule: Part | None = None):
        settings = update.settings()
        self.masters, self.update, self.total_steps = masters, update, total_steps
        self.optimiser: torch.optim.Optimizer = update(list(masters.moving.values()))
        self.solver = self.optimiser if isinstance(self.optimiser, Solver) else None
        """The optimiser again, where it wants more than gradients."""
        self.limit: float = settings.get("clip", 0.0)
        self.schedule: Part | float = schedule or settings.get("schedule", 1.0)
        self._rates = [float(group.get("lr", 0.0)) for group in self.optimiser.param_groups]
        numbers = self.optimiser.param_groups[0]
        self._followed = {n: v for n, v in settings.items() if n in numbers and isinstance(v, Part)}
        self._looked = False

    def set_rate(self, step: int) -> float:
        """The rates of this step; that of the first weights."""
        factor = at(self.schedule, step, self.total_steps)
        for group, rate in zip(self.optimiser.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
            for name, followed in self._followed.items():
                group[name] = at(followed, step, self.total_steps)
        return self.rate

    @property
    def rate(self) -> float:
        return float(self.optimiser.param_groups[0]["lr"])

    def clip(self) -> float:
        """Shorten the gradient where it is too long; how long it was."""
        return self.masters.clip(self.limit)

    def move(self, view: MiniBatchView | None = None) -> None:
        """One step of the optimiser along the gradients that the weights have."""
        if view is not None:
            self.optimiser.step(view)  # type: ignore[call-overload]
        else:
            self.optimiser.step()
        self.masters.publish()
        if not self._looked:
            self._check_kept()

    def visits(self, generator: torch.Generator) -> Iterator[bool]:
        """The weights where trajectories are wanted, one place after another, and whether those are taken aside."""
        if self.solver is None:
            yield False
            return
        for aside in self.solver.visits(generator):
            self.masters.publish()
            yield aside

    def settle(self) -> None:
        """Put the weights back where they are learned, wherever they were to be sampled with."""
        if self.solver is not None:
            self.solver.settle()
            self.masters.publish()

    # -------------------------------------------------------------- what the optimiser keeps

    def _check_kept(self) -> None:
        """Refuse what could not be saved when it is first kept, not at the first checkpoint."""
        self._looked = True
        for kept in self.optimiser.state.values():
            for name, value in kept.items():
                if value is not None and not isinstance(value, Tensor | int | float):
                    raise PanoplyError(
                        f"{self.update.info.id} keeps '{name}' of its weights, {type(value).__name__}, which cannot be "
                        "saved: keep tensors and numbers."
                    )

    def state(self) -> dict[str, Tensor]:
        """As plain named tensors."""
        named: dict[str, Tensor] = {}
        for name, parameter in self.masters.moving.items():
            for key, value in self.optimiser.state.get(parameter, {}).items():
                if value is not None:
                    named[f"{name}:{key}"] = torch.as_tensor(value).detach()
        return {**named, **self.masters.state()}

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        for full, value in named.items():
            name, _, key = full.rpartition(":")
            if key == "master":
                self.masters.load(name, value)
                continue
            parameter = self.masters.moving[name]
            beside = value.dim() or self.optimiser.defaults.get(
                "fused"
            )  # scalars of the others live on the host
            kept = value.clone().to(parameter.device if beside else value.device)
            self.optimiser.state[parameter][key] = kept
