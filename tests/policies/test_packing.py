"""Packed rows against padded ones: values, gradients, windows, sharing, and sequences of every length."""

from __future__ import annotations

import pytest
import torch

from panoply.policies.decoder import Decoder, DecoderConfig
from panoply.policies.layout import lay_out
from panoply.policies.packing import pack
from panoply.policies.text import TextPolicy
from tests.policies.test_text import RAGGED, TOKENIZER, experience, gradients, policy


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(Decoder, "packs", True)
    return monkeypatch


def test_pieces_see_their_prefix_and_themselves() -> None:
    # Two rows: a prefix of 2 with suffixes of 1 and 3, and a lone sequence of 2.
    found = pack(torch.tensor([2, 1, 3, 2]), torch.tensor([0, 1, 2, 0]), torch.tensor([0, 0, 0, 1]))
    assert found.queries.tolist() == [0, 2, 3, 6, 8]
    assert found.keys.tolist() == [0, 2, 5, 10, 12]
    assert found.source.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4, 5, 6, 7]
    assert found.longest == (3, 5)
    assert found.places.tolist() == [0, 2, 5, 1, 3, 6, 4, 7, 8, 9, 10, 11]
    assert found.bounds.tolist() == [0, 3, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("options", [{}, {"skip": 2}, {"inside": True}])
@pytest.mark.parametrize("shared", [True, False])
def test_packed_scores_and_gradients_are_those_of_padded_rows(
    packing: pytest.MonkeyPatch, options: dict[str, int], shared: bool
) -> None:
    model, data = policy(), experience(RAGGED, **options)  # type: ignore[arg-type]
    model.shared = shared
    weight = torch.linspace(-1, 2, len(data))
    needs = frozenset({"entropy", "hidden:1"})
    packed, slopes = model.score(data, needs), gradients(model, data, weight)
    packing.setattr(Decoder, "packs", False)
    padded, expected = model.score(data, needs), gradients(model, data, weight)
    for name, column in padded.items():
        torch.testing.assert_close(packed[name], column, atol=1e-5, rtol=1e-5)
    for name, slope in expected.items():
        assert (slopes[name] - slope).abs().max() < 1e-5 * slope.abs().max(), name


def test_packing_keeps_a_sliding_window_and_needs_no_padding(packing: pytest.MonkeyPatch) -> None:
    config = DecoderConfig(14, width=32, layers=2, heads=4, model_type="mistral", windows=(5, 5))
    model, data = TextPolicy.fresh(config, TOKENIZER), experience(RAGGED)
    with torch.no_grad():
        packed = model.score(data)["logp"]
        packing.setattr(Decoder, "packs", False)
        torch.testing.assert_close(packed, model.score(data)["logp"], atol=1e-5, rtol=1e-5)
    (rows,) = lay_out(data, packed=True)
    needed = sum(p + sum(n - 1 for n in suffixes) for p, suffixes in RAGGED)
    assert rows.tokens.shape == (1, needed)


def test_checkpointed_blocks_give_the_same_gradient() -> None:
    model, data = policy(), experience(RAGGED)
    weight = torch.linspace(-1, 2, len(data))
    plain = gradients(model, data, weight)
    model.model.checkpointing = True
    again = gradients(model, data, weight)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
