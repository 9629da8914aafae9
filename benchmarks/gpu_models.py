"""Models of the GPU benchmark: config.json's of published layouts, with random weights made on the GPU.

Both sides of a comparison are built from the same entry. A layout that Panoply does not run itself goes through
transformers, as it would for a user.
"""

from __future__ import annotations

from typing import Any

import torch

from panoply.policies.architectures import ARCHITECTURES
from panoply.policies.decoder import Decoder, DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.policies.tokenizer import Tokenizer

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
COMMON: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


def _qwen2(width: int, layers: int, heads: int, kv_heads: int, inner: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": inner}
    return COMMON | sizes | {"num_attention_heads": heads, "num_key_value_heads": kv_heads} | more


SMALL = _qwen2(896, 24, 14, 2, 4864)
MODELS: dict[str, dict[str, Any]] = {
    "0.5B": SMALL,
    "1.5B": _qwen2(1536, 28, 12, 2, 8960),
    "3B": _qwen2(2048, 36, 16, 2, 11008),
    "7B": _qwen2(3584, 28, 28, 4, 18944, vocab_size=152064, tie_word_embeddings=False),
    "14B": _qwen2(5120, 48, 40, 8, 13824, vocab_size=152064, tie_word_embeddings=False),
    "gemma2-0.5B": SMALL | {
        "model_type": "gemma2", "head_dim": 64, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh", "rope_theta": 1e4,
    },
    "moe-0.5B": SMALL | {
        "model_type": "qwen3_moe", "head_dim": 64, "num_experts": 64, "num_experts_per_tok": 8,
        "moe_intermediate_size": 608, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "cohere-0.5B": SMALL | {"model_type": "cohere", "layer_norm_eps": 1e-5},
}  # fmt: skip
"""By name. The 64 experts of `moe-0.5B`, 8 at a time, are as wide together as the plain block: 0.5B weights act."""


def random_policy(name: str, dtype: torch.dtype) -> TextPolicy:
    """Normal weights with deviation 0.02, as transformers draws them, made on the GPU."""
    raw = MODELS[name]
    native = raw["model_type"] in ARCHITECTURES
    model: Any = _native(DecoderConfig.from_hf(raw), dtype) if native else _foreign(raw, dtype)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim == 1:  # Gemma's norms multiply by one more than their weight
                plain = key.endswith("norm.weight") and not raw["model_type"].startswith("gemma")
                weight.fill_(1.0 if plain else 0.0)
            else:
                weight.normal_(0, 0.02, generator=generator)
    return TextPolicy(model.eval(), Tokenizer.of_characters("ab"))


def _native(config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device="cuda").to(dtype)
    model.tie()
    return model


def _foreign(raw: dict[str, Any], dtype: torch.dtype) -> Any:
    from panoply.policies.foreign import Foreign

    return Foreign(transformers_model(raw, dtype))


def transformers_model(raw: dict[str, Any], dtype: torch.dtype) -> Any:
    """The same model as transformers has it; its weights are new."""
    from transformers import AutoConfig, AutoModelForCausalLM

    rest = {key: value for key, value in raw.items() if key != "model_type"}
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(raw["model_type"], **rest), dtype=dtype)
