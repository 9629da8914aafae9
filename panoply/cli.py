"""The command line: `panoply train grpo --world chain`."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from panoply import __version__
from panoply.errors import PanoplyError, unknown

EXAMPLES = {
    "train": """examples:
  panoply train grpo --world chain                      learn, with a live panel
  panoply train grpo --set update.lr=1e-4 --seed 3      change a setting
  panoply train grpo --credit reinforce                 borrow another method's part
  panoply train my-method --plugin my_method.py         use your own part, method or world
  panoply train --resume runs/2026-01-31-grpo-chain-s0  go on with a stopped run""",
    "plan": """examples:
  panoply plan grpo --world chain                       what would run, what it needs
  panoply plan dpo --set losses.logistic.beta=0.2 --yaml  the resolved plan as YAML""",
    "list": """examples:
  panoply list                 methods and worlds
  panoply list parts           parts by slot
  panoply list --json          for programs""",
    "show": """examples:
  panoply show grpo            equation, parts, defaults
  panoply show credit.group    one part
  panoply show chain           one world""",
    "eval": """examples:
  panoply eval runs/RUN                          held-out success with intervals
  panoply eval DIR --world chain --attempts 16 --k 1,4,16""",
    "sample": """examples:
  panoply sample runs/RUN "3+4*2+1*5+6*2+7="     what the policy writes
  panoply sample DIR "7*8+1=" -n 4 --temperature 0""",
    "runs": """examples:
  panoply runs                 every run below ./runs, newest first
  panoply runs --json""",
    "export": """examples:
  panoply export runs/RUN my-model               a folder that transformers opens
  panoply export runs/RUN my-model --which last""",
}


class Parser(argparse.ArgumentParser):
    """Errors as one sentence and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise PanoplyError(f"{message[:1].upper()}{message[1:]}. See {self.prog} --help.")

    def options(self) -> list[str]:
        return [word for action in self._actions for word in action.option_strings if word.startswith("--")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `panoply` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show π gets a ? and not a traceback
            stream.reconfigure(errors="replace")
    try:
        code = _main(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except PanoplyError as error:
        print(f"panoply: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt as error:
        print(f"panoply: {str(error) or 'stopped'}", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO):
            raise
        where = f" ({error.filename})" if error.filename else ""
        print(f"panoply: {error.strerror}{where}.", file=sys.stderr)
        code = 2
    sys.exit(code)


def _main(arguments: list[str]) -> int:
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 0
    if not arguments[0].startswith("-") and arguments[0] not in EXAMPLES:
        raise unknown("command", arguments[0], EXAMPLES)
    chosen, surplus = parser.parse_known_args(arguments)
    if surplus:
        word, command = surplus[0].split("=")[0], chosen.parser
        if word.startswith("--"):
            raise unknown(f"option of {command.prog}", word, command.options())
        raise PanoplyError(f"{command.prog} does not take '{surplus[0]}'. See {command.prog} --help.")
    run: Callable[[argparse.Namespace], int] = chosen.run_command
    return run(chosen)


# ------------------------------------------------------------------ arguments


def _parser() -> Parser:
    parser = Parser(prog="panoply", description="Policy optimization in which a paper is a diff.")
    parser.add_argument("--version", action="version", version=f"panoply {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)

    def command(name: str, about: str, run: Callable[[argparse.Namespace], int]) -> Parser:
        made: Parser = commands.add_parser(
            name,
            help=about,
            description=about,
            epilog=EXAMPLES[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(run_command=run, parser=made)
        return made

    _training_arguments(command("train", "train a policy, or resume a run", _train), training=True)
    _training_arguments(command("plan", "say what a run would do and need", _plan), training=False)

    listing = command("list", "list methods, worlds or parts", _list)
    listing.add_argument("what", nargs="?", default="all", choices=["all", "methods", "worlds", "parts"])
    _plugin_arguments(listing)
    listing.add_argument("--json", action="store_true", help="print JSON")

    show = command("show", "explain a method, part or world", _show)
    show.add_argument("name")
    show.add_argument("--preset", help="with the settings for a kind of world, such as tiny")
    _plugin_arguments(show)

    evaluation = command("eval", "measure held-out success with unbiased pass@k", _eval)
    evaluation.add_argument("source", metavar="RUN|DIR")
    evaluation.add_argument("--world", help="needed for a model folder; a run knows its own")
    evaluation.add_argument("--problems", type=int, default=256)
    evaluation.add_argument("--attempts", type=int, help="samples a problem (default 8, or the largest k)")
    evaluation.add_argument("--k", help="which pass@k, such as 1,4,16 (default 1 and the number of attempts)")
    evaluation.add_argument("--temperature", type=float, default=1.0)
    evaluation.add_argument("--seed", type=int, default=0)
    evaluation.add_argument("--set", action="append", default=[], metavar="world.X=VALUE", dest="settings")
    _plugin_arguments(evaluation)
    evaluation.add_argument("--json", action="store_true", help="print JSON")

    sampling = command("sample", "continue a prompt", _sample)
    sampling.add_argument("source", metavar="RUN|DIR")
    sampling.add_argument("prompt")
    sampling.add_argument("-n", type=int, default=1, help="how many continuations")
    sampling.add_argument("--temperature", type=float, default=1.0)
    sampling.add_argument("--max-tokens", type=int, default=128)
    sampling.add_argument("--seed", type=int, default=0)

    runs = command("runs", "list runs", _runs)
    runs.add_argument("folder", nargs="?", default="runs")
    runs.add_argument("--json", action="store_true", help="print JSON")

    export = command("export", "write a run's model as a Hugging Face folder", _export)
    export.add_argument("source", metavar="RUN")
    export.add_argument("folder", metavar="DIR")
    export.add_argument("--which", choices=["best", "last"], default="best")
    return parser


def _plugin_arguments(parser: Parser) -> None:
    parser.add_argument("--plugin", action="append", default=[], metavar="FILE.py", dest="plugins",
                        help="a file that registers parts, methods or worlds")  # fmt: skip


def _training_arguments(parser: Parser, *, training: bool) -> None:
    parser.add_argument("method", nargs="?" if training else None)
    parser.add_argument("--world", help="where the policy acts (default chain)")
    parser.add_argument(
        "--model", help="start (the world's warm start, the default), fresh, a folder or a run"
    )
    parser.add_argument(
        "--reference", help="what KL and preference terms compare with: start, none, a folder"
    )
    parser.add_argument("--lora", type=int, metavar="RANK", help="train low-rank adapters only, through PEFT")
    parser.add_argument("--steps", type=int, help="optimisation steps")
    parser.add_argument("--minutes", type=float, help="stop after this time")
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        dest="settings",
        help="such as update.lr=1e-4, regularise.kl=0.1, world.operations=8, run.held_out=512",
    )
    parser.add_argument("--preset", help="tiny, or published for the paper's numbers (default: the world's)")
    slots = parser.add_argument_group("slots", "a part's name, or a method to borrow it from")
    from panoply.api import SLOT_NAMES

    for slot in SLOT_NAMES:
        if slot == "reward":
            own = "or functions of yours, FILE.py:NAME[=WEIGHT], with --data; may be repeated"
            slots.add_argument("--reward", metavar="NAME", action="append", help=own)
        elif slot == "data":
            slots.add_argument("--data", metavar="NAME", help="or your own prompts, FILE.jsonl")
        else:
            slots.add_argument(f"--{slot}", metavar="NAME")
    _plugin_arguments(parser)
    parser.add_argument("--device", help="auto, cpu, cuda, cuda:1 …")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, help="CPU threads; stored with the run")
    if not training:
        parser.add_argument("--yaml", action="store_true", help="print the resolved plan as YAML")
        parser.add_argument("--json", action="store_true", help="print the resolved plan as JSON")
        return
    parser.add_argument("--run", metavar="DIR", help="the run folder (default runs/DATE-METHOD-WORLD-SEED)")
    parser.add_argument("--resume", metavar="RUN", help="go on with a stopped run")
    parser.add_argument("--from-scratch", action="store_true", help="remake the warm start first")
    parser.add_argument("--sink", action="append", default=None, dest="sinks", help="tensorboard, wandb")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _settings(words: Sequence[str]) -> dict[str, str]:
    found = {}
    for word in words:
        path, separator, value = word.partition("=")
        if not separator or not path or not value:
            raise PanoplyError(f"--set takes PATH=VALUE, not '{word}'.")
        found[path.strip()] = value.strip()
    return found


def _choices(chosen: argparse.Namespace) -> dict[str, Any]:
    from panoply.api import SLOT_NAMES

    names = (
        "model",
        "lora",
        "reference",
        "steps",
        "minutes",
        "seed",
        "preset",
        "device",
        "dtype",
        "threads",
        *SLOT_NAMES,
    )
    found = {name: getattr(chosen, name) for name in names if getattr(chosen, name) is not None}
    if getattr(chosen, "sinks", None):
        found["sinks"] = tuple(chosen.sinks)
    return {**found, "settings": _settings(chosen.settings), "plugins": chosen.plugins}


# ------------------------------------------------------------------ commands


def _train(chosen: argparse.Namespace) -> int:
    from panoply import api
    from panoply.progress import Progress
    from panoply.report.text import trained

    if chosen.resume and chosen.method:
        raise PanoplyError("--resume goes on with a run as it was planned: leave the method out.")
    if not chosen.resume and not chosen.method:
        raise PanoplyError("Name a method, such as panoply train grpo, or a run with --resume.")
    if chosen.resume:
        _refuse_choices(chosen)
    result = api.train(
        chosen.method,
        chosen.world,
        run=chosen.run,
        resume=chosen.resume,
        from_scratch=chosen.from_scratch,
        progress=Progress() if chosen.quiet or chosen.json else None,
        **({} if chosen.resume else _choices(chosen)),
    )
    if chosen.json:
        facts = {"run": str(result.run), "before": result.before, "after": result.after}
        print(json.dumps({**facts, "seconds": result.seconds, "fingerprint": result.fingerprint}))
    else:
        print(trained(result))
    return 0


def _refuse_choices(chosen: argparse.Namespace) -> None:
    """A resumed run is the one that was planned; a choice that would be ignored is refused."""
    found = {name for name, value in _choices(chosen).items() if value not in ({}, [], ())}
    found |= {name for name in ("world", "run", "from_scratch") if getattr(chosen, name)}
    if found:
        word = {"settings": "set", "plugins": "plugin", "sinks": "sink"}.get(name := min(found), name)
        raise PanoplyError(
            f"--resume goes on with a run as it was planned: leave --{word.replace('_', '-')} out."
        )


def _plan(chosen: argparse.Namespace) -> int:
    from panoply import api, registry
    from panoply.report.text import planned, shown

    if registry.is_recipe(chosen.method):
        print(shown(chosen.method))
        return 0
    made = api.plan(chosen.method, chosen.world, **_choices(chosen))
    if chosen.json:
        print(json.dumps(made.to_json(), indent=1, ensure_ascii=False))
    else:
        print(made.to_yaml() if chosen.yaml else planned(made))
    return 0


def _list(chosen: argparse.Namespace) -> int:
    from panoply import registry
    from panoply.parts import SLOTS
    from panoply.report.text import listed, listed_parts

    for plugin in chosen.plugins:
        registry.load_plugin(plugin)
    found = registry.entries()
    if chosen.what == "parts":
        parts = {slot: sorted(registry.parts(slot)) for slot in SLOTS}
        print(json.dumps(parts, indent=1) if chosen.json else listed_parts())
        return 0
    kinds = {"methods": ["method"], "worlds": ["world"]}.get(chosen.what)
    found = [e for e in found if kinds is None or e.kind in kinds]
    print(json.dumps([e.facts() for e in found], indent=1) if chosen.json else listed(found))
    return 0


def _show(chosen: argparse.Namespace) -> int:
    from panoply import registry
    from panoply.report.text import shown

    for plugin in chosen.plugins:
        registry.load_plugin(plugin)
    print(shown(chosen.name, chosen.preset))
    return 0


def _eval(chosen: argparse.Namespace) -> int:
    from panoply import api, registry
    from panoply.progress import bar
    from panoply.report.text import evaluated

    for plugin in chosen.plugins:
        registry.load_plugin(plugin)
    try:
        ks = [int(k) for k in chosen.k.split(",")] if chosen.k else sorted({1, chosen.attempts or 8})
    except ValueError as error:
        raise PanoplyError(f"--k takes numbers such as 1,4,16, not '{chosen.k}'.") from error
    with bar("evaluating") as watch:
        found = api.evaluate(
            chosen.source,
            chosen.world,
            problems=chosen.problems,
            attempts=max(8, *ks) if chosen.attempts is None else chosen.attempts,
            ks=ks,
            temperature=chosen.temperature,
            seed=chosen.seed,
            settings=_settings(chosen.settings),
            watch=watch,
        )
    print(json.dumps(found.to_json(), indent=1) if chosen.json else evaluated(found))
    return 0


def _sample(chosen: argparse.Namespace) -> int:
    from panoply import api

    for text in api.sample(
        chosen.source,
        chosen.prompt,
        n=chosen.n,
        temperature=chosen.temperature,
        max_tokens=chosen.max_tokens,
        seed=chosen.seed,
    ):
        print(chosen.prompt + text)
    return 0


def _runs(chosen: argparse.Namespace) -> int:
    from panoply.report.text import run_facts, runs_table
    from panoply.run import list_runs

    if not Path(chosen.folder).is_dir():
        hint = " yet: make a run with panoply train grpo" if chosen.folder == "runs" else ""
        raise PanoplyError(f"There is no folder '{chosen.folder}'{hint}.")
    found = list_runs(chosen.folder)
    print(json.dumps([run_facts(r) for r in found], indent=1) if chosen.json else runs_table(found))
    return 0


def _export(chosen: argparse.Namespace) -> int:
    from panoply import api

    folder = api.export(chosen.source, chosen.folder, which=chosen.which)
    print(f"Wrote {folder}. Open it with transformers, or: panoply sample {folder} PROMPT")
    return 0
