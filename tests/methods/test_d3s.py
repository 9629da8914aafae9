"""D3S: the subset is the best there is, advantages stay as they are, tokens compete across episodes, shares grow."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path
from statistics import pvariance

import pytest
import tiny
import torch
from kit import Slow, assert_same, gradient, hand, ragged, rows_of, shuffled
from papers import ZERO, standardised

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.reasoning_data.d3s import d3s, down_sampled, most_varied
from panoply.slots.credit.groups import group
from panoply.slots.schedule.schedules import ramp


def test_rows_equal_brute_force() -> None:
    """300 random cases, many with ties: no subset of that size has a larger variance."""
    dice = random.Random(0)
    for case in range(300):
        number = dice.randint(1, 8)
        size = dice.randint(1, number)
        whole = case % 2 == 0
        values = [float(dice.randint(-2, 2)) if whole else dice.gauss(0, 1) for _ in range(number)]
        kept = most_varied(torch.tensor(values), size)
        assert int(kept.sum()) == size
        found = pvariance([v for v, k in zip(values, kept.tolist(), strict=True) if k])
        best = max(pvariance(some) for some in combinations(values, size))
        assert found == pytest.approx(best, abs=1e-6), (values, size)


def test_golden_rows() -> None:
    """Of −2, −1, 0, 0, 1, 3 the three that vary most are −2, −1 and 3; of ±1 one more of the large is taken."""
    assert most_varied(torch.tensor([0.0, 3.0, -1.0, 0.0, 1.0, -2.0]), 3).tolist() == [0, 1, 1, 0, 0, 1]
    assert most_varied(torch.tensor([-1.0, 1.0, -1.0, 1.0]), 3).tolist() == [0, 1, 1, 1]
    assert most_varied(torch.zeros(3), 2).tolist() == [0, 1, 1], "all alike: whichever"


ENTROPY = torch.tensor([0.1, 0.9, 0.2, 0.8, 0.3, 0.7, 0.4, 0.6], dtype=torch.float64)


def asked(rewards: tuple[float, ...] = (1.0, 0.0, 1.0, 1.0)) -> Experience:
    """Two groups of two answers of two tokens each; the second group earned the same."""
    reward = [x for r in rewards for x in (0.0, r)]
    return hand(group=[0] * 4 + [1] * 4, episode=[0, 0, 1, 1, 2, 2, 3, 3], reward=reward, entropy=ENTROPY)


def test_groups_that_say_nothing_drop_out_and_advantages_stay() -> None:
    made = asked()
    found = down_sampled(rows=0.5, tokens=1.0)(made)
    assert found["train"].tolist() == [True] * 4 + [False] * 4
    assert torch.equal(found["advantage"], group()(made)), "never normalised again"
    inside = down_sampled(rows=0.5, tokens=1.0, among="group")(made)["train"]
    assert inside.view(2, 4).sum(1).tolist() == [2, 2], "one of two in each group"


def test_tokens_compete_across_episodes() -> None:
    """|A| is the same for all, so half of four tokens are the two most uncertain: both second ones."""
    found = down_sampled(rows=0.5, tokens=0.5)(asked())["train"]
    assert found.tolist() == [False, True, False, True] + [False] * 4
    one = down_sampled(rows=0.5, tokens=0.25)(asked())["train"]
    assert one.nonzero().flatten().tolist() == [1]
    weighed = down_sampled(credit=group(baseline="none", scale="none"), rows=1.0, tokens=0.25)
    made = hand(group=[0] * 4, episode=[0, 0, 1, 1], reward=[0.0, 9.0, 0.0, -1.0], entropy=ENTROPY[:4])
    assert weighed(made)["train"].tolist() == [False, True, False, False], "|A|·H, and not H alone"
    sure = made.with_columns(entropy=torch.tensor([0.0, 0.01, 0.0, 0.8]))
    assert weighed(sure)["train"].tolist() == [False, False, False, True], "nor |A| alone"


def test_by_lot_takes_as_many() -> None:
    made = ragged()
    made = made.with_columns(entropy=torch.rand(len(made), generator=torch.Generator().manual_seed(0)))
    lot, best = (down_sampled(rows=0.5, tokens=0.5, by=by)(made)["train"] for by in ("lot", "variance"))
    episodes = made.by("episode")
    assert int((episodes.sum(lot) > 0).sum()) <= 5
    assert not torch.equal(lot, best)
    assert torch.equal(lot, down_sampled(rows=0.5, tokens=0.5, by="lot")(made)["train"])


@pytest.mark.parametrize("micro", [4, 10**9])
def test_gradient_is_the_papers_in_any_order_and_split(micro: int) -> None:
    """The clipped surrogate summed over T and divided by |T|, with the advantages of all."""
    dice = torch.Generator().manual_seed(1)
    made = ragged(drift=0.4)
    made = made.with_columns(entropy=torch.rand(len(made), generator=dice), position=torch.arange(len(made)))
    method = d3s().but(credit=down_sampled(rows=0.5, tokens=0.4), regularise=())
    advantage, slow, loss = standardised(made, 1e-4), Slow(), ZERO
    best = max(combinations(sorted(advantage), 5), key=lambda some: pvariance([advantage[e] for e in some]))
    tokens = [row for e in best for row in rows_of(made, episode=e)]
    tokens.sort(key=lambda row: -abs(advantage[row["episode"]]) * row["entropy"])
    kept = tokens[: round(0.4 * len(tokens))]
    for row in kept:
        rho = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
        a = advantage[row["episode"]]
        loss = loss - torch.minimum(rho * a, rho.clamp(0.8, 1.2) * a) / len(kept)
    expected = slow.gradient(loss)
    for rows in (made, shuffled(made)):
        assert_same(
            gradient(method, rows.with_columns(**method.credit(rows)), micro_tokens=micro), expected, 1e-5
        )


def test_shares_grow_in_a_line_over_the_budget() -> None:
    assert [ramp(first=0.25, last=1.0)(step, 4) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert ramp(first=0.25, last=1.0)(0, 1) == 0.25


def test_a_run_fills_schedules_in(tmp_path: Path) -> None:
    """A quarter of the answers learns in the first step and all of them in the last; what learns is counted."""
    settings = {"sample.prompts": 2, "sample.group": 4, "run.held_out": 2}
    settings |= {"reward.name": "steps", "credit.credit.baseline": "none", "credit.credit.scale": "none"}
    tiny.bare(tmp_path, "d3s", steps=3, settings={**settings, "credit.tokens": 1.0})
    shares = [row["trained"] / row["decisions"] for row in tiny.metrics(tmp_path)]
    assert shares == pytest.approx([2 / 8, 5 / 8, 1.0], abs=0.01)


def test_what_cannot_be_is_refused() -> None:
    for settings, why in (
        ({"credit.rows": 0.0}, "above 0"),
        ({"credit.tokens.last": 1.5}, "a share is above 0 and at most 1, and this comes to 1.5"),
        ({"credit.rows.first": 0.0}, "this comes to 0"),
    ):
        with pytest.raises(PanoplyError, match=why):
            pp.plan("d3s", "chain", settings=settings)
