"""`panoply plan`: what a run would do and need, before any compute."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from panoply.commands.choices import add_choices, choices
from panoply.commands.parser import Commands, add_json, command, load_plugins

if TYPE_CHECKING:
    from panoply.planning import Plan

EXAMPLES = """\
  panoply plan grpo --world chain                       what would run, what it needs
  panoply plan grpo --learners 8 --samplers 24          what lies where, what is moved, how long a step takes
  panoply plan rlhf                                     every stage of a recipe
  panoply plan dpo --set losses.logistic.beta=0.2 --yaml  the resolved plan as YAML"""


def add(commands: Commands) -> None:
    parser = command(commands, "plan", "say what a run would do and need", _plan, EXAMPLES)
    parser.add_argument("method")
    add_choices(parser)
    parser.add_argument("--yaml", action="store_true", help="print the resolved plan as YAML")
    add_json(parser, "the resolved plan as JSON")


def _plan(chosen: argparse.Namespace) -> int:
    from panoply import api, registry

    load_plugins(chosen)
    asked = choices(chosen)
    if registry.is_recipe(chosen.method):
        _print_stages(chosen, api.plan_recipe(chosen.method, chosen.world, **asked))
        return 0
    made = api.plan(chosen.method, chosen.world, **asked)
    if chosen.json or chosen.yaml:
        _print_data(chosen, made.to_json())
    else:
        from panoply.report.text import planned

        print(planned(made))
        _print_pace(made)
    return 0


def _print_pace(made: Plan) -> None:
    """What a step takes here, where that can be measured quickly."""
    from panoply.pace import planned_lines

    for line in planned_lines(made):
        print(f"\n{line}")


def _print_stages(chosen: argparse.Namespace, stages: Mapping[str, Plan]) -> None:
    if chosen.json or chosen.yaml:
        _print_data(chosen, {name: made.to_json() for name, made in stages.items()})
        return
    from panoply.report.pages import shown
    from panoply.report.text import planned

    print(shown(chosen.method))
    for number, (name, made) in enumerate(stages.items(), 1):
        print(f"\nstage {number} of {len(stages)}, {name}\n\n{planned(made)}")


def _print_data(chosen: argparse.Namespace, data: Mapping[str, Any]) -> None:
    if chosen.json:
        print(json.dumps(data, indent=1, ensure_ascii=False))
        return
    import yaml

    print(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))
