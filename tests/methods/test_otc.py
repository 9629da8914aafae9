"""OTC: the reward worked by hand, the gradient from the paper's equations, and its memory."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from kit import Slow, assert_same, gradient, hand, ragged, rows_of, shuffled, values_of

import panoply as pp
from panoply.compose import resolve
from panoply.experience import Experience
from panoply.methods.agents.otc import efficiency, otc, tool_efficiency
from panoply.methods.base.grpo import grpo

FRESH = {"task": torch.zeros(0, dtype=torch.long), "least": torch.zeros(0)}


def episodes(task: list[int], calls: list[float], success: list[float]) -> Experience:
    """One decision a turn: first the calls, then the answer."""
    rows = [(i, t, i // 2, m, s) for i, (t, m, s) in enumerate(zip(task, calls, success, strict=True))]
    columns: dict[str, list[Any]] = {
        k: [] for k in ("episode", "task", "group", "signal:calls", "signal:success")
    }
    for episode, key, group, made, right in rows:
        for turn in range(int(made) + 1):
            last = turn == int(made)
            values = (episode, key, group, 0.0 if last else 1.0, right if last else 0.0)
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
    return hand(**columns)


def rewards(
    experience: Experience, state: dict[str, Any] = FRESH, **settings: Any
) -> tuple[Any, list[float]]:
    state, column = tool_efficiency(**settings)(state, experience)
    return state, experience.by("episode").sum(column).tolist()


@pytest.mark.parametrize(
    ("calls", "least", "expected"),
    [
        (0, 0, 1.0),  # m = n = 0
        (1, 0, math.cos(math.pi / 6)),  # cos(mπ/(2m+c)), c = 4
        (2, 0, math.cos(math.pi / 4)),
        (1, 1, 1.0),  # sin(π/2)
        (3, 3, 1.0),
        (2, 1, math.sin(2 * math.pi / 3)),  # sin(π·m/(m+n))
        (3, 1, math.sin(3 * math.pi / 4)),
        (5, 2, math.sin(5 * math.pi / 7)),
    ],
)
def test_efficiency(calls: float, least: float, expected: float) -> None:
    assert float(efficiency(torch.tensor(calls), torch.tensor(least), 4.0)) == pytest.approx(
        expected, abs=1e-6
    )


def test_wrong_answers_earn_nothing_and_do_not_count_for_the_fewest() -> None:
    # Task 1: right with 2 and 3 calls, wrong with 0. Task 2: never right.
    made = episodes([1, 1, 1, 2, 2], [2, 3, 0, 1, 0], [1.0, 1.0, 0.0, 0.0, 0.0])
    state, found = rewards(made)
    assert found == pytest.approx([1.0, math.sin(3 * math.pi / 5), 0, 0, 0], abs=1e-6)
    assert {k: v.tolist() for k, v in state.items()} == {"task": [1], "least": [2.0]}


def test_the_reward_stands_where_success_does() -> None:
    _, column = tool_efficiency(alpha=2.0)(FRESH, episodes([1], [2], [1.0]))
    assert column.tolist() == [0.0, 0.0, 2.0]


def test_the_fewest_calls_are_remembered_and_only_fall() -> None:
    state, _ = rewards(episodes([9, 4], [1, 3], [1.0, 1.0]))
    state, found = rewards(episodes([4, 9, 7], [2, 3, 1], [1.0, 1.0, 0.0]), state)
    assert found == pytest.approx([1.0, math.sin(3 * math.pi / 4), 0.0], abs=1e-6)
    assert {k: v.tolist() for k, v in state.items()} == {"task": [4, 9], "least": [2.0, 1.0]}
    state, found = rewards(episodes([9], [3], [1.0]), state, remember=False)
    assert found == pytest.approx([1.0], abs=1e-6)


def test_alone_no_other_episode_counts() -> None:
    made = episodes([1, 1, 1], [0, 2, 1], [1.0, 1.0, 0.0])
    state, found = rewards(made, form="alone", c=6.0)
    assert found == pytest.approx([1.0, math.cos(2 * math.pi / 10), 0.0], abs=1e-6)
    assert len(state["task"]) == 0


def test_row_order_does_not_matter() -> None:
    made = episodes([1, 1, 2, 2], [2, 4, 0, 3], [1.0, 1.0, 1.0, 1.0])
    assert rewards(shuffled(made))[1] == pytest.approx(rewards(made)[1])


def test_gradient_is_the_papers() -> None:
    """Card 54: r = α·r_tool·correct inside GRPO, one token at a time."""
    made, slow = ragged(drift=0.4), Slow()
    of_group = {r["episode"]: r["group"] for r in rows_of(made)}
    calls = {e: float(e % 4) for e in of_group}
    right = {e: float(e % 3 != 0) for e in of_group}
    last = made.by("episode").is_last()
    episode = made["episode"].tolist()
    made = made.with_columns(**{
        "task": made["group"],
        "signal:calls": torch.tensor([calls[e] for e in episode]).double() * last,
        "signal:success": torch.tensor([right[e] for e in episode]).double() * last,
    })  # fmt: skip
    reward = {}
    for e, m in calls.items():
        least = min((calls[f] for f in calls if of_group[f] == of_group[e] and right[f]), default=m)
        tool = math.sin(math.pi * m / (m + least)) if least else math.cos(math.pi * m / (2 * m + 4))
        reward[e] = tool * right[e]
    loss = torch.zeros((), dtype=torch.float64)
    for e in values_of(made, "episode"):
        peers = [reward[f] for f in reward if of_group[f] == of_group[e]]
        spread = statistics.stdev(peers) if len(peers) > 1 else 0.0
        advantage = (reward[e] - statistics.fmean(peers)) / (spread + 1e-4) if spread else 0.0
        rows = rows_of(made, episode=e)
        for row in rows:
            logp = slow.logp(row["state"], row["action"])
            rho, away = (logp - row["logp"]).exp(), row["logp@reference"] - logp
            gain = torch.minimum(rho * advantage, rho.clamp(0.8, 1.2) * advantage)
            loss = loss - (gain - 0.001 * (away.exp() - away - 1)) / len(rows) / len(reward)
    method = otc()
    made = made.with_columns(reward=method.reward(FRESH, made)[1])
    made = made.with_columns(advantage=method.credit(made))
    assert_same(gradient(method, made), slow.gradient(loss), rel=1e-5)


def test_the_diff_is_the_reward() -> None:
    tiny = [resolve(name, preset="tiny").method for name in ("otc", "grpo")]
    assert {path.split(".")[0] for path, *_ in tiny[0].diff(tiny[1])} == {"reward"}
    assert {path.split(".")[0] for path, *_ in otc().diff(grpo())} == {"reward", "sample", "regularise"}


def test_a_world_without_tools_is_refused() -> None:
    with pytest.raises(pp.PanoplyError, match="needs a world with 'tools'"):
        pp.plan("otc", "chain")
