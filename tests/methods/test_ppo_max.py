"""PPO-max: scores by their history, a pull that stays what it was, a critic from a judge, imitation beside."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kit import Slow, assert_same, batch, gradient, hand, on_policy, ragged, rows_of, shuffled, slopes
from papers import ZERO

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import DEMONSTRATION, OWN, Experience
from panoply.loops.metrics import describe
from panoply.methods.objectives.ppo_max import entropy_target, pretraining
from panoply.run import Run
from panoply.slots.credit.gae import gae
from panoply.slots.reward.running import standardised
from panoply.which import take


def scored(scores: list[float], **columns: Any) -> Experience:
    """Answers of two tokens each, whose score is on the last."""
    rows = {
        "episode": [i for i in range(len(scores)) for _ in range(2)],
        "signal:success": [x for score in scores for x in (0.0, score)],
        "logp": [-1.0] * (2 * len(scores)),
        "logp@reference": [-1.5, -0.9] * len(scores),
    }
    return hand(**{**rows, **columns})


# ------------------------------------------------------------------ rewards


def test_scores_are_in_deviations_of_all_history() -> None:
    """Two batches by hand: the second is measured by the mean and the deviation of both, not by its own."""
    held = standardised(beta=0.0, limit=1.1)
    state, first = held(held.info.state(), scored([1.0, 2.0, 6.0]))  # type: ignore[misc]
    mean, spread = 3.0, statistics.stdev([1, 2, 6])
    assert first.tolist() == pytest.approx([0, -2 / spread, 0, -1 / spread, 0, min(1.1, 3 / spread)])
    state, second = held(state, scored([7.0, 9.0]))
    every = [1.0, 2.0, 6.0, 7.0, 9.0]
    mean, spread = statistics.fmean(every), statistics.stdev(every)
    assert second.tolist() == pytest.approx([0, (7 - mean) / spread, 0, 1.1])
    assert (9 - mean) / spread > 1.1
    assert state == pytest.approx({"count": 5.0, "mean": 5.0, "square": 46.0})


def test_scaling_keeps_the_mean_and_equal_scores_are_no_trouble() -> None:
    held = standardised(beta=0.0, centre=False)
    _, found = held(held.info.state(), scored([1.0, 3.0]))  # type: ignore[misc]
    assert found[1::2].tolist() == pytest.approx([1 / math.sqrt(2), 3 / math.sqrt(2)])
    for centre, expected in ((True, [0.0]), (False, [4.0])):
        alone = standardised(beta=0.0, centre=centre)
        assert alone(alone.info.state(), scored([4.0]))[1][1::2].tolist() == expected  # type: ignore[misc]


def test_the_pull_is_on_every_token_and_of_who_acted() -> None:
    """−η·(log π_old − log π_ref), which no update on the batch changes: only columns are read."""
    held = standardised(beta=0.1)
    _, found = held(held.info.state(), scored([1.0, 3.0]))  # type: ignore[misc]
    r = 1 / math.sqrt(2)
    assert found.tolist() == pytest.approx([-0.05, -r + 0.01, -0.05, r + 0.01])


def test_answers_of_others_earn_nothing_and_are_not_counted() -> None:
    source = [OWN, OWN, DEMONSTRATION, DEMONSTRATION, OWN, OWN]
    logp = [-1.0, -1.0, math.nan, math.nan, -1.0, -1.0]
    held = standardised(beta=0.1)
    state, found = held(held.info.state(), scored([1.0, 100.0, 3.0], source=source, logp=logp))  # type: ignore[misc]
    assert state["mean"] == pytest.approx(2.0)
    assert found[2:4].tolist() == [0.0, 0.0]
    assert not found.isnan().any()


def test_rows_may_stand_in_any_order() -> None:
    made = ragged().with_columns(**{"signal:success": ragged()["reward"]})
    held = standardised()
    found = made.with_columns(paid=held(held.info.state(), made)[1])  # type: ignore[misc]
    mixed = shuffled(found)
    again = held(held.info.state(), mixed)[1]  # type: ignore[misc]
    expected = mixed.by("episode").sum(mixed["paid"]).tolist()
    assert mixed.by("episode").sum(again).tolist() == pytest.approx(expected)


# ------------------------------------------------------------------ terms


def test_the_whole_gradient_is_the_papers() -> None:
    """Clipped ratio over own tokens, and a mean of −log π over demonstrated ones, each by its own count."""
    made = ragged(drift=0.4)
    source = torch.where(made["episode"] % 3 == 0, DEMONSTRATION, OWN)
    made = made.with_columns(source=source)
    method = on_policy(
        surrogate=pp.plan("ppo-max-alone", "chain").method.surrogate, regularise=(pretraining(weight=0.3),)
    )
    slow, loss = Slow(), ZERO
    own, shown = rows_of(made, source=OWN), rows_of(made, source=DEMONSTRATION)
    for row in own:
        rho = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
        a = row["advantage"]
        loss = loss - torch.minimum(rho * a, rho.clamp(0.8, 1.2) * a) / len(own)
    for row in shown:
        loss = loss - 0.3 * slow.logp(row["state"], row["action"]) / len(shown)
    expected = slow.gradient(loss)
    assert_same(gradient(method, made), expected)
    assert_same(gradient(method, shuffled(made), micro_tokens=1), expected)


@pytest.mark.parametrize("target", [35.0, 0.2])
def test_entropy_is_pulled_to_its_target_from_both_sides(target: float) -> None:
    """|mean H − c|: one sign for the whole mini-batch, however it is split; 35 is out of reach, and so a bonus."""
    made, slow = ragged(), Slow()
    method = on_policy(
        surrogate=on_policy().surrogate.but(weight=1e-9),
        regularise=(entropy_target(weight=2.0, target=target),),
    )
    mean = sum((slow.entropy(r["state"]) for r in rows_of(made)), ZERO) / len(made)
    assert 0.2 < mean.item() < 35
    expected = slow.gradient(2.0 * (mean - target).abs())
    assert_same(gradient(method, made), expected, rel=1e-5)
    assert_same(gradient(method, made, micro_tokens=1), expected, rel=1e-5)


def test_value_clipping_by_hand() -> None:
    """½·max((V − R)², (clip(V, V_old ± 0.2) − R)²): a value that runs away from its target pays for the clipped one."""
    loss = pp.plan("ppo-max-alone", "chain").method.models[0].settings()["loss"]
    made = batch(hand(value=[0.0, 0.0], target=[1.0, -1.0]), value=[0.5, 0.5])
    found, _ = loss(made)
    assert found.tolist() == pytest.approx([0.5 * 0.8**2, 0.5 * 1.5**2])
    assert slopes(found, made.now["value"]) == pytest.approx([0.0, 1.5])


def test_advantages_may_be_bounded() -> None:
    rows = {
        "episode": [0, 1, 2],
        "turn": [0, 0, 0],
        "value": [0.0] * 3,
        "reward": [3.0, -0.2, -2.0],
        "end": [1] * 3,
    }
    found = gae(normalise=False, limit=0.5)(hand(**rows))
    assert found["advantage"].tolist() == pytest.approx([0.5, -0.2, -0.5])
    assert found["target"].tolist() == pytest.approx([3.0, -0.2, -2.0])


def test_what_to_watch() -> None:
    found = describe(scored([1.0, 3.0], group=[0] * 4))
    assert found["from_reference"] == pytest.approx((0.5 - 0.1) / 2)
    assert found["perplexity"] == pytest.approx(math.e)


# ------------------------------------------------------------------ the recipe

SMALL: dict[str, Any] = {
    "run.held_out": 4,
    "imitate.data.batch": 4,
    "judge.data.batch": 4,
    "optimise.sample.prompts": 4,
    "optimise.sample.demonstrations": 4,
    "optimise.models.critic.warmup": 1,
    "optimise.models.critic.update.minibatches": 1,
    **{f"{stage}.run.steps": n for stage, n in (("imitate", 1), ("judge", 2), ("optimise", 3))},
}


def test_the_critic_begins_as_the_judge_and_learns_first(tmp_path: Path) -> None:
    tiny.bare(tmp_path / "run", "ppo-max", model="fresh", settings=SMALL)
    last = tmp_path / "run/03-optimise"
    settings = Run.open(last).plan().method.settings()
    judge = str(take((tmp_path / "run/02-judge").resolve(), "last").model.parent)
    assert settings["models.critic.start"] == settings["models.reward_model.folder"] == judge
    rows = tiny.metrics(last)
    assert [("clip_high" in row, "critic_error" in row) for row in rows] == [(False, True)] + [
        (True, True)
    ] * 2
    assert all(math.isfinite(row["critic_loss"]) and math.isfinite(row["from_reference"]) for row in rows)
    assert rows[0]["critic_value"] != 0, "a head of zeros would say 0 before its first and only update"


@pytest.mark.parametrize(
    ("name", "world", "settings", "said"),
    [
        ("ppo", "cartpole", {"models.critic.start": "somewhere"}, "reward models are of text"),
        ("ppo-max-alone", "chain", {"reward.beta": 0.0, "reward.to": "old"}, "beta is 0"),
        ("ppo-max-alone", "chain", {"reward.limit": 0.0}, "limit"),
        ("ppo-max-alone", "chain", {"credit.limit": -1.0}, "limit"),
        ("ppo-max-alone", "chain", {"sample": "groups"}, "nothing brings demonstrations"),
    ],
)
def test_settings_that_cannot_be(name: str, world: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        pp.plan(name, world, settings=settings)
