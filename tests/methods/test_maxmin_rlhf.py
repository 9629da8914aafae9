"""MaxMin-RLHF: groups that EM finds by annotator, and the reward of the group that is worst off."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kit import dataset, hand, learner
from torch import Tensor

import panoply as pp
from panoply.batch import Batch
from panoply.errors import PanoplyError
from panoply.evaluation.pairs import _margins
from panoply.experience import Experience, Table
from panoply.methods.preferences.maxmin_rlhf import e_step, mixture, refilled, worst_group
from panoply.policies.value import ValueModel
from panoply.report.html import render
from panoply.report.study import Study
from panoply.report.text import found_by
from panoply.rollout.text import Collector
from panoply.states import as_tensors, from_tensors

CONFLICT = "strings:conflict"


def logs(*rows: tuple[float, float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def ones(*groups: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(groups), 2).double()


# ------------------------------------------------------------------ who belongs where


def test_all_pairs_of_an_annotator_decide_together() -> None:
    """Annotator 1 has one pair that speaks for the first group, and two that speak more for the second: 0.063 to 0.081.

    Pair by pair he would be in both. Annotator 2 was not heard yet and stays; a pair that was not seen does not count.
    """
    told = logs((0.9, 0.2), (0.7, 0.5), (0.3, 0.4), (0.3, 0.41), (0.001, 0.999))
    owner = torch.tensor([0, 1, 1, 1, -1])
    before = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.25, 0.75]], dtype=torch.float64)
    hard = e_step(told, owner, before, soft=False)
    assert hard.tolist() == [[1.0, 0.0], [0.0, 1.0], [0.25, 0.75]]
    even = torch.full((3, 2), 0.5, dtype=torch.float64)
    soft = e_step(told, owner, even, soft=True)
    assert soft[0].tolist() == pytest.approx([0.9 / 1.1, 0.2 / 1.1])
    assert soft[1].tolist() == pytest.approx([0.063 / (0.063 + 0.082), 0.082 / (0.063 + 0.082)])
    uneven = e_step(told, owner, torch.tensor([[0.8, 0.2]] * 3, dtype=torch.float64), soft=True)
    assert uneven[0].tolist() == pytest.approx([0.72 / 0.76, 0.04 / 0.76])


def test_a_group_of_nobody_begins_again_with_whom_his_own_explains_least() -> None:
    fit, heard = logs((0.9, 0.5), (0.4, 0.5), (0.6, 0.5), (0.1, 0.5)), torch.tensor([True, True, True, False])
    assert refilled(ones(0, 0, 0, 0), fit, heard).tolist() == ones(0, 1, 0, 0).tolist()
    full = ones(0, 1, 0, 0)
    assert refilled(full, fit, heard).equal(full)
    alone = ones(0)  # nobody is taken from where he is alone
    assert refilled(alone, fit[:1], heard[:1]).equal(alone)


def people(seed: int = 0) -> tuple[Tensor, list[int]]:
    """Eleven annotators, of whom the last is different, and what the chosen answers of their pairs have more of."""
    draw = torch.Generator().manual_seed(seed)
    owner = [pair % 11 for pair in range(220)]
    gaps = torch.randn(220, 3, generator=draw, dtype=torch.float64)
    taste = torch.tensor([[-4.0 if who == 10 else 4.0, 1.0, 0.0] for who in owner], dtype=torch.float64)
    right = torch.rand(220, generator=draw, dtype=torch.float64) < torch.sigmoid((gaps * taste).sum(1))
    return torch.where(right[:, None], gaps, -gaps), owner


def pairs_of(rows: list[int], owner: list[int]) -> Experience:
    """Each pair is the episodes 2i and 2i + 1, of one token each."""
    made = hand([(2 * i, 2 * i + 1) for i in range(len(rows))], episode=list(range(2 * len(rows))))
    assert made.pairs is not None
    more = {"annotator": torch.tensor([owner[row] for row in rows]), "pair": torch.tensor(rows)}
    return made.with_pairs(Table({**made.pairs, **more}))


def judged(rows: list[int], gaps: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """A linear reward model of two groups: the rejected answer is worth nothing to it."""
    worth = gaps[rows] @ weights.t()
    both = torch.stack([worth, torch.zeros_like(worth)], 1).flatten(0, 1)
    return {"judged:a": both[:, 0], "judged:b": both[:, 1], "judged": both.sum(1)}


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """A state as a resumed run finds it."""
    return from_tensors(as_tensors({"it": state}))["it"]


@pytest.mark.parametrize("soft", [False, True])
def test_em_finds_planted_groups(soft: bool) -> None:
    """In mini-batches of a quarter, so that most of what is remembered of an annotator is of earlier steps."""
    held = mixture(soft=soft, warmup=8, every=4)
    for seed in range(2):
        gaps, owner = people(seed)
        weights = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
        state, turn = held.info.state(), torch.Generator().manual_seed(seed)
        for step in range(44):
            order = torch.randperm(220, generator=turn).tolist()
            rows = order[step % 4 :: 4]
            now = judged(rows, gaps, weights)
            batch = Batch(pairs_of(rows, owner), now)
            with torch.no_grad():
                state, prepared = held.info.prepare(stored(state), batch, **held.settings())
            value, _ = held(Batch(batch.experience, now, {"mixture": prepared}))
            (slope,) = torch.autograd.grad(value.mean(), weights)
            with torch.no_grad():
                weights -= 2.0 * slope
        shares = state["shares"].reshape(11, 2)
        assert shares.argmax(1).tolist() == [0] * 10 + [1]
        assert float(shares.max(1).values.min()) > 0.9
        assert weights[0, 0] > 0 > weights[1, 0]
    assert list(held.info.tells(held, state)) == [
        "group a: 10 of 11 annotators, number 0–9", "group b: 1 of 11 annotators, number 10",
    ]  # fmt: skip


def test_the_loss_is_each_groups_share_of_its_own_likelihood() -> None:
    """By hand, and its slope: annotator 0 is three quarters of group a's."""
    made = pairs_of([0, 1], [0, 1])
    said = {
        "judged:a": torch.tensor([2.0, 1.0, 0.0, 1.0], dtype=torch.float64, requires_grad=True),
        "judged:b": torch.tensor([0.0, 3.0, 5.0, 4.5], dtype=torch.float64, requires_grad=True),
    }
    shares = torch.tensor([[0.75, 0.25], [0.0, 1.0]])
    value, stats = mixture()(Batch(made, said, {"mixture": shares}))

    def cost(margin: float) -> float:
        return math.log(1 + math.exp(-margin))

    assert value.tolist() == pytest.approx([0.75 * cost(1) + 0.25 * cost(-3), cost(0.5)])
    assert stats["accuracy"].tolist() == [1.0, 1.0]
    slope, _ = torch.autograd.grad(value.sum(), list(said.values()))
    less = 0.75 / (1 + math.exp(1))
    assert slope.tolist() == pytest.approx([-less, less, 0.0, 0.0])


