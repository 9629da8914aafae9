"""The tokenizer of a model's folder: its own, or that of the model under an adapter to which PEFT has given none."""

from __future__ import annotations

from pathlib import Path

from panoply.files import is_file
from panoply.policies.adapter_config import model_under
from panoply.policies.tokenizer import Tokenizer


def words_of(folder: str | Path) -> Path:
    """Where a model's tokenizer lies."""
    folder = Path(folder)
    return folder if is_file(folder / "tokenizer.json") else model_under(folder)


def tokenizer_of(folder: str | Path) -> Tokenizer:
    return Tokenizer.load(words_of(folder))
