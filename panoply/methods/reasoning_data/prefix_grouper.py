"""Prefix Grouper: the forward pass that encodes a shared prompt once."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from panoply.evidence.claims import Identity
from panoply.experience import Experience, Ragged, Table
from panoply.policies.decoder import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.policies.tokenizer import Tokenizer
from panoply.registry import system


@dataclass(frozen=True)
class Comparison:
    """Shared against repeated prompts: the largest differences, relative to the largest entry, and the times."""

    logp: float
    gradient: float
    shared_seconds: float
    repeated_seconds: float

    @property
    def speed(self) -> float:
        return self.repeated_seconds / self.shared_seconds


def _differences(seed: int) -> dict[str, float]:
    """The larger of both differences at the paper's shape, and how many times faster at some others."""
    found = prefix_grouper(seed=seed)
    speeds = {
        f"speed P={p} G={g}": prefix_grouper(prompt=p, group=g, repeats=5, seed=seed).speed
        for p in (16, 64, 256)
        for g in (4, 16)
    }
    return {"largest relative difference": max(found.logp, found.gradient), **speeds}


CLAIM = Identity(
    "Log-probabilities and gradients with the prompt encoded once equal those with it repeated, up to 1e-5.",
    _differences,
)


@system("prefix-grouper@1", paper=122, claim=CLAIM)
def prefix_grouper(
    prompt: int = 48, group: int = 8, longest: int = 12, prompts: int = 4, repeats: int = 1, seed: int = 0
) -> Comparison:
    """Prefix Grouper (arXiv 2506.05433): [prompt, answer_1, …, answer_G] in one row, each answer seeing the prompt and
    itself; positions restart after the prompt. The same function of the weights, so the same gradient, at
    (P + ΣL)/(G·P + ΣL) of the position-wise work.

    It is the default forward pass of every method here (`TextPolicy(shared=True)`). Calling this compares it with
    repeated prompts on a small random decoder with answers of unequal length.
    """
    tokenizer = Tokenizer.of_characters("abcdefghijklmnop")
    config = DecoderConfig(tokenizer.vocab_size, width=64, layers=2, heads=4, max_positions=prompt + longest)
    policy = TextPolicy.fresh(config, tokenizer, seed)
    rows = _answers(tokenizer.vocab_size, prompt, group, longest, prompts, seed)
    found = {shared: _pass(policy, rows, shared, repeats) for shared in (True, False)}
    (logp, gradient, fast), (plain_logp, plain_gradient, slow) = found[True], found[False]
    return Comparison(
        float((logp - plain_logp).abs().max() / plain_logp.abs().max()),
        float((gradient - plain_gradient).abs().max() / plain_gradient.abs().max()),
        fast,
        slow,
    )


def _answers(vocabulary: int, prompt: int, group: int, longest: int, prompts: int, seed: int) -> Experience:
    """Random answers of 1 to `longest` tokens, `group` to each of `prompts` random prompts."""
    rng = torch.Generator().manual_seed(seed)
    tokens: list[list[int]] = []
    position: list[int] = []
    context: list[int] = []
    for p in range(prompts):
        shared = torch.randint(vocabulary, (prompt,), generator=rng).tolist()
        for g in range(group):
            length = int(torch.randint(1, longest + 1, (), generator=rng))
            tokens.append([*shared, *torch.randint(vocabulary, (length,), generator=rng).tolist()])
            position += range(prompt, prompt + length)
            context += [p * group + g] * length
    flat = Ragged.from_lists(tokens)
    where = torch.tensor(context)
    action = flat.values[flat.offsets[where] + torch.tensor(position)]
    decisions = {"context": where, "episode": where, "position": torch.tensor(position), "action": action}
    number = torch.arange(len(tokens)) // group
    return Experience(
        Table(decisions), Table({"tokens": flat, "prompt": number, "shared": torch.full_like(number, prompt)})
    )


def _pass(policy: TextPolicy, rows: Experience, shared: bool, repeats: int) -> tuple[Tensor, Tensor, float]:
    """Log-probabilities, the gradient of their weighted sum, and the median time of forward and backward."""
    reading = TextPolicy(policy.model, policy.tokenizer, shared=shared)
    weight = torch.linspace(-1, 1, len(rows))
    times = []
    for _ in range(repeats):
        policy.model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        logp = reading.score(rows)["logp"]
        (logp * weight).sum().backward()  # type: ignore[no-untyped-call]
        times.append(time.perf_counter() - start)
    gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])
    return logp.detach(), gradient, sorted(times)[len(times) // 2]
