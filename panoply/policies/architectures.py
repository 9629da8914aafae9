"""What the layouts of published decoders differ in: one row for each `model_type` of Hugging Face, and no subclasses.

A row says what a layout fixes; what it leaves to `config.json` is a field of `DecoderConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Pattern = Callable[[Mapping[str, Any], int], list[bool]]
"""From a `config.json` without `layer_types` and the number of layers: which of them have the window."""


@dataclass(frozen=True)
class Norms:
    """The names of a block's norms by where they stand; empty: there is none.

    x + after_attention(attention(before_attention(x))), and the same with the feed-forward layer.
    """

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


@dataclass(frozen=True)
class Sparse:
    """How a layout's mixtures of experts are described in `config.json` and named on disk."""

    inner: str = "intermediate_size"
    """The setting that is an expert's width."""
    normalised: bool | None = None
    """Whether the weights of a token's experts sum to 1; None: as `norm_topk_prob` says."""
    clamped: bool = False
    """Experts and router have biases, and the activation is clamped: `swiglu_alpha`, `swiglu_limit`."""
    router: str = "mlp.gate"
    """Of a layer, where the router is."""
    experts: str = "mlp.experts"
    each: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """What an expert's matrices are called; none: all experts are in one tensor, [experts, inputs, outputs], in which
    gates and what they multiply alternate."""


@dataclass(frozen=True)
class Architecture:
    """A layout. The defaults are Llama's."""

    name: str
    """Of transformers' class, and what `architectures` of `config.json` says."""
    judge: str = ""
    """The same of its sequence classifier, where that is not called alike."""
    norms: Norms = field(default_factory=Norms)
    norm_offset: float = 0.0
    """Norms multiply by their weight plus this; all of them do so in float32 and round once."""
    qk_norm: str = ""
    """Queries and keys are normed before they are rotated: each `head`, or the `whole` projection at once."""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """The layers whose outputs, side by side, are queries, keys and values."""
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """The same for the gated feed-forward layer."""
    sparse: Sparse | None = None
    """Where feed-forward layers are mixtures of experts."""
    sinks: bool = False
    """A head may attend to nothing: softmax has one more score, which the head learns."""
    activation: str = "silu"
    """Where the config names none; under `activation_key` it does."""
    activation_key: str = "hidden_act"
    old_gelu: bool = False
    """Whether 'gelu' is an old name of its approximation."""
    qkv_bias: bool | None = None
    """None: as `attention_bias` says."""
    out_bias: bool | None = None
    mlp_bias: bool | None = False
    """None: as `mlp_bias` says."""
    root_embedding: bool = False
    """Embeddings are multiplied by √width, rounded to the weights' dtype."""
    interleaved: bool = False
    """Rotary positions turn dimension 2i with 2i + 1; else i with i + half of what is turned."""
    turns_partly: bool = False
    """Whether `partial_rotary_factor` is read, which says how much of a head is turned."""
    rotary_share: float = 1.0
    """How much that is where it says nothing."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """How positions are scaled where the config says nothing."""
    terse_scaling: bool = False
    """Before transformers 5 `rope_scaling` could say longrope's factors and nothing else, or it was refused."""
    unrotated: bool = False
    """Whether some layers have no positions (`no_rope_layers`)."""
    windows: str = ""
    """`all` layers have the window that the config names, or those (`layers`) that `layer_types` or `pattern` says."""
    pattern: Pattern = lambda _, layers: [False] * layers
    window_switch: bool = False
    """There are windows only where `use_sliding_window` is true."""
    local_theta: float = 0.0
    """Above 0: layers with a window turn by a base of their own, this where the config names none."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Further numbers of `config.json`, and the field of `DecoderConfig` that each is."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What is meant where `config.json` is silent."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The same of sizes, which only the `text_config` of a model leaves out that reads pictures, too."""

    @property
    def classifier(self) -> str:
        """Of transformers' class for reward models of this layout."""
        return self.judge or self.name.replace("ForCausalLM", "ForSequenceClassification")

    @property
    def plain(self) -> bool:
        """Whether a block differs from Llama's by biases, windows and norms of queries and keys at most."""
        here = (self.norms, self.norm_offset, self.root_embedding, self.interleaved, self.unrotated)
        usual = (Norms(), 0.0, False, False, False)
        joined = len(self.qkv) == 1 or len(self.gate_up) == 1
        return (
            here == usual and self.qk_norm in ("", "head") and not (joined or self.local_theta or self.fields)
        )


def every(number: int, key: str = "") -> Pattern:
    """All layers but each `number`-th have the window; `key` may give another number."""

    def pattern(raw: Mapping[str, Any], layers: int) -> list[bool]:
        each = int(raw.get(key) or number)
        return [(i + 1) % each != 0 for i in range(layers)]

    return pattern


def _later(raw: Mapping[str, Any], layers: int) -> list[bool]:
    """Qwen's: the layers from `max_window_layers` on have the window."""
    first = raw.get("max_window_layers", 28)
    return [i >= (28 if first is None else first) for i in range(layers)]


