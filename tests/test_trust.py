"""Python that a run folder names runs only if this user has run it before, or allows it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import tiny
from test_cli import Terminal

import panoply as pp
from panoply import trust
from panoply.trust import Untrusted, code_in


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registries: None) -> None:
    """A user who has run nothing yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process would know: only what is stored."""
    monkeypatch.setattr(trust, "_known", set())
    for name in [n for n in sys.modules if n.startswith("panoply_plugin_")]:
        del sys.modules[name]


def marked(folder: Path) -> tuple[Path, Path]:
    """A plug-in that leaves a mark when it runs."""
    mark, plugin = folder / "mark", folder / "mine.py"
    plugin.write_text(f"open({str(mark)!r}, 'a').write('ran')\n")
    return plugin, mark


@pytest.fixture
def foreign(tmp_path: Path) -> tuple[Path, Path]:
    """A run of somebody else's, whose run.json names a plug-in, and the mark that it would leave."""
    run = tiny.train(tmp_path / "run", steps=1).run
    plugin, mark = marked(tmp_path)
    config = json.loads((run / "run.json").read_text())
    config["plan"]["plugins"] = [str(plugin)]
    (run / "run.json").write_text(json.dumps(config))
    return run, mark


def test_a_run_of_others_is_named_and_refused_until_trusted(
    foreign: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mark = foreign
    (run / "result.json").unlink()
    for refused in (
        lambda: pp.evaluate(run, problems=2, attempts=1),
        lambda: pp.train(resume=run),
        lambda: next(iter(pp.steps(resume=run))),
    ):
        with pytest.raises(Untrusted, match=r"mine\.py\. Read it, and allow it with --trust"):
            refused()
    assert not mark.exists()
    pp.evaluate(run, problems=2, attempts=1, trust=True)
    assert mark.read_text() == "ran"
    forget(monkeypatch)
    pp.evaluate(run, problems=2, attempts=1)  # it is remembered


def test_what_has_changed_is_asked_about_again(
    foreign: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mark = foreign
    pp.evaluate(run, problems=2, attempts=1, trust=True)
    forget(monkeypatch)
    with open(run.parent / "mine.py", "a") as file:
        file.write("# more\n")
    with pytest.raises(Untrusted, match="or that has changed since"):
        pp.evaluate(run, problems=2, attempts=1)
    assert mark.read_text() == "ran"


def test_the_commands(foreign: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    run, mark = foreign
    panoply = Terminal(capsys)
    code, _, err = panoply.run("eval", str(run), "--problems", "2")
    assert code == 2
    assert "mine.py" in err
    code, _, err = panoply.run("train", "--resume", str(run))
    assert code == 2
    code, out, _ = panoply.run("sample", str(run), "1+1=")  # a model is no code
    assert (code, out[:4]) == (0, "1+1=")
    panoply.run("runs", str(run.parent))
    assert not mark.exists()
    code, _, _ = panoply.run("eval", str(run), "--problems", "2", "--trust")
    assert code == 0
    assert mark.exists()


def test_ones_own_run_goes_on_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin, mark = marked(tmp_path)
    run = tiny.train(tmp_path / "run", steps=1, plugins=[str(plugin)]).run
    assert mark.read_text() == "ran"
    forget(monkeypatch)
    pp.evaluate(run, problems=2, attempts=1)
    shutil.rmtree(tmp_path / "state")
    forget(monkeypatch)
    with pytest.raises(Untrusted):
        pp.evaluate(run, problems=2, attempts=1)


def test_a_recipe_of_others(tmp_path: Path) -> None:
    plugin, mark = marked(tmp_path)
    choices = {"world": "chain", "plugins": [str(plugin)]}
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/recipe.json").write_text(json.dumps({"recipe": "rlhf@1", "choices": choices}))
    with pytest.raises(Untrusted, match=r"mine\.py"):
        pp.train(resume=tmp_path / "recipe")
    assert not mark.exists()


def test_byte_code_beside_a_plug_in_is_not_run(tmp_path: Path) -> None:
    """A cached file with the right date would run in place of what was read and hashed."""
    import importlib.util
    import py_compile

    plugin, mark = marked(tmp_path)
    text = plugin.read_text()
    plugin.write_text(text.replace("ran", "bad"))
    py_compile.compile(str(plugin), importlib.util.cache_from_source(str(plugin)))
    seen = plugin.stat()
    plugin.write_text(text)
    import os

    os.utime(plugin, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    pp.extensions.load_plugin(plugin)
    assert mark.read_text() == "ran"


def test_what_of_a_plan_is_code() -> None:
    plan = {
        "plugins": ["/a/mine"],
        "world": {"id": "evil:Env-v0@1", "rewards": ["/a/r.py:good"], "data": "/a/x.jsonl", "env": "os:X-v1"},
        "run": {"model": "/models/py"},
    }
    assert code_in(plan) == {"/a/mine", "/a/r.py", "module evil", "module os"}
    assert code_in({"world": {"id": "logged:cartpole-mixed@1"}}) == set()
    served = {"world": {"id": "openenv:http://there:80/x@1"}, "run": {"held_out_world": "openenv:ws://b"}}
    assert code_in(served) == {"openenv:http://there:80/x", "openenv:ws://b"}


def test_a_server_that_others_named_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even that it answers is found out before it is allowed; another address is asked about again."""
    asked: list[str] = []
    monkeypatch.setattr("urllib.request.urlopen", lambda address, **_: asked.append(address))
    run = tiny.train(tmp_path / "run", steps=1).run
    config = json.loads((run / "run.json").read_text())
    config["plan"]["world"] = {"id": "openenv:http://there.invalid:80@1"}
    (run / "run.json").write_text(json.dumps(config))
    (run / "result.json").unlink()
    for refused in (
        lambda: pp.evaluate(run, problems=2, attempts=1),
        lambda: pp.train(resume=run),
        lambda: pp.play(run),
    ):
        with pytest.raises(
            Untrusted, match=r"a server asked .*openenv:http://there\.invalid:80\. It sees all"
        ):
            refused()
    assert not asked
    with trust.trusting(True):
        trust.check("run.json", config["plan"])
    forget(monkeypatch)
    trust.check("run.json", config["plan"])  # it is remembered
    with pytest.raises(Untrusted, match="server"):
        trust.check("run.json", {"world": {"id": "openenv:http://elsewhere.invalid:80"}})


def test_a_relative_path_could_mean_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin, _ = marked(tmp_path)
    pp.extensions.load_plugin(plugin)
    monkeypatch.chdir(tmp_path)
    trust.check("run.json", {"plugins": [str(plugin)]})
    with pytest.raises(Untrusted):
        trust.check("run.json", {"plugins": ["mine.py"]})
