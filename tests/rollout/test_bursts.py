"""Several tokens between two looks of the host, as graphs draw them: here by a stand-in that steps on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from panoply.policies.decoder import Decoder
from panoply.policies.tokenizer import Tokenizer
from panoply.rollout import rollouts
from panoply.rollout.cuts import LISTED
from panoply.rollout.engine import Sampling, TextEngine, Turn
from panoply.rollout.generation import Generation
from panoply.rollout.rollouts import LENGTH, RUNNING, STOP, Slots
from tests.rollout.test_engine import make_model, make_requests, same


class Stepping:
    """Draws a burst like a `GraphDecoder`, token by token."""

    def __init__(self, owner: Generation, cache: Any, history: torch.Tensor):
        self.owner, self.cache, self.history, self.rows = owner, cache, history, len(history)

    def configure(self, *_: Any) -> None: ...

    def reader(self, _: Any) -> None:
        """Prompts are read side by side, on a CPU."""

    def grow(self, capacity: int) -> None:
        """Room for longer rows."""
        self.cache.grow(capacity)
        self.history = torch.cat(
            [self.history, self.history.new_zeros(self.rows, capacity - self.history.shape[1])], 1
        )

    def share(self, holder: torch.Tensor, held: torch.Tensor) -> None:
        self.holders = list(zip(holder.tolist(), held.tolist(), strict=True))

    def check_holders(self) -> None:
        """What a graph reads from another slot is what the slot has itself."""
        for slot, (holder, held) in enumerate(self.holders):
            for x in (self.cache.keys, self.cache.values):
                assert torch.equal(x[:, slot, :held], x[:, holder, :held])

    def burst(
        self, slots: Slots, steps: int, mask: torch.Tensor | None = None, unseen: int = 0
    ) -> tuple[Slots, Any, Any]:
        owner, drawn, seen = self.owner, [], []
        held = (owner.slots, owner.graphs)
        owner.slots, owner.graphs = slots, None
        assert len(self.holders) == len(slots)
        for _ in range(steps):
            self.check_holders()
            at = owner.slots.position + 1
            found, live = owner._draw(owner._logits(), at), owner.slots.live
            owner.history[: len(slots)].scatter_(1, at[:, None], found.action[:, None])
            full = (at + 1 >= slots.limit) * LENGTH
            owner.slots = owner.slots.advance(
                found.action, torch.where(owner.stops[found.action], STOP, full)
            )
            drawn.append((live, at, found))
            seen.append(owner.slots.status)
            owner.reach += 1
        after = owner.slots
        owner.slots, owner.graphs = held
        owner.reach -= steps
        columns = {n: torch.cat([getattr(f, n) for _, _, f in drawn]) for n in ("action", "logp", "entropy")}
        if owner.sampling.truncates:
            columns |= {n: torch.cat([getattr(f, n) for _, _, f in drawn]) for n in ("cut", "kept")}
            columns |= _lists(drawn)
        live, position = (torch.cat([d[i] for d in drawn]) for i in (0, 1))
        return after, _Record(live, position, **columns), _Glance(seen[-1 - unseen])


def _lists(drawn: list[Any]) -> dict[str, torch.Tensor]:
    """Ids of sets that were cut and are small, as kernels list them."""
    lists = [row for _, _, found in drawn for row in found.allowed.tolist()]
    kept = torch.cat([found.kept for _, _, found in drawn])
    count = torch.tensor([len(row) if len(row) <= LISTED else 0 for row in lists]) * (kept < 1)
    ids = torch.zeros(len(lists), LISTED, dtype=torch.int32)
    for place, row in zip(ids, lists, strict=True):
        place[: min(len(row), LISTED)] = torch.tensor(row[:LISTED], dtype=torch.int32)
    return {"ids": ids, "count": count.int()}


class _Glance:
    def __init__(self, status: torch.Tensor):
        self.status = status

    def any_ended(self) -> bool:
        return bool((self.status > RUNNING).any())


class _Record:
    def __init__(self, live: torch.Tensor, position: torch.Tensor, **columns: torch.Tensor):
        self.live, self.position, self.temperature = live, position, None
        self.__dict__.update(columns)


def test_rows_of_one_prompt_look_at_it_in_one_place_unless_other_weights_have_read_it(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_bursts(monkeypatch)
    shared, version = [], 0
    check = Stepping.check_holders

    def watched(self: Stepping) -> None:
        check(self)
        shared.append(sum(slot != holder for slot, (holder, held) in enumerate(self.holders) if held))

    def between() -> int:
        nonlocal version
        version += 1
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.01)
        return version

    monkeypatch.setattr(Stepping, "check_holders", watched)
    engine = TextEngine(model, slots=7, patience=4)
    sampling = Sampling(max_tokens=24, stop_tokens=(5, 7))
    engine.generate(make_requests(3, 6), sampling, entropy=True)
    assert max(shared) > 3
    engine.between = between
    engine.generate(make_requests(3, 6), sampling, entropy=True)


@pytest.fixture
def model() -> Decoder:
    return make_model()


def in_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let generations draw by the stand-in from now on."""
    allocate = Generation._allocate

    def with_bursts(self: Generation, *sizes: int) -> None:
        allocate(self, 128, 128, sizes[2])
        self.host = None
        self.graphs = Stepping(self, self.cache, self.history)  # type: ignore[assignment]

    monkeypatch.setattr(Generation, "_allocate", with_bursts)


