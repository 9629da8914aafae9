"""What a run can be told, the same for `train` and `plan`."""

from __future__ import annotations

import argparse
from typing import Any

from panoply.api import SLOT_NAMES
from panoply.commands.parser import Parser, add_machine, add_plugins, add_which, settings

NAMES = (
    "model",
    "which",
    "lora",
    "reference",
    "reward_model",
    "tools",
    "steps",
    "minutes",
    "until",
    "seed",
    "preset",
    "device",
    "dtype",
    "threads",
    *(PLACES := ("learners", "samplers", "cluster", "layout", "restarts")),
    "engine",
    "staleness",
    "inflight",
)
SETTINGS = "such as update.lr=1e-4, regularise.kl=0.1, world.operations=8, run.held_out=512"


def add_choices(parser: Parser) -> None:
    option = parser.add_argument
    option("--world", help="where the policy acts (default chain)")
    option(
        "--model", help="start (the world's warm start, the default), fresh, a folder, a run or NAME/MODEL"
    )
    option("--reference", help="what KL and preference terms compare with: start, none, a folder or a run")
    option(
        "--tools",
        metavar="FILE.py:NAME,…",
        action="append",
        help="functions of yours that the model may call to answer questions of yours (--data)",
    )
    option(
        "--reward-model",
        metavar="DIR",
        help="earn what this says: a run of reward-model, or a sequence classifier of transformers",
    )
    option(
        "--sandbox",
        nargs="?",
        const="auto",
        metavar="NAME",
        help="what programs, or your reward functions, run in: auto (the first that is safe) or one by name",
    )
    add_which(parser, "that --model and --reference take of a run")
    option(
        "--lora",
        type=int,
        metavar="RANK",
        help="train adapters of this rank alone (--set lora.alpha=…, "
        "lora.target_modules=…, lora.base=nf4; --model DIR takes a folder of PEFT, too)",
    )
    option("--steps", type=int, help="optimisation steps")
    option("--minutes", type=float, help="stop after this time")
    option("--until", metavar="RULE", help="stop when a number is reached, such as 'success>0.9'")
    option("--seed", type=int)
    option("--set", action="append", default=[], metavar="PATH=VALUE", dest="settings", help=SETTINGS)
    option("--preset", help="tiny, or published for the paper's numbers (default: the world's)")
    _add_slots(parser)
    add_plugins(parser)
    add_machine(parser)
    _add_places(parser)


def _add_places(parser: Parser) -> None:
    places = parser.add_argument_group(
        "several processes", "the same run on several GPUs or machines, by Ray"
    )
    option = places.add_argument
    option("--learners", type=int, metavar="N", help="processes that share the passes of an update")
    option("--samplers", type=int, metavar="N", help="processes that share the episodes of a batch")
    option(
        "--cluster",
        metavar="WHERE",
        help="local (Ray is started here, the default), auto (the Ray cluster this machine is in) or ray://HOST:PORT",
    )
    option("--engine", choices=["native", "vllm"], help="who samples text (default native)")
    option(
        "--staleness", type=int, metavar="K", help="sample K batches ahead, with weights that are K steps old"
    )
    option(
        "--inflight",
        action="store_true",
        default=None,
        help="samplers take new weights in the midst of answers, at most --staleness steps late",
    )
    option(
        "--layout",
        choices=["auto", "whole", "sharded"],
        help="whether every learner holds the whole model or a piece of it",
    )
    option(
        "--restarts", type=int, metavar="N", help="how often learners that died are started again (default 3)"
    )


def _add_slots(parser: Parser) -> None:
    slots = parser.add_argument_group("slots", "a part's name, or a method to borrow it from")
    for slot in SLOT_NAMES:
        if slot == "reward":
            own = "or functions of yours, FILE.py:NAME[=WEIGHT], with --data; may be repeated"
            slots.add_argument("--reward", metavar="NAME", action="append", help=own)
        elif slot == "data":
            slots.add_argument("--data", metavar="NAME", help="or your own prompts, FILE.jsonl")
        else:
            slots.add_argument(f"--{slot}", metavar="NAME")


def choices(chosen: argparse.Namespace) -> dict[str, Any]:
    """What was chosen, as keywords of `api.train` and `api.plan`."""
    found = {name: value for name in (*NAMES, *SLOT_NAMES) if (value := getattr(chosen, name)) is not None}
    if getattr(chosen, "sinks", None):
        found["sinks"] = tuple(chosen.sinks)
    given = settings(chosen.settings)
    if chosen.sandbox is not None:
        given["world.sandbox"] = chosen.sandbox
    return {**found, "settings": given, "plugins": chosen.plugins}
