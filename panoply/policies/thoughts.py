"""Inputs that are vectors: what a model reads at a place that is no token's embedding, or more than that.

Where they stand and what they are is recorded with the context (`vectors`, `vectors_at`), and `score` replays them.
They come from a sample part, as a prefix of the prompt (`Request.prefix`), or from the model itself: one that has
`thoughts` feeds vectors back to itself while it decodes, wherever it is sampled from. Thoughts are a part of the model:
they are learned, copied and saved with it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from panoply.errors import PanoplyError, plain, unknown
from panoply.files import is_file, read_json
from panoply.policies.weights import check_fit, read_weights
from panoply.tables import moved

if TYPE_CHECKING:
    from panoply.rollout.stops import Decodes, StopStrings

SETTINGS, WEIGHTS = "thoughts.json", "thoughts.safetensors"
"""Beside a model's own files, which stay what they are without them."""


class Inputs(NamedTuple):
    """Vectors to be read in a forward pass, and the places among its tokens, taken in one row, where they stand."""

    at: Tensor
    vectors: Tensor


@dataclass(frozen=True)
class Drawn:
    """One token each of some rows that has just been drawn, and what it was drawn from."""

    action: Tensor
    tokens: Tensor
    """Row i has `tokens[i, : length[i]]`, with the token at its end; its turn began at `start[i]`."""
    length: Tensor
    start: Tensor
    logits: Tensor
    """[rows, vocabulary], as they were drawn from: divided by the temperature, −∞ for what could not be drawn."""
    state: Tensor
    """[rows, width], the last hidden state that they are read off."""
    fed: Tensor
    """Whether the token before this one had a vector."""
    table: Tensor
    """[vocabulary, width], what the first block reads of every token."""
    noise: Callable[[], Tensor]
    """[rows, width] normal numbers that depend on a row's seed and on the place of the token alone."""


class Thoughts(nn.Module):
    """What a model feeds back to itself. A kind of them says which tokens have vectors, and what is made of those.

    Their weights are float32, whatever the model's are: what a gate lets in is often less than a bfloat16 can tell.
    """

    kind: ClassVar[str]

    def __init__(self, width: int, **settings: Any):
        super().__init__()
        self.width, self.settings = width, settings
        self.rates: dict[str, float] = {}
        """Learning rates of weights of its own, by their names; others have the model's."""
        self.empty = False
        """Whether all vectors are read as zeros: what they carry is lost, and nothing else."""

    def know(self, tokenizer: Decodes, vocabulary: int) -> None:
        """Called once, before anything is decoded."""

    def allowed(self, tokens: Tensor, length: Tensor, start: Tensor, vocabulary: int) -> Tensor | None:
        """What rows may draw next, [rows, vocabulary]; None for anything.

        Row i has said `tokens[i, start[i] : length[i]]` in this turn.
        """
        return None

    def think(self, drawn: Drawn) -> tuple[Tensor, Tensor]:
        """Which rows' newest tokens have a vector, and [rows, width] of them, to be recorded."""
        raise NotImplementedError

    def read(self, embedding: Tensor, vectors: Tensor) -> Tensor:
        """What the first block reads where tokens have vectors."""
        return self.mixed(embedding, torch.zeros_like(vectors) if self.empty else vectors)

    def mixed(self, embedding: Tensor, vectors: Tensor) -> Tensor:
        """Vectors and the embeddings of the tokens that have them as one: here the vectors alone."""
        return vectors

    def density(self, vectors: Tensor, state: Tensor) -> Tensor | None:
        """The log-density of recorded vectors at the states they came from; None: they are no choice of their own."""
        return None

    def scored(
        self, found: Mapping[str, Tensor], rows: Tensor, vectors: Tensor, states: Tensor
    ) -> dict[str, Tensor]:
        """The scores of decisions with those put in place that were vectors: their log-density, and no entropy.

        rows   which decisions had the `vectors`, all of which were taken in `states`
        """
        rows, vectors = moved(rows, states.device), moved(vectors, states.device)
        density = self.density(vectors, states[rows])
        if density is None:
            return {}
        nothing = torch.zeros_like(density)
        other = {"logp": density, "entropy": nothing}
        return {n: c.index_copy(0, rows, other[n].to(c.dtype)) for n, c in found.items() if n in other}

    @torch.no_grad()
    def load_from(self, folder: Path) -> None:
        """Overwrite the weights with those that lie beside a model in its folder."""
        weights, where = read_weights([folder / WEIGHTS], torch.float32), plain(folder / WEIGHTS)
        check_fit({n: tuple(w.shape) for n, w in self.state_dict().items()}, weights, where)
        self.load_state_dict(weights)

    def of_reference(self) -> Thoughts:
        """Those of the policy that a KL term pulls to, made when a run begins."""
        return copy.deepcopy(self).requires_grad_(False)