@pytest.mark.parametrize("patience", [4, 9, 16])
@pytest.mark.parametrize("turns", [False, True])
def test_what_ends_unseen_is_neither_lost_nor_sampled_on(
    model: Decoder, patience: int, turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reply(turn: Turn) -> list[int] | None:
        return [3, 4] if turn.turn < 2 else None

    def run(**engine: Any) -> Any:
        sampling = Sampling(max_tokens=24, stop_tokens=(5, 7))
        return TextEngine(model, slots=9, **engine).generate(
            make_requests(6, 4),
            sampling,
            (lambda ended: [reply(turn) for turn in ended]) if turns else None,
            entropy=True,
        )

    whole = run(patience=1)
    in_bursts(monkeypatch)
    unseen: list[int] = []
    burst = Stepping.burst
    monkeypatch.setattr(Stepping, "burst", lambda *a: unseen.append(a[-1]) or burst(*a))  # type: ignore[func-returns-value]
    assert same(whole, run(patience=patience))
    assert any(unseen)
    assert {STOP, LENGTH} & set(whole.reasons.values.tolist()) == {STOP, LENGTH}


@pytest.mark.parametrize("patience", [1, 4, 9])
@pytest.mark.parametrize("begun", [0, 1])
@pytest.mark.parametrize("turns", [False, True])
def test_turns_end_at_their_first_stop_string_however_seldom_the_host_looks(
    model: Decoder, patience: int, begun: int, turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.of_characters("abcdefghijklmnopqrstuvwxyz")
    sampling = Sampling(max_tokens=12, stop_strings=("ab", "q", "cc", "x"), stop_tokens=(5,))

    requests = [replace(request, begun=begun) for request in make_requests(6, 4)]

    def complete(said: list[int]) -> bool:
        return len(said) > 2 and sum(said) % 7 == 0

    def reply(turn: Turn) -> list[int] | None:
        return [3, 4] if turn.turn < 2 else None

    def run(**engine: Any) -> Any:
        asked = TextEngine(model, tokenizer, **engine)
        ending = (lambda ended: [reply(turn) for turn in ended]) if turns else None
        return asked.generate(requests, sampling, ending, complete=complete, entropy=True)

    whole = run(patience=1)
    in_bursts(monkeypatch)
    found = run(patience=patience)
    assert same(whole, found)
    torch.testing.assert_close(whole.decisions["logp"], found.decisions["logp"], atol=1e-5, rtol=1e-5)
    assert {STOP, LENGTH} & set(whole.reasons.values.tolist()) == {STOP, LENGTH}


@pytest.mark.parametrize("held", [1, 1 << 24])
def test_lists_of_a_cut_are_recorded_however_long_they_wait_on_the_device(
    model: Decoder, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = Sampling(max_tokens=12, top_k=5, temperature=2.0)

    def run(**engine: Any) -> Any:
        return TextEngine(model, **engine).generate(make_requests(3, 4), sampling, entropy=True).decisions

    whole = run(patience=1)
    in_bursts(monkeypatch)
    monkeypatch.setattr(rollouts, "HELD", held)
    found = run(patience=4).ragged("allowed")
    assert found.tolist() == whole.ragged("allowed").tolist()
    assert {len(row) for row in found.tolist()} == {5}


@pytest.mark.parametrize("patience", [1, 4])
def test_turns_that_outgrow_their_buffers_are_given_wider_ones(
    patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sampling = make_model(max_positions=300), Sampling(max_tokens=100)

    def run() -> Any:
        engine = TextEngine(model, slots=9, patience=patience)
        return engine.generate(
            make_requests(3, 2), sampling, lambda turns: [[3] * 10 for _ in turns], entropy=True
        )

    whole = run()
    in_bursts(monkeypatch)
    assert same(whole, run())
    assert whole.context.ragged("tokens").lengths.min() > 128, "more than there was room for at first"
