"""Losses of values of tokens (policies/steering.py), on given episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.experience import TRUNCATED
from panoply.parts import Finding, Part, part
from panoply.slots.credit.returns import in_time, to_go

LIMITS = {"gamma": "from 0 to 1", "cql": "at least 0", "weight": "above 0"}


def _asked(heads: int, *more: str) -> Callable[[Any], frozenset[str]]:
    def needs(held: Any) -> frozenset[str]:
        numbers = range(heads)
        found = {f"q:{i}" for i in numbers} | {"whole:episode", f"signal:{held.reward}", *more}
        found |= {f"q_logp:{i}" for i in numbers} if held.cql else set()
        if "v" in more:
            found |= {f"q:{i}@{held.target}" for i in numbers}
        return frozenset(found)

    return needs


def _impossible(held: Any, method: Any) -> list[Finding]:
    heads = [
        m.settings().get("heads") for m in method.slots().get("models", ()) if m.info.name == "token_values"
    ]
    if not heads:
        return [("", "it learns values of tokens, and no model has them (models=token_values)")]
    return []


def following(batch: Batch, value: Tensor) -> Tensor:
    """What a column says of the next decision of the same episode; 0 after its last.

    That is the first token of the next turn after the last one of a turn: what is observed between them is no decision,
    and has no value of its own.
    """
    order = in_time(batch.experience)
    episode, there = batch["episode"][order], value[order]
    same = torch.zeros_like(there)
    same[:-1] = (episode[1:] == episode[:-1]).to(there.dtype)
    found = torch.zeros_like(there)
    found[order] = same * there.roll(-1)
    return found


@part(
    "loss",
    equation=lambda held: (
        f"Σ₁,₂ ½(Qᵢ − (r + {held.gamma:g}·V′))² + |{held.expectile:g} − 1[Q̄ < V]|·½(V − Q̄)²"
        + (f" − {held.cql:g}·Σ₁,₂ log softmax Qᵢ" if held.cql else "")
    ),
    stream="imitation",
    needs=_asked(2, "v"),
    scores="none",
    bounds={**LIMITS, "expectile": "above 0 to 1"},
    impossible=_impossible,
)
def implicit_q(
    batch: Batch,
    *,
    gamma: float = 0.99,
    expectile: float = 0.95,
    cql: float = 0.01,
    target: str = "ema:0.005",
    reward: str = "score",
    capped: bool = False,
    weight: float | Part = 1.0,
) -> Values:
    """Implicit Q-learning token by token (ILQL, arXiv 2206.11871): what is the best that the data have from here on?

    Both Q follow the reward and V of the next token, which is no target's and has no gradient here. V follows a high
    expectile of Q̄, the less of the targets' two, over what the data did: no token is asked about that was never said.

    expectile   1 would be the largest Q̄ of the data, ½ its mean
    cql         weight of −log softmax(Q) of what was said, which keeps down the tokens that were not
    target      the self whose Q V follows: a mean of weights that moves by this share after every step
    capped      whether an episode that a cap ended is worth nothing more, as the released worlds have it; otherwise
                what would have come is not known, and Q learns nothing from its last token
    """
    value, reward_of = batch.now["v"], batch[f"signal:{reward}"].to(batch.now["v"])
    backup = (reward_of + gamma * following(batch, value)).detach()
    known = torch.ones_like(value) if capped else (batch["end"] != TRUNCATED).to(value)
    errors = [known * (batch.now[f"q:{i}"] - backup).square() / 2 for i in (0, 1)]
    least = torch.minimum(*(batch[f"q:{i}@{target}"].to(value) for i in (0, 1)))
    gap = least - value
    of_v = torch.where(gap.detach() < 0, 1 - expectile, expectile) * gap.square() / 2
    total = errors[0] + errors[1] + of_v
    stats = {
        "q_error": (errors[0] + errors[1]).detach(),
        "v_error": of_v.detach(),
        "v_mean": value.detach(),
        "q_mean": batch.now["q:0"].detach(),
    }
    if cql:
        unlikely = -(batch.now["q_logp:0"] + batch.now["q_logp:1"])
        total, stats["cql"] = total + cql * unlikely, unlikely.detach()
    return total, stats


@part(
    "loss",
    equation=lambda held: (
        f"½(Q − G)²,  G_t = r_t + {held.gamma:g}·G_t₊₁"
        + (f" − {held.cql:g}·log softmax Q" if held.cql else "")
    ),
    stream="imitation",
    needs=_asked(1),
    scores="none",
    bounds=LIMITS,
    impossible=_impossible,
)
def returned_q(
    batch: Batch, *, gamma: float = 0.99, cql: float = 0.01, reward: str = "score", weight: float | Part = 1.0
) -> Values:
    """Q of every token regressed on what its own episode went on to earn: the value of who played, not of the best."""
    q = batch.now["q:0"]
    error = (q - to_go(batch.experience, batch[f"signal:{reward}"].to(q), gamma)).square() / 2
    stats = {"q_error": error.detach(), "q_mean": q.detach()}
    if not cql:
        return error, stats
    unlikely = -batch.now["q_logp:0"]
    return error + cql * unlikely, {**stats, "cql": unlikely.detach()}
