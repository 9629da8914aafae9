"""The claims that are here, each of which can be run, and the command."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pretended import DESK, Pretended

import panoply as pp
from panoply import cli, registry
from panoply.evidence import trials, verdicts
from panoply.evidence.claims import Ranks
from panoply.evidence.gates import closed, gate_of_problems
from panoply.evidence.tuning import points
from panoply.planning import Plan
from panoply.recipe_plans import RecipePlan


def claims() -> Mapping[str, Any]:
    return {e.name: (e, c) for e, c in trials.claimed(everything=True)}


def test_every_cited_work_carries_a_claim() -> None:
    """One of the forms it has here does; a world may carry one too."""
    cited = {e.paper for e in registry.entries() if e.paper is not None and e.kind != "world"}
    assert cited <= {entry.paper for entry, _ in claims().values()}
    assert all(entry.paper is not None or entry.kind == "world" for entry, _ in claims().values())


def last_of(plan: Plan | RecipePlan) -> Plan:
    """Of a recipe the stage that it ends with."""
    return plan[plan.last] if isinstance(plan, RecipePlan) else plan


def of_stages(plan: Plan | RecipePlan) -> list[str]:
    """What the stages of a recipe say of their world."""
    stages = plan.recipe.stages if isinstance(plan, RecipePlan) else ()
    return [path for stage in stages for path in stage.settings if path.startswith("world.")]


@pytest.mark.parametrize("name", sorted(claims()))
def test_a_claim_can_be_run(name: str) -> None:
    """Both sides plan, at the same budget in the same world (but for what an arm says of it), with a grid for both."""
    _, claim = claims()[name]
    assert re.fullmatch(r"[A-Z].{30,}\.", claim.says)
    if not isinstance(claim, Ranks):
        return
    entry, _ = claims()[name]
    contest = trials.contest(entry, claim, DESK)
    worded = (path for arm in contest.arms for path in (*arm.settings, *of_stages(contest.plan(arm, 0))))
    said = {path.removeprefix("world.") for path in worded}
    last = getattr(contest.plan(contest.arms[0], 0), "last", "")
    for point in points(claim.tune):
        ((_, sides),) = contest.orders([arm.but(point) for arm in contest.arms], [0])
        plans = [last_of(order.plan) for order in sides.values()]
        worlds = [{k: v for k, v in p.world_options.items() if k not in said} for p in plans]
        assert (
            len({(p.world_id, str(w), p.options.held_out) for p, w in zip(plans, worlds, strict=True)}) == 1
        )
        assert len({(p.options.episodes, p.options.decisions) for p in plans}) == 1
        chosen = {path.removeprefix(f"{last}."): value for path, value in point.items()}
        assert all(p.method.settings()[path] == value for p in plans for path, value in chosen.items())
    assert len({arm.label for arm in contest.arms}) == len(contest.arms) >= 2
    assert closed([gate_of_problems(contest)]) is None


# ------------------------------------------------------------------ the command


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["claim", *words])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gigp"], "Did you mean 'gigpo'"),
        (["grpo"], "'grpo' carries no claim"),
        (["--family", "agent"], "Did you mean 'agents'"),
        (["gigpo", "--all"], "one of the three"),
        (["gigpo", "--most", "1"], "--most must be at least 2"),
        (["gigpo", "--check"], "Nothing is stored for gigpo yet"),
        (["gigpo", "--replicate"], "Nothing is stored for gigpo yet"),
        (["gigpo", "--replicate", "--check"], "name one of the two"),
    ],
)
def test_bad_input(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(words, capsys)
    assert (code, out) == (2, "")
    assert said in err


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Pretended(monkeypatch, lambda name, rate, seed: 0.5 + 0.5 * (name == "gigpo"))
    code, out, err = run(["gigpo", "--quiet"], capsys)
    assert (code, err) == (0, "")
    assert out.startswith(
        "gigpo holds: area +0.5 (98 % interval +0.5 to +0.5), 100% of the room there was, over 5 seeds"
    )
    facts = json.loads((tmp_path / "results" / "claims" / "gigpo.json").read_text())
    assert {"id", "paper", "verdict", "difference", "interval", "seeds", "runs", "curves", "command", "versions",
            "date", "tuning"} <= facts.keys()  # fmt: skip
    assert (facts["id"], facts["paper"], facts["command"]) == ("gigpo@1", 81, "panoply claim gigpo")
    code, out, _ = run([], capsys)
    assert re.search(r"gigpo\s+learns\s+holds", out)
    shipped = verdicts.shipped()["igpo"]["verdict"]
    assert re.search(rf"\nigpo\s+learns\s+{shipped}", out)
    monkeypatch.setattr(verdicts, "shipped", dict)
    assert re.search(r"\nigpo\s+learns\s+not measured", run([], capsys)[1])
    code, out, _ = run(["gigpo", "--check", "--quiet"], capsys)
    assert (code, out.split("\n")[0]) == (0, "gigpo: the stored verdict still stands.")


def test_everything_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two claims one was measured with this code already; the table has both."""
    monkeypatch.chdir(tmp_path)
    pretended = Pretended(monkeypatch, lambda name, rate, seed: 0.5 + 0.2 * (name in ("gigpo", "igpo")))
    two = trials.claimed(["gigpo", "igpo"])
    monkeypatch.setattr(trials, "claimed", lambda *_: two)
    run(["--all", "--quiet"], capsys)
    pretended.ran.clear()
    store = tmp_path / "results" / "claims"
    facts = json.loads((store / "igpo.json").read_text())
    (store / "igpo.json").write_text(json.dumps({**facts, "stamp": "of other code", "verdict": "fails"}))
    code, out, _ = run(["--all", "--quiet"], capsys)
    assert code == 0
    assert {name for name, _, _ in pretended.ran} <= {"igpo", "grpo"}
    assert "igpo holds" in out
    assert "gigpo holds" not in out
    of = re.escape(facts["commit"] or facts["date"])
    assert re.search(rf"\ngigpo\s+–\s+holds \({of}\)", out)
    assert re.search(rf"\nigpo\s+fails \({of}\)\s+holds \({of}\)", out)


def test_a_stored_result_that_is_broken(tmp_path: Path) -> None:
    (tmp_path / "gigpo.json").write_text("{")
    with pytest.raises(pp.PanoplyError, match="is not valid JSON.*Measure the claim again"):
        trials.stored("gigpo", tmp_path)
