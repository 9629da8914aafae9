"""What a run folder holds, who may write it, and how a run goes and is resumed."""

from __future__ import annotations

import fcntl
import json
import math
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import panoply as pp
from panoply import checkpoint
from panoply.handle import Step
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

    def test_a_result_of_the_least_is_one(self, done: pp.Trained, tmp_path: Path) -> None:
        """What need not stand in `result.json` need not be there for the policy to be opened."""
        shutil.copytree(done.run, tmp_path / "run")
        told = json.loads((tmp_path / "run/result.json").read_text())
        least = {name: told[name] for name in ("steps", "before", "after")}
        (tmp_path / "run/result.json").write_text(json.dumps(least))
        opened = pp.Trained.of(Run.open(tmp_path / "run"))
        assert (opened.seconds, opened.fingerprint) == (0.0, "")
        assert opened.after == done.after
        opened.policy()

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
