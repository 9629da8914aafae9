"""`panoply export`: a model as a Hugging Face folder."""

from __future__ import annotations

import argparse

from panoply.commands.parser import Commands, command

EXAMPLES = """\
  panoply export runs/RUN my-model               a folder that transformers opens
  panoply export runs/RUN my-model --which last"""


def add(commands: Commands) -> None:
    about = "write a run's model as a Hugging Face folder"
    parser = command(commands, "export", about, _export, EXAMPLES)
    parser.add_argument("source", metavar="RUN")
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--which", choices=["best", "last"], default="best")


def _export(chosen: argparse.Namespace) -> int:
    from panoply import api

    folder = api.export(chosen.source, chosen.folder, which=chosen.which)
    print(f"Wrote {folder}. Open it with transformers, or: panoply sample {folder} PROMPT")
    return 0
