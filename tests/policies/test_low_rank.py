"""Low-rank adapters merged into the decoder's weights, against PEFT's separate products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_text import RAGGED, TOKENIZER, experience
from torch import Tensor

from panoply import selves
from panoply.errors import PanoplyError
from panoply.kernels import host
from panoply.loops.mover import Masters
from panoply.loops.snapshots import Kept
from panoply.lora import Lora
from panoply.policies import low_rank
from panoply.policies.architectures import ARCHITECTURES
from panoply.policies.decoder import DecoderConfig
from panoply.policies.lora import add_lora, begun_with
from panoply.policies.steering import TokenValues
from panoply.policies.text import TextPolicy
from tests.layouts import LAYOUTS as EVERY

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


@pytest.mark.parametrize("name", ["gemma2", "phi3", "olmo2", "granite", "glm4"])
def test_adapters_of_other_layouts_are_those_of_peft(name: str) -> None:
    """On every linear layer under the name it has in Hugging Face's folders, joined ones among them."""
    more = EVERY[name]
    ours = add_lora(fresh(**more), 3)
    move(ours)
    theirs = through_peft(fresh(**more), ours, Lora(), 3)
    layout = ARCHITECTURES[name]
    named = {layer.rpartition(".")[2] for layer, _ in low_rank.adapters(ours.model)}
    assert named == {*layout.qkv, "o_proj", *layout.gate_up, "down_proj"}
    mine, other = gradients(ours), gradients(theirs)
    assert mine.keys() == other.keys()
    for factor, slope in mine.items():
        torch.testing.assert_close(slope, other[factor], atol=1e-9, rtol=1e-9, msg=factor)


@pytest.mark.parametrize("compiled", [True, False])
def test_gradients_are_those_of_peft_in_float32(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(host, "_compiled", lambda: None)
    ours = add_lora(fresh(torch.float32), 3)
    gradients(ours)  # what is made of factors once must follow them
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


def test_the_base_is_at_hand_without_a_second_copy() -> None:
    """Its scores are those of PEFT's with adapters disabled; of its weights only W₀ are bytes of their own."""
    plain, policy = fresh(), add_lora(fresh(), 3)
    move(policy)
    base = begun_with(policy)
    assert base is not None
    own = {p.data_ptr() for p in base.model.parameters()} - {p.data_ptr() for p in policy.model.parameters()}
    kept = {layer.origin.layer.weight.data_ptr() for _, layer in low_rank.adapters(policy.model)}
    assert own == kept
    assert len(own) == 2 * 7
    theirs = through_peft(fresh(), policy, Lora(), 3)
    with torch.no_grad(), theirs.model.disable_adapter():
        expected = theirs.score(DATA)["logp"]
        torch.testing.assert_close(base.score(DATA)["logp"], expected, atol=1e-12, rtol=1e-12)
    assert torch.equal(base.score(DATA)["logp"], plain.score(DATA)["logp"])
    base.score(DATA)  # joins the weights of layers that share an input, and must not leave W₀ behind
    low_rank.merge(policy.model)
    own = {p.untyped_storage().data_ptr() for p in base.model.parameters()}
    kept = {
        layer.origin.layer.weight.untyped_storage().data_ptr() for _, layer in low_rank.adapters(policy.model)
    }
    assert kept <= own


def test_a_snapshot_shares_what_never_changes_and_stays_what_it_was() -> None:
    policy = add_lora(fresh(), 3)
    move(policy)
    then, snapshot = policy.score(DATA)["logp"].detach(), policy.copy()
    move(policy, seed=2)
    assert torch.equal(snapshot.score(DATA)["logp"], then)
    assert not torch.allclose(policy.score(DATA)["logp"], then, atol=1e-3)
    mine, theirs = dict(policy.named_parameters()), dict(snapshot.named_parameters())
    shared = {name for name in mine if mine[name] is theirs[name]}
    assert {name for name in mine if "_proj" not in name} <= shared
    assert not any(name.endswith(("_proj.weight", "lora_A", "lora_B")) for name in shared)


def test_a_kept_self_follows_with_its_weights() -> None:
    policy = add_lora(fresh(), 3)
    behind, mean = (Kept(selves.parse(word), policy) for word in ("behind:2", "ema:0.5"))
    move(policy)
    for kept in (behind, mean):
        kept.renew(2, best=False)
    with torch.no_grad():
        now = policy.score(DATA)["logp"]
        assert torch.equal(behind.policy.score(DATA)["logp"], now)
        for name, layer in low_rank.adapters(mean.policy.model):
            learned = policy.model.get_submodule(name)
            torch.testing.assert_close(layer.lora_B, learned.lora_B / 2)
            torch.testing.assert_close(
                layer.weight,
                low_rank.merged(layer.origin.layer.weight, layer.lora_A, layer.lora_B, layer.scale),
            )
    again = Kept(selves.parse("ema:0.5"), add_lora(fresh(), 3))
    again.load_state(mean.state())
    assert torch.equal(again.policy.score(DATA)["logp"], mean.policy.score(DATA)["logp"])


def test_only_factors_are_moved_and_weights_follow_where_they_lie() -> None:
    policy = add_lora(fresh(torch.bfloat16), 3)
    learning = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    masters = Masters(learning, [layer for _, layer in low_rank.adapters(policy.model)])
    assert masters.moving == learning  # no masters: the factors are in float32
    assert all(name.endswith(("lora_A", "lora_B")) for name in learning)
    places = {n: p.data_ptr() for n, p in policy.named_parameters()}
    with torch.no_grad():
        for p in learning.values():
            p += 0.1
    masters.publish()
    assert {n: p.data_ptr() for n, p in policy.named_parameters()} == places
    for _, layer in low_rank.adapters(policy.model):
        exact = layer.origin.layer.weight.float() + layer.scale * layer.lora_B @ layer.lora_A
        assert layer.weight.dtype == torch.bfloat16
        assert torch.equal(layer.weight, exact.bfloat16())


def test_slopes_of_factors_of_half_precision_weights_are_scaled_back() -> None:
    policy = add_lora(fresh(torch.float16), 3)
    learning = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    masters = Masters(learning, [layer for _, layer in low_rank.adapters(policy.model)])
    assert masters.scale > 1
    for p in learning.values():
        p.grad = torch.full_like(p, masters.scale)
    assert not masters.overflowed(1.0)
    masters.unscale()
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in learning.values() if p.grad is not None)
    next(iter(learning.values())).grad.fill_(float("inf"))  # type: ignore[union-attr]
    before = masters.scale
    assert masters.overflowed(1.0)
    assert masters.scale == before / 2


