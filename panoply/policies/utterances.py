"""Values of whole utterances: a language model that is read after a context, Q(s, ·), and after what is said to it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from panoply.errors import PanoplyError
from panoply.experience import Experience, Ragged, Table
from panoply.policies.decoder import Decoder
from panoply.policies.text import TextPolicy
from panoply.policies.value import NATIVE
from panoply.seeds import drawing


class Said(NamedTuple):
    """[n, 2] each, of twins: what an utterance is worth in its context, and what the context is."""

    q: Tensor
    v: Tensor


def contexts(states: Sequence[Sequence[int]], said: Sequence[Sequence[int]]) -> Experience:
    """Two rows of each: one that is predicted from the last token of the state, one from that of what was said."""
    prompts: dict[tuple[int, ...], int] = {}
    number = torch.tensor([prompts.setdefault(tuple(s), len(prompts)) for s in states], dtype=torch.long)
    shared = torch.tensor([len(s) for s in states], dtype=torch.long)
    whole = shared + torch.tensor([len(a) for a in said], dtype=torch.long)
    row = torch.arange(len(states)).repeat_interleave(2)
    position = torch.stack([shared, whole], dim=1).flatten()
    tokens = Ragged.from_lists([[*s, *a] for s, a in zip(states, said, strict=True)])
    return Experience(
        Table({"context": row, "position": position, "action": torch.zeros_like(row)}),
        Table({"tokens": tokens, "prompt": number, "shared": shared}),
    )


class UtteranceCritic(nn.Module):
    """A decoder and four heads of three layers, Q₁, Q₂ of (state, utterance) and V₁, V₂ of the state.

    Q reads the decoder's state after the context and after the utterance, one beside the other. Twins differ by what
    they began with. Takes the policy over.
    """

    def __init__(self, trunk: TextPolicy, seed: int):
        super().__init__()
        if not isinstance(trunk.model, Decoder):
            raise PanoplyError(NATIVE)
        self.trunk, self.decoder = trunk, trunk.model
        width = trunk.model.config.width
        with drawing("utterance critic", seed):
            self.q = nn.ModuleList(_head(2 * width, width) for _ in range(2))
            self.v = nn.ModuleList(_head(width, width) for _ in range(2))
        self.to(trunk.device)

    def learning(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All that learns; a language head, where it is apart, says nothing here."""
        return ((n, p) for n, p in self.named_parameters() if not n.startswith("decoder.lm_head"))

    def forward(self, states: Sequence[Sequence[int]], said: Sequence[Sequence[int]]) -> Said:
        read = self.trunk.states(contexts(states, said)).float().view(len(states), 2, -1)
        before, both = read[:, 0], read.flatten(1)
        return Said(
            torch.cat([head(both) for head in self.q], dim=1),
            torch.cat([head(before) for head in self.v], dim=1),
        )

    def frozen(self) -> UtteranceCritic:
        """A copy that does not learn: a target."""
        found = copy.copy(self)
        found._modules = {name: copy.deepcopy(module) for name, module in self._modules.items()}
        found.trunk = TextPolicy(found.decoder, self.trunk.tokenizer)
        found.requires_grad_(False)
        return found


def _head(read: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(read, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


def q_error(q: Tensor, reward: Tensor, then: Tensor, goes_on: Tensor, gamma: float) -> Tensor:
    """Σ of twins, mean over turns, of (Q(s, a) − r − γ·V̄(s′))², V̄ being 0 after the last turn."""
    target = reward[:, None] + gamma * goes_on[:, None] * then
    return (q - target.detach()).square().mean(0).sum()


def v_error(v: Tensor, q: Tensor, expectile: float = 0.5) -> Tensor:
    """Σ of twins, mean over turns, of 2·|τ − 1[Q̄ < V]|·(V(s) − Q̄(s, a))²: with τ = ½ plain squares."""
    behind = (q.detach() < v).float()
    weight = 2 * (expectile - behind).abs()
    return (weight.detach() * (v - q.detach()).square()).mean(0).sum()
