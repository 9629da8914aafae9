"""Scoring on CUDA: kernels against plain torch, packed rows in half precision, compiled against eager."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from panoply.experience import Experience, Ragged
from panoply.lora import Lora
from panoply.policies import low_rank, scoring
from panoply.policies.decoder import Decoder, DecoderConfig
from panoply.policies.lora import add_lora
from panoply.policies.quantised import Kind
from panoply.policies.scoring import Head, naive_scores, score_actions
from panoply.policies.text import TextPolicy
from tests.layouts import LAYOUTS, SHAPE
from tests.policies.test_text import RAGGED, TOKENIZER, experience, gradients

pytestmark = pytest.mark.gpu
CONFIG = DecoderConfig(14, width=64, layers=2, heads=4, kv_heads=2, max_positions=256, model_type="qwen3")


def policy(dtype: torch.dtype = torch.float32, device: str = "cuda") -> TextPolicy:
    return TextPolicy.fresh(CONFIG, TOKENIZER, dtype=dtype, device=device)


def weight(data: Experience, device: str) -> Tensor:
    return torch.linspace(-1, 2, len(data), device=device)


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("heated", [False, True])
@pytest.mark.parametrize("vocabulary", [50, 9001])
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_kernels_score_as_a_plain_softmax(chunk: int, heated: bool, vocabulary: int, cap: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 16, device="cuda", requires_grad=True)
    head = torch.randn(vocabulary, 16, device="cuda", requires_grad=True)
    actions = torch.randint(0, vocabulary, (7,), device="cuda")
    temperature = torch.rand(7, device="cuda") + 0.5 if heated else None
    logits = hidden @ head.t()
    logits = (logits / cap).tanh() * cap if cap else logits
    expected = naive_scores(logits if temperature is None else logits / temperature[:, None], actions)
    found = score_actions(hidden, head, actions, temperature, entropy=True, chunk=chunk, softcap=cap)
    mix = torch.linspace(-1, 2, 7, device="cuda")
    for name in ("logp", "entropy"):
        torch.testing.assert_close(found[name], expected[name], atol=1e-4, rtol=1e-4)
        theirs = torch.autograd.grad((expected[name] * mix).sum(), [hidden, head], retain_graph=True)
        ours = torch.autograd.grad((found[name] * mix).sum(), [hidden, head], retain_graph=True)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("what", ["lists", "cuts", "both"])
def test_kernels_score_cuts_as_plain_torch_does(
    what: str, softcap: float, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    rows, vocabulary = 200, 5003
    hidden = torch.randn(rows, 16, device="cuda", requires_grad=True)
    head = torch.randn(vocabulary, 16, device="cuda", requires_grad=True)
    actions = torch.randint(0, vocabulary, (rows,), device="cuda")
    temperature = torch.rand(rows, device="cuda") + 0.5
    ids = [sorted({a, *range(i % 64)}) if i % 3 == 0 else [] for i, a in enumerate(actions.tolist())]
    allowed = Ragged.from_lists(ids).to("cuda") if what != "cuts" else None
    cut = torch.where(torch.arange(rows) % 3 == 1, -9.0, -torch.inf).cuda() if what != "lists" else None
    mix = torch.linspace(-1, 2, rows, device="cuda")
    options = {"temperature": temperature, "allowed": allowed, "softcap": softcap, "cut": cut, "chunk": 64}

    def of(entropy: bool) -> list[Tensor]:
        found = score_actions(hidden, head, actions, entropy=entropy, **options)  # type: ignore[arg-type]
        total = sum((column * mix).sum() for column in found.values())
        return [*found.values(), *torch.autograd.grad(total, [hidden, head])]

    if kept:
        monkeypatch.setattr(Head, "keeps", lambda *_: True)
    ours = of(not kept)
    monkeypatch.setattr(Head, "keeps", lambda *_: False)
    monkeypatch.setattr(Head, "fused", lambda *_: False)
    torch.testing.assert_close(ours, of(not kept), atol=1e-3, rtol=1e-3)


def test_the_slope_of_a_plain_sum_reaches_every_row() -> None:
    hidden = torch.randn(5, 16, device="cuda", requires_grad=True)
    head, actions = torch.randn(50, 16, device="cuda"), torch.arange(5, device="cuda")
    expected = naive_scores(hidden @ head.t(), actions)["entropy"].sum()
    found = score_actions(hidden, head, actions, entropy=True)["entropy"].sum()
    ours, theirs = (torch.autograd.grad(x, [hidden])[0] for x in (found, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heated", [False, True])
def test_kept_softmaxes_give_as_good_a_gradient_as_recomputed_ones(
    dtype: torch.dtype, heated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(300, 64, device="cuda").to(dtype).requires_grad_()
    head = (torch.randn(9001, 64, device="cuda") / 4).to(dtype).requires_grad_()
    actions = torch.randint(0, 9001, (300,), device="cuda")
    temperature = torch.rand(300, device="cuda") + 0.5 if heated else None
    mix = torch.linspace(-1, 2, 300, device="cuda")

    def slopes(logp: Tensor) -> list[Tensor]:
        found = torch.autograd.grad((logp * mix).sum(), [hidden, head], retain_graph=True)
        return [g.double() for g in found]

    logits = hidden.double() @ head.double().t()
    exact = naive_scores(logits if temperature is None else logits / temperature[:, None], actions)["logp"]
    kept = score_actions(hidden, head, actions, temperature, chunk=128)["logp"]
    monkeypatch.setattr(scoring, "KEPT_SHARE", 0.0)
    again = score_actions(hidden, head, actions, temperature, chunk=128)["logp"]
    assert "Kept" in str(kept.grad_fn)
    assert "Kept" not in str(again.grad_fn)
    torch.testing.assert_close(kept, again, atol=2e-6, rtol=1e-6)
    for right, ours, theirs in zip(slopes(exact), slopes(kept), slopes(again), strict=True):
        assert (ours - right).norm() <= 1.2 * (theirs - right).norm()
        assert (ours - right).norm() < 1e-2 * right.norm()
    frozen = score_actions(hidden, head.detach(), actions, temperature, chunk=128)["logp"]
    assert "Kept" in str(frozen.grad_fn)  # as wide as a state
    assert torch.equal(frozen, kept)
    right, theirs = slopes(exact)[0], slopes(again)[0]
    (ours,) = torch.autograd.grad((frozen * mix).sum(), hidden)
    assert (ours.double() - right).norm() <= 1.2 * (theirs - right).norm()


def test_float32_scores_as_the_cpu_does() -> None:
    data = experience(RAGGED)
    here, there = policy(device="cpu"), policy()
    torch.testing.assert_close(
        there.score(data)["logp"].cpu(), here.score(data)["logp"], atol=1e-5, rtol=1e-5
    )
    ours, theirs = gradients(there, data, weight(data, "cuda")), gradients(here, data, weight(data, "cpu"))
    for name, slope in theirs.items():
        assert (ours[name].cpu() - slope).abs().max() < 1e-4 * slope.abs().max(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("fusing", [True, False])
def test_packed_half_precision_is_near_float32(
    dtype: torch.dtype, shared: bool, fusing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within five roundings: seen are 3.0 to 4.2, which change from run to run with the order of atomic sums."""
    limit = 5 * torch.finfo(dtype).eps
    monkeypatch.setattr(Decoder, "fusing", fusing)
    data = experience(RAGGED)
    narrow, wide = policy(dtype), policy()
    narrow.shared = shared
    assert narrow.packs
    with torch.no_grad():
        for mine, theirs in zip(wide.model.parameters(), narrow.model.parameters(), strict=True):
            mine.copy_(theirs)
    expected = gradients(wide, data, weight(data, "cuda"))
    found = gradients(narrow, data, weight(data, "cuda"))
    for name, slope in expected.items():
        apart = (found[name].float() - slope).norm() / slope.norm()
        assert apart < limit, f"{name}: {apart}"
    with torch.no_grad():
        gap = (narrow.score(data)["logp"] - wide.score(data)["logp"]).abs().mean()
    assert gap < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fusing", [True, False])
