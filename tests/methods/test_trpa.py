"""TRPA: levels by rules, pairs across them, two different anchors, and what is left without a pair."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kit import Slow, Tabular, assert_same, batch, gradient, hand, learner, ragged, rows_of, shuffled, slopes
from papers import ZERO, groups_of, length, returns_of, total
from torch import Tensor

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.objectives.trpa import anisotropic, levelled, root_kl, trpa, without_pairs
from panoply.slots.regularise.terms import kl


def answers(**columns: Any) -> Experience:
    """Answers of one token each, whose rewards nobody asks for."""
    rows = len(next(iter(columns.values())))
    return hand(**{"group": [0] * rows, "reward": [0.0] * rows, **columns})


def pairs_of(experience: Experience) -> set[tuple[int, int]]:
    assert experience.pairs is not None
    chosen, rejected = (experience.pairs.tensor(side).tolist() for side in ("chosen", "rejected"))
    assert len(chosen) == len({*zip(chosen, rejected, strict=True)})
    return {*zip(chosen, rejected, strict=True)}


def with_levels(seed: int = 0) -> Experience:
    """Groups of several levels, and one of a single episode."""
    made = ragged(seed, drift=0.4).with_columns(**{"logp@old": ragged(seed + 1, drift=0.4)["logp"]})
    last = made.by("episode").is_last()
    return made.with_columns(
        **{
            "signal:ended": last * torch.where(made["episode"] % 4 == 3, 0.0, 1.0),
            "signal:success": last * torch.where(made["episode"] % 2 == 0, 1.0, 0.0),
        }
    )


# ------------------------------------------------------------------ levels and pairs


def test_levels_by_hand() -> None:
    """Format, completeness and answer as the release grades them: what is missed first decides, 1 is the best."""
    made = levelled(rules=("format", "complete", "success"))(
        answers(
            **{
                "signal:format": [1.0, 1.0, 1.0, 0.0, 0.0],
                "signal:complete": [1.0, 1.0, 0.0, 0.0, 1.0],
                "signal:success": [1.0, 0.0, 0.0, 0.0, 1.0],
            }
        )
    )
    assert made["level"].tolist() == [1, 2, 3, 4, 4]
    assert made["top"].tolist() == [True, False, False, False, False]
    assert pairs_of(made) == {(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4)}
    assert len(made) == 5


def test_a_rule_is_met_by_the_sum_over_an_episode() -> None:
    made = answers(**{"episode": [0, 0, 1, 1], "signal:proxy": [0.0, 0.8, 0.3, 0.4]})
    assert levelled(rules=("proxy",), least=0.75)(made)["level"].tolist() == [1, 1, 2, 2]
    assert levelled(rules=("proxy",), least=0.9)(made)["level"].tolist() == [2, 2, 2, 2]


def test_pairs_do_not_cross_prompts_and_one_level_makes_none() -> None:
    made = levelled(rules=("success",))(
        answers(**{"group": [0, 0, 1, 1, 2, 2], "signal:success": [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]})
    )
    assert pairs_of(made) == {(0, 1)}
    assert made["alone"].tolist() == [0] * 6


def test_without_rules_returns_are_levels_and_the_best_of_a_group_is_the_top() -> None:
    made = levelled(rules=())(answers(group=[0, 0, 0, 1, 1], reward=[3.0, 1.0, 2.0, -5.0, -6.0]))
    assert pairs_of(made) == {(0, 1), (0, 2), (2, 1), (3, 4)}
    assert made["top"].tolist() == [True, False, False, True, False]


def test_rows_may_stand_in_any_order() -> None:
    made = with_levels()
    assert pairs_of(levelled()(shuffled(made))) == pairs_of(levelled()(made))


# ------------------------------------------------------------------ the loss


def theirs(made: Experience, slow: Slow, beta: float = 0.1, kappa: float = 2.5) -> Tensor:
    """The release's equations, one pair after the other."""
    level = {r["episode"]: r["level"] for r in rows_of(made)}
    score = {e: total(made, slow, e, "logp@reference") / length(made, e) for e in level}
    found = [
        -torch.sigmoid((kappa if level[w] == 1 else 1.0) * beta * (score[w] - score[x])).log()
        for members in groups_of(made)
        for w in members
        for x in members
        if level[w] < level[x]
    ]
    assert len(found) == 8
    loss = sum(found, ZERO) / len(found)
    for row in rows_of(made):
        away = row["logp@old"] - slow.logp(row["state"], row["action"])
        loss = loss + 0.001 * (away.exp() - away - 1) / len(made)
    return loss


