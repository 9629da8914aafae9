"""What was handed over in Python elsewhere: in workers and comparisons, in a run that is resumed, in a recipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import forks
import own_model
import pytest
import tiny
from given_kit import ROWS, SMALL, right

import panoply as pp
from panoply import extensions, given, registry, session
from panoply.methods.base.grpo import grpo
from panoply.progress import Progress
from panoply.recipes import Recipe, Stage
from panoply.run import Run
from panoply.slots.credit.groups import group
from panoply.slots.update.optimisers import adam


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_model.write(tmp_path_factory.mktemp("given") / "my-model")


SCRIPT = """
    import sys

    import helpers
    import panoply as pp
    from panoply.methods.base.grpo import TINY, grpo

    SHARE = 0.5


    def centre(values):
        return helpers.shifted(values, SHARE)


    @pp.part("credit", equation="A = R − ½")
    def half(experience, *, scale: float = 1.0):
        episodes = experience.by("episode")
        return scale * episodes.rows(centre(episodes.sum(experience["reward"])))


    @pp.method("half-grpo@1", base="grpo", presets={"tiny": TINY})
    def half_grpo():
        return grpo().but(credit=half())


    settings = {"world.operations": 2, "run.held_out": 4, "sample.prompts": 2, "sample.group": 4}
    found = pp.compare(
        "grpo:update.lr=0.1", {"mine": grpo().but(credit=half(scale=2.0))}, half_grpo(), world="chain", seeds=1,
        budget="steps=1", settings=settings, model="fresh", workers=1, folder="found", cache="cache",
    )
    print([r.arm.label for r in found.results], found.failed)
    print(found.results[1].folders[0])
