"""Streams longer than the context: resets worked out by hand, and what is lost in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.text.stream import Reading, Stream
from panoply.worlds.windows import Windowed
from panoply.worlds.world import Reply, Task

WORLD = Stream()


def played(numbers: str, said: str, **options: Any) -> tuple[Windowed, list[Reply]]:
    world = Stream(**{"length": (8, 8), **options})
    task = Task(1, tuple(world.tokens("M>")), 0, {"asked": "M", "numbers": numbers})
    play = world.play(task)
    return play, [play.act(world.tokens(turn)) for turn in said.split()]


def contexts(replies: list[Reply]) -> list[str]:
    return [WORLD.text(reply.observation) for reply in replies]


def test_a_full_context_is_summed_up_and_begun_anew() -> None:
    _, replies = played("35104268", "N N N N N S5 R N")
    assert contexts(replies) == [
        "M>N3",
        "M>N3N5",
        "M>N3N5N1",
        "M>N3N5N1N0",  # ten tokens: the window
        "M>N3N5N1N0?",  # the round N4 is in no context …
        "M>S5",
        "M>S5R4",  # … and its number is the last that was read
        "M>S5R4N2",
    ]
    assert [r.signals["dropped"] for r in replies] == [0, 0, 0, 0, 1, 0, 0, 0]
    assert [r.signals["summaries"] for r in replies] == [0, 0, 0, 0, 0, 1, 0, 0]
    assert [r.signals.get("calls", 0) for r in replies] == [1, 1, 1, 1, 1, 0, 1, 1]


def test_the_world_goes_on_from_a_round_that_was_dropped() -> None:
    _, replies = played("35104268", "N N N N N S5 N")
    assert contexts(replies)[6] == "M>S5N2", "the 4 was read, and is lost to who does not ask again"


@pytest.mark.parametrize(("keep", "then"), [("last", "M>S0"), ("nothing", "M>S_")])
def test_what_is_kept_by_rule_takes_no_turn(keep: str, then: str) -> None:
    _, replies = played("35104268", "N N N N N", keep=keep)
    assert contexts(replies)[-1] == then
    assert (replies[-1].signals["dropped"], replies[-1].signals["summaries"]) == (1, 1)


def test_what_the_world_lets_be_drawn_holds_but_for_a_summary() -> None:
    class Legal(Reading):
        def allowed(self, said: Sequence[int]) -> Sequence[int]:
            return WORLD.tokens("N")

    task = Task(1, tuple(WORLD.tokens("M>")), 0, {"asked": "M", "numbers": "35104268"})
    window = WORLD.play(task).window
    free, legal = (Windowed(kind(WORLD, task), window) for kind in (Reading, Legal))
    assert not free.restricts
    assert legal.restricts
    assert legal.allowed([]) == WORLD.tokens("N")
    while not legal.asked:
        legal.act(WORLD.tokens("N"))
    assert legal.allowed([]) is None


def test_limits_cut_off() -> None:
    cut = played("35104268", "N N N N N", keep="cut")[1][-1]
    spent = played("35104268", "N N N N N S5 R N N N", summaries=2)[1][-1]
    again = played("35104268", "N N N N N S5 R N N N S8 " + "N " * 5, summaries=2)[1][-1]
    late = played("35104268", "N N N N N S5 R N N N S8 R" + " N" * 2, cap=14)[1][-1]
    assert [(r.done, r.truncated) for r in (cut, spent, again, late)] == [
        (True, True),
        (False, False),
        (True, True),
        (True, True),
    ]


def test_an_answer_ends_and_only_the_right_one_succeeds() -> None:
    for said, success in (("A8", 1.0), ("A6", 0.0)):
        reply = played("35104268", said)[1][-1]
        assert (reply.done, reply.truncated, reply.signals["success"]) == (True, False, success)
    odd = played("35104268", "A. R S5 7")[1]
    assert [r.signals["invalid"] for r in odd] == [1, 1, 1, 1]
    assert not odd[-1].done


def test_a_fork_goes_its_own_way() -> None:
    play, _ = played("35104268", "N N")
    other = play.fork()
    other.act(WORLD.tokens("N"))
    assert WORLD.text(play.context) == "M>N3N5"
    assert WORLD.text(play.act(WORLD.tokens("N")).observation) == "M>N3N5N1"


def test_the_expert_goes_by_its_context_and_is_always_right() -> None:
    WORLD.self_test(24)
    task = Task(1, tuple(WORLD.tokens("m>")), 0, {"asked": "m", "numbers": "79469685"})
    assert WORLD.text(WORLD.gold(task)) == "NNNNNS4RNNNS4RA4"


def test_the_teacher_forgets_when_it_sums_up_and_reads_on_after_the_end() -> None:
    rng = np.random.default_rng(0)
    sums, ends = [], []
    for index in range(60):
        for prompt, said in WORLD.lessons(WORLD.task("train", index), rng):
            seen, turn = WORLD.text(prompt), WORLD.text(said)
            if seen.endswith("?"):
                best = (max if seen[0] == "M" else min)(c for c in seen if c.isdigit())
                if best != seen[-2]:
                    sums.append(turn[1] == best)
            elif seen.endswith("."):
                ends.append(turn == "N")
    assert 0.15 < np.mean(sums) < 0.35
    assert 0.15 < np.mean(ends) < 0.5


def test_the_extreme_is_no_matter_of_guessing() -> None:
    tops = [
        max(WORLD.task("train", i).data["numbers"])
        for i in range(400)
        if WORLD.task("train", i).data["asked"] == "M"
    ]
    assert set(tops) == set("3456789")
    assert max(tops.count(top) for top in "3456789") < 0.25 * len(tops)


def test_splits_differ_and_suffice() -> None:
    held = {task.id for task in WORLD.held_out(128)}
    assert not held & {WORLD.task("train", i).id for i in range(500)}


@pytest.mark.parametrize(
    ("options", "said"),
    [({"cap": 20}, "23 turns"), ({"summaries": 3}, "4 summaries"), ({"length": (9, 8)}, "range")],
)
def test_limits_that_no_one_could_keep_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        Stream(**options)
