"""The command line: `panoply train grpo --world chain`."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TextIO

from panoply import __version__
from panoply.commands.parser import Parser
from panoply.errors import PanoplyError, machine_errors, plain, unknown
from panoply.stopping import stoppable

if TYPE_CHECKING:
    import argparse

ORDER = (
    "train",
    "plan",
    "list",
    "show",
    "run",
    "eval",
    "sample",
    "serve",
    "runs",
    "compare",
    "claim",
    "swarm",
    "report",
    "ui",
    "export",
)
"""The commands as `panoply --help` lists them; each is a file of its name in commands/."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `panoply` command."""
    _open_streams()
    try:
        with stoppable(), machine_errors():
            code = _main(_words(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except PanoplyError as error:
        code = _complain(str(error))
    except KeyboardInterrupt as error:
        _complain(str(error) or "stopped")
        code = 128 + getattr(error, "number", signal.SIGINT)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        _drop(sys.stdout)
        code = 0
    except OSError as error:
        named = isinstance(
            error.filename, str | bytes
        )  # a name the system does not allow, a folder for a file
        if not named and error.errno not in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EACCES,
            errno.EROFS,
            errno.EIO,
        ):
            raise
        where = f" ({str(error.filename)[:200]})" if named else ""
        code = _complain(f"{error.strerror}{where}.")
        _drop(sys.stdout)
    sys.exit(code)


def _open_streams() -> None:
    """What was closed before the command began leads nowhere, so that no file of a run takes its number.

    A terminal that cannot show π gets a ? and not a traceback.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _words(arguments: Sequence[str]) -> list[str]:
    for word in arguments:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise PanoplyError(
                f"'{plain(word)}' is not text in UTF-8, and a run could not store it: rename the file or folder."
            ) from error
    return list(arguments)


def _drop(stream: TextIO) -> None:
    """What is still to be written leads nowhere: Python would try again as it ends, and complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _complain(text: str) -> int:
    """Say what is wrong, where anyone listens; the code of bad input."""
    try:
        print(plain(f"panoply: {text}", lines=True), file=sys.stderr, flush=True)
    except OSError:
        _drop(sys.stderr)
    return 2


def _main(arguments: list[str]) -> int:
    parser = _parser(arguments[:1] if arguments and arguments[0] in ORDER else ORDER)
    if not arguments:
        parser.print_help()
        return 0
    if not arguments[0].startswith("-") and arguments[0] not in ORDER:
        raise unknown("command", arguments[0], ORDER)
    chosen, surplus = parser.parse_known_args(arguments)
    if surplus:
        raise _surplus(surplus[0], chosen)
    run: Callable[[argparse.Namespace], int] = chosen.run_command
    return run(chosen)


RUN_FOLDER = ("--out", "--out-dir", "--output", "--output-dir", "--output_dir", "-o")
"""What others call the folder that a run is written to."""


def _surplus(word: str, chosen: argparse.Namespace) -> PanoplyError:
    """About a word that a command does not take: what was probably meant by it."""
    command = chosen.parser
    option = word.split("=")[0]
    if option in RUN_FOLDER and "--run" in command.options():
        return PanoplyError(f"{command.prog} has no option '{option}', but --run DIR for the run's folder.")
    if option.startswith("-"):
        path = _setting(option, chosen) if "--set" in command.options() else None
        if path is not None:
            return PanoplyError(
                f"{command.prog} has no option '{option}', but a setting: --set {path}=VALUE."
            )
        return unknown(f"option of {command.prog}", option, command.options())
    if "--world" in command.options() and _is_a("world", word):
        return PanoplyError(f"{command.prog} takes a world by its option: --world {word}.")
    if "method" in chosen and _is_a("method", word):
        return PanoplyError(
            f"{command.prog} takes one method; panoply compare {chosen.method} {word} compares several."
        )
    if "=" in word and "--set" in command.options():
        return PanoplyError(f"{command.prog} takes every setting by a --set of its own: --set {word}.")
    return PanoplyError(f"{command.prog} does not take '{word}'. See {command.prog} --help.")


def _setting(option: str, chosen: argparse.Namespace) -> str | None:
    """The setting of the chosen method that an option was meant to be."""
    from panoply import compose
    from panoply.elsewhere import meant

    try:
        found = meant(compose.resolve(chosen.method).method, option)
    except (PanoplyError, AttributeError):
        return None
    return found[0] if found else None


def _is_a(kind: Literal["world", "method"], word: str) -> bool:
    from panoply import registry

    return any(word in (known.name, known.id) for known in registry.works(kind))


def _parser(names: Sequence[str] = ORDER) -> Parser:
    """The parser of some commands; a command that only looks does not wait for what others import."""
    parser = Parser(prog="panoply", description="Policy optimization in which a paper is a diff.")
    parser.add_argument("--version", action="version", version=f"panoply {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for name in names:
        importlib.import_module(f"panoply.commands.{name}").add(commands)
    return parser