@pytest.mark.parametrize(
    ("settings", "rank", "sentence"),
    [
        (Lora(target_modules=("qproj",)), 2, "Unknown layer in lora.target_modules 'qproj'. Did you mean 'q_proj'?"),
        (Lora(target_modules=("*.9.*",)), 2, r"The pattern '\*\.9\.\*' .* fits the whole name of no layer, such as m"),
        (Lora(target_modules=("[qv]_proj",)), 2, r"fits .* of no layer, .* Did you mean '\*\.\[qv\]_proj'\?"),
        (Lora(target_modules=(".*q_proj",)), 2, r"fits .* of no layer, .* Did you mean 'q_proj'\?"),
        (Lora(target_modules=("all_linear",)), 2, "Did you mean 'all-linear'?"),
        (Lora(target_modules=("lm_head",)), 2, "cannot name lm_head: tables of tokens get no adapters"),
        (Lora(), 17, "--lora 17 is more than model.layers.0.self_attn.k_proj allows, whose weight is 16 × 32: at most"),
    ],
)  # fmt: skip
def test_layers_and_ranks_that_do_not_exist(settings: Lora, rank: int, sentence: str) -> None:
    with pytest.raises(PanoplyError, match=sentence):
        add_lora(fresh(), rank, settings=settings)


@pytest.mark.parametrize("dora", [False, True])
def test_a_steered_model_gets_none(dora: bool) -> None:
    """They would be saved under names that no model has."""
    policy = fresh()
    policy.steer(TokenValues.beside(policy.model, heads=1, v=True, beta=1.0))  # type: ignore[arg-type]
    with pytest.raises(
        PanoplyError, match="steered by values of tokens gets no adapters: name the model that"
    ):
        add_lora(policy, 1, settings=Lora(target_modules=("q_proj",), dora=dora))


def test_scale() -> None:
    assert Lora().scale(8, 8) == 2
    assert Lora(alpha=32).scale(8, 8) == 4
    assert Lora(alpha=32, rslora=True).scale(16, 16) == 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_made_of_it_learns_apart(layout: str) -> None:
    """A copy shares what is frozen; a critic that learned in it would move the policy's embeddings and norms."""
    policy = fresh(**LAYOUTS[layout])
    add_lora(policy, 2, Lora())
    move(policy)
    before, other = policy.fingerprint(), policy.apart()
    torch.testing.assert_close(other.score(DATA)["logp"], policy.score(DATA)["logp"], rtol=0, atol=1e-12)
    names = {name for name, _ in other.named_parameters()}
    assert names == {name for name, _ in fresh(**LAYOUTS[layout]).named_parameters()}
    with torch.no_grad():
        for _, parameter in other.named_parameters():
            assert parameter.requires_grad
            parameter += 1
    assert policy.fingerprint() == before
