"""OORL / GEPO: one preference for a set, equal log-ratios among its right answers, and own answers beside it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from kit import Tabular, assert_same, hand, learner
from tiny import bare, metrics

from panoply.batch import Batch
from panoply.experience import OWN, SYNTHETIC, Table
from panoply.methods.applied_agents.oorl_gepo import group_preference, oorl_gepo, with_equivalents
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.slots.credit.returns import return_to_go
from panoply.slots.loss.pairs import logistic
from panoply.worlds.text.program import Program


def sets(
    now: list[float], then: list[float], right: list[int], group: list[int], episode: list[int]
) -> Batch:
    rows = hand(
        episode=episode, group=group, source=[SYNTHETIC] * len(now),
        right=[float(r) for r in right], **{"logp@reference": then},
    )  # fmt: skip
    return Batch(rows, {"logp": torch.tensor(now, dtype=torch.float64, requires_grad=True)})


def test_a_set_by_hand() -> None:
    """Ratios of right answers 0.2 (two tokens) and 0.6, of wrong ones −0.4 and 0: the margin is 0.5·(0.4 + 0.2)."""
    batch = sets(
        [-1.0, -1.9, -2.4, -3.4, -1.0],
        [-1.1, -2.0, -3.0, -3.0, -1.0],
        [1, 1, 1, 0, 0],
        [7] * 5,
        [0, 0, 1, 2, 3],
    )
    value, stats = group_preference(beta=0.5, spread=2.0)(batch)
    assert value.tolist() == pytest.approx([-math.log(1 / (1 + math.exp(-0.3))) + 2 * 0.04])
    assert stats["set_margin"].tolist() == pytest.approx([0.3])
    assert stats["set_spread"].tolist() == pytest.approx([0.2])
    mean, _ = group_preference(beta=0.5, spread=2.0, per_token=True)(batch)
    gap = 0.5 * ((0.1 + 0.6) / 2 + 0.2)
    assert mean.tolist() == pytest.approx([-math.log(1 / (1 + math.exp(-gap))) + 2 * 0.25**2])


def test_a_set_of_one_pair_is_dpo() -> None:
    batch = sets([-1.0, -1.9, -2.4], [-1.1, -2.3, -3.0], [1, 1, 0], [7] * 3, [0, 0, 1])
    ours, _ = group_preference(beta=0.1, spread=1.0)(batch)
    pairs = batch.experience.with_pairs(Table({"chosen": torch.tensor([0]), "rejected": torch.tensor([1])}))
    theirs, _ = logistic(beta=0.1)(Batch(pairs, batch.now))
    assert_same(ours, theirs)
    assert_same(
        *(torch.autograd.grad(x.sum(), batch.now["logp"], retain_graph=True)[0] for x in (ours, theirs))
    )


def test_the_means_are_inside_of_the_sigmoid() -> None:
    """One logistic a set: a mean of the logistics of its pairs would be something else."""
    batch = sets([0.0, 4.0, 0.0, 0.0], [0.0] * 4, [1, 1, 0, 0], [7] * 4, [0, 1, 2, 3])
    value, _ = group_preference(beta=1.0, spread=0.0)(batch)
    assert float(value.detach()) == pytest.approx(math.log(1 + math.exp(-2)))
    assert float(value.detach()) != pytest.approx((math.log(2) + math.log(1 + math.exp(-4))) / 2)


def test_equal_ratios_have_no_spread_whatever_the_lengths() -> None:
    batch = sets([-1.0, -2.0, -7.0, -1.0], [-1.0, -2.0, -7.0, -1.0], [1, 1, 1, 0], [7] * 4, [0, 0, 1, 2])
    with_spread, _ = group_preference(spread=5.0)(batch)
    without, _ = group_preference(spread=0.0)(batch)
    grads = [
        torch.autograd.grad(v.sum(), batch.now["logp"], retain_graph=True)[0] for v in (with_spread, without)
    ]
    assert_same(*grads)


def test_sets_do_not_depend_on_their_order() -> None:
    now, then = [-1.0, -2.0, -0.5, -3.0, -1.5, -0.7], [-1.2, -2.5, -0.4, -3.1, -1.0, -0.9]
    right, group, episode = [1, 1, 0, 1, 0, 0], [7, 7, 7, 3, 3, 3], [0, 1, 2, 3, 4, 5]
    one, _ = group_preference()(sets(now, then, right, group, episode))
    order = [5, 2, 0, 4, 1, 3]
    other, _ = group_preference()(
        sets(*([column[i] for i in order] for column in (now, then, right, group, episode)))  # type: ignore[arg-type]
    )
    assert_same(one, other)


def test_both_parts_are_averaged_by_their_own_counts() -> None:
    """Ascend REINFORCE++ over 2 decisions, descend 0.01·GEPO over 1 set."""
    policy = Tabular()
    states, actions = [0, 1, 2, 3], [0, 1, 2, 3]
    with torch.no_grad():
        logp = policy.score(hand(state=states, action=actions))["logp"]
    rows = hand(
        state=states, action=actions, episode=[0, 1, 2, 3], group=[0, 1, 5, 5], source=[OWN, OWN, SYNTHETIC, SYNTHETIC],
        advantage=[1.0, -2.0, 0.0, 0.0], right=[math.nan, math.nan, 1.0, 0.0],
        logp=[*logp[:2].tolist(), math.nan, math.nan], **{"logp@reference": logp.tolist()},
    )  # fmt: skip
    found = learner(policy, oorl_gepo()).gradient(rows, step=0)
    p = policy.logits.detach().softmax(-1)
    slow = torch.zeros_like(policy.logits)
    push = [1.0 / 2, -2.0 / 2, 0.01 * 0.1 * 0.5, -0.01 * 0.1 * 0.5]
    for s, a, by in zip(states, actions, push, strict=True):
        score = -p[s].clone()
        score[a] += 1
        slow[s] -= by * score
    assert_same(found["logits"], slow)


def test_a_set_is_never_split_over_micro_batches() -> None:
    """Two sets and two own answers, a token a micro-batch: the gradient is that of the whole."""
    states, actions, group = [0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 3, 0, 2, 1], [0, 1, 5, 5, 5, 6, 6]
    rows = hand(
        state=states, action=actions, episode=list(range(7)), group=group, source=[OWN] * 2 + [SYNTHETIC] * 5,
        advantage=[1.0, -2.0, 0, 0, 0, 0, 0], right=[math.nan, math.nan, 1.0, 1.0, 0.0, 1.0, 0.0],
        logp=[-1.0, -1.5] + [math.nan] * 5, **{"logp@reference": [-1.0, -1.5, -0.4, -2.0, -1.0, -0.7, -3.0]},
    )  # fmt: skip
    method, policy = oorl_gepo(), Tabular()
    whole = learner(Tabular(), method).gradient(rows, step=0)["logits"]
    assert_same(learner(policy, method, micro_tokens=1).gradient(rows, step=0)["logits"], whole, rel=1e-10)
    assert len(policy.scored) > 2, "the mini-batch was never split"
    apart = rows.with_columns(group=torch.tensor([0, 1, 5, 6, 5, 6, 6]))
    assert float((learner(Tabular(), method).gradient(apart, step=0)["logits"] - whole).abs().max()) > 1e-5


def test_given_answers_are_in_no_baseline() -> None:
    own = return_to_go()(hand(episode=[0, 1], reward=[1.0, 0.0], source=[OWN, OWN]))
    both = return_to_go()(hand(episode=[0, 1, 2], reward=[1.0, 0.0, math.nan], source=[OWN, OWN, SYNTHETIC]))
    assert_same(both[:2], own)
    assert float(both[2]) == 0


def test_sets_are_right_and_wrong_by_the_verifier_and_come_back() -> None:
    world = Program(kind="ir")
    collect = Collector(world, open_policy("fresh", world, 0, "cpu"), seed=3)
    made = with_equivalents(prompts=2, sets=3, pool=4)(collect)
    given = made.take(made["source"] == SYNTHETIC)
    episodes = given.by("episode")
    right = episodes.first(given["right"])
    assert right.tolist() == [1, 1, 1, 0, 0, 0] * 3
    assert_same(episodes.sum(given["signal:success"]).double(), right.double())
    assert len(given.by("group")) == 3
    assert bool(made["logp"][made["source"] == SYNTHETIC].isnan().all())
    again = with_equivalents(prompts=2, sets=4, pool=4)(collect)
    tasks = set(again["task"][again["source"] == SYNTHETIC].tolist())
    assert set(given["task"].tolist()) <= tasks
    assert len(tasks) == 4


def test_a_run_learns_from_both(tmp_path: Path) -> None:
    settings = {"sample.prompts": 4, "sample.sets": 2, "run.held_out": 4}
    bare(tmp_path / "run", "oorl-gepo", model="fresh", steps=2, settings=settings)
    last = metrics(tmp_path / "run")[-1]
    assert last["episodes"] == 4
    assert 0 <= last["set_accuracy"] <= 1
    assert last["set_spread"] > 0
