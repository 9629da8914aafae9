"""The layout `sharded`: torch's FSDP2 holds a piece of everything on every rank, for models beyond a rank's memory.

A block's weights are gathered before it computes and let go after it; embedding, last norm and head stay gathered for
a pass, since log-probabilities are computed outside of the model. Gradients are summed, not averaged: rows come with
their weights. With several machines pieces lie inside of each and machines hold copies (HSDP).

Blocks are not fused: joined views and kernels of Numba would keep gathered weights that must be let go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.loops.mover import Masters
from panoply.planning import Plan
from panoply.scale.meeting import Meeting


def check(plan: Plan) -> None:
    """Refuse what needs more than pieces, in one sentence."""
    from panoply.kinds import is_text
    from panoply.selves import named

    needs, method = plan.method.needs(), plan.method
    update: Any = method.slots().get("update")
    kept = [one.name for one in named(needs) if one.kind != "reference"]
    for is_so, why in (
        (not is_text(plan.world()), "its policy is no decoder"),
        (bool(plan.seats()), "it has several seats"),
        (bool(plan.options.lora), "adapters follow whole weights"),
        ("judged" in needs or bool(method.slots().get("models")), "a model learns beside the policy"),
        (bool(kept), f"the policy is compared with another self, {', '.join(kept)}"),
        (plan.options.dtype == "float16", "float16 looks for a scale that all pieces share"),
        (not plan.options.masters, "run.masters=false rounds whole weights"),
        (
            update is not None and update.settings().get("bits", 32) != 32,
            "moments of 8 bits are of whole weights",
        ),
        (plan.options.cluster == "threads", "torch shards over processes, and threads are one"),
    ):
        if is_so:
            said = f"--layout sharded is not possible for {plan.method_id} here"
            raise PanoplyError(f"{said}: {why}. Take --layout whole.")


def shard(model: Any, nodes: int, ranks: int) -> None:
    """Cut a decoder into pieces, in place, over the ranks that have met."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    shape, names = ((nodes, ranks // nodes), ("copies", "pieces")) if nodes > 1 else ((ranks,), ("pieces",))
    mesh = init_device_mesh(model.device.type, shape, mesh_dim_names=names)
    model.fusing = False
    # gloo ends the process where gradients are to be widened on their way
    wide = (
        MixedPrecisionPolicy(reduce_dtype=torch.float32)
        if model.device.type == "cuda"
        else MixedPrecisionPolicy()
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=wide)
    fully_shard(model, mesh=mesh, mp_policy=wide, reshard_after_forward=False)
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, "hidden_states")


class Sharded:
    """For pieces what `Shards` is for whole weights: FSDP sums gradients in a pass, and gathers weights in the next."""

    def __init__(self, masters: Masters, meeting: Meeting, model: Any):
        self.masters, self.meeting, self.model, self.norm = masters, meeting, model, 0.0

    @torch.no_grad()
    def sum(self) -> float:
        self.model.reshard()
        gradients = [p.grad for p in self.masters.moving.values() if p.grad is not None]
        self.norm = float(whole(torch.nn.utils.get_total_norm(gradients))) if gradients else 0.0
        return self.norm

    @torch.no_grad()
    def clip(self, limit: float) -> None:
        factor = limit / (self.norm + 1e-6) if limit > 0 else 1.0
        for parameter in self.masters.moving.values() if factor < 1 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    @contextmanager
    def own_alone(self) -> Iterator[None]:
        yield

    def hand_around(self) -> None: ...

    def gradient(self) -> dict[str, Tensor]:
        return self.first_only(
            {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.masters.named().items()}
        )

    def first_only(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors of pieces, which the first rank tells; all must ask for them."""
        found = {name: whole(held.detach()) for name, held in named.items()}
        return found if self.meeting.rank == 0 else {}

    kept = first_only


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which each rank has a piece."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found