def test_gradient_is_the_releases() -> None:
    """Token means against the reference, and k3 of all tokens against another anchor, π_old."""
    made, slow = levelled()(with_levels()), Slow()
    assert set(made["level"].tolist()) == {1, 2, 3}
    expected = slow.gradient(theirs(made, slow))
    assert_same(gradient(trpa(), made), expected)
    assert_same(gradient(trpa(), shuffled(made), micro_tokens=1), expected)


def test_margins_by_hand() -> None:
    """ℓ are 1 and −1 on average over two tokens and one: −log σ(2.5·0.1·2) for the top, −log σ(0.1·2) for others."""
    made = hand(
        [(0, 1)], **{"episode": [0, 0, 1], "logp@reference": [-2.0, -3.0, -1.0], "top": [True, True, False]}
    )
    now = batch(made, logp=[-1.5, -1.5, -2.0])
    value, stats = anisotropic()(now)
    assert value.tolist() == pytest.approx([math.log1p(math.exp(-0.5))])
    assert stats["margin"].tolist() == pytest.approx([0.5])
    pull = -0.25 / (1 + math.exp(0.5))
    assert slopes(value, now.now["logp"]) == pytest.approx([pull / 2, pull / 2, -pull])
    lower = batch(made.with_columns(top=torch.tensor([False] * 3)), logp=[-1.5, -1.5, -2.0])
    assert anisotropic()(lower)[0].tolist() == pytest.approx([math.log1p(math.exp(-0.2))])


def test_a_batch_without_pairs_is_learned_from_one_by_one() -> None:
    """+ for the best level and − for others, without β; the mean is over episodes of any length."""
    made = with_levels()
    right = {e: e < 104 for e in returns_of(made)}
    mark = torch.tensor([right[e] for e in made["episode"].tolist()])
    signals = {n: made.by("episode").is_last() * mark.double() for n in ("signal:ended", "signal:success")}
    only = levelled()(
        made.with_columns(group=made["episode"], **signals)
    )  # every answer to a prompt of its own
    assert pairs_of(only) == set()
    slow, loss = Slow(), ZERO
    for e, good in right.items():
        side = (1 if good else -1) * total(only, slow, e, "logp@reference") / length(only, e)
        loss = loss - torch.sigmoid(side).log() / len(right)
    for row in rows_of(only):
        away = row["logp@old"] - slow.logp(row["state"], row["action"])
        loss = loss + 0.001 * (away.exp() - away - 1) / len(only)
    expected = slow.gradient(loss)
    assert_same(gradient(trpa(), only), expected)
    assert_same(gradient(trpa(), only, micro_tokens=1), expected)


def test_where_there_are_pairs_no_answer_is_learned_from_alone() -> None:
    made = levelled()(with_levels())
    value, stats = without_pairs()(batch(made, logp=[-1.0] * len(made)))
    assert not value.any()
    assert not stats["without_pairs"].any()


# ------------------------------------------------------------------ the trust region


