"""Values of tokens that steer a model: logits + β·min Q, wherever it is sampled from, scored or opened.

A model that is steered stays as it is. Beside it stands another of its layout, read token by token through heads: Q of
every token that could come next, and V of what has been said. They are a part of the model: they are learned, copied
and saved with it, in files beside its own, which stay what they are without them.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from panoply.errors import PanoplyError, plain
from panoply.files import is_file, read_json
from panoply.policies.attention import Above, Cache
from panoply.policies.decoder import Decoder
from panoply.policies.low_rank import plain as unadapted
from panoply.policies.scoring import Head, chunk_of, chunks, naive_scores
from panoply.policies.taps import Output, Pass, tap
from panoply.policies.weights import check_fit, read_weights

SETTINGS, WEIGHTS = "values.json", "values.safetensors"
"""Beside a model's own files."""
OUTPUTS = ("q", "q_logp", "v")
"""What values of tokens say of decisions, as outputs of a forward pass."""


class Mlp(nn.Module):
    """Two layers with ReLU between them, the second of zeros, so that every value starts at 0. float32, always."""

    def __init__(self, width: int, outputs: int, dice: torch.Generator):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, outputs)
        with torch.no_grad():
            self.first.weight.copy_(torch.randn(width, width, generator=dice) / math.sqrt(width))
            for zero in (self.first.bias, self.second.weight, self.second.bias):
                zero.zero_()

    def forward(self, state: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.first(state.to(self.first.weight.dtype))))
        return out


class TokenValues(nn.Module):
    """A decoder with heads: Q(s, ·) over the vocabulary, once or twice, and perhaps V(s).

    heads   how many Q; the least of them acts
    v       whether there is a V
    beta    how much a unit of Q counts beside log-probabilities
    """

    def __init__(self, trunk: Decoder, *, heads: int, v: bool, beta: float, seed: int = 0):
        super().__init__()
        self.settings = {"heads": heads, "v": v, "beta": beta}
        self.trunk, self.beta = trunk, beta
        width, dice = trunk.config.width, torch.Generator().manual_seed(seed)
        self.q = nn.ModuleList(Mlp(width, trunk.config.vocab_size, dice) for _ in range(heads))
        self.v = Mlp(width, 1, dice) if v else None

    @classmethod
    def beside(cls, model: Decoder, *, heads: int, v: bool, beta: float, seed: int = 0) -> TokenValues:
        """Values that begin with a model's own weights, all of which are copied."""
        trunk = unadapted(model)
        trunk.lm_head.weight.requires_grad_(trunk.config.tied)
        return cls(trunk, heads=heads, v=v, beta=beta, seed=seed).to(model.device)

    def least(self, states: Tensor) -> Tensor:
        """[…, vocabulary], the least Q of every token."""
        found: Tensor = self.q[0](states)
        for head in self.q[1:]:
            found = torch.minimum(found, head(states))
        return found


@dataclass(frozen=True)
class Sizes:
    """What is asked of a model's config."""

    vocab_size: int
    max_positions: int
    width: int
    layers: int
    kv_heads: int
    head_dim: int


