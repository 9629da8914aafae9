"""Mixtures of experts: the layer against plain expressions in float64, models through all their paths, kernels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import resume, train
from torch import Tensor

import panoply as pp
from panoply.costs import cost
from panoply.errors import PanoplyError
from panoply.kernels import host_experts
from panoply.lora import Lora
from panoply.policies.decoder import Decoder, DecoderConfig
from panoply.policies.experts import Mixing, Mixture
from panoply.policies.folder import load_model, save_model
from panoply.policies.lora import add_lora
from panoply.policies.packing import pack
from panoply.policies.text import TextPolicy
from panoply.rollout.engine import Request, Sampling, TextEngine
from panoply.rollout.graphs import has_kernels
from panoply.worlds.text.chain import Chain
from tests.policies.test_text import RAGGED, TOKENIZER, experience, gradients
from tests.rollout.test_engine import rescored

MIXINGS = [
    Mixing(experts=5, chosen=2, inner=6),
    Mixing(experts=5, chosen=3, inner=6, normalised=False),
    Mixing(experts=4, chosen=2, inner=6, bias=True, alpha=1.702, limit=0.7),
]


def layer(mixing: Mixing, width: int = 8) -> Mixture:
    made = Mixture(width, mixing).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return made


def plainly(made: Mixture, x: Tensor) -> Tensor:
    """Every expert for every token, and weights that are 0 where it was not chosen."""
    m, e = made.mixing, made.experts
    z = x @ made.router.weight.t() + (0 if made.router.bias is None else made.router.bias)
    kept = torch.zeros_like(z).scatter(1, z.topk(m.chosen, dim=1).indices, 1.0)
    share = z.softmax(1) * kept
    if m.normalised:
        share = share / share.sum(1, keepdim=True)
    total = torch.zeros_like(x)
    for number in range(m.experts):
        both = x @ e.gate_up_proj[number].t()
        both = both if e.gate_up_bias is None else both + e.gate_up_bias[number]
        gate, up = both.chunk(2, dim=1)
        if m.limit:
            gate, up = gate.clamp(max=m.limit), up.clamp(-m.limit, m.limit) + 1
        out = (gate * torch.sigmoid(m.alpha * gate) * up) @ e.down_proj[number].t()
        out = out if e.down_bias is None else out + e.down_bias[number]
        total = total + share[:, number, None] * out
    return total


@pytest.mark.parametrize("mixing", MIXINGS)
def test_values_and_slopes_are_those_of_plain_expressions(mixing: Mixing) -> None:
    made = layer(mixing)
    x = torch.randn(11, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    aim = torch.linspace(-1, 2, 88, dtype=torch.float64).view(11, 8)
    found = []
    for function in (made, lambda x: plainly(made, x)):
        given = x.clone().requires_grad_()
        value = function(given)
        slopes = torch.autograd.grad((value * aim).sum(), [given, *made.parameters()])
        found.append([value, *slopes])
    assert all(slope.abs().sum() > 0 for slope in found[1])
    for quick, exact in zip(*found, strict=True):
        torch.testing.assert_close(quick, exact, rtol=1e-10, atol=1e-12)


def test_an_expert_without_tokens_has_no_slope_and_breaks_nothing() -> None:
    made = layer(MIXINGS[0])
    with torch.no_grad():
        made.router.weight[3:] = 0.0
        made.router.weight[:3] = made.router.weight[:3].abs()
    made(torch.rand(6, 8, dtype=torch.float64) + 0.1).sum().backward()
    slope = made.experts.gate_up_proj.grad
    assert slope is not None
    assert not slope[3:].any()
    assert slope.any()


def test_rows_of_any_shape_and_none_at_all() -> None:
    made = layer(MIXINGS[0])
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(made(x).view(6, 8), made(x.view(6, 8)))
    assert made(x[:, :0]).shape == (2, 0, 8)


CONFIGS = {
    "experts": {"model_type": "qwen3_moe", "mixing": Mixing(6, 2, 20), "dense": (1,)},
    "sinks": {
        "model_type": "gpt_oss", "mixing": Mixing(6, 3, 20, bias=True, alpha=1.7, limit=0.5), "windows": (4, 0, 4),
    },
}  # fmt: skip


def fresh(kind: str) -> TextPolicy:
    made = TextPolicy.fresh(
        DecoderConfig(14, width=32, layers=3, heads=4, kv_heads=2, **CONFIGS[kind]), TOKENIZER
    )
    with torch.no_grad():
        for name, weight in made.model.named_parameters():
            if name.endswith(("bias", "sinks")):
                weight.copy_(torch.linspace(-1, 1, weight.numel()).view_as(weight))
    return made


@pytest.mark.parametrize("kind", CONFIGS)
def test_packed_rows_padded_rows_and_recomputed_blocks_are_one_function(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = fresh(kind), experience(RAGGED)
    weight = torch.linspace(-1, 2, len(data))
    model.model.double()
    packed, slopes = model.score(data)["logp"], gradients(model, data, weight)
    model.model.checkpointing = True
    again = gradients(model, data, weight)
    model.model.checkpointing = False
    monkeypatch.setattr(Decoder, "packs", False)
    padded, expected = model.score(data)["logp"], gradients(model, data, weight)
    torch.testing.assert_close(packed, padded, rtol=1e-10, atol=1e-10)
    for name, slope in expected.items():
        torch.testing.assert_close(slopes[name], slope, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(again[name], slope, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_sampled_is_scored_with_the_same_probability(kind: str) -> None:
    model = fresh(kind).model
    requests = [Request((1, 2, 3), (7, 8, 9)), Request((4, 5, 6, 7, 8), (10,))]
    found = TextEngine(model).generate(requests, Sampling(max_tokens=9))
    torch.testing.assert_close(rescored(model, found), found.decisions["logp"], rtol=1e-5, atol=1e-5)


def test_a_config_with_experts_says_how_many() -> None:
    with pytest.raises(PanoplyError, match="needs `mixing`"):
        DecoderConfig(14, width=32, layers=3, heads=4, model_type="mixtral")
    with pytest.raises(PanoplyError, match="llama layout has no experts"):
        DecoderConfig(14, width=32, layers=3, heads=4, mixing=Mixing(4, 2, 8))
    with pytest.raises(PanoplyError, match="All layers of the mixtral layout have experts"):
        DecoderConfig(
            14, width=32, layers=3, heads=4, model_type="mixtral", mixing=Mixing(4, 2, 8), dense=(1,)
        )
    with pytest.raises(PanoplyError, match="no layer 3 among 3"):
        DecoderConfig(
            14, width=32, layers=3, heads=4, model_type="qwen3_moe", mixing=Mixing(4, 2, 8), dense=(3,)
        )


def test_a_folder_that_lacks_an_expert_says_which(tmp_path: Path) -> None:
    save_model(fresh("experts").model, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["model.layers.2.mlp.experts.4.up_proj.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors")
    with pytest.raises(PanoplyError, match=r"lack model.layers.2.mlp.experts.4.up_proj.weight"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss"])
def test_weights_named_as_in_the_memory_of_transformers_are_read_too(kind: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    many = {"num_experts": 4, "num_experts_per_tok": 2}
    config = transformers.AutoConfig.for_model(kind, **sizes, **heads, **many)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    before = load_model(tmp_path).state_dict()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    after = load_model(tmp_path).state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_adapters_go_on_attention_and_leave_experts_as_they_are() -> None:
    model, data = fresh("experts"), experience(RAGGED)
    before = model.score(data)["logp"]
    adapted = add_lora(model, 2)
    torch.testing.assert_close(adapted.score(data)["logp"], before, rtol=1e-5, atol=1e-5)
    adapted.score(data)["logp"].sum().backward()
    moving = {n for n, w in adapted.model.named_parameters() if w.grad is not None}
    assert "model.layers.0.self_attn.q_proj.lora_B" in moving
    assert "model.layers.1.mlp.gate_proj.lora_B" in moving  # a layer without experts
    assert all("lora_" in name for name in moving)
    for word in ("experts", "gate_up_proj", "router"):
        with pytest.raises(PanoplyError, match=r"named in lora\.target_parameters"):
            add_lora(fresh("experts"), 2, settings=Lora(target_modules=("q_proj", word)))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_with_experts_learns_is_saved_and_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    tokenizer = Chain(operations=2).tokenizer
    config = DecoderConfig(
        tokenizer.vocab_size, width=16, layers=3, heads=2, max_positions=128, **CONFIGS[kind]
    )
    TextPolicy.fresh(config, tokenizer).save(tmp_path / "model")
    settings = {"run.checkpoint_every": 1}
    given = {"model": str(tmp_path / "model"), "settings": settings}
    planned = cost(pp.plan("grpo", "chain", model=given["model"], lora=2))
    adapted = add_lora(TextPolicy.load(tmp_path / "model"), 2)
    assert planned.trainable == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    whole = train(tmp_path / "whole", steps=3, **given)
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    gaps = [json.loads(line)["step0_gap"] for line in lines if "step0_gap" in line]
    assert len(gaps) == 3
    assert max(gaps) < 1e-5  # a flipped route would show here: on one machine in float32 there is none
    last = max((tmp_path / "whole" / "checkpoints").glob("step-*"))
    shutil.rmtree(last)
    (tmp_path / "whole" / "result.json").unlink()
    assert resume(tmp_path / "whole").fingerprint == whole.fingerprint


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mixing", "tokens", "dtype"),
    [
        (MIXINGS[0], 1, torch.bfloat16),
        (MIXINGS[1], 3000, torch.bfloat16),
        (MIXINGS[2], 200, torch.bfloat16),
        (MIXINGS[2], 37, torch.float32),
        (MIXINGS[0], 300, torch.float16),
    ],
)
def test_kernels_are_the_host_s_functions(mixing: Mixing, tokens: int, dtype: torch.dtype) -> None:
    """Against float64 on the same rounded numbers; tolerances are a few roundings of the sums' own size."""
    from panoply.kernels import experts

    width, k = 72, mixing.chosen
    generator = torch.Generator().manual_seed(2)

    def numbers(*shape: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(*shape, generator=generator).to(dtype)
        return x.cuda(), x.double()

    x, up, bias = numbers(tokens, width), numbers(mixing.experts, 80, width), numbers(mixing.experts, 80)
    down = numbers(mixing.experts, width, 40)
    scale = torch.rand(k * tokens, generator=generator)
    logits = torch.randn(tokens, mixing.experts, generator=generator)
    chosen = logits.topk(k, dim=1).indices.t().contiguous()
    there, here = experts.plan(chosen.cuda(), mixing.experts), host_experts.plan(chosen, mixing.experts)
    few = experts.Table.of(tokens, k, mixing.experts, "cuda")
    shares, quick_plan = experts.choose(logits.cuda(), k, mixing.normalised, few)
    aim, slope = numbers(tokens, width), numbers(k * tokens, 40)
    a, m = mixing.alpha, mixing.limit

    def close(found: Tensor, exact: Tensor) -> None:
        size = float(exact.abs().max())
        torch.testing.assert_close(
            found.double().cpu(), exact, rtol=0, atol=size * (4 * torch.finfo(dtype).eps + 2e-6)
        )

    exact = host_experts.product(x[1], up[1], bias[1], here, k * tokens)
    both = experts.product(x[0], up[0], bias[0], there, k * tokens)
    close(both, exact)
    close(experts.product(x[0], up[0], bias[0], quick_plan, k * tokens, few=True), exact)
    scaled = scale.cuda(), scale.double()
    close(
        experts.product(x[0], up[0], bias[0], there, k * tokens, scaled[0]),
        host_experts.product(x[1], up[1], bias[1], here, k * tokens, scaled[1]),
    )
    close(
        experts.product(aim[0], down[0].transpose(1, 2), None, there, k * tokens),
        host_experts.product(aim[1], down[1].transpose(1, 2), None, here, k * tokens),
    )
    rounded = both.double().cpu()
    wide = experts.gated(both, scale.cuda(), a, m)
    close(wide, host_experts.gated(rounded, scale.double(), a, m))
    for one, other in zip(
        experts.gated_back(both, scale.cuda(), slope[0], a, m),
        host_experts.gated_back(rounded, scale.double(), slope[1], a, m),
        strict=True,
    ):
        close(one, other)
    close(
        experts.slope(aim[0], wide, there, down[0]),
        host_experts.slope(aim[1], wide.double().cpu(), here, down[1]),
    )
    top = logits.topk(k, dim=1).values
    want = top.softmax(1) if mixing.normalised else (top - logits.logsumexp(1, keepdim=True)).exp()
    torch.testing.assert_close(shares.cpu().view(k, -1), want.t(), rtol=1e-5, atol=1e-6)


def distances(found: Decoder, exact: Decoder) -> dict[str, float]:
    """How far each gradient is from the exact one, as a share of it."""
    gradients = zip(found.named_parameters(), exact.parameters(), strict=True)
    apart = {}
    for (name, one), other in gradients:
        assert one.grad is not None
        assert other.grad is not None
        apart[name] = float((one.grad.double().cpu() - other.grad).norm() / other.grad.norm())
    return apart


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CONFIGS)
def test_fused_blocks_and_graphs_are_as_near_float64_as_plain_ones(kind: str) -> None:
    """bf16 through packed rows, its slopes, and what a captured graph samples, against padded rows in float64.

    Rounding sends some tokens to other experts, which moves what a router learns by more than an ulp, and a sum of
    slopes that nearly cancel by a third. What fused blocks may be off by is therefore what plain ones are off by, which
    round as often.
    """
    config = DecoderConfig(200, width=256, layers=3, heads=4, kv_heads=2, head_dim=64, **CONFIGS[kind])
    half, plain, exact = (Decoder(config) for _ in range(3))
    half.initialise(0)
    half.to(torch.bfloat16)
    weights = {name: weight.float() for name, weight in half.state_dict().items()}
    for other in (plain, exact):
        other.load_state_dict(weights)
    plain.to(torch.bfloat16)
    exact.double()
    half.cuda().eval()
    tokens = torch.randint(0, 200, (4, 70), generator=torch.Generator().manual_seed(1))
    lengths, positions = torch.full((4,), 70), torch.arange(70).repeat(4)[None].cuda()
    packing = pack(lengths, torch.zeros_like(lengths), torch.arange(4)).to("cuda")
    assert half.fuses
    states, _ = half.hidden_states(tokens.view(1, -1).cuda(), positions, packing=packing)
    found, right = half.logits(states).log_softmax(-1).view(4, 70, -1), exact(tokens).log_softmax(-1)
    assert (found.cpu().double() - right).abs().mean() < 1.2e-2
    aim = torch.randn(4, 70, 200, generator=torch.Generator().manual_seed(2))
    (found * aim.cuda()).sum().backward()
    (plain(tokens).float().log_softmax(-1) * aim).sum().backward()
    (right * aim).sum().backward()
    fused, usual = distances(half, exact), distances(plain, exact)
    assert sum(fused.values()) < 1.2 * sum(usual.values())
    typical = sorted(usual.values())[len(usual) // 2]
    for name, apart in fused.items():
        assert apart < 2 * max(usual[name], typical), (
            f"{name}: {apart}, where plain blocks are off by {usual[name]}"
        )
    assert has_kernels(half)
    requests = [Request(tuple(row[:20].tolist()), (10, 11, 12)) for row in tokens]
    drawn = TextEngine(half).generate(requests, Sampling(max_tokens=20))
    assert (rescored(exact, drawn).cpu() - drawn.decisions["logp"].cpu()).abs().mean() < 1.2e-2
