"""The commands, as a person types them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import tiny

import panoply as pp
from panoply import cli, registry
from panoply.errors import machine_errors
from panoply.loops import on_policy
from panoply.report.text import pasted

COMMANDS = ("train", "plan", "list", "show", "eval", "sample", "runs", "export")


class Terminal:
    """Runs commands in this process and keeps what they print."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self.capsys = capsys

    def __call__(self, *words: str) -> str:
        code, out, err = self.run(*words)
        notes = [line for line in err.splitlines() if line.startswith("From step ")]
        assert (code, err.splitlines()) == (0, notes)
        return out

    def run(self, *words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        out, err = self.capsys.readouterr()
        return int(ended.value.code or 0), out, err


@pytest.fixture
def panoply(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.train(tmp_path_factory.mktemp("cli") / "runs" / "one", steps=2).run


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


class TestHelp:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_explains_itself_with_an_example(self, command: str, panoply: Terminal) -> None:
        shown = panoply(command, "--help")
        assert f"panoply {command}" in shown.split("examples:")[1]

    def test_without_a_command(self, panoply: Terminal) -> None:
        shown = panoply()
        assert all(command in shown for command in COMMANDS)

    def test_version(self, panoply: Terminal) -> None:
        assert panoply("--version") == f"panoply {pp.__version__}\n"


class TestTrain:
    def words(self, folder: Path) -> list[str]:
        return [*tiny.words(), "--model", "fresh", "--threads", "1", "--run", str(folder)]

    def test_the_end_names_the_run_and_what_to_type_next(self, tmp_path: Path, panoply: Terminal) -> None:
        out = panoply.run("train", "grpo", *self.words(tmp_path / "run"), "--steps", "2")[1]
        assert "held-out success  before     after" in out
        assert f"run folder {tmp_path / 'run'}" in out
        assert f"panoply sample {tmp_path / 'run'} '" in out
        assert "--credit reinforce" in out

    @pytest.mark.parametrize(
        ("method", "line"),
        [("sft", "panoply train grpo --set world.operations=2 --model"), ("reinforce", "--credit grpo")],
    )
    def test_what_to_type_next_depends_on_the_method(self, method: str, line: str, tmp_path: Path) -> None:
        from panoply.report.text import trained

        shown = trained(tiny.train(tmp_path / "run", method, steps=1))
        assert line in shown
        assert f"panoply show {method}" in shown

    def test_what_it_says_to_type_next_can_be_typed(
        self, run: Path, panoply: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import shlex

        from panoply.report.text import next_commands
        from panoply.run import Run

        monkeypatch.chdir(tmp_path)
        for line, _ in next_commands(Run.open(run)):
            words = shlex.split(line)[1:]
            if words[0] == "eval":
                words += ["--problems", "4"]
            if words[0] == "train":
                words[0] = "plan"
            assert panoply(*words)

    def test_json(self, tmp_path: Path, panoply: Terminal) -> None:
        out = json.loads(panoply("train", "grpo", *self.words(tmp_path / "run"), "--steps", "1", "--json"))
        assert out["run"] == str(tmp_path / "run")
        assert out["after"]["step"] == 1

    def test_resume(self, tmp_path: Path, panoply: Terminal) -> None:
        done = tiny.train(tmp_path / "run", steps=2)
        (done.run / "result.json").unlink()
        assert str(done.run) in panoply.run("train", "--resume", str(done.run))[1]

    def test_quiet_is_quiet(self, tmp_path: Path, panoply: Terminal) -> None:
        words = [*self.words(tmp_path / "run"), "--steps", "1", "--quiet"]
        assert panoply.run("train", "grpo", *words) == (0, "", "")
        assert tiny.result(tmp_path / "run")["steps"] == 1

    @pytest.mark.parametrize(
        "text", ["3+4=", "it's", "two\nlines\tand 'quotes'", "back\\slash\n", "π\x1b[2J"]
    )
    def test_prompts_can_be_pasted(self, text: str) -> None:
        line = pasted(text)
        assert line.isprintable()
        said = subprocess.run(["bash", "-c", f"printf %s {line}"], capture_output=True, text=True, check=True)
        assert said.stdout == text

    def test_lines_where_there_is_no_terminal(self, tmp_path: Path, panoply: Terminal) -> None:
        code, _, err = panoply.run("train", "grpo", *self.words(tmp_path / "run"), "--steps", "2")
        assert code == 0
        assert err.splitlines()[-1].startswith("step 2/2  success 0.000")
        assert all(line.startswith(("step ", "evaluating ")) for line in err.splitlines())

    def test_from_scratch_imitates_first(
        self, tmp_path: Path, panoply: Terminal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from panoply import training

        plan = training.plan

        def shorter(method: str, world: str = "chain", **choices: object) -> pp.planning.Plan:  # type: ignore[name-defined]
            return plan(method, world, **{**choices, **({"steps": 3} if method == "sft" else {})})

        monkeypatch.setattr(training, "plan", shorter)
        words = [w for w in self.words(tmp_path / "run") if w not in ("--model", "fresh")]
        out = panoply.run("train", "grpo", *words, "--steps", "1", "--from-scratch")[1]
        assert f"run folder {tmp_path / 'run'}" in out
        assert tiny.result(tmp_path / "run-start")["steps"] == 3


class TestPlan:
    def test_what_would_run(self, panoply: Terminal) -> None:
        shown = panoply("plan", "grpo", "--model", "fresh")
        assert "grpo@1 on chain@1, seed 0" in shown
        assert "maximise" in shown
        assert "parameters     107,712" in shown
        assert "defaults without effect here" in shown
        assert widest(shown) <= 100

    def test_as_yaml_and_json(self, panoply: Terminal) -> None:
        import yaml

        made = yaml.safe_load(panoply("plan", "dpo", "--model", "fresh", "--yaml"))
        assert made == json.loads(panoply("plan", "dpo", "--model", "fresh", "--json"))
        assert made["method"]["id"] == "dpo@1"

    def test_the_impossible_is_refused_with_the_reason(self, panoply: Terminal) -> None:
        code, out, err = panoply.run("plan", "grpo", "--set", "regularise.kl=0.1", "--reference", "none")
        assert (code, out) == (2, "")
        assert "compares the policy with a reference model, and --reference none leaves none" in err


class TestLook:
    def test_list(self, panoply: Terminal) -> None:
        shown = panoply("list")
        assert all(name in shown for name in ("sft@1", "grpo@1", "dpo@1", "reinforce@1", "chain@1"))
        assert widest(shown) <= 100
        ids = [entry["id"] for entry in json.loads(panoply("list", "--json"))]
        assert [line.split()[0] for line in shown.splitlines()] == ["id", *ids]  # a line each

    def test_a_work_is_summed_up_in_whole_sentences(self) -> None:
        for entry in registry.entries():
            assert entry.summary.endswith((".", "`", ")", "]")), entry.id
            assert entry.summary in " ".join(entry.doc.split()), entry.id
        assert registry.find("method", "dapo").summary.startswith("DAPO (arXiv 2503.14476). ")

    def test_what_has_the_same_letters_is_told_apart_by_its_paper(self, panoply: Terminal) -> None:
        papers = {e["id"]: e["arxiv"] for e in json.loads(panoply("list", "methods", "--json"))}
        assert papers["spo-single@1"] == "2509.13232"
        assert papers["spo-single@1"] != papers["spo-segment@1"]
        shown = next(line for line in panoply("list", "methods").splitlines() if "spo-single@1" in line)
        assert "2509.13232" in shown

    def test_list_for_programs(self, panoply: Terminal) -> None:
        found = {entry["id"]: entry for entry in json.loads(panoply("list", "--json"))}
        assert {"id", "kind", "paper", "family", "base"} <= found["grpo@1"].keys()
        assert found["chain@1"]["kind"] == "world"
        assert all(e["kind"] == "method" for e in json.loads(panoply("list", "methods", "--json")))
        assert found["gigpo@1"]["verdict"] in (
            "holds",
            "fails",
            "undecided",
            "too small to matter",
            "not able to tell",
        )
        assert all("date" in before for before in found["gigpo@1"]["history"])
        assert "verdict" not in found["grpo@1"]

    def test_list_parts(self, panoply: Terminal) -> None:
        assert "moving_baseline" in panoply("list", "parts")
        assert "group" in json.loads(panoply("list", "parts", "--json"))["credit"]
        shown, parts = panoply("list", "parts"), json.loads(panoply("list", "parts", "--json"))
        assert widest(shown) <= 100
        assert shown.count("\n") == sum(map(len, parts.values())) + 1

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("grpo", ["maximise", "A = (R − mean_group(R))", "credit.baseline", "preset tiny"]),
            ("grpo@1", ["grpo@1"]),
            ("dpo", ["minimise", "losses.logistic.beta"]),
            ("credit.group", ["leave_one_out", "baseline"]),
            ("regularise.kl", ["KL(π_ref‖π)", "unit"]),
            ("chain", ["operations", "teacher", "→"]),
        ],
    )
    def test_show(self, name: str, words: list[str], panoply: Terminal) -> None:
        shown = panoply("show", name)
        assert all(word in shown for word in words)
        assert widest(shown) <= 100

    def test_everything_that_is_listed_can_be_shown(self, panoply: Terminal) -> None:
        names = [entry["id"] for entry in json.loads(panoply("list", "--json"))]
        parts = json.loads(panoply("list", "parts", "--json"))
        names += [f"{slot}.{name}" for slot, found in parts.items() for name in found]
        for name in names:
            assert widest(panoply("show", name)) <= 100, name

    def test_a_narrow_terminal(self, panoply: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "70")
        assert widest(panoply("show", "grpo")) <= 70

    def test_runs(self, run: Path, panoply: Terminal) -> None:
        shown = panoply("runs", str(run.parent))
        assert "finished  2/2" in shown
        (facts,) = json.loads(panoply("runs", str(run.parent), "--json"))
        assert facts["method"] == "grpo@1"
        assert facts["status"] == "finished"
        assert facts["step"] == 2

    def test_runs_where_there_is_none(self, tmp_path: Path, panoply: Terminal) -> None:
        assert "No runs yet" in panoply("runs", str(tmp_path))


class TestUse:
    def test_eval(self, run: Path, panoply: Terminal) -> None:
        shown = panoply("eval", str(run), "--problems", "8")
        assert "pass@1" in shown
        assert "pass@8" in shown
        assert "95 % interval" in shown

    def test_attempts_follow_the_largest_k(self, run: Path, panoply: Terminal) -> None:
        found = json.loads(panoply("eval", str(run), "--problems", "4", "--k", "1,12", "--json"))
        assert found["attempts"] == 12
        assert "pass@12" in found

    def test_eval_of_a_folder_on_a_named_world(self, run: Path, panoply: Terminal) -> None:
        model = run / "checkpoints/step-0000002/model"
        words = [
            "eval",
            str(model),
            "--world",
            "chain",
            "--set",
            "world.operations=3",
            "--problems",
            "4",
            "--json",
        ]
        assert json.loads(panoply(*words))["problems"] == 4

    def test_sample(self, run: Path, panoply: Terminal) -> None:
        shown = panoply("sample", str(run), "1+2*3=", "-n", "3", "--max-tokens", "5")
        assert len(shown.splitlines()) == 3
        assert all(line.startswith("1+2*3=") for line in shown.splitlines())
        unasked = panoply("sample", str(run))
        assert unasked.startswith("prompt  ")
        assert "\nearned  success " in unasked
        greedy = panoply("sample", str(run), "1+2*3=", "--temperature", "0")
        assert greedy == panoply("sample", str(run), "1+2*3=", "--temperature", "0", "--seed", "5")

    def test_export(self, run: Path, tmp_path: Path, panoply: Terminal) -> None:
        assert str(tmp_path / "a/b") in panoply("export", str(run), str(tmp_path / "a/b"))
        assert pp.load_policy(tmp_path / "a/b").fingerprint() == pp.load_policy(run).fingerprint()


class TestProcess:
    """What only a process of its own shows."""

    def test_a_reader_that_has_seen_enough(self) -> None:
        words = " ".join(f"'{w}'" for w in tiny.command("list", "parts"))
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {words} | head -n 1"],
            env=tiny.environment(), capture_output=True, text=True,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")

    def test_a_terminal_without_greek(self) -> None:
        done = tiny.shell("show", "grpo", PYTHONIOENCODING="ascii")
        assert done.returncode == 0
        assert "A = (R ? mean_group(R))" in done.stdout

    def test_the_command_is_stored(self, tmp_path: Path) -> None:
        script = tmp_path / "panoply"
        script.write_text("from panoply.cli import main\nmain()\n")
        words = [
            "train",
            "grpo",
            *tiny.words(),
            "--model",
            "fresh",
            "--steps",
            "1",
            "--run",
            str(tmp_path / "a b"),
        ]
        env = tiny.environment()
        forks.run([sys.executable, str(script), *words], env=env, check=True, capture_output=True)
        stored = json.loads((tmp_path / "a b/run.json").read_text())["command"]
        assert stored.startswith("panoply train grpo --set ")
        assert " --set world.operations=2 " in stored
        assert stored.endswith(f"--run '{tmp_path}/a b'")


class TestSurroundings:
    """What a shell or a machine can do to a command: one sentence and a code, never a traceback."""

    @staticmethod
    def run(words: str, **more: str) -> subprocess.CompletedProcess[str]:
        """A command in a shell, so that its streams can be closed."""
        quoted = shlex.join(tiny.command())
        return subprocess.run(
            words.replace("panoply", quoted, 1), shell=True, executable="/bin/bash", env=tiny.environment(**more),
            capture_output=True, text=True, timeout=120, errors="replace",
        )  # fmt: skip

    @pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
    def test_closed_streams(self, closed: str, tmp_path: Path) -> None:
        done = self.run(f"panoply list {closed}")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_a_full_disk_behind_standard_output(self) -> None:
        if not os.path.exists("/dev/full"):
            pytest.skip("this system has no /dev/full")
        done = self.run("panoply list > /dev/full")
        assert (done.returncode, done.stderr) == (2, "panoply: No space left on device.\n")

    def test_a_folder_whose_name_is_not_text(self) -> None:
        done = self.run(r"panoply train grpo --run $'bad\xff'")
        assert done.returncode == 2
        assert done.stderr.startswith(r"panoply: 'bad\udcff' is not text in UTF-8")
        assert done.stderr.count("\n") == 1

    def test_too_little_memory(self, monkeypatch: pytest.MonkeyPatch, panoply: Terminal) -> None:
        problems: list[BaseException] = [
            MemoryError(),
            RuntimeError(
                "[enforce fail at x] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1048576 bytes."
            ),
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        ]
        for problem in problems:

            def refuse(_: object, problem: BaseException = problem) -> int:
                raise problem

            monkeypatch.setattr(cli, "_main", refuse)
            code, _, said = panoply.run("list")
            assert code == 2
            assert said.startswith("panoply: There is too little memory")
            assert ("1 MiB" in said) == isinstance(problem, RuntimeError)
        with pytest.raises(RuntimeError, match="another"), machine_errors():
            raise RuntimeError("another")

    def test_a_run_without_memory_can_be_resumed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(on_policy, "learn", lambda *_: bytearray(2**62))
            with pytest.raises(
                pp.PanoplyError, match=r"too little memory.*Go on with panoply train --resume"
            ):
                tiny.train(tmp_path / "run")
        assert tiny.resume(tmp_path / "run").after["step"] == 4
