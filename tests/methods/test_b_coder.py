"""B-Coder: Q of logits, targets that go on as the checkpoint would, values beside it, and what they say of programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit import assert_same, hand
from tiny import bare, metrics

import panoply as pp
from panoply.batch import Batch
from panoply.costs import cost
from panoply.evaluation.judged import judge
from panoply.experience import REPLAY, TEACHER
from panoply.methods.applied_agents.b_coder import (
    b_coder,
    checkpoint_value,
    implied_reward,
    planted,
    q_of_logits,
    scored_programs,
    small_advantage,
)
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.run import Run
from panoply.worlds.text.program import Program

ROWS = {"episode": [0, 0, 0], "group": [5] * 3, "source": [REPLAY] * 3, "position": [4, 5, 6]}
NOW = {
    "logp": [-1.0, -0.5, -2.0],
    "top_logp": [-1.0, -0.25, -0.5],
    "logp_of_favourite:reference": [-1.0, -0.25, -1.5],
    "residual": [0.1, 0.2, -0.1],
}
VALUE = [0.0, 0.3, 0.5]


def batch(**more: list[float]) -> Batch:
    rows = hand(**ROWS, **{"value": VALUE, "signal:score": [0.0, 0.0, 1.0]})
    now = {n: torch.tensor(more.get(n, x), dtype=torch.float64, requires_grad=True) for n, x in NOW.items()}
    return Batch(rows, now)


def test_the_bellman_error_by_hand() -> None:
    """α = ½, γ = 0.9. Q = ½·(log π − max log π) + V: 0.1, −0.125 + 0.5, −0.75 + 0.4. What follows: V(s′) less what the
    checkpoint's token lacks: 0.5, 0.4 − 0.5; nothing after the last."""
    value, stats = q_of_logits(alpha=0.5, gamma=0.9)(batch())
    q, after = [0.1, 0.375, -0.35], [0.5, -0.1, 0.0]
    reward = [0.0, 0.0, 1.0]
    errors = [r + 0.9 * a - x for r, a, x in zip(reward, after, q, strict=True)]
    assert value.tolist() == pytest.approx([e * e for e in errors], rel=1e-6)
    assert stats["q"].tolist() == pytest.approx(q, rel=1e-6)


def test_only_the_next_state_is_held_fixed() -> None:
    at = batch()
    value, _ = q_of_logits(alpha=0.5, gamma=0.9)(at)
    value.sum().backward()  # type: ignore[no-untyped-call]
    errors = torch.tensor([0.45 - 0.1, -0.09 - 0.375, 1.35], dtype=torch.float64)
    assert_same(at.now["residual"].grad, -2 * errors)
    assert_same(at.now["logp"].grad, -2 * 0.5 * errors)
    assert_same(at.now["top_logp"].grad, 2 * 0.5 * errors)
    assert at.now["logp_of_favourite:reference"].grad is None


def test_an_own_target_is_the_value_and_a_high_one_is_capped() -> None:
    own, _ = q_of_logits(alpha=0.5, gamma=1.0, target="own")(batch())
    assert float(own[1]) == pytest.approx((0.4 - 0.375) ** 2, rel=1e-5)
    capped, _ = q_of_logits(alpha=0.5, gamma=1.0, target="own", most=0.3)(batch())
    assert float(capped[1]) == pytest.approx((0.3 - 0.375) ** 2, rel=1e-5)


def test_rows_in_another_order_are_the_same_program() -> None:
    rows = batch()
    order = torch.tensor([2, 0, 1])
    shuffled = Batch(rows.experience.take(order), {n: x[order] for n, x in rows.now.items()})
    assert_same(q_of_logits()(shuffled)[0], q_of_logits()(rows)[0][order])


def test_the_value_is_fitted_to_the_checkpoints_advantages() -> None:
    rows = hand(
        **ROWS,
        **{"signal:score": [0.0, 0.0, -0.6], "logp@reference": [-1.0, -0.5, -2.0]},
        **{"top_logp@reference": [-0.5, -0.5, -1.0]},
    )
    now = {"value": torch.tensor([0.2, 0.4, 0.1], dtype=torch.float64, requires_grad=True)}
    value, _ = checkpoint_value(alpha=1.0, gamma=0.5)(Batch(rows, now))
    errors = [0.5 * 0.4 + 0.5 - 0.2, 0.5 * 0.1 - 0 - 0.4, -0.6 + 1.0 - 0.1]
    assert value.tolist() == pytest.approx([e * e for e in errors], rel=1e-6)
    value.sum().backward()  # type: ignore[no-untyped-call]
    assert_same(now["value"].grad, -2 * torch.tensor(errors, dtype=torch.float64))


def test_references_are_to_be_greedy() -> None:
    rows = Batch(hand(episode=[0, 0, 1], source=[TEACHER] * 3), {
        "logp": torch.tensor([-1.0, -0.5, -2.0]), "top_logp": torch.tensor([-1.0, -0.25, -0.5])
    })  # fmt: skip
    assert small_advantage()(rows)[0].tolist() == pytest.approx([0.25, 1.5])


def test_values_without_error_say_what_was_earned() -> None:
    """Where Q(s, a) = r + γ·V(s′) everywhere, R̃ is the reward, whatever V is."""
    rows, value, gamma = batch(), torch.tensor([0.3, -2.0, 7.0]), 0.9
    q = torch.tensor([0.9 * -2.0, 0.9 * 7.0, 1.0])
    assert implied_reward(rows, q, value, gamma).tolist() == pytest.approx([1.0], abs=1e-5)


