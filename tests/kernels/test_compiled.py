"""The compiled kernels against the same functions in float64, which torch's operators compute."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from panoply.experience import Ragged
from panoply.kernels import host
from panoply.policies.decoder import Decoder, DecoderConfig
from panoply.policies.packing import pack
from panoply.rollout.engine import Request, Sampling, TextEngine
from panoply.rollout.hosted import CompiledDecoder, HostDecoder, host_decoder
from panoply.rollout.sampling import draw

compiled = pytest.importorskip("panoply.kernels.compiled", reason="Numba is not installed")
ROUNDING = {"rtol": 2e-5, "atol": 2e-6}


def numbers(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def agree(function: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Values and slopes in float32 are those in float64, where nothing is compiled."""
    assert host.compiled(inputs[0]) is compiled
    assert host.compiled(inputs[0].double()) is None
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        value = function(*leaves)
        slopes = torch.autograd.grad(
            (value * torch.linspace(-1, 2, value.numel()).view_as(value)).sum(), leaves
        )
        found.append([value, *slopes])
    for quick, exact in zip(*found, strict=True):
        torch.testing.assert_close(quick.double(), exact, **ROUNDING)


def test_a_sum_and_its_norm() -> None:
    x, change, weight = numbers(5, 24), numbers(5, 24, seed=4), numbers(24, seed=5)
    agree(lambda x, c, w: torch.cat(host.add_norm(x, c, w, 1e-5)), x, change, weight)
    agree(lambda x, c, w: host.add_norm(x, c, w, 1e-5)[1], x, change, weight)
    agree(lambda x, w: host.add_norm(x, None, w, 1e-5)[1], x, weight)


@pytest.mark.parametrize("rows", [1, host.ROWS + 3])
def test_gates_also_far_from_zero(rows: int) -> None:
    both = numbers(rows, 20) * torch.logspace(-1, 2.3, 20)
    agree(host.gated_down, both, numbers(4, 10, seed=6))


@pytest.mark.parametrize("window", [0, 2])
def test_attention_over_packed_rows(window: int) -> None:
    """Two prompts of unequal length with three completions each, and one alone."""
    length, segment = torch.tensor([3, 2, 5, 1, 4, 2, 2, 6]), torch.tensor([0, 1, 2, 3, 0, 1, 2, 0])
    packing = pack(length, segment, torch.tensor([0, 0, 0, 0, 1, 1, 1, 2]))
    tokens = int(length.sum())
    cos, sin = numbers(tokens, 4, seed=8), numbers(tokens, 4, seed=9)

    def attended(qkv: Tensor) -> Tensor:
        from panoply.policies.attention import Focus
        from panoply.policies.packing import rotate_and_attend

        angles = host.angles(cos.to(qkv.dtype), sin.to(qkv.dtype))
        return rotate_and_attend(qkv.clone(), angles, 4, packing, Focus(window))

    agree(attended, numbers(tokens, 8, 8))


@pytest.mark.parametrize("x", [-200.0, -87.0, -1.5, 0.0, 1e-4, 3.0, 80.0])
def test_exponentials(x: float) -> None:
    expected = np.exp(np.clip(np.float64(np.float32(x)), -87, 88))
    assert compiled._exp(np.float32(x)) == pytest.approx(expected, rel=2e-7)


def test_draws_are_those_of_torch() -> None:
    logits = numbers(400, 11) * 3
    logits[:50, 4] = -torch.inf
    uniform = torch.rand(400, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    quick, exact = (draw(x, uniform, Sampling(), entropy=True) for x in (logits, logits.double()))
    assert quick.action.tolist() == exact.action.tolist()
    torch.testing.assert_close(quick.logp.double(), exact.logp, **ROUNDING)
    assert quick.entropy is not None
    assert exact.entropy is not None
    torch.testing.assert_close(quick.entropy.double(), exact.entropy, **ROUNDING)


def test_what_cannot_be_is_never_drawn() -> None:
    """Also not at the very end of the distribution, where rounding could pass the last likely token."""
    logits = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])
    for uniform in (1e-12, 1 - 1e-12):
        found = draw(logits, torch.full((2,), uniform, dtype=torch.float64), Sampling())
        assert found.action.tolist() == [0, 1]


LAYOUTS = {
    "llama": {"model_type": "llama"},
    "biases": {"model_type": "qwen2"},
    "normed heads": {"model_type": "qwen3", "kv_heads": 2},
    "window": {"model_type": "qwen3", "windows": (3, 0), "kv_heads": 1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_decoding_with_compiled_kernels_is_decoding(layout: str) -> None:
    """Rows at different positions, in a cache that grows on the way."""
    model = Decoder(DecoderConfig(17, width=32, layers=2, heads=4, max_positions=64, **LAYOUTS[layout]))  # type: ignore[arg-type]
    model.initialise(1)
    model.eval()
    tokens = torch.arange(2 * 9).view(2, 9) % 17
    expected = model(tokens)
    found = host_decoder(model, model.new_cache(2, 4))
    assert type(found) is CompiledDecoder
    for t in range(3):
        found.logits(tokens[:1, t], torch.tensor([t]), t + 1)
    for t in range(6):
        logits = found.logits(torch.stack([tokens[0, t + 3], tokens[1, t]]), torch.tensor([t + 3, t]), t + 4)
        torch.testing.assert_close(
            logits, torch.stack([expected[0, t + 3], expected[1, t]]), rtol=1e-4, atol=1e-5
        )


def test_without_numba_everything_runs_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder(DecoderConfig(17, width=32, layers=2, heads=4, max_positions=64))
    model.initialise(1)

    def sampled() -> Ragged:
        return TextEngine(model).generate([Request([1, 2, 3], [5, 6])], Sampling(max_tokens=6)).sampled

    quick = sampled()
    monkeypatch.setattr(host, "_compiled", lambda: None)
    assert type(host_decoder(model, model.new_cache(1, 8))) is HostDecoder
    assert sampled().tolist() == quick.tolist()
