"""`panoply serve`: a policy behind an endpoint that speaks OpenAI's protocol."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, cast

from panoply.commands.parser import Commands, add_context, add_machine, add_which, command, machine
from panoply.errors import PanoplyError

if TYPE_CHECKING:
    from panoply.policies.text import TextPolicy

EXAMPLES = """\
  panoply serve runs/RUN                          print an address and a key for any client of OpenAI's
  panoply serve DIR --record episodes.jsonl       write down tokens, log-probabilities and posted rewards
  PANOPLY_KEY=secret panoply serve runs/RUN       with a key of one's own"""


def add(commands: Commands) -> None:
    about = "answer clients of OpenAI's protocol with a policy, on this machine only"
    parser = command(commands, "serve", about, _serve, EXAMPLES)
    option = parser.add_argument
    option("source", metavar="RUN|DIR")
    add_which(parser)
    option("--port", type=int, default=8643, help="where to listen (default 8643); 0 takes any that is free")
    option("--record", metavar="FILE.jsonl", help="where every turn and every reward is written down")
    option("--seed", type=int, default=0)
    add_context(parser)
    add_machine(parser)


def _serve(chosen: argparse.Namespace) -> int:
    from panoply import api
    from panoply.serving.endpoint import Endpoint
    from panoply.serving.speaker import Speaker
    from panoply.threads import with_threads

    if not 0 <= chosen.port <= 65535:
        raise PanoplyError(f"--port takes a number from 0 to 65535, not {chosen.port}.")
    where = machine(chosen)
    threads = where.pop("threads", 0)
    policy = api.load_policy(chosen.source, which=chosen.which, **where)
    if policy.medium != "text":
        raise PanoplyError(f"{chosen.source} is a policy of control, and an endpoint is for text.")
    speaker = Speaker(cast("TextPolicy", policy), Path(chosen.source).resolve().name, None, chosen.seed)
    record = Path(chosen.record) if chosen.record else None
    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.touch()
    key = os.environ.get("PANOPLY_KEY") or secrets.token_urlsafe(24)
    speaker.record = record
    endpoint = Endpoint(speaker, key, chosen.port)
    print(
        f"{speaker.model} answers at\n  OPENAI_BASE_URL={endpoint.address}\n  OPENAI_API_KEY={key}\n"
        f"{f'Every turn is written to {record}.' if record else 'Nothing is written down (--record FILE.jsonl).'} "
        "It answers this machine only. Ctrl-C ends it.",
        flush=True,
    )
    with with_threads(threads), contextlib.suppress(KeyboardInterrupt), endpoint.server:
        endpoint.server.serve_forever(poll_interval=0.2)
    return 0