def without_positions(raw: Mapping[str, Any], layers: int) -> list[bool]:
    """SmolLM3's layers that do not turn queries and keys, each fourth if nothing is said; they have the window, too."""
    listed = raw.get("no_rope_layers")
    if listed is None:
        each = int(raw.get("no_rope_layer_interval") or 4)
        return [(i + 1) % each == 0 for i in range(layers)]
    return [not turned for turned in listed]


_LLAMA = Architecture("LlamaForCausalLM", mlp_bias=None)
_QWEN2 = Architecture(
    "Qwen2ForCausalLM",
    qkv_bias=True,
    out_bias=False,
    windows="layers",
    pattern=_later,
    window_switch=True,
    defaults={"sliding_window": 4096, "max_position_embeddings": 32768},
)
_AROUND = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_GEMMA = Architecture(
    "GemmaForCausalLM",
    norm_offset=1.0,
    activation="gelu_pytorch_tanh",
    old_gelu=True,
    root_embedding=True,
    defaults={"tie_word_embeddings": True, "head_dim": 256, "max_position_embeddings": 8192},
)
_GEMMA2 = replace(
    _GEMMA,
    name="Gemma2ForCausalLM",
    norms=_AROUND,
    activation_key="hidden_activation",
    old_gelu=False,
    windows="layers",
    pattern=every(2),
    fields={
        "query_pre_attn_scalar": "query_scalar",
        "attn_logit_softcapping": "attention_cap",
        "final_logit_softcapping": "logit_cap",
    },
    defaults={
        **_GEMMA.defaults,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
_GLM = Architecture(
    "GlmForCausalLM",
    gate_up=("gate_up_proj",),
    out_bias=False,
    interleaved=True,
    turns_partly=True,
    rotary_share=0.5,
    defaults={
        "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True,
        "max_position_embeddings": 131072,
    },
)  # fmt: skip
_OLMO2 = Architecture(
    "Olmo2ForCausalLM",
    norms=Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    qk_norm="whole",
    defaults={"rms_norm_eps": 1e-5},
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": Architecture(
        "MistralForCausalLM",
        qkv_bias=False,
        out_bias=False,
        windows="all",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    ),
    "qwen2": _QWEN2,
    "qwen3": replace(
        _QWEN2,
        name="Qwen3ForCausalLM",
        qk_norm="head",
        qkv_bias=None,
        out_bias=None,
        defaults={**_QWEN2.defaults, "head_dim": 128},
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        name="Gemma3ForCausalLM",
        judge="Gemma3TextForSequenceClassification",
        qk_norm="head",
        pattern=every(6, "sliding_window_pattern"),
        local_theta=10_000.0,
        fields={"query_pre_attn_scalar": "query_scalar", "final_logit_softcapping": "logit_cap"},
        defaults={
            **_GEMMA.defaults,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1_000_000.0,
            "max_position_embeddings": 131072,
        },
        sizes={"vocab_size": 262_208, "num_attention_heads": 8},
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        qkv=("qkv_proj",),
        gate_up=("gate_up_proj",),
        qkv_bias=False,
        out_bias=False,
        turns_partly=True,
        terse_scaling=True,
        windows="all",
        defaults={
            "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
        },
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        name="Olmo3ForCausalLM",
        windows="layers",
        pattern=every(4),
        local_theta=500_000.0,
        defaults={**_OLMO2.defaults, "sliding_window": 4096, "rope_theta": 500_000.0},
    ),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM",
        mlp_bias=None,
        unrotated=True,
        windows="layers",
        pattern=without_positions,
        window_switch=True,
        defaults={
            "num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
        },
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        mlp_bias=None,
        fields={
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "attention_multiplier": "attention_scale",
            "logits_scaling": "logit_divisor",
        },
        defaults={
            "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "glm": _GLM,
    "glm4": replace(
        _GLM,
        name="Glm4ForCausalLM",
        norms=Norms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        qk_norm="head",
        sparse=Sparse(inner="moe_intermediate_size"),
        windows="all",
        window_switch=True,
        defaults={
            "num_key_value_heads": 4, "sliding_window": 4096, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "max_position_embeddings": 32768,
        },
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        qkv_bias=False,
        out_bias=False,
        sparse=Sparse(
            normalised=True,
            router="block_sparse_moe.gate",
            experts="block_sparse_moe.experts",
            each=("w1", "w3", "w2"),
        ),
        windows="all",
        defaults={
            "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0, "max_position_embeddings": 131072,
        },
    ),
    "olmoe": Architecture(
        "OlmoeForCausalLM",
        qk_norm="whole",
        sparse=Sparse(),
        defaults={
            "num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
        },
    ),
    "gpt_oss": Architecture(
        "GptOssForCausalLM",
        sparse=Sparse(normalised=True, clamped=True, router="mlp.router", each=()),
        sinks=True,
        windows="layers",
        pattern=every(2),
        rope={
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        defaults={
            "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4,
            "sliding_window": 128, "attention_bias": True, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0,
            "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "max_position_embeddings": 131072,
        },
    ),
}  # fmt: skip
