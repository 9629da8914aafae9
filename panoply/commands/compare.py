"""`panoply compare`: methods side by side at equal budget."""

from __future__ import annotations

import argparse
import json
import shlex
import sys

from panoply.commands.parser import Commands, add_cluster, add_json, add_plugins, command, settings

EXAMPLES = """\
  panoply compare grpo rloo dapo --world chain --seeds 5        a table with intervals
  panoply compare grpo grpo:update.lr=1e-4 grpo+credit=gigpo --world keydoor
  panoply compare grpo fast=grpo:update.lr=1e-3                 under a name of your own
  panoply compare grpo rloo --world chain --world add           over several worlds
  panoply compare grpo spo-segment --budget decisions=300k      equal sampling
  panoply compare grpo ead --world manyanswers --metric distinct@16
  panoply compare grpo rloo --model DIR --data prompts.jsonl --reward reward.py:correct

A method is written with settings after a colon and borrowed slots after a plus. The first one is what the others are
compared with. Runs are kept in runs/.cache and found again; an interrupted comparison goes on where it stopped."""


def add(commands: Commands) -> None:
    parser = command(
        commands, "compare", "compare methods at equal budget, with intervals", _compare, EXAMPLES
    )
    option = parser.add_argument
    option("methods", nargs="+", metavar="METHOD")
    option(
        "--world",
        action="append",
        metavar="NAME",
        help="where they act (default: the home of the first, or chain); may be repeated",
    )
    option("--seeds", type=int, default=5, metavar="N", help="runs of each method (default 5)")
    option("--budget", metavar="UNIT=N", help="episodes, decisions, decode_steps, steps, seconds or signal:NAME of "
           "every run, such as episodes=20k (default: what the first method collects)")  # fmt: skip
    option("--metric", default="success", help="success (held out, the default), area, pass@K, distinct@K, "
           "world:NAME of what a world measures, or what a step logs, such as entropy or success/calls")  # fmt: skip
    option(
        "--set", action="append", default=[], metavar="PATH=VALUE", dest="settings", help="for all methods"
    )
    option("--model", help="what all start from (default: the world's warm start)")
    option("--data", metavar="FILE.jsonl", help="your own prompts, in place of a world")
    option("--reward", metavar="FILE.py:NAME", action="append", help="functions of yours; may be repeated")
    option("--preset", help="tiny, or published for the papers' numbers (default: the world's)")
    option("--workers", type=int, metavar="N", help="processes at a time (default: the cores there are)")
    add_cluster(parser)
    option("--out", metavar="DIR", help="where the result goes (default runs/DATE-compare-WORLD)")
    add_plugins(parser)
    option("--quiet", action="store_true", help="print only the result")
    add_json(parser, "the result as JSON")


def _compare(chosen: argparse.Namespace) -> int:
    from panoply.errors import PanoplyError
    from panoply.evidence import pool
    from panoply.evidence.compare import compare, shown

    for name in ("seeds", "workers"):
        if getattr(chosen, name) is not None and getattr(chosen, name) < 1:
            raise PanoplyError(f"--{name} must be at least 1, not {getattr(chosen, name)}.")
    found = compare(
        *chosen.methods,
        world=chosen.world,
        seeds=chosen.seeds,
        budget=chosen.budget,
        metric=chosen.metric,
        workers=chosen.workers,
        cluster=chosen.cluster,
        folder=chosen.out,
        watch=pool.Watch() if chosen.quiet or chosen.json else None,
        command=shlex.join(["panoply", *sys.argv[1:]])
        if sys.argv[0].endswith(("panoply", "__main__.py"))
        else "",
        settings=settings(chosen.settings),
        model=chosen.model,
        data=chosen.data,
        reward=chosen.reward,
        preset=chosen.preset,
        plugins=chosen.plugins,
    )
    print(json.dumps(found.to_json(), indent=1) if chosen.json else shown(found))
    return 1 if found.failed else 0
