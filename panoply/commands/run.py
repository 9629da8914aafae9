"""`panoply run`: call a work that is a function, and print what it gives."""

from __future__ import annotations

import argparse
import json

from panoply.commands.parser import Commands, add_json, add_plugins, command, load_plugins, settings

EXAMPLES = """\
  panoply run sharpe-ratio-at-k                   a protocol, on its own example
  panoply run prefix-grouper --set prompt=256     a system, with a setting of its own
  panoply run my-solver --plugin FILE.py --seed 3 --json"""


def add(commands: Commands) -> None:
    about = "call an algorithm, a system or a protocol and print its result"
    parser = command(commands, "run", about, _run, EXAMPLES)
    parser.add_argument("name")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings",
                        help="a setting of it: panoply show NAME lists them")  # fmt: skip
    parser.add_argument("--seed", type=int, help="of whatever it draws")
    add_plugins(parser)
    add_json(parser)


def _run(chosen: argparse.Namespace) -> int:
    from panoply import functions
    from panoply.report.layout import table

    load_plugins(chosen)
    found = functions.call(chosen.name, settings(chosen.settings), chosen.seed)
    rows = functions.rows_of(found, chosen.name)
    print(json.dumps(functions.plain_of(found), indent=1) if chosen.json else table(rows, margin=0))
    return 0
