"""What is imported when: modules are counted and not seconds, which depend on what else the machine does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

HEAVY = {
    "torch", "numpy", "scipy", "numba", "gymnasium", "transformers", "ray", "vllm", "mujoco", "matplotlib", "rich",
    "wandb", "tensorboard", "peft", "yaml",
}  # fmt: skip
COMMAND = """
import contextlib, io, sys
from panoply.cli import main
sys.argv = ["panoply", *{words!r}]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
"""


def loaded(program: str) -> set[str]:
    """The modules that a program has imported when it ends."""
    found = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(json.loads(found.stdout.splitlines()[-1]))


def test_importing_panoply_imports_little_else() -> None:
    found = loaded("import panoply")
    assert not found & HEAVY
    assert len([name for name in found if name.startswith("panoply")]) <= 3


def test_what_a_script_starts_with_needs_torch_and_nothing_more() -> None:
    found = loaded("import panoply; panoply.plan, panoply.part, panoply.Experience")
    assert not found & (HEAVY - {"torch", "numpy"})
    assert not [
        name for name in found if name.startswith(("panoply.methods.", "panoply.slots.", "panoply.loops."))
    ]


@pytest.mark.parametrize("words", [["list"], ["list", "parts"]], ids=" ".join)
def test_what_there_is_is_listed_without_torch(words: list[str]) -> None:
    assert not loaded(COMMAND.format(words=words)) & HEAVY


def test_commands_that_only_look_do_not_load_torch() -> None:
    words = COMMAND.format(words=["ui", "nowhere"])
    found = loaded(words.replace("redirect_stdout(io.StringIO())", "redirect_stderr(io.StringIO()) as said")
                   + "assert 'There is no folder' in said.getvalue()")  # fmt: skip
    assert not found & (HEAVY - {"numpy"})


def test_a_run_loads_no_compiler_and_nothing_that_spreads_it(tmp_path: Path) -> None:
    """torch's own compiler takes as long to load as torch itself."""
    small = [*tiny.words(**{"run.checkpoint_every": 1}), "--model", "fresh", "--threads", "1", "--steps", "1"]
    found = loaded(COMMAND.format(words=["train", "grpo", *small, "--quiet", "--run", str(tmp_path / "run")]))
    assert "torch._dynamo" not in found
    assert not [name for name in found if name.startswith(("panoply.scale", "ray."))]
    assert tiny.result(tmp_path / "run")["steps"] == 1
