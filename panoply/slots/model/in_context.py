"""A value that learns in context: prompts and what a policy earned on them in, what it will earn on others out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from panoply.seeds import drawing

ROUNDS = 12
"""Of Newton's method, which converges in half as many."""


class QueryAdapter(nn.Module):
    """Prompts as vectors: z = flatten(attention(LN(Q + ΔQ(x)), LN(W·h), W·h)) over the states h of a prompt's tokens.

    Queries Q are learned; ΔQ is a bottleneck of the last token's state, and 0 at first.
    """

    def __init__(
        self, seed: int, width: int, queries: int, dim: int, heads: int, bottleneck: int, dropout: float
    ):
        super().__init__()
        self.shape, self.dropout = (queries, dim), dropout
        with drawing("adapter", seed):
            self.queries = nn.Parameter(torch.randn(queries, dim))
            self.down = nn.Sequential(nn.Linear(width, bottleneck), nn.LayerNorm(bottleneck), nn.GELU())
            self.up = nn.Linear(bottleneck, queries * dim)
            self.values = nn.Linear(width, dim)
            self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm_queries, self.norm_values = nn.LayerNorm(dim), nn.LayerNorm(dim)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)
        self.log_length, self.log_held = (nn.Parameter(torch.zeros(())) for _ in range(2))

    def forward(self, states: Tensor, there: Tensor, dice: torch.Generator | None = None) -> Tensor:
        """[prompts, tokens, width] and which tokens are there → [prompts, queries · dim]; `dice` drop units."""
        last = states[torch.arange(len(states)), there.sum(1) - 1]
        inner = self.down(last)
        if dice is not None and self.dropout:
            kept = torch.rand(inner.shape, generator=dice) >= self.dropout
            inner = inner * kept / (1 - self.dropout)
        queries = self.queries + self.up(inner).view(-1, *self.shape)
        values = self.values(states)
        found, _ = self.attention(
            self.norm_queries(queries), self.norm_values(values), values, key_padding_mask=~there
        )
        return torch.as_tensor(found).flatten(1)

    def logits(self, known: Tensor, right: Tensor, asked: Tensor) -> Tensor:
        """log-odds that a policy succeeds on `asked`, from prompts `known` on which it was right (1) or not (0)."""
        return kernel_logits(known, right, asked, self.log_length.exp(), self.log_held.exp())


def kernel_logits(known: Tensor, right: Tensor, asked: Tensor, length: Tensor, held: Tensor) -> Tensor:
    """Kernel logistic regression: f = b + K·a, the least Σ cross-entropy(f_j, y_j) + held/2·aᵀKa, by Newton's method.

    k(z, z′) = exp(−mean (z − z′)²/2length²) of vectors in deviations of the known ones. b is the log-odds of the share
    that is right, and half of one more; where nothing is known, or all is the same, it is all there is.
    """
    right = right.double()
    prior = torch.logit((right.sum() + 0.5) / (len(right) + 1))
    if len(right) == 0 or bool((right == right[0]).all()):
        return prior.expand(len(asked))
    scale = known.std(0, correction=0).clamp(min=1e-6)
    known, asked = (((z - known.mean(0)) / scale).double() for z in (known, asked))
    kernel = _alike(known, known, length.double())
    weight, f = torch.zeros_like(right), prior.expand(len(right))
    for _ in range(ROUNDS):
        p = f.sigmoid()
        bend = 1 / (p * (1 - p)).clamp(min=1e-6)
        weight = torch.linalg.solve(kernel + torch.diag(held.double() * bend), f - prior + bend * (right - p))
        f = prior + kernel @ weight
    return prior + _alike(asked, known, length.double()) @ weight


def _alike(x: Tensor, y: Tensor, length: Tensor) -> Tensor:
    squares = x.square().sum(-1)[:, None] + y.square().sum(-1)[None] - 2 * x @ y.T
    return (-squares.clamp(min=0) / x.shape[-1] / (2 * length**2)).exp()
