"""Rows of several turns: what is appended between them, and that nothing before it is computed again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import TERMINATED, TRUNCATED
from panoply.policies.attention import Cache
from panoply.policies.decoder import Decoder, DecoderConfig
from panoply.rollout.engine import (
    CONTEXT,
    LENGTH,
    STOP,
    OnStop,
    Request,
    Rollouts,
    Sampling,
    TextEngine,
    Turn,
)
from panoply.rollout.sampling import invert, stream, uniforms


@pytest.fixture(scope="module")
def model() -> Decoder:
    model = Decoder(DecoderConfig(vocab_size=23, width=32, layers=2, heads=4, kv_heads=2, max_positions=64))
    model.initialise(0)
    with torch.no_grad():
        model.lm_head.weight.mul_(12)
    return model


def make_requests() -> list[Request]:
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    return [Request(p, [10 * i + j for j in range(4)], key=10 * i) for i, p in enumerate(prompts)]


def each(answer: Callable[[Turn], list[int] | None]) -> OnStop:
    return lambda turns: [answer(turn) for turn in turns]


def reply(turn: Turn) -> list[int] | None:
    """Observations of 0 to 4 tokens that depend on what was said; three turns at most."""
    if turn.turn == 2:
        return None
    return [(turn.sampled[-1] + i) % 23 for i in range(sum(turn.sampled) % 5)]


def in_one_pass(model: Decoder, rollouts: Rollouts) -> Tensor:
    tokens, found = rollouts.context.ragged("tokens"), []
    for row in range(len(rollouts)):
        with torch.no_grad():
            logp = model(tokens[row][None])[0].log_softmax(-1)
        mine = rollouts.decisions["context"] == row
        at, action = rollouts.decisions["position"][mine], rollouts.decisions["action"][mine]
        assert torch.equal(tokens[row][at], action)
        found.append(logp[at - 1, action])
    return torch.cat(found)


@pytest.mark.parametrize(("slots", "patience", "budget"), [(512, 1, 8), (512, 6, 999), (3, 1, 8), (5, 4, 99)])
def test_going_on_equals_starting_again(model: Decoder, slots: int, patience: int, budget: int) -> None:
    sampling = Sampling(max_tokens=6, stop_tokens=(3, 4, 5, 6))
    engine = TextEngine(model, slots=slots, patience=patience, prefill_tokens=budget)
    rollouts = engine.generate(make_requests(), sampling, each(reply))
    assert rollouts.reasons.lengths.tolist() == [3] * 12
    assert (rollouts.decisions["logp"] - in_one_pass(model, rollouts)).abs().max() < 1e-5
    for row, request in enumerate(rollouts.request.tolist()):
        tokens = list(make_requests()[request].prompt)
        seed = make_requests()[request].seeds[row % 4]
        for turn, reason in enumerate(rollouts.reasons.tolist()[row]):
            alone = engine.generate([Request(tokens, [seed])], sampling)
            said = alone.sampled.tolist()[0]
            assert alone.reasons.tolist() == [[reason]]
            start, tokens = len(tokens), tokens + said
            tokens += reply(Turn(row, request, None, turn, tokens, start, reason)) or []
        assert rollouts.context.ragged("tokens")[row].tolist() == tokens


def test_every_position_of_a_row_has_a_random_number_of_its_own(model: Decoder) -> None:
    rollouts = TextEngine(model).generate(make_requests(), Sampling(max_tokens=3), each(reply))
    seeds = torch.tensor([seed for request in make_requests() for seed in request.seeds])
    decisions, tokens = rollouts.decisions, rollouts.context.ragged("tokens")
    for row, at, action in zip(
        *(decisions[c].tolist() for c in ("context", "position", "action")), strict=True
    ):
        with torch.no_grad():
            logp = model(tokens[row][None, :at])[:, -1].log_softmax(-1)
        assert invert(logp, uniforms(stream(seeds[[row]]), torch.tensor([at]))).tolist() == [action]


def test_what_on_stop_is_shown(model: Decoder) -> None:
    seen: list[Turn] = []

    def look(turn: Turn) -> list[int] | None:
        seen.append(turn)
        return [20, 21] if turn.turn == 0 else None

    request = Request([1, 2], [5], key="mine", mask=lambda tokens: [7] if tokens[-1] in (2, 6) else [6])
    rollouts = TextEngine(model).generate([request], Sampling(max_tokens=3, stop_tokens=(7,)), each(look))
    assert [(t.row, t.request, t.key, t.turn, t.start, t.reason) for t in seen] == [
        (0, 0, "mine", 0, 2, STOP),
        (0, 0, "mine", 1, 5, STOP),
    ]
    assert [t.sampled for t in seen] == [[7], [6, 7]]
    assert rollouts.completions() == [[7, 20, 21, 6, 7]]
    assert rollouts.decisions["turn"].tolist() == [0, 1, 1]
    assert rollouts.decisions["position"].tolist() == [2, 5, 6]
    assert rollouts.decisions["end"].tolist() == [0, 0, TERMINATED]


def test_the_prefix_is_not_computed_again(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    begin = Cache.begin

    def spy(self: Cache, positions: Tensor, width: int | None = None) -> None:
        lengths.append(positions.shape[1])
        begin(self, positions, width)

    monkeypatch.setattr(Cache, "begin", spy)
    sampling = Sampling(max_tokens=4)
    TextEngine(model).generate(
        [Request([1] * 20, [0, 1])], sampling, each(lambda turn: [2, 3, 4] if turn.turn == 0 else None)
    )
    assert lengths == [19, 1, 1, 1, 1, 3, 1, 1, 1, 1]


def test_an_observation_that_does_not_fit_truncates(model: Decoder) -> None:
    sampling = Sampling(max_tokens=4)

    def ends(observation: list[int] | None) -> tuple[list[int], list[list[int]], int]:
        rollouts = TextEngine(model).generate([Request([1] * 50, [0])], sampling, each(lambda _: observation))
        return (
            rollouts.end.tolist(),
            rollouts.reasons.tolist(),
            int(rollouts.context.ragged("tokens").lengths),
        )

    assert ends(None) == ([TRUNCATED], [[LENGTH]], 54)
    assert ends([2] * 10) == ([TRUNCATED], [[LENGTH]], 54)
    assert ends([2] * 9) == ([TRUNCATED], [[LENGTH, CONTEXT]], 64)
    assert ends([2]) == ([TRUNCATED], [[LENGTH, LENGTH, LENGTH]], 64)


def test_observations_must_be_tokens(model: Decoder) -> None:
    with pytest.raises(PanoplyError, match="outside the vocabulary of 23"):
        TextEngine(model).generate([Request([1], [0])], Sampling(max_tokens=1), each(lambda _: [23]))
