"""`panoply runs`: every run below a folder."""

from __future__ import annotations

import argparse
import json

from panoply.commands.parser import Commands, add_json, command

EXAMPLES = """\
  panoply runs                 every run below ./runs, newest first
  panoply runs --json"""


def add(commands: Commands) -> None:
    parser = command(commands, "runs", "list runs", _runs, EXAMPLES)
    parser.add_argument("folder", nargs="?", default="runs")
    add_json(parser)


def _runs(chosen: argparse.Namespace) -> int:
    from panoply.report.runs import runs

    found = runs(chosen.folder)
    print(json.dumps(list(found), indent=1) if chosen.json else found)
    return 0
