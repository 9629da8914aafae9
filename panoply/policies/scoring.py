"""Log-probability and entropy of actions, a chunk of rows at a time; the logits are never kept."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from panoply.experience import Ragged
from panoply.kernels import summing
from panoply.policies.penalties import Said

if TYPE_CHECKING:
    from panoply.kernels.scoring import Drawn

CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 27}
"""Logits held at a time when no chunk is given: what a core's cache likes, or a small share of GPU memory."""
KEPT_VOCABULARY = 4096
"""Below this, logits are computed again in no time."""
KEPT_SHARE = 0.05
"""Of a GPU's memory, what softmaxes kept for the backward pass may take."""
LISTED = 64
"""The longest list of ids that kernels take; longer ones are those of a world's masks."""
NEVER = -1e4
"""Stands in for log 0, whose product with probability 0 would be NaN."""


@dataclass(frozen=True)
class Head:
    """What turns hidden states into the distribution that was sampled from, bar the weight.

    A set S that could have been drawn is either listed (`allowed`) and then the same under any weights; or it is what
    is at least as likely as a recorded threshold, {v : log p(v) ≥ cut} ∪ {action}, where p is before the cut. That is S
    itself at the weights sampled with, up to rounding between sampler and scorer. Under other weights p′ tokens cross
    the threshold, S becomes S′, and a ratio is p′(S) / p′(S′) times that of the recorded set, where |p′(S) − kept| is
    at most the total variation between p and p′. So its logarithm is off by at most the mass of what crossed,
    p′(S Δ S′) / min(p′(S), p′(S′)), and of every token that crossed p and p′ lie on either side of exp(cut).

    The alternative, log p(action) − log kept with the recorded mass as a constant, is off by p′(S) / kept ≤ 1 / kept.
    It has no tokens that cross, but a gradient whose mean over S is ∇ log p(S) and not 0, even at the weights sampled
    with: a push that no advantage asked for.
    """

    temperature: Tensor | None = None
    allowed: Ragged | None = None
    softcap: float = 0.0
    cut: Tensor | None = None
    action: Tensor | None = None
    """What was drawn, which is never cut off; only with `cut`."""
    said: Said | None = None
    factor: float = 1.0
    """Times the temperature, of what is left after the cut."""
    longest: int | None = None
    """The most ids that are listed of a row, where somebody has looked before they went to a GPU."""

    def whole_logits(self, hidden: Tensor, weight: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Float32 logits of some rows before the cut, and what a change of the product is multiplied by in them."""
        z = wide_product(hidden[rows], weight.t())
        slope = None
        if self.softcap:
            z = z.div_(self.softcap).tanh_()
            slope = 1 - z * z
            z = z.mul_(self.softcap)
        if self.said is not None:
            z, penalty = self.said.penalise(z, rows)
            slope = penalty if slope is None else slope.mul_(penalty)
        if (divisor := self.divisor(rows)) is not None:
            z = z.div_(divisor[:, None])
        return z, slope

    def logits(self, hidden: Tensor, weight: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
        """The same with −∞ for what could not be drawn."""
        z, slope = self.whole_logits(hidden, weight, rows)
        barred = self.barred(z, rows)
        return z if barred is None else z.masked_fill_(barred, float("-inf")), slope

    def free_logits(self, states: Tensor, weight: Tensor, rows: slice) -> Tensor:
        """The same by plain operations, for autograd: of the `states` of some rows."""
        return self.drawn_from(states @ weight.t(), rows)

    def drawn_from(self, z: Tensor, rows: slice) -> Tensor:
        """The same of the product, of some rows, or of what stands in its place."""
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        if self.softcap:
            z = torch.tanh(z / self.softcap) * self.softcap
        if self.said is not None:
            z, _ = self.said.penalise(z, rows)
        if (divisor := self.divisor(rows)) is not None:
            z = z / divisor[:, None]
        barred = self.barred(z.detach(), rows)
        return z if barred is None else z.masked_fill(barred, float("-inf"))

    @torch.no_grad()
    def barred(self, z: Tensor, rows: slice) -> Tensor | None:
        """Marks what could not be drawn in some rows, by their whole logits."""
        listed = None if self.allowed is None else forbidden(self.allowed, rows, z.shape[1])
        if self.cut is None:
            return listed
        assert self.action is not None
        z = z if self.factor == 1 else z * self.factor
        z = z if listed is None else z.masked_fill(listed, float("-inf"))
        below = z < (self.cut[rows].to(z.dtype) + z.logsumexp(1))[:, None]
        below.scatter_(1, self.action[rows, None], False)
        return below if listed is None else below | listed

    def divisor(self, rows: slice) -> Tensor | None:
        """What logits of some rows are divided by."""
        if self.temperature is None:
            return None
        return self.temperature[rows] * self.factor if self.factor != 1 else self.temperature[rows]

    def times_temperature(self, times: float, like: Tensor) -> Head:
        """The same at so many times the temperature; what could be drawn stays what it was."""
        held = self.temperature
        wide = torch.promote_types(like.dtype, torch.float32)
        held = like.new_ones(len(like), dtype=wide) if held is None else held
        return replace(self, temperature=held, factor=self.factor * times)

    def fused(self, hidden: Tensor) -> bool:
        """Whether kernels do it that hold no mask: on a GPU, without a penalty, if no list of ids is long."""
        if not (hidden.is_cuda and has_triton()) or hidden.dtype == torch.float64:
            return False
        return self.said is None and (self.factor == 1 or self.cut is None) and self._longest <= LISTED

    @cached_property
    def _longest(self) -> int:
        if self.longest is not None:
            return self.longest
        return 0 if self.allowed is None or not len(self.allowed) else int(self.allowed.lengths.max())

    @cached_property
    def _lists(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Listed ids as a table whose width is a power of two, and how many of a row are there."""
        if self.allowed is None or not self._longest:
            return None, None
        width = 1 << (self._longest - 1).bit_length()
        wide = torch.zeros(len(self.allowed), width, dtype=torch.int32, device=self.allowed.values.device)
        ids = self.allowed.padded(self.allowed.values.int(), 0)
        wide[:, : ids.shape[1]] = ids
        return wide, self.allowed.lengths.int()

    def drawn(self, actions: Tensor, rows: slice) -> Drawn:
        """Some rows as the kernels want them."""
        from panoply.kernels.scoring import Drawn

        lists, counts = (_part(x, rows) for x in self._lists)
        return Drawn(actions[rows], self.divisor(rows), self.softcap, _part(self.cut, rows), lists, counts)

    def keeps(self, hidden: Tensor, weight: Tensor, entropy: bool) -> bool:
        """Whether softmaxes are kept for the backward pass, in half the logits' bytes, and not computed again.

        Weights that do not learn want only their product with them, which is small.
        """
        if not (torch.is_grad_enabled() and hidden.requires_grad and self.fused(hidden)) or entropy:
            return False
        if hidden.element_size() != 2 or len(weight) < KEPT_VOCABULARY:
            return False
        needed = len(hidden) * len(weight) * hidden.element_size()
        return not weight.requires_grad or needed < KEPT_SHARE * torch.cuda.mem_get_info(hidden.device)[1]


def has_triton() -> bool:
    """Whether there are kernels: Triton is there, and makes some for the GPU, if one is in use."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return _installed() and (not in_use or _compiles())


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _compiles() -> bool:
    return torch.cuda.get_device_capability() >= (8, 0)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """A matrix product in the operands' dtype, given in at least float32."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.is_cuda and a.dtype != wide:
        return torch.mm(a, b, out_dtype=wide)
    return (a @ b).to(wide)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a · b, the sum in `total`'s dtype."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += wide_product(a, b)


def forbidden(allowed: Ragged, rows: slice, vocab: int) -> Tensor:
    """Marks what each row may not draw; an empty row may draw anything."""
    offsets = allowed.offsets[rows.start : rows.stop + 1]
    counts = offsets.diff()
    mask = (counts > 0)[:, None].repeat(1, vocab)
    row = torch.arange(len(counts), device=mask.device).repeat_interleave(counts)
    mask[row, allowed.values[int(offsets[0]) : int(offsets[-1])]] = False
    return mask


class _Score(torch.autograd.Function):
    """Logits are computed twice. With p = softmax(z): ∂logp/∂z = 1[a] − p and ∂H/∂z = −p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, actions: Tensor, head: Head, entropy: bool, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse, logp, spread, edges = [], [], [], []
        for rows in chunks(len(hidden), chunk):
            if head.fused(hidden):
                from panoply.kernels.scoring import normalise

                z = wide_product(hidden[rows], weight.t())
                sums = normalise(z, head.drawn(actions, rows), entropy)
                lse.append(sums.lse)
                logp.append(sums.logp)
                spread += [] if sums.entropy is None else [sums.entropy]
                edges += [] if sums.edge is None else [sums.edge]
                continue
            z, _ = head.logits(hidden, weight, rows)
            total = z.logsumexp(1)
            lse.append(total)
            logp.append(z.gather(1, actions[rows, None])[:, 0] - total)
            if entropy:
                z = z.sub_(total[:, None]).clamp_(min=NEVER)
                spread.append(-(z.exp() * z).sum(1))
        empty = hidden.new_zeros(0, dtype=torch.promote_types(hidden.dtype, torch.float32))
        out, normaliser = torch.cat([empty, *logp]), torch.cat([empty, *lse])
        entropies = torch.cat([empty, *spread])
        ctx.save_for_backward(hidden, weight, actions, normaliser, entropies)
        ctx.edges = torch.cat(edges) if edges else None
        ctx.head, ctx.entropy, ctx.chunk = head, entropy, chunk
        ctx.sums = summing.sums_of([weight]) if summing.noted else None
        ctx.mark_non_differentiable(normaliser)
        ctx.set_materialize_grads(False)
        return out, entropies, normaliser

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logp: Tensor | None, g_entropy: Tensor | None, _: Tensor | None) -> Any:
        hidden, weight, actions, lse, entropies = ctx.saved_tensors
        if not ctx.entropy:
            g_entropy = None
        if g_logp is None and g_entropy is None:
            return (None,) * 6
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device) if need_weight else None
        for rows in chunks(len(hidden), ctx.chunk):
            parts = (actions[rows], _part(g_logp, rows), _part(g_entropy, rows))
            if ctx.head.fused(hidden):
                g = _fused_slope(
                    ctx.head, hidden, weight, rows, actions, parts[1:], (lse, entropies, ctx.edges)
                )
            else:
                z, slope = ctx.head.logits(hidden, weight, rows)
                g = _through_softmax(z.sub_(lse[rows, None]), *parts, entropies, rows)
                if (divisor := ctx.head.divisor(rows)) is not None:
                    g = g.div_(divisor[:, None])
                if slope is not None:
                    g = g.mul_(slope)
                g = g.to(weight.dtype)
            if d_hidden is not None:
                d_hidden[rows] = g @ weight
            if d_weight is not None:
                add_product(d_weight, g.t(), hidden[rows])
        if ctx.sums is not None and d_weight is not None:
            ctx.sums[0].add(d_weight)
            d_weight = None
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None, None


class _Kept(torch.autograd.Function):
    """Log-probabilities alone, half precision, on a GPU: with s = (1[a] − p) / T kept, the gradient is two products.

    Where logits are capped, s has the cap's slope in it. ∂/∂hidden = g · (s W) and ∂/∂W = sᵀ (g · hidden). What is kept
    are multiples of s: in float16 of all rows the same, or small p would vanish; in bfloat16 each row's own, so that
    they can be written before it is known. Of frozen W nothing is asked, and s W is kept in place of s.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, actions: Tensor, head: Head, chunk: int) -> Tensor:
        from panoply.kernels.scoring import normalise, slope, weigh

        half = hidden.dtype == torch.float16
        ctx.unit = 4096.0 if half else 1.0
        learns = ctx.needs_input_grad[1]
        rooms = len(hidden) if learns else min(chunk, len(hidden))
        kept = hidden.new_empty(rooms, len(weight))
        pulls = None if learns else hidden.new_empty(hidden.shape, dtype=torch.float32)
        logp = hidden.new_empty(len(hidden), dtype=torch.float32)
        scale = torch.full_like(logp, ctx.unit)
        for rows in chunks(len(hidden), chunk):
            z = wide_product(hidden[rows], weight.t())
            drawn = head.drawn(actions, rows)
            room = kept[rows] if learns else kept[: len(z)]
            if half:
                sums = normalise(z, drawn, False)
                slope(z, drawn, sums, scale[rows], None, room)
                logp[rows] = sums.logp
            else:
                logp[rows], scale[rows] = weigh(z, drawn, room)
            if pulls is not None:
                pulls[rows] = wide_product(room, weight)
            del z  # or two chunks would be held at once
        ctx.save_for_backward(hidden, weight, kept if pulls is None else pulls, None if half else scale)
        ctx.sums = summing.sums_of([weight]) if learns and not half else None
        return logp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        hidden, weight, kept, scale = ctx.saved_tensors
        on_hidden, on_weight, g = None, None, (g if scale is None else g * scale)[:, None]
        if ctx.needs_input_grad[0]:
            pulls = wide_product(kept, weight) if ctx.needs_input_grad[1] else kept
            on_hidden = (pulls * (g / ctx.unit)).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            scaled = (hidden * g).to(hidden.dtype)
            if ctx.sums is not None:
                summing.sum_product(ctx.sums, kept.t(), scaled)
            elif ctx.unit == 1:
                on_weight = kept.t() @ scaled
            else:
                on_weight = wide_product(kept.t(), scaled).div_(ctx.unit).to(weight.dtype)
        return on_hidden, on_weight, None, None, None


