"""`panoply eval`: held-out success with unbiased pass@k, or what a protocol says of a run."""

from __future__ import annotations

import argparse
import json

from panoply.commands.parser import (
    Commands,
    add_context,
    add_json,
    add_machine,
    add_plugins,
    add_stop,
    add_trust,
    add_which,
    command,
    load_plugins,
    machine,
    settings,
)
from panoply.errors import PanoplyError

EXAMPLES = """\
  panoply eval runs/RUN                          held-out success with intervals
  panoply eval runs/RUN --which last             of the last checkpoint, not the best
  panoply eval DIR --world chain --attempts 16 --k 1,4,16
  panoply eval runs/PPO-RUN --problems 100       mean return on held-out starts
  panoply eval runs/BC-RUN --by sharpe-ratio-at-k --set k=4    by a protocol, with settings of its own"""


def add(commands: Commands) -> None:
    about = "measure held-out success with unbiased pass@k, or judge a run by a protocol"
    parser = command(commands, "eval", about, _eval, EXAMPLES)
    option = parser.add_argument
    option("source", metavar="RUN|DIR")
    option(
        "--by", metavar="PROTOCOL", help="judge the run by a protocol or survey (panoply list --tag protocol)"
    )
    add_which(parser)
    option("--world", help="needed for a model folder; a run knows its own")
    option("--problems", type=int, help="held-out problems, or starts (default 256, in control 100)")
    option("--attempts", type=int, help="samples a problem (default 8, or the largest k)")
    option("--k", help="which pass@k, such as 1,4,16 (default 1 and the number of attempts)")
    option("--temperature", type=float)
    option("--seed", type=int)
    option("--set", action="append", default=[], metavar="world.X=VALUE", dest="settings",
           help="of the world, or with --by of the protocol")  # fmt: skip
    add_stop(parser)
    add_plugins(parser)
    add_trust(parser)
    add_context(parser)
    add_machine(parser)
    add_json(parser)


def _eval(chosen: argparse.Namespace) -> int:
    from panoply import api
    from panoply.progress import bar
    from panoply.report.text import evaluated

    load_plugins(chosen)
    if chosen.by is not None:
        return _judge(chosen)
    try:
        ks = [int(k) for k in chosen.k.split(",")] if chosen.k else []
    except ValueError as error:
        raise PanoplyError(f"--k takes numbers such as 1,4,16, not '{chosen.k}'.") from error
    with bar("evaluating") as watch:
        found = api.evaluate(
            chosen.source,
            chosen.world,
            which=chosen.which,
            trust=chosen.trust,
            problems=chosen.problems,
            attempts=chosen.attempts,
            ks=ks,
            temperature=1.0 if chosen.temperature is None else chosen.temperature,
            seed=chosen.seed or 0,
            settings=settings(chosen.settings) | ({"world.stop": tuple(chosen.stop)} if chosen.stop else {}),
            watch=watch,
            **machine(chosen),
        )
    print(json.dumps(found.to_json(), indent=1) if chosen.json else evaluated(found))
    return 0


UNUSED = (
    "which",
    "world",
    "problems",
    "attempts",
    "k",
    "temperature",
    "stop",
    "device",
    "dtype",
    "threads",
    "context",
)


def _judge(chosen: argparse.Namespace) -> int:
    """A protocol has settings of its own and looks at the checkpoints it wants."""
    from panoply import api, functions
    from panoply.report.layout import table

    for name in UNUSED:
        if getattr(chosen, name) not in (None, []):
            raise PanoplyError(f"--{name} has no effect with --by: a protocol is told by --set NAME=VALUE.")
    words = settings(chosen.settings)
    found = api.judge(chosen.source, chosen.by, seed=chosen.seed, trust=chosen.trust, settings=words)
    rows = functions.rows_of(found, chosen.by)
    print(json.dumps(functions.plain_of(found), indent=1) if chosen.json else table(rows, margin=0))
    return 0
