"""`import panoply` is light."""

from __future__ import annotations

import subprocess
import sys

HEAVY = (
    "transformers",
    "ray",
    "vllm",
    "mujoco",
    "matplotlib",
    "rich",
    "wandb",
    "tensorboard",
    "peft",
    "yaml",
)
PROGRAM = f"""
import sys, time, torch
start = time.perf_counter()
import panoply
print(time.perf_counter() - start)
print(*[name for name in {HEAVY!r} if name in sys.modules])
panoply.plan, panoply.part, panoply.Experience
print(*[name for name in {HEAVY!r} if name in sys.modules])
"""


def test_import() -> None:
    best, loaded = 9.0, ""
    for _ in range(2):
        found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
        seconds, *loaded = found.stdout.split("\n")[:3]
        best = min(best, float(seconds))
        if best < 0.3:
            break
    assert best < 0.3
    assert loaded == ["", ""], f"loaded: {loaded}"


def test_commands_that_only_look_do_not_load_torch() -> None:
    program = "import sys; sys.argv = ['panoply', 'ui', 'nowhere']\n"
    program += "try: from panoply.cli import main; main()\nexcept SystemExit: print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
    assert "There is no folder 'nowhere'" in found.stderr
