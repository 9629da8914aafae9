"""The report: from run folders in whatever state to one page."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from panoply.cli import main
from panoply.errors import PanoplyError
from panoply.report.episodes import Index, readable, summary
from panoply.report.html import render
from panoply.report.run_index import RunIndex
from panoply.report.study import Study

EPISODE = {
    "step": 2,
    "episode": 7,
    "group": 3,
    "task": 2**60 + 1,
    "text": "ab>cd",
    "pieces": ["a", "b", "</script>", "c", "d"],
    "tokens": [1, 2, 3, 4, 5],
    "position": [3, 4],
    "turn": [0, 0],
    "logp": [-1.0, -3.0],
    "reward": [0.0, 1.0],
    "advantage": [0.5, -0.5],
    "ratio": [1.3, 1.0],
    "gates": {"surrogate.clip:clip_high": [0]},
}


def run(
    root: Path, name: str, *, seed: int = 0, method: str = "grpo@1", steps: int = 2, **metric: float
) -> Path:
    """A run folder written by hand."""
    folder = root / name
    folder.mkdir(parents=True)
    plan = {"method": {"id": method}, "world": {"id": "chain@1"}, "run": {"seed": seed, "steps": 2}}
    config = {"panoply": "9", "created": "2026-01-01T00:00:00", "plan": plan}
    (folder / "run.json").write_text(json.dumps(config))
    rows = [{"step": i + 1, "seconds": 1.0, "reward": 0.25 * (i + seed), **metric} for i in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if steps:
        (folder / "episodes.jsonl").write_text(json.dumps(EPISODE) + "\n")
    return folder


def data(page: str) -> dict:
    found = re.search(r'id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found.group(1))


def test_seeds_become_one_curve_with_a_band(tmp_path: Path) -> None:
    for seed in (0, 1):
        run(tmp_path, f"a{seed}", seed=seed)
    run(tmp_path, "b", method="dapo@1", extra=1.0)
    study = Study.of([str(tmp_path)])
    assert study.summary() == "3 runs, 2 experiments, 2 metrics."
    assert study.notes == ["grpo · chain does not log extra."]
    page = render(study)
    first, second = data(page)["reward"]
    assert (first["mean"], first["low"], first["high"]) == ([0.125, 0.375], [0.0, 0.25], [0.25, 0.5])
    assert second["runs"] == ["b"]
    assert "<td>grpo@1</td><td>dapo@1</td>" in page


def test_nothing_is_loaded_from_elsewhere_and_text_stays_text(tmp_path: Path) -> None:
    run(tmp_path, "<b>bold</b>")
    page = render(Study.of([str(tmp_path)]), title="<script>alert(1)</script>")
    assert "<script>alert" not in page
    assert "<b>bold" not in page
    assert "&lt;/script&gt;" in page  # what an episode said
    assert page.count("</script>") == 3
    assert not re.search(r"""(src|href)=["']""", page)


def test_an_episode_shows_its_numbers_and_gates(tmp_path: Path) -> None:
    page = render(Study.of([str(run(tmp_path, "a"))]))
    assert re.search(
        r'class="t u5 gated" title="advantage 0.5, ratio 1.3, logp -1, reward 0, surrogate.clip:clip_high">c<',
        page,
    )
    assert re.search(r'class="t d5" title="[^"]*">d<', page)


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(PanoplyError, match="There is no run folder"):
        Study.of([str(tmp_path / "nowhere")])
    (tmp_path / "foreign").mkdir()
    with pytest.raises(PanoplyError, match="is not a run, and there is none below it"):
        Study.of([str(tmp_path / "foreign")])
    run(tmp_path, "new", steps=0)
    with pytest.raises(PanoplyError, match="has finished a step yet"):
        Study.of([str(tmp_path / "new")])
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text("{")
    with pytest.raises(PanoplyError, match="run.json of 'torn' is not valid JSON"):
        Study.of([str(tmp_path / "torn")])
    run(tmp_path, "good")
    study = Study.of([str(tmp_path)])
    assert study.notes[0] == "'new' has not finished a step yet."
    assert study.notes[1].startswith("run.json of 'torn' is not valid JSON: ")
    assert len(study.notes) == 2
    with pytest.raises(PanoplyError, match="Did you mean 'reward'"):
        Study.of([str(tmp_path / "good")], ["rewards"])


