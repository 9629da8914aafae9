"""What the commands share: the parser, and the options that several of them take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

from panoply.errors import PanoplyError


class Parser(argparse.ArgumentParser):
    """Errors as one sentence and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise PanoplyError(f"{message[:1].upper()}{message[1:]}. See {self.prog} --help.")

    def options(self) -> list[str]:
        return [word for action in self._actions for word in action.option_strings if word.startswith("--")]


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
Run = Callable[[argparse.Namespace], int]


def command(commands: Commands, name: str, about: str, run: Run, examples: str) -> Parser:
    """A parser for `panoply NAME`, which calls `run` with what was chosen; its result is the exit code."""
    made = commands.add_parser(
        name,
        help=about,
        description=about,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.set_defaults(run_command=run, parser=made)
    return made


def add_plugins(parser: Parser) -> None:
    parser.add_argument("--plugin", action="append", default=[], metavar="FILE.py", dest="plugins",
                        help="a file that registers parts, methods or worlds")  # fmt: skip


def load_plugins(chosen: argparse.Namespace) -> None:
    from panoply import registry

    for plugin in chosen.plugins:
        registry.load_plugin(plugin)


def add_machine(parser: Parser) -> None:
    parser.add_argument("--device", help="auto, cpu, cuda, cuda:1 …")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, help="CPU threads; a run stores how many it had")


def machine(chosen: argparse.Namespace) -> dict[str, Any]:
    """Where to compute, as far as it was said."""
    found = {name: getattr(chosen, name) for name in ("device", "dtype", "threads")}
    return {name: value for name, value in found.items() if value is not None}


def add_json(parser: Parser, what: str = "JSON") -> None:
    parser.add_argument("--json", action="store_true", help=f"print {what}")


def settings(words: Sequence[str]) -> dict[str, str]:
    """`--set PATH=VALUE` words as a mapping."""
    found = {}
    for word in words:
        path, separator, value = word.partition("=")
        if not separator or not path or not value:
            raise PanoplyError(f"--set takes PATH=VALUE, not '{word}'.")
        found[path.strip()] = value.strip()
    return found
