"""Which checkpoint of a run is taken, and that it is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

import panoply as pp
from panoply import cli
from panoply.evaluation import held_out
from panoply.kinds import text as kinds
from panoply.run import Run
from panoply.which import best_of, take

EVERY = {"run.evaluate_every": 3, "run.checkpoint_every": 3}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Evaluations that find what was written in advance: at the start, and every three steps."""

    def script(*scores: float) -> None:
        told = iter(scores)

        def evaluate(*args: Any, **options: Any) -> held_out.Evaluation:
            return held_out.Evaluation(8, {"greedy": 0.0, "sampled": next(told)})

        monkeypatch.setattr(kinds, "evaluate", evaluate)

    return script


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of nine steps that was best at step 3, with all its checkpoints."""
    told = iter([0.1, 0.9, 0.2, 0.3])

    def evaluate(*args: Any, **options: Any) -> held_out.Evaluation:
        return held_out.Evaluation(8, {"greedy": 0.0, "sampled": next(told)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "evaluate", evaluate)
        settings = {**EVERY, "run.keep": 9}
        return tiny.train(tmp_path_factory.mktemp("which") / "run", steps=9, settings=settings).run


def damage(run: Path, step: int) -> None:
    file = run / f"checkpoints/step-{step:07d}/model/model.safetensors"
    held = file.read_bytes()
    file.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(w) for w in words])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


# ------------------------------------------------------------------ the best one


def test_the_best_is_saved_kept_and_meant_by_the_run(scripted: Callable[..., None], tmp_path: Path) -> None:
    """It peaks at step 3, which no interval of checkpoints hits."""
    scripted(0.1, 0.9, 0.2, 0.3)
    settings = {"run.evaluate_every": 3, "run.checkpoint_every": 4, "run.keep": 1}
    done = tiny.train(tmp_path / "run", steps=9, settings=settings)
    assert tiny.checkpoints(done.run) == [3, 9]
    assert tiny.result(done.run)["best"] == {"step": 3, "of": "success", "score": 0.9}
    for which, step in ((None, 3), ("best", 3), ("last", 9), (9, 9), ("3", 3)):
        assert take(done.run, which).step == step
        exported = pp.export(done.run, tmp_path / str(which), which=which)
        assert (exported / "model.safetensors").read_bytes() == tiny.model_bytes(done.run, step)


def test_of_equals_the_later_is_best(scripted: Callable[..., None], tmp_path: Path) -> None:
    scripted(0.0, 0.0, 0.0)
    done = tiny.train(tmp_path / "run", steps=6, settings=EVERY)
    assert take(done.run).step == 6


def test_a_best_that_is_the_start_is_exported_only_when_asked_for(
    scripted: Callable[..., None], tmp_path: Path
) -> None:
    scripted(0.5, 0.1)
    done = tiny.train(tmp_path / "run", steps=3, settings=EVERY)
    for which in (None, "best"):
        with pytest.raises(
            pp.PanoplyError, match=r"step 0 of .*, the model before training .* --which last"
        ) as told:
            pp.export(done.run, tmp_path / "refused", which=which)
        assert "--which 0" in str(told.value)
    assert not (tmp_path / "refused").exists()
    exported = pp.export(done.run, tmp_path / "start", which=0)
    assert (exported / "model.safetensors").read_bytes() == tiny.model_bytes(done.run, 0)


def test_a_stopped_run_knows_its_best_by_its_newest_checkpoint(
    scripted: Callable[..., None], tmp_path: Path
) -> None:
    scripted(0.1, 0.9, 0.2)

    def stop(step: pp.Step) -> None:
        if step.number == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.train(tmp_path / "run", steps=9, settings={**EVERY, "run.keep": 9}, on_step=stop)
    assert best_of(Run.open(tmp_path / "run"))["step"] == 3
    assert take(tmp_path / "run").step == 3
    damage(tmp_path / "run", 6)
    with pytest.raises(
        pp.PanoplyError, match=r"Step 6 of .*, its last, which knows its best, cannot be taken"
    ):
        take(tmp_path / "run")


# ------------------------------------------------------------------ said by every command


def test_every_command_names_the_step_it_takes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best, last = (
        f"step 3 of {run}, its best by held-out success, 0.900 (its last is step 9)",
        f"step 9 of {run}, its last",
    )
    for words, out, err in (
        (("export", run, tmp_path / "a"), best, ""),
        (("export", run, tmp_path / "b", "--which", "last"), last, ""),
        (("sample", run, "1+2="), "", best),
        (("sample", run, "1+2=", "--which", "last"), "", last),
        (("eval", run, "--problems", "2", "--attempts", "1"), best, ""),
        (("eval", run, "--problems", "2", "--attempts", "1", "--which", "6"), f"step 6 of {run}", ""),
    ):
        code, shown, told = said(capsys, *words)
        assert code == 0, told
        assert out in " ".join(shown.split())
        assert err in told
    code, shown, _ = said(capsys, "eval", run, "--problems", "2", "--attempts", "1", "--which", "0", "--json")
    assert json.loads(shown)["step"] == 0
    assert "before training" in json.loads(shown)["model"]


def test_a_run_begins_with_the_checkpoint_that_was_chosen(run: Path, tmp_path: Path) -> None:
    for which, step in ((None, 3), ("last", 9), (6, 6)):
        notes = tiny.Notes()
        chosen = {} if which is None else {"which": which}
        done = tiny.train(tmp_path / str(which), steps=1, model=str(run), progress=notes, **chosen)
        assert any(f"--model is step {step} of {run}" in text for text in notes.said)
        assert tiny.model_bytes(done.run, 0) == tiny.model_bytes(run, step)
        stored = json.loads((done.run / "run.json").read_text())["plan"]["run"]["model"]
        assert stored == str(run / f"checkpoints/step-{step:07d}")


def test_the_reference_too(run: Path, tmp_path: Path) -> None:
    made = pp.plan("dpo", model="fresh", reference=str(run), which="last")
    assert made.options.reference == str(run / "checkpoints/step-0000009")
    with pytest.raises(
        pp.PanoplyError, match="--which has no effect: neither --model nor --reference names a run"
    ):
        pp.plan("dpo", model="fresh", which="last")


# ------------------------------------------------------------------ what cannot be taken


@pytest.mark.parametrize("which", ["lats", "-1", "1.5", "", True, 1.5])
def test_a_word_that_is_no_checkpoint(run: Path, which: Any) -> None:
    with pytest.raises(pp.PanoplyError, match="Unknown checkpoint"):
        take(run, which)


def test_a_step_that_is_not_kept(run: Path) -> None:
    with pytest.raises(
        pp.PanoplyError, match=r"Step 4 of .* cannot be taken: it is not kept.* --which: 0, 3, 6, 9\."
    ):
        take(run, 4)


def test_a_folder_has_no_checkpoints_to_choose_from(run: Path) -> None:
    folder = run / "checkpoints/step-0000003"
    assert take(folder).step == 3
    assert take(folder / "model").step is None
    for source in (folder, folder / "model"):
        with pytest.raises(pp.PanoplyError, match="is not a run: leave it out"):
            take(source, "last")


def test_a_damaged_checkpoint_is_refused_and_never_replaced(
    scripted: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(0.1, 0.9, 0.2, 0.95)
    done = tiny.train(tmp_path / "run", steps=9, settings={**EVERY, "run.keep": 9})
    damage(done.run, 6)
    damage(done.run, 9)
    for which, role in (("last", "its last"), ("best", "its best by held-out success, 0.950")):
        code, _, told = said(capsys, "export", done.run, tmp_path / "out", "--which", which)
        assert code == 2
        assert f"Step 9 of {done.run}, {role}, cannot be taken: model/model.safetensors is corrupt" in told
        assert "Take another with --which: 0, 3." in told
        assert not (tmp_path / "out").exists()
    assert said(capsys, "export", done.run, tmp_path / "out", "--which", "3")[0] == 0
