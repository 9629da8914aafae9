"""What the page is told, also about runs in a bad state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from panoply.errors import PanoplyError
from panoply.report.run_index import RunIndex
from panoply.ui.server import Answers, free_port


@pytest.fixture(scope="module")
def answers(runs: Path) -> Answers:
    return Answers(RunIndex(runs))


def test_runs_are_listed_with_what_is_wrong_with_them(answers: Answers) -> None:
    told = answers.runs({})
    found = {r["id"]: r for r in told["runs"]}
    good = {"tools-s0", "tools-s1", "chain", "recipe/01-chain", "older", "long"}
    assert set(found) == good | {"torn", "empty", "listed", "linking"}
    assert found["tools-s1"]["seed"] == 1
    assert found["tools-s0"]["status"] == "finished"
    assert found["tools-s0"]["group"] == found["tools-s1"]["group"] != found["chain"]["group"]
    assert (found["tools-s0"]["step"], found["tools-s0"]["of"]) == (3, 3)
    assert 0 <= found["tools-s0"]["after"] <= 1
    assert found["torn"]["problem"].startswith("run.json of 'torn' is not valid JSON: ")
    assert (
        found["listed"]["problem"] == "run.json of 'listed' cannot be used: it is an object, not a list of 0."
    )
    assert told["strangers"] == ["half", "stranger"]
    assert told["metrics"][0] == "held_out_sampled"


def test_what_the_page_has_already_is_not_sent_again(answers: Answers) -> None:
    stamp = answers.runs({})["stamp"]
    assert answers.runs({"stamp": stamp}) == {"stamp": stamp}
    assert "runs" in answers.runs({"stamp": stamp, "cached": "1"})


def test_cached_runs_are_shown_when_asked_for(answers: Answers) -> None:
    assert ".cache/abc" in [r["id"] for r in answers.runs({"cached": "1"})["runs"]]


def test_a_run_of_an_older_version_is_shown_as_far_as_it_goes(answers: Answers) -> None:
    told = answers.run({"run": "older"})
    assert told["facts"]["version"] == "0.0.1"
    assert (told["facts"]["step"], told["facts"]["method"], told["facts"]["status"]) == (1, None, "stopped")
    assert answers.episodes({"run": "older"}) == {"episodes": [], "unreadable": 0}
    assert answers.curves({"runs": "older", "metrics": "score"})["curves"]["score"][0]["mean"] == [0.5]


def test_seeds_are_drawn_together_or_apart(answers: Answers) -> None:
    asked = {"runs": "tools-s0\ntools-s1\nchain", "metrics": "reward,calls"}
    together = answers.curves(asked)["curves"]
    assert [(c["label"], len(c["runs"])) for c in together["reward"]] == [
        ("grpo · tools", 2),
        ("grpo · chain", 1),
    ]
    assert together["calls"][1]["x"] == []
    apart = answers.curves({**asked, "together": "0"})["curves"]["reward"]
    assert len(apart) == 3
    assert apart[1]["label"].endswith("seed 1")
    mean = together["reward"][0]["mean"]
    assert mean == pytest.approx(
        [(a + b) / 2 for a, b in zip(apart[0]["mean"], apart[1]["mean"], strict=True)], rel=1e-4
    )


def test_differences_in_configuration(answers: Answers) -> None:
    told = answers.compare({"runs": "tools-s0\ntools-s1\nchain"})
    assert told["labels"] == ["grpo · tools", "grpo · chain"]
    assert ("update.lr", ["0.0003", "0.003"]) in told["rows"]
    assert "run.seed" not in dict(told["rows"])


def test_an_episode_with_its_gates(answers: Answers) -> None:
    rows = answers.episodes({"run": "chain"})["episodes"]
    gated = next(r for r in rows if r["gated"])
    line = answers.episode({"run": "chain", "at": str(gated["at"])})
    assert isinstance(line, bytes)  # passed on as it was recorded
    record = json.loads(line)
    assert {"advantage", "ratio", "entropy", "reward", "logp", "pieces"} <= set(record)
    assert set(record["gates"]) <= {"surrogate.clip:clip_high", "surrogate.clip:clip_low"}
    assert all(0 <= r["surprise"] <= 1 for r in rows)


@pytest.mark.parametrize("at", ["1", "-1", "x", "99999999", "", "9" * 20, "9" * 5000, "٠", "1e9", "0x0"])
def test_only_whole_lines_are_episodes(answers: Answers, at: str) -> None:
    with pytest.raises(Exception, match="no such episode"):
        answers.episode({"run": "chain", "at": at})


def test_bad_questions_get_a_sentence(answers: Answers) -> None:
    with pytest.raises(PanoplyError, match="not over 'weeks'"):
        answers.curves({"runs": "chain", "x": "weeks", "metrics": "reward"})
    for word in ("nan", "1e999", "-inf", "9" * 5000, "x"):
        answers.curves({"runs": "chain", "metrics": "reward", "smooth": word})
    with pytest.raises(PanoplyError, match="no run 'nowhere' here"):
        answers.episodes({"run": "nowhere"})


def test_the_catalogue_shows_stored_claims(tmp_path: Path, runs: Path) -> None:
    claims = tmp_path / "claims"
    claims.mkdir()
    text = (
        '{"id": "dapo@1", "verdict": "holds", "difference": 0.1, "interval": [0.02, 0.2], "seeds": 5, "x": 1, '
        '"curves": {"dapo": [[[0.0, 0.25], [64.0, 0.5]], [[0.0, 0.75], [64.0, 1.0]]]}}'
    )
    (claims / "dapo.json").write_text(text)
    (claims / "torn.json").write_text('{"id": ')
    answers = Answers(RunIndex(runs), tmp_path)
    works = {w["id"]: w for w in answers.works({})["works"]}
    shown = {"id": "dapo@1", "verdict": "holds", "difference": 0.1, "interval": [0.02, 0.2], "seeds": 5}
    assert works["dapo@1"]["claims"] == [shown]
    assert works["grpo@1"]["claims"] == []
    dapo = answers.work({"id": "dapo@1"})
    (drawn,) = dapo["claims"][0]["curves"]
    assert (drawn["x"], drawn["mean"], drawn["high"]) == ([0, 64], [0.5, 0.75], [0.75, 1.0])
    assert dapo["base"] == "grpo"
    assert any("clip" in line for line in dapo["equation"])
    assert any(path.startswith("surrogate") for path, _, _ in dapo["changes"])
    with pytest.raises(Exception, match="no such work"):
        answers.work({"id": "nothing@1"})


def test_a_port_in_use_is_replaced() -> None:
    first = free_port(0)
    first.listen()
    second = free_port(first.getsockname()[1])
    assert second.getsockname()[1] != first.getsockname()[1]
    first.close()
    second.close()


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(PanoplyError, match="There is no folder"):
        RunIndex(tmp_path / "runs")
