"""Values of tokens beside a policy, by which it acts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from panoply.errors import PanoplyError
from panoply.parts import Finding, part
from panoply.policies.decoder import Decoder
from panoply.policies.steering import TokenValues
from panoply.policies.value import NATIVE
from panoply.seeds import stable_hash
from panoply.slots.model.model import Model

if TYPE_CHECKING:
    from panoply.loops.seat import Seat


def _impossible(held: Any, method: Any, world: Any) -> list[Finding]:
    return [] if world.medium == "text" else [("", "tokens are of text")]


@part(
    "model",
    equation=lambda held: (
        f"acts by log π₀ + {held.beta:g}·{'Q' if held.heads == 1 else 'min(Q₁, Q₂)'}, of every next token"
    ),
    impossible=_impossible,
    bounds={"heads": "from 1 to 2", "beta": "from 0 to 1000000"},
)
def token_values(seat: Seat, *, heads: int = 2, v: bool = True, beta: float = 16.0) -> Model:
    """Q of every token that could come next, and V, read off a model of their own that begins as the policy.

    The policy itself learns no more: whoever samples from it, in this run or later, adds β times the least Q to its
    logits. Subtracting V would change nothing, being the same for all tokens.

    heads   Q that are learned apart, of which the least acts
    v       whether V is learned, too
    """
    policy = cast(Any, seat.policy)
    if policy.values is not None:
        raise PanoplyError(
            "The model is steered by values of tokens already: start from the model that was steered."
        )
    if not isinstance(policy.model, Decoder):
        raise PanoplyError(NATIVE)
    seed = stable_hash("values of tokens", seat.options.seed) % 2**31
    return Model(TokenValues.beside(policy.model, heads=heads, v=v, beta=beta, seed=seed), steers=True)
