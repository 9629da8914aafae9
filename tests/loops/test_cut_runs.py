"""Runs that sample with cuts and a penalty: they score what they drew, plan for it, and resume to the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny import metrics, resume, train

import panoply as pp
from panoply.errors import PanoplyError
from panoply.rollout import cuts
from panoply.run import Run

SETTINGS = {
    "sample.top_p": 0.9,
    "sample.top_k": 9,
    "sample.min_p": 0.02,
    "sample.repetition_penalty": 1.3,
    "sample.temperature": 0.8,
    "update.epochs": 2,
}


@pytest.mark.parametrize("listed", [64, 3], ids=["ids", "thresholds"])
def test_a_stopped_run_with_cuts_goes_on_to_the_same_weights(
    tmp_path: Path, listed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("panoply.rollout.sampling.LISTED", listed)
    whole = train(
        tmp_path / "whole", settings={**SETTINGS, "run.checkpoint_every": 2, "run.episodes_every": 1}
    )
    shutil.copytree(whole.run, tmp_path / "half")
    (tmp_path / "half/result.json").unlink()
    shutil.rmtree(max((tmp_path / "half/checkpoints").glob("step-*")))
    again = resume(tmp_path / "half")
    assert again.fingerprint == whole.fingerprint
    assert metrics(again.run) == metrics(whole.run)
    rows = Run.open(again.run)
    assert max(row["step0_gap"] for row in rows.metrics()) < 1e-5
    assert any(min(episode["kept"]) < 1 for episode in rows.episodes())


def test_more_ids_than_fit_are_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "most_listed", lambda: 64 * 8 * 100)
    pp.plan("grpo")
    with pytest.raises(PanoplyError, match=r"records up to 64 ids for each.*Lower sample\.prompts"):
        pp.plan("grpo", settings={"sample.top_p": 0.95})
