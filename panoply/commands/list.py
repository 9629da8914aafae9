"""`panoply list`: what there is."""

from __future__ import annotations

import argparse
import json

from panoply.commands.parser import Commands, add_json, add_plugins, command, load_plugins

EXAMPLES = """\
  panoply list                 methods and worlds
  panoply list parts           parts by slot
  panoply list --json          for programs"""


def add(commands: Commands) -> None:
    parser = command(commands, "list", "list methods, worlds or parts", _list, EXAMPLES)
    parser.add_argument("what", nargs="?", default="all", choices=["all", "methods", "worlds", "parts"])
    add_plugins(parser)
    add_json(parser)


def _list(chosen: argparse.Namespace) -> int:
    from panoply import registry
    from panoply.parts import SLOTS
    from panoply.report.text import listed, listed_parts

    load_plugins(chosen)
    found = registry.entries()
    if chosen.what == "parts":
        parts = {slot: sorted(registry.parts(slot)) for slot in SLOTS}
        print(json.dumps(parts, indent=1) if chosen.json else listed_parts())
        return 0
    kinds = {"methods": ["method"], "worlds": ["world"]}.get(chosen.what)
    found = [e for e in found if kinds is None or e.kind in kinds]
    print(json.dumps([e.facts() for e in found], indent=1) if chosen.json else listed(found))
    return 0
