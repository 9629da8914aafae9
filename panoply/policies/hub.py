"""A model of the Hugging Face Hub as a folder: `--model Qwen/Qwen3-0.6B`, downloaded once by huggingface_hub.

Only safetensors, JSON and the tokenizer's files are fetched: nothing that is code, or a pickle. A plan names the folder
of the very snapshot, so that a run resumes with the weights it began with, whatever the Hub has by then.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from panoply.errors import PanoplyError, plain

FILES = ["*.safetensors", "*.json", "*.jinja", "merges.txt", "tokenizer.model"]
OTHERS = ["*/*"]
"""Files of subfolders: other formats of the same weights."""
CHOICES = ("model", "reference", "reward_model")
"""The choices of a plan that name models."""


def is_id(source: object) -> bool:
    """Whether this looks like NAME/MODEL of the Hub, or NAME/MODEL@REVISION: in a folder NAME here, it is a slip."""
    if not isinstance(source, str) or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?", source, re.ASCII):
        return False
    return not os.path.lexists(source.partition("/")[0]) and not source.startswith("runs/")


def known(choices: Mapping[str, Any]) -> dict[str, Any]:
    """A plan's choices with models of the Hub as folders, of those that have been downloaded."""
    return _replaced(choices, lambda source: _folder(source, download=False))


def fetched(choices: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """The same, and what is not here yet is downloaded."""
    return _replaced(choices, lambda source: _folder(source, download=True, say=say))


def fetch(source: str) -> Path:
    """The folder of one model of the Hub, downloaded if it is not here yet."""
    return _folder(source, download=True)


def address(folder: Path) -> dict[str, str]:
    """How an adapter names the model in a folder: as NAME/MODEL and its revision, where the Hub's cache holds it."""
    whole = folder.resolve()
    kept = re.fullmatch(r"models--([^/]+?)--([^/]+)", whole.parent.parent.name)
    if whole.parent.name != "snapshots" or kept is None:
        return {"base_model_name_or_path": str(whole)}
    return {"base_model_name_or_path": f"{kept[1]}/{kept[2]}", "revision": whole.name}


def _replaced(choices: Mapping[str, Any], folder: Callable[[str], Path]) -> dict[str, Any]:
    named = {name: choices[name] for name in CHOICES if is_id(choices.get(name))}
    return {**choices, **{name: str(folder(source)) for name, source in named.items()}}


def _folder(source: str, download: bool, say: Callable[[str], None] | None = None) -> Path:
    name, _, revision = source.partition("@")
    by_hand = f"hf download {source.replace('@', ' --revision ')} --local-dir DIR, then --model DIR"
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise PanoplyError(
            f"There is no folder {source}. If it is a model of the Hugging Face Hub, pip install huggingface_hub and "
            f"name it again, or download it: {by_hand}."
        ) from None
    asked: dict[str, Any] = {"allow_patterns": FILES, "ignore_patterns": OTHERS, "revision": revision or None}
    try:
        found = Path(snapshot_download(name, local_files_only=True, **asked))
        if (found / "config.json").is_file() and any(found.glob("*.safetensors")):
            return found
    except Exception:
        pass  # not here yet
    if not download:
        raise PanoplyError(
            f"There is no folder {source}. A model of that name on the Hugging Face Hub would be downloaded by panoply "
            f"train, which can then be planned; or by hand: {by_hand}."
        )
    try:
        files = snapshot_download(name, dry_run=True, **asked)
        size = sum(file.file_size or 0 for file in files if file.will_download)
        (say or _to_stderr)(f"Downloading {name} from the Hugging Face Hub, {size / 1e9:.2f} GB.")
        return Path(snapshot_download(name, **asked))
    except Exception as error:
        lines = str(error).strip().splitlines()
        why = plain(lines[0]).rstrip(".") if lines else type(error).__name__
        raise PanoplyError(
            f"There is no folder {source}, and it could not be downloaded from the Hugging Face Hub: {why}."
        ) from error


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