def test_what_k3_follows_on_samples_of_the_old_policy() -> None:
    """All actions in their shares under π_old: the gradient is that of χ²(π_old‖π) − KL(π_old‖π)."""
    now = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-0.4, 0.6, 0.2, 0.0], dtype=torch.float64).log_softmax(0)
    made = batch(hand(**{"logp@old": old}), logp=[0.0] * 4)
    logp = now.log_softmax(0)
    value, _ = kl(weight=1.0, estimator="k3", to="old")(type(made)(made.experience, {"logp": logp}))
    (found,) = torch.autograd.grad((old.exp() * value).sum(), now, retain_graph=True)
    law = logp.exp()
    wanted = (old.exp() ** 2 / law).sum() - 1 - (old.exp() * (old - logp)).sum()
    (expected,) = torch.autograd.grad(wanted, now)
    assert_same(found, expected)


def test_the_root_is_of_a_mini_batchs_mean() -> None:
    """c·√(KL + ¼) with one KL for all rows, however they are split."""
    made, slow = levelled()(with_levels()), Slow()
    method = trpa().but(regularise=(root_kl(weight=0.7),), surrogate=trpa().surrogate.but(weight=1e-9))
    away = [r["logp@old"] - slow.logp(r["state"], r["action"]) for r in rows_of(made)]
    mean = sum(((x.exp() - x - 1) for x in away), ZERO) / len(away)
    expected = slow.gradient(0.7 * (mean + 0.25).sqrt())
    assert_same(gradient(method, made), expected)
    assert_same(gradient(method, made, micro_tokens=1), expected)


def test_a_kl_to_the_old_policy_without_a_second_update_is_refused() -> None:
    """Its gradient is 0 at π_old, which the authors' one update a batch never leaves before the gradient is taken."""
    made = levelled()(with_levels())
    with torch.no_grad():
        here = Tabular().score(made)["logp"]
    still = made.with_columns(**{"logp@old": here})
    bare = trpa().but(regularise=())
    torch.testing.assert_close(gradient(trpa(), still), gradient(bare, still), rtol=0, atol=1e-12)
    for change in ({"regularise.kl.weight": 0.1}, {"regularise.kl.estimator": "k2"}):
        with pytest.raises(PanoplyError, match="its gradient is 0"):
            pp.plan("trpa", "chain", settings={"update.minibatches": 1, **change})
    pp.plan("trpa", "chain", settings={"update.minibatches": 2, "regularise.kl.weight": 0.1})


def test_the_kl_term_bounds_the_drift_of_a_step() -> None:
    """Four updates on one batch move less, the larger its weight."""

    def drift(weight: float) -> float:
        policy = Tabular()
        made = levelled()(with_levels())
        with torch.no_grad():
            made = made.with_columns(**{"logp@old": policy.score(made)["logp"]})
        method = trpa().but(regularise=(kl(weight=weight, estimator="k3", to="old"),), update=STEP)
        found = learner(policy, method)
        for _ in range(20):
            found.step(made, 0)
        return float((policy.score(made)["logp"].detach() - made["logp@old"]).abs().mean())

    far, near, nearer = drift(0.001), drift(1.0), drift(10.0)
    assert far > 1.5 * near > 3 * nearer > 0


STEP = trpa().update.but(lr=0.05)


# ------------------------------------------------------------------ runs


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"select.levelled.rules": ("ended", "politeness")}, "politeness"),
        ({"surrogate.loss.anisotropy": 0.0}, "anisotropy"),
        ({"select.levelled.rules": (), "select.levelled.least": 2.0}, "ordered by reward"),
        ({"select": "best_worst"}, "column 'top'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        pp.plan("trpa", "chain", settings=settings)


def test_a_run_learns_levels(tmp_path: Path) -> None:
    settings = {"sample.prompts": 2, "sample.group": 4, "world.operations": 2, "run.held_out": 4}
    tiny.bare(tmp_path / "run", "trpa", model="fresh", steps=3, settings=settings)
    rows = tiny.metrics(tmp_path / "run")
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert any(row.get("margin") is not None or row.get("without_pairs") for row in rows)
    assert {"kl_old", "without_pairs"} <= rows[-1].keys()
