"""The maze: what is seen, what moves earn, who fills its log, and the scale of its scores."""

from __future__ import annotations

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.policies.build import open_policy
from panoply.worlds.text.logs import Scale
from panoply.worlds.text.maze import CELLS, GOALS, MOVES, NAMES, Cell, Maze, distances, good, moved, walls


def cell(name: str) -> Cell:
    return CELLS[NAMES.index(name)]


def test_it_grades_itself() -> None:
    for world in (Maze(), Maze(view="partial"), Maze(words=True), Maze(goals=1)):
        world.self_test(8)


def test_walls_and_ways_by_the_picture() -> None:
    assert (walls(cell("u")), walls(cell("v")), walls(cell("n")), walls(cell("g"))) == ("D", "4", "8", "8")
    assert moved(cell("u"), "R") == cell("v")
    assert moved(cell("u"), "U") == cell("u")
    assert distances(cell("e"))[cell("u")] == 10
    assert good(cell("n"), cell("e")) == ("R",)
    assert max(max(distances(goal).values()) for goal in CELLS) <= Maze().cap


@pytest.mark.parametrize("words", [False, True])
def test_what_moves_earn(words: bool) -> None:
    world = Maze(words=words, cap=4)
    play = world.play(world._task(cell("p"), cell("e")))
    said = {"D": "down.", "U": "up."} if words else {"D": "D", "U": "U"}
    turns = [play.act(world.tokens(text)) for text in (said["D"], said["U"], "e", said["U"])]
    assert [t.signals["score"] for t in turns] == [-1, -1, -4, -1]
    assert [t.signals["invalid"] for t in turns] == [0, 0, 1, 0]
    assert (turns[-1].done, turns[-1].truncated) == (True, True)
    play = world.play(world._task(cell("j"), cell("e")))
    there = play.act(world.tokens(said["U"]))
    assert (there.signals, there.done, there.truncated) == (
        {"success": 1, "score": 0, "invalid": 0},
        True,
        False,
    )


def test_a_partial_view_remembers_what_was_seen_and_nothing_else() -> None:
    world = Maze(view="partial", history=2)
    play = world.play(world._task(cell("u"), cell("e")))
    seen = [world.text(play.prompt), *(world.text(play.act(world.tokens(m)).observation) for m in "RRaR")]
    assert seen == ["eD", "eDR4", "eDR4R5", "e4R5_5", "e5_5R6"]  # an illegal turn is remembered as such
    assert (
        world.text(Maze(view="partial", history=0).play(play.task).act(world.tokens("R")).observation) == "e4"
    )
    full = Maze().play(Maze()._task(cell("u"), cell("e")))
    assert Maze().text(full.act(Maze().tokens("R")).observation) == "e4v"


def test_half_of_all_problems_are_held_out_and_come_round_again() -> None:
    world = Maze()
    held = {task.id for task in world.held_out(100)}
    assert len(held) == 100 == len({task.id for task in world.held_out(250)})
    assert not held & {world.task("train", i).id for i in range(500)}
    assert {task.data["goal"] for task in world.held_out(100)} == set(GOALS[:8])
    assert len({task.id for task in Maze(goals=1).held_out(40)}) in (12, 13)


def test_players_know_a_part_of_the_way() -> None:
    world, task = Maze(slip=0.0), Maze()._task(cell("u"), cell("e"))
    rng = np.random.default_rng(0)
    opener, finisher = (world.text(world.written_by(task, number, rng)) for number in (0, 1))

    def knows(said: str) -> list[bool]:
        at, found = cell("u"), []
        for move in said:
            found.append(move in good(at, cell("e")))
            at = moved(at, move)
        return found

    assert knows(opener)[:6] == [True] * 5 + [False]
    assert not knows(finisher)[0]
    assert all(knows(finisher)[11:])
    wandered = [
        m for i in range(40) for m in world.text(world.written_by(task, 4, np.random.default_rng(i)))[1:]
    ]
    assert wandered.count("R") / len(wandered) == pytest.approx(0.5, abs=0.06)
    assert set(wandered) == set(MOVES)


def test_the_scale_is_straight_between_three_points() -> None:
    scale = Scale(least=-20.0, mean=-10.0, best=-5.0)
    assert [scale.score(x) for x in (-20, -15, -10, -7.5, -5, -40)] == [0, 25, 50, 75, 100, -100]
    released = Scale(-101, -83, -6.84)
    assert released.score(-72.1) == pytest.approx(57.1560, abs=1e-3)
    world = Maze()
    assert world.scale.least == -16
    assert world.scale.best == pytest.approx(-np.mean([task.level - 1 for task in world.held_out(128)]))
    assert -15 < world.scale.mean < -12


def test_a_policy_is_put_on_the_scale() -> None:
    world = Maze(view="partial")
    policy = open_policy("start", world, 0, "cpu")
    earned = world.measure("return", policy, seed=0)
    assert world.measure("normalised", policy, seed=0) == pytest.approx(world.scale.score(earned))
    assert -15.5 < earned < -12


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PanoplyError, match="goals"):
        Maze(goals=27)
    with pytest.raises(PanoplyError, match="history"):
        Maze(history=-1)