class Gated(Thoughts):
    """A token that is thought is read together with all that it could have been (HRPO, arXiv 2505.18454).

    Of the distribution p that it was drawn from, with embeddings E, the vector is h = Σ_v p_v·E_v / ‖p‖, and what is
    read at the token y is a⊙E_y + √(1 − a²)⊙(i⊙h), where r = σ(W_r·E_y), i = σ(W_i·E_y), a = exp(−8·softplus(−Λ)⊙r).
    h is recorded and constant; gradients reach W_r, W_i, Λ and the embedding. Thoughts end with the token that
    completes `marker`, which is none itself, and begin anew in every turn.

    least, most   Λ is drawn so that a would be between these if r were 1; at 1 the gate is closed
    reference     what the policy reads that a KL term pulls to: `tokens` alone, or `thoughts` through the first gates
    """

    kind = "gated"
    SHARPNESS = 8.0
    SHUT = 30.0
    """Λ of a closed gate: a is then exactly 1."""

    def __init__(
        self,
        width: int,
        *,
        marker: str,
        least: float = 0.99,
        most: float = 0.999,
        reference: Literal["tokens", "thoughts"] = "tokens",
        seed: int = 0,
    ):
        super().__init__(width, marker=marker, least=least, most=most, reference=reference, seed=seed)
        self.marker, self.reference, self.passed_over = marker, reference, False
        self.gate_r, self.gate_i = nn.Linear(width, width), nn.Linear(width, width)
        self.residual = nn.Parameter(torch.empty(width))
        self._initialise(least, most, seed)
        self._ends: StopStrings | None = None

    @torch.no_grad()
    def _initialise(self, least: float, most: float, seed: int) -> None:
        dice = torch.Generator().manual_seed(seed)
        for gate in (self.gate_r, self.gate_i):
            gate.weight.copy_(torch.randn(gate.weight.shape, generator=dice) * 0.02)
            gate.bias.zero_()
        share = torch.empty(self.width, dtype=torch.float64).uniform_(least, most, generator=dice)
        self.residual.copy_((-torch.log(share ** (-1 / self.SHARPNESS) - 1)).clamp(max=self.SHUT))

    def know(self, tokenizer: Decodes, vocabulary: int) -> None:
        from panoply.rollout.stops import StopStrings

        self._ends = StopStrings((self.marker,), tokenizer, vocabulary, self.residual.device)

    def think(self, drawn: Drawn) -> tuple[Tensor, Tensor]:
        assert self._ends is not None
        thinks = drawn.fed | (drawn.length - 1 == drawn.start)
        maybe = (thinks & self._ends.may[drawn.action]).nonzero().flatten()
        turns = zip(*(c[maybe].tolist() for c in (drawn.tokens, drawn.start, drawn.length)), strict=True)
        over = [self._ends.completed(tokens[a:b]) for tokens, a, b in turns]
        thinks[maybe] = ~torch.tensor(over, dtype=torch.bool, device=maybe.device)
        p = drawn.logits.softmax(-1)
        soft = p.to(drawn.table.dtype) @ drawn.table
        return thinks, soft / torch.linalg.vector_norm(p, dim=-1, keepdim=True).to(soft.dtype)

    def mixed(self, embedding: Tensor, vectors: Tensor) -> Tensor:
        if self.passed_over:
            return embedding
        e, h = (x.to(self.residual.dtype) for x in (embedding, vectors))
        a = self.kept(e)
        # The published 1e-8 under the root keeps slopes finite; what is closed (a = 1) lets in nothing at all.
        let_in = torch.where(a < 1, (1 - a.square() + 1e-8).sqrt(), 0.0)
        return (a * e + let_in * (torch.sigmoid(self.gate_i(e)) * h)).to(embedding.dtype)

    def kept(self, embedding: Tensor) -> Tensor:
        """a, how much of a token's embedding is read."""
        r = torch.sigmoid(self.gate_r(embedding))
        return torch.exp(-self.SHARPNESS * F.softplus(-self.residual) * r)

    def of_reference(self) -> Gated:
        made = copy.deepcopy(self).requires_grad_(False)
        made.passed_over = self.reference == "tokens"
        return made


