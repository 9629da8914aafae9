"""Every registered method on a GPU: it runs, resumes, and its first step is the host's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from test_conformance import METHODS, metrics, small

import panoply as pp
from panoply.policies.build import open_folder
from panoply.progress import Progress
from panoply.run import Run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


@pytest.mark.parametrize("name", METHODS)
def test_method(name: str, tmp_path: Path) -> None:
    there = pp.train(small(name, "cuda"), run=tmp_path / "there", progress=Progress())
    here = pp.train(small(name, "cpu"), run=tmp_path / "here", progress=Progress())
    first, second = metrics(there.run)
    expected = metrics(here.run)[0]
    assert first["loss"] == pytest.approx(expected["loss"], rel=1e-3, abs=1e-3)
    assert torch.tensor(second["loss"]).isfinite()
    moved = [open_folder(c / "model").fingerprint() for c in sorted((there.run / "checkpoints").iterdir())]
    still = [open_folder(c / "model").fingerprint() for c in sorted((here.run / "checkpoints").iterdir())]
    assert len(set(moved)) == len(set(still)), "a step did not move the weights"

    shutil.rmtree(there.run / "checkpoints" / "step-0000002")
    (there.run / "result.json").unlink()
    resumed = pp.train(resume=there.run, progress=Progress())
    assert Run.open(resumed.run).status() == "finished"
    again = metrics(resumed.run)[1]
    assert again["loss"] == pytest.approx(second["loss"], rel=1e-3, abs=1e-3)