class Steered(nn.Module):
    """A frozen model and values of its tokens, fed the same text; one cache holds the layers of both.

    Its states are those of both side by side. Its logits are no product of states and weights, so what reads a model
    through its output weights is refused. Decoded eagerly.
    """

    softcap = 0.0
    eager = "the model is steered by values of tokens"

    def __init__(self, base: Decoder, values: TokenValues):
        super().__init__()
        self.base, self.values = base.requires_grad_(False), values
        one = base.config
        width = one.width + values.trunk.config.width
        sizes = (one.vocab_size, one.max_positions, width, one.layers, one.kv_heads, one.head_dim)
        self.config = Sizes(*sizes)
        self.eval()

    def __deepcopy__(self, memo: dict[int, Any]) -> Steered:
        """What is frozen is shared."""
        return Steered(self.base, copy.deepcopy(self.values, memo))

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def packs(self) -> bool:
        return self.base.packs

    @property
    def head_weight(self) -> Tensor:
        raise PanoplyError(
            "The model is steered by values of tokens, so that its logits are not read off its states: take the model "
            "that was steered for this."
        )

    @property
    def checkpointing(self) -> bool:
        return self.values.trunk.checkpointing

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        self.values.trunk.checkpointing = on

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor | None = None,
        cache: Cache | None = None,
        taps: Collection[int] = (),
        **packed: Any,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        if taps:
            raise PanoplyError("A model that is steered by values of tokens has no blocks to look into.")
        above: Any = None if cache is None else Above(cache, self.config.layers)
        own, _ = self.base.hidden_states(tokens, positions, segments, cache, **packed)
        theirs, _ = self.values.trunk.hidden_states(tokens, positions, segments, above, **packed)
        return torch.cat([own, theirs], dim=-1), {}

    def hidden(
        self, tokens: Tensor, positions: Tensor, segments: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        return self.hidden_states(tokens, positions, segments, cache)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the model itself, and β times the least Q."""
        width = self.base.config.width
        own = self.base.logits(hidden[..., :width])
        return own + self.values.beta * self.values.least(hidden[..., width:])

    def new_cache(self, rows: int, capacity: int) -> Cache:
        c = self.config
        return Cache(2 * c.layers, rows, c.kv_heads, capacity, c.head_dim, self.dtype, self.device)

    def scored(self, states: Tensor, action: Tensor, head: Head, entropy: bool) -> dict[str, Tensor]:
        """`logp`, and `entropy` where it is asked for, some rows at a time; computed again in the backward pass."""
        found: dict[str, list[Tensor]] = {}

        def read(state: Tensor, rows: slice) -> dict[str, Tensor]:
            return naive_scores(head.drawn_from(self.logits(state), rows), action[rows])

        for rows in chunks(len(states), chunk_of(states, self.base.head_weight)) or [slice(0, 0)]:
            kept = torch.is_grad_enabled()
            some = (
                checkpoint(read, states[rows], rows, use_reentrant=False)
                if kept
                else read(states[rows], rows)
            )
            for name, column in some.items():
                found.setdefault(name, []).append(column)
        joined = {name: torch.cat(columns) for name, columns in found.items()}
        return joined if entropy else {"logp": joined["logp"]}


# ------------------------------------------------------------------ outputs


def _values(seen: Pass) -> tuple[TokenValues, Tensor]:
    values: TokenValues | None = getattr(seen.model, "values", None)
    if values is None:
        raise PanoplyError(
            "The model has no values of tokens: a method that learns them has `models.token_values`."
        )
    return values, seen.last[:, -values.trunk.config.width :]


def _of(seen: Pass, head: int) -> Tensor:
    values, state = _values(seen)
    if head >= len(values.q):
        raise PanoplyError(
            f"Values of tokens with {len(values.q)} heads have no Q of number {head}, counted from 0: see "
            "models.token_values.heads."
        )
    every: Tensor = values.q[head](state)
    return every


@tap
def q(seen: Pass, head: int = 0) -> Tensor:
    """Q of the token that was said, by one of the heads."""
    return _of(seen, head).gather(1, seen.action[:, None])[:, 0]


@tap
def q_logp(seen: Pass, head: int = 0) -> Tensor:
    """log softmax(Q) of the token that was said: what a conservative loss makes large."""
    return naive_scores(_of(seen, head), seen.action)["logp"]


@tap
def v(seen: Pass) -> Tensor:
    """V of the state in which it was said."""
    values, state = _values(seen)
    if values.v is None:
        raise PanoplyError("These values of tokens have no V: set models.token_values.v=true.")
    out: Tensor = values.v(state)[:, 0]
    return out


def of_values_alone(outputs: Sequence[Output], needs: frozenset[str]) -> bool:
    """Whether nothing is asked but what values of tokens say, for which the model beside them need not be read."""
    return len(outputs) == len(needs) > 0 and all(output.name in OUTPUTS for output in outputs)


# ------------------------------------------------------------------ on disk


class Written(TypedDict):
    heads: int
    v: bool
    beta: float


def write_values(values: TokenValues, folder: Path) -> None:
    """Beside the model in its folder that they steer."""
    (folder / SETTINGS).write_text(json.dumps(values.settings, indent=2) + "\n")
    save_file({n: w.detach().cpu().contiguous() for n, w in _weights(values).items()}, folder / WEIGHTS)


def read_values(folder: Path, model: Any) -> TokenValues | None:
    """Those that lie beside a model in its folder, if any do."""
    if not is_file(folder / SETTINGS):
        return None
    settings, where = read_json(folder / SETTINGS, Written), plain(folder / SETTINGS)
    beta = settings["beta"]
    if settings["heads"] not in (1, 2) or not (math.isfinite(beta) and 0 <= beta <= 1e6):
        raise PanoplyError(f"{where} does not say what values of tokens these are.")
    if not isinstance(model, Decoder):
        raise PanoplyError(f"{where} steers a model that does not run natively, which cannot be.")
    made = TokenValues.beside(model, **settings)
    weights = read_weights([folder / WEIGHTS])
    check_fit({n: tuple(w.shape) for n, w in _weights(made).items()}, weights, plain(folder / WEIGHTS))
    made.load_state_dict(weights, strict=False)
    return made


def _weights(values: TokenValues) -> Mapping[str, Tensor]:
    """All by name but the trunk's output weights, which nothing reads, or which are its embedding."""
    return {n: w for n, w in values.state_dict().items() if n != "trunk.lm_head.weight"}
