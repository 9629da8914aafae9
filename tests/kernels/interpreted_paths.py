"""Whole models without a GPU, the way they go on one (`make test-kernels`): decoding in graphs, learning by kernels.

What is compared with is the CPU's own way, which shares neither kernels nor graphs with it.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import tiny
import torch
from kernels.pretended import decode_in_graphs, launch_plainly, learn_by_kernels
from torch import Tensor

import panoply as pp
from panoply.policies import low_rank
from panoply.policies.decoder import Decoder, DecoderConfig
from panoply.policies.expert_adapters import expert_tensors
from panoply.policies.experts import Mixing
from panoply.policies.foreign import Foreign
from panoply.policies.packing import pack
from panoply.policies.quantised import Kind
from panoply.policies.text import TextPolicy
from panoply.progress import Progress
from panoply.rollout import graphs
from panoply.rollout.engine import Request, Rollouts, Sampling, TextEngine, Turn, View
from panoply.rollout.plain_graphs import PlainGraphDecoder
from tests.layouts import LAYOUTS, SHAPE
from tests.policies.test_foreign import build
from tests.policies.test_text import TOKENIZER, experience, gradients
from tests.rollout.test_cuda_engine import move_factors
from tests.rollout.test_cuts import CUTS
from tests.rollout.test_engine import SETTINGS, make_model, make_requests, odd_only, same

MIXTURES: dict[str, dict[str, object]] = {
    "qwen3_moe": {"model_type": "qwen3_moe", "mixing": Mixing(6, 2, 20, normalised=False), "dense": (1,)},
    "mixtral": {"model_type": "mixtral", "mixing": Mixing(4, 2, 24)},
    "olmoe": {"model_type": "olmoe", "mixing": Mixing(5, 3, 24, normalised=False)},
    "gpt_oss": {
        "model_type": "gpt_oss", "mixing": Mixing(6, 3, 20, bias=True, alpha=1.7, limit=0.5), "windows": (4, 0),
    },
}  # fmt: skip
ALL = {**LAYOUTS, **MIXTURES}


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_plainly(monkeypatch)


def uneven(model: Decoder) -> Decoder:
    """Norms, biases and sinks that differ from number to number."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 or name.endswith("_bias"):
                weight += torch.randn(weight.shape) / 3
    return model


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> WeakSet[Any]:
    """Models that decode as on a GPU; all others do as on a CPU."""
    found: WeakSet[Any] = WeakSet()
    decode_in_graphs(monkeypatch, found.__contains__)
    return found


@pytest.fixture
def pair(there: WeakSet[Any]) -> Any:
    """The same model twice, one of them there."""

    def made(**changes: object) -> tuple[Decoder, Decoder]:
        models = [uneven(make_model(**{**SHAPE, **changes})) for _ in range(2)]
        there.add(models[1])
        return models[0], models[1]

    return made


def agree(here: Rollouts, there: Rollouts, off: float = 2e-5) -> None:
    assert same(here, there)
    for column in {"logp", "entropy", "cut", "kept"} & set(here.decisions):
        torch.testing.assert_close(here.decisions[column], there.decisions[column], atol=off, rtol=off)
    if "allowed" in here.decisions:
        assert here.decisions.ragged("allowed").tolist() == there.decisions.ragged("allowed").tolist()


def both(models: tuple[Any, Any], *given: Any, off: float = 2e-5, **more: Any) -> tuple[Rollouts, Rollouts]:
    engines = TextEngine(models[0]), TextEngine(models[1], patience=4)
    here, there = (engine.generate(*given, entropy=True, **more) for engine in engines)
    agree(here, there, off)
    return here, there


@pytest.mark.parametrize("name", ALL)
def test_every_layout_decodes_in_graphs(name: str, pair: Any) -> None:
    both(pair(**ALL[name]), make_requests(3, 2), Sampling(max_tokens=8))


