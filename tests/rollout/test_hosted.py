"""Decoding on a CPU in fixed buffers against the blocks one by one."""

from __future__ import annotations

import pytest
import torch

from panoply.policies.decoder import Decoder, DecoderConfig
from panoply.rollout.engine import Request, Sampling, TextEngine
from panoply.rollout.hosted import host_decoder

LAYOUTS = {
    "llama": {"model_type": "llama"},
    "biases": {"model_type": "qwen2"},
    "normed heads": {"model_type": "qwen3", "kv_heads": 2},
    "window": {"model_type": "qwen3", "windows": (3, 0), "kv_heads": 1},
}


def decoder(layout: str, dtype: torch.dtype = torch.float64) -> Decoder:
    model = Decoder(DecoderConfig(17, width=32, layers=2, heads=4, max_positions=64, **LAYOUTS[layout]))  # type: ignore[arg-type]
    model.initialise(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.copy_(torch.linspace(-1, 1, len(weight)))
    return model.to(dtype).eval()


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_a_token_at_a_time_is_the_whole_sequence(layout: str) -> None:
    model = decoder(layout)
    tokens = torch.arange(3 * 7).view(3, 7) % 17
    expected = model(tokens)
    cache = model.new_cache(4, 8)
    host = host_decoder(model, cache)
    assert host is not None
    for t in range(7):
        found = host.logits(tokens[:, t], torch.full((3,), t), t + 1)
        torch.testing.assert_close(found, expected[:, t])


@torch.no_grad()
def test_rows_may_stand_at_different_positions_and_the_cache_may_grow() -> None:
    model = decoder("llama")
    tokens = torch.arange(2 * 9).view(2, 9) % 17
    expected = model(tokens)
    host = host_decoder(model, model.new_cache(2, 4))
    assert host is not None
    for t in range(3):
        host.logits(tokens[:1, t], torch.tensor([t]), t + 1)
    for t in range(6):
        found = host.logits(torch.stack([tokens[0, t + 3], tokens[1, t]]), torch.tensor([t + 3, t]), t + 4)
        torch.testing.assert_close(found, torch.stack([expected[0, t + 3], expected[1, t]]))


def test_only_plain_blocks_are_decoded_so() -> None:
    model = decoder("llama", torch.bfloat16)
    assert host_decoder(model, model.new_cache(1, 4)) is None

    class Adapter(torch.nn.Linear):
        pass

    model = decoder("llama")
    model.model.layers[1].mlp.up_proj = Adapter(32, model.config.inner, bias=False)  # type: ignore[union-attr]
    assert host_decoder(model, model.new_cache(1, 4)) is None


def test_both_ways_sample_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("normed heads", torch.float32)
    requests = [Request([1, 2, 3], [0, 1, 2]), Request([4], [3, 4])]
    sampling = Sampling(max_tokens=12, stop_tokens=(5,))
    fast = TextEngine(model).generate(requests, sampling)
    monkeypatch.setattr(Decoder, "fusing", False)
    slow = TextEngine(model).generate(requests, sampling)
    assert fast.completions() == slow.completions()
    torch.testing.assert_close(fast.decisions["logp"], slow.decisions["logp"], atol=1e-5, rtol=1e-5)
