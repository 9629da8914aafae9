"""Decoding on CUDA: static buffers, steps of few kernels, captured as graphs once and replayed.

The weights are the model's own, so whatever moves them moves the sampler too. Buffers and graphs are kept per model
for the life of the process; `setup_seconds` is the time that went into them.
"""

from __future__ import annotations

import time
import warnings
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panoply.errors import PanoplyError, first_line
from panoply.policies.attention import HEAD_SIZE, Cache
from panoply.policies.decoder import Decoder
from panoply.policies.experts import Mixture
from panoply.policies.penalties import count_, penalise_
from panoply.policies.reading import Gated, Layer, Matrix, Plain, Read, plain, product, reader
from panoply.policies.scoring import has_triton, wide_product
from panoply.rollout.rollouts import DEAD, LENGTH, RUNNING, STOP, Slots

if TYPE_CHECKING:
    from panoply.kernels.experts import Table
    from panoply.kernels.sample import Record
    from panoply.rollout.requests import CachedModel
    from panoply.rollout.sampling import Sampling

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""A graph is captured for a number of slots; spare slots of a bucket stand idle."""
MEMORY_SHARE = 0.4
"""Of the free memory, what keys and values may take: learning needs the rest."""

_made: weakref.WeakKeyDictionary[nn.Module, GraphDecoder] = weakref.WeakKeyDictionary()
_broken: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_said: set[str] = set()


def graph_decoder(model: CachedModel, rows: int, capacity: int, burst: int) -> GraphDecoder | None:
    """A decoder with room for `rows` slots, fewer where memory is short, of `capacity` positions.

    None where the model must be decoded eagerly, for a reason that is told once.
    """
    if reason := why_not(model):
        _tell(reason)
        return None
    assert isinstance(model, nn.Module)
    made = _made.get(model)
    if made is not None and not made.serves(model, rows, capacity, burst):
        rows, capacity = max(rows, made.asked), max(capacity, made.capacity)
        burst = max(burst, made.longest_burst)
        del _made[model], made
        made = None
    if made is None:
        capacity = -(-capacity // 64) * 64
        slots = within(fitting(model, bucket(rows), capacity))
        try:
            made = _prepared(model, slots, capacity, burst)
        except Exception as problem:  # a compiler or a driver that will not: sampling goes on without
            _broken[model] = f"{type(problem).__name__}: {first_line(problem)}"
            _resume(model.device)
            _tell(_broken[model])
            return None
        made.asked = max(rows, slots)
        _made[model] = made
    return made


def _prepared(model: Any, slots: int, capacity: int, burst: int) -> GraphDecoder:
    """A decoder whose largest graph is captured; of fewer slots where that has no room beside keys and values."""
    made = _kind(model)(model, slots, capacity, burst)
    try:
        made.prepare(model)
        return made
    except torch.OutOfMemoryError:
        if slots == 1:
            raise
    del made
    _resume(model.device)
    torch.cuda.empty_cache()
    return _prepared(model, within(slots // 2), capacity, burst)


def _resume(device: torch.device) -> None:
    """Let torch's generator go on after a capture that failed, for whose end it would wait for good."""
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(generator.clone_state())


def _kind(model: nn.Module) -> type[GraphDecoder]:
    if has_kernels(model):
        return GraphDecoder
    from panoply.rollout.plain_graphs import PlainGraphDecoder

    return PlainGraphDecoder


def has_kernels(model: object) -> bool:
    """Whether a model is decoded by kernels of this library: of its layouts, without PEFT, with heads not too large."""
    return isinstance(model, Decoder) and model.config.head_dim <= HEAD_SIZE and plain(model)


def _tell(reason: str) -> None:
    if reason not in _said:
        warnings.warn(f"Decoding without CUDA graphs, more slowly: {reason}.", stacklevel=3)
        _said.add(reason)


def setup_seconds(model: object) -> float:
    """What buffers and graphs of a model have taken so far, capture and compilation included."""
    made = _made.get(model) if isinstance(model, nn.Module) else None
    return 0.0 if made is None else made.setup_seconds


def why_not(model: CachedModel) -> str | None:
    """Why a model cannot be decoded with graphs."""
    if not has_triton():
        return "triton is not installed, or makes no kernels for this GPU (it does from compute capability 8.0 on)"
    if reason := getattr(model, "eager", ""):
        return str(reason)
    return _broken.get(model) if isinstance(model, nn.Module) else "the model is no module of torch"


