"""A term that remembers: panoply train grpo --regularise kl_limit --plugin examples/plugin_term.py"""

from typing import Any

import torch

import panoply as pp
from panoply.batch import Batch, Values


def repriced(state: dict[str, Any], batch: Batch, *, limit: float, rate: float, **_: Any) -> tuple[Any, Any]:
    """λ ← max(0, λ + rate·(½l² − limit)), once a mini-batch, however it is split; saved and resumed with the run."""
    far = float(batch.log_ratio("reference").square().mean()) / 2
    price = max(0.0, state["price"] + rate * (far - limit))
    return {"price": price}, {"price": price}


@pp.part(
    "regularise",
    state=lambda: {"price": 0.0},
    prepare=repriced,
    needs={"logp@reference"},
    equation="λ·½l², KL < {limit}",
)
def kl_limit(batch: Batch, *, weight: float = 1.0, limit: float = 0.1, rate: float = 1.0) -> Values:
    """KL(π‖π_ref) ≈ ½l² is kept below `limit` by a price λ that rises while it is above and falls while it is below."""
    price = batch.prepared["kl_limit"]["price"]
    far = batch.log_ratio("reference")
    return price * far.square() / 2, {"kl_price": torch.full_like(far, price).detach()}
