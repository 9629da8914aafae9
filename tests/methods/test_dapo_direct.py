"""Direct advantage: steps and their values, the squared loss, and that no state is worse after it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kit import Slow, assert_same, dataset, gradient, ragged, rows_of, shuffled
from papers import ZERO, groups_of
from torch import Tensor

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import DEMONSTRATION, Segments
from panoply.methods.reasoning_data.dapo_direct import (
    Candidate,
    advantage_regression,
    advantages,
    as_rows,
    balanced,
    fitted,
    step_candidates,
    step_ends,
)
from panoply.rollout.text import Collector

# ------------------------------------------------------------------ the theorem, on trees with known values

DEPTH, CHOICES = 4, 3


def values(
    policy: dict[tuple[int, ...], Tensor], worth: dict[tuple[int, ...], float]
) -> dict[tuple[int, ...], Tensor]:
    """V of every state of a tree, leaves included."""
    found: dict[tuple[int, ...], Tensor] = {leaf: torch.tensor(w) for leaf, w in worth.items()}
    for depth in range(DEPTH - 1, -1, -1):
        for state in product(range(CHOICES), repeat=depth):
            below = torch.stack([found[(*state, a)] for a in range(CHOICES)])
            found[state] = (policy[state] * below).sum()
    return found


@pytest.mark.parametrize("beta", [0.02, 0.1, 0.5])
def test_no_state_is_worse(beta: float) -> None:
    """The minimiser of ½ mean_a (A/β − log π/π_ref)² in every state alone, of random trees."""
    torch.manual_seed(0)
    gains = []
    for _ in range(2):
        states = [s for d in range(DEPTH) for s in product(range(CHOICES), repeat=d)]
        before = {s: torch.randn(CHOICES, dtype=torch.float64).softmax(0) for s in states}
        worth = {s: float(torch.rand(()) < 0.3) for s in product(range(CHOICES), repeat=DEPTH)}
        v = values(before, worth)
        aim = torch.stack([torch.stack([v[(*s, a)] for a in range(CHOICES)]) - v[s] for s in states]) / beta
        start = torch.stack([before[s] for s in states]).log()
        logits = start.clone().requires_grad_(True)
        solver = torch.optim.LBFGS(
            [logits], max_iter=100, line_search_fn="strong_wolfe", tolerance_change=1e-14
        )

        def closure() -> Tensor:
            solver.zero_grad()  # noqa: B023
            loss = (0.5 * (aim - (logits.log_softmax(1) - start)) ** 2).mean(1).sum()  # noqa: B023
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        solver.step(closure)
        after = values(dict(zip(states, logits.detach().softmax(1), strict=True)), worth)
        assert min(float(after[s] - v[s]) for s in states) > -1e-6
        gains.append(float(after[()] - v[()]))
    assert min(gains) > 0.01


# ------------------------------------------------------------------ steps


def test_steps_end_where_the_next_begins(tiny_collector: Collector) -> None:
    world = tiny_collector.world
    (task,) = tiny_collector.tasks(1)
    gold = world.gold(task)
    assert step_ends(world, task, gold) == [3, 7], "the end of the answer is the last step's"
    assert step_ends(world, task, gold[:4]) == [3, 4]
    assert step_ends(world, task, gold[-1:]) == [1]


def test_answers_are_balanced() -> None:
    assert balanced([True, False, False, False, True, True], 4) == [0, 1, 2, 4]
    assert balanced([False] * 5, 2) == [0, 1]
    assert balanced([True, True, True, False], 4) == [0, 1, 2, 3]


def test_the_baseline_is_over_all_that_was_drawn() -> None:
    """Worth 1 three times of four and 0 once: ¼ and −¾; over different steps it would be ½ and −½."""
    states = Segments(torch.tensor([0, 0, 1]))
    found = advantages(torch.tensor([1.0, 0.0, 0.4]), torch.tensor([3.0, 1.0, 2.0]), states)
    assert found.tolist() == pytest.approx([0.25, -0.75, 0.0])


SMALL: dict[str, Any] = {"batch": 4, "prompts": 3, "solutions": 2, "keep": 2, "samples": 4, "spread": 0.0}


def test_candidates_are_own_steps_in_whole_groups(tiny_collector: Collector) -> None:
    part = step_candidates(**SMALL, values="critic", critic_lr=1e-3, critic_batch=8)
    state, made = part({}, tiny_collector)
    assert len(made.by("group")) == 4
    scored = tiny_collector.policy.score(made)["logp"]
    assert torch.allclose(scored, made["logp"], atol=1e-5), "log-probabilities are of who drew them"
    episodes, tokens = made.by("episode"), made.context.ragged("tokens")
    said = [tuple(tokens[c].tolist()) for c in episodes.first(made["context"]).tolist()]
    assert len(set(said)) == len(said), "each step of a state once"
    groups = Segments(episodes.first(made["group"]))
    assert bool((groups.count >= 2).all())
    decisions = tiny_collector.state["decisions"]
    again, other = part(state, tiny_collector)
    assert tiny_collector.state["decisions"] == decisions, "made once"
    assert again["steps"] == 2
    _, renewed = step_candidates(**SMALL, refresh=1)(again, tiny_collector)
    assert tiny_collector.state["decisions"] > decisions
    assert not torch.equal(other["action"], renewed["action"])


def test_what_ends_an_answer_is_worth_what_it_earned(tiny_collector: Collector) -> None:
    """With new weights nothing succeeds, so that a critic at ½ differs from steps that end answers at 0."""
    part = step_candidates(**{**SMALL, "spread": 0.3}, values="critic", critic_lr=1e-9)
    state, made = part({}, tiny_collector)
    episodes = made.by("episode")
    advantage = episodes.first(made["advantage"])
    states = Segments(episodes.first(made["group"]))
    assert torch.allclose(states.max(advantage) - states.min(advantage), torch.tensor(0.5), atol=1e-3)
    nothing = part.but(values="samples", refresh=1)
    with pytest.raises(PanoplyError, match="In no state of 3 prompts do the steps differ by 0.3"):
        nothing({}, tiny_collector)
    again, _ = nothing(state, tiny_collector)
    assert again["steps"] == 1
    assert torch.equal(again["advantage"], state["advantage"]), "what was made before stays"


def test_the_critic_learns_values_by_cross_entropy(tiny_collector: Collector) -> None:
    tasks = tiny_collector.tasks(2)
    golds = [tiny_collector.world.gold(t) for t in tasks]
    candidates = [Candidate(i, g[:3], [0.0] * 3, 1, 0.0, False) for i, g in enumerate(golds)]
    rows = as_rows(tasks, [[], []], candidates)
    once, target = rows.take(torch.tensor([0, 3])), torch.tensor([0.9, 0.2])
    critic = fitted(tiny_collector.policy, once, target, lr=1e-2, batch=2, epochs=40, seed=0)
    found = critic.score(once)["value"].detach().sigmoid()
    assert found.tolist() == pytest.approx([0.9, 0.2], abs=0.05)
    assert not any(p.requires_grad and p.grad is not None for p in tiny_collector.policy.parameters())


# ------------------------------------------------------------------ the loss


@pytest.mark.parametrize("micro", [4, 10**9])
def test_gradient_is_the_papers_in_any_order_and_split(micro: int) -> None:
    made = ragged(drift=0.4)
    made = made.with_columns(source=torch.full((len(made),), DEMONSTRATION))
    method = dataset(advantage_regression(beta=0.3))
    slow, loss = Slow(), ZERO
    groups = groups_of(made)
    for members in groups:
        for e in members:
            rows = rows_of(made, episode=e)
            moved = sum((slow.logp(r["state"], r["action"]) - r["logp"] for r in rows), ZERO)
            loss = loss + 0.5 * (rows[0]["advantage"] / 0.3 - moved) ** 2 / (len(members) * len(groups))
    expected = slow.gradient(loss)
    for rows in (made, shuffled(made)):
        assert_same(gradient(method, rows, micro_tokens=micro), expected)


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    settings = {f"data.{name}": value for name, value in SMALL.items()} | {"data.refresh": 2}
    choices: dict[str, Any] = {
        "model": "fresh",
        "settings": {
            **settings,
            "world.operations": 2,
            "run.held_out": 2,
            "run.device": "cpu",
            "run.checkpoint_every": 3,
        },
    }
    tiny.bare(tmp_path / "whole", "dapo-direct", **choices, steps=5)
    tiny.bare(tmp_path / "cut", "dapo-direct", **choices, steps=5)
    for folder in (tmp_path / "cut" / "checkpoints").glob("step-*5"):
        for file in sorted(folder.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        folder.rmdir()
    (tmp_path / "cut" / "result.json").unlink()
    tiny.resume(tmp_path / "cut")
    assert tiny.model_bytes(tmp_path / "cut", 5) == tiny.model_bytes(tmp_path / "whole", 5)


def test_what_cannot_be_is_refused() -> None:
    for settings, why in (
        ({"data.keep": 5}, "there are 4 answers to a prompt"),
        ({"data.values": "samples", "data.critic_lr": 0.1}, "there is no critic"),
    ):
        with pytest.raises(PanoplyError, match=why):
            pp.plan("dapo-direct", "chain", settings=settings)
    with pytest.raises(PanoplyError, match="judge"):
        pp.plan("dapo-direct", "add")
