"""Episodes played to be looked at: the turns of a world of several, its tools, and what they earn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny
from test_cli import Terminal

import panoply as pp
from panoply.worlds.text.keydoor import Keydoor
from panoply.worlds.text.tools import Tools

ASSETS = Path(pp.__file__).parent / "assets"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a world whose turns call a tool."""
    settings = {"sample.prompts": 2, "sample.group": 2, "run.held_out": 4}
    folder = tmp_path_factory.mktemp("playing") / "run"
    return pp.train("grpo", "tools", run=folder, steps=1, settings=settings, progress=tiny.Notes()).run


def test_an_episode_is_what_the_world_makes_of_what_is_said() -> None:
    """Said again to a fresh play, each turn gets the same answer and earns the same."""
    world = Keydoor()
    for episode in pp.play(ASSETS / "keydoor-start", world="keydoor", n=6):
        play = world.play(world.task("test", 0))
        assert world.tokenizer.decode(list(play.prompt)) == episode.prompt
        total: dict[str, float] = {}
        for i, turn in enumerate(episode.turns):
            reply = play.act(world.tokenizer.encode(turn.said))
            total |= {name: total.get(name, 0.0) + value for name, value in reply.signals.items()}
            assert reply.done == (i == len(episode.turns) - 1)
            assert turn.seen == ("" if reply.done else world.tokenizer.decode(list(reply.observation)))
        assert episode.ended
        assert episode.signals == total


def test_chance_is_of_the_seed_and_a_greedy_episode_has_none() -> None:
    def said(**choices: float) -> list[str]:
        return [str(e) for e in pp.play(ASSETS / "keydoor-start", world="keydoor", n=3, **choices)]  # type: ignore[arg-type]

    assert said(seed=1) == said(seed=1) != said(seed=2)
    assert len(set(said(temperature=0.0))) == 1


def test_the_command_plays_turns_and_tools(
    run: Path, capsys: pytest.CaptureFixture[str], registries: None
) -> None:
    out = Terminal(capsys)("sample", str(run), "-n", "8", "--seed", "3")
    assert out.count("prompt  ") == out.count("earned  success ") == 8
    prompt = Tools().tokenizer.decode(list(Tools().task("test", 0).prompt))
    assert out.startswith(f"prompt  {prompt}\npolicy  ")
    assert re.search(r"policy  C.*\nworld   .*\npolicy  A", out)
    same = Terminal(capsys)("sample", str(run), prompt, "-n", "8", "--seed", "3")
    assert same == out


def test_python_samples_turns_too(run: Path) -> None:
    texts = pp.sample(run, Tools().tokenizer.decode(list(Tools().task("test", 0).prompt)), n=8, seed=3)
    assert any(re.fullmatch(r"C[^⟨]*⟨[^⟩]+⟩.*A.*", text, re.S) for text in texts)


def test_a_prompt_that_is_no_problem_of_the_world(run: Path) -> None:
    with pytest.raises(pp.PanoplyError, match="plays problems of its own"):
        pp.play(run, "A")
    with pytest.raises(pp.PanoplyError, match="no world of text"):
        pp.play(run, world="cartpole")


def test_an_episode_ends_where_the_context_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    from panoply.policies.text import TextPolicy

    world = Tools()
    for room, ended in ((-1, False), (0, True)):
        full = len(world.task("test", 0).prompt) + world.max_tokens + room
        monkeypatch.setattr(TextPolicy, "context_length", full)
        (episode,) = pp.play(ASSETS / "tools-start", world="tools", temperature=0.0)
        assert (episode.ended, bool(episode.turns)) == (ended, ended)
