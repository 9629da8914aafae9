"""The engine against a full forward pass without a cache, and against itself in other batches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import OPEN, TERMINATED, TRUNCATED
from panoply.policies.decoder import Decoder, DecoderConfig
from panoply.policies.tokenizer import Tokenizer
from panoply.rollout.engine import (
    CONTEXT,
    LENGTH,
    STEADY,
    STOP,
    Request,
    Rollouts,
    Sampling,
    TextEngine,
    View,
)
from panoply.rollout.generation import Generation

VOCAB = 23


def make_model(**changes: object) -> Decoder:
    settings = {"vocab_size": VOCAB, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "max_positions": 64}
    model = Decoder(DecoderConfig(**{**settings, **changes}))
    model.initialise(0)
    with torch.no_grad():
        model.lm_head.weight.mul_(12)  # far from uniform, so that mistakes show
    return model


@pytest.fixture(scope="module")
def model() -> Decoder:
    return make_model()


def make_requests(count: int = 5, group: int = 3, seed: int = 0) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [Request(p, [100 * i + j for j in range(group)], key=f"q{i}") for i, p in enumerate(prompts)]


def rescored(model: Decoder, rollouts: Rollouts) -> Tensor:
    """Log-probabilities of the sampled tokens from full forward passes, under what each recorded."""
    decisions, found = rollouts.decisions, []
    for index in range(decisions.rows):
        tokens = rollouts.context.ragged("tokens")[int(decisions["context"][index])]
        at = int(decisions["position"][index])
        with torch.no_grad():
            logits = model(tokens[None, :at])[0, -1]
        if "repetition_penalty" in set(decisions):
            penalty = decisions["repetition_penalty"][index]
            for token in set(tokens[:at].tolist()):
                logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        if "within" in set(decisions):
            said = tokens[at - int(decisions["within"][index]) : at].tolist()
            for name in {"presence_penalty", "frequency_penalty"} & set(decisions):
                for token in set(said) if name == "presence_penalty" else said:
                    logits[token] -= decisions[name][index]
        if "temperature" in set(decisions):
            logits = logits / decisions["temperature"][index]
        if "allowed" in set(decisions) and len(ids := decisions.ragged("allowed")[index]):
            logits = torch.full_like(logits, -torch.inf).index_copy(0, ids, logits[ids])
        found.append(logits.log_softmax(-1)[decisions["action"][index]])
    return torch.stack(found)


def same(a: Rollouts, b: Rollouts) -> bool:
    tables = zip((a.decisions, a.context), (b.decisions, b.context), strict=True)
    equal = all(set(x) == set(y) for x, y in tables)
    names = ("context", "position", "turn", "action", "end")
    equal &= all(torch.equal(a.decisions.tensor(n), b.decisions.tensor(n)) for n in names)
    equal &= a.context.ragged("tokens").tolist() == b.context.ragged("tokens").tolist()
    return equal and a.reasons.tolist() == b.reasons.tolist() and torch.equal(a.end, b.end)


def odd_only(view: View) -> Tensor:
    """Odd tokens after an even one, anything after an odd one."""
    last = view.tokens.gather(1, view.length[:, None] - 1)
    odd = torch.arange(VOCAB, device=last.device) % 2 == 1
    return odd | (last % 2 == 1)


SETTINGS = {
    "plain": Sampling(max_tokens=12),
    "cool": Sampling(max_tokens=12, temperature=0.7),
    "top_k": Sampling(max_tokens=12, top_k=4),
    "min_p": Sampling(max_tokens=12, min_p=0.1),
    "penalty": Sampling(max_tokens=12, repetition_penalty=1.3, top_k=9, stop_tokens=(3,)),
    "counted": Sampling(max_tokens=12, presence_penalty=1.5, frequency_penalty=-0.7, stop_tokens=(3,)),
    "present": Sampling(max_tokens=12, presence_penalty=-2.0, repetition_penalty=1.2, temperature=0.8),
    "frequent": Sampling(max_tokens=12, frequency_penalty=3.0),
    "top_p": Sampling(max_tokens=12, temperature=1.3, top_p=0.8),
    "both": Sampling(max_tokens=12, temperature=0.9, top_k=6, top_p=0.9, stop_tokens=(3,)),
    "schedule": Sampling(max_tokens=12, temperature=lambda t: 1.5 - t / 10),
    "min_tokens": Sampling(max_tokens=12, stop_tokens=(3, 4, 5, 6, 7), min_tokens=4),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("masked", [False, True])
def test_log_probabilities_are_those_of_a_full_forward_pass(model: Decoder, name: str, masked: bool) -> None:
    engine = TextEngine(model, slots=7)
    rollouts = engine.generate(make_requests(), SETTINGS[name], mask=odd_only if masked else None)
    assert rollouts.decisions.rows > 60
    assert (rollouts.decisions["logp"] - rescored(model, rollouts)).abs().max() < 1e-5
    assert ("allowed" in set(rollouts.decisions)) == (
        masked or name in {"top_k", "min_p", "penalty", "top_p", "both", "min_tokens"}
    )
    assert ("temperature" in set(rollouts.decisions)) == (
        name in {"cool", "present", "top_p", "both", "schedule"}
    )


def test_sliding_windows_and_key_norms_decode_as_they_train() -> None:
    model = make_model(model_type="qwen3", windows=(4, 0))
    rollouts = TextEngine(model).generate(make_requests(), Sampling(max_tokens=12))
    assert (rollouts.decisions["logp"] - rescored(model, rollouts)).abs().max() < 1e-5


@pytest.mark.parametrize("patience", [1, 3])
@pytest.mark.parametrize("slots", [1, 2, 5, 16])
def test_slots_and_patience_do_not_change_what_is_sampled(model: Decoder, slots: int, patience: int) -> None:
    sampling = Sampling(max_tokens=20, stop_tokens=(3, 11, 12))
    requests = make_requests(9, 4)
    whole = TextEngine(model).generate(requests, sampling)
    assert len({len(row) for row in whole.sampled.tolist()}) > 5
    narrow = TextEngine(model, slots=slots, patience=patience, prefill_tokens=9)
    assert same(whole, narrow.generate(requests, sampling))


def test_a_row_depends_on_its_prompt_and_seed_only(model: Decoder) -> None:
    engine, sampling = TextEngine(model), Sampling(max_tokens=15, stop_tokens=(3,))
    requests = make_requests(6, 3)
    together = engine.generate(requests, sampling).completions()
    alone = [
        engine.generate([Request(r.prompt, [s])], sampling).completions()[0]
        for r in requests
        for s in r.seeds
    ]
    assert together == alone
    other = engine.generate([Request(r.prompt, [s + 1 for s in r.seeds]) for r in requests], sampling)
    assert other.completions() != together


def test_each_distinct_prompt_is_prefilled_once(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    hidden = Decoder.hidden

    def spy(self: Decoder, tokens: Tensor, *args: object, **kwargs: object) -> Tensor:
        if tokens.shape[1] > 1:
            seen.extend(tuple(row) for row in tokens.tolist())
        return hidden(self, tokens, *args, **kwargs)

    monkeypatch.setattr(Decoder, "hidden", spy)
    prompts = [[5, 6, 7, 8], [9, 8, 7, 6], [5, 6, 7, 8]]
    requests = [Request(p, range(10 * i, 10 * i + 6)) for i, p in enumerate(prompts)]
    rollouts = TextEngine(model, slots=4).generate(requests, Sampling(max_tokens=5))
    assert sorted(seen) == [(5, 6, 7), (9, 8, 7)]
    assert rollouts.context["prompt"].tolist() == [0] * 6 + [1] * 6 + [0] * 6
    assert rollouts.request.tolist() == [0] * 6 + [1] * 6 + [2] * 6


def test_frequencies_match_probabilities(model: Decoder) -> None:
    count = 4000
    sampling = Sampling(max_tokens=1, temperature=0.8, top_p=0.95)
    rollouts = TextEngine(model, slots=1024).generate([Request([4, 2, 9], range(count))], sampling)
    logits = model(torch.tensor([[4, 2, 9]]))[0, -1] / 0.8
    allowed = rollouts.decisions.ragged("allowed")[0]
    p = logits[allowed].softmax(-1)
    counts = rollouts.decisions["action"].bincount(minlength=VOCAB)
    assert counts[allowed].sum() == count
    assert len(allowed) < VOCAB
    chi_square = ((counts[allowed] - count * p) ** 2 / (count * p)).sum()
    assert chi_square < 3 * len(allowed)


def test_greedy_is_argmax_and_recorded_at_temperature_one(model: Decoder) -> None:
    requests = make_requests(4, 2)
    rollouts = TextEngine(model).generate(requests, Sampling(max_tokens=10, temperature=0, top_k=3))
    for tokens, prompt in zip(
        rollouts.context.ragged("tokens").tolist(), rollouts.context["shared"], strict=True
    ):
        logits = model(torch.tensor([tokens]))[0]
        assert logits.argmax(-1)[prompt - 1 : -1].tolist() == tokens[prompt:]
    assert (rollouts.decisions["logp"] - rescored(model, rollouts)).abs().max() < 1e-5
    assert "temperature" not in set(rollouts.decisions)
    assert rollouts.decisions.ragged("allowed").lengths.sum() == 0


def test_schedule_counts_from_the_start_of_a_turn(model: Decoder) -> None:
    sampling = Sampling(max_tokens=3, temperature=lambda t: torch.where(t == 1, 0.0, 2.0))
    rollouts = TextEngine(model).generate(make_requests(2, 1), sampling)
    assert rollouts.decisions["temperature"].tolist() == [2, 1, 2] * 2
    greedy = rollouts.decisions["position"] - rollouts.context["shared"][rollouts.decisions["context"]] == 1
    for index in greedy.nonzero().flatten().tolist():
        tokens = rollouts.context.ragged("tokens")[int(rollouts.decisions["context"][index])]
        logits = model(tokens[None, : int(rollouts.decisions["position"][index])])[0, -1]
        assert logits.argmax() == rollouts.decisions["action"][index]


def test_entropy_is_that_of_the_tempered_distribution(model: Decoder) -> None:
    sampling = Sampling(max_tokens=1, temperature=0.5, top_k=2)
    rollouts = TextEngine(model).generate([Request([4, 2], [0])], sampling, entropy=True)
    p = (model(torch.tensor([[4, 2]]))[0, -1] / 0.5).softmax(-1)
    assert torch.allclose(rollouts.decisions["entropy"][0], -(p * p.log()).sum(), atol=1e-5)


def test_requests_have_masks_of_their_own(model: Decoder) -> None:
    def alternate(tokens: Sequence[int]) -> list[int]:
        return [7] if tokens[-1] == 8 else [8]

    vowels = torch.arange(VOCAB) < 3
    requests = [
        Request([1, 2], [0, 1], mask=alternate),
        Request([1, 2], [2], mask=lambda _: vowels),
        Request([1, 2], [3], mask=lambda _: None),
        Request([1, 2], [3]),
    ]
    rollouts = TextEngine(model, slots=3).generate(requests, Sampling(max_tokens=4))
    rows = rollouts.sampled.tolist()
    assert rows[0] == rows[1] == [8, 7, 8, 7]
    assert max(rows[2]) < 3
    assert rows[3] == rows[4]
    lengths = rollouts.decisions.ragged("allowed").lengths.view(5, 4)
    assert lengths[:, 0].tolist() == [1, 1, 3, 0, 0]
    with pytest.raises(PanoplyError, match="row 0 no token"):
        TextEngine(model).generate([Request([1], [0], mask=lambda _: [])], Sampling())


def test_ends_and_reasons(model: Decoder) -> None:
    stop = Request([1, 2], [0, 1], mask=lambda tokens: [5])
    long = Request([1, 2], [2], mask=lambda tokens: [6])
    deep = Request([1] * 61, [3], mask=lambda tokens: [6])
    brim = Request([1] * 63, [4], mask=lambda tokens: [5])
    rollouts = TextEngine(model, slots=2).generate(
        [stop, long, deep, brim], Sampling(max_tokens=7, stop_tokens=(5,))
    )
    assert rollouts.sampled.tolist() == [[5], [5], [6] * 7, [6] * 3, [5]]
    assert rollouts.reasons.tolist() == [[STOP], [STOP], [LENGTH], [CONTEXT], [STOP]]
    assert rollouts.end.tolist() == [TERMINATED, TERMINATED, TRUNCATED, TRUNCATED, TERMINATED]
    expected = [TERMINATED, TERMINATED, *[OPEN] * 6, TRUNCATED, OPEN, OPEN, TRUNCATED, TERMINATED]
    assert rollouts.decisions["end"].tolist() == expected
    assert rollouts.keys == (None,) * 5


def test_a_row_that_fills_the_context_scores_right(model: Decoder) -> None:
    requests = [Request([4] * 40, [0, 1]), Request([5] * 3, [2])]
    rollouts = TextEngine(model).generate(requests, Sampling(max_tokens=1000))
    assert rollouts.context.ragged("tokens").lengths.tolist() == [64, 64, 64]
    assert rollouts.reasons.tolist() == [[CONTEXT]] * 3
    assert (rollouts.decisions["logp"] - rescored(model, rollouts)).abs().max() < 1e-5


def test_the_cache_grows_with_long_turns() -> None:
    model = make_model(max_positions=1024)
    requests = [Request([4, 5, 6], [0]), Request([7], [1])]
    rollouts = TextEngine(model).generate(requests, Sampling(max_tokens=600))
    assert rollouts.sampled.lengths.tolist() == [600, 600]
    tokens = rollouts.context.ragged("tokens")[0]
    logp = model(tokens[None, :-1])[0].log_softmax(-1).gather(-1, tokens[1:, None])[2:, 0]
    assert (rollouts.decisions["logp"][:600] - logp).abs().max() < 1e-5


def test_stop_strings_span_tokens(model: Decoder) -> None:
    tokenizer = Tokenizer.of_characters("abcdefghijklmnopqrstu")
    text = "abxabcab".replace("x", "d")
    spelled = tokenizer.encode(text)

    def spell(tokens: Sequence[int]) -> list[int]:
        return [spelled[len(tokens) - 1]]

    def ended(**settings: object) -> str:
        sampling = Sampling(max_tokens=8, **settings)
        rollouts = TextEngine(model, tokenizer).generate([Request([2], [0], mask=spell)], sampling)
        assert rollouts.reasons.tolist() == [[STOP if len(rollouts.decisions["action"]) < 8 else LENGTH]]
        return tokenizer.decode(rollouts.sampled.tolist()[0])

    assert ended(stop_strings=("abc",)) == "abdabc"
    assert ended(stop_strings=("zz", "da", "abc")) == "abda"
    assert ended(stop_strings=("bb",)) == text
    assert ended(stop_strings=("ab",)) == "ab"
    assert ended(stop_strings=("ab",), min_tokens=3) == "abdab"
    assert ended(stop_strings=("abc",), stop_tokens=(spelled[2],)) == "abd"


def test_nothing_to_do(model: Decoder) -> None:
    for requests in ([], [Request([1, 2], [])]):
        rollouts = TextEngine(model).generate(requests, Sampling())
        assert len(rollouts) == rollouts.decisions.rows == 0
        assert rollouts.completions() == rollouts.sampled.tolist() == rollouts.reasons.tolist() == []


def test_bad_requests_are_refused_in_a_sentence(model: Decoder) -> None:
    engine = TextEngine(model)
    for request, sentence in (
        (Request([1] * 64, [0]), "request 0 has 64 tokens, but the model's context is 64"),
        (Request([], [0]), "request 0 is empty"),
        (Request([1, VOCAB], [0]), "outside the vocabulary of 23"),
    ):
        with pytest.raises(PanoplyError, match=sentence):
            engine.generate([request], Sampling())
    with pytest.raises(PanoplyError, match="tokenizer"):
        engine.generate([Request([1], [0])], Sampling(stop_strings=("x",)))
    with pytest.raises(PanoplyError, match="stop_tokens"):
        engine.generate([Request([1], [0])], Sampling(stop_tokens=(99,)))
    with pytest.raises(PanoplyError, match="at least 1"):
        TextEngine(model, slots=0)


def test_a_training_model_is_left_as_it_was(model: Decoder) -> None:
    model.train()
    TextEngine(model).generate([Request([1], [0])], Sampling(max_tokens=1))
    assert model.training
    model.eval()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_penalties_act_on_logits_of_every_precision(dtype: torch.dtype) -> None:
    settings = Sampling(max_tokens=9, frequency_penalty=0.5, presence_penalty=0.3, repetition_penalty=1.2)
    rollouts = TextEngine(model := make_model().to(dtype)).generate(make_requests(), settings)
    if dtype == torch.float64:
        assert (rollouts.decisions["logp"] - rescored(model, rollouts)).abs().max() < 1e-6
    assert rollouts.decisions["logp"].isfinite().all()


def test_no_row_reaches_further_than_the_context(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[int] = []
    reserve = Generation._reserve
    monkeypatch.setattr(Generation, "_reserve", lambda s, n: reserved.append(n) or reserve(s, n))  # type: ignore[func-returns-value]
    requests = [Request([1] * 50, [0]), Request([2], range(11))]  # one ends at the context, and leaves a gap
    rollouts = TextEngine(model).generate(requests, Sampling(max_tokens=64))
    assert rollouts.context.ragged("tokens").lengths.tolist() == [64] * 12
    assert max(reserved) == 65


def test_rows_that_are_the_same_in_any_company_look_at_whole_pieces_of_a_grown_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int]] = []
    logits = Generation._logits
    monkeypatch.setattr(
        Generation,
        "_logits",
        lambda s: seen.append((s._width(), s.cache.capacity)) or logits(s),  # type: ignore[func-returns-value]
    )
    engine = TextEngine(make_model(max_positions=700), least=STEADY)
    engine.generate([Request([1] * 30, [0])], Sampling(max_tokens=670))
    assert all(width % 64 == 0 and width <= room for width, room in seen)
    assert max(seen)[0] == 704
