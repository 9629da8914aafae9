"""Annotators of control episodes: what raters go by, what is asked of whom, and a reward fitted to the answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import TERMINATED, TRUNCATED, Experience, Table
from panoply.loops.compiler import leave_unloaded
from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.slots.model.preferred import StepReward
from panoply.slots.reward.raters import peak, seen, spared
from panoply.slots.reward.signals import signal
from panoply.slots.sample.annotated import annotated, preference, worth
from panoply.worlds.control.cartpole import Cartpole


def played(*episodes: Sequence[tuple[float, float]], first: int = 0) -> Experience:
    """Episodes as (what is seen, what is earned) of their steps."""
    steps = [step for episode in episodes for step in episode]
    rows = len(steps)
    number = [first + i for i, episode in enumerate(episodes) for _ in episode]
    shown = torch.tensor([[s, -s] for s, _ in steps])
    columns = {
        "episode": torch.tensor(number),
        "context": torch.arange(rows),
        "action": torch.arange(rows) % 2,
        "end": torch.full((rows,), TRUNCATED),
        "signal:reward": torch.tensor([r for _, r in steps]),
    }
    return Experience(Table(columns), Table({"observation": shown}))


class Playing:
    """A collector that gives episodes of one step, which earn what was written down."""

    def __init__(self, *batches: Sequence[float], seed: int = 0):
        self.batches, self.seed, self.asked = list(batches), seed, 0
        self.notes: dict[str, float] = {}

    def tasks(self, n: int) -> list[int]:
        return list(range(n))

    def episodes(self, tasks: Any, group: int, temperature: float) -> Experience:
        batch = self.batches.pop(0)
        self.asked += len(batch)
        return played(*([(0.0, earned)] for earned in batch), first=self.asked - len(batch))


def wins_of(found: Experience) -> list[float]:
    return found.by("episode").sum(found["signal:wins"]).tolist()


# ------------------------------------------------------------------ raters


TWO = played([(0.2, 1.0), (0.8, 5.0), (0.9, 2.0)], [(0.1, 3.0), (0.3, 3.0)])


def test_raters_by_hand() -> None:
    assert peak()(TWO).tolist() == [0, 0, 5, 0, 3]
    assert torch.allclose(seen(dim=1, sign=-2.0)(TWO), 2 * torch.tensor([0.2, 0.8, 0.9, 0.1, 0.3]))
    zone = spared(low=0.5, high=0.85, most=0.3, penalty=10.0)
    assert zone(TWO).tolist() == [1, 5, -8, 3, 3]  # 0.8 is inside and 0.9 above it: a third of the time
    assert zone.but(most=0.34)(TWO).tolist() == [1, 5, 2, 3, 3]
    assert worth(TWO, (signal(name="reward"), peak(), None)).tolist() == [[8, 5], [6, 3]]


def test_preferences_by_hand() -> None:
    a, b = torch.tensor([[3.0, 1.0, 0.0]]), torch.tensor([[1.0, 1.0, 2.0]])
    assert preference(a, b).tolist() == [0.5]  # one for, one against, one does not mind
    assert preference(a[:, :1], b[:, :1], flip=0.2).item() == pytest.approx(0.8)
    assert preference(a[:, :1], b[:, :1], sharpness=0.5).item() == pytest.approx(1 / (1 + 2.718281828**-1))
    p = preference(a, b, sharpness=2.0, flip=0.1)
    assert (p + preference(b, a, sharpness=2.0, flip=0.1)).item() == pytest.approx(1.0)


def test_three_raters_prefer_in_a_circle() -> None:
    worths = torch.tensor([[3.0, 1, 2], [2, 3, 1], [1, 2, 3]])
    game = preference(worths[:, None], worths[None])
    assert torch.allclose(game.diagonal(), torch.full((3,), 0.5))
    assert [game[i, (i + 1) % 3].item() for i in range(3)] == pytest.approx([2 / 3] * 3)


# ------------------------------------------------------------------ what is asked


def test_the_queue_is_of_earlier_episodes_alone() -> None:
    collect = Playing([1.0, 3.0], [2.0, 2.0, 9.0], [2.5, 5.0])
    part = annotated(opponents=3)
    state: Any = part.info.state and part.info.state()
    state, found = part(state, collect)
    assert wins_of(found) == [0, 1]  # nobody came before: they meet one another, and nobody itself
    assert collect.notes["comparisons"] == 1
    state, found = part(state, collect)
    assert wins_of(found) == [0.5, 0.5, 1]
    assert collect.notes["comparisons"] == 6
    assert state["queue"].flatten().tolist() == [2, 2, 9]  # the latest three
    state, found = part(state, collect)
    assert wins_of(found) == pytest.approx([2 / 3, 2 / 3])
    assert found["signal:worth"].tolist() == [2.5, 5.0]
    assert found["end"].tolist() == [TERMINATED] * 2
    assert found.pairs is None


def test_pairs_of_the_batch() -> None:
    part = annotated(opponents=2, against="batch")
    collect = Playing([4.0, 1.0, 3.0, 2.0])
    state, found = part({"queue": torch.zeros(0, 0)}, collect)
    pairs = found.pairs
    assert pairs is not None
    assert collect.notes["comparisons"] == 6 == pairs.rows
    earned = [4.0, 1.0, 3.0, 2.0]
    both = zip(pairs.tensor("chosen").tolist(), pairs.tensor("rejected").tolist(), strict=True)
    assert all(earned[a] > earned[b] for a, b in both)
    assert pairs.tensor("p").tolist() == [1] * 6
    assert wins_of(found) == pytest.approx([1, 0, 2 / 3, 1 / 3])
    assert not len(state["queue"])
    few = Playing([4.0, 1.0, 3.0, 2.0])
    _, found = part.but(opponents=1)({"queue": torch.zeros(0, 0)}, few)
    assert few.notes["comparisons"] == 4


def test_answers_err_as_often_as_said_and_differ_by_seed() -> None:
    queue = {"queue": torch.zeros(400, 1, dtype=torch.double)}
    part = annotated(opponents=400, flip=0.2)

    def asked(seed: int, **settings: Any) -> float:
        return wins_of(part.but(**settings)(queue, Playing([1.0], seed=seed))[1])[0]

    assert asked(0) == asked(0) != asked(1)
    assert 0.72 < asked(0) < 0.88
    assert asked(0, soft=True) == pytest.approx(0.8)


@pytest.mark.parametrize(
    "settings",
    [
        {"sample.rater": "spared", "sample.rater.low": 1.0, "sample.rater.high": 0.0},
        {"sample.rater": "seen", "sample.rater.dim": 4},
        {"sample.against": "batch", "sample.prompts": 1},
        {"sample.flip": 1.2},
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(PanoplyError):
        pp.plan("spo-minimax", "cartpole", settings=settings)


def test_games_and_pairs_that_are_not_there_are_refused() -> None:
    with pytest.raises(PanoplyError, match="against=batch"):
        pp.plan("preference-ppo", "cartpole", settings={"sample.against": "past"})


# ------------------------------------------------------------------ a reward fitted to answers


def reward_model(**settings: Any) -> StepReward:
    leave_unloaded()
    world = Cartpole()
    policy = ControlPolicy.fresh(world.observation, world.action, PolicySpec())
    chosen = {"hidden": (8,), "lr": 0.03, "fits": 30, "batch": 8, "memory": 8, **settings}
    return StepReward(policy, 0, chosen)


def walked(lengths: Sequence[int], first: int = 0) -> Experience:
    """Episodes of so many steps, of which the longer of two is preferred."""
    rows = sum(lengths)
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) + first
    shown = torch.randn(rows, 4, generator=torch.Generator().manual_seed(first))
    columns = {"episode": number, "context": torch.arange(rows), "action": torch.arange(rows) % 2}
    pairs = [(i, j) for i, m in enumerate(lengths) for j, n in enumerate(lengths) if m > n]
    sides = torch.tensor(pairs) + first
    table = {"chosen": sides[:, 0], "rejected": sides[:, 1], "p": torch.ones(len(pairs))}
    return Experience(Table(columns), Table({"observation": shown})).with_pairs(Table(table))


def test_the_fitted_reward_explains_the_answers() -> None:
    model = reward_model()
    found = model.learn(walked([2, 5, 3, 9]), 0)
    assert found["accuracy"] == 1.0
    with torch.no_grad():
        column = model.columns(walked([4, 1], first=7))["signal:preferred"]
    assert isinstance(column, torch.Tensor)
    assert column.shape == (5,)
    assert float(column.sum()) > 0


def test_sums_of_episodes_by_hand_and_what_is_forgotten() -> None:
    model = reward_model(memory=3)
    model._write(walked([2, 3]))
    model._write(walked([1, 4], first=2))
    assert model.lengths.tolist() == [3, 1, 4]
    assert len(model.steps) == 8
    assert model.pairs.tolist() == [[2, 1]]  # the comparison with what was forgotten went with it
    each = model.net(model.steps)[:, 0]
    expected = each[4:].sum() - each[3]
    assert torch.allclose(model._ahead(model.pairs)[0], expected, atol=1e-6)


def test_it_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    model, other = reward_model(), reward_model()
    model.learn(walked([2, 5, 3]), 0)
    model.save(tmp_path)
    other.load_weights(tmp_path)
    for each in (model, other):
        each.learn(walked([4, 1], first=3), 1)
    assert all(torch.equal(x, other.state()[name]) for name, x in model.state().items())


def test_comparisons_are_counted(tmp_path: Path) -> None:
    """In the first step three episodes meet one another, in the second each meets the two latest of them."""
    settings = {"sample.prompts": 3, "sample.opponents": 2, "world.horizon": 20, "run.held_out": 2}
    done = tiny.bare(tmp_path / "run", "spo-minimax", world="cartpole", settings=settings, steps=2)
    assert [row["comparisons"] for row in tiny.metrics(done.run)] == [3, 6]
