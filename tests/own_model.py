"""A model folder as a user has one: random weights and a byte tokenizer, written by transformers and tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CHAT = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tokenizer(template: str | None = CHAT) -> Any:
    """One for bytes."""
    transformers = pytest.importorskip("transformers")
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(word, special=True) for word in ("<|start|>", "<|end|>")])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    if template is not None:
        made.chat_template = template
    return made


def write(folder: Path, *, template: str | None = CHAT, seed: int = 0) -> Path:
    """A Llama of about 40,000 parameters with a context of 1024 bytes."""
    transformers = pytest.importorskip("transformers")
    import torch

    words = tokenizer(template)
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=words.eos_token_id,
        bos_token_id=None,
        initializer_range=0.1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
