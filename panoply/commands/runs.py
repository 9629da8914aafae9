"""`panoply runs`: every run below a folder."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

from panoply.commands.parser import Commands, add_json, command

EXAMPLES = """\
  panoply runs                 every run below ./runs, newest first
  panoply runs --json"""


def add(commands: Commands) -> None:
    parser = command(commands, "runs", "list runs", _runs, EXAMPLES)
    parser.add_argument("folder", nargs="?", default="runs")
    add_json(parser)


def _runs(chosen: argparse.Namespace) -> int:
    from panoply.report.shelf import Shelf
    from panoply.report.text import runs_table

    found = [_told(Path(chosen.folder, f["id"]), f) for f in Shelf(chosen.folder).all_facts()]
    print(json.dumps(found, indent=1) if chosen.json else runs_table(found))
    return 0


def _told(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Facts of a run with its folder; what was measured before an unfinished one began is in its checkpoints."""
    from panoply import checkpoint
    from panoply.files import BadFile
    from panoply.report.shelf import score

    told = {"run": str(folder), **facts}
    if told["status"] in ("running", "stopped") and told["before"] is None:
        for newest in checkpoint.listed(folder / "checkpoints")[-1:]:
            with contextlib.suppress(BadFile):
                told["before"] = score(newest.state()["before"])
    return told
