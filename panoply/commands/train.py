"""`panoply train`: train a policy, or go on with a stopped run."""

from __future__ import annotations

import argparse
import json
from typing import Any

from panoply.commands.choices import PLACES, add_choices, choices
from panoply.commands.parser import Commands, add_json, add_trust, command
from panoply.errors import PanoplyError

EXAMPLES = """\
  panoply train grpo --world chain                      learn, with a live panel
  panoply train grpo --set update.lr=1e-4 --seed 3      change a setting
  panoply train grpo --credit reinforce                 borrow another method's part
  panoply train grpo --reward-model my-judge            earn what a reward model says
  panoply train grpo --model DIR --lora 16              train adapters of a model of yours
  panoply train my-method --plugin my_method.py         use your own part, method or world
  panoply train grpo --learners 2 --samplers 2          share the work among processes
  panoply train --resume runs/2026-01-31-grpo-chain-s0  go on with a stopped run"""


def add(commands: Commands) -> None:
    parser = command(commands, "train", "train a policy, or resume a run", _train, EXAMPLES)
    option = parser.add_argument
    option("method", nargs="?")
    add_choices(parser)
    option("--run", metavar="DIR", help="the run folder (default runs/DATE-METHOD-WORLD-SEED)")
    option("--resume", metavar="RUN", help="go on with a stopped run")
    option("--from-scratch", action="store_true", help="remake the warm start first")
    option("--sink", action="append", default=None, dest="sinks", help="tensorboard, wandb")
    add_trust(parser)
    option("--quiet", action="store_true", help="print nothing but errors")
    add_json(parser, "the result as JSON")


def _train(chosen: argparse.Namespace) -> int:
    from panoply import api
    from panoply.progress import Progress
    from panoply.report.text import trained
    from panoply.threads import keep_memory

    if chosen.resume and chosen.method:
        raise PanoplyError("--resume goes on with a run as it was planned: leave the method out.")
    if not chosen.resume and not chosen.method:
        raise PanoplyError("Name a method, such as panoply train grpo, or a run with --resume.")
    if chosen.resume:
        _refuse_choices(chosen)
    keep_memory()
    result = api.train(
        chosen.method,
        chosen.world,
        run=chosen.run,
        resume=chosen.resume,
        from_scratch=chosen.from_scratch,
        trust=chosen.trust,
        progress=Progress() if chosen.quiet or chosen.json else None,
        **(_placed(chosen) if chosen.resume else choices(chosen)),
    )
    if chosen.json:
        facts = {"run": str(result.run), "before": result.before, "after": result.after}
        print(json.dumps({**facts, "seconds": result.seconds, "fingerprint": result.fingerprint}))
    elif not chosen.quiet:
        print(trained(result))
    return 0


def _placed(chosen: argparse.Namespace) -> dict[str, Any]:
    """Where the work of a resumed run is done, which need not be where it was."""
    return {name: value for name, value in choices(chosen).items() if name in PLACES}


def _refuse_choices(chosen: argparse.Namespace) -> None:
    """A resumed run is the one that was planned; a choice that would be ignored is refused."""
    found = {name for name, value in choices(chosen).items() if value not in ({}, [], ())}
    found -= _placed(chosen).keys()
    found |= {name for name in ("world", "run", "from_scratch") if getattr(chosen, name)}
    if found:
        word = {"settings": "set", "plugins": "plugin", "sinks": "sink"}.get(name := min(found), name)
        raise PanoplyError(
            f"--resume goes on with a run as it was planned: leave --{word.replace('_', '-')} out."
        )
