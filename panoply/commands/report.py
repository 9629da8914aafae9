"""`panoply report`: runs as one page that opens offline."""

from __future__ import annotations

import argparse
from pathlib import Path

from panoply.commands.parser import Commands, command
from panoply.errors import plain

EXAMPLES = """\
  panoply report runs/RUN                              one run, to report.html
  panoply report runs/*grpo* runs/*dapo* -o study.html several; seeds of one configuration become a band
  panoply report runs --pictures figures               every run below a folder; curves as PNG and SVG too"""


def add(commands: Commands) -> None:
    about = "write runs as one self-contained HTML page"
    parser = command(commands, "report", about, _report, EXAMPLES)
    option = parser.add_argument
    option("runs", nargs="+", metavar="RUN", help="run folders, or folders with runs below them")
    option(
        "-o", "--output", default="report.html", metavar="FILE", help="where to write (default report.html)"
    )
    option("--title", help="the page's heading")
    option("--pictures", metavar="DIR", help="write curves and drawings there as PNG and SVG")
    option("--metrics", metavar="A,B", help="only these metrics, in this order")


def _report(chosen: argparse.Namespace) -> int:
    from panoply.report.html import write_report
    from panoply.report.pictures import draw
    from panoply.report.study import Study

    asked = [m.strip() for m in chosen.metrics.split(",")] if chosen.metrics else None
    study = Study.of(chosen.runs, asked)
    made = write_report(study, Path(chosen.output), chosen.title)
    print(f"Wrote {made}: {study.summary()}")
    for note in study.notes:
        print(f"  {plain(note)}")
    if chosen.pictures:
        files = draw(study.experiments, study.metrics, Path(chosen.pictures), study.drawings())
        print(f"Wrote {len(files)} pictures to {chosen.pictures}")
    return 0