# ------------------------------------------------------------------ the worst off


def answers(a: list[float], b: list[float], logp: float = -1.0) -> Experience:
    """An answer of two tokens each, judged by two groups on its last."""
    count = len(a)
    last = [[0.0, x] for x in a], [[0.0, x] for x in b]
    return hand(
        **{
            "episode": [i for i in range(count) for _ in range(2)],
            "logp": [logp] * (2 * count),
            "logp@reference": [-1.0] * (2 * count),
            "signal:model_a": [x for pair in last[0] for x in pair],
            "signal:model_b": [x for pair in last[1] for x in pair],
        }
    )


def test_offsets_and_scales_of_reward_models_do_not_choose_the_worst() -> None:
    """b is worth 1000 less throughout, and it is a that has fallen, by two deviations."""
    held = worst_group(memory=0.0, beta=0.0)
    state, first = held(held.info.state(), answers([1.0, 3.0], [-1000.0, -900.0]))
    deviation = math.sqrt(2)
    assert state["worth"].tolist() == pytest.approx([0.0, 0.0], abs=1e-12)
    assert first.tolist() == pytest.approx([0, -1 / deviation, 0, 1 / deviation])
    state, earned = held(state, answers([-2.0, 0.0], [-950.0, -900.0]))
    assert state["worth"].tolist() == pytest.approx([-3 / deviation, 0.5 / deviation])
    assert earned.tolist() == pytest.approx([0, -4 / deviation, 0, -2 / deviation])
    assert list(held.info.tells(held, state)) == [
        "group a: answers are worth -2.12 deviations of the start's; 100% of steps were its",
        "group b: answers are worth +0.35 deviations of the start's; 0% of steps were its",
    ]


def test_the_worst_is_of_a_moving_average_less_the_distance() -> None:
    held = worst_group(memory=0.75, beta=0.5)
    state, _ = held(held.info.state(), answers([1.0, 3.0], [1.0, 3.0]))
    state, earned = held(state, answers([6.0, 6.0], [2.0, 4.0], logp=-0.9))
    far = 0.5 * 0.2  # two tokens, a tenth each
    assert state["worth"].tolist() == pytest.approx(
        [0.25 * (4 / math.sqrt(2) - far), 0.25 * (1 / math.sqrt(2) - far)]
    )
    z = 0.0 / math.sqrt(2), 2 / math.sqrt(2)
    assert earned.tolist() == pytest.approx([-0.05, z[0] - 0.05, -0.05, z[1] - 0.05])
    state, _ = held(state, answers([-9.0, -9.0], [2.0, 4.0]))
    assert int(state["weight"].argmax()) == 0


