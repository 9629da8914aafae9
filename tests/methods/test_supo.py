"""SUPO: one vote an episode, what learns, and the gradient from the paper's equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import Slow, assert_same, gradient, hand, on_policy, ragged, shuffled

from panoply.experience import TERMINATED, TRUNCATED, Experience
from panoply.methods.agents.supo import by_rollout, in_context, supo
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.slots.credit.groups import group
from panoply.slots.surrogate.ratios import clip
from panoply.worlds.text.stream import Stream

# One group. Episode 1 sums up once and earns 1; its second round is dropped. Episode 2 earns 0 at once; episode 3 is
# cut off.
ROWS: dict[str, Any] = {
    "group": [5] * 7,
    "episode": [1, 1, 1, 1, 1, 2, 3],
    "turn": [0, 1, 2, 2, 3, 0, 0],
    "state": [0, 1, 2, 3, 4, 0, 1],
    "action": [0, 1, 2, 3, 0, 1, 2],
    "reward": [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0],
    "end": [0, 0, 0, 0, TERMINATED, TERMINATED, TRUNCATED],
    "signal:dropped": [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    "signal:summaries": [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
}


def rows(**changed: Any) -> Experience:
    return hand(**{**ROWS, **changed})


def test_every_rollout_has_one_vote() -> None:
    # Returns 1, 0, 0: mean 1/3, deviation √(1/3).
    high, low = (2 / 3) * 3**0.5, (-1 / 3) * 3**0.5
    assert by_rollout(epsilon=0.0)(rows()).tolist() == pytest.approx([high] * 5 + [low] * 2)


def test_a_vote_a_context_leans_to_long_episodes() -> None:
    # 1 twice, then 0, 0: mean ½, deviation √(1/3).
    found = by_rollout(votes="trajectory", epsilon=0.0)(rows()).tolist()
    assert found == pytest.approx([0.5 * 3**0.5] * 5 + [-0.5 * 3**0.5] * 2)


def test_without_summaries_both_are_groups() -> None:
    made = ragged(seed=2)
    made = made.with_columns(**{"signal:summaries": torch.zeros(len(made))})
    expected = group(epsilon=1e-6)(made)
    for votes in ("rollout", "trajectory"):
        assert torch.equal(by_rollout(votes=votes)(made), expected)


def test_equal_returns_teach_nothing() -> None:
    assert by_rollout()(rows(reward=[0.0] * 7)).tolist() == [0.0] * 7


def test_dropped_rounds_and_cut_off_episodes_do_not_learn_and_are_compared_with() -> None:
    kept = in_context()(rows())
    assert kept["train"].tolist() == [True, False, True, True, True, True, False]
    assert len(kept) == 7
    assert by_rollout(epsilon=0.0)(kept).tolist()[0] == pytest.approx((2 / 3) * 3**0.5)
    assert in_context(overlong=False)(rows())["train"].tolist() == [True, False] + [True] * 5
    before = rows(train=[False] + [True] * 6)
    assert in_context()(before)["train"].tolist()[:2] == [False, False]


def test_a_dropped_round_is_dropped_with_all_its_tokens() -> None:
    found = in_context()(rows(**{"signal:dropped": [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]}))["train"]
    assert found.tolist() == [True, True, False, False, True, True, False]


def learned(made: Experience, **options: Any) -> torch.Tensor:
    """The gradient that SUPO follows."""
    made = in_context()(made)
    made = made.with_columns(advantage=by_rollout()(made))
    return gradient(on_policy(surrogate=clip(low=0.2, high=0.28)), made, **options)


def test_the_gradient_is_the_papers() -> None:
    logp = torch.tensor([-1.0, -1.4, -1.5, -0.4, -2.2, -1.1, -1.3], dtype=torch.float64)
    made = rows(logp=logp.tolist())
    slow, loss, advantage = Slow(), torch.zeros((), dtype=torch.float64), by_rollout()(made)
    learn = [0, 2, 3, 4, 5]  # neither the dropped round nor the rollout without an answer
    for i in learn:
        ratio = (slow.logp(ROWS["state"][i], ROWS["action"][i]) - logp[i]).exp()
        loss = loss - torch.min(ratio * advantage[i], ratio.clamp(0.8, 1.28) * advantage[i]) / len(learn)
    expected = slow.gradient(loss)
    assert_same(learned(made), expected)
    assert_same(learned(made, micro_tokens=1), expected)
    assert_same(learned(shuffled(made)), expected)


def test_a_group_of_cut_off_episodes_has_no_gradient() -> None:
    made = in_context()(rows(end=[0, 0, 0, 0, TRUNCATED, TRUNCATED, TRUNCATED]))
    assert not made["train"].any()


@pytest.mark.parametrize(("window", "resets"), [(10, True), (200, False)])
def test_a_stream_that_fits_is_learned_as_by_grpo(window: int, resets: bool) -> None:
    world = Stream(window=window, length=(8, 9))
    collect = Collector(world, open_policy("start", Stream(), 0, "cpu"), 3)
    made = collect.episodes(collect.tasks(4), 4)
    made = made.with_columns(reward=made["signal:success"])
    assert bool(made["signal:summaries"].any()) == resets
    method = supo()
    (select,) = method.select
    kept = select(made)
    assert torch.equal(method.credit(kept), group(epsilon=1e-6)(made)), (
        "one vote an episode, whatever it was cut into"
    )
    whole = made.by("episode").rows(made.by("episode").max(made["end"]) != TRUNCATED)
    assert bool((kept["train"] == whole).all()) == (not resets)
