"""The mover: weights, and the `update` part that moves them. Rate, clip, guard, and what an optimiser keeps.

Weights of fewer bits have float32 copies (`Masters`), which the optimiser moves and where gradients add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from panoply.errors import PanoplyError
from panoply.kernels.summing import Sum, summing
from panoply.loops.compiler import leave_unloaded
from panoply.parts import Part
from panoply.policies.expert_adapters import LowRankExperts
from panoply.policies.low_rank import LowRank
from panoply.policies.moving import laid_like, piece
from panoply.policies.scoring import has_triton
from panoply.slots.schedule.schedules import at, settled
from panoply.slots.update.solver import MiniBatchView, Solver


class Diverged(PanoplyError):
    """The loss, the gradient or the policy's movement is not a sane number; the weights were left as they were."""


PLACES = "{} places weights itself, so that run.masters=false is not possible."
SHARED = "{} wants more than gradients, which learners cannot share."


def solves(update: Part) -> bool:
    """Whether an `update` part makes a `Solver`, found out on one weight."""
    leave_unloaded()
    return isinstance(update([nn.Parameter(torch.zeros(1))]), Solver)


def guard(name: str, value: float) -> None:
    """Stop before weights are moved by what is no number."""
    if not math.isfinite(value):
        raise Diverged(f"Stopped: {name} is {value}; the weights of the last good step are kept.")


class Mover:
    """Moves weights as an `update` part says, which need not say more than which optimiser it is.

    Its rates are those that the optimiser was made with, times `schedule`. Another setting that is a schedule, and has
    the name of one of the optimiser's numbers, is followed too. `clip` is the largest norm of a gradient (0: any), and
    a step along one whose norm was above `skip` is not taken (0: all are). Where a term's `episode_kl` is beyond
    `stop_kl` (0: never), no step is taken, and none until there is new experience; where its `kl_behaviour` is above
    `skip_kl` (0: never), this one is not taken.

    schedule   in place of the part's own
    rates      of weights, by name, that have another than the part's
    borrows    whether another moves and saves the same weights: what is saved here is the optimiser's alone
    """

    def __init__(
        self,
        masters: Masters,
        update: Part,
        total_steps: int,
        schedule: Part | None = None,
        rates: Mapping[str, float] | None = None,
        borrows: bool = False,
    ):
        settings = update.settings()
        self.masters, self.update, self.total_steps = masters, update, total_steps
        self.rates, self.borrows = rates or {}, borrows
        leave_unloaded()
        self.optimiser: torch.optim.Optimizer = update(_in_groups(masters.moving, self.rates))
        self.solver = self.optimiser if isinstance(self.optimiser, Solver) else None
        """The optimiser again, where it wants more than gradients."""
        if self.solver is not None and rates:
            raise PanoplyError(
                f"{update.info.id} moves all weights together, and some have a rate of their own."
            )
        self.limit: float = settings.get("clip", 0.0)
        self.skip: float = settings.get("skip", 0.0)
        self.stop_kl: float = settings.get("stop_kl", 0.0)
        self.skip_kl: float = settings.get("skip_kl", 0.0)
        self.norm = 0.0
        """How long the last gradient was, before it was shortened."""
        self.schedule: Part | float = schedule or settings.get("schedule", 1.0)
        self._rates = [float(group.get("lr", 0.0)) for group in self.optimiser.param_groups]
        numbers = self.optimiser.param_groups[0]
        self._followed = {n: v for n, v in settings.items() if n in numbers and isinstance(v, Part)}
        self._factors = settled(self.schedule, total_steps)
        self._looked, self._step = False, 0

    def beside(self, update: Part) -> Mover:
        """Another that moves the same weights, with a rate and moments of its own."""
        return Mover(self.masters, update, self.total_steps, rates=self.rates, borrows=True)

    def set_rate(self, step: int) -> float:
        """The rates of this step; that of the first weights."""
        self._step, known = step, self._factors
        factor = known[min(step, len(known) - 1)] if known else at(self.schedule, step, self.total_steps)
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
        return self.measured(self.masters.clip(self.limit))

    def measured(self, norm: float) -> float:
        """Take note of how long the gradient is."""
        self.norm = norm
        return norm

    @property
    def skips(self) -> bool:
        """Whether the gradient, before it was shortened, was so long that no step is taken along it."""
        return 0 < self.skip < self.norm

    def move(self, view: MiniBatchView | None = None) -> None:
        """One step of the optimiser along the gradients that the weights have."""
        if view is not None:
            self.optimiser.step(view)  # type: ignore[call-overload]
        else:
            self.masters.move(self.optimiser, self._step)
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

    def will_keep(self) -> int:
        """Bytes of what the optimiser will keep of its weights, as its part says."""
        cost = self.update.info.cost
        numbers = 2 if cost is None else cost(self.update)
        return int(numbers * sum(p.nbytes for p in self.masters.moving.values()))

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
        if self.masters.scale != 1.0:
            named[LOSSES_SCALE] = torch.tensor(self.masters.scale)
        return named if self.borrows else {**named, **self.masters.state()}

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        for full, value in named.items():
            name, _, key = full.rpartition(":")
            if full == LOSSES_SCALE:
                self.masters.scale = float(value)
                continue
            if key == "master":
                self.masters.load(name, value)
                continue
            parameter = self.masters.moving[name]
            if name in self.masters.elsewhere:
                continue
            beside = value.dim() or self.optimiser.defaults.get(
                "fused"
            )  # scalars of the others live on the host
            kept = value.clone().to(parameter.device if beside else value.device)
            self.optimiser.state[parameter][key] = laid_like(kept, parameter) if value.dim() else kept


