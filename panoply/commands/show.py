"""`panoply show`: what a method, part or world is."""

from __future__ import annotations

import argparse

from panoply.commands.parser import Commands, add_plugins, command, load_plugins

EXAMPLES = """\
  panoply show grpo            equation, parts, defaults
  panoply show credit.group    one part
  panoply show chain           one world and its settings
  panoply show run             settings of any run: run.held_out, run.checkpoint_every, …
  panoply show lora            settings of adapters: lora.alpha, lora.base, …"""


def add(commands: Commands) -> None:
    parser = command(
        commands, "show", "explain a method, part, world, or the settings of a run", _show, EXAMPLES
    )
    parser.add_argument("name")
    parser.add_argument("--preset", help="with the settings for a kind of world, such as tiny")
    add_plugins(parser)


def _show(chosen: argparse.Namespace) -> int:
    from panoply.report.pages import shown

    load_plugins(chosen)
    print(shown(chosen.name, chosen.preset))
    return 0
