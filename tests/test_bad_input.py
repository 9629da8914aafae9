"""Whatever is wrong with what was typed: one sentence that helps, exit code 2, no traceback."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import tiny
from test_cli import Terminal

import panoply as pp


@pytest.fixture
def panoply(capsys: pytest.CaptureFixture[str], registries: None) -> Terminal:
    return Terminal(capsys)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.train(tmp_path_factory.mktemp("bad") / "runs" / "one", steps=1).run


def assert_refused(panoply: Terminal, words: list[str], *parts: str) -> None:
    """One line on the error stream that holds every part, nothing on the other, and exit code 2."""
    code, out, err = panoply.run(*words)
    assert (code, out) == (2, "")
    assert err.startswith("panoply: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


FRESH = ["--model", "fresh"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        # names
        (["trian", "grpo"], ["Unknown command 'trian'", "'train'"]),
        (["frobnicate"], ["Unknown command 'frobnicate'"]),
        (["train", "reinforse"], ["Unknown method 'reinforse'", "Did you mean 'reinforce'?"]),
        (["train", "grpo@9", *FRESH], ["grpo@9", "grpo@1"]),
        (["train", "grpo", "--world", "chian"], ["Unknown world 'chian'", "'chain'"]),
        (["plan", "grpo", "--credit", "gruop"], ["'gruop'", "'group'"]),
        (["plan", "sft", "--credit", "group"], ["'credit'"]),
        (["plan", "grpo", "--credit", "sft"], ["'sft'", "credit"]),
        (["show", "grop"], ["Unknown method, world or part 'grop'"]),
        (["show", "credit.gruop"], ["Unknown credit part 'gruop'", "'group'"]),
        (["list", "everything"], ["everything"]),
        (["train", "grpo", "--preset", "tinny"], ["Unknown preset of grpo 'tinny'", "'tiny'"]),
        # settings
        (["plan", "grpo", "--set", "update.lrr=1"], ["'lrr'", "'lr'"]),
        (["plan", "grpo", "--set", "updte.lr=1"], ["Unknown setting 'updte.lr'. Did you mean 'update.lr'?"]),
        (["plan", "grpo", "--set", "update.lr"], ["--set takes PATH=VALUE, not 'update.lr'"]),
        (["plan", "grpo", "--set", "=1"], ["--set takes PATH=VALUE"]),
        (["plan", "grpo", "--set", "update.lr=fast"], ["update.lr takes a number, not 'fast'"]),
        (["plan", "grpo", "--set", "credit.scale=sdt"], ["credit.scale takes std"]),
        (["plan", "grpo", "--set", "world.opertions=2"], ["'opertions'", "'operations'"]),
        (["plan", "grpo", "--set", "world.operations=0"], ["chain.operations must be from 1 to 1000, not 0"]),
        (["plan", "grpo", "--set", "run.stesp=2"], ["'stesp'", "'steps'"]),
        (["plan", "grpo", "--set", "regularise.kll=2"], ["'kll'", "'kl'"]),
        (["plan", "grpo", "--set", "surrogate.high=0.3"], ["surrogate.high has no effect"]),
        (["plan", "grpo", "--set", "sample.group=1"], ["credit.baseline cannot be mean"]),
        # options
        (["train"], ["Name a method"]),
        (["plan"], ["needs METHOD"]),
        (["train", "grpo", "--stpes", "3"], ["Unknown option of panoply train '--stpes'", "'--steps'"]),
        (["train", "grpo", "dpo"], ["takes one method; panoply compare grpo dpo compares several"]),
        (["train", "grpo", "--steps", "many"], ["--steps", "'many'"]),
        (["train", "grpo", *FRESH, "--steps", "-3"], ["run.steps must be at least 1, not -3"]),
        (["train", "grpo", *FRESH, "--steps", "0"], ["run.steps must be at least 1"]),
        (["train", "grpo", *FRESH, "--minutes", "0"], ["run.minutes must be above 0"]),
        (["train", "grpo", *FRESH, "--threads", "-1"], ["run.threads must be from 0 to 1024"]),
        (["train", "grpo", *FRESH, "--device", "abacus"], ["Unknown device 'abacus'. There is: auto, cpu, cuda"]),
        (["train", "grpo", "--dtype", "float8"], ["float8"]),
        (["train", "grpo", *FRESH, "--sink", "tensorbord"], ["Unknown sink 'tensorbord'", "'tensorboard'"]),
        (["train", "grpo", "--from-scratch", *FRESH], ["leave --model out"]),
        # places
        (["train", "grpo", "--model", "no/where"], ["There is no folder no/where"]),
        (["train", "grpo", "--run", "/proc/nothing/here"], ["Cannot make the run folder /proc/nothing/here"]),
        (["train", "grpo", "--plugin", "no.py"], ["There is no plug-in file 'no.py'"]),
        (["train", "--resume", "no/where"], ["There is no run folder 'no/where'"]),
        (["train", "--resume", "/"], ["'/' is not a run: it has no run.json"]),
        (["eval", "no/where"], ["There is no run folder 'no/where'"]),
        (["eval", "no/where", "--world", "chain"], ["There is no folder no/where"]),
        (["sample", "no/where", "1+1="], ["There is no folder no/where"]),
        (["runs", "no/where"], ["There is no folder 'no/where'"]),
        (["export", "no/where", "x"], ["There is no run folder 'no/where'"]),
    ],
)  # fmt: skip
def test_refused(
    words: list[str], parts: list[str], panoply: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(panoply, words, *parts)
    assert not list(tmp_path.rglob("run.json")), "a run folder was left behind"


OWN = ["--model", "m", "--data", "own.jsonl"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        # a reward function
        (["plan", "grpo", *OWN, "--reward", "reward.py"],
         "A reward function is named FILE.py:NAME, such as reward.py:correct. reward.py has correct, brief."),
        (["plan", "grpo", *OWN, "--reward", "reward.py:"],
         "A reward function is named FILE.py:NAME, such as reward.py:correct. reward.py has correct, brief."),
        (["plan", "grpo", *OWN, "--reward", "reward.py:corect"],
         "Unknown function of reward.py 'corect'. Did you mean 'correct'?"),
        (["plan", "grpo", *OWN, "--reward", "reward.py:x=0.5"],
         "Unknown function of reward.py 'x'. There is: brief, correct."),
        (["plan", "grpo", *OWN, "--reward", "rewards.py:correct"],
         "There is no file 'rewards.py'. Did you mean 'reward.py'?"),
        (["plan", "grpo", "--reward", "reward.py"],
         "A reward function is named FILE.py:NAME, such as reward.py:correct. reward.py has correct, brief."),
        # data
        (["plan", "grpo", "--data", "own.csv", "--model", "m"],
         "--data takes FILE.jsonl, with one JSON object a line; 'own.csv' is not one."),
        (["plan", "grpo", "--world", "jsonl"],
         "The world jsonl is your own data: name its file with --data FILE.jsonl."),
        # devices and number types
        (["sample", "START", "1+1=", "--device", "gpu"], "Unknown device 'gpu'. Did you mean 'cuda'?"),
        (["sample", "START", "1+1=", "--device", "GPU:1"], "Unknown device 'GPU:1'. Did you mean 'cuda:1'?"),
        (["sample", "START", "1+1=", "--device", "cuda0"], "Unknown device 'cuda0'. Did you mean 'cuda:0'?"),
        (["plan", "grpo", "--dtype", "bf16"], "Unknown value of --dtype 'bf16'. Did you mean 'bfloat16'?"),
        # settings, by the names they have elsewhere, without their slot, as options, out of bounds
        (["plan", "grpo", "--set", "update.lr=-1"], "update.lr must be above 0, not -1."),
        (["plan", "grpo", "--set", "update.adam.lr=1"],
         "Unknown setting of update (adam) 'adam.lr'. Did you mean 'update.lr'?"),
        (["plan", "grpo", "--set", "sample.temperature=-1"], "sample.temperature must be from 0 to 100, not -1."),
        (["plan", "grpo", "--set", "regularise.kl=-1"], "regularise.kl.weight must be at least 0, not -1."),
        (["plan", "grpo", "--set", "lr=1"], "Unknown setting 'lr'. Did you mean 'update.lr'?"),
        (["plan", "grpo", "--set", "learning_rate=1"], "Unknown setting 'learning_rate'. Did you mean 'update.lr'?"),
        (["plan", "grpo", "--set", "beta=1"], "Unknown setting 'beta'. Did you mean 'regularise.kl'?"),
        (["plan", "dpo", "--set", "beta=1"], "Unknown setting 'beta'. Did you mean 'losses.logistic.beta'?"),
        (["plan", "grpo", "--set", "steps=1"], "Unknown setting 'steps'. Did you mean 'run.steps'?"),
        (["plan", "grpo", "--set", "surrogate.epsilon=1"],
         "Unknown setting of surrogate (clip) 'epsilon'. Did you mean 'surrogate.low' or 'surrogate.high'?"),
        (["plan", "grpo", "--set", "sample.num_generations=8"],
         "Unknown setting of sample (groups) 'num_generations'. Did you mean 'sample.group'?"),
        (["plan", "grpo", "--set", "regularise.beta=1"],
         "Unknown regularise part 'beta'. Did you mean 'regularise.kl'?"),
        (["plan", "grpo", "--lr", "1e-4"], "panoply plan has no option '--lr', but a setting: --set update.lr=VALUE."),
        (["train", "ppo", "--learning-rate=1e-4"],
         "panoply train has no option '--learning-rate', but a setting: --set update.lr=VALUE."),
        (["plan", "grpo", "--stpes", "3"], "Unknown option of panoply plan '--stpes'. Did you mean '--steps'?"),
        (["train", "ppo", "--output-dir", "x"],
         "panoply train has no option '--output-dir', but --run DIR for the run's folder."),
        # words in the wrong place
        (["plan", "grpo", "--set", "update.lr=1e-4", "run.steps=3"],
         "panoply plan takes every setting by a --set of its own: --set run.steps=3."),
        (["plan", "grpo", "chain"], "panoply plan takes a world by its option: --world chain."),
        (["plan", "GRPO"], "Unknown method 'GRPO'. Did you mean 'grpo'?"),
        (["plan", "gpro"], "Unknown method 'gpro'. Did you mean 'grpo'?"),
        (["plan", "grpo", "--steps", "ten"], "--steps takes a whole number, not 'ten'."),
        (["plan", "grpo", "--minutes", "soon"], "--minutes takes a number, not 'soon'."),
        (["plan", "grpo", "--steps"], "--steps needs a value. See panoply plan --help."),
        (["eval"], "panoply eval needs RUN|DIR, such as panoply eval runs/RUN"),
        (["show"], "panoply show needs NAME, such as panoply show grpo"),
        (["list", "method"], "Unknown choice of panoply list 'method'. Did you mean 'methods'?"),
        (["show", "beta1"], "'beta1' is a setting of update.adam"),
    ],
)  # fmt: skip
def test_what_a_newcomer_types(
    words: list[str], sentence: str, panoply: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("reward.py").write_text("import math\n\nHALF = 0.5\n\ndef correct(): ...\n\ndef brief(): ...\n")
    start = str(Path(pp.__file__).parent / "assets" / "chain-start")
    assert_refused(panoply, [start if word == "START" else word for word in words], sentence)


def test_names_that_a_reward_file_may_bind_otherwise_are_left_to_it(tmp_path: Path) -> None:
    from panoply.own import _check_function

    file = tmp_path / "reward.py"
    for text in (
        "from rewards import judge",
        "judge = make()",
        "from rewards import *",
        "class judge: ...",
        "def (",
    ):
        file.write_text(text)
        _check_function(f"{file}:judge=0.5")
    file.write_text("judges = 1")
    with pytest.raises(pp.PanoplyError, match="Unknown function"):
        _check_function(f"{file}:judge")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train", "grpo", "--resume", "RUN"], ["leave the method out"]),
        (["train", "--resume", "RUN", "--steps", "9"], ["leave --steps out"]),
        (["train", "--resume", "RUN", "--world", "chain"], ["leave --world out"]),
        (["train", "--resume", "RUN", "--set", "update.lr=1"], ["leave --set out"]),
        (["train", "--resume", "RUN", "--from-scratch"], ["leave --from-scratch out"]),
        (["train", "--resume", "RUN", "--sink", "tensorboard"], ["leave --sink out"]),
        (["train", "--resume", "RUN"], ["is finished: there is nothing to resume"]),
        (["train", "grpo", "--run", "RUN", *FRESH], ["already holds a run"]),
        (
            ["eval", "RUN", "--k", "16", "--attempts", "8"],
            ["pass@16 needs at least 16 attempts a problem; there are 8"],
        ),
        (["eval", "RUN", "--k", "0"], ["k must be at least 1, not 0"]),
        (["eval", "RUN", "--k", "one"], ["--k takes numbers such as 1,4,16, not 'one'"]),
        (["eval", "RUN", "--attempts", "0", "--k", "1"], ["attempts must be at least 1"]),
        (["eval", "RUN", "--problems", "0"], ["problems must be at least 1"]),
        (["eval", "RUN", "--problems", "100000"], ["too few problems"]),
        (["eval", "RUN", "--temperature", "-1"], ["temperature must be at least 0"]),
        (["eval", "RUN", "--set", "update.lr=1"], ["only settings of the world"]),
        (["eval", "RUN", "--set", "world.operatons=2"], ["'operatons'", "'operations'"]),
        (["sample", "RUN", ""], ["The prompt is empty"]),
        (["sample", "RUN", "1+x="], ["The tokenizer has no token for 'x'"]),
        (["sample", "RUN", "1+" * 9000], ["leaves no room in the model's context"]),
        (["sample", "RUN", "1+1=", "-n", "0"], ["n must be at least 1"]),
        (["sample", "RUN", "1+1=", "--max-tokens", "0"], ["max_tokens must be at least 1"]),
        (["sample", "RUN", "1+1=", "--temperature", "-1"], ["temperature must be at least 0"]),
        (["export", "RUN", "RUN"], ["is not empty: name another folder"]),
        (["export", "RUN", "/proc/here"], ["Cannot export to /proc/here"]),
        (["export", "RUN", "x", "--which", "worst"], ["worst"]),
    ],
)
def test_refused_about_a_run(
    words: list[str], parts: list[str], run: Path, panoply: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "100000" in words:
        monkeypatch.setattr("panoply.worlds.world.TextWorld.held_out", _too_few)
    assert_refused(panoply, [str(run) if word == "RUN" else word for word in words], *parts)


def _too_few(world: object, n: int) -> None:
    raise pp.PanoplyError(f"chain has too few problems to hold out {n}; 3 were found.")


class TestModelFolder:
    """Damage done to a model folder, for every command that opens one."""

    @pytest.fixture
    def model(self, run: Path, tmp_path: Path) -> Path:
        shutil.copytree(run / "checkpoints/step-0000001/model", tmp_path / "model")
        return tmp_path / "model"

    def refused(self, panoply: Terminal, model: Path, *parts: str) -> None:
        assert_refused(panoply, ["sample", str(model), "1+1="], *parts)
        assert_refused(panoply, ["eval", str(model), "--world", "chain", "--problems", "2"], *parts)
        run = str(model.parent / "run")
        assert_refused(panoply, ["train", "grpo", *tiny.words(), "--model", str(model), "--run", run], *parts)
        assert not os.path.exists(run)

    def test_weights_cut_short(self, model: Path, panoply: Terminal) -> None:
        file = model / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        self.refused(panoply, model, "model.safetensors", "cut short")

    def test_weights_that_are_something_else(self, model: Path, panoply: Terminal) -> None:
        (model / "model.safetensors").write_text("hello")
        self.refused(panoply, model, "model.safetensors")

    def test_no_weights(self, model: Path, panoply: Terminal) -> None:
        (model / "model.safetensors").unlink()
        self.refused(panoply, model, "holds no weights")

    def test_only_a_pickle(self, model: Path, panoply: Terminal) -> None:
        (model / "model.safetensors").rename(model / "pytorch_model.bin")
        self.refused(panoply, model, "pickled weights, which are never opened")

    def test_no_config(self, model: Path, panoply: Terminal) -> None:
        (model / "config.json").unlink()
        self.refused(panoply, model, "is not a model folder: it has no config.json")

    def test_a_config_that_is_not_json(self, model: Path, panoply: Terminal) -> None:
        (model / "config.json").write_text("{")
        self.refused(panoply, model, "config.json is not valid JSON")

    def test_a_config_that_does_not_fit(self, model: Path, panoply: Terminal) -> None:
        config = json.loads((model / "config.json").read_text())
        config["hidden_size"] *= 2
        (model / "config.json").write_text(json.dumps(config))
        self.refused(panoply, model, "do not fit its config.json")

    def test_no_tokenizer(self, model: Path, panoply: Terminal) -> None:
        (model / "tokenizer.json").unlink()
        self.refused(panoply, model, "has no tokenizer.json")

    def test_a_tokenizer_that_cannot_be_read(self, model: Path, panoply: Terminal) -> None:
        (model / "tokenizer.json").write_text("{}")
        self.refused(panoply, model, "The tokenizer in", "cannot be read")

    def test_a_checkpoint_cut_short(self, run: Path, tmp_path: Path, panoply: Terminal) -> None:
        shutil.copytree(run / "checkpoints/step-0000001", tmp_path / "step-0000001")
        (tmp_path / "step-0000001/model/config.json").write_text("")
        words = ["sample", str(tmp_path / "step-0000001"), "1+1="]
        assert_refused(panoply, words, "is not usable: model/config.json is cut short")

    def test_a_run_without_a_checkpoint(self, run: Path, tmp_path: Path, panoply: Terminal) -> None:
        shutil.copytree(run, tmp_path / "run")
        shutil.rmtree(tmp_path / "run/checkpoints")
        for words in (["sample", "RUN", "1+1="], ["eval", "RUN", "--problems", "2"], ["export", "RUN", "x"]):
            words = [str(tmp_path / "run") if w == "RUN" else w for w in words]
            assert_refused(panoply, words, "has no usable checkpoint yet")


class TestPlugin:
    @pytest.mark.parametrize(
        ("code", "parts"),
        [
            ("def broken(:", ["cannot be loaded: SyntaxError"]),
            ("import a_module_that_is_not_there", ["ModuleNotFoundError", "a_module_that_is_not_there"]),
            ("1 / 0", ["ZeroDivisionError"]),
            ("import panoply as pp\n@pp.method('mine')\ndef mine(): ...", ["'mine' is not a versioned id"]),
            (
                "import panoply as pp\n@pp.part('credits')\ndef mine(x): ...",
                ["Unknown slot 'credits'", "'credit'"],
            ),
        ],
    )
    def test_a_broken_one(self, code: str, parts: list[str], tmp_path: Path, panoply: Terminal) -> None:
        (tmp_path / "mine.py").write_text(code)
        for words in (["list"], ["plan", "grpo", *FRESH]):
            assert_refused(panoply, [*words, "--plugin", str(tmp_path / "mine.py")], *parts)

    def test_one_that_a_run_needs_and_that_has_gone(self, tmp_path: Path, panoply: Terminal) -> None:
        plugin = tmp_path / "mine.py"
        plugin.write_text("import panoply as pp")
        done = tiny.train(tmp_path / "run", steps=1, plugins=[str(plugin)])
        plugin.unlink()
        assert_refused(panoply, ["eval", str(done.run)], f"There is no plug-in file '{plugin}'")


def test_nothing_but_the_sentence_reaches_the_terminal() -> None:
    """In a process of its own, where no traceback can hide."""
    done = tiny.shell("train", "reinforse")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "panoply: Unknown method 'reinforse'. Did you mean 'reinforce'?\n"


def test_a_pipe_in_place_of_a_plug_in_is_refused_at_once(tmp_path: Path, panoply: Terminal) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    assert_refused(panoply, ["plan", "grpo", "--plugin", str(tmp_path / "pipe.py")], "is not a file")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("@pp.world('mine@1')\nclass Mine: pass\n", "is registered as a world and is none"),
        (
            "@pp.method('mine@1', presets=print)\ndef mine(): return pp.grpo()\n",
            "is registered with presets=",
        ),
        ("@pp.method('mine@1', presets={'tiny': 3})\ndef mine(): return pp.grpo()\n", "are settings by name"),
        ("@pp.method('mine@1', base=3)\ndef mine(): return pp.grpo()\n", "is registered with base=3"),
        ("@pp.method(3)\ndef mine(): return pp.grpo()\n", "is not a versioned id"),
    ],
)
def test_what_a_plug_in_registers_is_checked_at_once(
    panoply: Terminal, tmp_path: Path, text: str, sentence: str
) -> None:
    (tmp_path / "mine.py").write_text(f"import panoply as pp\n{text}")
    assert_refused(panoply, ["list", "--plugin", str(tmp_path / "mine.py")], sentence)


def test_a_type_that_is_none(panoply: Terminal, tmp_path: Path) -> None:
    text = "import panoply as pp\n@pp.part('credit')\ndef mine(experience, *, a: 'credit' = 1): return experience\n"
    (tmp_path / "mine.py").write_text(text)
    words = ["show", "credit.mine", "--plugin", str(tmp_path / "mine.py")]
    assert_refused(panoply, words, "credit.mine has a type that is none")