def fitting(model: Any, rows: int, capacity: int) -> int:
    """As many of `rows` as the memory has room for."""
    c = model.config
    each = capacity * (2 * c.layers * c.kv_heads * c.head_dim * model.dtype.itemsize + 8)
    held = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    free = torch.cuda.mem_get_info(model.device)[0] + held
    if each > free * MEMORY_SHARE:
        raise PanoplyError(
            f"Too little memory to sample one sequence: {capacity} positions need {each / 2**30:.2f} GiB, and of the "
            f"{free / 2**30:.2f} GiB free {MEMORY_SHARE:.0%} may be used. Lower max_tokens, or take a smaller model."
        )
    return min(rows, int(free * MEMORY_SHARE / each))


@dataclass(frozen=True)
class Glance:
    """The status of slots at some moment, on its way to the host."""

    status: Tensor
    there: torch.cuda.Event

    @classmethod
    def of(cls, status: Tensor) -> Glance:
        seen = torch.empty(status.shape, dtype=status.dtype, pin_memory=True).copy_(status, non_blocking=True)
        there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        there.record()
        return cls(seen, there)

    def any_ended(self) -> bool:
        """Whether a turn had ended then; the host waits until it knows."""
        self.there.synchronize()
        return bool((self.status > RUNNING).any())