@pytest.mark.parametrize("name", ["llama", "gemma2", "glm", "gpt_oss"])
def test_modules_decode_between_kernels_of_attention(
    name: str, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where PEFT has replaced some."""
    monkeypatch.setattr(graphs, "has_kernels", lambda model: False)
    models = pair(**ALL[name])
    both(models, make_requests(3, 2), Sampling(max_tokens=8))
    assert isinstance(graphs._made[models[1]], PlainGraphDecoder)


@pytest.mark.parametrize("name", ["cohere", "gpt_neox", "gemma3_text"])
def test_models_of_transformers_decode_between_kernels_of_attention(name: str, there: WeakSet[Any]) -> None:
    inner = build(name)
    models = Foreign(inner), Foreign(copy.deepcopy(inner))
    there.add(models[1])
    requests = [Request([3, 5 + i, 7], [10 * i, 10 * i + 1]) for i in range(2)]
    both(models, requests, Sampling(max_tokens=12))
    assert models[1].glances


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("masked", [False, True])
def test_settings_of_sampling_act_in_graphs(name: str, masked: bool, pair: Any) -> None:
    models = pair(width=32, heads=2, kv_heads=1, layers=1)
    both(models, make_requests(2, 2), SETTINGS[name], mask=odd_only if masked else None)


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("masked", [False, True])
def test_cuts_of_a_large_vocabulary_are_found_and_recorded(name: str, masked: bool, pair: Any) -> None:
    """Of three pieces of the vocabulary a mask leaves nothing of one, little of another and much of the last.

    A token may lie so near a threshold that rounding decides whether it is kept.
    """

    def some(view: View) -> Tensor:
        ids = torch.arange(9001)
        left = (ids % 700 == 5) | (ids > 8300)
        return left & (ids >= 4096) | (left & (view.length % 2 == 0)[:, None] & (ids < 100))

    models = pair(width=32, heads=2, kv_heads=1, layers=1, vocab_size=9001)
    both(models, make_requests(2, 2), CUTS[name], mask=some if masked else None, off=5e-3)


@pytest.mark.parametrize("base", [None, "nf4", "int8"])
def test_graphs_follow_low_rank_factors(base: Kind | None, pair: Any) -> None:
    models = pair(width=64, heads=2, kv_heads=1, inner=128)
    for model in models:
        layers = [name for name in low_rank.linear_layers(model) if "layers" in name]
        low_rank.adapt(model, dict.fromkeys(layers, 4), dict.fromkeys(layers, 2.0), base)
    before, _ = both(models, make_requests(2, 2), Sampling(max_tokens=6))
    move_factors(models)
    after, _ = both(models, make_requests(2, 2), Sampling(max_tokens=6))
    assert not same(before, after)


def test_turns_append_and_rows_come_and_go(pair: Any) -> None:
    def reply(turn: Turn) -> list[int] | None:
        return [5] * (7 + turn.turn) if turn.turn < 3 else None

    models = pair(width=32, heads=2, kv_heads=1, layers=1)
    found = [
        TextEngine(model, slots=3, patience=patience, prefill_tokens=9).generate(
            make_requests(3, 2),
            Sampling(max_tokens=6, stop_tokens=(3, 11)),
            lambda ts: [reply(t) for t in ts],
        )
        for model, patience in zip(models, (1, 4), strict=True)
    ]
    agree(*found)


@pytest.mark.parametrize("name", [*ALL, "apart"])
def test_every_layout_learns_by_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read once for their answers, and once for each of them where they are apart."""
    config = DecoderConfig(14, **{**SHAPE, **ALL.get(name, {})})  # type: ignore[arg-type]
    policy, data = TextPolicy.fresh(config, TOKENIZER), experience([(7, [5, 1]), (4, [7]), (11, [2, 8])])
    uneven(policy.model)  # type: ignore[arg-type]
    weight = torch.linspace(-1, 2, len(data))
    policy.shared = name != "apart"
    monkeypatch.setattr(Decoder, "fusing", False)
    slopes, scores = gradients(policy, data, weight), policy.score(data)["logp"].detach()
    monkeypatch.setattr(Decoder, "fusing", True)
    learn_by_kernels(monkeypatch)
    for parameter, slope in gradients(policy, data, weight).items():
        apart = (slope - slopes[parameter]).abs().max() / slopes[parameter].abs().max()
        assert apart < 2e-5, f"{parameter}: {apart}"
    with torch.no_grad():
        torch.testing.assert_close(policy.score(data)["logp"], scores, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "qwen3_moe", "gpt_oss"])
