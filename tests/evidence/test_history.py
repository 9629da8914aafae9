"""Every earlier verdict stays beside the newest, with what was asked differently since."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from panoply.evidence import catalogue, trials
from panoply.evidence.history import commit

FACTS: dict[str, Any] = {
    "id": "gigpo@1",
    "kind": "learns",
    "says": "It is better.",
    "world": "keydoor",
    "metric": "area",
    "budget": {"episodes": 256.0},
    "tuning": {"grid": {"update.lr": (1e-3,)}},
    "verdict": "holds",
    "difference": 0.1,
    "interval": [0.05, 0.2],
    "seeds": 5,
    "date": "2026-01-01",
    "commit": "abc1234",
}


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "gigpo.json").read_text())
    return found


def test_verdicts_are_added_and_never_replaced(tmp_path: Path) -> None:
    trials.store_result(FACTS, tmp_path)
    assert "history" not in read(tmp_path)
    trials.store_result({**FACTS, "verdict": "fails", "seeds": 10, "date": "2026-01-02"}, tmp_path)
    wider = {"budget": {"episodes": 512.0}, "tuning": {"grid": {"update.lr": (1e-3, 1e-2)}}}
    trials.store_result({**FACTS, **wider, "date": "2026-01-03"}, tmp_path)
    first, second = read(tmp_path)["history"]
    assert (first["verdict"], first["date"], first["commit"], first["seeds"]) == (
        "holds",
        "2026-01-01",
        "abc1234",
        5,
    )
    assert first["asked differently since"] == []
    assert (second["verdict"], second["date"]) == ("fails", "2026-01-02")
    assert second["asked differently since"] == ["budget", "tuning grid"]


def test_a_broken_file_costs_neither_the_result_nor_itself(tmp_path: Path) -> None:
    (tmp_path / "gigpo.json").write_text("{")
    trials.store_result(FACTS, tmp_path)
    assert read(tmp_path)["verdict"] == "holds"
    assert (tmp_path / "gigpo.json.broken").read_text() == "{"


def test_the_page_shows_them() -> None:
    past = {name: FACTS[name] for name in ("date", "metric", "difference", "interval", "seeds", "verdict")}
    assert catalogue._earlier({**past, "asked differently since": ["says"]}) == (
        "2026-01-01",
        "–",
        "holds",
        "area +0.1 (+0.05 to +0.2), 5 seeds",
        "says",
    )


def test_the_commit_that_measured(tmp_path: Path) -> None:
    package = tmp_path / "panoply"
    package.mkdir()
    assert commit(package) is None, "an installed package has none"
    (package / "a.py").write_text("x = 1\n")

    def git(*words: str) -> None:
        known = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *known, *words], check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    clean = commit(package)
    assert clean is not None
    assert len(clean) == 7
    (package / "a.py").write_text("x = 2\n")
    assert commit(package) == f"{clean}+"


@pytest.mark.parametrize("path", sorted(Path("results/claims").glob("*.json")), ids=lambda p: p.stem)
def test_stored_histories_are_in_order(path: Path) -> None:
    found = json.loads(path.read_text())
    dates = [past["date"] for past in found.get("history", ())]
    assert [*dates, found["date"]] == sorted([*dates, found["date"]])
