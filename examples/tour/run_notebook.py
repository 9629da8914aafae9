"""Run a notebook: with jupyter where it is installed, else its cells in order, in one namespace."""

from __future__ import annotations

import importlib.util
import json
import linecache
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(file: Path, folder: Path, quick: bool = False, jupyter: bool | None = None) -> int:
    """How many cells were run. They run in `folder`; an error in one of them is raised."""
    sources = [
        "".join(cell["source"])
        for cell in json.loads(file.read_text())["cells"]
        if cell["cell_type"] == "code"
    ]
    found = all(importlib.util.find_spec(name) for name in ("nbclient", "nbformat", "ipykernel"))
    environment = {**os.environ, **({"PANOPLY_TOUR": "quick"} if quick else {})}
    if found if jupyter is None else jupyter:
        command = [sys.executable, "-m", "nbclient.cli", str(file.resolve())]
        subprocess.run(command, cwd=folder, env=environment, check=True)
    else:
        plain = [sys.executable, __file__, str(file.resolve())]
        subprocess.run(plain, cwd=folder, env=environment, check=True)
    return len(sources)


def run_cells(file: Path) -> dict[str, Any]:
    """The cells as IPython runs them: in `__main__`, and each with a source that Python can look up."""
    space = vars(sys.modules["__main__"])
    cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        source, name = "".join(cell["source"]), f"<cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), space)
    return space


if __name__ == "__main__":
    run_cells(Path(sys.argv[1]))
