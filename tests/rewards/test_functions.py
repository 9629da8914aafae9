"""Reward functions of users: batches, fields, and everything that can go wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from panoply.errors import PanoplyError
from panoply.rewards.functions import RewardFunction

CODE = """
import asyncio, os, time

def length(completions):
    return [len(c) for c in completions]

def exact(prompts, completions, answer, **rest):
    return [float(c == a) for c, a in zip(completions, answer)]

async def slow_sum(completions):
    async def one(c):
        await asyncio.sleep(0.01)
        return len(c)
    return await asyncio.gather(*[one(c) for c in completions])

def moody(completions):
    print("printed, and not taken for an answer")
    for c in completions:
        if c == "hang":
            time.sleep(60)
        if c == "die":
            os._exit(3)
        if c == "raise":
            raise KeyError("no such thing")
    return [float("nan") if c == "nan" else 1.0 for c in completions]

def short(completions):
    return [1.0] if len(completions) > 1 else [2.0]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(CODE)
    return path


def test_batches_fields_and_async(file: Path) -> None:
    assert RewardFunction(f"{file}:length")({"completions": ["a", "bb"]}) == [1, 2]
    fields = {"prompts": ["p", "q"], "completions": ["1", "2"], "answer": ["1", "1"], "other": [0, 0]}
    assert RewardFunction(f"{file}:exact")(fields) == [1, 0]
    assert RewardFunction(f"{file}:slow_sum")({"completions": ["a", "bb"]}) == [1, 2]


def test_only_the_guilty_samples_are_lost(file: Path) -> None:
    reward = RewardFunction(f"{file}:moody", seconds=2.0)
    assert reward({"completions": ["a", "raise", "b", "nan", "die", "hang", "c"]}) == [
        1,
        None,
        1,
        None,
        None,
        None,
        1,
    ]
    assert sorted(reward.failures) == [
        "KeyError: 'no such thing'",
        "ValueError: it returned nan",
        "it took longer than 2 s",
        "its process died",
    ]
    assert reward({"completions": ["still", "there"]}) == [1, 1]


def test_the_wrong_length_is_noticed(file: Path) -> None:
    reward = RewardFunction(f"{file}:short")
    with pytest.raises(PanoplyError, match="it returned 1 rewards for 2 completions"):
        reward({"completions": ["a", "b"]})


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("nothing.py:f", "names no file that exists"),
        ("{file}", "FILE.py:NAME"),
        ("{file}:absent", "has no function 'absent'"),
    ],
)
def test_a_function_that_is_not_there(file: Path, source: str, sentence: str) -> None:
    with pytest.raises(PanoplyError, match=sentence):
        RewardFunction(source.format(file=file))


def test_a_file_that_does_not_load(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import nonsense_that_is_not_installed\n")
    with pytest.raises(PanoplyError, match="cannot be used: ModuleNotFoundError"):
        RewardFunction(f"{broken}:f")
