"""Small models of every layout that runs natively, as `DecoderConfig` takes them."""

from __future__ import annotations

SHAPE: dict[str, object] = {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "max_positions": 256}
LAYOUTS: dict[str, dict[str, object]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "windows": (5, 5)},
    "qwen2": {"model_type": "qwen2", "tied": True},
    "qwen3": {"model_type": "qwen3", "windows": (4, 0), "head_dim": 32},
    "gemma": {"model_type": "gemma", "tied": True, "head_dim": 32},
    "gemma2": {
        "model_type": "gemma2", "head_dim": 64, "windows": (5, 0), "attention_cap": 2.0, "logit_cap": 3.0,
        "query_scalar": 20, "tied": True,
    },
    "gemma3": {"model_type": "gemma3_text", "head_dim": 32, "windows": (5, 0), "local_theta": 30.0, "query_scalar": 20},
    "phi3": {"model_type": "phi3", "head_dim": 24, "rotary_dim": 18},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", "windows": (5, 0), "local_theta": 30.0},
    "smollm3": {"model_type": "smollm3", "unrotated": (1,), "windows": (0, 5), "tied": True},
    "granite": {
        "model_type": "granite", "embedding_scale": 3.0, "residual_scale": 0.4, "attention_scale": 0.3,
        "logit_divisor": 5.0,
    },
    "glm": {"model_type": "glm", "head_dim": 32},
    "glm4": {"model_type": "glm4", "head_dim": 32, "attention_bias": True},
}  # fmt: skip
