"""Models that read pictures or sound, too: their language model alone, where it is a layout that runs natively."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from panoply.errors import PanoplyError, plain
from panoply.policies.architectures import ARCHITECTURES

PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "vision_config", "audio_config")
"""Where a `config.json` describes the parts that such a model has."""
WHOLES = ("gemma3", "mistral3", "llava")
"""Whose language model reads text as if it stood alone: from the left, and by the same positions."""
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "transformers_version")
"""What the whole says of its language model, where that does not say it itself."""
LANGUAGE = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""How weights of the language model begin on disk, and how they would begin if it stood alone."""
OTHERS = ("vision_tower.", "multi_modal_projector.")
"""How weights of other parts begin."""


def reads_more(raw: Mapping[str, Any]) -> bool:
    """Whether a config is of a model that reads more than text, and writes: transformers runs those that judge."""
    named = str((raw.get("architectures") or [""])[0])
    judges = named.endswith("ForSequenceClassification")
    return not judges and any(isinstance(raw.get(part), Mapping) for part in PARTS)


def language_config(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The config of the language model in such a model, as if it stood alone; others are refused in a sentence."""
    text = raw.get("text_config")
    kind = str(text.get("model_type")) if isinstance(text, Mapping) else ""
    if raw["model_type"] not in WHOLES or kind not in ARCHITECTURES or not isinstance(text, Mapping):
        inside = f" ({plain(kind)})" if kind else ""
        raise PanoplyError(
            f"{plain(folder)} is a {plain(raw['model_type'])}, which reads more than text: of such models only the "
            f"language model{inside} could be trained, and that is taken out of {', '.join(WHOLES)} alone, where it "
            "is a layout that runs natively. Give a folder of a language model."
        )
    beside = {name: raw[name] for name in (*KEPT, "quantization_config") if name in raw}
    said = {name: value for name, value in text.items() if value is not None}
    return {**ARCHITECTURES[kind].sizes, **beside, **said}


def language_name(name: str) -> str | None:
    """A weight of the whole as its language model calls it; None of other parts."""
    for begins, alone in LANGUAGE.items():
        if name.startswith(begins):
            return alone + name.removeprefix(begins)
    return None if name.removeprefix("model.").startswith(OTHERS) else name