"""


def test_a_method_of_a_script_runs_in_the_workers_of_compare_and_can_be_evaluated(tmp_path: Path) -> None:
    """The script has no guard against being imported: it is not run again, only its definitions are."""
    script, (body, _) = textwrap.dedent(SCRIPT), textwrap.dedent(SCRIPT).split("found = ")
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "helpers.py").write_text("def shifted(values, by):\n    return values - by\n")
    done = python(tmp_path, "script.py")
    assert done.returncode == 0, done.stderr
    labels, folder = done.stdout.splitlines()
    assert labels == "['grpo:update.lr=0.1', 'mine', 'half-grpo'] {}"
    kept = (tmp_path / folder / "given/definitions.py").read_text()
    assert "pp.compare" not in kept
    assert "SHARE = 0.5" in kept
    (tmp_path / folder / "result.json").unlink()
    (tmp_path / "script.py").write_text(
        f"{body}\ndone = pp.train(resume={folder!r})\nprint(pp.evaluate(done, problems=2, attempts=1).problems)"
    )
    assert python(tmp_path, "script.py").stdout == "2\n", (
        "what the script defines is what the run was made with"
    )


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return forks.run(
        [sys.executable, *words],
        cwd=folder,
        env=tiny.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_definitions_that_differ_from_those_of_a_run_are_not_mixed_up(
    tmp_path: Path, registries: None
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import panoply as pp\nBY = 2.0\n\n\n@pp.part('credit')\ndef by_two(experience):\n"
        "    return experience['reward'] * BY\n"
    )
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(file.read_text(), file, "exec"), space)
    made = pp.plan("grpo", credit=space["by_two"]())
    (kept,) = made.plugins
    assert "BY = 2.0" in Path(kept).read_text()
    extensions.load_plugin(kept)
    assert registry.find_part("credit", "by_two") is space["by_two"], "it is here already"
    other = tmp_path / "definitions.py"
    other.write_text(Path(kept).read_text().replace("BY = 2.0", "BY = 3.0"))
    with pytest.raises(pp.PanoplyError, match=r"credit\.by_two is defined otherwise in this session"):
        extensions.load_plugin(other)
    file.write_text(file.read_text().replace("* BY", "/ BY"))
    assert str(session.missing(made)).startswith("The file that credit.by_two is written in was changed")


def test_the_same_data_is_found_again_wherever_it_is_kept(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from panoply.evidence import cache

    first = pp.plan("grpo", data=ROWS, model=model, reward=right)
    monkeypatch.setattr(
        given, "_temporary", lambda process: Path(given.tempfile.mkdtemp(prefix="panoply-given-"))
    )
    second = pp.plan("grpo", data=ROWS, model=model, reward=right)
    assert first.world_options["data"] != second.world_options["data"]
    assert cache.identity(first) == cache.identity(second)
    assert cache.identity(first) != cache.identity(pp.plan("grpo", data=ROWS[1:], model=model, reward=right))


def test_a_script_that_is_its_own_plug_in_does_not_start_itself_for_ever(
    tmp_path: Path, registries: None
) -> None:
    (tmp_path / "script.py").write_text('import panoply as pp\npp.train("grpo", plugins=["script.py"])\n')
    why = r"script\.py trains while it is loaded as a plug-in: put that below if __name__ == '__main__'"
    with pytest.raises(pp.PanoplyError, match=why):
        extensions.load_plugin(tmp_path / "script.py")


def test_what_only_this_process_has_is_refused_by_compare(
    model: Path, registries: None, tmp_path: Path
) -> None:
    offset = 0.5

    @pp.part("credit")
    def bound(experience: Any) -> Any:
        return experience["reward"] - offset

    method = grpo().but(credit=bound())
    with pytest.raises(
        pp.PanoplyError, match=r"Credit.bound uses 'offset' of the function around it: put it into a"
    ):
        pp.compare("grpo", method, world="chain", seeds=1, budget="steps=1", cache=tmp_path)
    with pytest.raises(pp.PanoplyError, match="'function' exists in this process alone"):
        pp.compare(
            "grpo", "rloo", data=ROWS, model=model, reward=lambda completions: [0.0], seeds=1, budget="steps=1",
            settings=SMALL, cache=tmp_path,
        )  # fmt: skip
    notes = tiny.Notes()
    plain: dict[str, Any] = {"settings": tiny.SETTINGS, "model": "fresh", "steps": 1, "threads": 1}
    pp.train(method, run=tmp_path / "run", progress=notes, **plain)
    assert "Until then the run belongs to this process." in notes.said[0]


def test_a_part_that_was_defined_anew_is_not_taken_for_the_new_one(registries: None) -> None:
    def define(by: float) -> Any:
        space = {"by": by, "pp": pp}
        exec("@pp.part('credit')\ndef anew(experience):\n    return experience['reward'] * by", space)
        return space["anew"]

    old = define(1.0)()
    define(2.0)
    with pytest.raises(pp.PanoplyError, match=r"credit\.anew was defined anew after this part had been made"):
        pp.plan("grpo", credit=old)


def test_rows_and_parts_of_a_recipe_are_kept_with_it(tmp_path: Path, model: Path, registries: None) -> None:
    @registry.recipe("toy-two@1")
    def two() -> Recipe:
        return Recipe((Stage("first", "sft"), Stage("second", "sft", options={"model": "@first"})))

    rows = [{"prompt": str(n), "completion": "b"} for n in range(12)]
    settings = {"run.steps": 1, "run.held_out": 1, "first.data.batch": 2, "second.data.batch": 2}
    settings |= {"second.update": adam(lr=1e-5)}
    choices: dict[str, Any] = {"data": rows, "model": model, "settings": settings, "threads": 1}
    done = pp.train("toy-two", run=tmp_path / "all", progress=Progress(), **choices)
    kept = tmp_path / "all/given/data.jsonl"
    assert [json.loads(line) for line in kept.read_text().splitlines()] == rows
    made = Run.open(done.run).plan()
    assert made.world_options["data"] == str(kept.resolve())
    assert made.method.slots()["update"] == adam(lr=1e-5)
    (done.run / "result.json").unlink()
    assert tiny.resume(tmp_path / "all").fingerprint == done.fingerprint


def test_paths_are_taken_as_paths(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    made = pp.plan("grpo", data=file, model=model, reward=right)
    assert made.world_options["data"] == str(file)
    assert made.options.model == os.fspath(model)


def test_own_data_is_compared_from_python_and_from_the_command_line(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from panoply import cli
    from panoply.evidence import compare as comparing

    asked: list[Any] = []

    def run_all(orders: Any, *_: Any) -> None:
        asked.append([(o.plan.world_id, o.plan.world_options["weights"], o.plan.method_id) for o in orders])
        raise pp.PanoplyError("That is enough.")

    monkeypatch.setattr(comparing.pool, "run_all", run_all)
    with pytest.raises(pp.PanoplyError, match="That is enough"):
        pp.compare("grpo", "rloo", data=ROWS, reward={right: 2.0}, model=model, seeds=1, budget="steps=1")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "r.py").write_text("def f(completions):\n    return [0.0] * len(completions)\n")
    words = [
        "--data",
        str(tmp_path / "data.jsonl"),
        "--reward",
        f"{tmp_path / 'r.py'}:f=2",
        "--model",
        str(model),
    ]
    with pytest.raises(SystemExit):
        cli.main(["compare", "grpo", "rloo", *words, "--seeds", "1", "--budget", "steps=1"])
    assert asked[0] == asked[1] == [("jsonl@1", (2.0,), "grpo@1"), ("jsonl@1", (2.0,), "rloo@1")]


def test_slots_are_named_one_by_one() -> None:
    for call in (pp.plan, pp.train):
        with pytest.raises(pp.PanoplyError, match=r"by the name of their slot, such as credit=group\(\)"):
            call("grpo", slots={"credit": group()})  # type: ignore[operator]
