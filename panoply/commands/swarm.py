"""`panoply swarm`: nodes that learn from each other's answers, each a process and a run of its own."""

from __future__ import annotations

import argparse
import json
import re

from panoply.commands.choices import add_choices, choices
from panoply.commands.parser import Commands, add_json, command
from panoply.errors import PanoplyError

EXAMPLES = """\
  panoply swarm runs/four --nodes 4 --world chain        four nodes, 4 own and 4 shared groups a round
  panoply swarm runs/four                                go on with what was stopped or killed
  panoply swarm runs/four --node e                       one more node joins, also from another shell
  panoply swarm runs/four --status                       how each stands; starts nothing
  panoply swarm runs/two --node a:run.model=runs/x --node b:run.model=runs/y
  panoply swarm runs/mix --nodes 4 --set sample.prompts=6 --set sample.theirs=2
  panoply swarm runs/own bapo --nodes 4                  another method's nodes

Every node is a run in FOLDER/nodes, which can be looked at, resumed and exported like any other. Nodes share answers as
text in FOLDER/rollouts; what one cannot use it drops, counts, and names in FOLDER/dropped."""


def add(commands: Commands) -> None:
    about = "train nodes that learn from each other's answers"
    parser = command(commands, "swarm", about, _swarm, EXAMPLES)
    option = parser.add_argument
    option("folder", metavar="FOLDER", help="where the nodes and what they share lie")
    option("method", nargs="?", help="what each node learns by (default sapo-swarm)")
    option("--nodes", type=int, metavar="N", help="how many nodes a new swarm has: a, b, c, …")
    option("--node", action="append", default=[], metavar="NAME[:PATH=VALUE,…]", dest="named",
           help="a node with settings of its own; may be repeated")  # fmt: skip
    option("--status", action="store_true", help="print how the nodes stand, and start nothing")
    option("--quiet", action="store_true", help="print only the result")
    add_choices(parser)
    add_json(parser, "the result as JSON")


def _swarm(chosen: argparse.Namespace) -> int:
    from pathlib import Path

    from panoply import swarm
    from panoply.files import is_file

    given, nodes = choices(chosen), _nodes(chosen)
    there = is_file(Path(chosen.folder) / swarm.CONFIG)
    if there or chosen.status:
        for name in (
            "method",
            "world",
            "nodes",
            *(n for n, value in given.items() if value not in ({}, [], ())),
        ):
            if name in given or getattr(chosen, name, None) is not None:
                word = {"method": "the method", "settings": "--set", "plugins": "--plugin"}.get(
                    name, f"--{name}"
                )
                raise PanoplyError(f"{chosen.folder} goes on as it was planned: leave {word} out.")
    if chosen.status:
        found = swarm.Swarm.of(chosen.folder)
    else:
        if not there:
            if not nodes:
                swarm.opened(Path(chosen.folder))
            swarm.make(chosen.folder, chosen.method or swarm.METHOD, chosen.world, nodes=nodes, **given)
        elif nodes:
            swarm.join(chosen.folder, nodes)
        found = swarm.run(chosen.folder, swarm.Watch(quiet=chosen.quiet or chosen.json))
    print(json.dumps(found.to_json(), indent=1) if chosen.json else found)
    return 1 if found.failed else 0


def _nodes(chosen: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Nodes by name, with their own settings, in the notation of `panoply compare`."""
    from panoply import swarm

    if chosen.nodes is not None and chosen.nodes < 1:
        raise PanoplyError(f"--nodes must be at least 1, not {chosen.nodes}.")
    found: dict[str, dict[str, str]] = {}
    for word in chosen.named:
        name, *changes = re.split(r"[:,](?=[a-z_]+(?:\.\w+)*=)", word)
        own = {}
        for change in changes:
            path, _, value = change.partition("=")
            if not value:
                raise PanoplyError(f"--node {word} changes {path} to nothing: write NAME:PATH=VALUE.")
            own[path] = value
        if name in found:
            raise PanoplyError(f"--node names {name} twice.")
        found[name] = own
    if chosen.nodes is not None and found and chosen.nodes != len(found):
        raise PanoplyError(f"--nodes {chosen.nodes} and {len(found)} named by --node: leave one of them out.")
    return found or {name: {} for name in swarm.names(chosen.nodes or 0)}
