"""One call of the text engine, from admitting the first row to recording the last."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.policies.penalties import NEUTRAL, count_, penalise_
from panoply.policies.reading import Read, reader
from panoply.rollout.cuts import Few
from panoply.rollout.feeding import Feeding
from panoply.rollout.graphs import Glance, GraphDecoder, graph_decoder
from panoply.rollout.hosted import host_decoder
from panoply.rollout.masks import BatchMask, View, checked, combined
from panoply.rollout.prefill import Prompts, chunks, even, feed, padded
from panoply.rollout.requests import CachedModel, Complete, OnStop, Request, Turn
from panoply.rollout.rollouts import (
    CONTEXT,
    DEAD,
    LENGTH,
    RUNNING,
    STOP,
    Recorder,
    Rollouts,
    Slots,
    ends,
    holders,
)
from panoply.rollout.sampling import Draw, Sampling, draw, listed, stream, uniforms
from panoply.rollout.stops import Ends, StopStrings

_AHEAD = 256
"""Cache slots set aside for a turn at first; a longer one makes the cache grow."""
_UNSEEN = 8
"""Steps on a GPU that the host does not wait for when it looks: while it does, the device takes them."""
_GRAIN = 64
"""On a GPU the number of slots seen is a multiple of this: its attention kernels are planned anew per shape."""


class Generation:
    """Rows run in slots. A slot's newest token is not yet in the cache: a step feeds it and draws the next.

    So a prompt's or an observation's last token goes the same way as a sampled one, and one kind of step
    serves all. The step touches only tensors of the device; `settle` is where the host looks.
    """

    def __init__(
        self,
        model: CachedModel,
        requests: Sequence[Request],
        sampling: Sampling,
        on_stop: OnStop | None,
        mask: BatchMask | None,
        strings: StopStrings | None,
        complete: Complete | None = None,
        *,
        entropy: bool,
    ):
        self.model, self.requests, self.sampling, self.on_stop = model, requests, sampling, on_stop
        self.mask, self.entropy = mask, entropy
        asked = strings is not None or complete is not None
        self.device, self.context = model.device, model.config.max_positions
        distinct: dict[tuple[tuple[int, ...], int], int] = {}
        # Prompts that begin with vectors are shared with none: nothing says that two of them are equal.
        alone = [-1 if r.prefix is None else i for i, r in enumerate(requests)]
        prompts = [
            distinct.setdefault((tuple(r.prompt), i), len(distinct))
            for i, r in zip(alone, requests, strict=True)
        ]
        self.prompts = [tokens for tokens, _ in distinct]
        self.prefixes = {
            prompt: r.prefix.to(self.device)
            for prompt, r in zip(prompts, requests, strict=True)
            if r.prefix is not None
        }
        self.request = [i for i, r in enumerate(requests) for _ in r.seeds]
        self.prompt = [prompts[i] for i in self.request]
        self.masks = {row: m for row, i in enumerate(self.request) if (m := requests[i].mask)}
        begun = self._tensor([requests[i].begun for i in self.request])
        self.ends = Ends(strings, complete, sampling.min_tokens, begun) if asked else None
        self.streams = stream(self._tensor([_signed(seed) for r in requests for seed in r.seeds]))
        longest = [min(r.most or sampling.max_tokens, sampling.max_tokens) for r in requests]
        self.longest = self._tensor([longest[i] for i in self.request])
        self.lengths = self._tensor([len(self.prompts[p]) for p in self.prompt])
        # By prompt, so that no more than one prompt has rows both running and waiting.
        self.waiting = deque(sorted(range(len(self.prompt)), key=self.prompt.__getitem__))
        table = sampling.temperatures()
        self.temperatures = None if table is None else table.to(self.device)
        self.stops = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=self.device)
        self.stops[list(sampling.stop_tokens)] = True
        self.recorder = Recorder()

    def run(
        self,
        slots: int,
        prefill_tokens: int,
        compact: float,
        patience: int,
        least: int = 1,
        between: Callable[[], int] | None = None,
    ) -> Rollouts:
        longest = max(map(len, self.prompts), default=0)
        capacity = min(longest + min(self.sampling.max_tokens, _AHEAD), self.context) + 1
        self.size, self.budget, self.least = min(slots, len(self.waiting)), prefill_tokens, least
        self.size = max(self.size, least) if self.size else 0
        capacity = even(capacity, least)
        self._allocate(capacity, min(longest + self.sampling.max_tokens, self.context) + 1, patience)
        self.source = Prompts(self.model, self.prompts, prefill_tokens, self.prefixes, least, self._reader())
        self.slots, self.reach = Slots.empty(self.device), 0
        self.readings, self.label = 0, torch.zeros_like(self.longest)
        self.glance: Glance | None = None
        self.left: tuple[int, int] | None = None
        self._look(between)
        self.admit()
        self._share()
        while len(self.slots):
            self.steps(patience)
            self._look(between)
            self.settle(compact)
        return self.recorder.result(
            self._constants(),
            torch.tensor(self.prompt, dtype=torch.long),
            self.lengths.cpu(),
            torch.tensor(self.request, dtype=torch.long),
            tuple(self.requests[i].key for i in self.request),
            {} if self.feeding is None else self.feeding.columns(len(self.prompt)),
        )

    def _look(self, between: Callable[[], int] | None) -> None:
        """Take newer weights where there are any, before new rows begin: what those read is read with the weights that
        draw their first token, so that prompts which older weights have read are read anew."""
        if between is None:
            return
        before, self.recorder.version = self.recorder.version, between()
        if before != self.recorder.version:
            self.source.keep(None)
            self.readings += 1

    def _constants(self) -> dict[str, float]:
        """Columns of decisions that are the same in all of them."""
        given = {name: float(getattr(self.sampling, name)) for name in NEUTRAL}
        return {name: value for name, value in given.items() if value != NEUTRAL[name]}

    def _allocate(self, capacity: int, whole: int, patience: int) -> None:
        """Cache and history: what turns need at first or, at the fixed addresses graphs want, the `whole`."""
        reads = self.prefixes or getattr(self.model, "thoughts", None) is not None
        self.feeding = Feeding(self.model, self.size) if reads else None
        eager = self.sampling.heat is not None or self.feeding is not None
        on_gpu = self.size and self.model.device.type == "cuda" and not eager
        self.graphs = graph_decoder(self.model, self.size, whole, patience) if on_gpu else None
        if self.graphs is not None:
            self.size = min(self.size, self.graphs.rows)
            self.cache, self.history = self.graphs.cache, self.graphs.history
            self.graphs.configure(self.stops, self.temperatures, self.sampling)
        else:
            self.cache = self.model.new_cache(self.size, capacity)
            self.history = torch.zeros(self.size, capacity, dtype=torch.long, device=self.device)
        plain = self.graphs is None and self.feeding is None
        self.host = host_decoder(self.model, self.cache) if plain else None
        early = self.sampling.min_tokens and self.sampling.stop_tokens
        self.free = not (self.mask or self.masks or early or self.feeding)

    def _reader(self) -> Read | None:
        """What reads prompts end to end, where that is possible: on a GPU."""
        if self.graphs is not None:
            return self.graphs.reader(self.model)
        return None if self.device.type == "cpu" else reader(self.model)

    def steps(self, count: int) -> None:
        """Up to `count` tokens, no more than any turn has left, before the host looks for ended ones."""
        if count > 1 or self.graphs is not None:
            left, end = self._left()
            count = max(1, min(count, left))
            self._reserve(min(self.reach + count, end + 1))
            self.left = left - count, end
        if self.graphs is not None and self.free:
            self.burst(self.graphs, count)
            return
        for _ in range(count):
            if self.graphs is None:
                self.step()
            else:
                self.burst(self.graphs, 1, self._mask())

    def _left(self) -> tuple[int, int]:
        """The most tokens that a turn has left, and the length at which the last one ends.

        As long as nothing has ended they are known, and the host need not wait for the device to say so.
        """
        if self.left is None:
            slots = self.slots
            most = torch.stack([(slots.limit - slots.position).max() - 1, slots.limit.max()])
            left, end = most.tolist()
            return left, end
        return self.left

    def burst(self, graphs: GraphDecoder, count: int, mask: Tensor | None = None) -> None:
        """As many steps, wholly on the device. What a turn said after its stop string is forgotten.

        A mask is of the next token alone: with one, the host looks at every token.
        """
        before = self.slots
        row, turn = before.row.repeat(count), before.turn.repeat(count)
        ends = self.ends
        unseen = 0 if ends or self.left is None or self.left[0] <= 0 else min(_UNSEEN, count // 4)
        self.slots, drawn, glance = graphs.burst(before, count, mask, unseen)
        self.glance = None if ends else glance
        live = drawn.live
        if ends is not None:
            said = drawn.action.view(count, -1), live.view(count, -1)
            self.slots, left = ends.after_burst(before, self.slots, self.history, *said)
            live = left.flatten()
        draws = Draw(drawn.action, drawn.logp, drawn.temperature, drawn.entropy if self.entropy else None)
        if self.sampling.truncates:
            draws = replace(draws, cut=drawn.cut, kept=drawn.kept)
            if mask is None:
                draws = replace(draws, allowed=Few(drawn.ids, drawn.count * live))
            else:
                mask = _narrowed(mask, drawn.ids, drawn.count)
        if mask is not None:
            draws = replace(draws, allowed=listed(mask))
        start = before.start.repeat(count) if self.sampling.counts else None
        self.recorder.step(row, drawn.position, turn, live, draws, start)
        self.reach = min(self.reach + count, self.history.shape[1])

    def step(self) -> None:
        """Feed every slot's newest token and draw the next. Ended slots repeat themselves, unrecorded."""
        slots = self.slots
        self._reserve(self.reach + 1)
        position = slots.position + 1
        logits = self._logits()
        if (penalty := self.sampling.repetition_penalty) != 1:
            logits = penalise_(logits, self.history[: len(slots), : self.reach], position, penalty)
        if (sampling := self.sampling).counts:
            said = self.history[: len(slots), : self.reach]
            by = sampling.presence_penalty, sampling.frequency_penalty
            logits = count_(logits, said, slots.start, position, *by)
        drawn = self._draw(logits, position)
        self.history[: len(slots)].scatter_(1, position[:, None], drawn.action[:, None])
        if self.feeding is not None:
            drawn = self.feeding.after(slots, self.history, self.state, drawn)
        start = slots.start if self.sampling.counts else None
        self.recorder.step(slots.row, position, slots.turn, slots.live, drawn, start)
        full = (position + 1 >= slots.limit) * LENGTH
        self.slots = slots.advance(drawn.action, torch.where(self.stops[drawn.action], STOP, full))
        if self.ends is not None:
            self.slots = self.ends.after_step(self.slots, self.history, drawn.action)
        self.reach = min(self.reach + 1, self.context)

    def _logits(self) -> Tensor:
        """What follows every slot's newest token, which goes into the cache."""
        slots = self.slots
        if self.host is not None:
            return self.host.logits(slots.token, slots.position, self._width())
        self.cache.begin(slots.position[:, None], self._width())
        given: dict[str, Any] = {} if self.feeding is None else {"inputs": self.feeding.newest(len(slots))}
        self.state = self.model.hidden(
            slots.token[:, None], slots.position[:, None], cache=self.cache, **given
        )[:, 0]
        return self.model.logits(self.state)

    def _draw(self, logits: Tensor, position: Tensor) -> Draw:
        slots, within = self.slots, position - self.slots.start
        temperature = self.temperatures
        if temperature is not None:
            temperature = temperature[within.clamp(max=len(temperature) - 1)]
        if self.sampling.heat is not None:
            factor = self.sampling.heat(logits)
            temperature = factor if temperature is None else temperature * factor
        mask = None if self.free else self._mask()
        uniform = uniforms(slots.stream, position)
        return draw(logits, uniform, self.sampling, temperature, mask, self.entropy)

    def _mask(self) -> Tensor | None:
        """What slots may draw next, [slots, vocabulary]; None for anything."""
        slots, mask = self.slots, None
        position = slots.position + 1
        said = self.history[: len(slots), : self.reach]
        view = View(slots.row, said, position, slots.start, slots.live, len(self.stops))
        if self.mask is not None or self.masks:
            mask = combined(view, self.mask, self.masks)
        if self.sampling.min_tokens and self.sampling.stop_tokens:
            early = ~(self.stops & (position - slots.start < self.sampling.min_tokens)[:, None])
            if mask is not None:
                left = (mask & early) | ~slots.live[:, None]
                early = checked(
                    view, left, "The mask and min_tokens leave", "allow a token that ends no turn"
                )
            mask = early
        if self.feeding is not None:
            thought = self.feeding.allowed(slots, self.history, len(self.stops))
            if mask is not None and thought is not None:
                left = (mask & thought) | ~slots.live[:, None]
                thought = checked(view, left, "The mask and thoughts leave", "allow the tokens of thoughts")
            mask = mask if thought is None else thought
        return mask

    def settle(self, compact: float) -> None:
        """Deal with turns that ended; fill or close the gaps once they are `compact` of the slots."""
        glance, self.glance = self.glance, None
        if glance is not None and not glance.any_ended():
            return
        ended = (self.slots.status > RUNNING).nonzero().flatten()
        if not len(ended):
            return
        self.left = None
        self._end_turns(ended)
        live = int(self.slots.live.sum())
        if not live and not self.waiting:
            self.slots = Slots.empty(self.device)
        elif self.waiting and live <= (1 - compact) * self.size:
            self.admit()
        elif not self.waiting and live <= (1 - compact) * len(self.slots):
            self.close_gaps()
        self._share()

    def _share(self) -> None:
        """Rows whose prompt was read once, with the same weights, look at it in one place, but for its last token."""
        if self.graphs is not None and len(self.slots):
            row = self.slots.row.clamp(min=0)
            self.graphs.share(*holders(self.label[row], self.lengths[row] - 1, self.slots.live))

    def _end_turns(self, at: Tensor) -> None:
        part, history = self.slots.take(at), self.history[at]
        cut = (part.status == LENGTH) & (part.limit - part.start < self.longest[part.row])
        reason = part.status.masked_fill(cut, CONTEXT)
        self.recorder.turn(part.row, part.turn, reason)
        if self.on_stop is None:
            how = ends(reason, torch.zeros_like(reason, dtype=torch.bool))
            self.recorder.finish(part.row, how, history, part.position + 1)
            self.slots = self.slots.vacated(at)
            return
        replies, lengths = self._ask(part, history, reason), (part.position + 1).tolist()
        fits = [r is not None and n + len(r) < self.context for r, n in zip(replies, lengths, strict=True)]
        goes = self._tensor(fits).bool()
        more = self._tensor([reply is not None for reply in replies]).bool()
        over = part.take(~goes)
        self.recorder.finish(over.row, ends(reason, more)[~goes], history[~goes], over.position + 1)
        self.slots = self.slots.vacated(at[~goes])
        if any(fits):
            self._observe(
                at[goes],
                part.take(goes),
                [r for r, f in zip(replies, fits, strict=True) if f and r is not None],
            )

    def _ask(self, part: Slots, history: Tensor, reason: Tensor) -> list[Sequence[int] | None]:
        assert self.on_stop is not None
        turns: list[Turn] = []
        columns = (part.row, part.turn, part.position + 1, part.start, reason, history)
        for row, turn, length, start, why, tokens in zip(*(c.tolist() for c in columns), strict=True):
            request = self.request[row]
            key = self.requests[request].key
            turns.append(Turn(row, request, key, turn, tokens[:length], start, why))
        asked = [turn for turn in turns if turn.reason != CONTEXT]
        replies = iter(self.on_stop(asked) if asked else ())
        return [None if turn.reason == CONTEXT else next(replies) for turn in turns]

    def _observe(self, at: Tensor, part: Slots, replies: list[Sequence[int]]) -> None:
        """Append observations and begin the next turns. All but an observation's last token is fed here."""
        vocabulary, positions, newest = (
            self.model.config.vocab_size,
            part.position.tolist(),
            part.token.tolist(),
        )
        if any(reply and not 0 <= min(reply) <= max(reply) < vocabulary for reply in replies):
            raise PanoplyError(f"on_stop returned ids outside the vocabulary of {vocabulary}.")
        fed = [[token, *reply[:-1]] if reply else [] for token, reply in zip(newest, replies, strict=True)]
        reach = max(p + 1 + len(r) for p, r in zip(positions, replies, strict=True))
        self.reach = max(self.reach, reach)
        self._reserve(self.reach + 1)
        some = [i for i, tokens in enumerate(fed) if tokens]
        for chunk in chunks([len(fed[i]) for i in some], self.budget):
            members = [some[i] for i in chunk]
            rows, starts = at[self._tensor(members)], [positions[i] for i in members]
            own = self.cache.take(rows, max(starts), even(reach + 1, self.least))
            vectors = None
            if self.feeding is not None:
                at_first = self.feeding.newest(rows)
                vectors = dict(zip(at_first.at.tolist(), at_first.vectors[:, None], strict=True))
            width = feed(self.model, own, [fed[i] for i in members], starts, vectors, self.least)
            self.cache.put(rows, own, torch.arange(len(rows), device=self.device), width)
        slot = at.repeat_interleave(self._tensor([len(r) for r in replies]))
        place = [p + 1 + j for p, r in zip(positions, replies, strict=True) for j in range(len(r))]
        self.history[slot, self._tensor(place)] = self._tensor([token for r in replies for token in r])
        if self.feeding is not None:
            self.feeding.begin(at[self._tensor([bool(r) for r in replies]).bool()])
        last = [r[-1] if r else token for token, r in zip(newest, replies, strict=True)]
        start = part.position + 1 + self._tensor([len(r) for r in replies])
        self.slots = self.slots.put(
            at, self._turns(part.row, part.stream, self._tensor(last), start, part.turn + 1)
        )

    def admit(self) -> None:
        """Give free slots to waiting rows."""
        gaps = (self.slots.status == DEAD).nonzero().flatten().tolist()
        free = [*gaps, *range(len(self.slots), self.size)][: len(self.waiting)]
        if not free:
            return
        rows = [self.waiting.popleft() for _ in free]
        wanted = [self.prompt[row] for row in rows]
        at, row = self._tensor(free), self._tensor(rows)
        self.source.install(wanted, self.cache, at)
        self.source.keep(self.prompt[self.waiting[0]] if self.waiting else None)
        places = {prompt: place for place, prompt in enumerate(dict.fromkeys(wanted))}
        tokens = padded([self.prompts[p] for p in places], self.device)
        place, start = self._tensor([places[p] for p in wanted]), self.lengths[row]
        self.history[at, : tokens.shape[1]] = tokens[place]
        self.label[row] = self.readings * len(self.prompts) + self._tensor(wanted)
        last = tokens[place, start - 1]
        new = self._turns(row, self.streams[row], last, start, torch.zeros_like(row))
        self.slots = self.slots.put(at, new)
        if self.feeding is not None:
            self.feeding.begin(at)
            for number, prompt in zip(rows, wanted, strict=True):
                if prompt in self.prefixes:
                    self.feeding.prefixed(number, self.prefixes[prompt])
        self._fill_up()
        self._measure()

    def _turns(self, row: Tensor, streams: Tensor, token: Tensor, start: Tensor, turn: Tensor) -> Slots:
        """Rows at the beginning of a turn whose first token will be at `start`."""
        limit = (start + self.longest[row]).clamp(max=self.context)
        return Slots(row, streams, token, start - 1, start, turn, limit, torch.full_like(row, RUNNING))

    def close_gaps(self) -> None:
        """Move the last live rows into dead slots, and drop the slots after them."""
        kept = self.slots.live.nonzero().flatten()
        gaps = (~self.slots.live[: len(kept)]).nonzero().flatten()
        movers = kept[len(kept) - len(gaps) :]
        if len(gaps):
            self.cache.put(gaps, self.cache, movers, self.reach)
            self.history[gaps] = self.history[movers]
            if self.feeding is not None:
                self.feeding.move(gaps, movers)
        order = torch.arange(len(kept), device=self.device).index_copy(0, gaps, movers)
        self.slots = self.slots.take(order)
        self._fill_up()
        self._measure()

    def _fill_up(self) -> None:
        """Dead slots after the last ones, where there are fewer than `least`."""
        if 0 < len(self.slots) < self.least:
            self.slots = self.slots.filled_up(self.least)

    def _width(self) -> int:
        """How many cache slots the step is given to see; those past a row's own are masked."""
        if self.device.type == "cpu":
            return even(self.reach, self.least)
        return min(-(-self.reach // _GRAIN) * _GRAIN, self.cache.capacity)

    def _measure(self) -> None:
        """How far the rows reach: one past the last position of any."""
        self.reach = int(self.slots.position.max()) + 1 if len(self.slots) else 0

    def _reserve(self, length: int) -> None:
        """Room for `length` positions in cache and history."""
        if length <= self.history.shape[1]:
            return
        wider = min(max(length, 2 * self.history.shape[1]), max(length, self.context + 1))
        if self.graphs is not None:
            self.graphs.grow(wider)
            self.history = self.graphs.history
            return
        wider = even(wider, self.least)
        self.cache.grow(wider)
        grown = self.history.new_zeros(self.size, wider)
        grown[:, : self.history.shape[1]] = self.history
        self.history = grown

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)


def _narrowed(mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    """A mask where a cut that acts as well has left few ids of it, and listed them."""
    inside = torch.arange(ids.shape[1], device=ids.device) < counts[:, None]
    few = torch.zeros_like(mask)
    few[inside.nonzero()[:, 0], ids[inside].long()] = True
    return torch.where(counts[:, None] > 0, few, mask)


def _signed(seed: int) -> int:
    """Any integer, wrapped into int64."""
    return (seed + 2**63) % 2**64 - 2**63
