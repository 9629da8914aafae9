"""Low-rank adapters: they alone learn, a killed run goes on with them, the saved model stands alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import panoply as pp
from panoply.errors import PanoplyError
from panoply.progress import Progress
from panoply.run import Run

SETTINGS: dict[str, Any] = {
    "world.operations": 2,
    "data.batch": 8,
    "run.held_out": 8,
    "run.checkpoint_every": 1,
}


def train(folder: Path, method: str = "sft", **more: Any) -> pp.Trained:
    choices: dict[str, Any] = {
        "steps": 3,
        "lora": 2,
        "model": "fresh",
        "threads": 1,
        "settings": {**SETTINGS, **more},
    }
    return pp.train(method, "chain", run=folder, progress=Progress(), **choices)


def test_only_adapters_move_and_the_export_is_merged(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    result = train(tmp_path / "run")
    first, *_, last = sorted((result.run / "checkpoints").glob("step-*"))
    before, after = pp.load_policy(first / "model"), pp.load_policy(last / "model")
    moved = {
        name
        for (name, a), (_, b) in zip(before.named_parameters(), after.named_parameters(), strict=True)
        if not torch.equal(a, b)
    }
    assert moved
    assert all("_proj" in name for name in moved)
    assert (last / "adapter" / "adapter_model.safetensors").is_file()
    assert json.loads((last / "adapter" / "adapter_config.json").read_text())["r"] == 2


def test_a_run_with_adapters_resumes_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    whole = train(tmp_path / "whole", **{"run.keep": 9})
    cut = tmp_path / "cut"
    shutil.copytree(whole.run, cut)
    (cut / "result.json").unlink()
    for folder in (cut / "checkpoints").glob("step-*"):
        if int(folder.name[5:]) > 1:
            shutil.rmtree(folder)
    assert pp.train(resume=cut, progress=Progress()).fingerprint == whole.fingerprint
    assert Run.open(cut).status() == "finished"


def test_a_negative_rank_is_refused() -> None:
    with pytest.raises(PanoplyError, match=r"run\.lora must be at least 0"):
        pp.plan("grpo", lora=-1)