class Latent(Thoughts):
    """After `first` come `count` vectors in place of tokens, and then `last` (Monet, arXiv 2511.21395).

    A vector is the last hidden state h that a token would have been read off, z = h + noise·ε, and is read in place
    of an embedding. In the record `blank` stands for it; nothing else can be drawn there, and `blank` and `last`
    nowhere else. Where `learns`, a vector's log-density is −‖z − h‖²/(2σ²), at the state h of now; else it is no
    choice, as for GRPO.

    first, blank, last   tokens, each written as the text that it stands for
    """

    kind = "latent"

    def __init__(
        self,
        width: int,
        *,
        first: str,
        blank: str,
        last: str,
        count: int = 10,
        sigma: float = 10.0,
        noise: float = 0.0,
        learns: bool = True,
    ):
        super().__init__(
            width, first=first, blank=blank, last=last, count=count, sigma=sigma, noise=noise, learns=learns
        )
        self.count, self.sigma, self.noise, self.learns = int(count), float(sigma), float(noise), learns
        self.ids: dict[str, int] = {}

    def know(self, tokenizer: Decodes, vocabulary: int) -> None:
        texts = {tokenizer.decode([token]): token for token in reversed(range(vocabulary))}
        for role in ("first", "blank", "last"):
            if (word := self.settings[role]) not in texts:
                raise PanoplyError(f"'{word}' is no token of this model, so that no vectors can stand by it.")
            self.ids[role] = texts[word]

    def allowed(self, tokens: Tensor, length: Tensor, start: Tensor, vocabulary: int) -> Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        inside = (place >= start[:, None]) & (place < length[:, None]) & (tokens == self.ids["first"])
        begun = torch.where(inside, place, -self.count - 2).amax(1)
        since = length - 1 - begun  # tokens after the newest `first`
        free = torch.ones(vocabulary, dtype=torch.bool, device=tokens.device)
        free[[self.ids["blank"], self.ids["last"]]] = False
        only = {
            role: torch.zeros_like(free).index_fill(0, self._id(role, free), True)
            for role in ("blank", "last")
        }
        ending = torch.where((since == self.count)[:, None], only["last"], free)
        return torch.where((since < self.count)[:, None], only["blank"], ending)

    def _id(self, role: str, like: Tensor) -> Tensor:
        return torch.tensor([self.ids[role]], device=like.device)

    def think(self, drawn: Drawn) -> tuple[Tensor, Tensor]:
        vectors = drawn.state
        if self.noise:
            vectors = vectors + self.noise * drawn.noise().to(vectors.dtype)
        return drawn.action == self.ids["blank"], vectors

    def density(self, vectors: Tensor, state: Tensor) -> Tensor | None:
        if not self.learns:
            return None
        wide = torch.promote_types(state.dtype, torch.float32)
        return -(vectors.to(wide) - state.to(wide)).square().sum(-1) / (2 * self.sigma**2)


# ------------------------------------------------------------------ on disk

KINDS: dict[str, type[Thoughts]] = {kind.kind: kind for kind in (Gated, Latent)}


class Written(TypedDict):
    kind: str
    settings: dict[str, Any]


def write_thoughts(thoughts: Thoughts | None, folder: Path) -> None:
    """Beside a model in its folder: what kind they are, and their weights."""
    if thoughts is None:
        return
    written = {"kind": thoughts.kind, "settings": thoughts.settings}
    (folder / SETTINGS).write_text(json.dumps(written, indent=2) + "\n")
    save_file({n: w.detach().cpu().contiguous() for n, w in thoughts.state_dict().items()}, folder / WEIGHTS)


def read_thoughts(folder: Path, width: int) -> Thoughts | None:
    """Those that lie beside a model in its folder, if any do."""
    if not is_file(folder / SETTINGS):
        return None
    written = read_json(folder / SETTINGS, Written)
    if written["kind"] not in KINDS:
        raise unknown("kind of thoughts", written["kind"], KINDS)
    try:
        made = KINDS[written["kind"]](width, **written["settings"])
    except (TypeError, ValueError, RuntimeError) as error:
        raise PanoplyError(
            f"{plain(folder / SETTINGS)} does not say what thoughts of this kind are."
        ) from error
    made.load_from(folder)
    return made