def _in_groups(weights: Mapping[str, nn.Parameter], rates: Mapping[str, float]) -> list[Any]:
    """Weights as an optimiser takes them: in a list, or in groups where some have a rate of their own."""
    if not rates:
        return list(weights.values())
    groups = [{"params": [w], "lr": rates[name]} for name, w in weights.items() if name in rates]
    return [{"params": [w for name, w in weights.items() if name not in rates]}, *groups]


# ------------------------------------------------------------------ the weights that are moved

NARROW = (torch.bfloat16, torch.float16)
SCALE = 2.0**16
"""float16 gradients are computed this many times too large, or they would vanish below its smallest number."""
LOSSES_SCALE = "losses:scale"
"""What that number is saved as; it is halved whenever one is too large."""


class Masters:
    """`moving` are the parameters an optimiser should move: the weights themselves, or their float32 masters.

    A step of 1e-6 is lost on a bfloat16 weight, whose neighbours are 4e-3 of it away; its master keeps it.

    adapted   layers whose weights follow low-rank factors that are among the `weights`
    """

    fixed = False
    """Whether gradients have a place that lasts."""

    def __init__(self, weights: Mapping[str, nn.Parameter], adapted: Iterable[LowRank | LowRankExperts] = ()):
        self.adapted = list(adapted)
        self.weights = {name: w for name, w in weights.items() if w.dtype in NARROW}
        self.masters = {name: nn.Parameter(w.detach().float()) for name, w in self.weights.items()}
        self.moving: dict[str, nn.Parameter] = {**weights, **self.masters}
        self.elsewhere: frozenset[str] = frozenset()
        """Of `moving`, what other processes move: here it has no copy, and is moved by no gradient."""
        followed = (layer.like for layer in self.adapted)
        half = any(w.dtype == torch.float16 for w in (*self.weights.values(), *followed))
        self.scale = SCALE if half else 1.0
        self.sums: dict[str, Sum] = {}
        """Where gradients add up in float32 as they are made: of weights on a GPU that lie in one piece."""

    def summing(self) -> AbstractContextManager[None]:
        """Inside, passes add gradients up where they can; `collect` sees to the others, and must follow."""
        if not self.sums:
            whole = ((n, w) for n, w in self.weights.items() if w.is_cuda and not hasattr(w, "device_mesh"))
            self.sums = {name: Sum(weight) for name, weight in whole}
        return (
            summing({self.weights[n]: each for n, each in self.sums.items()}) if self.sums else nullcontext()
        )

    def named(self) -> dict[str, nn.Parameter]:
        """What carries the gradient of each weight."""
        return self.moving

    def leave(self, names: Iterable[str]) -> None:
        """Let others move these. Gradients still add up here, until they are handed over."""
        self.elsewhere = frozenset(names)
        for name in self.elsewhere & self.masters.keys():
            self.masters[name].data = nothing(self.weights[name])

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter in (*self.weights.values(), *self.moving.values()):
            parameter.grad = None
        for each in self.sums.values():
            each.clear()

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of a micro-batch to the masters', in float32."""
        for name, each in self.sums.items():
            master = self.masters[name]
            if each.total is not None and master.grad is not each.total:
                if master.grad is not None:  # of passes in which autograd had all of it
                    each.total += master.grad
                master.grad = each.total
        given = {name: w.grad for name, w in self.weights.items() if w.grad is not None}
        for weight in self.weights.values():
            weight.grad = None
        for name in self._collect_together(given):
            del given[name]
        for name, slope in given.items():
            master = self.masters[name]
            master.grad = slope.float() if master.grad is None else master.grad.add_(slope)

    def _collect_together(self, given: Mapping[str, Tensor]) -> list[str]:
        """On a GPU one kernel does it for hundreds of weights; the names of those."""
        if not has_triton() or not any(slope.is_cuda for slope in given.values()):
            return []
        from panoply.kernels.collecting import add_all, fits

        kinds: dict[tuple[torch.dtype, bool], list[str]] = {}
        for name, slope in given.items():
            if fits(slope, self.masters[name].grad):
                kinds.setdefault((slope.dtype, self.masters[name].grad is None), []).append(name)
        for (_, fresh), names in kinds.items():
            for name in names if fresh else ():
                self.masters[name].grad = torch.empty_like(given[name], dtype=torch.float32)
            totals = [t for name in names if (t := self.masters[name].grad) is not None]
            add_all(totals, [given[name] for name in names], fresh)
        return [name for names in kinds.values() for name in names]

    def overflowed(self, loss: float) -> bool:
        """Whether the scale was too large for float16; it is then halved, and the pass must be repeated."""
        grads = [m.grad for m in self.moving.values() if m.grad is not None]
        if self.scale <= 1.0 or not grads or not math.isfinite(loss):
            return False
        if bool(torch.nn.utils.get_total_norm(grads).isfinite()):
            return False
        self.scale /= 2
        return True

    @torch.no_grad()
    def unscale(self) -> None:
        """Divide what was collected by the scale its losses were multiplied by."""
        grads = [m.grad for m in self.moving.values() if m.grad is not None]
        if self.scale != 1.0 and grads:
            torch._foreach_div_(grads, self.scale)

    def move(self, optimiser: torch.optim.Optimizer, step: int) -> None:
        """A step of the optimiser."""
        optimiser.step()

    def clip(self, limit: float) -> float:
        """Scale all gradients so that their norm is at most `limit` (0: as it is); the norm it was."""
        gradients = [p.grad for p in self.moving.values() if p.grad is not None]
        if not gradients:
            return 0.0
        norm = torch.nn.utils.get_total_norm(gradients)
        if limit > 0:
            torch.nn.utils.clip_grads_with_norm_(self.moving.values(), limit, norm)
        return float(norm)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the weights, in place: whoever holds those samples from the new policy."""
        mine = [name for name in self.masters if name not in self.elsewhere]
        if mine:
            rounded, wide = ([piece(of[name]) for name in mine] for of in (self.weights, self.masters))
            torch._foreach_copy_(rounded, wide)
        for layer in self.adapted:
            layer.merge()

    def state(self) -> dict[str, Tensor]:
        mine = ((name, master) for name, master in self.masters.items() if name not in self.elsewhere)
        return {f"{name}:master": master.detach() for name, master in mine}

    @torch.no_grad()
    def load(self, name: str, value: Tensor) -> None:
        if name in self.masters:
            self.weights[name].copy_(laid_like(value, self.weights[name]))
            if name not in self.elsewhere:
                self.masters[name].copy_(laid_like(value, self.masters[name]))


def nothing(weight: Tensor) -> Tensor:
    """A float32 tensor of a weight's shape without its memory: a gradient must have a place."""
    return torch.zeros((), device=weight.device).expand(weight.shape)