def test_a_run_named_twice_counts_once(tmp_path: Path) -> None:
    folder = run(tmp_path, "a")
    assert len(Study.of([str(folder), str(tmp_path), f"{folder}/"]).members[0]) == 1


def test_the_command_writes_page_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    run(tmp_path, "a")
    output, pictures = tmp_path / "r.html", tmp_path / "pictures"
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "report",
                str(tmp_path / "a"),
                "-o",
                str(output),
                "--pictures",
                str(pictures),
                "--metrics",
                "reward",
            ]
        )
    assert ended.value.code == 0
    assert output.read_text().startswith("<!doctype html>")
    assert {p.name for p in pictures.iterdir()} == {"reward.png", "reward.svg"}
    assert (pictures / "reward.png").read_bytes()[:4] == b"\x89PNG"
    assert "1 run, 1 experiment, 1 metric." in capsys.readouterr().out


def test_pictures_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run(tmp_path, "a")
    with pytest.raises(SystemExit) as ended:
        main(
            ["report", str(tmp_path / "a"), "-o", str(tmp_path / "r.html"), "--pictures", str(tmp_path / "p")]
        )
    assert ended.value.code == 2
    assert "pip install 'panoply-rl[report]'" in capsys.readouterr().err


def test_what_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "a")
    (tmp_path / "file").touch()
    for words, said in (
        (["-o", str(tmp_path / "no" / "r.html")], "No such file or directory"),
        (["-o", str(tmp_path / "r.html"), "--pictures", str(tmp_path / "file")], "File exists"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["report", str(tmp_path / "a"), *words])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


# ------------------------------------------------------------------ episodes


def test_an_episode_of_an_older_version_is_made_readable() -> None:
    old = {
        "step": 1,
        "episode": 0,
        "text": "abc",
        "tokens": [7, 8, 9],
        "position": [2],
        "logp": [float("nan")],
    }
    found = readable(old)
    assert found["pieces"] == ["a", "b", "c"]
    assert (found["gates"], found["signals"], found["logp"]) == ({}, {}, [None])
    assert readable({**old, "text": "abcd"})["pieces"] == ["⟨7⟩", "⟨8⟩", "⟨9⟩"]
    assert readable({"step": 1, "actions": [[0.5, -1.0], [0.25, 0.0]]})["pieces"] == [
        "(0.5, -1) ",
        "(0.25, 0) ",
    ]


def test_the_summary_of_an_episode() -> None:
    found = summary(EPISODE)
    assert (found["return"], found["odd"], found["advantage"]) == (1.0, 2.0, 0.0)
    assert (found["decisions"], found["turns"], found["gated"], found["snippet"]) == (2, 1, 1, "cd")
    assert found["task"] == str(2**60 + 1)
    assert summary({})["return"] is None


def test_the_index_follows_a_growing_file(tmp_path: Path) -> None:
    folder = run(tmp_path, "a")
    index = Index(RunIndex(tmp_path), "a")
    assert [r["episode"] for r in index.rows()] == [7]
    with open(folder / "episodes.jsonl", "a") as file:
        file.write(json.dumps({**EPISODE, "episode": 8}) + '\n{"step": 3, "epis')
    rows = index.rows()
    assert [r["episode"] for r in rows] == [7, 8]
    record = index.record(rows[1]["at"])
    assert record is not None
    assert record["episode"] == 8
    assert index.record(rows[1]["at"] + 1) is None
    (folder / "episodes.jsonl").write_text(
        json.dumps({**EPISODE, "episode": 9}) + "\n"
    )  # resumed, and made anew
    assert [r["episode"] for r in index.rows()] == [9]


def test_lines_that_are_no_episodes_are_passed_over_and_counted(tmp_path: Path) -> None:
    folder = run(tmp_path, "a")
    bad: list[dict] = [
        {"step": "two"}, {"pieces": [1]}, {"position": "x"}, {"reward": [[1]]}, {"gates": []}, {"gates": {"a": ["b"]}},
        {"signals": {"s": [3]}}, {"turn": [0.5]}, {"logp": {"a": 1}}, {"group": [1]}, {"end": {"a": 1}},
        {"parent": "x"}, {"verdicts": {}}, {"verdicts": [["x", "y"]]}, {"verdicts": [[0]]}, {"node": ["x"]},
        {"ratio": "one"}, {"value": 3},
    ]  # fmt: skip
    lines = [json.dumps({**EPISODE, **change}) for change in bad]
    lines += ["[" * 9999, "[1]", json.dumps({**EPISODE, "reward": [0.0, 2.0]})]
    (folder / "episodes.jsonl").write_text("".join(line + "\n" for line in lines))
    index = Index(RunIndex(tmp_path), "a")
    assert [row["return"] for row in index.rows()] == [2]
    assert index.unreadable == len(bad) + 2
    with open(folder / "episodes.jsonl", "a") as file:
        file.write("{}\n" + json.dumps(EPISODE) + "\nnonsense\n")
    assert [row["return"] for row in index.rows()] == [2, 1]
    assert index.unreadable == len(bad) + 4


def test_turns_have_their_credit_and_what_came_of_them(tmp_path: Path) -> None:
    """In the report a line above each turn; all of it is text. A row that is not there costs nothing."""
    folder = run(tmp_path, "a")
    changed = {
        "turn": [0, 1],
        "pieces": ["a", "b", "say", "<i>output</i>", "d"],
        "position": [2, 4],
        "signals": {"<u>calls": [[0, 2.0], [99, 1.0]], "cost": [[1, 0.5], [1, 0.25]]},
        "verdicts": [[0, "<b>ran</b>"]],
        "parent": 4,
    }
    (folder / "episodes.jsonl").write_text(json.dumps({**EPISODE, **changed}) + "\n")
    page = render(Study.of([str(tmp_path)]))
    assert '<span class="turn">turn 1, advantage 0.5, &lt;u&gt;calls 2</span>' in page
    assert '<span class="turn">turn 2, advantage -0.5, reward 1, cost 0.75</span>' in page
    assert '<span class="turn">→ &lt;b&gt;ran&lt;/b&gt;</span>' in page
    assert '<span class="context output">&lt;i&gt;output&lt;/i&gt;</span>' in page
    assert "branches from episode 4: step 2" in page
    (row,) = Index(RunIndex(tmp_path), "a").rows()
    assert (row["parent"], row["nodes"]) == (4, 0)


def test_episodes_that_are_the_same_are_counted_at_the_first(tmp_path: Path) -> None:
    folder = run(tmp_path, "a")
    others: list[dict] = [{}, {"group": 4}, {}, {"tokens": [1, 2, 3, 5, 5]}, {"reward": [0.0, 0.5]}]
    records = [{**EPISODE, **change, "episode": i} for i, change in enumerate(others)]
    (folder / "episodes.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    rows = Index(RunIndex(tmp_path), "a").rows()
    assert [rows.index(next(r for r in rows if r["at"] == row["like"])) for row in rows] == [0, 1, 0, 3, 4]
    assert [row.get("count") for row in rows] == [2, 1, None, 1, 1]


def test_the_report_of_one_run_shows_what_it_was_told(tmp_path: Path) -> None:
    import tiny

    done = tiny.train(tmp_path / "run", steps=1, settings={"update.lr": 0.0123})
    config = json.loads((done.run / "run.json").read_text())
    (done.run / "run.json").write_text(json.dumps({**config, "command": "panoply train grpo --set 'x<y'"}))
    page = render(Study.of([str(done.run)]))
    for heading in ("Command", "Equation", "Changes from grpo", "Sampled episodes"):
        assert f"<h2>{heading}</h2>" in page
    assert "<pre>panoply train grpo --set &#x27;x&lt;y&#x27;</pre>" in page
    assert "maximise  " in page
    assert "<th>update.lr</th><td>1e-06</td><td>0.0123</td>" in page
    assert "<th>update.lr *</th><td>0.0123</td>" in page
    assert "<th>run.held_out *</th><td>8</td>" in page


def test_a_method_that_is_not_here_has_no_equation_and_harms_nothing(tmp_path: Path) -> None:
    page = render(Study.of([str(run(tmp_path, "a", method="elsewhere@1"))]))
    assert "<h2>Equation</h2>" not in page
    assert "All settings" in page


def test_sampled_episodes_go_from_the_highest_advantage_to_the_lowest(tmp_path: Path) -> None:
    folder = run(tmp_path, "a")
    records = [
        {**EPISODE, "episode": i, "tokens": [1, 2, 3, 4, i % 7], "advantage": [i % 7, i % 7]}
        for i in range(14)
    ]
    (folder / "episodes.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    page = render(Study.of([str(folder)]))
    shown = re.findall(
        r"of the last recorded step, 2 that are the same: step 2, return 1, advantage (\d)", page
    )
    assert shown == ["6", "3", "0"]
