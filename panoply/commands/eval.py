"""`panoply eval`: held-out success with unbiased pass@k."""

from __future__ import annotations

import argparse
import json

from panoply.commands.parser import (
    Commands,
    add_json,
    add_machine,
    add_plugins,
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
  panoply eval runs/PPO-RUN --problems 100       mean return on held-out starts"""


def add(commands: Commands) -> None:
    about = "measure held-out success with unbiased pass@k"
    parser = command(commands, "eval", about, _eval, EXAMPLES)
    option = parser.add_argument
    option("source", metavar="RUN|DIR")
    add_which(parser)
    option("--world", help="needed for a model folder; a run knows its own")
    option("--problems", type=int, help="held-out problems, or starts (default 256, in control 100)")
    option("--attempts", type=int, help="samples a problem (default 8, or the largest k)")
    option("--k", help="which pass@k, such as 1,4,16 (default 1 and the number of attempts)")
    option("--temperature", type=float, default=1.0)
    option("--seed", type=int, default=0)
    option("--set", action="append", default=[], metavar="world.X=VALUE", dest="settings")
    add_plugins(parser)
    add_trust(parser)
    add_machine(parser)
    add_json(parser)


def _eval(chosen: argparse.Namespace) -> int:
    from panoply import api
    from panoply.progress import bar
    from panoply.report.text import evaluated

    load_plugins(chosen)
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
            temperature=chosen.temperature,
            seed=chosen.seed,
            settings=settings(chosen.settings),
            watch=watch,
            **machine(chosen),
        )
    print(json.dumps(found.to_json(), indent=1) if chosen.json else evaluated(found))
    return 0
