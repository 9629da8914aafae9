"""A name of the Hub in the place of a folder: downloaded once, planned only when it is here, never code or pickles."""

from __future__ import annotations

import fnmatch
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import own_model
import pytest
from tiny import Notes

import panoply as pp
from panoply.errors import PanoplyError
from panoply.policies import hub
from panoply.progress import Progress
from panoply.which import model_folder

NAME = "someone/small-model"


class Hub:
    """Stands in for huggingface_hub: one model, and what was asked for."""

    def __init__(self, folder: Path):
        self.folder, self.here = folder, False
        self.downloads: list[dict[str, Any]] = []

    def snapshot_download(
        self, name: str, local_files_only: bool = False, dry_run: bool = False, **asked: Any
    ) -> Any:
        if dry_run and name == NAME:
            return [SimpleNamespace(file_size=2_000_000_000, will_download=True)]
        if local_files_only:
            if not self.here:
                raise FileNotFoundError("not in the cache")
        elif name != NAME:
            raise OSError("404 Client Error.\nRepository Not Found")
        else:
            self.downloads.append(asked)
            self.here = True
        return str(self.folder)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.chdir(tmp_path)
    found = Hub(own_model.write(tmp_path / "snapshot"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", found)  # type: ignore[arg-type]
    return found


def test_what_looks_like_a_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert hub.is_id("Qwen/Qwen3-0.6B")
    assert hub.is_id("Qwen/Qwen3-0.6B@main")
    others = (
        "models/slip",
        "runs/2026-a",
        "start",
        "./a/b",
        "/a/b",
        "a/b/c",
        "../b",
        "a/..",
        "",
        None,
        Path("a/b"),
    )
    assert not any(hub.is_id(other) for other in others)


def test_it_is_downloaded_once_and_pinned_in_the_plan(stand_in: Hub, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(f'{{"prompt": "p{i}", "completion": "ab"}}' for i in range(20)))
    choices: dict[str, Any] = {"model": NAME, "data": str(data), "steps": 1, "threads": 1}
    choices["settings"] = {"data.batch": 2, "run.held_out": 1, "world.longest": 4}
    with pytest.raises(PanoplyError, match=f"There is no folder {NAME}.*panoply train.*hf download {NAME}"):
        pp.plan("sft", **choices)
    assert not stand_in.downloads
    notes = Notes()
    trained = pp.train("sft", run=tmp_path / "run", progress=notes, **choices)
    assert notes.said[0] == f"Downloading {NAME} from the Hugging Face Hub, 2.00 GB."
    assert pp.plan("sft", **choices).options.model == str(stand_in.folder)
    assert '"model": "' + str(stand_in.folder) in (trained.run / "run.json").read_text()
    pp.train("sft", run=tmp_path / "again", progress=Progress(), **choices)
    assert len(stand_in.downloads) == 1


def test_neither_code_nor_pickles_are_asked_for(stand_in: Hub) -> None:
    assert model_folder(f"{NAME}@v2") == stand_in.folder
    (asked,) = stand_in.downloads
    assert asked["revision"] == "v2"

    def taken(file: str) -> bool:
        allowed, ignored = asked["allow_patterns"], asked["ignore_patterns"]
        return any(fnmatch.fnmatch(file, p) for p in allowed) and not any(
            fnmatch.fnmatch(file, p) for p in ignored
        )

    assert all(
        map(
            taken, ("model-00001-of-00002.safetensors", "tokenizer.json", "chat_template.jinja", "merges.txt")
        )
    )
    assert not any(
        map(taken, ("modeling_x.py", "pytorch_model.bin", "model.pt", "onnx/model.safetensors", "a.pkl"))
    )


def test_a_name_that_is_not_there(stand_in: Hub) -> None:
    with pytest.raises(
        PanoplyError, match=r"no folder some/thing, and it could not be downloaded .*: 404 Client Error\.$"
    ):
        pp.load_policy("some/thing")


def test_without_the_library_it_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        PanoplyError, match=f"pip install huggingface_hub .* hf download {NAME} --local-dir DIR"
    ):
        pp.plan("grpo", model=NAME)
