"""Shipped warm starts are neither helpless nor finished."""

from __future__ import annotations

import pytest

from panoply.evaluation.held_out import evaluate
from panoply.policies.build import open_policy, warm_start
from panoply.worlds.text.add import Add
from panoply.worlds.text.chain import Chain
from panoply.worlds.text.copies import Copies
from panoply.worlds.text.digits import Digits
from panoply.worlds.text.errands import Errands
from panoply.worlds.text.graph import Graph
from panoply.worlds.text.grids import Grids
from panoply.worlds.text.guess import Guess
from panoply.worlds.text.hops import Hops
from panoply.worlds.text.keydoor import Keydoor
from panoply.worlds.text.manyanswers import ManyAnswers
from panoply.worlds.text.maze import Maze
from panoply.worlds.text.mixed import Mixed
from panoply.worlds.text.program import Program
from panoply.worlds.text.proofread import Proofread
from panoply.worlds.text.referee import Referee
from panoply.worlds.text.registers import Registers
from panoply.worlds.text.rules import Rules
from panoply.worlds.text.stream import Stream
from panoply.worlds.text.strings import Strings
from panoply.worlds.text.styles import Styles
from panoply.worlds.text.tools import Tools
from panoply.worlds.world import TextWorld

WORLDS: list[TextWorld] = [
    Chain(),
    Add(),
    ManyAnswers(),
    ManyAnswers(kind="countdown"),
    Strings(),
    Copies(),
    Hops(),
    Grids(),
    Referee(),
    Rules(),
    Proofread(),
    Registers(),
    Digits(),
    Styles(),
    Mixed(),
    Keydoor(),
    Keydoor(size=7, quest=(3, 15), cap=20),
    Tools(),
    Tools(kind="calculator"),
    Maze(),
    Guess(),
    Stream(),
    Graph(),
    Errands(),
    Program(),
    Guess(kind="gatekeeper"),
    Guess(kind="slots"),
    Guess(kind="wordle"),
    Tools(kind="calculator", easy=0.0, dawdle=6),
    Tools(instructions=True),
    Tools(kind="python"),
    Program(kind="python"),
    Program(kind="stack"),
    Program(kind="ir"),
    Program(kind="shell"),
]
HARD: list[TextWorld] = [
    Keydoor(slip=0.8, quest=(6, 10)),
    Keydoor(slip=0.9, quest=(6, 10), hints=True),
    Tools(kind="calculator", easy=0.0, slip=0.9),
    Program(hard=True),
    Program(kind="python", hard=True),
    Program(kind="stack", hard=True),
    Program(kind="ir", hard=True),
    Program(kind="shell", hard=True),
    Guess(kind="slots", slip=0.8),
    Guess(kind="wordle", slip=0.98),
]


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.start)
def test_a_warm_start_succeeds_sometimes(world: TextWorld) -> None:
    found = evaluate(world, open_policy("start", world, 0, "cpu"), 256)
    assert 0.15 <= found.sampled <= 0.45


@pytest.mark.parametrize("world", HARD, ids=lambda world: world.start)
def test_a_hard_start_hardly_ever_succeeds(world: TextWorld) -> None:
    """So that whole groups fail, but not all of them."""
    found = evaluate(world, open_policy("start", world, 0, "cpu"), 512)
    assert 0.003 <= found.sampled <= 0.05


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.start)
def test_a_warm_start_is_small(world: TextWorld) -> None:
    folder = warm_start(world)
    assert folder is not None
    assert sum(file.stat().st_size for file in folder.iterdir()) < 600_000