def test_without_a_discount_values_cancel_but_for_the_first() -> None:
    rows, value = batch(), torch.tensor([0.3, -2.0, 7.0])
    advantage = torch.tensor([-0.5, 0.0, -1.25])
    assert implied_reward(rows, advantage + value, value, 1.0).tolist() == pytest.approx(
        [0.3 - 1.75], abs=1e-5
    )


def test_programs_of_one_task_are_put_in_order() -> None:
    rows = hand(
        episode=[0, 1, 2],
        group=[5, 5, 6],
        source=[REPLAY] * 3,
        value=[0.0] * 3,
        **{"signal:score": [1.0, -0.3, 1.0]},
    )
    now = {n: torch.zeros(3) for n in NOW} | {
        "logp": torch.tensor([-2.0, -1.0, 0.0]),
        "residual": torch.tensor([5.0, 1.0, 0.0]),
    }
    _, stats = q_of_logits()(Batch(rows, now))
    assert stats["right_order"].tolist() == [1.0], "one group has programs of unequal worth"
    assert stats["likely_order"].tolist() == [0.0]


def test_a_token_of_the_checkpoints_is_scored_as_if_it_had_been_said() -> None:
    world = Program(kind="stack")
    policy, other = (open_policy("fresh", world, seed, "cpu") for seed in (0, 1))
    tasks = [world.task("train", i) for i in range(2)]
    made = Collector(world, policy, seed=0).answers(tasks, [world.gold(t) for t in tasks])
    needs = frozenset({"top_logp", "logp_of_favourite:reference"})
    theirs = other.score(made, frozenset({"favourite"}))["favourite"]
    found = policy.score(made.with_columns(**{"favourite@reference": theirs}), needs)
    assert_same(found["logp_of_favourite:reference"], policy.score(made.with_columns(action=theirs))["logp"])
    mine = policy.score(made, frozenset({"favourite"}))["favourite"]
    assert_same(found["top_logp"], policy.score(made.with_columns(action=mine))["logp"])
    assert bool((found["top_logp"] >= found["logp"] - 1e-6).all())


def test_programs_are_written_once_and_references_join_them() -> None:
    world = Program(kind="stack")
    policy = open_policy("start", world, 0, "cpu")
    collect, data = Collector(world, policy, seed=0), scored_programs(batch=2, answers=3, prompts=2)
    state, first = data({}, collect)
    assert first["source"].unique().tolist() == [TEACHER, REPLAY]
    assert first.by("group").keys.numel() == 2
    assert len(first.by("episode")) == 2 * 4
    right = first.take(first["source"] == TEACHER)
    assert right.by("episode").sum(right["signal:score"]).tolist() == [1.0, 1.0]
    _, again = data(state, collect)
    said = [sorted(e.take(e["source"] == REPLAY)["action"].tolist()) for e in (first, again)]
    assert said[0] == said[1]


def test_exact_values_turned_round_are_the_rewards() -> None:
    """And R̃, which takes the highest Q for what follows, is not: of one token it is."""
    found = planted(0)
    assert found["apart"] < 1e-9
    assert found["by the operator's inverse"] == 1.0
    assert found["by R̃"] < 1.0
    assert planted(1, depth=1)["by R̃"] == 1.0


def test_the_value_learns_first_and_then_stays(tmp_path: Path) -> None:
    settings = {"data.batch": 2, "data.prompts": 2, "data.answers": 2, "run.held_out": 4, "run.keep": 9,
                "models.pretrained_value.warmup": 1, "run.checkpoint_every": 1, "run.greedy": False}  # fmt: skip
    bare(tmp_path / "run", "b-coder", steps=3, settings=settings)

    def weights(part: str, step: int) -> bytes:
        return (tmp_path / f"run/checkpoints/step-{step:07d}/{part}/model.safetensors").read_bytes()

    policy, fitted, rest = "model", "models/pretrained_value", "models/residual_value"
    assert weights(policy, 1) == weights(policy, 0) != weights(policy, 2) != weights(policy, 3)
    assert weights(fitted, 0) != weights(fitted, 1) == weights(fitted, 2) == weights(fitted, 3)
    assert weights(rest, 0) == weights(rest, 1) != weights(rest, 2)
    assert "right_order" in metrics(tmp_path / "run")[-1]
    ranked = judge(Run.open(tmp_path / "run"), "b-coder-ranking", {"problems": 2, "answers": 3})
    assert set(ranked) == {"by R̃", "by the operator's inverse", "by likelihood", "by chance", "any"}
    assert all(0 <= share <= ranked["any"] for share in ranked.values())


def test_the_paper_and_what_is_refused() -> None:
    assert b_coder().settings()["losses.q_of_logits.target"] == "checkpoint"
    with pytest.raises(pp.PanoplyError, match=r"it is a part of the values that losses.q_of_logits learns"):
        pp.plan("sft", "program:stack", models=(b_coder().models[0],))


def test_a_plan_counts_that_both_values_learn() -> None:
    """The residual with the policy's update, which keeps two numbers of every weight beside its gradient."""
    weighed = cost(pp.plan("b-coder", "program:stack")).memory_bytes
    for name in ("pretrained_value", "residual_value"):
        whole = weighed[name]
        assert weighed[f"{name}'s gradients"] == whole
        assert weighed[f"{name}'s optimiser"] == 2 * whole
