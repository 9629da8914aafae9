"""Chunked scoring against a plain softmax, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from panoply.experience import Ragged
from panoply.policies import scoring
from panoply.policies.penalties import Said
from panoply.policies.scoring import Head, naive_scores, score_actions, scored

ROWS, VOCAB, WIDTH = 7, 11, 5
ALLOWED = Ragged.from_lists([[0, 3, 5], [], [2], [1, 2, 3, 4, 5, 6], [], [9, 10], [4, 7]])
ACTIONS = torch.tensor([3, 8, 2, 6, 0, 10, 4])
CUT = torch.tensor([-torch.inf, -2.5, -3.0, -2.0, -1.5, -torch.inf, -0.01], dtype=torch.float64)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=dtype)
    temperature = torch.rand(ROWS, generator=generator, dtype=dtype) + 0.5
    return hidden.requires_grad_(), weight.requires_grad_(), temperature


def reference(
    hidden: Tensor,
    weight: Tensor,
    softcap: float,
    temperature: Any = None,
    allowed: Any = None,
    cut: Any = None,
) -> dict[str, Tensor]:
    logits = hidden @ weight.t()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if temperature is not None:
        logits = logits / temperature[:, None]
    if allowed is not None:
        for row, ids in enumerate(allowed.tolist()):
            mask = torch.ones(VOCAB, dtype=torch.bool)
            mask[ids or slice(None)] = False
            logits = logits.clone()
            logits[row] = logits[row].masked_fill(mask, float("-inf"))
    if cut is not None:
        likely = logits.log_softmax(1) >= cut[:, None]
        logits = logits.masked_fill(~(likely | (torch.arange(VOCAB) == ACTIONS[:, None])), float("-inf"))
    return naive_scores(logits, ACTIONS)


@pytest.mark.parametrize("chunk", [0, 1, 3])
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_values_and_gradients_are_those_of_a_plain_softmax(
    chunk: int, restricted: bool, cuts: bool, softcap: float
) -> None:
    hidden, weight, temperature = inputs()
    options: dict[str, Any] = {"temperature": temperature, "allowed": ALLOWED} if restricted else {}
    options |= {"cut": CUT} if cuts else {}
    expected = reference(hidden, weight, softcap, **options)
    found = score_actions(hidden, weight, ACTIONS, **options, entropy=True, chunk=chunk, softcap=softcap)
    mix = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    for name in ("logp", "entropy"):
        torch.testing.assert_close(found[name], expected[name])
        theirs = torch.autograd.grad((expected[name] * mix).sum(), [hidden, weight], retain_graph=True)
        ours = torch.autograd.grad((found[name] * mix).sum(), [hidden, weight], retain_graph=True)
        torch.testing.assert_close(ours, theirs)


def test_gradcheck_of_both_outputs_together() -> None:
    hidden, weight, temperature = inputs()

    def both(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        scores = score_actions(h, w, ACTIONS, temperature, ALLOWED, entropy=True, chunk=2, cut=CUT)
        return scores["logp"], scores["entropy"]

    assert torch.autograd.gradcheck(both, (hidden, weight))


def test_a_row_with_one_choice_is_certain() -> None:
    hidden, weight, _ = inputs()
    scores = score_actions(hidden, weight, ACTIONS, allowed=ALLOWED, entropy=True)
    assert scores["logp"][2] == 0
    assert scores["entropy"][2] == 0


def test_what_is_not_allowed_has_no_probability() -> None:
    hidden, weight, _ = inputs()
    scores = score_actions(hidden, weight, torch.full((ROWS,), 8), allowed=ALLOWED)
    assert scores["logp"][0] == float("-inf")
    assert scores["logp"][1].isfinite()


def test_no_logits_are_kept_for_the_backward_pass() -> None:
    hidden, weight, _ = inputs(torch.float32)
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        score_actions(hidden, weight, ACTIONS, entropy=True)
    assert kept
    assert max(kept) < ROWS * VOCAB


def test_extreme_logits_stay_finite() -> None:
    hidden, weight, _ = inputs(torch.float32)
    scores = score_actions(hidden * 1e4, weight, ACTIONS, entropy=True)
    (slope,) = torch.autograd.grad(scores["logp"].sum() + scores["entropy"].sum(), hidden)
    assert slope.isfinite().all()
    assert scores["entropy"].isfinite().all()


def test_no_rows_give_no_scores() -> None:
    hidden, weight, _ = inputs()
    scores = score_actions(hidden[:0], weight, ACTIONS[:0], entropy=True)
    assert scores["logp"].shape == (0,)
    assert scores["entropy"].shape == (0,)


def test_another_temperature_leaves_what_could_be_drawn_as_it_was() -> None:
    hidden, weight, temperature = inputs()
    head, rows = Head(temperature, None, 0.0, CUT, ACTIONS), slice(0, ROWS)
    hot = head.times_temperature(3.0, hidden)
    cold_z, hot_z = (h.whole_logits(hidden, weight, rows)[0] for h in (head, hot))
    torch.testing.assert_close(hot_z, cold_z / 3)
    ours, theirs = hot.barred(hot_z, rows), head.barred(cold_z, rows)
    assert ours is not None
    assert theirs is not None
    assert theirs.any()
    assert torch.equal(ours, theirs)
    mask = torch.where(theirs, -torch.inf, 0.0)
    expected = naive_scores((hidden @ weight.t()) / (3 * temperature[:, None]) + mask, ACTIONS)
    torch.testing.assert_close(scored(hidden, weight, ACTIONS, hot)["logp"], expected["logp"])


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_penalties_act_on_what_was_said_and_have_their_gradient(softcap: float, counted: bool) -> None:
    """On all of a context once; on what a turn has said of it once more, and for each time."""
    hidden, weight, temperature = inputs()
    tokens = torch.tensor([[3, 3, 8, 1, 9], [4, 0, 0, 0, 10]])
    context, length = torch.tensor([0, 0, 1, 1, 0, 1, 1]), torch.tensor([1, 3, 2, 5, 4, 1, 5])
    penalty = torch.tensor([1.0, 1.5, 1.5, 0.7, 2.0, 1.2, 1.2], dtype=torch.float64)
    start, presence = torch.tensor([0, 0, 2, 1, 2, 1, 1]), torch.linspace(-1, 1, ROWS, dtype=torch.float64)
    frequency = presence.flip(0) * 0.3
    more = (presence, frequency) if counted else (None, None)
    said = Said(tokens, context, length, start, penalty, *more)
    head = Head(temperature, ALLOWED, softcap, CUT, ACTIONS, said)
    logits = hidden @ weight.t()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    factor = torch.ones(ROWS, VOCAB, dtype=torch.float64)
    for row in range(ROWS):
        for token in set(tokens[context[row], : length[row]].tolist()):
            factor[row, token] = 1 / penalty[row] if logits[row, token] > 0 else penalty[row]
    taken = torch.zeros_like(factor)
    for row in range(ROWS) if counted else ():
        turn = tokens[context[row], start[row] : length[row]].tolist()
        for token in set(turn):
            taken[row, token] = presence[row] + turn.count(token) * frequency[row]
    assert (taken != 0).any() == counted
    penalised = said.penalise(logits.detach(), slice(0, ROWS))[0]
    torch.testing.assert_close(penalised, (logits * factor - taken).detach())
    whole = (logits * factor - taken) / temperature[:, None]
    barred = head.barred(whole.detach(), slice(0, ROWS))
    assert barred is not None
    expected = naive_scores(whole.masked_fill(barred, -torch.inf), ACTIONS)
    found = scored(hidden, weight, ACTIONS, head, entropy=True, chunk=3)
    mix = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    for name in ("logp", "entropy"):
        torch.testing.assert_close(found[name], expected[name])
        theirs = torch.autograd.grad((expected[name] * mix).sum(), [hidden, weight], retain_graph=True)
        ours = torch.autograd.grad((found[name] * mix).sum(), [hidden, weight], retain_graph=True)
        torch.testing.assert_close(ours, theirs)
    plain = head.free_logits(hidden, weight, slice(0, ROWS))
    torch.testing.assert_close(plain.log_softmax(-1).gather(1, ACTIONS[:, None])[:, 0], expected["logp"])


@pytest.mark.parametrize(
    ("installed", "in_use", "capability", "kernels"),
    [
        (True, False, (7, 5), True),
        (True, True, (7, 5), False),
        (True, True, (8, 6), True),
        (False, True, (9, 0), False),
    ],
)
def test_gpus_that_triton_makes_no_kernels_for_do_without(
    installed: bool, in_use: bool, capability: tuple[int, int], kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And who uses none is not asked which one there is, which would take memory of it."""
    monkeypatch.setattr(scoring, "_installed", lambda: installed)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    scoring._compiles.cache_clear()
    assert scoring.has_triton() == kernels
    scoring._compiles.cache_clear()