def _fused_slope(
    head: Head,
    hidden: Tensor,
    weight: Tensor,
    rows: slice,
    actions: Tensor,
    slopes: tuple[Tensor | None, Tensor | None],
    known: tuple[Tensor, Tensor, Tensor | None],
) -> Tensor:
    from panoply.kernels.scoring import Sums, slope

    lse, entropies, edges = known
    sums = Sums(lse[rows], lse[rows], entropies[rows] if len(entropies) else None, _part(edges, rows))
    z = wide_product(hidden[rows], weight.t())
    out = torch.empty_like(z, dtype=weight.dtype)
    slope(z, head.drawn(actions, rows), sums, *slopes, out)
    return out


def _through_softmax(
    logp: Tensor,
    actions: Tensor,
    g_logp: Tensor | None,
    g_entropy: Tensor | None,
    entropies: Tensor,
    rows: slice,
) -> Tensor:
    """The gradient with respect to the logits, from all log-probabilities, which it overwrites."""
    if g_entropy is None:
        assert g_logp is not None
        g = logp.exp_().mul_(-g_logp[:, None])
    else:
        logp = logp.clamp_(min=NEVER)
        p = logp.exp()
        g = logp.add_(entropies[rows, None]).mul_(-g_entropy[:, None])
        if g_logp is not None:
            g = g.sub_(g_logp[:, None])
        g = g.mul_(p)
    if g_logp is not None:
        g.scatter_add_(1, actions[:, None], g_logp[:, None].to(g.dtype))
    return g


