"""What the commands share: the parser, and the options that several of them take."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

from panoply.errors import PanoplyError, unknown

SHORT = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"}
"""What number types are called for short."""


class Parser(argparse.ArgumentParser):
    """Errors as one sentence and exit code 2."""

    def error(self, message: str) -> NoReturn:
        if found := re.fullmatch(r"argument (\S+): invalid (int|float) value: '(.*)'", message, re.S):
            kind = {"int": "a whole number", "float": "a number"}[found[2]]
            raise PanoplyError(f"{found[1]} takes {kind}, not '{found[3]}'.")
        if found := re.fullmatch(
            r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message, re.S
        ):
            choices = [word.strip(" '") for word in found[3].split(",")]
            kind = f"value of {found[1]}" if found[1].startswith("-") else f"choice of {self.prog}"
            raise unknown(kind, found[2], choices, [w for w in choices if w == SHORT.get(found[2].lower())])
        if found := re.fullmatch(r"argument (\S+): expected (?:one|at least one) argument", message):
            raise PanoplyError(f"{found[1]} needs a value. See {self.prog} --help.")
        if found := re.fullmatch(r"the following arguments are required: (.*)", message):
            raise PanoplyError(f"{self.prog} needs {found[1].upper()}, such as {self._first_example()}")
        raise PanoplyError(f"{message[:1].upper()}{message[1:]}. See {self.prog} --help.")

    def _first_example(self) -> str:
        """The first command line below `examples:`, without what is said about it."""
        lines = (self.epilog or "").splitlines()[1:2]
        return re.split(r"\s{2,}(?=[^ ])", lines[0].rstrip().removeprefix("  "))[0] if lines else ""

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
    from panoply import extensions

    for plugin in chosen.plugins:
        extensions.load_plugin(plugin)


def add_trust(parser: Parser) -> None:
    parser.add_argument("--trust", action="store_true",
                        help="run the Python files that a run of others names; read them first")  # fmt: skip


def add_which(parser: Parser, of: str = "of a run") -> None:
    parser.add_argument("--which", metavar="best|last|N", help=f"the checkpoint {of}: the best on held-out "
                        "problems (the default), the last, or that of step N")  # fmt: skip


def add_machine(parser: Parser) -> None:
    parser.add_argument("--device", help="auto, cpu, cuda, cuda:1 …")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"],
                        help="of weights and products: float32 (the default), or half of it, several times as fast on "
                        "a GPU")  # fmt: skip
    parser.add_argument("--threads", type=int, help="CPU threads; a run stores how many it had")


def add_context(parser: Parser) -> None:
    parser.add_argument("--context", metavar="TOKENS", type=int, help="the longest sequence, of models that can be "
                        "opened for longer ones (longrope); by default the run's, or what it was made for")  # fmt: skip


def add_stop(parser: Parser) -> None:
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="text that ends a turn, and stays "
                        "in it; may be given again (default: what a run was trained with)")  # fmt: skip


def add_cluster(parser: Parser) -> None:
    parser.add_argument("--cluster", metavar="WHERE", help="make runs on a Ray cluster: auto (the one this machine is "
                        "in), ray://HOST:PORT, or local (one that is started here)")  # fmt: skip


def machine(chosen: argparse.Namespace) -> dict[str, Any]:
    """Where to compute, as far as it was said."""
    found = {name: getattr(chosen, name, None) for name in ("device", "dtype", "threads", "context")}
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
