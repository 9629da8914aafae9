"""Generalised advantages, critics' losses: literals worked by hand, and a slow reference."""

from __future__ import annotations

import pytest
import torch
from kit import hand

from panoply.batch import Batch
from panoply.errors import PanoplyError
from panoply.experience import TERMINATED, TRUNCATED
from panoply.planning import make_plan
from panoply.slots.credit.gae import gae, generalised_advantage
from panoply.slots.loss.values import bradley_terry, squared_value


def advantages(gamma: float, lam: float, **more: object) -> list[float]:
    """One episode: rewards 0, 0, 1 and values .5, .4, .6."""
    columns = {"reward": [0.0, 0.0, 1.0], "value": [0.5, 0.4, 0.6], "end": [0, 0, TERMINATED], **more}
    found = gae(gamma=gamma, lam=lam, normalise=False)(hand(episode=[7, 7, 7], **columns))
    torch.testing.assert_close(found["target"], found["advantage"] + torch.tensor([0.5, 0.4, 0.6]))
    return [float(a) for a in found["advantage"]]


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [
        (1.0, 1.0, [0.5, 0.6, 0.4]),  # return minus value
        (1.0, 0.0, [-0.1, 0.2, 0.4]),  # one-step errors
        (0.9, 0.5, [0.004, 0.32, 0.4]),  # δ = −.14, .14, .4; γλ = .45
    ],
)
def test_golden(gamma: float, lam: float, expected: list[float]) -> None:
    assert advantages(gamma, lam) == pytest.approx(expected, abs=1e-6)


def test_a_truncated_episode_is_closed_with_the_next_value() -> None:
    closed = advantages(1.0, 1.0, end=[0, 0, TRUNCATED], next_value=[9.0, 9.0, 2.0])
    assert closed == pytest.approx([2.5, 2.6, 2.4])
    assert advantages(1.0, 1.0, next_value=[9.0, 9.0, 2.0]) == pytest.approx([0.5, 0.6, 0.4])


def test_interleaved_episodes_do_not_mix_and_match_a_slow_reference() -> None:
    rng = torch.Generator().manual_seed(0)
    episode = torch.tensor([3, 1, 3, 3, 8, 1, 3, 8, 1, 1])
    reward, value = torch.randn(10, generator=rng), torch.randn(10, generator=rng)
    bootstrap = torch.randn(10, generator=rng)
    found = generalised_advantage(reward, value, bootstrap, episode, 0.97, 0.9)
    for e in (1, 3, 8):
        rows = [i for i in range(10) if episode[i] == e]
        for at, row in enumerate(rows):
            slow = 0.0
            for k, later in enumerate(rows[at:]):
                following = value[rows[at + k + 1]] if later != rows[-1] else bootstrap[later]
                slow += (0.97 * 0.9) ** k * float(reward[later] + 0.97 * following - value[later])
            assert float(found[row]) == pytest.approx(slow, abs=1e-5)


def test_a_turn_of_several_rows_is_one_step() -> None:
    """Turns of two, one and two rows: rewards .5, 0, 1 and values of their first rows .5, .4, .6."""
    made = hand(
        episode=[7] * 5, turn=[0, 0, 1, 2, 2], position=[0, 1, 0, 0, 1], end=[0, 0, 0, 0, TRUNCATED],
        reward=[0.2, 0.3, 0.0, 0.0, 1.0], value=[0.5, 9.0, 0.4, 0.6, 9.0], next_value=[9.0, 9.0, 9.0, 9.0, 2.0],
    )  # fmt: skip
    δ = [0.5 + 0.9 * 0.4 - 0.5, 0.9 * 0.6 - 0.4, 1.0 + 0.9 * 2.0 - 0.6]
    A = [δ[0] + 0.45 * δ[1] + 0.45**2 * δ[2], δ[1] + 0.45 * δ[2], δ[2]]
    for rows in (torch.arange(5), torch.tensor([4, 1, 2, 0, 3])):
        part = made.take(rows)
        found = gae(gamma=0.9, lam=0.5, normalise=False, by="turn")(part)
        turn = part["turn"].tolist()
        assert found["advantage"].tolist() == pytest.approx([A[t] for t in turn])
        assert found["target"].tolist() == pytest.approx([A[t] + [0.5, 0.4, 0.6][t] for t in turn])


def test_where_every_turn_is_one_row_turns_are_decisions() -> None:
    columns = {"reward": [0.0, 0.5, 1.0, 2.0], "value": [0.5, 0.4, 0.6, 0.1], "end": [0, 1, 0, 1]}
    made = hand(episode=[0, 0, 1, 1], turn=[0, 1, 0, 1], **columns)
    for name, found in gae(by="turn")(made).items():
        assert torch.equal(found, gae()(made)[name])


def test_steps_are_turns_only_where_that_differs() -> None:
    with pytest.raises(PanoplyError, match="credit.by has no effect: a turn of cartpole is one decision"):
        make_plan("ppo", "cartpole", settings={"credit.by": "turn"})
    assert "turn by turn" in " ".join(
        make_plan("ppo", "chain", settings={"credit.by": "turn"}).method.equation()
    )


def test_normalised_advantages_leave_the_target_alone() -> None:
    columns = {"reward": [0.0, 0.0, 1.0], "value": [0.5, 0.4, 0.6], "end": [0, 0, TERMINATED]}
    found = gae(gamma=1.0, lam=1.0)(hand(episode=[0, 0, 0], **columns))
    assert float(found["advantage"].mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(found["advantage"].std()) == pytest.approx(1.0, abs=1e-5)
    assert found["target"].tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_value_loss_golden() -> None:
    rows = hand(value=[0.0, 0.0, 0.0], target=[1.0, 1.0, -1.0])
    now = {"value": torch.tensor([0.5, 0.1, 0.5])}
    plain, stats = squared_value()(Batch(rows, now))
    assert plain.tolist() == pytest.approx([0.125, 0.405, 1.125])
    assert stats["error"].tolist() == pytest.approx([0.5, 0.9, 1.5])
    clipped, _ = squared_value(clip=0.2)(Batch(rows, now))
    # .5 is held at .2: its error .8²/2; on the third row the free error is the larger one
    assert clipped.tolist() == pytest.approx([0.32, 0.405, 1.125])


def test_bradley_terry_golden() -> None:
    rows = hand(pairs=[(0, 1)], episode=[0, 1])
    value, stats = bradley_terry()(Batch(rows, {"judged": torch.tensor([1.0, 0.0])}))
    assert value.tolist() == pytest.approx([0.3132617])
    assert stats["accuracy"].tolist() == [1.0]
    centred, _ = bradley_terry(centre=0.1)(Batch(rows, {"judged": torch.tensor([1.0, 0.0])}))
    assert centred.tolist() == pytest.approx([0.4132617])


def test_row_order_does_not_matter() -> None:
    """Rows are put in the order of turns and positions first."""
    columns = {"reward": [0.0, 0.0, 1.0], "value": [0.5, 0.4, 0.6], "end": [0, 0, TERMINATED]}
    made = hand(episode=[7, 7, 7], position=[2, 3, 4], **columns)
    order = torch.tensor([2, 0, 1])
    found = gae(gamma=0.9, lam=0.5, normalise=False)(made.take(order))
    assert found["advantage"].tolist() == pytest.approx([0.4, 0.004, 0.32], abs=1e-6)