def test_slopes_of_low_rank_factors_are_near_those_in_float32(
    dtype: torch.dtype, fusing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within six roundings: factors are rounded too, and 5.05 were seen."""
    limit = 6 * torch.finfo(dtype).eps
    monkeypatch.setattr(Decoder, "fusing", fusing)
    data = experience(RAGGED)
    narrow, wide = add_lora(policy(dtype), 4), add_lora(policy(), 4)
    torch.manual_seed(0)
    with torch.no_grad():
        for mine, theirs in zip(wide.model.parameters(), narrow.model.parameters(), strict=True):
            if theirs.requires_grad:
                theirs.copy_(torch.randn_like(theirs) * 0.1)
            mine.copy_(theirs)
        low_rank.merge(narrow.model)
        for (_, mine), (_, theirs) in zip(
            low_rank.adapters(wide.model), low_rank.adapters(narrow.model), strict=True
        ):
            assert theirs.lora_A.dtype == torch.float32
            mine.weight.copy_(theirs.weight)  # with its rounding
    names, slopes = [], []
    for one in (wide, narrow):
        learning = {n: p for n, p in one.named_parameters() if p.requires_grad}
        scores = one.score(data)["logp"]
        slopes.append(torch.autograd.grad((scores * weight(data, "cuda")).sum(), list(learning.values())))
        names = list(learning)
    for name, right, found in zip(names, *slopes, strict=True):
        apart = (found - right).norm() / right.norm()
        assert apart < limit, f"{name}: {apart}"


@pytest.mark.parametrize("base", ["nf4", "int8"])
@pytest.mark.parametrize("width", [64, 128])
def test_slopes_of_factors_beside_few_bits_are_near_those_in_float32(base: Kind, width: int) -> None:
    """Within six roundings, as where they are merged; a width of 128 has codes that are multiplied as they lie."""
    data, config = experience(RAGGED), replace(CONFIG, width=width)
    few, wide = (
        TextPolicy.fresh(config, TOKENIZER, dtype=d, device="cuda") for d in (torch.bfloat16, torch.float32)
    )
    few = add_lora(few, 4, settings=Lora(base=base))
    wide.model.load_state_dict(low_rank.plain_weights(few.model))
    wide = add_lora(wide, 4)
    torch.manual_seed(0)
    found = []
    for (_, mine), (_, theirs) in zip(*(low_rank.adapters(p.model) for p in (few, wide)), strict=True):
        for a, b in ((mine.lora_A, theirs.lora_A), (mine.lora_B, theirs.lora_B)):
            a.data.normal_(0, 0.1)
            b.data.copy_(a)
    for one in (few, wide):
        low_rank.merge(one.model)
        learning = [p for p in one.parameters() if p.requires_grad]
        scores = one.score(data)["logp"]
        with torch.no_grad():
            torch.testing.assert_close(one.score(data)["logp"], scores, rtol=0.02, atol=0.02)
        found.append(torch.autograd.grad((scores * weight(data, "cuda")).sum(), learning))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() < 6 * torch.finfo(torch.bfloat16).eps * b.norm()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_learns_packed_in_half_precision(name: str) -> None:
    """Logits and gradients of fused blocks against float32 on the padded path."""
    config = DecoderConfig(14, **{**SHAPE, **LAYOUTS[name]})  # type: ignore[arg-type]
    narrow = TextPolicy.fresh(config, TOKENIZER, dtype=torch.bfloat16, device="cuda")
    assert narrow.packs
    assert isinstance(narrow.model, Decoder)
    assert narrow.model.fuses
    wide = TextPolicy.fresh(config, TOKENIZER, device="cuda")
    with torch.no_grad():
        for mine, theirs in zip(wide.model.parameters(), narrow.model.parameters(), strict=True):
            mine.copy_(theirs)
    data = experience(RAGGED)
    expected = gradients(wide, data, weight(data, "cuda"))
    found = gradients(narrow, data, weight(data, "cuda"))
    for parameter, slope in expected.items():
        apart = (found[parameter].float() - slope).norm() / slope.norm()
        assert apart < 6 * torch.finfo(torch.bfloat16).eps, f"{parameter}: {apart}"
    with torch.no_grad():
        gap = (narrow.score(data)["logp"] - wide.score(data)["logp"]).abs().mean()
    assert gap < 5 * torch.finfo(torch.bfloat16).eps
