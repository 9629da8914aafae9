"""`panoply ui`: runs, the catalogue and every recorded decision in a browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from panoply.commands.parser import Commands, command
from panoply.errors import PanoplyError, needs_extra

EXAMPLES = """\
  panoply ui                             look at ./runs in a browser
  panoply ui results/runs --port 9000    another folder, another port
  panoply ui --no-open                   only print the address"""


def add(commands: Commands) -> None:
    about = "look at runs and decisions in a browser, on this machine only"
    parser = command(commands, "ui", about, _ui, EXAMPLES)
    option = parser.add_argument
    option("folder", nargs="?", default="runs", help="the runs folder (default runs); it is only read")
    option(
        "--port", type=int, default=8642, help="where to listen; another is taken where this one is in use"
    )
    option("--results", default="results", metavar="DIR", help="where measured claims lie (default results)")
    option("--no-open", action="store_true", help="do not open a browser")


def _ui(chosen: argparse.Namespace) -> int:
    if not 0 <= chosen.port <= 65535:
        raise PanoplyError(f"--port takes a number from 0 to 65535, not {chosen.port}.")
    try:
        from panoply.ui.server import Serving
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise needs_extra(str(error.name), "ui", "panoply ui") from error

    def ready(address: str) -> None:
        import webbrowser

        print(
            f"Panoply is at {address}\nIt reads {chosen.folder} and answers this machine only. Ctrl-C ends it.",
            flush=True,
        )
        if not chosen.no_open:
            webbrowser.open(address)

    Serving(chosen.folder, results=Path(chosen.results), port=chosen.port).serve_until_stopped(ready)
    return 0
