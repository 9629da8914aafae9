"""Own and a teacher's rows under one count: values by hand, gradients against a slow reference."""

from __future__ import annotations

import math

import pytest
import torch
from kit import (
    Slow,
    Tabular,
    assert_same,
    batch,
    gradient,
    hand,
    learner,
    on_policy,
    ragged,
    rows_of,
    shuffled,
    slopes,
)

from panoply.errors import PanoplyError
from panoply.experience import TEACHER, Experience
from panoply.planning import make_plan
from panoply.slots.surrogate.hybrid import hybrid
from panoply.slots.surrogate.ratios import clip

NAN = math.nan
SHAPED = {
    "probability": lambda p, old: p,
    "shaped": lambda p, old: p / (p + 0.1),
    "mixture": lambda p, old: 2 * p / (1.5 * old + 0.5),
}


@pytest.mark.parametrize(
    ("settings", "value", "slope"),
    [
        ({"shape": "probability"}, 0.4 * 3, 0.4 * 3),
        ({"shape": "shaped"}, 0.8 * 3, 0.8 * 0.2 * 3),  # p/(p + γ) = .8, and γp/(p + γ)² = .16
        ({"shape": "mixture"}, 1.0 * 3, 1.0 * 3),  # 2·.4/(1.5·.2 + .5)
        ({"shape": "probability", "focus": 2.0}, 0.4 * 3 * 0.36, 0.4 * 3 * 0.36),
    ],
)
def test_golden(settings: dict[str, object], value: float, slope: float) -> None:
    """An own row whose ratio is 1.5, and a teacher's of probability 0.4 which was 0.2."""
    old = {"logp@old": [math.log(0.5), math.log(0.2)]}
    made = hand(source=[0, TEACHER], advantage=[2.0, 3.0], logp=[math.log(0.4), NAN], **old)
    seen = batch(made, logp=[math.log(0.6), math.log(0.4)])
    found, stats = hybrid(own=clip(low=0.2, high=0.3), **settings)(seen)  # type: ignore[arg-type]
    assert found.tolist() == pytest.approx([2.6, value])
    assert slopes(found, seen.now["logp"]) == pytest.approx([0.0, slope])
    assert stats["clip_high"].tolist() == [True, False]


def taught() -> Experience:
    """Every third episode is a teacher's: nobody knows how likely it was."""
    made = ragged()
    theirs = made["episode"] % 3 == 0
    return made.with_columns(
        source=torch.where(theirs, TEACHER, 0),
        logp=made["logp"].masked_fill(theirs, NAN),
        **{"logp@old": made["logp@reference"]},
    )


@pytest.mark.parametrize("shape", SHAPED)
def test_one_count_divides_both_whatever_the_split(shape: str) -> None:
    made, slow, loss = taught(), Slow(), torch.zeros((), dtype=torch.float64)
    for row in rows_of(made):
        logp = slow.logp(row["state"], row["action"])
        if row["source"] == TEACHER:
            factor = SHAPED[shape](logp.exp(), math.exp(row["logp@old"]))
        else:
            factor = (logp - row["logp"]).exp()
        loss = loss - factor * row["advantage"] / len(made)
    wide = clip(low=1.0, high=100.0)
    method = on_policy(surrogate=hybrid(own=wide, shape=shape))  # type: ignore[arg-type]
    expected = slow.gradient(loss)
    for micro in (10**9, 3, 1):
        for rows in (made, shuffled(made)):
            assert_same(gradient(method, rows, micro_tokens=micro), expected)


def test_without_a_teacher_it_is_the_surrogate_of_own_rows() -> None:
    assert_same(
        gradient(on_policy(surrogate=hybrid()), ragged()), gradient(on_policy(surrogate=clip()), ragged())
    )
    assert learner(Tabular(), on_policy(surrogate=hybrid())).step(taught(), 0)["teacher_p"] > 0


def test_a_joint_term_takes_the_stream_that_a_sample_part_brings() -> None:
    plan = make_plan("chord", "chain", slots={"surrogate": hybrid()}, settings={"surrogate.gamma": 0.2})
    assert "teacher: p/(p + 0.2)·A" in " ".join(plan.method.equation())
    with pytest.raises(PanoplyError, match="gamma has no effect: no part brings a teacher's answers"):
        make_plan("grpo", "chain", slots={"surrogate": hybrid()}, settings={"surrogate.gamma": 0.2})