def test_low_rank_factors_learn_by_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of layers that share their input, and of experts."""
    config = DecoderConfig(14, **{**SHAPE, **ALL[name]})  # type: ignore[arg-type]
    policy, data = TextPolicy.fresh(config, TOKENIZER), experience([(7, [5, 1]), (4, [7])])
    model = uneven(policy.model)  # type: ignore[arg-type]
    layers = [n for n in (*low_rank.linear_layers(model), *expert_tensors(model)) if "layers" in n]
    low_rank.adapt(model, dict.fromkeys(layers, 3), dict.fromkeys(layers, 2.0))
    factors = [factor for _, layer in low_rank.adapters(model) for factor in (layer.lora_A, layer.lora_B)]
    with torch.no_grad():
        for factor in factors:
            factor.normal_(std=0.2)
    low_rank.merge(model)
    weight = torch.linspace(-1, 2, len(data))

    def slopes() -> tuple[Tensor, ...]:
        return torch.autograd.grad((policy.score(data)["logp"] * weight).sum(), factors)

    monkeypatch.setattr(Decoder, "fusing", False)
    wanted = slopes()
    monkeypatch.setattr(Decoder, "fusing", True)
    learn_by_kernels(monkeypatch)
    for found, true in zip(slopes(), wanted, strict=True):
        assert (found - true).abs().max() < 2e-5 * true.abs().max()


@pytest.mark.parametrize("name", ["cohere", "gpt_neox", "gemma3_text"])
def test_models_of_transformers_learn_packed_by_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of ten tokens and one of four, after a prompt of six."""
    model = Foreign(build(name))
    text = torch.randint(3, 41, (1, 20), generator=torch.Generator().manual_seed(1))
    packing = pack(torch.tensor([6, 10, 4]), torch.tensor([0, 1, 2]), torch.tensor([0, 0, 0]))
    positions = torch.tensor([[*range(16), *range(6, 10)]])
    weights = [weight.requires_grad_() for weight in model.parameters()]

    def found() -> tuple[Tensor, tuple[Tensor, ...]]:
        state, _ = model.hidden_states(text, positions, packing=packing)
        aim = torch.linspace(-1, 2, state.numel()).view_as(state)
        slopes = torch.autograd.grad((state * aim).sum(), weights, allow_unused=True)
        return state.detach(), tuple(slope for slope in slopes if slope is not None)

    state, slopes = found()
    learn_by_kernels(monkeypatch)
    again, by_kernels = found()
    assert (again - state).abs().max() < 2e-5 * state.abs().max()
    for quick, true in zip(by_kernels, slopes, strict=True):
        assert (quick - true).abs().max() < 2e-5 * true.abs().max()


@pytest.mark.parametrize("adapters", [{}, {"lora": 2}])
def test_a_step_of_a_run_is_the_step_of_a_cpu(
    adapters: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first token to the weights, with answers cut by top-p."""
    settings = {
        "sample.prompts": 4,
        "sample.group": 4,
        "sample.top_p": 0.9,
        "run.held_out": 1,
        "update.lr": 1e-3,
    }
    plan = pp.plan("grpo", steps=1, **adapters, device="cpu", threads=1, settings=settings)
    runs = [pp.train(plan, run=tmp_path / "here", progress=Progress()).run]
    decode_in_graphs(monkeypatch, lambda model: isinstance(model, Decoder))
    learn_by_kernels(monkeypatch)
    runs.append(pp.train(plan, run=tmp_path / "there", progress=Progress()).run)
    here, there = (json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]) for run in runs)
    assert here["gradient_norm"] > 0
    for name in ("gradient_norm", "entropy", "success", "ratio_max"):
        assert there[name] == pytest.approx(here[name], rel=1e-4)
    start = pp.load_policy(tiny.ROOT / "panoply/assets/chain-start").model.state_dict()
    weights = [pp.load_policy(run, which="last").model.state_dict() for run in runs]
    for name, began in start.items():
        one, other = (each[name] - began for each in weights)
        assert (one - other).norm() <= 1e-3 * one.norm() + 1e-6, name
