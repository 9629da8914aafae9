"""What a step takes of a GPU at most, by what its code asks for, and what fits on a card of some size.

Beside what is held all the time (weights, copies, averages, gradients), a run holds the sampler's keys and values, and
while it learns what a micro-batch keeps for its backward pass. Of a token every block keeps its stream and the norm of
that, twice each, queries, keys and values, what attention puts out, and gates with what they gate. Where modules of
others run in a block, each keeps what it was given: norms their float32 copy, gates what they were before and after.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from panoply.lora import BYTES

GB = 10**9
SPARE = 1.5 * GB
"""What the driver, libraries and gaps between blocks of memory take beside what is asked for."""
CARDS = (16, 24, 48, 80, 141)
"""Sizes of cards in GB, where there is none here."""
NOWHERE = "–"
"""What a step takes of a card that has no room for it."""
SLOTS = 512
"""Answers that are sampled at once."""
LOGITS = 1 << 27
"""Of a pass, held at a time in float32 (`policies/scoring.py`)."""
SHARE = 0.9
"""Of the memory that is left, what a pass may take (`loops/memory.py`)."""
SAMPLED_SHARE = 0.4
"""Of the memory that is free before the first step, what keys and values may take (`rollout/graphs.py`)."""
KEPT_VOCABULARY, KEPT_SHARE = 4096, 0.05
"""Softmaxes over so many tokens are kept where they take less than such a share of a GPU (`policies/scoring.py`)."""
Shapes = Mapping[str, tuple[int, ...]]
EMPTY: Mapping[str, int] = MappingProxyType({})


def pass_tokens(asked: int, gpu: bool = True, adapters: bool = False) -> int:
    """Context tokens of a pass: those asked for, or as few as keep a device busy.

    A GPU is with 8,000, if the processor hands out work fast enough: fewer cost time, and more mostly memory. Under
    adapters, whose backward pass has more and smaller kernels, it takes half as many again, of which each leaves less,
    since nothing is kept of the head.
    """
    return asked or ((12288 if adapters else 9216) if gpu else 16384)


@dataclass(frozen=True)
class Dimensions:
    """Of a decoder, from the shapes of its weights."""

    layers: int
    width: int
    queries: int
    keys: int
    inner: int
    """What a token is as wide as inside of a feed-forward layer, on average; with experts, all that it goes through."""
    vocabulary: int
    pairs: int = 0
    """Numbers that the experts of a layer hold of a token while they are computed."""
    fused: bool = True
    """Whether blocks are this library's own, and not modules of transformers or PEFT."""

    @classmethod
    def of(cls, shapes: Shapes, chosen: int = 0, fused: bool = True) -> Dimensions | None:
        """None where the weights have other names than ours. A token goes through so many `chosen` experts."""

        def found(name: str) -> list[tuple[int, ...]]:
            end = f".{name}.weight"
            return [shape for n, shape in shapes.items() if n.endswith(end) and ".experts." not in n]

        out, k, qkv, table = (found(name) for name in ("o_proj", "k_proj", "qkv_proj", "embed_tokens"))
        gates = [2 * shape[0] for shape in found("gate_proj")] + [shape[0] for shape in found("gate_up_proj")]
        experts = experts_of(shapes)
        wide = [2 * chosen * min(shape[1:]) for name, shape in experts.items() if name.endswith("down_proj")]
        if not (out and (k or qkv) and table and (gates or wide)):
            return None
        width, queries = out[0]
        keys = k[0][0] if k else (qkv[0][0] - queries) // 2
        inner = (sum(gates) + sum(wide)) // (2 * len(out))
        pairs = 3 * max(wide) // 2 + chosen * width if wide else 0
        return cls(len(out), width, queries, keys, inner, table[0][0], pairs, fused)

    @property
    def kept(self) -> int:
        """Numbers that a token leaves in all blocks for the backward pass."""
        if not self.fused:
            return self.layers * (10 * self.width + 3 * self.queries + 3 * self.keys + 4 * self.inner)
        return self.layers * (4 * self.width + 2 * self.queries + 2 * self.keys + 2 * self.inner)

    @property
    def stream(self) -> int:
        """Those that it leaves where the inside of blocks is computed again: the stream, and what is added to it."""
        return 2 * self.layers * self.width


@dataclass(frozen=True)
class Work:
    """What a step asks of a GPU."""

    prompt: int
    answer: int
    rows: int
    """Answers that are sampled at once, in a step or an evaluation; 0 samples nothing."""
    trained: int
    """Context tokens that are learned from, and `decisions` among them."""
    decisions: int
    micro_tokens: int
    width: int
    """Bytes of a weight."""
    entropy: bool = False
    frozen: bool = False
    """Whether the head does not learn, so that nothing is kept of its softmaxes."""
    recompute: str = "auto"
    offload: bool = False


