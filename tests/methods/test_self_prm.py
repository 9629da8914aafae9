"""Self-PRM: how judging and choosing are measured, on policies that follow a rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import bare

from panoply.errors import PanoplyError
from panoply.evaluation import judged
from panoply.methods.reasoning_data import self_prm
from panoply.run import Run
from panoply.worlds.text.proofread import Proofread

WORLD = Proofread(operations=2, levels=(0, 2))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Answers by a rule: what is asked is kept, `solve` and `check` say what is answered the i-th time."""
    how: dict[str, Any] = {"asked": []}

    def said(world: Any, policy: Any, tasks: Any, times: int, seed: int, temperature: float) -> Any:
        how["asked"] += [(world._text(t.prompt), times, temperature) for t in tasks]
        rule = [how["check" if "trace" in t.data else "solve"] for t in tasks]
        return [[world._tokens(f(t, i)) for i in range(times)] for t, f in zip(tasks, rule, strict=True)]

    monkeypatch.setattr(self_prm, "said", said)
    return how


def trace(task: Any, add: int = 0) -> str:
    right = WORLD._trace(task.data["problem"])
    return right[:-1] + str((int(right[-1]) + add) % 10) + "$"


def test_judging_never_sees_what_is_right(scripted: dict[str, Any]) -> None:
    scripted["check"] = lambda task, i: f"{task.data['first'] or '.'}$"
    found, right = self_prm.judging(WORLD, None, 50)  # type: ignore[arg-type]
    assert found.f1 == 1
    assert all(right)
    for prompt, times, temperature in scripted["asked"]:
        assert (times, temperature) == (1, 0.0)
        assert prompt.count(";") == 1
        assert len(prompt) == 1 + 6 + 6 + 1, "a problem and a solution, no more"
    scripted["check"] = lambda task, i: ".$"
    assert self_prm.judging(WORLD, None, 50)[0].f1 == 0  # type: ignore[arg-type]


def test_a_minority_that_is_accepted_wins(scripted: dict[str, Any]) -> None:
    """One of four answers is right, two end on the same wrong digit: the majority errs, a perfect judge does not."""
    scripted["solve"] = lambda task, i: trace(task, (1, 0, 1, 2)[i % 4])
    scripted["check"] = lambda task, i: f"{task.data['first'] or '.'}$"
    chosen = self_prm.choosing(WORLD, None, 6, 4)  # type: ignore[arg-type]
    assert chosen.right == [[False, True, False, False]] * 6
    assert chosen.votes == [[0.0, 1.0, 0.0, 0.0]] * 6
    assert chosen.accuracy("one", 4) == 0.25
    assert chosen.accuracy("majority", 4) == 0
    assert chosen.accuracy("self", 4) == chosen.accuracy("votes", 4) == 1
    assert chosen.accuracy("self", 1) == 0, "the first alone is wrong, and all there is"
    assert all(of.precision == 1 for of in chosen.by_level().values())
    assert 0 <= chosen.accuracy("chance", 4) < 1


def test_a_judge_that_accepts_nothing_leaves_the_majority(scripted: dict[str, Any]) -> None:
    scripted["solve"] = lambda task, i: trace(task, 0 if i < 3 else 1)
    scripted["check"] = lambda task, i: "1$"
    chosen = self_prm.choosing(WORLD, None, 4, 4)  # type: ignore[arg-type]
    assert chosen.votes == [[0.0] * 4] * 4
    assert chosen.accuracy("self", 4) == chosen.accuracy("majority", 4) == 1


def test_votes_are_shares_of_several_verdicts_and_odd_answers_are_never_asked_about(
    scripted: dict[str, Any],
) -> None:
    scripted["solve"] = lambda task, i: trace(task) if i else "77$"
    scripted["check"] = lambda task, i: (".$", ".$", "1$", "$")[i]
    chosen = self_prm.choosing(WORLD, None, 2, 2, votes=4)  # type: ignore[arg-type]
    assert chosen.votes == [[0.0, 0.5]] * 2
    assert chosen.accepted(0) == [False, False], "half of the verdicts is no majority"
    assert chosen.ends[0][0] == "7"
    checks = [asked for asked in scripted["asked"] if asked[0].startswith("?")]
    assert len(checks) == 2
    assert checks[0][1:] == (4, 1.0)


def test_a_run_is_judged_at_every_checkpoint_and_other_worlds_are_refused(tmp_path: Path) -> None:
    settings = {"sample.prompts": 2, "sample.group": 4, "run.held_out": 8, "run.evaluate_every": 0}
    trained = bare(tmp_path / "run", "grpo", world="proofread", steps=1, settings=settings)
    found = judged.judge(Run.open(trained.run), "self-prm", {"problems": "30", "answers": "4"})
    assert {"step 1", "of 4", "level 0"} <= found.keys()
    assert set(found["step 1"]) == {"solved", "F1", "erroneous", "sound", "odds ratio", "chi²"}
    other = bare(tmp_path / "other", "grpo", world="chain", steps=1, settings=settings)
    with pytest.raises(PanoplyError, match="no question for the first wrong step"):
        judged.judge(Run.open(other.run), "self-prm")


def test_a_judge_that_raises_gives_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"sample.prompts": 2, "sample.group": 4, "run.held_out": 8, "run.evaluate_every": 0}
    trained = bare(tmp_path / "run", "grpo", world="proofread", steps=1, settings=settings)

    def broken(*given: Any, **more: Any) -> Any:
        raise RuntimeError("the judge is ill")

    monkeypatch.setattr(Proofread, "located", broken)
    with pytest.raises(
        PanoplyError, match="self-prm cannot be computed with that: RuntimeError: the judge is ill"
    ):
        judged.judge(Run.open(trained.run), "self-prm", {"problems": "30"})