def score_actions(
    hidden: Tensor,
    head_weight: Tensor,
    actions: Tensor,
    temperature: Tensor | None = None,
    allowed: Ragged | None = None,
    entropy: bool = False,
    chunk: int = 0,
    softcap: float = 0.0,
    cut: Tensor | None = None,
) -> dict[str, Tensor]:
    """`logp` [N] and, if asked, `entropy` [N] of actions under softmax(hidden · headᵀ / temperature).

    Both have exact gradients with respect to `hidden` and `head_weight`. `allowed` restricts a row's support
    to the ids listed (an empty row: all); an action outside it has log-probability −inf. `cut` restricts it to what has
    at least that log-probability, and the action. `chunk` is how many rows are held at a time (0: chosen);
    `softcap` c makes the logits c · tanh(logits / c) first.
    """
    head = Head(temperature, allowed, softcap, cut, actions)
    return scored(hidden, head_weight, actions, head, entropy, chunk)


def scored(
    hidden: Tensor, head_weight: Tensor, actions: Tensor, head: Head, entropy: bool = False, chunk: int = 0
) -> dict[str, Tensor]:
    """`score_actions` through a whole head."""
    if hidden.ndim != 2 or actions.shape != hidden.shape[:1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and actions {tuple(actions.shape)} do not fit")
    chunk = chunk or chunk_of(hidden, head_weight)
    if head.keeps(hidden, head_weight, entropy):
        return {"logp": _Kept.apply(hidden, head_weight, actions, head, chunk)}  # type: ignore[no-untyped-call]
    logp, entropies, _ = _Score.apply(hidden, head_weight, actions, head, entropy, chunk)  # type: ignore[no-untyped-call]
    return {"logp": logp, "entropy": entropies} if entropy else {"logp": logp}


def naive_scores(logits: Tensor, actions: Tensor) -> dict[str, Tensor]:
    """The same from whole logits: the reference, and the way for heads that are not a product."""
    log_p = F.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=1)
    return {
        "logp": log_p.gather(1, actions[:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p.clamp(min=NEVER)).sum(1),
    }


def chunk_of(hidden: Tensor, head_weight: Tensor) -> int:
    """How many rows of logits are held at a time."""
    chunk = max(64, CHUNK_ELEMENTS.get(hidden.device.type, 1 << 24) // len(head_weight))
    return chunk - chunk % 128 if hidden.is_cuda and chunk > 128 else chunk  # whole tiles on a GPU


def chunks(rows: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk)]


def _part(column: Tensor | None, rows: slice) -> Tensor | None:
    return None if column is None else column[rows]
