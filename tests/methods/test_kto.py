"""KTO as published."""

from __future__ import annotations

import torch
from kit import Slow, Tabular, assert_same, gradient, learner, ragged, values_of
from papers import ZERO, total

from panoply.compose import assign
from panoply.experience import Experience
from panoply.methods.base.kto import kto

REF = "logp@reference"


def labelled() -> Experience:
    """Ten episodes: every third is a mismatched one, and the others are desirable or not in turn."""
    made = ragged(drift=0.5)
    place = made.by("episode").index
    return made.with_columns(label=torch.tensor([1, -1, 0, -1, 1, 0, 1, 1, 0, -1])[place])


def test_gradient_is_the_papers() -> None:
    """Equations 7 and 8 of arXiv 2402.01306; z₀ carries no gradient."""
    made, slow = labelled(), Slow()
    label = dict(
        zip(values_of(made, "episode"), made.by("episode").first(made["label"]).tolist(), strict=True)
    )
    wrong = [float(total(made, slow, e, REF).detach()) for e, kind in label.items() if kind == 0]
    baseline = max(0.0, sum(wrong) / len(wrong))
    assert baseline > 0
    loss = ZERO
    for e, kind in label.items():
        value = torch.sigmoid(0.1 * kind * (total(made, slow, e, REF) - baseline))
        weight = {1: 1.2, -1: 0.9, 0: 0.0}[kind]
        loss = loss + weight * (1 - value) / sum(k != 0 for k in label.values())
    method = assign(assign(kto(), "losses.prospect.desirable", 1.2), "losses.prospect.undesirable", 0.9)
    found = gradient(method, made)  # type: ignore[arg-type]
    assert_same(found, slow.gradient(loss))
    assert_same(gradient(method, made, micro_tokens=1), found)  # type: ignore[arg-type]


def test_mismatched_answers_are_scored_once() -> None:
    """They are in the pass that finds z₀, and not in the one with gradients."""
    made, policy = labelled(), Tabular()
    learner(policy, kto()).gradient(made)
    assert policy.scored == [len(made), int((made["label"] != 0).sum())]


def test_at_the_reference_it_is_a_quarter_of_imitation() -> None:
    """ℓ = z₀ = 0: the slope of σ is ¼, so the gradient is β/4 of each log-probability, up or down."""
    made, slow = labelled(), Slow()
    with torch.no_grad():
        logp = torch.stack(
            [slow.logp(s, a) for s, a in zip(made["state"].tolist(), made["action"].tolist(), strict=True)]
        )
    made = made.with_columns(**{REF: logp})
    loss = ZERO
    for e, kind in zip(
        values_of(made, "episode"), made.by("episode").first(made["label"]).tolist(), strict=True
    ):
        loss = loss - kind * 0.1 / 4 * total(made, slow, e) / 7
    assert_same(gradient(kto(), made), slow.gradient(loss))
