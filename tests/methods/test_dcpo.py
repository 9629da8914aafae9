"""DCPO: what right answers get beside their advantage, and how the entropy steers it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import Tabular, assert_same, hand, learner, on_policy, ragged, rows_of, shuffled, values_of
from papers import returns_of, standardised
from tiny import bare, metrics, resume

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.objectives.dcpo import dcpo, entropy_steered
from panoply.slots.credit.groups import group


def tempered(made: Experience) -> Experience:
    """Columns of π_old at three temperatures, of a table of logits."""
    policy, columns = Tabular(3), {}
    with torch.no_grad():
        for name, heat in (("logp@old", 1.0), ("logp*1.2@old", 1.2), ("logp*0.8@old", 0.8)):
            hot = made.with_columns(temperature=torch.full((len(made),), heat, dtype=torch.float64))
            columns[name] = policy.score(hot)["logp"]
    return made.with_columns(logp=columns["logp@old"], **columns)


def steered(made: Experience, entropy: float = 0.0, **settings: Any) -> tuple[float, list[float]]:
    state, found = entropy_steered(**settings)({"entropy": entropy}, made)
    return state["entropy"], found.tolist()


def two() -> Experience:
    """A right answer of two tokens and a wrong one of one token: A₀ = ±1/√2."""
    made = hand(group=[0, 0, 0], episode=[0, 0, 1], reward=[0.0, 1.0, 0.0])
    return made.with_columns(
        **{
            "logp": torch.tensor([-0.5, -1.0, -0.3]),
            "logp@old": torch.tensor([-0.5, -1.0, -0.3]),
            "logp*1.2@old": torch.tensor([-0.6, -0.9, -0.2]),
            "logp*0.8@old": torch.tensor([-0.4, -1.2, -0.1]),
        }
    )


def test_numbers_by_hand() -> None:
    """a = 0.1 and half are right, so that α = 0.1/0.6 = 1/6; hot below the target, cold above it."""
    plain = 1 / math.sqrt(2) / (1 + 1e-6 * math.sqrt(2))
    after, found = steered(two(), 0.0)
    assert after == pytest.approx(0.6)
    expected = [5 / 6 * plain + math.exp(-0.1) / 6, 5 / 6 * plain + math.exp(0.1) / 6, -5 / 6 * plain]
    assert found == pytest.approx(expected, rel=1e-5)
    _, found = steered(two(), 0.3)  # a = 0.05, α = 0.05/0.55
    expected = [(10 * plain + math.exp(0.1)) / 11, (10 * plain + math.exp(-0.2)) / 11, -10 / 11 * plain]
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_first_step_counts_as_0_and_is_hot() -> None:
    part = entropy_steered()
    assert part.info.state is not None
    assert part.info.state() == {"entropy": 0.0}
    hot = steered(two(), 0.25)[1]  # at the target nothing is added
    assert hot == pytest.approx(group(epsilon=1e-6)(two()).tolist())


def test_the_entropy_is_of_sampled_tokens() -> None:
    """Not the column `entropy`, which is of whole distributions; and each token has one vote."""
    made = two().with_columns(entropy=torch.tensor([9.0, 9.0, 9.0]))
    assert steered(made)[0] == pytest.approx((0.5 + 1.0 + 0.3) / 3)
    late, now = steered(made, 0.0)[1], steered(made, 0.0, of="this")[1]
    assert late[0] != now[0]
    assert now == pytest.approx(steered(made, 0.6)[1])


@pytest.mark.parametrize("entropy", [0.0, 0.2, 0.9])
def test_it_is_what_the_released_code_computes(entropy: float) -> None:
    """Its lines on a frozen batch: alpha from |ΔH|, the share that is right, and a/(1 + a)."""
    made = tempered(ragged())
    returns, plain = returns_of(made), standardised(made, 1e-6)
    ratio_name = "logp*1.2@old" if entropy <= 0.25 else "logp*0.8@old"
    right = {e: float(returns[e] > 0.05) for e in returns}
    assert 0 < sum(right.values()) < len(right)
    alpha = min(abs(0.25 - entropy), 0.1) / (sum(right.values()) / len(right))
    alpha = alpha / (alpha + 1)
    expected = [
        (1 - alpha) * plain[r["episode"]]
        + alpha * right[r["episode"]] * math.exp(r[ratio_name] - r["logp@old"])
        for r in rows_of(made)
    ]
    assert steered(made, entropy)[1] == pytest.approx(expected, rel=1e-5)


def test_any_order_of_rows_gives_the_same() -> None:
    made = tempered(ragged())
    made = made.with_columns(row=torch.arange(len(made)))
    mixed = shuffled(made)
    found, other = steered(made)[1], steered(mixed)[1]
    assert [found[i] for i in mixed["row"].tolist()] == pytest.approx(other, rel=1e-5)


def test_what_is_added_is_on_average_the_same_however_few_are_right() -> None:
    """α·p/(1 − α) = a: without p in it, a single right answer would be lost among many."""
    for right in (1, 4):
        made = hand(group=[0] * 8, reward=[1.0] * right + [0.0] * (8 - right))
        made = tempered(made.with_columns(state=torch.zeros(8, dtype=torch.long)))
        found = steered(made, 0.0, shape=False)[1]
        plain = group(epsilon=1e-6)(made).tolist()
        alpha = 1 - found[-1] / plain[-1]
        assert alpha * right / 8 / (1 - alpha) == pytest.approx(0.1, rel=1e-4)


def test_where_nothing_is_right_numbers_stay_numbers() -> None:
    wrong = two().with_columns(reward=torch.zeros(3))
    assert steered(wrong)[1] == [0.0, 0.0, 0.0]
    assert steered(wrong, 0.25)[1] == [0.0, 0.0, 0.0]


def test_right_answers_of_groups_without_a_difference_learn() -> None:
    """All right: A₀ is 0, and what is left is α·ρ."""
    made = two().with_columns(reward=torch.tensor([0.0, 1.0, 1.0]))
    alpha = 0.1 / 1.1
    assert steered(made)[1] == pytest.approx([alpha * math.exp(x) for x in (-0.1, 0.1, 0.1)], rel=1e-5)


def test_on_policy_it_is_reinforce_with_that_advantage() -> None:
    made = tempered(ragged())
    with torch.no_grad():
        made = made.with_columns(logp=Tabular().score(made)["logp"])
    made = made.with_columns(advantage=entropy_steered()({"entropy": 0.0}, made)[1].double())
    assert len(values_of(made, "advantage")) > len(values_of(made, "episode")), "tokens of one answer differ"
    method = on_policy(surrogate=dcpo().surrogate, reduce=dcpo().reduce)
    plain = learner(Tabular(), on_policy()).gradient(made)["logits"]
    for micro in (10**9, 6):
        assert_same(learner(Tabular(), method, micro_tokens=micro).gradient(made)["logits"], plain)


def test_what_it_remembers_is_saved(tmp_path: Path) -> None:
    """A run that stopped before its last step goes on bit for bit, which the entropy of the one before decides."""
    small = {
        "world.low": 10,
        "world.high": 20,
        "sample.prompts": 2,
        "sample.group": 4,
        "reward.name": "formed",
    }
    small |= {"run.held_out": 4, "update.lr": 1e-3, "run.checkpoint_every": 1, "run.keep": 9}
    whole = bare(tmp_path / "run", "dcpo", settings=small, model="start", world="manyanswers", steps=3)
    logged = metrics(whole.run)
    shutil.rmtree(whole.run / "checkpoints" / "step-0000003")
    (whole.run / "result.json").unlink()
    assert resume(whole.run).fingerprint == whole.fingerprint
    assert metrics(whole.run) == logged


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"credit.hot": 0.9}, "both would push one way"),
        ({"credit.cold": 1.1}, "both would push one way"),
        ({"credit.shape": False, "credit.hot": 1.5}, "shape is false"),
        ({"credit.most": 0.0, "credit.target": 0.5}, "most is 0"),
        ({"credit.target": -1.0}, "at least 0"),
        ({"credit.most": 2.0}, "from 0 to 1"),
    ],
)
def test_refusals(settings: dict[str, object], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        pp.plan("dcpo", "manyanswers", settings=settings)