@dataclass(frozen=True)
class Peak:
    """Bytes by what they are for, when most are held."""

    held: int
    sampler: int
    activations: int
    softmaxes: int
    logits: int
    tokens: int
    """Of a micro-batch."""
    recomputed: bool

    @property
    def moving(self) -> int:
        """What a pass takes, and gives back."""
        return self.activations + self.softmaxes + self.logits

    @property
    def total(self) -> int:
        return self.held + self.sampler + self.moving


def expected(sizes: Dimensions, held: Held, work: Work, memory: int | None) -> Peak:
    """The peak of a step.

    Where a GPU of `memory` bytes has no room for a micro-batch, it gets as many tokens as fit, as the learner makes it
    (`loops/memory.py`); where not even the longest sequence fits, blocks are computed again.
    """
    again = work.recompute == "always"
    asked = _peak(sizes, held, work, memory, again)
    if memory is None or asked.moving <= SHARE * _left(asked, memory):
        return asked
    smaller, fits = _smaller(sizes, held, work, memory, again)
    if not fits and work.recompute == "auto":
        again = True
        smaller, fits = _smaller(sizes, held, work, memory, again)
    if fits or work.trained > work.micro_tokens:
        return smaller
    alone = (asked, _peak(sizes, held, work, memory, again))  # beside a single pass no gradients add up
    return next((one for one in alone if one.moving <= _left(one, memory)), smaller)


def _smaller(sizes: Dimensions, held: Held, work: Work, memory: int, again: bool) -> tuple[Peak, bool]:
    """The peak with as many tokens a pass as there is room for, at least one sequence, and whether that has room."""
    longest = work.prompt + work.answer
    fits = _fitting(sizes, held, work, memory, again)
    fewer = replace(work, micro_tokens=max(longest, min(fits, work.micro_tokens)))
    return _peak(sizes, held, fewer, memory, again), fits >= longest


def _left(peak: Peak, memory: int) -> float:
    """What is left of a GPU for a pass."""
    return memory - SPARE - peak.held - peak.sampler


def _fitting(sizes: Dimensions, held: Held, work: Work, memory: int, recomputed: bool) -> int:
    """Tokens of a pass that there is room for beside gradients that add up.

    A token is counted as one of the longest sequence alone, which keeps its softmaxes if any pass does: fewer tokens
    never take more than this says.
    """
    each = _pass(sizes, work, memory, work.prompt + work.answer, recomputed)
    whole = _pass(sizes, work, memory, work.micro_tokens, recomputed)
    room = SHARE * (memory - SPARE - held.always - held.summed - _sampler(sizes, held, work, memory))
    return int((room - whole.logits) * each.tokens / (each.activations + each.softmaxes))


class _Pass(NamedTuple):
    """Bytes of a pass over so many tokens."""

    tokens: int
    activations: int
    softmaxes: int
    logits: int


def _pass(sizes: Dimensions, work: Work, memory: int | None, tokens: int, recomputed: bool) -> _Pass:
    drawn = math.ceil(tokens * work.decisions / max(1, work.trained))
    block = sizes.kept // sizes.layers
    each = block if work.offload else sizes.stream + block if recomputed else sizes.kept
    softmaxes = drawn * sizes.vocabulary * work.width
    small = memory is None or softmaxes < KEPT_SHARE * memory
    if work.entropy or work.frozen or work.width != 2 or sizes.vocabulary < KEPT_VOCABULARY or not small:
        softmaxes = 0
    logits = 4 * min(drawn * sizes.vocabulary, LOGITS)
    return _Pass(tokens, tokens * (each + sizes.pairs) * work.width, softmaxes, logits)


def _sampler(sizes: Dimensions, held: Held, work: Work, memory: int | None) -> int:
    """Keys, values and logits of all answers, or of as many as there is room for before the first step."""
    capacity = math.ceil((work.prompt + work.answer + 1) / 64) * 64
    each = capacity * (2 * sizes.layers * sizes.keys * work.width + 8) + 4 * sizes.vocabulary
    wanted = min(SLOTS, work.rows) * each
    if memory is None:
        return wanted
    return max(0, min(wanted, int(SAMPLED_SHARE * (memory - SPARE - held.always + held.later))))


def _peak(sizes: Dimensions, held: Held, work: Work, memory: int | None, recomputed: bool) -> Peak:
    passes = max(1, math.ceil(work.trained / work.micro_tokens))
    longest = work.prompt + work.answer
    tokens = min(work.trained, max(longest, math.ceil(work.trained / passes)))
    _, activations, softmaxes, logits = _pass(sizes, work, memory, tokens, recomputed)
    always, coming = held.always + (held.summed if passes > 1 else 0), held.passing
    if passes == 1:  # the only pass leaves its gradients when its activations have gone
        coming = max(held.summed, held.passing)
    if activations + softmaxes + logits < coming:
        activations, softmaxes, logits = coming, 0, 0
    sampler = _sampler(sizes, held, work, memory)
    return Peak(always, sampler, activations, softmaxes, logits, tokens, recomputed)


