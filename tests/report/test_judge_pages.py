"""The page of a reward model: calibration, margins, groups, and true worth against proxy over KL."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny

import panoply as pp
from panoply import cli
from panoply.errors import PanoplyError
from panoply.evaluation.reliability import reliability
from panoply.report.curves import Experiment
from panoply.report.drawings import Drawing, _ticks
from panoply.report.judges import judge_drawings, over_optimised
from panoply.report.run_index import RunIndex
from panoply.report.study import Study
from panoply.ui.server import Answers

MARGINS, P = [2.0, -2.0, 0.1, 0.0, 5.0], [1.0, 1.0, 0.75, 1.0, 1.0]
WHO = {"annotator": ["bo", "ann", "ann", "bo", "10"], "domain": [""] * 5}


def sure(margin: float) -> float:
    return 1 / (1 + math.exp(-abs(margin)))


def test_calibration_by_hand() -> None:
    """σ(2) = 0.881 is right once of two times; 0.1 with p = ¾ and a margin of 0, right by half, are one bin."""
    found = reliability(MARGINS, P, WHO)
    near = [sure(0.1), 0.5]
    wanted = [(sum(near) / 2, (0.75 + 0.5) / 2, 2), (sure(2), 0.5, 2), (sure(5), 1.0, 1)]
    assert [tuple(b.values()) for b in found["calibration"]] == [pytest.approx(w, rel=1e-12) for w in wanted]
    error = sum(pairs * abs(said - right) for said, right, pairs in wanted) / 5
    assert found["error"] == pytest.approx(error, rel=1e-12)
    assert sum(found["margins"]["counts"]) == 5
    assert (found["margins"]["widest"], found["margins"]["mean"]) == (5.0, pytest.approx(1.02))
    assert found["groups"] == {
        "annotator": {
            "10": {"accuracy": 1.0, "pairs": 1},
            "ann": {"accuracy": 0.375, "pairs": 2},
            "bo": {"accuracy": 0.75, "pairs": 2},
        }
    }, "one domain alone is no group"


def test_it_does_not_matter_which_answer_stands_first() -> None:
    turned = reliability([-m for m in MARGINS], [1 - p for p in P], WHO)
    plain = reliability(MARGINS, P, WHO)
    assert turned["error"] == pytest.approx(plain["error"], rel=1e-12)
    assert turned["groups"] == plain["groups"]


def test_of_many_groups_the_largest_are_kept_in_their_order() -> None:
    names = [str(i) for i in range(30) for _ in range(1 + (i % 2))]
    found = reliability([1.0] * len(names), [1.0] * len(names), {"level": names})["groups"]["level"]
    assert len(found) == 20
    assert list(found) == sorted(found, key=int)
    assert {str(i) for i in range(1, 30, 2)} <= set(found)


# ------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model that has seen two steps of answers of two groups of people."""
    folder = tmp_path_factory.mktemp("judges") / "runs" / "judge"
    settings = {
        "data": "preferences",
        "data.batch": 16,
        "data.annotators": 2,
        "world.groups": ((1.0, 2.0, 0.0, 0.0), (1.0, -2.0, 0.0, 0.0)),
        "run.held_out": 32,
        "run.device": "cpu",
    }
    tiny.bare(folder, "reward-model", world="strings", settings=settings, steps=2)
    return folder


