"""The same from Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

import panoply as pp
from panoply.progress import Progress


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> pp.Trained:
    return tiny.train(tmp_path_factory.mktemp("api") / "run", steps=2)


def test_what_the_package_offers() -> None:
    offered = {
        "train",
        "plan",
        "evaluate",
        "sample",
        "export",
        "load_policy",
        "method",
        "part",
        "world",
        "PanoplyError",
    }
    assert offered <= set(pp.__all__)
    assert all(getattr(pp, name) is not None for name in pp.__all__)
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        pp.tarin  # noqa: B018


def test_train_says_where_and_how_well(done: pp.Trained) -> None:
    assert (done.run / "result.json").is_file()
    assert done.before["step"] == 0
    assert done.after["step"] == 2
    assert 0 <= done.after["sampled"] <= 1
    assert done.seconds > 0
    assert done.policy().fingerprint() == pp.load_policy(done.run).fingerprint()


def test_a_plan_can_be_made_first_and_trained_then(tmp_path: Path, done: pp.Trained) -> None:
    made = pp.plan("grpo", model="fresh", steps=2, threads=1, settings=tiny.SETTINGS)
    again = pp.train(made, run=tmp_path / "run", progress=Progress())
    assert again.fingerprint == done.fingerprint
    with pytest.raises(pp.PanoplyError, match="A plan is complete"):
        pp.train(made, run=tmp_path / "other", steps=3)


def test_slots_settings_and_options_of_a_plan() -> None:
    made = pp.plan(
        "grpo", credit="reinforce", model="fresh", seed=7, settings={"update.lr": 1e-4, "run.held_out": 9}
    )
    assert made.method.settings()["credit"] == "moving_baseline"
    assert made.method.settings()["update.lr"] == 1e-4
    assert (made.options.seed, made.options.held_out) == (7, 9)
    with pytest.raises(pp.PanoplyError, match="Unknown run setting 'sed'"):
        pp.plan("grpo", sed=7)


def test_train_needs_something_to_train() -> None:
    with pytest.raises(pp.PanoplyError, match="Name a method to train, or a run to resume"):
        pp.train()


def test_evaluate(done: pp.Trained) -> None:
    seen: list[tuple[int, int]] = []
    found = pp.evaluate(done.run, problems=6, attempts=4, ks=(1, 4), watch=lambda *at: seen.append(at))
    assert (found.problems, found.attempts) == (6, 4)
    assert found.pass_at[1] == pytest.approx(found.sampled)
    assert found.pass_at[4] >= found.pass_at[1]
    assert seen[0] == (0, 30)
    assert seen[-1] == (30, 30)


def test_evaluation_does_not_depend_on_how_many_answers_are_written_at_once(
    done: pp.Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    from panoply.evaluation import held_out

    def answers() -> tuple[list[str], dict[int, float]]:
        found = pp.evaluate(done.run, problems=6, attempts=4, ks=(1, 2))
        return found.samples, found.pass_at

    whole = answers()
    monkeypatch.setattr(held_out, "ROWS", 8)
    assert answers() == whole


def test_evaluate_elsewhere(done: pp.Trained) -> None:
    assert pp.evaluate(done.run, "chain", problems=4, attempts=1, ks=(1,)).problems == 4
    found = pp.evaluate(done.run, problems=4, attempts=1, ks=(1,), settings={"world.operations": 3})
    assert found.samples[0].split("=")[0].count("+") + found.samples[0].split("=")[0].count("*") == 3


def test_sample(done: pp.Trained) -> None:
    drawn = pp.sample(done.run, "1+2=", n=4, max_tokens=6)
    assert len(drawn) == 4
    assert drawn == pp.sample(done.run, "1+2=", n=4, max_tokens=6)
    assert drawn != pp.sample(done.run, "1+2=", n=4, max_tokens=6, seed=1)
    assert len(set(pp.sample(done.run, "1+2=", n=3, temperature=0))) == 1


def test_a_prompt_may_fill_the_context_but_for_one_token(done: pp.Trained) -> None:
    room = pp.load_policy(done.run).context_length
    assert len(pp.sample(done.run, "1" * (room - 1), max_tokens=50)[0]) == 1
    with pytest.raises(pp.PanoplyError, match=f"The prompt of {room} tokens leaves no room"):
        pp.sample(done.run, "1" * room)


def test_export_and_load(done: pp.Trained, tmp_path: Path) -> None:
    folder = pp.export(done.run, tmp_path / "model", which="last")
    assert pp.load_policy(folder).fingerprint() == done.fingerprint
    with pytest.raises(pp.PanoplyError, match="is not empty"):
        pp.export(done.run, folder)
    with pytest.raises(pp.PanoplyError, match="Unknown checkpoint 'lats'"):
        pp.export(done.run, tmp_path / "other", which="lats")
    (tmp_path / "empty").mkdir()
    assert pp.export(done.run, tmp_path / "empty") == tmp_path / "empty"


def test_a_run_can_start_from_another(done: pp.Trained, tmp_path: Path) -> None:
    again = tiny.train(tmp_path / "run", steps=1, model=str(done.run))
    first = pp.load_policy(again.run / "checkpoints/step-0000000")
    assert first.fingerprint() == pp.load_policy(done.run).fingerprint()


def test_a_world_without_success_cannot_be_measured(
    done: pp.Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    from panoply.worlds.text.chain import Chain

    monkeypatch.setattr(Chain, "grade", lambda self, task, answer: {"shape": 1.0})
    with pytest.raises(pp.PanoplyError, match="The world chain grades answers without 'success'"):
        pp.evaluate(done.run, problems=2, attempts=1, ks=(1,))


def test_where_to_evaluate_and_sample(done: pp.Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    pp.evaluate(
        done.run,
        problems=2,
        attempts=1,
        ks=(1,),
        threads=2,
        watch=lambda *_: seen.append(torch.get_num_threads()),
    )
    assert (set(seen), torch.get_num_threads()) == ({2}, before)
    with pytest.raises(pp.PanoplyError, match="threads must be at least 0"):
        pp.sample(done.run, "1+2=", threads=-1)
    with pytest.raises(pp.PanoplyError, match="Unknown device 'moon'"):
        pp.evaluate(done.run, problems=2, attempts=1, ks=(1,), device="moon")
    asked: list[tuple[str, ...]] = []
    loaded = pp.load_policy(done.run)
    monkeypatch.setattr("panoply.api.load_policy", lambda _, *where, **more: asked.append(where) or loaded)
    pp.sample(done.run, "1+2=", max_tokens=2, device="cuda:3", dtype="bfloat16")
    assert asked == [("cuda:3", "bfloat16")]
