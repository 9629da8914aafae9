"""Equality before speed: sampler against scorer, graphs against eager steps, packed against padded, transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from panoply.loops.learner import Learner
from panoply.policies.decoder import Decoder
from panoply.policies.text import TextPolicy
from panoply.rollout import graphs
from panoply.rollout.text import Collector


def check() -> dict[str, Any]:
    from benchmarks.gpu import Fixed, Shape, method
    from benchmarks.gpu_models import DTYPES, random_policy

    small = Shape(prompts=4, group=4, prompt=64, completion=64)
    found: dict[str, Any] = {}
    slopes: dict[str, dict[str, Tensor]] = {}
    frozen = None
    for name, dtype in DTYPES.items():
        policy, grpo = random_policy("0.5B", dtype), method(small)
        rows = grpo.sample(Collector(Fixed(small), policy, seed=0))
        rows = rows.with_columns(reward=grpo.reward(rows))
        rows = rows.with_columns(advantage=grpo.credit(rows))
        with torch.no_grad():
            scored = policy.score(rows)["logp"].cpu()
        found[f"gap_{name}"] = float((scored - rows["logp"]).abs().mean())
        found[f"ratios_off_{name}"] = float(((scored - rows["logp"]).exp() - 1).abs().gt(0.2).float().mean())
        frozen = frozen or rows
        slopes[name] = _gradient(policy, grpo, frozen)
        if name == "float32":
            found["graphs_draw_eager_tokens"] = _eager_tokens(small, policy, rows["action"])
            found["transformers_logits"] = _against_transformers(policy)
    for name in ("bfloat16", "float16"):
        found[f"gradient_{name}"] = _distance(slopes[name], slopes["float32"])
    assert found["gap_float32"] <= 1e-5, found
    assert found["gap_bfloat16"] <= 1.2e-2, found
    assert found["gap_float16"] <= 1.5e-3, found
    return found


def _gradient(policy: TextPolicy, grpo: Any, rows: Any) -> dict[str, Tensor]:
    return Learner(policy, grpo, total_steps=1, micro_tokens=16384).gradient(rows)


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """‖a − b‖ / ‖b‖ over all parameters. The two models' weights differ by rounding too."""
    apart = sum(float((a[n].double() - b[n].double()).square().sum()) for n in b)
    return float((apart / sum(float(b[n].double().square().sum()) for n in b)) ** 0.5)


def _eager_tokens(shape: Any, policy: TextPolicy, drawn: Tensor) -> float:
    """The share of tokens that eager decoding draws too."""
    from benchmarks.gpu import Fixed, method

    held = graphs.why_not
    graphs.why_not = lambda model: "equality is being checked"
    try:
        eager = method(shape).sample(Collector(Fixed(shape), policy, seed=0))
    finally:
        graphs.why_not = held
    return float((eager["action"] == drawn).float().mean())


def _against_transformers(policy: TextPolicy) -> float:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = policy.model
    assert isinstance(model, Decoder)
    raw = model.config.to_hf()
    with torch.device("cuda"):
        other = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(raw.pop("model_type"), **raw), dtype=model.dtype
        )
    other.load_state_dict(model.state_dict(), strict=True)
    tokens = torch.arange(200, device="cuda").view(2, 100)
    with torch.no_grad():
        ours, theirs = model(tokens), other(tokens).logits.float()
    return float((ours - theirs).abs().max() / theirs.abs().max())