def test_a_run_keeps_what_its_page_shows(judge: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = json.loads((judge / "result.json").read_text())["after"]["reliability"]
    assert after["pairs"] == 32
    assert set(after["groups"]["annotator"]) == {"group 0", "group 1"}
    assert set(after["groups"]) == {"annotator", "level"}
    drawn = [d.title for _, d in Study.of([str(judge)]).drawings()]
    assert drawn == ["calibration", "margins", "accuracy by level", "accuracy by annotator"]
    found = pp.evaluate(str(judge), problems=64, seed=3)
    assert found.problems == found.reliability["pairs"] == 64
    assert "calibration error" in str(found)
    with pytest.raises(PanoplyError, match="k and temperature have no effect on pairs"):
        pp.evaluate(str(judge), temperature=0.5)
    with pytest.raises(SystemExit):
        cli.main(["eval", str(judge), "--world", "copies", "--problems", "4"])
    assert "preferences needs a world with 'prefer', and copies has none" in capsys.readouterr().err


def test_report_and_page_draw_it(judge: Path, tmp_path: Path) -> None:
    from panoply.report.html import render
    from panoply.report.pictures import draw

    study = Study.of([str(judge)])
    page = render(study)
    assert page.count('<svg class="drawn"') == 4
    assert "Reward models" in page
    given = Answers(RunIndex(judge.parent)).run({"run": "judge"})["drawings"]
    assert [d["title"] for d in given] == [d.title for _, d in study.drawings()]
    assert {s[0] for d in given for s in d["shapes"]} <= {"line", "polyline", "circle", "rect", "text"}
    json.dumps(given, allow_nan=False)
    pytest.importorskip("matplotlib")
    files = draw(study.experiments, [], tmp_path, study.drawings()[:1])
    assert [f.name for f in files] == ["calibration-judge.png", "calibration-judge.svg"]


def test_a_reward_model_goes_on_from_another(judge: Path, tmp_path: Path) -> None:
    """It begins with what the other said, resumes bit for bit where that has gone, and writes no answers."""
    begun = shutil.copytree(judge, tmp_path / "begun")
    settings = {"data": "preferences", "data.batch": 8, "run.held_out": 32, "run.device": "cpu"}
    settings |= {"run.checkpoint_every": 1}
    how: dict[str, Any] = {"world": "strings", "settings": settings, "model": str(begun)}
    whole = tiny.bare(tmp_path / "whole", "reward-model", steps=2, **how)
    first = json.loads((whole.run / "result.json").read_text())["before"]
    assert first["reliability"]["margins"]["widest"] != 1.0, "margins are not 0, as those of a new head are"
    half = tiny.bare(tmp_path / "half", "reward-model", steps=2, **how)
    shutil.rmtree(max((half.run / "checkpoints").glob("step-*2")))
    (half.run / "result.json").unlink()
    shutil.rmtree(begun)
    again = tiny.resume(half.run)
    prints = [json.loads((d.run / "result.json").read_text())["fingerprint"] for d in (whole, again)]
    assert prints[0] == prints[1]
    own = {**how, "model": str(judge), "settings": {**settings, "data.answers": "start", "data.pairs": 4}}
    with pytest.raises(
        PanoplyError, match="a reward model, which judges answers and writes none: the answers"
    ):
        tiny.bare(tmp_path / "own", "reward-model", steps=1, **own)
    with pytest.raises(PanoplyError, match="writes none: earn what it says with --reward-model"):
        tiny.bare(tmp_path / "policy", "grpo", steps=1, world="strings", model=str(judge))


@pytest.mark.parametrize(
    "after",
    [None, 3, {}, {"reliability": 3}, {"reliability": {"pairs": "x"}}, {"reliability": {}},
     {"reliability": {**reliability(MARGINS, P, WHO), "error": math.inf}},
     {"reliability": {**reliability(MARGINS, P, WHO), "calibration": [{"said": "<b>", "right": 0, "pairs": 0}]}},
     {"reliability": {**reliability(MARGINS, P, WHO), "groups": {"a": {"b": None}}}}],
)  # fmt: skip
def test_nonsense_of_others_is_not_drawn(after: Any) -> None:
    assert judge_drawings({"after": after}) == []
    assert judge_drawings(None) == []


def test_names_of_others_stay_text() -> None:
    found = reliability([1.0, -1.0], [1.0, 1.0], {"annotator": ["<script>", "b"]})
    drawn = judge_drawings({"after": {"reliability": found}})
    assert "<script>" not in "".join(d.svg() for d in drawn)
    assert "&lt;script&gt;" in "".join(d.svg() for d in drawn)


# ------------------------------------------------------------------ over-optimisation


PLAN = {
    "method": {"reward": {"part": "reward.minus_kl", "reward": {"part": "reward.signal", "name": "model"}}}
}


def rows(n: int, **more: Any) -> list[dict[str, Any]]:
    """True worth rises to step 4 and falls; the proxy rises on; and before them, what was measured before the first."""
    made = [
        {
            "step": i,
            "true": 1 - abs(i - 4) / 10,
            "model": float(i),
            "from_reference": i / 5,
            "episode_length": 5.0,
        }
        for i in range(1, n + 1)
    ]
    return [{"step": 0, "held_out_sampled": 0.2}, *({**row, **more} for row in made)]


def drawn(plan: Any, *each: list[dict[str, Any]]) -> Drawing | None:
    return over_optimised(plan, Experiment("e", tuple(map(str, range(len(each)))), each))


def test_true_worth_against_proxy_over_kl() -> None:
    found = drawn(PLAN, rows(9))
    assert found is not None
    assert found.note == "true is highest, 1.000, at KL 4, 0.500 in the end; model is dashed"
    assert found.x.startswith("KL to the start")
    assert found.right == "model"
    (dot,) = [at for tag, at, _ in found.shapes if tag == "circle"]
    assert dot["cx"] == found._x(4.0)
    (said, worth) = [at["points"].split() for tag, at, _ in found.shapes if tag == "polyline"]
    assert len(said) == len(worth) == 9
    both = drawn(PLAN, rows(9), rows(9, true=0.2))
    assert both is not None
    assert "0.600, at KL 4" in both.note, "the mean over seeds"


def test_without_a_reference_steps_stand_in_its_place() -> None:
    bare = [{k: v for k, v in row.items() if k != "from_reference"} for row in rows(9)]
    found = drawn(PLAN, bare)
    assert found is not None
    assert "at step 4" in found.note
    assert found.x.startswith("step")


def test_long_runs_are_drawn_in_stretches() -> None:
    found = drawn(PLAN, rows(90))
    assert found is not None
    assert {len(at["points"].split()) for tag, at, _ in found.shapes if tag == "polyline"} == {30}


@pytest.mark.parametrize(
    "plan",
    [
        {"method": {"reward": {"part": "reward.signal", "name": "true"}}},
        {"method": {"reward": {"part": "reward.signal", "name": "proxy"}}},
        {"method": "grpo", "world": "chain"},
        {},
    ],
)
def test_rewards_that_stand_for_nothing_else_are_not_drawn(plan: Any) -> None:
    assert drawn(plan, rows(9)) is None


def test_of_own_data_success_is_no_true_worth() -> None:
    own = [{("success" if k == "true" else k): v for k, v in row.items()} for row in rows(9)]
    assert drawn(PLAN, own) is not None
    assert drawn({**PLAN, "world": {"id": "jsonl@1"}}, own) is None


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        ((0.0, 1.0), [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ((-2.6, 2.6), [-2, 0, 2]),
        ((3.0, 3.0), [3]),
        ((0, 84), [0, 20, 40, 60, 80]),
    ],
)
def test_ticks_are_round(scale: tuple[float, float], ticks: list[float]) -> None:
    assert _ticks(scale) == pytest.approx(ticks)
