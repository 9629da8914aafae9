"""Reward functions of users: batches, fields, and everything that can go wrong with them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from panoply.confined.limits import Limits
from panoply.errors import PanoplyError, Resumable
from panoply.rewards.functions import BREAKDOWNS, RewardFunction, call_all

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

def nap(completions):
    time.sleep(1)
    return [1.0 for _ in completions]

def stuck(completions):
    time.sleep(60)

def hoard(completions):
    return [len(bytearray(2**30)) for _ in completions]

def ask_a_judge(completions):
    raise ConnectionError("the judge is away")

def leave(completions):
    raise SystemExit(0)

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


def test_a_function_that_hangs_is_named_at_once_and_soon_given_up(file: Path) -> None:
    """Once for the whole batch, then some answers at a time: not once for each of a thousand."""
    said: list[str] = []
    reward = RewardFunction(f"{file}:stuck", seconds=0.3)
    reward.say = said.append
    began = time.monotonic()
    with pytest.raises(Resumable, match=r"failed on 5 answers, .* it took longer than 0\.3 s"):
        reward({"completions": ["a"] * 1000})
    assert time.monotonic() - began < 60
    assert len(said) == 1
    assert "it took longer than 0.3 s, on 1000 answers; they are tried one by one" in said[0]


def test_breakdowns_of_small_batches_add_up_unless_a_batch_passes(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("panoply.rewards.functions.BREAKDOWNS", 2)
    assert BREAKDOWNS > 2
    said: list[str] = []
    reward = RewardFunction(f"{file}:moody")
    reward.say = said.append
    assert reward({"completions": ["die"]}) == [None]
    assert reward({"completions": ["a"]}) == [1]
    assert reward({"completions": ["die"]}) == [None]
    with pytest.raises(Resumable, match="failed on 2 answers, the last time because its process died"):
        reward({"completions": ["die"]})
    assert len(said) == 1


def test_functions_work_at_the_same_time(file: Path) -> None:
    functions = [RewardFunction(f"{file}:{name}") for name in ("nap", "nap", "nap", "length")]
    began = time.monotonic()
    assert call_all(functions, {"completions": ["aa"]}) == [[1.0], [1.0], [1.0], [2.0]]
    assert time.monotonic() - began < 2.7


def test_limits_that_bind_are_named(file: Path) -> None:
    reward = RewardFunction(f"{file}:hoard", limits=Limits(memory=0.5))
    assert reward({"completions": ["a"]}) == [None]
    assert list(reward.failures) == ["MemoryError (it may take 0.5 GiB: world.memory raises that)"]
    reward = RewardFunction(f"{file}:ask_a_judge")
    assert reward({"completions": ["a"]}) == [None]
    assert "world.network=true opens it" in next(iter(reward.failures))
    reward = RewardFunction(f"{file}:ask_a_judge", limits=Limits(network=True))
    assert reward({"completions": ["a"]}) == [None]
    assert list(reward.failures) == ["ConnectionError: the judge is away"]


def test_a_function_that_leaves_costs_its_sample(file: Path) -> None:
    reward = RewardFunction(f"{file}:leave")
    assert reward({"completions": ["a", "b"]}) == [None, None]
    assert reward.failures == {"SystemExit: 0": 2}


def test_the_wrong_length_is_noticed(file: Path) -> None:
    reward = RewardFunction(f"{file}:short")
    with pytest.raises(PanoplyError, match="it returned 1 rewards for 2 completions"):
        reward({"completions": ["a", "b"]})


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("nothing.py:f", "names no file that exists"),
        ("{file}", "FILE.py:NAME"),
        ("{file}:absent", "has no function 'absent'; it has length, exact"),
        ("{file}:lenght", "has no function 'lenght'; did you mean 'length'"),
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
