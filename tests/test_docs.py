"""The documentation holds: its code runs, its commands and settings exist, its links lead somewhere.

A Python block whose first line is `# NAME.py` is a file of that name; `sh` blocks are run line by line in the same
folder, training with fewer and smaller steps.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import own_model
import pytest
import tiny

import panoply as pp
from panoply import cli, registry
from panoply.progress import Progress
from panoply.report import reference

DOCS = tiny.ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *(tiny.ROOT / name for name in ("README.md", "CONTRIBUTING.md"))]
SMALL = {
    "grpo": ("sample.prompts=2", "sample.group=4", "run.held_out=4"),
    "dpo": ("data.batch=2", "run.held_out=2"),
    "reward-model": ("data.batch=2", "run.held_out=2"),
}
REWARDS = """
def correct(completions, answer, **_):
    return [float(answer_ in text) for text, answer_ in zip(completions, answer)]

def brief(completions):
    return [1 / (1 + len(text)) for text in completions]
"""


def blocks(page: Path, kind: str) -> list[str]:
    """The fenced blocks of a language; `""` are those that name none."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in fenced if language == kind]


def lines(block: str) -> list[str]:
    """The commands of a shell block."""
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def words_of(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def small(words: list[str]) -> list[str]:
    """A `panoply` command with little to do."""
    if words[0] == "eval":
        return [*words, "--problems", "4"]
    if words[0] != "train":
        return words
    chosen = SMALL.get(words[1], SMALL["grpo"])
    longest = ("world.longest=8",) if "--data" in words else ()
    sets = [w for s in (*chosen, *longest) for w in ("--set", s)]
    return [*words, *sets, "--steps", "2", "--threads", "1", "--quiet"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a model, prompts, preferences and rewards, as the pages take them for granted."""
    own_model.write(tmp_path / "my-model")
    prompts = [{"prompt": f"{i}+1=", "answer": str(i + 1), "completion": str(i + 1)} for i in range(30)]
    pairs = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i)} for i in range(30)]
    for name, rows in (("data.jsonl", prompts), ("pairs.jsonl", pairs)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARDS)
    return tmp_path


def write_files(page: Path, folder: Path) -> list[str]:
    """Write the blocks that are files, and return the others."""
    rest = []
    for block in blocks(page, "python"):
        name = re.match(r"# (\w+\.py)\n", block)
        if name:
            (folder / name[1]).write_text(block)
        else:
            rest.append(block)
    return rest


def in_process(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert not ended.value.code, words


# ------------------------------------------------------------------ code and commands


DRIVER = """
import contextlib, io, json, runpy, sys
from panoply.cli import main

said = []
for program, *words in json.loads(sys.argv[1]):
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            main(words) if program == "panoply" else runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, words
    said.append(out.getvalue())
print(json.dumps(said))
"""


def test_the_tutorial_runs(tmp_path: Path) -> None:
    """In a copy of the package, into which the method moves in the end."""
    page = DOCS / "tutorial.md"
    shutil.copytree(tiny.ROOT / "panoply", tmp_path / "panoply", ignore=shutil.ignore_patterns("__pycache__"))
    assert write_files(page, tmp_path) == []
    assert len((tmp_path / "quiet_grpo.py").read_text().splitlines()) <= 30
    assert len((tmp_path / "test_quiet_grpo.py").read_text().splitlines()) <= 15

    def shell(*command: str) -> str:
        place = tiny.environment(
            PYTHONPATH=str(tmp_path), PANOPLY_COMPILED="0"
        )  # a copy would be compiled anew
        done = subprocess.run(command, cwd=tmp_path, env=place, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def told(commands: list[str]) -> dict[str, str]:
        """What each says: all of them in one process, but for pytest, which imports the method anew."""
        apart = {c: shell(sys.executable, "-m", *words_of(c)) for c in commands if c.startswith("pytest ")}
        here = [command for command in commands if command not in apart]
        orders = [[program, *small(words)] for program, *words in map(words_of, here)]
        heard = json.loads(shell(sys.executable, "-c", DRIVER, json.dumps(orders)))
        return apart | dict(zip(here, heard, strict=True))

    every = [line for block in blocks(page, "sh") for line in lines(block)]
    moves = [line.startswith("mv ") for line in every].index(True)
    said = told(every[:moves])
    shell(*words_of(every[moves]))
    said |= told(every[moves + 1 :])
    assert "1 passed" in said["pytest test_quiet_grpo.py"]
    assert "quiet_praise" in said["panoply show quiet-grpo"].split("changes from grpo")[1]
    assert "different right answers" in said["python varied.py"]
    assert {"grpo@1", "quiet-grpo@1"} <= set(said["panoply runs"].split())
    borrowed = [text for line, text in said.items() if line.startswith("panoply plan rloo")]
    assert without_time(borrowed[0]) == without_time(borrowed[1])


def without_time(text: str) -> list[str]:
    return [line for line in text.splitlines() if "time" not in line]


@pytest.mark.parametrize(
    "page", [tiny.ROOT / "README.md", DOCS / "migrate-from-trl.md"], ids=lambda p: p.stem
)
def test_code_and_commands_of_a_page_run(
    page: Path, place: Path, registries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    train = pp.train

    def short(method: str, **choices: Any) -> pp.Trained:
        little = (*SMALL["grpo"], *(["world.longest=8"] if "data" in choices else []))
        settings = {**choices.pop("settings", {}), **dict(word.split("=") for word in little)}
        return train(method, steps=2, threads=1, progress=Progress(), settings=settings, **choices)

    monkeypatch.setattr(pp, "train", short)
    ours = [block for block in write_files(page, place) if "import panoply as pp" in block]
    assert ours
    for block in ours:
        exec(compile(block, str(page), "exec"), {})
    commands = [words_of(line) for block in blocks(page, "sh") for line in lines(block)]
    assert commands
    for program, *words in commands:
        assert program == "panoply"
        in_process(small(words))


def test_every_form_of_preferences_trains(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example of the page is the file that the command after it names."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("panoply.loops.job.Job._say_pace", lambda *_: None)
    page = DOCS / "preferences.md"
    examples, commands = blocks(page, "json"), [lines(block) for block in blocks(page, "sh")]
    assert len(examples) == len(commands) == len(re.findall("^## ", page.read_text(), re.MULTILINE))
    for example, several in zip(examples, commands, strict=True):
        for line in several:
            _, *words = words_of(line)
            Path(words[words.index("--data") + 1]).write_text(example)
            batch = "data.data.batch=4" if words[1] == "kto" else "data.batch=2"
            sets = [w for s in (batch, "run.held_out=1", "world.longest=16") for w in ("--set", s)]
            in_process([*words, *sets, "--steps", "1", "--threads", "1", "--quiet"])


def test_plans_for_logged_data_can_be_made() -> None:
    commands = [words_of(line) for block in blocks(DOCS / "offline.md", "sh") for line in lines(block)]
    assert len(commands) >= 6
    for program, *words in commands:
        assert (program, words[0]) == ("panoply", "plan")
        in_process(words)


def test_the_commands_of_the_readme_exist(
    registries: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those outside `sh` blocks; what they need of runs made before is not there, so they are planned or parsed."""
    monkeypatch.chdir(tmp_path)
    plain = [line for block in blocks(tiny.ROOT / "README.md", "") for line in lines(block)]
    found = [words_of(line) for line in plain if line.startswith("panoply ")]
    assert len(found) >= 7
    for _, name, *words in found:
        if name in ("train", "plan"):
            in_process(["plan", *words])
        elif name == "show":
            in_process([name, *words])
        else:
            cli._parser().parse_args([name, *words])


# ------------------------------------------------------------------ the table of TRL's arguments


SECTIONS = {
    "GRPOConfig": "grpo",
    "All trainers": "grpo",
    "DPOConfig": "dpo",
    "KTOConfig": "kto",
    "RewardConfig": "reward-model",
    "SFTConfig": "sft",
}
DATA = {"grpo": "data.jsonl", "sft": "data.jsonl"}


def section(title: str) -> str:
    return (DOCS / "migrate-from-trl.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """The cells of each row of a section's table."""
    found = [line for line in section(title).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in found]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@pytest.fixture
def untimed_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that do not measure how long a step takes here."""
    monkeypatch.setattr("panoply.commands.plan._print_pace", lambda *_: None)


@pytest.mark.usefixtures("untimed_plans")
@pytest.mark.parametrize("title", SECTIONS)
def test_settings_named_for_trl_exist(title: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    method = SECTIONS[title]
    own = ["--model", "my-model", "--data", DATA.get(method, "pairs.jsonl")]
    if method == "grpo":
        own += ["--reward", "reward.py:correct", "--set", "update.epochs=2"]  # or bounds have no effect
    known = cli._parser().parse_args(["train", "grpo"]).parser.options()
    assert rows(title)
    for cells in rows(title):
        for span in code(cells[1]):
            words = shlex.split(span)
            if words[0] in ("--run", "--sink", "--resume"):
                assert words[0] in known
            else:
                in_process(["plan", method, *own, *words])


@pytest.mark.usefixtures("untimed_plans")
@pytest.mark.parametrize("title", [t for t in SECTIONS if t.endswith("Config")])
def test_methods_named_for_trl_exist(title: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    named = re.findall(r"`panoply plan ([\w+-]+)`(?:[^`]*\(`(--[^`]+)`\))?", section(title))
    assert named
    for method, more in named:
        online = registry.find("method", method).build().regime == "on_policy"
        data = (
            ["data.jsonl", "--reward", "reward.py:correct"] if online or method == "sft" else ["pairs.jsonl"]
        )
        in_process(["plan", method, "--model", "my-model", "--data", *data, *shlex.split(more)])


@pytest.mark.parametrize("title", SECTIONS)
def test_arguments_named_of_trl_exist(title: str) -> None:
    trl = pytest.importorskip("trl")
    config = getattr(trl, title, trl.GRPOConfig)
    known = {field.name: field.default for field in dataclasses.fields(config)}
    for cells in rows(title):
        for span in code(cells[0]):
            assert span.split("=")[0] in known, span
    if title == "GRPOConfig":
        defaults = {"num_generations": 8, "loss_type": "dapo", "beta": 0.0, "max_completion_length": 512}
        assert {name: known[name] for name in defaults} == defaults


def test_a_setting_without_effect_is_refused_as_the_page_says(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    own = ["--model", "my-model", "--data", "data.jsonl", "--reward", "reward.py:correct"]
    with pytest.raises(SystemExit):
        cli.main(["plan", "grpo", *own, "--set", "surrogate.high=0.28"])
    assert "has no effect" in capsys.readouterr().err


# ------------------------------------------------------------------ the reference, names and links


def test_the_reference_is_current() -> None:
    """If this fails: make docs."""
    registry.entries()
    assert (DOCS / "api.md").read_text() == reference.page()


def test_the_reference_has_every_public_name_and_part() -> None:
    page = (DOCS / "api.md").read_text()
    for name in pp.__all__:
        assert f"### {name}\n" in page
    assert "| `group` | `baseline=mean`, `scale=std`" in page


def test_methods_and_worlds_named_in_the_readme_exist() -> None:
    text = (tiny.ROOT / "README.md").read_text().split("## What there is")[1].split("\n## ")[0]
    for kind, paragraph in (("world", text.split("Methods (")[0]), ("method", text.split("Methods (")[1])):
        for name in code(paragraph):
            if not name.startswith("panoply ") and not registry.is_recipe(name):
                registry.find(kind, name)  # type: ignore[arg-type]


@pytest.mark.parametrize("page", [*PAGES, *tiny.ROOT.glob("examples/**/README.md")], ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = Path(os.path.normpath(page.parent / file)) if file else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), target


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_index_names_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index


# ------------------------------------------------------------------ the table of SB3's arguments


def sb3_rows() -> list[tuple[str, str]]:
    page = (DOCS / "migrate-from-sb3.md").read_text().split("## Arguments\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    return [(theirs.strip(), own.strip()) for theirs, own in cells]


@pytest.mark.parametrize(("theirs", "own"), sb3_rows(), ids=lambda cell: cell.split("`")[1])
def test_settings_named_for_sb3_exist(theirs: str, own: str) -> None:
    known = cli._parser().parse_args(["train", "ppo"]).parser.options()
    (span,) = code(own)
    words = shlex.split(span)
    if words[0] == "--sink":
        assert words[0] in known
        return
    world = "pendulum" if "policy." in span else "CartPole-v1" if "world." in span else "cartpole"
    in_process(["plan", "ppo", "--world", world, "--set", "update.minibatches=2", *words])


OFF_POLICY = {"best_action.update": "ddpg"} | dict.fromkeys(("best_action", "smooth_q", "log_std"), "td3")
OFF_POLICY |= dict.fromkeys(("epsilon", "target"), "dqn")
"""Which agent has settings of some name; the others are SAC's too."""


def option_rows(page: str, after: str) -> list[str]:
    """The options that a page's table names, row by row."""
    text = (DOCS / page).read_text().split(after)[1].split("\n## ")[0]
    cells = [line.split("|")[2] for line in text.splitlines() if line.startswith("| `")]
    return [span for cell in cells for span in code(cell) if span.startswith("--")]


@pytest.mark.parametrize("span", option_rows("migrate-from-sb3.md", "## SAC, TD3, DDPG and DQN\n"))
def test_settings_named_for_agents_of_sb3_exist(span: str) -> None:
    method = next((held for word, held in OFF_POLICY.items() if word in span), "sac")
    in_process(["plan", method, "--world", "cartpole" if method == "dqn" else "pendulum", *shlex.split(span)])


@pytest.mark.parametrize("span", option_rows("migrate-from-d3rlpy.md", "import panoply as pp"))
def test_settings_named_for_d3rlpy_exist(span: str) -> None:
    method = "cql" if "conservative" in span or "soft_policy" in span else "iql"
    in_process(["plan", method, "--world", "logged:pendulum-mixed", *shlex.split(span)])


def test_methods_named_for_d3rlpy_exist() -> None:
    text = (DOCS / "migrate-from-d3rlpy.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if "Config" in line and line.startswith("| `")]
    named = [name for row in rows for name in code(row[2])]
    assert len(named) >= 12
    for name in named:
        registry.find("method", name)


def test_the_page_on_python_runs(place: Path, registries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks, one after another in one namespace, as it is read."""
    monkeypatch.chdir(place)
    train, (first, *rest) = pp.train, blocks(DOCS / "python.md", "python")

    def short(*given: Any, **choices: Any) -> pp.Trained:
        little = {"run.held_out": 2, "sample.prompts": 2, "sample.group": 4, "sample.max_tokens": 4}
        settings = {**little, **choices.pop("settings", {})} if "data" in choices else choices.pop("settings")
        return train(*given, threads=1, settings={**settings, "run.held_out": 2}, **choices)

    monkeypatch.setattr(pp, "train", short)
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate((first, *rest)):
        file = place / f"python-{number}.py"
        file.write_text(block)
        exec(compile(block, file, "exec"), space)
    assert space["steps"].result.after["step"] == 3
    assert Path(space["pp"].plan(space["mine"], "chain", model="fresh").plugins[0]).name == "definitions.py"
