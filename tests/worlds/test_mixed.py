"""Several worlds in one, against examples worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from panoply.batch import Batch, Values
from panoply.errors import PanoplyError
from panoply.evaluation.held_out import evaluate
from panoply.parts import part
from panoply.planning import make_plan
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.worlds.text.chain import Chain
from panoply.worlds.text.manyanswers import ManyAnswers
from panoply.worlds.text.mixed import Mixed
from panoply.worlds.world import Task


def text(world: Mixed, tokens: list[int] | tuple[int, ...]) -> str:
    return world.tokenizer.decode(list(tokens))


def of_part(world: Mixed, part: str) -> Task:
    return next(t for t in (world.task("train", i) for i in range(8)) if world.part_of(t) == part)


def test_parts_come_in_turn_and_are_their_own_worlds_problems() -> None:
    world, chain, pairs = Mixed(), Chain(), ManyAnswers()
    asked = [world.task("train", i) for i in range(6)]
    assert [world.part_of(t) for t in asked] == ["chain", "manyanswers"] * 3
    assert text(world, asked[2].prompt) == chain.task("train", 1).data["problem"]
    assert text(world, asked[5].prompt) == pairs.task("train", 2).data["problem"]
    assert asked[2].id == chain.task("train", 1).id


def test_a_part_named_twice_comes_twice_as_often() -> None:
    world = Mixed(("chain", "chain:operations=2", "add"))
    assert [world.part_of(world.task("train", i)) for i in range(4)] == [*world.parts, "chain"]


def test_one_alphabet_for_all_with_the_end_first() -> None:
    world = Mixed()
    assert [world.tokenizer.token(i) for i in range(world.tokenizer.vocab_size)] == list("$0123456789+*=->")
    assert world.stop_tokens == (0,)
    assert world.max_tokens == Chain().max_tokens == 19


def test_answers_are_graded_by_the_problems_own_world() -> None:
    world = Mixed()
    chain, pairs = of_part(world, "chain"), of_part(world, "manyanswers")
    total = int(text(world, pairs.prompt)[:-1])
    for task, answer, success, ended in [
        (chain, text(world, world.gold(chain)), 1, 1),
        (chain, "1+2$", 0, 1),
        (pairs, f"1+{total - 1}$", 1, 1),
        (pairs, f"2+{total - 2}$", 1, 1),
        (pairs, f"1+{total}$", 0, 1),
        (pairs, f"1+{total - 1}", 0, 0),
        (chain, text(world, world.gold(chain))[:-1] + ">$", 0, 1),  # chain has no such character
    ]:
        assert world.grade(task, world.tokenizer.encode(answer)) == {"success": success, "ended": ended}
    assert world.signals() == {"success", "ended"}


def test_demonstrations_are_the_parts_teachers() -> None:
    world, chain = Mixed(), Chain()
    task = world.task("train", 0)
    said = world.demonstrate(task, np.random.default_rng(3))
    theirs = chain.demonstrate(chain.task("train", 0), np.random.default_rng(3))
    assert text(world, said) == chain.tokenizer.decode(theirs)


def test_hints_are_the_parts() -> None:
    world, chain = Mixed(("chain", "add")), Chain()
    hinted = world.hint(world.task("train", 0), 0.5)
    theirs = chain.hint(chain.task("train", 0), 0.5)
    assert text(world, hinted.prompt) == chain.tokenizer.decode(list(theirs.prompt))
    assert text(world, hinted.given) == chain.tokenizer.decode(list(theirs.given))
    assert "hint" not in Mixed().access  # manyanswers has none


@pytest.mark.parametrize(
    "parts", [("chain", "manyanswers"), ("add", "strings", "manyanswers:kind=countdown")]
)
def test_the_world_passes_its_own_test(parts: tuple[str, ...]) -> None:
    Mixed(parts).self_test(8)


def test_held_out_problems_are_shared_out_and_never_trained_on() -> None:
    world = Mixed()
    found = world.held_out(7)
    assert [world.part_of(t) for t in found] == ["chain", "manyanswers"] * 3 + ["chain"]
    assert not {t.id for t in found} & {world.task("train", i).id for i in range(400)}


def test_success_is_reported_for_each_part() -> None:
    world = Mixed()
    found = evaluate(world, open_policy("start", world, 0, "cpu"), 64)
    assert list(found.parts) == ["chain", "manyanswers"]
    assert sum(found.parts.values()) / 2 == pytest.approx(found.sampled)
    assert found.to_json()["parts"] == found.parts
    assert evaluate(Chain(), open_policy("start", Chain(), 0, "cpu"), 8).parts == {}


def test_a_part_says_what_may_be_drawn_in_its_own_problems() -> None:
    world = Mixed(("chain", "program:kind=shell"))
    assert world.restricts
    assert not Mixed().restricts
    chain, shell = of_part(world, "chain"), of_part(world, "program:kind=shell")
    assert world.allowed(chain, []) is None
    own = world.worlds[1]
    first = own.allowed(shell.data["task"], [])
    assert first is not None
    letters = "".join(own.tokenizer.token(token) for token in first)
    assert text(world, list(world.allowed(shell, []) or ())) == letters
    made = Collector(world, open_policy("fresh", world, 0, "cpu"), 0).episodes([chain, shell], 4)
    said = made.by("episode")
    told = dict(zip(said.keys.tolist(), said.first(made["task"]).tolist(), strict=True))
    for episode, task in told.items():
        answer = made["action"][made["episode"] == episode].tolist()
        for at, token in enumerate(answer):
            assert task != shell.id or token in (world.allowed(shell, answer[:at]) or ())
    assert bool((made.by("episode").max(made.decisions.ragged("allowed").lengths) > 0).any())


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((), "names no world"),
        (("chian",), "Did you mean 'chain'"),
        (("chain:operation=3",), "Did you mean 'operations'"),
        (("chain:operations=many",), "operations takes"),
        (("chain", "keydoor"), "mixed cannot hold keydoor"),
        (("tools",), "mixed cannot hold tools"),
        (("chain:stop=+", "lock"), r"stop of chain:stop=\+ would have no effect"),
    ],
)
def test_what_cannot_be_mixed_is_refused_in_a_sentence(parts: tuple[str, ...], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        Mixed(parts)


def test_a_domain_is_a_key_and_may_be_a_unit() -> None:
    """A term that weighs domains alike, however many decisions each has."""

    @part("loss", unit="domain", stream="imitation")
    def toy_domains(batch: Batch) -> Values:
        return -batch.by("domain").mean(batch.now["logp"]), {}

    world = Mixed()
    collect = Collector(world, open_policy("fresh", world, 0, "cpu"), seed=0)
    made = collect.demonstrations(collect.tasks(5))
    assert made.by("domain").sum(made.by("episode").is_last()).sort().values.tolist() == [2, 3]
    slots = {"losses": [toy_domains()]}
    assert "mean over domains" in make_plan("sft", "mixed", slots=slots).method.equation()[0]
    with pytest.raises(PanoplyError, match=r"toy_domains\) needs the column 'domain'"):
        make_plan("sft", "chain", slots=slots)
