"""CAPO: steps find their tokens, critiques vote, the judge knows no outcome, and whole groups are compared by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from kit import Slow, assert_same, gradient, hand, ragged, rows_of, shuffled
from papers import ZERO, groups_of
from torch import Tensor

import panoply as pp
from panoply.errors import PanoplyError, Resumable
from panoply.experience import OWN, Experience
from panoply.methods.reasoning_data.capo import blamed, by_step, capo, criticised
from panoply.rollout.text import Collector
from panoply.worlds.text.chain import Chain
from panoply.worlds.world import Task


class Told(Collector):
    """Says what it was told to, whatever the policy."""

    said: Sequence[str] = ()

    def episodes(self, tasks: Any, group: Any = 1, **_: Any) -> Experience:
        answers = [[self.world.tokenizer.id(c) for c in said] for said in self.said]
        every = [task for task in tasks for _ in range(group)]
        return self.answers(every, answers, source=OWN)


def told(collector: Collector, world: Chain, *said: str) -> Told:
    made = Told(world, collector.policy, seed=0)
    made.said = said
    made.task = lambda index: _problem(world)  # type: ignore[method-assign, assignment]
    return made


def _problem(world: Chain) -> Task:
    """3+4*2=, which is +47*24$."""
    text = "3+4*2="
    return Task(7, tuple(world.tokenizer.id(c) for c in text), 1, {"problem": text})


@pytest.mark.parametrize(
    ("said", "marks"),
    [
        ("+47*24$", [0, 0, 0, 0, 0, 0, 0]),
        ("+48*26$", [1, 1, 1, 0, 0, 0, 0]),  # 8·2 = 16: the second step follows from what was written
        ("+47*29$", [0, 0, 0, 1, 1, 1, 0]),  # the end is no step
        ("+47*24+11$", [0, 0, 0, 0, 0, 0, 1, 1, 1, 0]),  # the problem has no third step
        ("+47*", [0, 0, 0, 1]),  # cut off inside of a step
        ("$", [0]),
    ],
)
def test_steps_map_to_tokens(tiny_collector: Collector, said: str, marks: list[int]) -> None:
    collect = told(tiny_collector, Chain(operations=2), said, "+47*24$")
    found = criticised(prompts=1, group=2, critiques=1)(collect)
    assert found["signal:wrong"].tolist() == [*map(float, marks), *[0.0] * 7]


def test_votes() -> None:
    """Three steps that none, two and all of four critiques find wrong."""
    wrong = torch.tensor([[0, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 1]]).bool()
    assert blamed(wrong, "intersection").tolist() == [0, 0, 1]
    assert blamed(wrong, "majority").tolist() == [0, 0, 1], "half is not most"
    assert blamed(wrong[:3], "majority").tolist() == [0, 1, 1]
    assert blamed(wrong, "average").tolist() == [0, 0.5, 1]


def test_critiques_differ_and_are_the_same_again(tiny_collector: Collector) -> None:
    def marks(critiques: int, vote: Any) -> Tensor:
        collect = told(tiny_collector, Chain(operations=2, judge_noise=0.4), *["+48*29$"] * 40)
        return criticised(prompts=1, group=40, critiques=critiques, vote=vote)(collect)["signal:wrong"]

    assert torch.equal(marks(4, "average"), marks(4, "average"))
    share = {vote: float(marks(4, vote).mean()) for vote in ("average", "intersection")}
    assert share["average"] == pytest.approx(0.6 * 6 / 7, abs=0.1)
    assert share["intersection"] == pytest.approx(0.6**4 * 6 / 7, abs=0.1)


def test_rewards_of_tokens_are_the_papers_table() -> None:
    """Right and clean 2, right in a flawed step 1, wrong in a clean step 0, wrong in a wrong step −1."""
    made = hand(
        episode=[0, 0, 1, 1],
        **{"signal:success": [0.0, 1.0, 0.0, 0.0], "signal:wrong": [0.0, 1.0, 0.0, 1.0]},
    )
    assert by_step()(made).tolist() == [2.0, 1.0, 0.0, -1.0]
    assert by_step(correct=1.0, wrong=0.5)(made).tolist() == [1.0, 0.5, 0.0, -0.5]


# ------------------------------------------------------------------ the judge


@dataclass(frozen=True)
class Contrary(Chain):
    """A verifier that says the opposite."""

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        found = super().grade(task, answer)
        return {**found, "success": 1 - found["success"]}


def test_the_judge_never_sees_the_verdict(tiny_collector: Collector) -> None:
    said = ("+47*24$", "+47*29$", "+48*29$")
    plain, contrary = (
        criticised(prompts=1, group=3)(told(tiny_collector, world, *said))
        for world in (Chain(operations=2, judge_noise=0.3), Contrary(operations=2, judge_noise=0.3))
    )
    assert not torch.equal(plain["signal:success"], contrary["signal:success"])
    assert torch.equal(plain["signal:wrong"], contrary["signal:wrong"])


@dataclass(frozen=True)
class Faulty(Chain):
    fault: str = ""

    def judge(self, task: Task, answer: Sequence[int], rng: np.random.Generator) -> list[bool]:
        if self.fault == "raises":
            raise ConnectionError("no answer from the judge's server")
        return super().judge(task, answer, rng)[: 1 if self.fault == "short" else None]

    def spans(self, task: Task, answer: Sequence[int]) -> list[tuple[int, int]]:
        return [(0, 4), (3, 6)] if self.fault == "overlaps" else super().spans(task, answer)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("raises", "The judge of .* raised ConnectionError on an answer of 7 tokens: no answer from"),
        ("short", "The judge of .* gave 1 verdicts on an answer of 2 steps"),
        ("overlaps", "ranges of an answer's 7 tokens, one after another, not"),
    ],
)
def test_a_judge_at_fault_is_one_sentence(tiny_collector: Collector, fault: str, why: str) -> None:
    collect = told(tiny_collector, Faulty(operations=2, fault=fault), "+47*24$")
    with pytest.raises(Resumable, match=why) as raised:
        criticised(prompts=1, group=1)(collect)
    assert "\n" not in str(raised.value)


# ------------------------------------------------------------------ credit


@pytest.mark.parametrize("micro", [4, 10**9])
def test_gradient_is_the_papers_in_any_order_and_split(micro: int) -> None:
    """Tokens against all tokens of their group. One group has nothing but wrong answers, and learns all the same."""
    made = ragged(drift=0.4)
    dice = torch.Generator().manual_seed(2)
    wrong = torch.randint(0, 2, (len(made),), generator=dice).double()
    success = (made["reward"] > 0).double() * (made["group"] != 10)
    made = made.with_columns(**{"signal:success": success, "signal:wrong": wrong})
    method = capo().but(regularise=())
    made = made.with_columns(reward=method.reward(made))
    slow, loss, count = Slow(), ZERO, len(made.by("episode"))
    for members in groups_of(made):
        tokens = [row for e in members for row in rows_of(made, episode=e)]
        right = {row["episode"] for row in tokens if row["signal:success"]}
        reward = torch.tensor([2.0 * (r["episode"] in right) - r["signal:wrong"] for r in tokens]).double()
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
        for row, a in zip(tokens, advantage.tolist(), strict=True):
            rho = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
            gain = torch.minimum(rho * a, rho.clamp(0.8, 1.2) * a)
            loss = loss - gain / (len(rows_of(made, episode=row["episode"])) * count)
    expected = slow.gradient(loss)
    for rows in (made, shuffled(made)):
        credited = rows.with_columns(advantage=method.credit(rows))
        assert_same(gradient(method, credited, micro_tokens=micro), expected, 1e-5)
    assert bool((method.credit(made)[made["group"] == 10] != 0).any())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PanoplyError, match="judge"):
        pp.plan("capo", "add")
    asked = {"sample.critiques": 1, "sample.vote": "majority", "world.judge_noise": 0.2}
    with pytest.raises(PanoplyError, match="there is one critique"):
        pp.plan("capo", "chain", settings=asked)
    with pytest.raises(PanoplyError, match="critiques has no effect: the judge of chain never errs"):
        pp.plan("capo", "chain", settings={"sample.critiques": 2})
