"""What files and models say is shown by a terminal, and never obeyed by it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kit
import pytest

from panoply import api, progress
from panoply.cli import main
from panoply.errors import plain
from panoply.evaluation.held_out import Evaluation
from panoply.evidence import pool
from panoply.report.layout import table
from panoply.report.text import evaluated

BELL = "\x1b]0;mine\x07\x9b2J\u202edrow\ud800"
SHOWN = r"\x1b]0;mine\x07\x9b2J\u202edrow\ud800"


def test_everything_a_terminal_might_act_on_is_written_out() -> None:
    assert plain(f"π · {BELL}") == f"π · {SHOWN}"
    assert plain("a\nb\tc\r") == r"a\nb\tc\r"
    assert plain("a\nb\tc\r", lines=True) == "a\nb\tc" + r"\r"


def safe(text: str) -> bool:
    return bool(text) and all(c.isprintable() or c in "\n\t" for c in text)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A run whose every word is hostile, beside one that cannot be read."""
    words = BELL.encode("utf-8", "replace").decode()
    plan = {"method": {"id": words}, "world": {"id": words}, "run": {"seed": 0, "steps": 1}}
    for name, config in (
        ("run", {"plan": plan, "panoply": words, "command": words}),
        (f"bad{SHOWN[:4]}", []),
    ):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text(json.dumps(config))
    (tmp_path / "runs" / "run" / "metrics.jsonl").write_text(json.dumps({"step": 1, words: 1.0}) + "\n")
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["runs", "RUNS"], 0),
        (["report", "RUNS", "-o", "OUT"], 0),
        (["report", "RUNS", "-o", "OUT", "--metrics", "x"], 2),
        (["eval", "RUNS/run"], 2),
        (["export", "RUNS/run", "OUT"], 2),
        (["train", "--resume", "RUNS/run"], 2),
        (["show", BELL[:12]], 2),
        (["plan", "grpo", "--set", f"{BELL[:12]}=1"], 2),
    ],
)
def test_commands_print_no_escapes(
    words: list[str], code: int, hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [w.replace("RUNS", str(hostile)).replace("OUT", str(tmp_path / "out.html")) for w in words]
    with pytest.raises(SystemExit) as end:
        main(said)
    out, err = capsys.readouterr()
    assert end.value.code == code, err
    assert safe(out + err), out + err


def test_what_a_model_writes_is_printed_safely(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(api, "sample", lambda *_, **__: [BELL])
    with pytest.raises(SystemExit):
        main(["sample", "somewhere", "a\nprompt"])
    assert capsys.readouterr().out == f"a\nprompt{SHOWN}\n"
    found = Evaluation(1, {"greedy": 1.0}, samples=[BELL])
    assert safe(evaluated(found))
    assert safe(table([(BELL, "a\nb", BELL)]))


def test_progress_is_safe(capsys: pytest.CaptureFixture[str]) -> None:
    progress.Lines().say(BELL)
    progress.Panel().say(BELL)
    pool.Lines().say(BELL)
    pool.Bars().say(BELL)
    assert capsys.readouterr().err == f"{SHOWN}\n" * 4


def test_the_live_panel_is_safe() -> None:
    decode: Any = SimpleNamespace(decode=lambda policy: lambda tokens: BELL)
    experience = kit.hand(episode=[0], **{"signal:success": [1.0]})
    job: Any = SimpleNamespace(kind=decode, policy=None)
    assert progress.answers(job, experience) == [(True, SHOWN)]