class Held(NamedTuple):
    """Bytes that are there before a step, and those of gradients, which come as activations go."""

    always: int
    summed: int
    """Gradients in float32, which stay from one micro-batch to the next."""
    passing: int
    """Those of one micro-batch in the weights' own bits, where these do not add up as they are made."""
    later: int = 0
    """Of `always`, what an optimiser keeps from its first step on: the sampler takes its share before."""


def held(
    shapes: Shapes,
    numbers: float,
    lora: int = 0,
    masters: bool = True,
    base: str = "whole",
    beside: Mapping[str, int] = EMPTY,
) -> Held:
    """What bfloat16 weights, their optimiser, and what there is beside them hold.

    numbers   that the optimiser keeps of a weight, in float32
    base      how adapted layers are kept as they were
    beside    bytes of copies and of other models, by what they are
    """
    weights, more = sum(map(math.prod, shapes.values())), sum(beside.values())
    if not lora:
        moved = 4 * numbers + (4 if masters else 0)
        passing, own = 2 * left_to_autograd(shapes), int(4 * numbers * weights)
        return Held(int(weights * (2 + moved)) + more, 4 * weights, passing, own + later(beside))
    adapted = linear_of(shapes)
    factors = sum(lora * sum(shape) for shape in adapted)
    inside = sum(map(math.prod, adapted))
    kept = BYTES[base] - 2 if base in BYTES else 2
    always = int(2 * weights + kept * inside + factors * (8 + 4 * numbers)) + more
    return Held(always, 0, 0, int(4 * numbers * factors) + later(beside))


def later(memory: Mapping[str, int]) -> int:
    """Of bytes by what they are, those that optimisers keep."""
    return sum(size for name, size in memory.items() if name.endswith("optimiser"))


def linear_of(shapes: Shapes) -> list[tuple[int, ...]]:
    """Shapes of the linear layers in blocks, all of which get adapters where no names are given."""
    return [shape for name, shape in shapes.items() if len(shape) == 2 and ".layers." in name]


def left_to_autograd(shapes: Shapes) -> int:
    """Weights whose gradients are made whole in every pass (`kernels/summing.py` adds up the others): embeddings, and
    experts'."""
    tables = (shape for name, shape in shapes.items() if name.endswith("embed_tokens.weight"))
    return sum(map(math.prod, (*tables, *experts_of(shapes).values())))


def verdict(sizes: Dimensions, holding: Held, work: Work, memory: int) -> str:
    """What a step takes of a card, in GB, and what it takes to fit; – where it does not."""
    found = expected(sizes, holding, work, memory)
    if found.moving > _left(found, memory):
        return NOWHERE
    asked = _peak(sizes, holding, work, memory, found.recomputed)
    mark = (
        "**"
        if found.recomputed and work.recompute != "always"
        else "*"
        if found.tokens < asked.tokens
        else ""
    )
    return f"{found.total / GB:.0f}{mark}"


def experts_of(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """All experts' weights of a layer as one tensor each, [experts, …, …], however they lie on disk."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        place, there, inside = name.partition(".experts.")
        if not there or "bias" in inside:
            continue
        layer = f"{place.rpartition('.')[0]}.mlp.experts"
        if len(shape) == 3:
            found[f"{layer}.{inside}"] = shape
        elif inside.endswith(("down_proj.weight", "w2.weight")):
            found[f"{layer}.down_proj"] = (found.get(f"{layer}.down_proj", (0,))[0] + 1, *shape)
        elif inside.endswith(("gate_proj.weight", "w1.weight")):
            many = found.get(f"{layer}.gate_up_proj", (0,))[0] + 1
            found[f"{layer}.gate_up_proj"] = (many, 2 * shape[0], shape[1])
    return found


# ------------------------------------------------------------------ published sizes


def _qwen(width: int, layers: int, heads: int, kv: int, inner: int, vocabulary: int, tied: bool) -> Shapes:
    size = width // heads
    block = {
        "self_attn.q_proj": (heads * size, width), "self_attn.k_proj": (kv * size, width),
        "self_attn.v_proj": (kv * size, width), "self_attn.o_proj": (width, heads * size),
        "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
        "input_layernorm": (width,), "post_attention_layernorm": (width,),
    }  # fmt: skip
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(layers):
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    return found if tied else found | {"lm_head.weight": (vocabulary, width)}


SIZES: Mapping[str, Shapes] = {
    "0.5B": _qwen(896, 24, 14, 2, 4864, 151936, tied=True),
    "1.5B": _qwen(1536, 28, 12, 2, 8960, 151936, tied=True),
    "3B": _qwen(2048, 36, 16, 2, 11008, 151936, tied=True),
    "7B": _qwen(3584, 28, 28, 4, 18944, 152064, tied=False),
    "14B": _qwen(5120, 48, 40, 8, 13824, 152064, tied=False),
}
"""Shapes of Qwen2.5's weights, whose sizes others resemble."""
