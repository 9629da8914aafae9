"""`panoply plan`: what a run would do and need, before any compute."""

from __future__ import annotations

import argparse
import json

from panoply.commands.choices import add_choices, choices
from panoply.commands.parser import Commands, add_json, command

EXAMPLES = """\
  panoply plan grpo --world chain                       what would run, what it needs
  panoply plan dpo --set losses.logistic.beta=0.2 --yaml  the resolved plan as YAML"""


def add(commands: Commands) -> None:
    parser = command(commands, "plan", "say what a run would do and need", _plan, EXAMPLES)
    parser.add_argument("method")
    add_choices(parser)
    parser.add_argument("--yaml", action="store_true", help="print the resolved plan as YAML")
    add_json(parser, "the resolved plan as JSON")


def _plan(chosen: argparse.Namespace) -> int:
    from panoply import api, registry
    from panoply.report.text import planned, shown

    if registry.is_recipe(chosen.method):
        print(shown(chosen.method))
        return 0
    made = api.plan(chosen.method, chosen.world, **choices(chosen))
    if chosen.json:
        print(json.dumps(made.to_json(), indent=1, ensure_ascii=False))
    else:
        print(made.to_yaml() if chosen.yaml else planned(made))
    return 0
