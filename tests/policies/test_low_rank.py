"""Low-rank adapters merged into the decoder's weights, against PEFT's separate products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_text import RAGGED, TOKENIZER, experience
from torch import Tensor

from panoply.kernels import host
from panoply.lora import Lora
from panoply.policies import low_rank
from panoply.policies.decoder import DecoderConfig
from panoply.policies.lora import add_lora
from panoply.policies.text import TextPolicy

LAYOUTS: dict[str, dict[str, Any]] = {
    "biases, and one table for words in and out": {"model_type": "qwen2", "tied": True},
    "queries and keys normed": {"model_type": "qwen3"},
    "biases everywhere": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
}
DATA = experience(RAGGED)


def fresh(dtype: torch.dtype = torch.float64, **more: Any) -> TextPolicy:
    layout = {"kv_heads": 2, "max_positions": 256, "model_type": "qwen3", **more}
    policy = TextPolicy.fresh(DecoderConfig(14, width=32, layers=2, heads=4, **layout), TOKENIZER, 3, dtype)
    with torch.no_grad():
        for number, p in enumerate(policy.model.parameters()):
            if p.ndim == 1:  # biases and norms that are not all alike
                p += torch.randn(p.shape, generator=torch.Generator().manual_seed(number)).to(p) * 0.1
    return policy


def move(policy: TextPolicy, seed: int = 1) -> None:
    """As if it had learned."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, layer in low_rank.adapters(policy.model):
            for factor in (layer.lora_A, layer.lora_B):
                factor.copy_(torch.randn(factor.shape, generator=generator) * 0.1)
    low_rank.merge(policy.model)


def through_peft(policy: TextPolicy, like: TextPolicy, settings: Lora, rank: int) -> TextPolicy:
    """PEFT's adapters on a policy, with the same factors as the others."""
    peft = pytest.importorskip("peft")
    names = settings.layers(low_rank.linear_layers(policy.model), rank)
    alpha = 2 * rank if settings.alpha is None else settings.alpha
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=names, use_rslora=settings.rslora)
    model = peft.get_peft_model(policy.model, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, layer in low_rank.adapters(like.model):
            theirs = model.base_model.model.get_submodule(name)
            theirs.lora_A["default"].weight.data = layer.lora_A.detach().clone()
            theirs.lora_B["default"].weight.data = layer.lora_B.detach().clone()
    return TextPolicy(model.eval(), policy.tokenizer)


def gradients(policy: TextPolicy) -> dict[str, Tensor]:
    """By the names that factors have here."""
    scored = policy.score(DATA, frozenset({"entropy"}))
    weight = torch.linspace(-1, 1, len(DATA), dtype=scored["logp"].dtype)
    names, leaves = zip(*((n, p) for n, p in policy.named_parameters() if p.requires_grad), strict=True)
    found = torch.autograd.grad(((scored["logp"] - 0.3 * scored["entropy"]) * weight).sum(), leaves)
    bare = (n.replace("base_model.model.", "", 1).replace(".default.weight", "") for n in names)
    return dict(zip(bare, found, strict=True))


CASES = {
    "all layers": Lora(),
    "two layers of one product": Lora(target_modules=("q_proj", "v_proj"), alpha=3.0),
    "of one block": Lora(target_modules=("*.1.*",), rslora=True),
}


@pytest.mark.parametrize("fusing", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_scores_and_gradients_are_those_of_peft(case: str, layout: str, fusing: bool) -> None:
    settings, more = CASES[case], LAYOUTS[layout]
    ours = add_lora(fresh(**more), 3, settings=settings)
    move(ours)
    theirs = through_peft(fresh(**more), ours, settings, 3)
    ours.model.fusing = fusing
    with torch.no_grad():
        assert (ours.score(DATA)["logp"] - fresh(**more).score(DATA)["logp"]).abs().max() > 1e-2
        torch.testing.assert_close(
            ours.score(DATA)["logp"], theirs.score(DATA)["logp"], atol=1e-10, rtol=1e-10
        )
    mine, other = gradients(ours), gradients(theirs)
    assert mine.keys() == other.keys()
    assert all(slope.abs().max() > 1e-6 for slope in other.values())
    for name, slope in mine.items():
        torch.testing.assert_close(slope, other[name], atol=1e-9, rtol=1e-9, msg=name)


@pytest.mark.parametrize("compiled", [True, False])
def test_gradients_are_those_of_peft_in_float32(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(host, "_compiled", lambda: None)
    ours = add_lora(fresh(torch.float32), 3)
    move(ours)
    mine, other = gradients(ours), gradients(through_peft(fresh(torch.float32), ours, Lora(), 3))
    for name, slope in mine.items():
        assert (slope - other[name]).norm() < 1e-5 * other[name].norm(), name


def test_with_recomputed_blocks_the_gradient_is_the_same() -> None:
    policy = add_lora(fresh(), 3)
    move(policy)
    kept = gradients(policy)
    policy.model.checkpointing = True
    for name, slope in gradients(policy).items():
        torch.testing.assert_close(slope, kept[name], atol=1e-12, rtol=1e-12)
