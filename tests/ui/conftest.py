"""Runs made by real, tiny trainings, a server over them, and a browser; each once a session."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ui import make_episodes
from panoply import api
from panoply.progress import Progress

SMALL = {
    "sample.prompts": 4,
    "sample.group": 4,
    "run.held_out": 8,
    "run.episodes_every": 1,
    "run.evaluate_every": 1,
    "update.epochs": 2,
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one experiment, another, a nested one, a cached one, and what is no run."""
    root = tmp_path_factory.mktemp("index") / "runs"
    quiet = Progress()
    for seed in (0, 1):
        api.train(
            "grpo", "tools", run=root / f"tools-s{seed}", seed=seed, steps=3, settings=SMALL, progress=quiet
        )
    settings = {**SMALL, "surrogate.low": 0.0001, "surrogate.high": 0.0001, "update.lr": 0.003}
    api.train("grpo", "chain", run=root / "chain", steps=2, settings=settings, progress=quiet)
    shutil.copytree(root / "chain", root / "recipe" / "01-chain")
    shutil.copytree(root / "chain", root / ".cache" / "abc")
    shutil.copytree(root / "chain", root / "long")
    make_episodes(root / "long", 4000)
    older = root / "older"
    older.mkdir()
    (older / "run.json").write_text(json.dumps({"panoply": "0.0.1", "plan": {"method": "grpo", "steps": 9}}))
    (older / "metrics.jsonl").write_text('{"step": 1, "score": 0.5}\n{"step": 2, "sco')
    for name, text in (("torn", '{"plan": {"met'), ("empty", ""), ("listed", "[]")):
        (root / name).mkdir()
        (root / name / "run.json").write_text(text)
    (root / "stranger").mkdir()
    (root / "stranger" / "notes.txt").write_text("not a run")
    (root / "half" / "checkpoints").mkdir(parents=True)
    (root / "half" / "lock").touch()
    secret = root.parent / "secret"
    secret.mkdir()
    for name in ("run.json", "metrics.jsonl", "episodes.jsonl"):
        shutil.copy(root / "chain" / name, secret / name)
    (root / "linked").symlink_to(secret)
    (root / "linking").mkdir()
    (root / "linking" / "run.json").symlink_to(secret / "run.json")
    return root


@pytest.fixture(scope="session")
def serving(runs: Path) -> Iterator[Any]:
    from panoply.ui.server import Serving

    made = Serving(runs, port=0)
    up = threading.Event()
    thread = threading.Thread(target=made.serve_until_stopped, args=(lambda _: up.set(),))
    thread.start()
    assert up.wait(20)
    yield made
    made.should_exit = True
    thread.join(10)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is installed")
    with sync_api.sync_playwright() as play:
        made = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def page(browser: Any, serving: Any) -> Iterator[Any]:
    """The start page, opened with its token. An error in a script fails the test."""
    made = browser.new_page(viewport={"width": 1400, "height": 900})
    made.set_default_timeout(30_000)
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    made.goto(serving.address)
    yield made
    made.close()
    assert problems == []
