"""A masked-diffusion model as a policy: it reads a whole text at once, and says what stands where a mask does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.policies.attention import Visibility
from panoply.policies.decoder import Decoder
from panoply.policies.layout import Rows
from panoply.policies.text import TextPolicy

AT_ONCE = 16384
"""Tokens of one forward pass."""


class MaskedPolicy(TextPolicy):
    """The decoder with every token in sight of every other, and a token of the vocabulary that is the mask.

    A decision's `logp` is of its token at its own place, log p(y_i | context), where the context row is as it was
    written down: with a mask there, and wherever else one stands. So what was masked is part of the record, and the
    policy of now and an earlier one are asked about the same masks.
    """

    masked = True

    def __init__(self, *given: Any, **more: Any):
        super().__init__(*given, **more)
        self.model.fusing = False  # fused blocks know causal attention alone

    @property
    def mask(self) -> int:
        """The token that stands for one not known yet."""
        found = getattr(self.model.config, "extras", {}).get("mask_token_id")
        if not isinstance(found, int) or not 0 <= found < self.model.config.vocab_size:
            raise PanoplyError("The model is not causal, and its config.json has no mask_token_id.")
        return found

    @property
    def packs(self) -> bool:
        return False

    def looks(
        self, tokens: Tensor, lengths: Tensor, taps: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """States of padded rows [B, T] of so many tokens each, all of which see one another."""
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        segments = torch.where(places < lengths[:, None], 0, -1)
        sight = Visibility(torch.zeros_like(places), segments, False, self.model.dtype)
        return cast(Decoder, self.model).hidden_states(tokens, places, taps=taps, sight=sight)

    def _passes(
        self, experience: Experience, depths: Sequence[int] = ()
    ) -> Iterator[tuple[Rows, Rows, Tensor, dict[int, Tensor]]]:
        """Rows of like length together, each context in a row of its own: nothing can be shared of a prompt."""
        self._check_length(experience)
        tokens = experience.context.ragged("tokens").to("cpu")
        context, position = experience["context"].cpu(), experience["position"].cpu()
        used, row = torch.unique(context, return_inverse=True)
        lengths = tokens.lengths[used]
        if len(position) and bool((position >= lengths[row]).any()):
            raise PanoplyError("A decision's position lies beyond the end of its tokens.")
        order = lengths.argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        first = 0
        while first < len(order):
            some = order[
                first : first + max(1, AT_ONCE // int(lengths[order[min(len(order), first + 1) - 1]]))
            ]
            wide = int(lengths[some].max())
            padded = torch.zeros(len(some), wide, dtype=torch.long)
            for at, of in enumerate(some.tolist()):
                padded[at, : lengths[of]] = tokens[int(used[of])]
            inside = (place[row] >= first) & (place[row] < first + len(some))
            decision = inside.nonzero().flatten()
            state = (place[row[decision]] - first) * wide + position[decision]
            places = torch.arange(wide).expand_as(padded)
            rows = Rows(padded, places, None, decision, state)
            part = rows.to(self.device)
            last, tapped = self.looks(part.tokens, lengths[some].to(self.device), depths)
            yield rows, part, last, tapped
            first += len(some)
