"""Sampling from a masked-diffusion model: an answer of masks, of which some are filled in at every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import OPEN, TERMINATED, Ragged, Table
from panoply.policies.masked import MaskedPolicy
from panoply.policies.moving import Weights
from panoply.rollout.engine import published
from panoply.rollout.requests import Request
from panoply.rollout.rollouts import LENGTH, Rollouts
from panoply.rollout.sampling import Sampling
from panoply.seeds import torch_rng

Order = Literal["sure", "random"]
ROWS = 512
"""Answers that are filled in together."""


class Denoiser:
    """Fills in answers of `max_tokens` masks, `at_once` of them a step, block after block from the left.

    order   which places of a block come first: those whose drawn token is likeliest (`sure`), or any (`random`)

    A row's tokens depend on its prompt and seed alone. Recorded is for every token the log-probability and entropy of
    the distribution it was drawn from, given what was filled in by then.
    """

    lacks: ClassVar[frozenset[str]] = frozenset(
        {"turns", "mask", "complete", "allowed", "penalties", "heat", "vectors"}
    )
    version: int | None = None

    def __init__(self, policy: MaskedPolicy):
        self.policy, self.model = policy, policy.model
        self.at_once, self.block, self.order = 1, 0, "random"

    def publish(self, weights: Weights, version: int) -> str:
        return published(self.model, weights)

    @contextmanager
    def by(self, at_once: int, block: int, order: Order) -> Iterator[None]:
        """Fill in otherwise for a while. Blocks of 0 are as long as the answer."""
        before = self.at_once, self.block, self.order
        self.at_once, self.block, self.order = at_once, block, order
        try:
            yield
        finally:
            self.at_once, self.block, self.order = before

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_stop: Any = None,
        *,
        mask: Any = None,
        complete: Any = None,
        entropy: bool = False,
    ) -> Rollouts:
        """Answers to every request, one a seed. There are no turns, no grammars, and no ends before the last token."""
        masked = mask is not None or any(request.mask is not None for request in requests)
        if on_stop is not None or masked or complete is not None or sampling.stop_strings:
            raise PanoplyError(
                "A masked-diffusion model fills in answers of one length: worlds of several turns, grammars and "
                "answers that end by themselves are not for it."
            )
        penalised = sampling.counts or sampling.repetition_penalty != 1
        if sampling.truncates or sampling.heat is not None or callable(sampling.temperature) or penalised:
            raise PanoplyError(
                "A masked-diffusion model is sampled from at one temperature, with nothing cut off or penalised."
            )
        length = sampling.max_tokens
        prompts = [list(request.prompt) for request in requests for _ in request.seeds]
        seeds = [seed for request in requests for seed in request.seeds]
        found = [
            self._fill(prompts[at : at + ROWS], seeds[at : at + ROWS], length, float(sampling.temperature))
            for at in range(0, len(prompts), ROWS)
        ]
        action, logp, spread = (torch.cat(columns).flatten() for columns in zip(*found, strict=True))
        row = torch.arange(len(prompts)).repeat_interleave(length)
        shared = torch.tensor([len(prompt) for prompt in prompts])
        inside = torch.arange(length).repeat(len(prompts))
        said = action.view(-1, length).tolist()
        known: dict[tuple[int, ...], int] = {}
        number = torch.tensor([known.setdefault(tuple(prompt), len(known)) for prompt in prompts])
        tokens = Ragged.from_lists([[*prompt, *answer] for prompt, answer in zip(prompts, said, strict=True)])
        decisions = {
            "context": row,
            "position": shared[row] + inside,
            "turn": torch.zeros_like(row),
            "action": action,
            "logp": logp,
            "end": torch.where(inside == length - 1, TERMINATED, OPEN),
            **({"entropy": spread} if entropy else {}),
            **(
                {"temperature": torch.full((len(row),), sampling.temperature)}
                if sampling.temperature not in (0, 1)
                else {}
            ),
        }
        request = torch.arange(len(requests)).repeat_interleave(
            torch.tensor([len(r.seeds) for r in requests])
        )
        reasons = Ragged.from_lists([[LENGTH]] * len(prompts))
        end = torch.full((len(prompts),), TERMINATED)
        context = Table({"tokens": tokens, "prompt": number, "shared": shared})
        return Rollouts(Table(decisions), context, request, tuple(r.key for r in requests), reasons, end)

    def _fill(
        self, prompts: list[list[int]], seeds: list[int], length: int, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[rows, length] tokens, their log-probabilities and entropies."""
        policy, rows = self.policy, len(prompts)
        device, hole = policy.device, policy.mask
        start = torch.tensor([len(prompt) for prompt in prompts])
        wide = int(start.max()) + length
        tokens = torch.zeros(rows, wide, dtype=torch.long)
        for at, prompt in enumerate(prompts):
            tokens[at, : len(prompt) + length] = torch.tensor([*prompt, *[hole] * length])
        tokens, lengths = tokens.to(device), (start + length).to(device)
        places = start.to(device)[:, None] + torch.arange(length, device=device)
        noise = torch.stack([torch.rand(2, length, length, generator=torch_rng("denoise", s)) for s in seeds])
        noise = noise.to(device)
        precise = torch.promote_types(policy.model.dtype, torch.float32)
        logp, spread = torch.zeros(2, rows, length, device=device, dtype=precise)
        open_places = torch.ones(rows, length, dtype=torch.bool, device=device)
        block, hole_free = self.block or length, _last_but(hole, policy.model.config.vocab_size)
        for step in range(length):
            if not bool(open_places.any()):
                break
            states, _ = policy.looks(tokens, lengths)
            asked = states.gather(1, places[:, :, None].expand(-1, -1, states.shape[-1]))
            every = (policy.model.logits(asked) / (temperature or 1.0)).log_softmax(-1)
            kept = every.exp()
            kept[..., hole] = 0.0  # a mask is no answer; the log-probability is the model's own all the same
            if temperature:
                below = kept.cumsum(-1)
                drawn = (below <= noise[:, 0, step, :, None] * below[..., -1:]).sum(-1).clamp(max=hole_free)
            else:
                drawn = kept.argmax(-1)
            sure = every.gather(-1, drawn[..., None])[..., 0]
            first = open_places.float().argmax(1) // block * block
            here = torch.arange(length, device=device)
            near = open_places & (here >= first[:, None]) & (here < first[:, None] + block)
            rank = (sure if self.order == "sure" else noise[:, 1, step]).masked_fill(~near, -torch.inf)
            taken = (
                torch.zeros_like(near).scatter(1, rank.topk(min(self.at_once, length), dim=1).indices, True)
                & near
            )
            row, place = taken.nonzero(as_tuple=True)
            tokens[row, places[row, place]] = drawn[row, place]
            logp[row, place] = sure[row, place]
            spread[row, place] = -(every.exp() * every.clamp(min=-1e30)).sum(-1)[row, place]
            open_places &= ~taken
        return tokens.gather(1, places).cpu(), logp.cpu(), spread.cpu()


def _last_but(hole: int, vocabulary: int) -> int:
    """The last token that is not the mask, where a sum that rounds down would run over."""
    return vocabulary - 1 if hole != vocabulary - 1 else vocabulary - 2
