"""The tour of examples/tour, as a newcomer runs it but for tiny steps; the notebook with and without jupyter."""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import tiny

TOUR = tiny.ROOT / "examples/tour"


def test_the_tour(tmp_path: Path) -> None:
    """Every station asserts what it shows."""
    pytest.importorskip("PIL")
    done = forks.run(
        [sys.executable, str(TOUR / "tour.py"), "tour", "--quick"],
        cwd=tmp_path,
        env=tiny.environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line[:2].strip().isdigit() and ": " in line]
    assert len(told) == 12, done.stdout
    assert "in 2 steps" in told[1]
    assert told[2].endswith("half-grpo differs from grpo in credit and regularise")
    assert "5 cells" in told[5]
    if importlib.util.find_spec("transformers"):
        assert "transformers says what panoply says" in told[6]
    if importlib.util.find_spec("peft"):
        assert "bytes beside a model" in told[7]
    assert "shows 5 runs" in told[9]
    assert (tmp_path / "tour/notebook-compared/comparison.json").is_file()
    assert (tmp_path / "tour/compared/comparison.json").is_file()


def test_the_notebook_with_jupyter(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    run = runpy.run_path(str(TOUR / "run_notebook.py"))["run"]
    assert run(TOUR / "notebook.ipynb", tmp_path, quick=True, jupyter=True) == 5
    assert (tmp_path / "notebook-compared/comparison.json").is_file()


def test_an_error_in_a_cell_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "bad.ipynb").write_text('{"cells": [{"cell_type": "code", "source": ["1 / 0"]}]}')
    run = runpy.run_path(str(TOUR / "run_notebook.py"))["run"]
    with pytest.raises(subprocess.CalledProcessError):
        run(tmp_path / "bad.ipynb", tmp_path, jupyter=False)


def test_the_page_names_every_station(registries: None) -> None:
    stations = runpy.run_path(str(TOUR / "tour.py"))["STATIONS"]
    page = (TOUR / "README.md").read_text()
    assert len(stations) == 12
    for station in stations:
        assert f"| {station.__name__.replace('_', ' ')} |" in page
