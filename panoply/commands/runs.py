"""`panoply runs`: every run below a folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from panoply.commands.parser import Commands, add_json, command
from panoply.errors import PanoplyError

EXAMPLES = """\
  panoply runs                 every run below ./runs, newest first
  panoply runs --json"""


def add(commands: Commands) -> None:
    parser = command(commands, "runs", "list runs", _runs, EXAMPLES)
    parser.add_argument("folder", nargs="?", default="runs")
    add_json(parser)


def _runs(chosen: argparse.Namespace) -> int:
    from panoply.report.text import run_facts, runs_table
    from panoply.run import list_runs

    if not Path(chosen.folder).is_dir():
        hint = " yet: make a run with panoply train grpo" if chosen.folder == "runs" else ""
        raise PanoplyError(f"There is no folder '{chosen.folder}'{hint}.")
    found = list_runs(chosen.folder)
    print(json.dumps([run_facts(r) for r in found], indent=1) if chosen.json else runs_table(found))
    return 0
