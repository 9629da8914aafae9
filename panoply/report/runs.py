"""The runs of a folder, with what they reached."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from panoply import checkpoint
from panoply.files import BadFile
from panoply.report.run_index import RunIndex, score
from panoply.report.shown import Shown
from panoply.report.text import runs_table


class Runs(Shown, list[dict[str, Any]]):
    """Facts of runs: `run` (the folder), `method`, `status`, `step`, `before`, `after`; of a bad one its `problem`."""

    def _page(self) -> str:
        return runs_table(self)


def runs(folder: str | Path = "runs") -> Runs:
    """Every run below a folder, the stages of recipes among them, newest first."""
    return Runs(_told(Path(folder, f["id"]), f) for f in RunIndex(folder).all_facts())


def _told(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Facts of a run with its folder; what was measured before an unfinished one began is in its checkpoints."""
    told = {"run": str(folder), **facts}
    if told["status"] in ("running", "stopped") and told["before"] is None:
        for newest in checkpoint.listed(folder / "checkpoints")[-1:]:
            with contextlib.suppress(BadFile):
                told["before"] = score(newest.state()["before"])
    return told