class Flat(Masters):
    """All weights, and all gradients, as pieces of one vector each, for models whose weights are few and small.

    The optimiser then moves one tensor: the arithmetic is the same, without the many small operations.
    """

    fixed = True

    def __init__(self, weights: Mapping[str, nn.Parameter]):
        super().__init__({})
        self.pieces = dict(weights)
        whole = nn.Parameter(torch.cat([w.detach().flatten() for w in weights.values()]))
        whole.grad = torch.zeros_like(whole)
        self.moving = {"weights": whole}
        sizes = [w.numel() for w in weights.values()]
        numbers, slopes = torch.split(whole.detach(), sizes), torch.split(whole.grad, sizes)
        for weight, number, slope in zip(weights.values(), numbers, slopes, strict=True):
            weight.data = number.view_as(weight)
            weight.grad = slope.view_as(weight)

    def named(self) -> dict[str, nn.Parameter]:
        return self.pieces

    @property
    def gradient(self) -> Tensor:
        found = self.moving["weights"].grad
        assert found is not None
        return found

    def clear(self) -> None:
        self.gradient.zero_()

    def clip(self, limit: float) -> float:
        norm = float(torch.linalg.vector_norm(self.gradient))
        if 0 < limit < norm:
            self.gradient.mul_(limit / (norm + 1e-6))
        return norm