def test_weights_follow_what_groups_are_worth_and_the_mean_does_not() -> None:
    held = worst_group(by="weights", memory=0.0, rate=0.5, beta=0.0)
    state, _ = held(held.info.state(), answers([1.0, 3.0], [1.0, 3.0]))
    assert state["weight"].tolist() == [0.5, 0.5]
    state, earned = held(state, answers([4.0, 4.0], [2.0, 2.0]))
    one = math.exp(-0.5 * 2 / math.sqrt(2))
    weight = [one / (1 + one), 1 / (1 + one)]
    assert state["weight"].tolist() == pytest.approx(weight)
    assert earned[1].item() == pytest.approx(weight[0] * 2 / math.sqrt(2))
    mean = worst_group(by="mean", beta=0.0)
    _, earned = mean(mean.info.state(), answers([1.0, 3.0], [3.0, 1.0]))
    assert earned.tolist() == pytest.approx([0.0] * 4)


# ------------------------------------------------------------------ the recipe


def test_it_names_the_groups_and_their_worth(tmp_path: Path) -> None:
    settings = {
        "run.held_out": 8, "imitate.run.steps": 1, "imitate.data.batch": 4, "judge.run.steps": 4,
        "judge.data.batch": 8, "judge.data.pairs": 22, "judge.losses.mixture.warmup": 2, "optimise.run.steps": 2,
        "optimise.sample.prompts": 4, "optimise.models.critic.warmup": 0,
    }  # fmt: skip
    done = tiny.bare(tmp_path / "whole", "maxmin-rlhf", settings=settings)
    found = found_by(done.run)
    assert [sentence[:8] for sentence in found] == ["group a:", "group b:"] * 2
    assert "of 22 annotators" in found[0]
    assert "deviations of the start's" in found[2]
    assert all(sentence in str(done) for sentence in found)
    page = render(Study.of([str(done.run)]))
    assert escape(found[2]) in page


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"data.annotators": 0}, "groups are found by who preferred what"),
        ({"data.pairs": 0}, "say how many with data.pairs"),
        ({"losses.mixture.groups": 3, "data.annotators": 2}, "one group would be empty"),
        ({"losses.mixture.groups": 1}, "from 2 to 12"),
        ({"data.pairs": 10}, "some have no pair"),
    ],
)
def test_pairs_that_cannot_make_groups_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PanoplyError, match=sentence):
        pp.plan("group-model", CONFLICT, settings=settings)


def test_pairs_of_nobody_are_refused_when_they_come() -> None:
    held = mixture()
    alone = hand([(0, 1)], episode=[0, 1])
    assert alone.pairs is not None
    for made in (alone, alone.with_pairs(Table({**alone.pairs, "annotator": torch.tensor([-1])}))):
        with pytest.raises(PanoplyError, match="not all pairs say who"):
            held.info.prepare(held.info.state(), Batch(made, {}), **held.settings())


def test_a_pair_of_a_file_is_known_by_its_task() -> None:
    held, gaps = mixture(), torch.ones(2, 3, dtype=torch.float64)
    made = pairs_of([0, 1], [0, 1])
    assert made.pairs is not None
    made = made.with_columns(task=torch.tensor([70, 70, 80, 80]))
    unnumbered = made.with_pairs(Table({k: v for k, v in made.pairs.items() if k != "pair"}))
    state = held.info.state()
    for weight in (1.0, 2.0):
        now = judged([0, 1], gaps, torch.full((2, 3), weight, dtype=torch.float64))
        state, _ = held.info.prepare(state, Batch(unnumbered, now), **held.settings())
    assert state["pairs"].tolist() == [70, 80]
    assert state["told"].tolist() == pytest.approx([-math.log(1 + math.exp(-6))] * 4)


def test_held_out_pairs_are_judged_for_the_group_that_agrees() -> None:
    """Annotator 0 agrees with a on both pairs, annotator 1 with b on one of two."""

    class Judge:
        outputs = ("a", "b")

        def judgements(self, _: Experience) -> dict[str, Tensor]:
            a = torch.tensor([1.0, 0, 1, 0, 0, 1, 0, 1])
            b = torch.tensor([0.0, 1, 0, 1, 1, 0, 0, 1])
            return {"a": a, "b": b}

    margins, _ = _margins(pairs_of([0, 1, 2, 3], [0, 0, 1, 1]), Judge())  # type: ignore[arg-type]
    assert margins.tolist() == [1, 1, 1, -1]


def test_what_a_judge_says_does_not_depend_on_how_a_batch_is_split(tiny_collector: Collector) -> None:
    """Micro-batches take whole pairs, whose answers may lie far from one another."""
    model = ValueModel.of(tiny_collector.policy.copy(), ("a", "b"))
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    tasks = tiny_collector.tasks(4)
    made = tiny_collector.preferred(tasks, [[5, 6, 7], [5], [6, 7], [8, 9]], [[5, 6], [7, 7], [9, 9, 9], [4]])
    assert made.pairs is not None
    far = Table({"chosen": made.pairs.tensor("chosen"), "rejected": made.pairs.tensor("rejected").flip(0)})
    made = made.with_pairs(far)
    whole, split = (learner(model, dataset(mixture()), tokens).scored(made, []) for tokens in (10**6, 20))
    assert whole.keys() == split.keys() >= {"judged:a", "judged:b"}
    for name, said in whole.items():
        torch.testing.assert_close(split[name], said, atol=1e-5, rtol=1e-5)