class GraphDecoder:
    """Cache, history and slots at fixed addresses, and a graph for each number of slots.

    Of a decoder of this library; `plain_graphs.py` has what differs for all other models.
    """

    blocks: Plain | None = None

    def __init__(self, model: Any, rows: int, capacity: int, burst: int):
        from panoply.kernels.cut import Rule
        from panoply.kernels.sample import State

        began = time.perf_counter()
        self.rows, self.capacity, self.longest_burst = bucket(rows), capacity, burst
        self.asked = self.rows
        """How many slots were wanted; where memory is short there are fewer."""
        self.device, self.vocab = model.device, model.config.vocab_size
        self._bind(model)
        self._addresses = addresses(model)
        self.cache: Cache = model.new_cache(self.rows, capacity)

        self.state = State.empty(self.rows, capacity, self.device)
        self.stops = torch.zeros(self.vocab, dtype=torch.bool, device=self.device)
        self.rule, self.penalises = Rule.empty(self.device), False
        self.allowed: Tensor | None = None
        """What slots may draw next, [rows, vocabulary]; there once a mask is."""
        self.penalty, self.presence, self.frequency = (torch.ones((), device=self.device) for _ in range(3))
        self.counts = False
        self._resize()
        self.setup_seconds = time.perf_counter() - began

    def _bind(self, model: Any) -> None:
        """Take what a step reads of the model: no more than weights, or the model would live as long as its graphs."""
        config = model.config
        self.blocks = Plain.of(model)
        self.layers, self.stream = self.blocks.layers, self.blocks.stream
        self.embedding_factor, self.logit_divisor = model.embedding_factor, config.logit_divisor
        self.softcap = model.softcap
        self.embedding, self.head = model.model.embed_tokens.weight.detach(), model.head_weight.detach()
        self.last_norm = model.model.norm.weight.detach()
        self._rotation = weakref.WeakMethod(model.rotation_tables)
        self._tables: dict[int, Table] = {}

    def _place(self) -> None:
        """Make what depends on how many positions there are."""
        rotation = self._rotation()
        assert rotation is not None
        self.angles = rotation(self.capacity)

    def _resize(self) -> None:
        self._place()
        self.temperature = torch.ones(self.capacity + 1, device=self.device)
        self._graphs: dict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, Record]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def history(self) -> Tensor:
        return self.state.history

    def serves(self, model: nn.Module, rows: int, capacity: int, burst: int) -> bool:
        big = self.asked >= rows and self.capacity >= capacity and self.longest_burst >= burst
        return big and self._addresses == addresses(model)

    def configure(self, stops: Tensor, temperatures: Tensor | None, sampling: Sampling) -> None:
        """Which tokens end a turn, the temperature at each of its positions, what is cut off and what penalised.

        Numbers are read on the device; a graph is captured for what acts at all.
        """
        self.stops.copy_(stops)
        self.rule = self.rule.set(sampling.top_k, sampling.top_p, sampling.min_p)
        self.penalty.fill_(sampling.repetition_penalty)
        self.penalises = sampling.repetition_penalty != 1
        self.presence.fill_(sampling.presence_penalty)
        self.frequency.fill_(sampling.frequency_penalty)
        self.counts = sampling.counts
        self.temperature.fill_(1.0)
        if temperatures is not None:
            n = min(len(temperatures), len(self.temperature))
            self.temperature[:n] = temperatures[:n]
            self.temperature[n:] = temperatures[-1]

    def prepare(self, model: Any) -> None:
        """Capture the largest graph now, so that what cannot work fails before a row depends on it."""
        began = time.perf_counter()
        self._rehearse(model)
        self.setup_seconds += time.perf_counter() - began
        self._graph(self.rows)

    def _rehearse(self, model: Any) -> None:
        """Have the kernels of a step, and of reading prompts, compiled side by side."""
        from panoply.kernels.sample import Record
        from panoply.kernels.together import rehearsal

        self._idle()
        with rehearsal():
            self._step(self.rows, Record.empty(self.longest_burst, self.rows, self.device))
            if (read := self.reader(model)) is not None:
                nothing = torch.zeros(1, dtype=torch.long, device=self.device)
                self.cache.put_tokens(nothing, read([[0] * 16]), nothing, nothing, 1)

    def reader(self, model: CachedModel) -> Read | None:
        """What reads prompts of the model that this was made for."""
        return reader(model, self.blocks)

    def grow(self, capacity: int) -> None:
        """Room for longer rows; graphs are captured anew."""
        wider = torch.zeros(self.rows, capacity, dtype=torch.long, device=self.device)
        wider[:, : self.capacity] = self.history
        temperature = self.temperature
        self.cache.grow(capacity)
        self.capacity, self.state = capacity, replace(self.state, history=wider)
        self._resize()
        self.temperature[: len(temperature)] = temperature
        self.temperature[len(temperature) :] = temperature[-1]

    def burst(
        self, slots: Slots, steps: int, mask: Tensor | None = None, unseen: int = 0
    ) -> tuple[Slots, Record, Glance]:
        """Several steps without the host's looking: the slots after them, what was drawn, and how things stood.

        A `mask` [slots, vocabulary] marks what may be drawn in all of them. The host need not wait for the last steps,
        so many as are `unseen`: it is told what had ended before them, and the device stays busy meanwhile.
        """
        n = len(slots)
        if mask is not None:
            self._bar(mask)
        graph, out = self._graph(bucket(n), masked=mask is not None)
        self._load(slots, bucket(n))
        for step in range(steps):
            graph.replay()
            if step == steps - 1 - unseen:
                glance = Glance.of(self.state.status[:n])
        moved = {name: getattr(self.state, name)[:n].clone() for name in ("token", "position", "status")}
        return replace(slots, **moved), out.first(steps, n), glance

    def share(self, holder: Tensor, held: Tensor) -> None:
        """Let slots read the beginning of their rows from others (`rollouts.holders`), until this is called anew."""
        n = len(holder)
        self.state.holder[:n], self.state.held[:n] = holder, held
        self.state.held[n:] = 0

    def _bar(self, mask: Tensor) -> None:
        """Put a mask where graphs read it; slots that stand idle may draw anything."""
        if self.allowed is None:
            self.allowed = torch.ones(self.rows, self.vocab, dtype=torch.bool, device=self.device)
        self.allowed[: len(mask)] = mask
        self.allowed[len(mask) : bucket(len(mask))] = True

    def _load(self, slots: Slots, size: int) -> None:
        n = len(slots)
        for name in ("stream", "token", "position", "start", "limit", "status"):
            column = getattr(self.state, name)
            column[:n] = getattr(slots, name)
            if n < size:
                column[n:size] = DEAD if name == "status" else 0
        self.state.tick.zero_()

    def _graph(self, size: int, masked: bool = False) -> tuple[torch.cuda.CUDAGraph, Record]:
        kind = (size, *self.rule.kind, self.penalises, self.counts, masked)
        if kind not in self._graphs:
            began = time.perf_counter()
            self._graphs[kind] = self._capture(size, masked)
            torch.cuda.synchronize(self.device)
            self.setup_seconds += time.perf_counter() - began
        return self._graphs[kind]

    def _idle(self) -> None:
        """All slots at the very end, where a row reads nothing that it has not written itself."""
        for column, value in ((self.state.status, DEAD), (self.state.position, self.capacity - 1)):
            column.fill_(value)
        self.state.token.zero_()
        self.state.start.copy_(self.state.position)
        self.state.tick.zero_()

    def _capture(self, size: int, masked: bool) -> tuple[torch.cuda.CUDAGraph, Record]:
        from panoply.kernels.sample import Record

        self._idle()
        record = Record.empty(self.longest_burst, size, self.device, bool(self.rule))
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._step(size, record, masked)  # compiles the kernels, and lets libraries choose theirs
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may ask for memory meanwhile: a learner does, while samplers run ahead of it.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(size, record, masked)
        return graph, record

    def _step(self, size: int, record: Record, masked: bool = False) -> None:
        """One token more for the first `size` slots, drawn and noted in a record."""
        from panoply.kernels.sample import draw_and_move

        logits = self._logits(size)
        if self.penalises:
            penalise_(logits, self.history[:size], self.state.position[:size] + 1, self.penalty)
        if self.counts:
            start, length = self.state.start[:size], self.state.position[:size] + 1
            count_(logits, self.history[:size], start, length, self.presence, self.frequency)
        if masked and self.allowed is not None:
            logits.masked_fill_(~self.allowed[:size], -torch.inf)
        draw_and_move(logits, self.temperature, self.stops, self.state, record, STOP, LENGTH, self.rule)

    def _logits(self, size: int) -> Tensor:
        """Feed the newest token of the first `size` slots; float32 logits of what comes next."""
        from panoply.kernels.decode import add_norm, cap_all, embed_norm

        first = self.layers[0].norms[0]
        x, y = embed_norm(self.state.token[:size], self.embedding, self.embedding_factor, first, self.stream)
        change, after = None, None
        for index, layer in enumerate(self.layers):
            before, after_attention, before_mlp, after_mlp = layer.norms
            if index:
                y = add_norm(x, change, before, self.stream, after)
            mixed = self._attend(index, layer, y, self.state.position[:size])
            y = add_norm(x, _onto(mixed, layer.out), before_mlp, self.stream, after_attention)
            change = self._feed(layer.mlp, y)
            after = after_mlp
        y = add_norm(x, change, self.last_norm, self.stream, after)
        logits = wide_product(y if self.logit_divisor == 1.0 else y / self.logit_divisor, self.head.t())
        if self.softcap:
            cap_all(logits, self.softcap)
        return logits

    def _feed(self, mlp: Gated | Mixture, y: Tensor) -> Tensor:
        from panoply.kernels.decode import chained, gated
        from panoply.kernels.experts import Table

        if isinstance(mlp, Mixture):
            if len(y) not in self._tables:
                self._tables[len(y)] = Table.of(len(y), mlp.mixing.chosen, mlp.mixing.experts, self.device)
            return mlp.decode(y, self._tables[len(y)])
        return _onto(gated(product(y, mlp.both), mlp.gelu, chained()), mlp.down)

    def _attend(self, index: int, layer: Layer, y: Tensor, position: Tensor) -> Tensor:
        from panoply.kernels.decode import decode_attention, norm_spans

        qkv, norms = product(y, layer.qkv), layer.qk_norms
        if norms is not None and layer.whole:
            norm_spans(qkv, *norms, self.stream)
            norms = None
        keys, values = self.cache.layer(index)
        angles = self.angles[layer.table]
        return decode_attention(
            qkv,
            angles,
            keys,
            values,
            position,
            (self.state.holder, self.state.held),
            norms,
            self.stream,
            layer.focus,
            layer.interleaved,
            layer.sinks,
        )


def _onto(x: Tensor, by: Matrix) -> Tensor:
    """A product that `add_norm` adds to the stream: whole, or in parts."""
    from panoply.kernels.decode import in_parts, part_product

    weight, bias = by
    if not isinstance(weight, Tensor):
        return weight.product(x, bias, parts=True)
    return part_product(x, weight) if bias is None and in_parts(x, weight) else F.linear(x, weight, bias)


def bucket(rows: int) -> int:
    """The least size of a graph that holds so many slots."""
    return next((size for size in BUCKETS if size >= rows), -(-rows // 256) * 256)


def within(rows: int) -> int:
    """The largest size of a graph that needs no more."""
    return max(size for size in (*BUCKETS, rows // 256 * 256) if size <= rows)


def addresses(model: nn.Module) -> tuple[int, ...]:
    """Where the weights lie: a graph reads them there. Asked at every call, so without the names torch would make."""
    found: list[int] = []
    waiting: list[nn.Module | None] = [model]
    while waiting:
        if (module := waiting.pop()) is not None:
            found += [weight.data_ptr() for weight in module._parameters.values() if weight is not None]
            waiting += module._modules.values()
    return tuple(found)
