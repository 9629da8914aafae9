"""Reward functions in a sandbox: the same values, and what a sandbox takes away costs a sample or is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from sandbox.boxes import box

from panoply.errors import PanoplyError
from panoply.rewards.functions import RewardFunction, call_all
from panoply.rewards.here import word_of
from panoply.rewards.walled import WalledFunction, imported, wanted
from panoply.sandbox import Wanted
from panoply.worlds.text.jsonl import Jsonl

CODE = """
import os, socket, time
import numpy as np

print("loaded")

def length(completions):
    return [len(c) for c in completions]

def exact(prompts, completions, answer, **rest):
    return np.array([c == a for c, a in zip(completions, answer)], dtype=float)

async def soon(completions):
    return [2.0 for _ in completions]

def moody(completions):
    print("printed, and not taken for an answer")
    for c in completions:
        if c == "hang":
            time.sleep(60)
        if c == "die":
            os.abort()
        if c == "net":
            socket.create_connection(("127.0.0.1", 80))
        if c == "read":
            open("/etc/passwd")
    return [float("nan") if c == "nan" else 1.0 for c in completions]

def short(completions):
    return [1.0]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("rewards") / "mine.py"
    place.write_text(CODE)
    return str(place)


@pytest.fixture(autouse=True)
def _here() -> None:
    box("landlock")


def walled(file: str, name: str, seconds: float = 5.0) -> WalledFunction:
    source = f"{file}:{name}"
    return WalledFunction(source, seconds, 4.0, wanted("landlock", (source,)))


def test_values_are_those_of_a_plain_process(file: str) -> None:
    fields = {"prompts": ["p", "q"], "completions": ["a", "bb"], "answer": ["a", "b"]}
    for name in ("length", "exact"):
        plain = RewardFunction(f"{file}:{name}")
        assert call_all([walled(file, name)], fields) == call_all([plain], fields)
        plain.close()
    assert walled(file, "soon")(fields) == [2.0, 2.0]


def test_a_sample_on_which_it_fails_is_lost_alone_and_the_reason_counted(file: str) -> None:
    function = walled(file, "moody", seconds=1.0)
    said: list[str] = []
    function.say = said.append
    assert function({"completions": ["x", "net", "read", "nan"]}) == [1.0, None, None, None]
    reasons = " ".join(function.failures)
    assert "PermissionError: [Errno 1]" in reasons
    assert "/etc/passwd" in reasons
    assert "it returned nan" in reasons
    assert function({"completions": ["x", "hang"]}) == [1.0, None]
    assert "it took longer than 1 s" in " ".join(function.failures)
    assert "they are tried one by one" in said[0]
    assert function({"completions": ["die", "x"]}) == [None, 1.0]


def test_what_cannot_be_used_is_said_at_once(file: str, tmp_path: Path) -> None:
    with pytest.raises(PanoplyError, match="it has no function 'exakt'"):
        walled(file, "exakt")
    with pytest.raises(PanoplyError, match="names no file that exists"):
        walled(str(tmp_path / "none.py"), "f")
    with pytest.raises(PanoplyError, match="it returned 1 rewards for 2 completions"):
        walled(file, "short")({"completions": ["a", "b"]})
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:")
    with pytest.raises(PanoplyError, match="SyntaxError"):
        walled(str(broken), "f")


def test_the_packages_that_a_file_imports_are_loaded_and_no_others() -> None:
    assert imported(
        "import os, numpy.linalg\nfrom torch import nn\nfrom . import x\nimport not_installed_here"
    ) == (
        "numpy",
        "torch",
    )
    assert wanted("auto", ("nowhere.py:f",)) == Wanted("auto", frozenset({"python", "stdin"}))


def test_a_world_of_ones_own_data_takes_a_sandbox_or_says_why_not(file: str, tmp_path: Path) -> None:
    source = f"{file}:length"
    held = Jsonl(rewards=(source,), sandbox="landlock", seconds=3.0)
    assert held.sandboxed == Wanted("landlock", frozenset({"python", "stdin"}), ("numpy",))
    assert held.walls().startswith("landlock (Landlock")
    (function,) = held._functions
    assert isinstance(function, WalledFunction)
    assert function({"completions": ["abc"]}) == [3.0]
    assert Jsonl(rewards=(source,)).walls() == ""
    with pytest.raises(PanoplyError, match="There is no network in a sandbox"):
        Jsonl(rewards=(source,), sandbox="auto", network=True)
    with pytest.raises(PanoplyError, match="--sandbox has no effect: there are no reward functions"):
        Jsonl(sandbox="auto")
    with pytest.raises(PanoplyError, match="lives in this process and cannot go into a sandbox"):
        Jsonl(rewards=(word_of(len, "len"),), sandbox="auto")
