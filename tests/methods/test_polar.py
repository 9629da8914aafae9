"""POLAR: triples of answers, a judge that reads a reference first, and rewards relative to it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from kit import assert_same, dataset, hand, learner

import panoply as pp
from panoply.batch import Batch
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.preferences.polar import compared, ranked_triples, same_policy, writers
from panoply.policies.build import open_policy
from panoply.policies.value import ValueModel
from panoply.rollout.text import Collector
from panoply.seeds import numpy_rng
from panoply.slots.loss.values import bradley_terry
from panoply.slots.model.values import beside, reward_model
from panoply.slots.sample.answers import answers_of
from panoply.worlds.text.strings import Strings
from panoply.worlds.text.writers import CARELESS, LETTERS, Habits, writer

WORLD = Strings()
POLICY = open_policy("fresh", WORLD, 0, "cpu", "float32")


def collector(split: str = "train", seed: int = 0, world: Strings = WORLD) -> Collector:
    return Collector(world, POLICY, seed, split)


def read(made: Experience) -> list[tuple[str, str]]:
    """What stands before each answer, and the answer; chosen and rejected in turn."""
    tokens, shared = made.context.ragged("tokens").tolist(), made.context.tensor("shared").tolist()
    return [
        (WORLD.text(row[:n]), WORLD.text(row[n:])) for row, n in zip(tokens, shared, strict=True)
    ]  # fmt: skip


def parts(prompt: str) -> tuple[str, str, str]:
    """x, y_ref and x again."""
    task, rest = prompt[:3], prompt[3:]
    return task, rest[:-3], rest[-3:]


# ------------------------------------------------------------------ a population of policies


def test_policies_are_what_their_number_says_and_nobody_is_sure_to_do_anything() -> None:
    assert writer(3) == writer(3) != writer(4) != writer(-4)
    for who in range(-40, 40):
        habits = writer(who)
        for often in (habits.exact, habits.alternates, habits.avoids, habits.brackets, habits.pair):
            assert 0.05 <= often <= 0.95
        assert set(habits.letters) == set(LETTERS)
        assert habits.stray == CARELESS.stray
    assert Habits() == CARELESS
    assert (CARELESS.exact, CARELESS.pair) == (0.4, 0.5)
    every = [writer(who) for who in range(200)]
    together = np.corrcoef([h.exact for h in every], [h.alternates for h in every])[0, 1]
    assert together > 0.3  # one skill moves all habits
    assert len({h.letters for h in every}) == 15  # any two letters are somebody's


def test_habits_are_kept_and_favoured_letters_come_more_often() -> None:
    task, rng = WORLD.task("train", 0), numpy_rng("habits")
    who = next(n for n in range(100) if writer(n).exact > 0.9 and writer(n).brackets < 0.2)
    said = [WORLD.text(WORLD.written_by(task, who, rng)) for _ in range(150)]
    right = np.mean([len(text) - 1 == task.data["length"] for text in said])
    assert abs(right - writer(who).exact) < 0.08
    assert np.mean(["(" in text or ")" in text for text in said]) < 0.3
    often = {c: sum(text.count(c) for text in said) for c in LETTERS}
    free = [c for c in "bcdf" if c != task.data["forbidden"]]
    most = max(free, key=writer(who).letters.count)
    assert writer(who).letters.count(most) == 1 or often[most] == max(often[c] for c in free)


def same(n: int, closer: Any, seed: int = 0) -> float:
    """How often the answer of the same policy is the closer one, a tie counting half."""
    won = 0.0
    for start in range(0, n, 64):
        found = read(same_policy(batch=64)(collector(seed=seed + start)))
        for (prompt, one), (_, other) in zip(found[::2], found[1::2], strict=True):
            task, first, _ = parts(prompt)
            near, far = (closer(task, first, said) for said in (one, other))
            won += 0.5 if near == far else float(near < far)
    return won / n


def test_neither_length_nor_brackets_alone_tell_who_wrote_it_but_all_marks_do() -> None:
    """Of the pitfalls that which would make the discriminator trivial."""

    def marks(task: str, said: str) -> list[Any]:
        found = WORLD.grade(next(t for t in TASKS if t.data["problem"] == task), WORLD.tokens(said))
        return [found[name] == 1 for name in ("length", "alternation", "balance", "avoids")] + ["(" in said]

    length = same(320, lambda task, a, b: abs(len(a) - len(b)))
    brackets = same(320, lambda task, a, b: ("(" in a) != ("(" in b))
    every = same(
        320, lambda task, a, b: sum(x != y for x, y in zip(marks(task, a), marks(task, b), strict=True))
    )
    assert length < 0.6
    assert brackets < 0.66
    assert every > max(length, brackets) + 0.04


TASKS = [WORLD.task("train", i) for i in range(200)]


# ------------------------------------------------------------------ triples


@pytest.mark.parametrize("held", [same_policy(batch=32), ranked_triples(batch=32)])
def test_one_prompt_for_all_three_the_reference_first_and_the_candidate_last(held: Any) -> None:
    made = held(collector())
    assert made.pairs is not None
    assert made.pairs.rows == 32
    found = read(made)
    for (before, chosen), (again, rejected) in zip(found[::2], found[1::2], strict=True):
        assert before == again
        task, first, second = parts(before)
        assert task == second
        assert task.endswith("=")
        assert first.endswith("$")
        assert "=" not in first
        assert chosen != rejected
        assert chosen.endswith("$")
        if held.info.name == "same_policy":
            assert first != chosen  # two different samples of A
    assert made.pairs.tensor("rejected").tolist() == (made.pairs.tensor("chosen") + 1).tolist()


class Signed(Strings):
    """Whose policies sign their answers, so that who wrote them can be read: two answers each, told by brackets."""

    def written_by(self, task: Any, number: int, rng: np.random.Generator) -> list[int]:
        letter = LETTERS[abs(number) % 6]
        return self.tokens(letter * (1 + int(rng.integers(2))) + ("(" if number < 0 else "") + "$")

    def grade(self, task: Any, answer: Any) -> dict[str, float]:
        return {"success": 0.0, "true": float(LETTERS.index(self.text(answer)[0]))}


def signers(made: Experience) -> list[tuple[str, str, str]]:
    found = read(made)
    return [(parts(p)[1], a, b) for (p, a), (_, b) in zip(found[::2], found[1::2], strict=True)]


def test_two_answers_are_of_one_policy_and_the_third_of_another() -> None:
    for split, sign in (("train", False), ("test", True)):
        for first, one, other in signers(same_policy(batch=64, policies=5)(collector(split, world=Signed()))):
            assert first[0] == one[0] != other[0]
            assert first != one
            assert all(
                ("(" in said) == sign for said in (first, one, other)
            )  # new policies where it is measured
    seen = signers(ranked_triples(batch=64, policies=3)(collector(world=Signed())))
    assert all([one[0] for one in three] == list("cba") for three in seen)


def test_the_best_of_three_is_the_reference_and_the_second_strictly_better_than_the_third() -> None:
    found = read(ranked_triples(batch=64)(collector()))
    for (before, chosen), (_, rejected) in zip(found[::2], found[1::2], strict=True):
        prompt, first, _ = parts(before)
        task = next(t for t in TASKS if t.data["problem"] == prompt)
        best, good, bad = (WORLD.grade(task, WORLD.tokens(y))["true"] for y in (first, chosen, rejected))
        assert best >= good > bad


def test_a_set_comes_back_in_another_order_and_evaluations_have_new_triples() -> None:
    held, collect = ranked_triples(batch=16, triples=16), collector()
    first, second = read(held(collect)), read(held(collect))
    assert first != second
    assert sorted(first) == sorted(second)
    other = collector()
    other.state = {**other.state, "tasks": 16}  # as a run resumes
    assert read(held(other)) == second
    few = ranked_triples(batch=16, triples=2)
    assert len(set(read(few(collector()))[::2])) == 2
    assert len(set(read(few(collector("test")))[::2])) == 16
    bare = ranked_triples(batch=16, triples=16, reference=False)(collector())
    assert [said for _, said in read(bare)] == [said for _, said in first]
    assert all(len(prompt) == 3 for prompt, _ in read(bare))


def test_policies_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(PanoplyError, match="so much alike"):
        compared(collector(), [0], lambda task, rng: None, reference=True)
    assert sorted(writers(numpy_rng("w"), 3, 3, "train")) == [0, 1, 2]
    assert sorted(writers(numpy_rng("w"), 3, 3, "test")) == [-3, -2, -1]


# ------------------------------------------------------------------ the judge


def test_the_loss_of_one_pair_by_hand() -> None:
    """r(x, y_ref, y_w) = 2 and r(x, y_ref, y_l) = 0.5: −log σ(1.5), with slopes ∓σ(−1.5)."""
    said = torch.tensor([2.0, 0.5], dtype=torch.float64, requires_grad=True)
    value, _ = bradley_terry()(Batch(hand([(0, 1)], episode=[0, 1]), {"judged": said}))
    assert value.tolist() == pytest.approx([math.log1p(math.exp(-1.5))])
    (slope,) = torch.autograd.grad(value.sum(), said)
    down = 1 / (1 + math.exp(1.5))
    assert slope.tolist() == pytest.approx([-down, down])


def judge() -> ValueModel:
    found = ValueModel.of(open_policy("fresh", WORLD, 1, "cpu", "float32"))
    with torch.no_grad():
        found.head.weight.copy_(torch.linspace(-1, 1, found.head.weight.numel()).view(1, -1))
    return found


def test_what_it_says_depends_on_the_reference_and_on_which_is_read_first() -> None:
    collect, model, task = collector(), judge(), TASKS[0]
    a, b = WORLD.tokens("(acac)$"), WORLD.tokens("bd$")
    asked = [beside(task, a), beside(task, b), task]
    assert asked[0].prompt == (*task.prompt, *a, *task.prompt)
    assert asked[0].id == task.id
    with torch.no_grad():
        beside_a, beside_b, alone = model.judge(collect.answers(asked, [b, b, b])).tolist()
        turned = model.judge(collect.answers([beside(task, b)], [a])).tolist()[0]
    assert len({round(x, 4) for x in (beside_a, beside_b, alone, turned)}) == 4


def test_gradients_do_not_depend_on_how_triples_are_split() -> None:
    found, method = ranked_triples(batch=4)(collector()), dataset(bradley_terry())
    whole, split = (learner(judge(), method, tokens).gradient(found) for tokens in (10**9, 60))
    assert_same(split, whole, rel=1e-5)
    assert any(float(slope.abs().max()) > 0 for slope in whole.values())


# ------------------------------------------------------------------ runs

SMALL = {"data.batch": 4, "run.held_out": 8}


def test_pre_training_fine_tuning_and_a_reward_relative_to_the_reference(tmp_path: Path) -> None:
    """The judge goes on from the pre-trained one; what a policy earns is what the judge says beside the reference."""
    stages = {f"{stage}.{path}": value for stage in ("pretrain", "tune") for path, value in SMALL.items()}
    settings = {**stages, "pretrain.run.steps": 1, "tune.run.steps": 1, "optimise.run.steps": 1}
    settings |= {"optimise.sample.prompts": 2, "optimise.sample.group": 2, "optimise.run.held_out": 4}
    tiny.bare(tmp_path / "run", "polar-rl", world="strings", settings=settings)
    folders = {folder.name[3:]: folder for folder in (tmp_path / "run").glob("0*")}
    (last,) = tiny.metrics(folders["optimise"])
    assert last["reward"] == pytest.approx(last["model"])
    assert "degenerate_groups" in last
    begun, ended = (
        ValueModel.load(sorted((folders[name] / "checkpoints").glob("*"))[-1] / "model")
        for name in ("pretrain", "tune")
    )
    assert "before" in tiny.result(folders["tune"])
    assert begun.fingerprint() != ended.fingerprint()
    assert tiny.result(folders["tune"])["before"]["accuracy"] > 0  # a head of zeros would order nothing


def test_a_reward_model_reads_each_tasks_own_reference(tmp_path: Path) -> None:
    """What it says of an answer is what the judge says of x y* x y, and not of x y."""
    judge().save(tmp_path / "judge")
    collect = Collector(WORLD, POLICY, 0, needs=frozenset({"asked"}))
    options = SimpleNamespace(dtype="float32", device="cpu")
    plan = SimpleNamespace(policy_options={})
    seat = SimpleNamespace(world=WORLD, collect=collect, policy=POLICY, options=options, plan=plan)
    tasks = collect.tasks(3)
    made, said = collect.episodes(tasks, 2), {}
    for reference in (True, False):
        model = reward_model(folder=str(tmp_path / "judge"), reference=reference)(seat)
        with torch.no_grad():
            column = model.columns(model.model, made)["signal:model"]
        said[reference] = made.by("episode").sum(column)
    twice = [task for task in tasks for _ in range(2)]
    asked = [beside(task, WORLD.gold(task)) for task in twice]
    with torch.no_grad():
        expected = judge().judge(collector().answers(asked, answers_of(made)))
    torch.testing.assert_close(said[True], expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(said[True], said[False], atol=1e-3)


@pytest.mark.parametrize(
    ("name", "world", "settings", "said"),
    [
        ("polar-model", "add", {"data.name": "success"}, "writers"),
        ("polar-model", "strings", {"data.policies": 2}, "policies"),
        ("polar-model", "strings", {"data": "same_policy", "data.policies": 1}, "policies"),
        ("polar-model", "strings", {"data.name": "politeness"}, "politeness"),
        ("polar-model", "strings", {"data.triples": -1}, "triples"),
        ("grpo", "keydoor", {"models.reward_model.reference": True}, "one turn"),
    ],
)
def test_settings_that_cannot_be(name: str, world: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        pp.plan(name, world, settings=settings)
