"""Environments that speak text: what is shown and said, experts, and what becomes of episodes that break."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import own_model
import pytest
import tiny

import panoply as pp
from panoply import registry
from panoply.environments import crew, environment
from panoply.environments.environment import Library, parse
from panoply.errors import PanoplyError, Resumable
from panoply.experience import TRUNCATED
from panoply.policies.text import TextPolicy
from panoply.policies.tokenizer import Tokenizer
from panoply.progress import Progress
from panoply.rollout.playing import play
from panoply.rollout.text import Collector
from panoply.trust import code_in
from panoply.worlds.world import Task

KIT = Library("environments_kit", "environments_kit", "kit", "Say the number.", turns=4, expert=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_model.write(tmp_path_factory.mktemp("own") / "model")


@pytest.fixture(autouse=True)
def _kit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(environment, "LIBRARIES", {**environment.LIBRARIES, "kit": KIT})
    monkeypatch.setenv("PYTHONPATH", f"{tiny.ROOT}:{tiny.ROOT / 'tests'}")
    crew.crew_of.cache_clear()
    yield
    crew.crew_of.cache_clear()


def made(model: Path, name: str = "kit:countdown", **options: Any) -> Any:
    return registry.find("world", name).build(**{"model": str(model), **options})


def tokens(world: Any, text: str) -> list[int]:
    return [*world.tokenizer.encode(text), world.tokenizer.eos_id]


def test_names_have_a_library_an_environment_and_options() -> None:
    assert parse("textworld:rooms=2,quest=3") == ("textworld", "", {"rooms": 2, "quest": 3})
    assert parse("reasoning-gym:chain_sum,a=[1, 2],b=x") == (
        "reasoning-gym", "chain_sum", {"a": [1, 2], "b": "x"},
    )  # fmt: skip
    assert parse("CartPole-v1") is None
    with pytest.raises(PanoplyError, match="names 2 environments"):
        parse("reasoning-gym:a,b")


def test_what_is_shown_goes_through_the_template_and_what_is_said_earns(model: Path) -> None:
    world = made(model)
    task = world.task("train", 0)
    start = 3 + task.data["seed"] % 2
    shown = world.tokenizer.decode(list(task.prompt))
    assert shown == f"<|start|>user\nSay the number.\n\nCount down. {start}<|end|>\n<|start|>assistant\n"
    episode = world.play(task)
    reply = episode.act(tokens(world, f"<think>hm</think> {start} "))
    assert reply.signals == {"success": 0.0, "score": pytest.approx(1 / 3)}
    between = world.tokenizer.decode(list(reply.observation))
    assert between == f"\n<|start|>user\n{start - 1}<|end|>\n<|start|>assistant\n"
    cut_short = world.play(task).act(world.tokenizer.encode(str(start)))
    assert world.tokenizer.decode(list(cut_short.observation)) == f"<|end|>{between}"


def test_episodes_end_with_success_or_at_the_cap(model: Path) -> None:
    world = made(model)
    for index in range(4):
        task = world.task("train", index)
        gold = world.gold(task)
        assert world.grade(task, gold) == {"success": 1.0, "score": pytest.approx(1.0, abs=0.4)}
        lessons = world.lessons(task, np.random.default_rng(0))
        assert len(lessons) == 3 + task.data["seed"] % 2
        assert [token for _, said in lessons for token in said] == gold
    episode = world.play(world.task("train", 0))
    replies = [episode.act(tokens(world, "x")) for _ in range(4)]
    assert [r.done for r in replies] == [False, False, False, True]
    assert replies[-1].truncated
    assert replies[-1].signals == {"success": 0.0, "score": 0.0}


def test_a_fork_goes_on_from_where_the_episode_stood(model: Path) -> None:
    world = made(model)
    episode = world.play(world.task("train", 1))
    episode.act(world.expert(episode))
    other = episode.fork()
    assert world.expert(other) == world.expert(episode)
    other.act(world.expert(other))
    assert world.expert(other) != world.expert(episode)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("raise", "it raised ZeroDivisionError: as asked"),
        ("nan", "it gave the reward nan"),
        ("number", "it showed int and not text"),
        ("die", "its process died"),
        ("hang", "it took longer than 1 s"),
    ],
)
def test_an_environment_that_breaks_costs_its_own_episode(model: Path, word: str, why: str) -> None:
    world, said = made(model, seconds=1.0), []
    world.listen(said.append)
    good, bad = (world.play(world.task("train", index)) for index in range(2))
    good.act(world.expert(good))
    for _ in range(2):
        reply = bad.act(tokens(world, word))
        assert (reply.done, reply.truncated) == (True, True)
        assert reply.signals == {"success": 0.0, "score": 0.0}
        bad = world.play(world.task("train", 1))
        if word == "hang":
            break
    assert len(said) == 1
    assert why in said[0]
    assert sum(world.failures().values()) == (1 if word == "hang" else 2)
    good.act(world.expert(good))
    left = good.act(world.expert(good))
    assert left.signals["score"] > 0, "another episode of the same process goes on where it was"
    world.close()


def test_an_environment_that_only_breaks_stops_the_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "BREAKDOWNS", 3)
    world = made(model)
    task = world.task("train", 0)
    for _ in range(2):
        world.play(task).act(tokens(world, "raise"))
    with pytest.raises(Resumable, match="3 episodes of kit:countdown broke one after another"):
        world.play(task).act(tokens(world, "raise"))


def test_bad_names_get_the_nearest_one(model: Path) -> None:
    for name, sentence in {
        "kit:countdwn": "Unknown environment of kit 'countdwn'. Did you mean 'countdown'?",
        "kit:countdown,stat=2": "Unknown option of kit 'stat'. Did you mean 'start'?",
        "kit:dead": "kit:dead cannot be used: RuntimeError: it never lives.",
    }.items():
        with pytest.raises(PanoplyError) as refused:
            made(model, name).task("train", 0)
        assert str(refused.value) == sentence
    with pytest.raises(PanoplyError, match="Did you mean 'reasoning-gym:x'"):
        registry.find("world", "reasoning-gim:x")
    with pytest.raises(PanoplyError, match="textworld is a library of environments: name one of them"):
        registry.find("world", "textworld")
    with pytest.raises(PanoplyError, match="name its folder with --model"):
        pp.plan("grpo", "kit:countdown")


def test_a_library_that_is_missing_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = dataclasses.replace(KIT, package="no_such_package", extra="kit")
    monkeypatch.setattr(environment, "LIBRARIES", {"kit": gone})
    with pytest.raises(PanoplyError, match=r"needs no_such_package: pip install 'panoply-rl\[kit\]'"):
        pp.plan("grpo", "kit:countdown", model="x", settings={"world.model": "x"})


def test_turns_that_end_together_are_cut_by_the_method_too(model: Path) -> None:
    """`sample.turns` counts whether turns are answered one by one or, as here, together."""
    world = made(model, longest=2)
    tasks = [world.task("train", i) for i in range(2)]
    found = Collector(world, TextPolicy.load(model), 0).episodes(tasks, 2, turns=2)
    assert found.decisions["turn"].unique().tolist() == [0, 1]
    assert (found.decisions["end"] == TRUNCATED).sum() == 4


def test_held_out_problems_are_others(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = made(model, seeds=5)
    trained = {world.task("train", i).data["seed"] for i in range(20)}
    assert len(trained) == 5
    assert not trained & {t.data["seed"] for t in world.held_out(20)}
    by_text = dataclasses.replace(KIT, by_text=True)
    monkeypatch.setattr(environment, "LIBRARIES", {"kit": by_text})
    with pytest.raises(PanoplyError, match="too few different problems"):
        [made(model).task(split, i) for split in ("test", "train") for i in range(2)]


def test_a_run_trains_and_resumes(model: Path, tmp_path: Path) -> None:
    settings = {
        "sample.prompts": 2,
        "sample.group": 2,
        "run.held_out": 2,
        "world.longest": 4,
        "world.workers": 2,
    }
    choices: dict[str, Any] = {
        "world": "kit:countdown",
        "model": str(model),
        "steps": 2,
        "settings": settings,
    }
    tiny.bare(tmp_path / "a", "grpo", **choices)
    for _ in pp.steps("grpo", run=tmp_path / "b", threads=1, progress=Progress(), **choices):
        break
    tiny.resume(tmp_path / "b")
    assert tiny.model_bytes(tmp_path / "a", 2) == tiny.model_bytes(tmp_path / "b", 2)
    world = pp.plan("sft", "kit:countdown", model=str(model)).world()
    assert isinstance(world.tokenizer, Tokenizer)
    task = world.task("test", 0)
    assert isinstance(task, Task)
    policy = pp.load_policy(tmp_path / "a")
    episodes = play(world, policy, task, 2, 1.0, 0, 4)
    assert all(len(e.turns) == 4 or e.signals["success"] for e in episodes)


SMALL = {"sample.prompts": 2, "sample.group": 2, "run.held_out": 1, "world.longest": 6, "world.seeds": 1}


def test_reasoning_gym_trains(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    tiny.bare(
        tmp_path / "run", "grpo", world="reasoning-gym:chain_sum", model=str(model), steps=2, settings=SMALL
    )
    world = made(model, "reasoning-gym:chain_sum,min_terms=2,max_terms=2")
    for split in ("train", "test"):
        task = world.task(split, 0)
        assert world.grade(task, world.gold(task))["success"] == 1
        assert world.grade(task, tokens(world, "<answer>-1</answer>"))["success"] == 0
    with pytest.raises(PanoplyError, match="Did you mean 'chain_sum'"):
        made(model, "reasoning-gym:chain_sun").task("train", 0)


def test_textworld_trains(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its games are made by a compiler, which takes some seconds: two of them."""
    pytest.importorskip("textworld")
    monkeypatch.setenv("PANOPLY_CACHE", str(tmp_path / "cache"))
    name = "textworld:rooms=1,objects=2,quest=1"
    few = {**SMALL, "world.cap": 2}
    tiny.bare(tmp_path / "run", "grpo", world=name, model=str(model), steps=2, settings=few)
    assert len(list((tmp_path / "cache/textworld").glob("*.z8"))) == 2
    world = made(model, name, seeds=1)
    task = world.task("train", 0)
    assert world.grade(task, world.gold(task)) == {"success": 1.0, "score": 1.0}
    assert len(list((tmp_path / "cache/textworld").glob("*.z8"))) == 2, "they are kept by their seeds"


