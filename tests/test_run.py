"""What a run folder holds, who may write it, and how a run goes, stops, diverges and is resumed."""

from __future__ import annotations

import fcntl
import io
import json
import math
import re
import shutil
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import panoply as pp
from panoply import checkpoint, progress, sinks
from panoply.handle import Step
from panoply.loops import saving
from panoply.loops.job import Job
from panoply.report.run_index import RunIndex
from panoply.run import Run


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> pp.Trained:
    settings = {"run.checkpoint_every": 2, "run.evaluate_every": 3, "run.episodes_every": 2, "run.keep": 3}
    return tiny.train(tmp_path_factory.mktemp("done") / "run", steps=6, seed=3, settings=settings)


class TestFolder:
    def test_config_versions_command_and_plan_are_stored(self, done: pp.Trained) -> None:
        config = json.loads((done.run / "run.json").read_text())
        assert config["versions"]["panoply"] == pp.__version__
        assert config["versions"]["torch"] == torch.__version__
        assert config["plan"]["run"]["seed"] == 3
        assert config["command"]
        plan = Run.open(done.run).plan()
        assert plan.hash() == config["hash"]
        assert plan.method.settings()["sample.group"] == 4

    def test_the_command_is_what_was_typed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        typed = {
            "/bin/panoply": "panoply train 'a b'",
            "/x/panoply/__main__.py": "panoply train 'a b'",
            "my.py": "python",
        }
        for i, (program, command) in enumerate(typed.items()):
            monkeypatch.setattr(sys, "argv", [program, "train", "a b"])
            run = Run.create(pp.plan("sft", model="fresh"), tmp_path / str(i))
            run.release()
            assert run.config["command"] == command

    def test_one_line_of_metrics_a_step(self, done: pp.Trained) -> None:
        rows = Run.open(done.run).metrics()
        assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6]
        assert [r["step"] for r in rows if "held_out_sampled" in r] == [3, 6]
        wanted = {"seconds", "loss", "reward", "success", "entropy", "gradient_norm", "lr", "degenerate_groups",
                  "step0_gap", "tokens_per_second", "peak_memory_mb", "seconds_sample", "seconds_learn"}  # fmt: skip
        assert wanted <= rows[0].keys()

    def test_a_line_is_on_disk_as_soon_as_the_step_is_done(self, tmp_path: Path) -> None:
        class Looking(tiny.Notes):
            def step(self, job: Any, record: Any, experience: Any) -> None:
                assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == job.step

        tiny.train(tmp_path / "run", steps=3, progress=Looking())

    def test_episodes_hold_ids_and_text(self, done: pp.Trained) -> None:
        rows = Run.open(done.run).episodes()
        assert {r["step"] for r in rows} == {2, 4, 6}
        row = rows[0]
        assert len(row["logp"]) == len(row["advantage"]) == len(row["position"])
        assert pp.load_policy(done.run).tokenizer.decode(row["tokens"]) == row["text"]

    def test_a_torn_last_line_is_passed_over(self, done: pp.Trained, tmp_path: Path) -> None:
        shutil.copytree(done.run, tmp_path / "run")
        for torn in (
            b'{"step": 7, "loss": 0.',
            '{"text": "π'.encode()[:-1],
            b'{"step": 7}',
            b"\x00\x00\x00",
            b"[1]\n",
        ):
            content = (done.run / "metrics.jsonl").read_bytes() + torn
            (tmp_path / "run/metrics.jsonl").write_bytes(content)
            assert [r["step"] for r in Run.open(tmp_path / "run").metrics()] == [1, 2, 3, 4, 5, 6]

    @pytest.mark.parametrize("bad", [b"{]\n", b"\xff\n", b"[2]\n", b'{"step": "2"}\n'])
    def test_a_bad_line_costs_a_resumed_run_no_other(
        self, bad: bytes, done: pp.Trained, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        shutil.copytree(done.run, folder)
        (folder / "result.json").unlink()
        shutil.rmtree(folder / "checkpoints/step-0000006")
        for name in ("metrics.jsonl", "episodes.jsonl"):
            lines = (folder / name).read_bytes().splitlines(True)
            (folder / name).write_bytes(b"".join([lines[0], bad, *lines[2:]]))
        notes = tiny.Notes()
        tiny.resume(folder, notes)
        assert [m["step"] for m in tiny.metrics(folder)] == [1, 3, 4, 5, 6]
        assert [m for m in tiny.metrics(done.run) if m["step"] != 2] == tiny.metrics(folder)
        told = [text for text in notes.said if text.endswith("It is left out.")]
        assert [text.split(" of ")[0] for text in told] == ["Line 2"] * 2
        assert "metrics.jsonl" in told[0]
        assert len(Run.open(folder).episodes()) == len(Run.open(done.run).episodes()) - 1

    def test_numbers_that_are_not_finite_become_null(self, tmp_path: Path) -> None:
        run = Run.create(pp.plan("sft", model="fresh"), tmp_path / "run")
        run.log({"step": 1, "loss": math.nan, "norm": math.inf, "lr": 0.5})
        run.release()
        assert "NaN" not in (tmp_path / "run/metrics.jsonl").read_text()
        assert run.metrics() == [{"step": 1, "loss": None, "norm": None, "lr": 0.5}]

    def test_result(self, done: pp.Trained) -> None:
        result = tiny.result(done.run)
        assert result["steps"] == 6
        assert result["threads"] == 1
        assert result["episodes"] == 6 * 8
        assert result["fingerprint"] == done.fingerprint == pp.load_policy(
            done.run / "checkpoints/step-0000006"
        ).fingerprint()  # fmt: skip
        assert result["before"]["step"] == 0
        assert result["after"]["step"] == 6

    def test_threads_are_stored_and_put_back(self, tmp_path: Path) -> None:
        before = torch.get_num_threads()
        tiny.train(tmp_path / "run", steps=1, threads=2)
        assert torch.get_num_threads() == before
        assert tiny.result(tmp_path / "run")["threads"] == 2
        state = json.loads((tmp_path / "run/checkpoints/step-0000001/state.json").read_text())
        assert state["threads"] == 2

    def test_a_resumed_run_computes_with_the_threads_it_began_with(self, tmp_path: Path) -> None:
        tiny.train(tmp_path / "run", steps=2, threads=0)
        state_file = tmp_path / "run/checkpoints/step-0000000/state.json"
        shutil.rmtree(tmp_path / "run/checkpoints/step-0000002")
        (tmp_path / "run/result.json").unlink()
        state = json.loads(state_file.read_text()) | {"threads": 2}
        state_file.write_text(json.dumps(state))
        manifest = json.loads((state_file.parent / "manifest.json").read_text())
        manifest["files"]["state.json"] = {
            "bytes": state_file.stat().st_size, "sha256": checkpoint._digest(state_file)
        }  # fmt: skip
        (state_file.parent / "manifest.json").write_text(json.dumps(manifest))
        seen = []

        class Looking(tiny.Notes):
            def step(self, job: Any, record: Any, experience: Any) -> None:
                seen.append(torch.get_num_threads())

        tiny.resume(tmp_path / "run", Looking())
        assert seen == [2, 2]

    def test_a_new_run_that_fails_in_its_first_step_leaves_no_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The start is evaluated and stored by then, but there is nothing to go on with."""
        done = Job.finish_step

        def fail(job: Job, *given: Any, **named: Any) -> Step:
            if job.step == at:
                raise pp.PanoplyError("No.")
            return done(job, *given, **named)

        monkeypatch.setattr(Job, "finish_step", fail)
        for at, left in ((0, False), (1, True)):
            with pytest.raises(pp.PanoplyError, match="No"):
                tiny.train(tmp_path / f"run-{at}", steps=3, settings={"run.checkpoint_every": 1})
            assert (tmp_path / f"run-{at}").exists() == left

    def test_runs_of_one_second_get_names_of_their_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        plan = pp.plan("sft", model="fresh")
        made = [Run.create(plan) for _ in range(3)]
        names = [run.folder.name for run in made]
        assert len(set(names)) == 3
        assert re.fullmatch(r"\d{4}-\d\d-\d\d-sft-chain-s0", names[0])
        assert set(RunIndex("runs").find()) == set(names)


class TestWriters:
    def test_a_second_process_is_refused(self, tmp_path: Path) -> None:
        run = Run.create(pp.plan("sft", model="fresh"), tmp_path / "run")
        assert run.status() == "running"
        assert Run.open(run.folder).status() == "running"
        done = tiny.shell("train", "--resume", str(run.folder))
        assert done.returncode == 2
        assert done.stderr == (
            f"panoply: Another process is writing to {run.folder}: wait for it, or stop it first.\n"
        )
        run.release()
        assert run.status() == "stopped"
        second = Run.open(run.folder)
        second.acquire()
        second.release()

    def test_looking_at_a_run_does_not_keep_a_writer_out(self, tmp_path: Path) -> None:
        run = Run.create(pp.plan("sft", model="fresh"), tmp_path / "run")
        run.release()
        with open(run.folder / "lock") as probe:
            fcntl.flock(probe, fcntl.LOCK_SH)
            released = time.monotonic() + 0.1
            sleep = time.sleep

            def waiting(seconds: float) -> None:
                sleep(seconds)
                if time.monotonic() > released:
                    fcntl.flock(probe, fcntl.LOCK_UN)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(time, "sleep", waiting)
                run.acquire()
        run.release()

    def test_a_folder_that_holds_something_else(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(pp.PanoplyError, match="is not empty and not a run"):
            tiny.train(tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]

    def test_a_folder_that_holds_a_run(self, done: pp.Trained) -> None:
        with pytest.raises(pp.PanoplyError, match="already holds a run: resume it with --resume"):
            tiny.train(done.run)

    def test_what_a_killed_maker_left_can_be_used(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "lock").touch()
        (tmp_path / ".run.json.123").write_text("{")
        assert tiny.train(tmp_path, steps=1).run == tmp_path

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"plan": 3}'])
    def test_a_damaged_config(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(pp.PanoplyError, match="cannot be read"):
            Run.open(tmp_path)

    def test_a_plan_of_another_version(self, tmp_path: Path) -> None:
        run = Run.create(pp.plan("sft", model="fresh"), tmp_path / "run")
        run.release()
        config = json.loads((tmp_path / "run/run.json").read_text())
        config["plan"]["run"]["colour"] = "blue"
        config["panoply"] = "9.9"
        (tmp_path / "run/run.json").write_text(json.dumps(config))
        with pytest.raises(pp.PanoplyError, match=r"made by panoply 9\.9"):
            tiny.resume(tmp_path / "run")

    def test_bad_input_leaves_no_folder_behind(self, tmp_path: Path) -> None:
        bad: list[dict[str, Any]] = [
            {"model": str(tmp_path / "nowhere")},
            {"sinks": ("tensorbord",)},
            {"settings": {"run.held_out": 100, "world.operations": 1}},
        ]
        for choices in bad:
            with pytest.raises(pp.PanoplyError):
                tiny.train(tmp_path / "run", **choices)
            assert not (tmp_path / "run").exists()


class TestCourse:
    def test_equal_seeds_give_equal_runs_and_others_do_not(self, done: pp.Trained, tmp_path: Path) -> None:
        settings = {"run.checkpoint_every": 2, "run.evaluate_every": 3, "run.episodes_every": 2}
        again = tiny.train(tmp_path / "again", steps=6, seed=3, settings=settings)
        other = tiny.train(tmp_path / "other", steps=6, seed=4, settings=settings)
        assert again.fingerprint == done.fingerprint != other.fingerprint
        assert done.fingerprint != pp.load_policy(done.run, which=3).fingerprint()
        assert tiny.metrics(again.run) == tiny.metrics(done.run)

    def test_neither_cadence_changes_the_training(self, done: pp.Trained, tmp_path: Path) -> None:
        settings = {"run.checkpoint_every": 5, "run.evaluate_every": 0, "run.episodes_every": 0}
        again = tiny.train(tmp_path / "again", steps=6, seed=3, settings=settings)
        assert again.fingerprint == done.fingerprint
        assert not (again.run / "episodes.jsonl").exists()
        assert again.after["step"] == 6

    @pytest.mark.parametrize("method", ["grpo", "dpo", "sft"])
    def test_accumulating_gradients_gives_the_same_result(self, method: str, tmp_path: Path) -> None:
        """Micro-batches of one sequence (or pair), against everything at once, up to rounding."""
        runs = [
            tiny.train(tmp_path / str(size), method, steps=3, settings={"run.micro_tokens": size})
            for size in (1, 10**6)
        ]
        small, large = (tiny.metrics(r.run) for r in runs)
        for a, b in zip(small, large, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
            assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-4, abs=1e-9)
        start = pp.load_policy(runs[0].run / "checkpoints/step-0000000").model.state_dict()
        small_end, large_end = (
            pp.load_policy(r.run / "checkpoints/step-0000003").model.state_dict() for r in runs
        )
        moved = max(float((large_end[n] - start[n]).abs().max()) for n in start)
        gap = max(float((small_end[n] - large_end[n]).abs().max()) for n in start)
        assert gap < 0.01 * moved

    @pytest.mark.parametrize(
        ("settings", "rates"),
        [
            ({"update.schedule.warmup": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
            ({"update.schedule": "linear"}, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
            ({"update.schedule": "cosine"}, [0.5 * (1 + math.cos(math.pi * i / 6)) for i in range(6)]),
        ],
    )
    def test_schedules_of_the_learning_rate(
        self, settings: dict[str, Any], rates: list[float], tmp_path: Path
    ) -> None:
        done = tiny.train(tmp_path / "run", steps=6, settings={"update.lr": 1e-3, **settings})
        assert [m["lr"] / 1e-3 for m in tiny.metrics(done.run)] == pytest.approx(rates)

    def test_a_budget_of_time(self, tmp_path: Path) -> None:
        notes = tiny.Notes()
        done = tiny.train(tmp_path / "run", steps=10**6, minutes=0.01, progress=notes)
        assert notes.said == ["Stopped after 0.01 minutes."]
        steps = tiny.result(done.run)["steps"]
        assert 0 < steps < 10**6
        assert done.after["step"] == steps
        assert tiny.checkpoints(done.run)[-1] == steps
        assert done.seconds < 10

    @pytest.mark.parametrize(("unit", "amount", "steps"), [("episodes", 20, 3), ("decisions", 1, 1)])
    def test_a_budget_of_what_is_collected(self, unit: str, amount: int, steps: int, tmp_path: Path) -> None:
        done = tiny.train(tmp_path / "run", steps=10**6, **{unit: amount})  # 8 episodes a step
        rows = tiny.metrics(done.run)
        assert [row["total_episodes"] for row in rows] == [8 * (i + 1) for i in range(steps)]
        assert rows[-1]["total_decisions"] == sum(row["decisions"] for row in rows)
        assert tiny.result(done.run)[unit] == rows[-1][f"total_{unit}"] >= amount
        assert done.after["step"] == steps

    def test_a_finished_run_is_not_resumed(self, done: pp.Trained) -> None:
        with pytest.raises(pp.PanoplyError, match="is finished: there is nothing to resume"):
            tiny.resume(done.run)

    def test_one_killed_before_it_could_say_that_it_is_finished(
        self, done: pp.Trained, tmp_path: Path
    ) -> None:
        shutil.copytree(done.run, tmp_path / "run")
        (tmp_path / "run/result.json").unlink()
        again = tiny.resume(tmp_path / "run")
        assert again.fingerprint == done.fingerprint
        assert tiny.metrics(again.run) == tiny.metrics(done.run)
        assert tiny.untimed(tiny.result(again.run)) == tiny.untimed(tiny.result(done.run))


FAULTY_REWARD = """
import torch, panoply as pp
@pp.part("reward")
def faulty(experience: pp.Experience, *, value: str = "nan", after: int = 3) -> torch.Tensor:
    signal = experience["signal:ended"]
    return signal + (float(value) if int(experience["version"][0]) >= after else 0.0)
"""


def train(folder: Path, **choices: Any) -> pp.Trained:
    """A tiny run of GRPO without the name of a signal, which the faulty reward does not take."""
    settings = {k: v for k, v in tiny.SETTINGS.items() if k != "reward.name"} | choices.pop("settings")
    return pp.train("grpo", run=folder, model="fresh", progress=tiny.Notes(), settings=settings, **choices)


@pytest.mark.usefixtures("registries")
class TestDivergence:
    @pytest.fixture
    def plugin(self, tmp_path: Path) -> str:
        (tmp_path / "faulty.py").write_text(FAULTY_REWARD)
        return str(tmp_path / "faulty.py")

    def test_a_reward_without_end(self, plugin: str, tmp_path: Path) -> None:
        """All alike, such rewards earn no credit, and no loss shows them."""
        settings = {"reward.value": "inf", "run.checkpoint_every": 2}
        with pytest.raises(
            pp.PanoplyError, match=r"in step 4 the mean reward is inf\. .* state of step 2\.$"
        ):
            train(tmp_path / "run", steps=6, reward="faulty", plugins=[plugin], settings=settings)

    def test_a_reward_that_is_not_a_number(self, plugin: str, tmp_path: Path) -> None:
        """The weights are not to blame: the state before the bad step is kept, and a mended run goes on from it."""
        settings = {"reward.value": "nan", "run.checkpoint_every": 2}
        with pytest.raises(pp.PanoplyError, match=r"Stopped: loss is .* holds the state of step 3\.$"):
            train(tmp_path / "run", steps=6, reward="faulty", plugins=[plugin], settings=settings)
        run = Run.open(tmp_path / "run")
        result = run.result()
        assert run.status() == "diverged"
        assert result is not None
        assert "loss is" in result["diverged"]
        assert result["steps"] == 3
        assert tiny.checkpoints(run.folder) == [0, 2, 3]
        assert [m["step"] for m in tiny.metrics(run.folder)] == [1, 2, 3]
        with pytest.raises(pp.PanoplyError, match="holds the state of step 3"):
            tiny.resume(run.folder)
        config = json.loads((run.folder / "run.json").read_text())
        config["plan"]["method"]["reward"]["after"] = 99
        (run.folder / "run.json").write_text(json.dumps(config))
        mended = tiny.resume(run.folder)
        choices = {"steps": 6, "reward": "faulty", "plugins": [plugin], "settings": {"reward.after": 99}}
        whole = train(tmp_path / "whole", **choices)
        assert mended.fingerprint == whole.fingerprint
        assert run.status() == "finished"

    def test_weights_that_explode(self, tmp_path: Path) -> None:
        """A step so large that the policy is noise, though every number stays finite for a while."""
        settings = {"update.lr": 1e12, "update.schedule.warmup": 0, "run.checkpoint_every": 2}
        with pytest.raises(pp.PanoplyError, match="the norm of the weights went from"):
            tiny.train(tmp_path / "run", "sft", steps=6, settings=settings)
        assert tiny.checkpoints(tmp_path / "run") == [0]
        policy = pp.load_policy(tmp_path / "run")
        assert all(bool((p.abs() < 10).all()) for p in policy.parameters())

    def test_weights_that_are_broken_before_the_step(self, tmp_path: Path) -> None:
        """The checkpoint of the step that failed is the one to blame: it is set aside for the one before."""

        class Breaking(tiny.Notes):
            def step(self, job: Any, record: Any, experience: Any) -> None:
                if job.step == 4:
                    with torch.no_grad():
                        next(iter(job.policy.parameters())).fill_(math.nan)
                    saving.save(job)

        settings = {"run.checkpoint_every": 2, "run.keep": 5}
        with pytest.raises(pp.PanoplyError, match="holds the state of step 2"):
            tiny.train(tmp_path / "run", "sft", steps=6, settings=settings, progress=Breaking())
        assert tiny.checkpoints(tmp_path / "run") == [0, 2]
        assert (tmp_path / "run/checkpoints/broken-0000004").is_dir()

    def test_the_command_says_so_and_ends_with_two(self, tmp_path: Path) -> None:
        words = tiny.words(**{"update.lr": 1e12, "update.schedule.warmup": 0})
        folder = str(tmp_path / "run")
        done = tiny.shell("train", "grpo", "--model", "fresh", *words, "--run", folder, "--quiet")
        assert done.returncode == 2
        assert done.stderr.startswith("panoply: Stopped: in step 1 the norm")
        assert done.stderr.count("\n") == 1


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

    def test_answers_without_success(self, done: pp.Trained) -> None:
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
