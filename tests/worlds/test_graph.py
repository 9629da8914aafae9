"""A knowledge graph and its three roles: searches by hand, what a reader finds, and questions with other answers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.text.graph import (
    ENTITIES,
    RELATIONS,
    Graph,
    Search,
    after,
    before,
    circle,
    document,
    walk,
    way_of,
)
from panoply.worlds.world import Reply, Task

WORLD, BASE = Graph(), "test/0"


def played(task: Task, said: str) -> tuple[Search, list[Reply]]:
    play = WORLD.play(task)
    return play, [play.act(WORLD.tokens(turn)) for turn in said.split()]


def asked(question: str) -> Task:
    return WORLD._asked(BASE, question, walk(BASE, question)[-1])


def test_every_relation_is_one_circle() -> None:
    for relation in RELATIONS:
        assert sorted(circle(BASE, relation)) == list(ENTITIES)
        for entity in ENTITIES:
            assert before(BASE, after(BASE, entity, relation), relation) == entity
            assert after(BASE, entity, relation) != entity
    assert circle(BASE, "w") != circle(BASE, "x") != circle("test/1", "x")


def test_a_solver_s_prompts_and_what_decides() -> None:
    task = asked("axw")
    _, b, c = walk(BASE, "axw")
    play, replies = played(task, f"Cax C{b}w A{c}")
    shown = [WORLD.text(prompt) for prompt in (play.prompt, *(r.observation for r in replies[:2]))]
    assert shown == ["Saxw__________>", f"Saxw_ax{b}______>", f"Saxw_{b}w{c}ax{b}___>"]
    assert [r.signals["success"] for r in replies] == [0, 0, 1]
    assert [r.done for r in replies] == [False, False, True]
    assert [r.signals["calls"] for r in replies] == [1, 1, 0]


def test_what_is_no_turn_of_a_role_does_nothing_and_cuts_off_in_the_end() -> None:
    play, replies = played(asked("axw"), "Qaxw_ Cxa > Ax Baw Bax")
    assert [r.signals["invalid"] for r in replies] == [1, 1, 1, 1, 0, 0]
    assert play.found == [document(BASE, before(BASE, "a", r), r) for r in "wx"]
    assert (replies[-1].done, replies[-1].truncated, replies[-2].done) == (True, True, False)


def test_a_proposer_may_ask_anything() -> None:
    """A question with another answer, or none at all, ends its episode as well; only the given answer is success."""
    given = WORLD.proposal(asked("axw"))
    answer = given.data["answer"]
    b = before(BASE, answer, "w")
    assert WORLD.text(given.prompt) == f"P{answer}____________>"
    for question, right in (
        (f"{b}w__", 1.0),
        (f"{b}x__", 0.0),
        (f"{b}a__", 0.0),
        ("____", 0.0),
        (f"{b}_w_", 0.0),
    ):
        play, replies = played(given, f"B{answer}w Q{question}")
        assert (replies[-1].done, replies[-1].signals["success"]) == (True, right)
        assert bool(play.asked) == (question[1] in RELATIONS)
        assert replies[-1].signals["invalid"] == float(not play.asked)
    assert not played(given, f"A{answer}")[1][-1].done, "and it cannot answer"


def test_a_proposal_has_its_documents_and_is_graded_by_the_given_answer() -> None:
    given = WORLD.proposal(asked("axw"))
    answer = given.data["answer"]
    b = before(BASE, answer, "w")
    wrong = next(r for r in RELATIONS if walk(BASE, b + r)[-1] != answer)
    offer = WORLD.proposed(given, WORLD.tokens(f"B{answer}wB{b}xQ{b}{wrong}__"))
    assert offer.documents == (f"{b}w{answer}", document(BASE, before(BASE, b, "x"), "x"))
    assert offer.searches == (f"B{answer}w", f"B{b}x")
    assert offer.question is not None
    assert WORLD.text(offer.question.prompt) == f"S{b}{wrong}___________>"
    assert offer.question.level == 1
    assert WORLD.grade(offer.question, WORLD.tokens(f"A{answer}"))["success"] == 1
    truth = walk(BASE, b + wrong)[-1]
    assert WORLD.grade(offer.question, WORLD.tokens(f"A{truth}"))["success"] == 0
    assert json.loads(json.dumps(offer.question.data)) == offer.question.data, "it can be kept in a run"
    assert not offer.tells
    assert WORLD.proposed(given, WORLD.tokens(f"Q{answer}w__")).tells
    assert WORLD.proposed(given, WORLD.tokens(f"B{answer}w")).question is None


def test_a_reader_finds_what_it_asks_for_or_anything() -> None:
    task = asked("axw")
    way = way_of(BASE, "axw")
    noise = [document(BASE, e, "z") for e in "cdef"]
    full = WORLD.reading(task, [*noise, *way])
    assert WORLD.text(full.prompt)[0] == "R"
    assert WORLD.grade(full, WORLD.gold(full))["success"] == 1
    assert played(full, "Cax")[0].found == way[:1]
    assert played(full, f"B{way[1][2]}w")[0].found == way[1:], "backwards as well"
    few, many = (WORLD.reading(task, [way[1], *some]) for some in ([], noise))
    assert WORLD.grade(few, WORLD.gold(few))["success"] == 1, "the only document there is has the answer"
    found = {played(many, f"Cax{' Cax' * n}")[0].found[-1] for n in range(6)}
    assert found <= {way[1], *noise}
    assert len(found) > 1, "by lot, anew each time"
    assert played(WORLD.reading(task, []), "Cax")[1][0].signals["invalid"] == 1


def test_held_out_questions_are_longer_and_of_other_graphs() -> None:
    some = {split: [WORLD.task(split, i) for i in range(300)] for split in ("train", "test")}
    assert {t.level for t in some["train"]} == {1}
    assert {t.level for t in some["test"]} == {2, 3}
    assert {t.data["base"] for t in some["train"]} == {"train/0", "train/1"}
    assert len({t.id for t in some["test"]}) > 200
    for task in some["test"]:
        way = walk(task.data["base"], task.data["question"])
        assert len(set(way)) == task.level + 1
        assert way[-1] == task.data["answer"]


def test_teachers_of_all_roles() -> None:
    WORLD.self_test(16)
    rng, true, level = np.random.default_rng(0), [], []
    for i in range(200):
        given = WORLD.proposal(WORLD.task("train", i))
        offer = WORLD.proposed(given, WORLD.demonstrate(given, rng))
        assert offer.question is not None
        assert len(set(offer.searches)) >= 2
        true.append(walk(given.data["base"], offer.question.data["question"])[-1] == given.data["answer"])
        level.append(offer.question.level)
    assert 0.4 < np.mean(true) < 0.65, "half of its questions are misquoted"
    assert set(level) == {1, 2, 3}
    roles = [WORLD.text(prompt)[0] for prompt, _ in WORLD.lessons(WORLD.task("train", 3), rng)]
    assert set(roles) == set("SPR")
    careful = Graph(slip=0.0, misquote=0.0)
    for i in range(20):
        task = careful.task("test", i)
        for each in (task, careful.proposal(task)):
            assert careful.grade(each, careful.demonstrate(each, rng))["success"] == 1


def test_an_expert_goes_back_to_the_start_after_a_stray_search() -> None:
    task = asked("axw")
    play, _ = played(task, "Cdz")
    assert WORLD.text(WORLD.expert(play)) == "Cax"
    b = walk(BASE, "axw")[1]
    play.act(WORLD.tokens("Cax"))
    assert WORLD.text(WORLD.expert(play)) == f"C{b}w"
    other = play.fork()
    other.act(WORLD.tokens(f"C{b}w"))
    assert len(play.found) == 2, "a fork is another episode"


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"hops": (2, 1)}, "graph.hops is a range"),
        ({"unseen": (1, 4)}, "unseen"),
        ({"cap": 3}, "cap"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(PanoplyError, match=match):
        Graph(**settings)