@pytest.mark.parametrize(
    ("said", "command"),
    [
        ("I think\n> open the door", "open the door"),
        ('`go "north"`, look.', 'go "north" , look.'),
        ("(x\t\u00a5\x0e", "x"),
        ("\x0f/etc/passwd\x10\x13\x81\x9a", "etc passwd"),
        ("look\x0e\n\x0e", "look"),
        ("\\Rname", "Rname"),
        ("\\help", "help"),
        ("transcript on", "on"),
        ("transcripts Recordingz on", "on"),
        ("look. SAVE. script", "look. ."),
        ("save the day", "the day"),
        ("go " * 200, ("go " * 200)[:200].strip()),
        ("\x0e", ""),
        ("", ""),
    ],
)
def test_keys_and_words_of_the_interpreter_do_not_reach_it(said: str, command: str) -> None:
    """They would have it write and read files by names that a model has chosen, or show its help for ever."""
    from panoply.environments.textworld import _command

    assert _command(said) == command


def test_a_game_writes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("textworld")
    from panoply.environments.textworld import make

    monkeypatch.setenv("PANOPLY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    game = make("", {"rooms": 1, "objects": 2, "quest": 1})
    game.reset(1)
    for said in ("(x\t\x0e", "name\x0e", "\\R on", "\\help", "script", "transcripts", "save", "look"):
        game.step(said)
    assert not list((tmp_path / "here").iterdir())


OWN = """
class Echo:
    def __init__(self, word="a"):
        self.word = word

    def reset(self, seed):
        return f"Say {self.word}."

    def step(self, said):
        return "", float(said == self.word), True
"""


def test_a_class_of_yours_is_an_environment(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    world = made(model, f"own:{tmp_path}/mine.py:Echo,word=b")
    task = world.task("train", 0)
    assert "Say b." in world.tokenizer.decode(list(task.prompt))
    assert world.grade(task, tokens(world, "b")) == {"success": 1.0, "score": 1.0}
    assert world.grade(task, tokens(world, "a"))["success"] == 0
    with pytest.raises(PanoplyError, match="has no function 'Ecko'"):
        made(model, f"own:{tmp_path}/mine.py:Ecko").task("train", 0)
    with pytest.raises(PanoplyError, match="There is no file"):
        made(model, f"own:{tmp_path}/none.py:Echo").task("train", 0)
    assert code_in({"world": {"id": f"own:{tmp_path}/mine.py:Echo@1"}}) == {f"{tmp_path}/mine.py"}
    assert code_in({"world": {"id": "reasoning-gym:chain_sum@1"}}) == set()


def test_questions_about_a_data_base(model: Path, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "shop.db") as base:
        base.executescript(
            "CREATE TABLE items (name, price); INSERT INTO items VALUES ('pen', 1.5), ('ink', 4);"
        )
    base.close()
    line = {
        "question": "What does ink cost?",
        "answer": 4,
        "sql": "SELECT price FROM items WHERE name = 'ink'",
    }
    (tmp_path / "asked.jsonl").write_text(json.dumps(line))
    world = made(model, f"sqlite:{tmp_path}/shop.db,questions={tmp_path}/asked.jsonl")
    task = world.task("train", 0)
    assert "CREATE TABLE items (name, price)" in world.tokenizer.decode(list(task.prompt))
    assert world.grade(task, world.gold(task))["success"] == 1
    episode = world.play(task)
    for said, shown in {
        "DROP TABLE items": "not authorized",
        "```sql\nSELECT name FROM items\n```": "pen\nink",
        "SELECT 1 WHERE 0": "no rows",
    }.items():
        assert shown in world.tokenizer.decode(list(episode.act(tokens(world, said)).observation))
    assert episode.act(tokens(world, "ANSWER: 4.0")).signals == {"success": 1.0, "score": 1.0}
    assert world.play(task).act(tokens(world, "ANSWER: four")).signals["success"] == 0
    for name, sentence in {
        f"sqlite:{tmp_path}/shop.db": "Questions about shop.db are lines of JSON",
        f"sqlite:{tmp_path}/none.db": "There is no SQLite file",
    }.items():
        with pytest.raises(PanoplyError, match=sentence):
            made(model, name).task("train", 0)


def test_the_moves_of_the_second_seat_are_those_that_are_offered(model: Path) -> None:
    pytest.importorskip("textarena")
    world = made(model, "textarena:TicTacToe-v0")
    episode = world.play(world.task("train", 0))
    shown = world.tokenizer.decode(list(episode.act(tokens(world, "[4]")).observation))
    assert "'[4]'" not in shown.rpartition("Available")[2]


def test_a_mission_of_babyai_is_done_by_its_bot(model: Path) -> None:
    pytest.importorskip("minigrid")
    world = made(model, "babyai:GoToObj")
    task = world.task("train", 0)
    assert world.grade(task, world.gold(task)) == {"success": 1.0, "score": 1.0}
