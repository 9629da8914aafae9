"""`panoply sample`: what a policy writes."""

from __future__ import annotations

import argparse

from panoply.commands.parser import Commands, add_machine, add_plugins, command, load_plugins, machine

EXAMPLES = """\
  panoply sample runs/RUN "3+4*2+1*5+6*2+7="     what the policy writes
  panoply sample DIR "7*8+1=" -n 4 --temperature 0"""


def add(commands: Commands) -> None:
    parser = command(commands, "sample", "continue a prompt", _sample, EXAMPLES)
    option = parser.add_argument
    option("source", metavar="RUN|DIR")
    option("prompt")
    option("-n", type=int, default=1, help="how many continuations")
    option("--temperature", type=float, default=1.0)
    option("--max-tokens", type=int, default=128)
    option("--seed", type=int, default=0)
    add_plugins(parser)
    add_machine(parser)


def _sample(chosen: argparse.Namespace) -> int:
    from panoply import api

    load_plugins(chosen)
    for text in api.sample(
        chosen.source,
        chosen.prompt,
        n=chosen.n,
        temperature=chosen.temperature,
        max_tokens=chosen.max_tokens,
        seed=chosen.seed,
        **machine(chosen),
    ):
        print(chosen.prompt + text)
    return 0
