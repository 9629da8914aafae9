"""A run while it goes: what sinks get of it, and what the terminal shows."""

from __future__ import annotations

import io
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tiny

import panoply as pp
from panoply import progress, sinks
from panoply.run import Run


class TestSinks:
    def test_tensorboard_gets_every_step(self, tmp_path: Path) -> None:
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        done = tiny.train(tmp_path / "run", steps=3, sinks=("tensorboard",))
        events = accumulator.EventAccumulator(str(done.run / "tensorboard")).Reload()
        rewards = [(e.step, e.value) for e in events.Scalars("reward")]
        assert rewards == [(m["step"], pytest.approx(m["reward"])) for m in tiny.metrics(done.run)]

    def test_a_resumed_run_takes_back_what_it_makes_again(self, tmp_path: Path) -> None:
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        done = tiny.train(
            tmp_path / "run", steps=3, sinks=("tensorboard",), settings={"run.checkpoint_every": 1}
        )
        (done.run / "result.json").unlink()
        shutil.rmtree(done.run / "checkpoints/step-0000003")
        tiny.resume(done.run)
        events = accumulator.EventAccumulator(str(done.run / "tensorboard")).Reload()
        assert [e.step for e in events.Scalars("reward")] == [1, 2, 3]

    def test_wandb_that_is_not_installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "wandb", None)
        monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(pp.PanoplyError, match=re.escape("needs wandb: pip install 'panoply-rl[wandb]'.")):
            tiny.train(tmp_path / "run", sinks=("wandb",))
        assert not (tmp_path / "run").exists()

    def test_wandb(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        began: list[dict[str, Any]] = []
        logged: list[int] = []
        fake = types.ModuleType("wandb")
        fake.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
        stub = types.SimpleNamespace(
            log=lambda row, step: logged.append(step), finish=lambda: logged.append(-1)
        )
        fake.init = lambda **options: began.append(options) or stub  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "wandb", fake)
        done = tiny.train(tmp_path / "run", steps=2, sinks=("wandb",))
        assert logged == [1, 2, -1]
        (done.run / "result.json").unlink()
        tiny.resume(done.run)
        assert began[0]["id"] == began[1]["id"]
        assert began[0]["resume"] == "allow"

    @pytest.mark.parametrize("at", ["begin", "log", "close"])
    def test_one_that_fails_is_named_once_and_the_run_goes_on(
        self, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[str] = []

        class Failing:
            def __init__(self, run: Run, step: int):
                self.call("begin")

            def call(self, what: str) -> None:
                calls.append(what)
                if what == at:
                    raise ConnectionError("no route to the server")

            def log(self, step: int, metrics: Any) -> None:
                self.call("log")

            def close(self) -> None:
                self.call("close")

        monkeypatch.setitem(sinks.SINKS, "json", Failing)  # a module that can be found
        notes = tiny.Notes()
        done = tiny.train(tmp_path / "run", steps=3, sinks=("json",), progress=notes)
        assert done.after["step"] == 3
        assert notes.said == [
            "The sink 'json' failed and gets nothing more; the run goes on without it: "
            "ConnectionError: no route to the server"
        ]
        wanted = {"begin": ["begin"], "log": ["begin", "log"], "close": ["begin", *["log"] * 3, "close"]}
        assert calls == wanted[at]

    def test_an_unknown_one(self, tmp_path: Path) -> None:
        with pytest.raises(
            pp.PanoplyError, match=r"Unknown sink 'tensorbord'\. Did you mean 'tensorboard'\?"
        ):
            tiny.train(tmp_path / "run", sinks=("tensorbord",))


class TestProgress:
    def render(self, folder: Path, width: int, height: int, **choices: Any) -> str:
        from rich.console import Console

        console = Console(width=width, height=height, record=True, force_terminal=True, file=io.StringIO())
        tiny.train(folder, progress=progress.Panel(console), **choices)
        return console.export_text()

    def test_the_panel_shows_curve_success_and_answers(self, tmp_path: Path) -> None:
        last = self.render(tmp_path / "run", 100, 40).split("╭")[-1]
        assert "grpo@1 on chain@1, seed 0" in last
        assert "step 4/4" in last
        assert "success of the training batch" in last
        assert "held-out success  greedy 0.00 → 0.00" in last
        assert last.count("✗") + last.count("✓") == 5
        assert "step 1" in last

    @pytest.mark.parametrize(("width", "height"), [(20, 8), (40, 16), (100, 12), (300, 100)])
    def test_the_panel_fits(self, width: int, height: int, tmp_path: Path) -> None:
        shown = self.render(tmp_path / "run", width, height, steps=2)
        lines = re.split(r"\n|(?<=╯)|(?=╭)", shown)  # a frame begins where the one before ends
        assert max(map(len, lines)) <= min(100, width)

    def test_the_panel_of_a_data_set_shows_the_loss(self, tmp_path: Path) -> None:
        last = self.render(tmp_path / "run", 100, 40, method="sft").split("╭")[-1]
        assert "loss of the training batch" in last
        assert "greedy answers on held-out problems" in last

    def test_answers_without_success(self) -> None:
        class Bare:
            def __contains__(self, name: str) -> bool:
                return False

        assert progress.answers(None, Bare()) == []  # type: ignore[arg-type]

    def test_lines(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        tiny.train(tmp_path / "run", steps=2, progress=progress.Lines(every=0))
        lines = capsys.readouterr().err.splitlines()
        assert [line.split("  ")[0] for line in lines] == ["step 1/2", "step 2/2"]

    def test_a_run_goes_on_though_nobody_looks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As where standard error is piped into `head`, or a terminal was closed."""

        class Gone(io.StringIO):
            def write(self, text: str = "") -> int:
                raise BrokenPipeError(32, "Broken pipe")

            def flush(self) -> None:
                self.write()

        monkeypatch.setattr(sys, "stderr", Gone())
        for number, shown in enumerate((progress.Lines(every=0), progress.Panel())):
            done = tiny.train(tmp_path / str(number), steps=2, progress=shown)
            shown.say("Done.")
            assert done.after["step"] == 2

    def test_a_curve(self) -> None:
        assert progress.plot([], 20, 2) == []
        assert progress.plot([0.0, 0.5, 1.0], 10, 2, first=3) == [
            "    1 ┤  █",
            "    0 ┤ ██",
            "       ste",
        ]
        wide = progress.plot([float(i) for i in range(1000)], 40, 3)
        assert all(len(line) <= 40 for line in wide)
        assert wide[-1].endswith("1000")
