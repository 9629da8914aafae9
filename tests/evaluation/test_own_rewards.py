"""Rewards of one's own: what is learned is what is measured on held-out prompts, and what the best is best by."""

from __future__ import annotations

import json
import re
from pathlib import Path

import own_model
import pytest
import tiny

import panoply as pp
from panoply import cli
from panoply.errors import PanoplyError
from panoply.report.run_index import RunIndex
from panoply.run import Run
from panoply.which import take

REWARDS = '''
def even(completions, completion_ids, **_):
    """Odd tokens cost one each, so that no answer comes near 0.5."""
    return [-float(sum(t % 2 for t in ids)) for ids in completion_ids]


def flaky(completions, prompts, **_):
    return [None if p.endswith(("0", "2", "4")) else 1.0 for p in prompts]


def broken(completions, **_):
    raise ZeroDivisionError("no")
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    own_model.write(folder / "model", template=None)
    (folder / "reward.py").write_text(REWARDS)
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": f"ask {n}"}) + "\n" for n in range(40)))
    return folder


def train(place: Path, name: str, reward: str = "even", notes: tiny.Notes | None = None) -> pp.Trained:
    settings = {
        "run.device": "cpu",
        "sample.prompts": 2,
        "sample.group": 4,
        "world.longest": 12,
        "world.held_out_share": 0.3,
        "update.lr": 3e-2,
        "run.evaluate_every": 2,
    }
    return pp.train(
        "grpo",
        data=str(place / "data.jsonl"),
        reward=f"{place / 'reward.py'}:{reward}",
        model=str(place / "model"),
        run=place / name,
        settings=settings,
        steps=4,
        threads=1,
        progress=notes or tiny.Notes(),
    )


@pytest.fixture(scope="module")
def done(place: Path) -> pp.Trained:
    return train(place, "run")


def test_the_mean_reward_is_what_is_measured_and_what_is_best(done: pp.Trained, place: Path) -> None:
    before, after = done.before, done.after
    assert before["of"] == after["of"] == "reward"
    assert after["sampled"] > before["sampled"] + 2
    assert before["success"] == after["success"] == {"greedy": 0.0, "sampled": 0.0}
    low, high = after["sampled_interval"]
    assert low < after["sampled"] < high
    best = tiny.result(done.run)["best"]
    rows = {r["step"]: r["held_out_sampled"] for r in tiny.metrics(done.run) if "held_out_sampled" in r}
    assert best == {
        "step": max(rows, key=lambda s: (rows[s], s)),
        "of": "reward",
        "score": max(rows.values()),
    }
    assert take(done.run).step == best["step"] > 0
    exported = pp.export(done.run, place / "exported")
    assert (exported / "model.safetensors").read_bytes() == tiny.model_bytes(done.run, best["step"])


def test_the_same_is_told_everywhere(done: pp.Trained, capsys: pytest.CaptureFixture[str]) -> None:
    from panoply.report.text import trained

    pair = [f"{m['sampled']:.3f}" for m in (done.before, done.after)]
    told = trained(done)
    assert "held-out reward" in told
    assert all(number in told for number in pair)
    assert "success, sampled" in told
    facts = RunIndex(done.run.parent).facts(done.run.name)
    assert (facts["measured"], facts["before"], facts["after"]) == (
        "reward",
        done.before["sampled"],
        done.after["sampled"],
    )
    for words in (
        ["runs", str(done.run.parent)],
        ["eval", str(done.run), "--which", "last", "--attempts", "1"],
    ):
        with pytest.raises(SystemExit):
            cli.main(words)
        assert "reward" in capsys.readouterr().out


def test_eval_says_what_train_said(done: pp.Trained) -> None:
    again = pp.evaluate(done.run, which="last", attempts=1, problems=256)
    assert (again.of, again.sampled, again.greedy) == ("reward", done.after["sampled"], done.after["greedy"])
    assert again.step == 4


def test_answers_that_cannot_be_graded_are_left_out_counted_and_told(place: Path) -> None:
    done = train(place, "flaky", "flaky")
    asked = [t.data["row"].prompt for t in Run.open(done.run).plan().world().held_out(256)]
    lost = sum(prompt.endswith(("0", "2", "4")) for prompt in asked)
    assert 0 < lost < len(asked)
    assert done.after["sampled"] == done.after["greedy"] == 1.0
    assert done.after["ungraded"] == 2 * lost
    found = pp.evaluate(done.run, which="last", attempts=4, ks=(1, 4))
    assert (found.sampled, found.pass_at, found.ungraded) == (1.0, {1: 1.0, 4: 1.0}, 5 * lost)


def test_where_nothing_can_be_graded_nothing_is_measured(place: Path) -> None:
    notes = tiny.Notes()
    with pytest.raises(PanoplyError, match="Not one of 8 answers could be graded: .*no"):
        train(place, "broken", "broken", notes)
    assert any(
        re.match("Step 0 could not be evaluated. Not one of .* held-out answers .*no", text)
        for text in notes.said
    )
    (state,) = place.glob("broken/checkpoints/step-0000000/state.json")
    assert json.loads(state.read_text())["best"] == {"step": 0, "of": "reward", "score": None}
    with pytest.raises(PanoplyError, match="Not one of .* held-out answers could be graded"):
        pp.evaluate(place / "broken")
